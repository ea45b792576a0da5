"""Peers in processes of their own: environment, weights in their form, and a worker each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specgym.engine.cache_folder import cache_folder
from specgym.engine.pools.checkpoints import quiet_transformers
from specgym.engine.pools.sources import SMOLLM2, SMOLLM2_WHEEL
from specgym.runs.peers.contestants import Contestant, Prompt
from specgym.runs.peers.environments import RECIPES, PeerError, PeerRecipe, build_environment
from specgym.runs.peers.gguf import write_gguf
from specgym.runs.peers.process import PeerProcess

SCRIPT = Path(__file__).with_name("worker.py")
CONTEXT_ROUNDING = 256
PRELOADED = {  # libraries that a peer's own guide wants loaded first, where they are installed
    "vllm": ("lib/libiomp5.so",),
}


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """What the workers of one bench share.

    Attributes:
        source: Of the target's weights, as a pool names it.
        model: The target, as transformers loads it.
        longest: Most tokens of a prompt and its continuation.
        new_tokens: Tokens per prompt.
        scratch: A folder for weights.
    """

    source: str
    model: Any
    longest: int
    new_tokens: int
    scratch: Path

    @property
    def precision(self) -> str:
        """The weights' type by name."""
        return str(self.model.dtype).removeprefix("torch.")


def start_workers(
    names: Sequence[str],
    settings: WorkerSettings,
    report: dict[str, Any],
    stack: contextlib.ExitStack,
    console: Console,
) -> list[Contestant]:
    """Contestants of the peers that can be had; the report gets versions, and why others cannot.

    Args:
        names: Of ``RECIPES``.
        settings: What they share.
        report: Its ``versions`` and ``absent`` are filled in.
        stack: Ends the workers.
        console: Shows progress.
    """
    contestants = []
    for name in names:
        try:
            python = build_environment(RECIPES[name], console)
            weights = weights_for(name, settings)
        except (PeerError, ValueError) as error:
            report["absent"][name] = str(error)
            continue
        for title, precision, path in weights:
            console.print(f"starting {title}")
            try:
                worker = start_worker(name, python, path, settings)
            except PeerError as error:
                report["absent"][title] = str(error)
                continue
            stack.callback(worker.close)
            report["versions"][name] = worker.version
            contestants.append(contestant(title, name, precision, worker, settings.new_tokens))
    return contestants


def weights_for(name: str, settings: WorkerSettings) -> list[tuple[str, str, Path]]:
    """Title, precision and path of each set of weights that a peer decodes with.

    Raises:
        ValueError: If the model cannot be written in the peer's form.
    """
    if name != "llama-cpp":
        folder = settings.scratch / name
        with quiet_transformers(bars=False):
            settings.model.save_pretrained(folder)
        return [(f"{name}, plain", settings.precision, folder)]
    file = settings.scratch / f"{name}.gguf"
    write_gguf(settings.model, file, torch.bfloat16)
    weights = [(f"{name}, bf16", "bfloat16", file)]
    quantised = cache_folder() / Path(SMOLLM2_WHEEL.member).name
    if settings.source == SMOLLM2 and quantised.is_file():  # what the built-in model was made from
        weights.append((f"{name}, Q4_1", "Q4_1", quantised))
    return weights


def start_worker(name: str, python: Path, weights: Path, settings: WorkerSettings) -> PeerProcess:
    """A peer's worker, loaded, with as many threads as PyTorch has here.

    Raises:
        PeerError: If it does not start.
    """
    threads = str(torch.get_num_threads())
    context = math.ceil(settings.longest / CONTEXT_ROUNDING) * CONTEXT_ROUNDING
    command = [str(python), "-I", str(SCRIPT), name, str(weights), "--dtype", settings.precision]
    command += ["--threads", threads, "--context", str(context)]
    variables = {"OMP_NUM_THREADS": threads, **preloading(RECIPES[name])}
    logs = RECIPES[name].folder.parent  # they outlive the bench
    logs.mkdir(parents=True, exist_ok=True)
    return PeerProcess(command, logs / f"{weights.name}.log", variables)


def preloading(recipe: PeerRecipe) -> dict[str, str]:
    """The environment variable that has a peer's own libraries loaded first; none without them."""
    patterns = PRELOADED.get(recipe.name, ())
    found = [str(path) for pattern in patterns for path in sorted(recipe.folder.glob(pattern))[:1]]
    if not found:
        return {}
    return {"LD_PRELOAD": ":".join([*found, *filter(None, [os.environ.get("LD_PRELOAD")])])}


def contestant(
    title: str, name: str, precision: str, worker: PeerProcess, new_tokens: int
) -> Contestant:
    """A worker as one that decodes prompts."""

    def decode(prompt: Prompt) -> tuple[list[int], float]:
        return worker.run(prompt, new_tokens)

    return Contestant(title, name, precision, decode)
