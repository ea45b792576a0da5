"""Every architecture of the table: lossless on tiny random models, as `docs/architectures.md` says.

`make architectures` runs these tests and writes the page from what passed.
"""

import functools
import itertools
import pathlib
import random

import pytest
import torch
import transformers

from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, random_plans
from specgym.engine.types import DecodeRequest, Plan

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "architectures.md"
INTRODUCTION = """# Architectures

Written by `make architectures` from tests on tiny random models
(`tests/engine/forward/test_architectures.py`): a cell says yes when its test passed, and has a
dash where there is nothing to test. Others of transformers may work too.

- *forward*: lean is one function per layer with fused linears, hooked is transformers' own.
- *plain*: plain decoding gives the tokens of transformers' greedy `generate`, fp32.
- *chains*: so does every chain with a random K at every step, in exact and in fast mode.
- *window*: both hold when the text grows past a sliding window's edge.
- *LongRoPE*: both hold when it crosses the border where LongRoPE changes its factors; a request
  has the factors of its full length from the start, so the reference is transformers' greedy
  decoding without a cache under those.
- *batch*: rows that accept different lengths give the tokens they give alone, fp32.
- *bf16*: in exact mode, any plans give plain decoding's tokens and keys and values, bit for bit.

Refused when the pool is built, with the reason (`tests/engine/test_refusals.py`): recurrent,
convolutional and linear-attention states, which cannot be rolled back (Mamba, RWKV, xLSTM,
Falcon-H1, Qwen3-Next, Jamba, Bamba, Zamba2, RecurrentGemma, LFM2, MiniMax, Kimi Linear, ...);
chunked or indexed attention (Llama 4); positions counted by cache slot (ALiBi, GPT-Neo's local
windows); dynamic rotary scaling; models without a cache. Quantised weights go through the hooked
forward; a GGUF file is dequantised when it is loaded.

"""
COLUMNS = ("architecture", "forward", "plain", "chains", "window", "LongRoPE", "batch", "bf16")
VOCAB, BUDGET, WINDOW, BORDER = 61, 24, 16, 20
PROMPT = (17, 3, 44, 8, 25, 17, 3, 51, 30)
CHAINS = (("ngram", "target"), ("draft", "target"), ("ngram", "draft", "target"))
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None}
LOCAL = COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
LATENT = COMMON | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ARCHITECTURES = {
    "Llama": ("LlamaConfig", COMMON),
    "Mistral": ("MistralConfig", COMMON | {"sliding_window": None}),
    "Qwen2": ("Qwen2Config", COMMON),
    "Qwen3": ("Qwen3Config", COMMON | {"head_dim": 8}),
    "Gemma 3": ("Gemma3TextConfig", COMMON | MIXED | {"query_pre_attn_scalar": 8}),
    "Phi-3": ("Phi3Config", COMMON),
    "GPT-2": ("GPT2Config", GPT2),
    "Mixtral": ("MixtralConfig", LOCAL | {"head_dim": 8}),
    "OLMoE": ("OlmoeConfig", EXPERTS),
    "Qwen2-MoE": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "PhiMoE": ("PhimoeConfig", LOCAL),
    "DeepSeek-V2": ("DeepseekV2Config", LATENT),
    "DeepSeek-V3": ("DeepseekV3Config", LATENT),
    "gpt-oss": ("GptOssConfig", LOCAL | MIXED | PLAIN_ROPE),
}
LEAN = {"Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "OLMoE", "Qwen2-MoE", "Qwen3-MoE"}
SHORT_WINDOW = {"sliding_window": WINDOW}
SWITCHED_ON = SHORT_WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
WINDOWS = dict.fromkeys(
    ("Mistral", "Gemma 3", "Phi-3", "Mixtral", "PhiMoE", "gpt-oss"), SHORT_WINDOW
) | dict.fromkeys(("Qwen2", "Qwen3", "Qwen2-MoE", "Qwen3-MoE"), SWITCHED_ON)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
    "factor": 4.0,
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": BORDER,
}
LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER}
VARIANTS = {
    "plain": {name: {} for name in ARCHITECTURES},
    "window": WINDOWS,
    "LongRoPE": dict.fromkeys((*sorted(LEAN), "Phi-3", "PhiMoE"), LONG),
}
CASES = [(name, variant) for variant, names in VARIANTS.items() for name in names]
HARDEST = [(name, "window" if name in WINDOWS else "plain") for name in ARCHITECTURES]


def build(name, variant, dtype=torch.float32):
    """A random model."""
    config_name, options = ARCHITECTURES[name]
    config = getattr(transformers, config_name)(**options | VARIANTS[variant][name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for key, value in model.named_parameters():
            if "experts." in key or ".gate." in key or ".router." in key:  # some are left empty
                value.data.normal_(0.0, 0.2)
    return model.to(dtype).eval().requires_grad_(False)


@functools.cache
def pool_of(name, variant, dtype=torch.float32, compiled=True):
    """Prompt lookup, a perturbed twin on transformers' own forward, and the model."""
    model = build(name, variant)
    draft = ModelMember("draft", perturbed(model, 0.1, 1).to(dtype), lean=False)
    target = ModelMember("target", model.to(dtype), compiled=compiled)
    return ModelPool([NGramMember(), draft, target], chains=CHAINS)


def pools_of(name, variant, dtype=torch.float32):
    """A pool for each forward of ours that the architecture has, or one without."""
    forms = (True, False) if is_compiled(name, variant) else (True,)
    return [pool_of(name, variant, dtype, compiled) for compiled in forms]


def is_compiled(name, variant):
    """LongRoPE's factors are chosen per request: the compiled forward has one table."""
    return name in LEAN and variant != "LongRoPE"


@functools.cache
def expected_tokens(name, variant):
    """Transformers' own greedy tokens after the prompt."""
    model = build(name, variant)
    if variant == "LongRoPE":  # every step over the full length, which sets the factors
        text = torch.tensor([[*PROMPT, *[0] * BUDGET]])
        for place in range(len(PROMPT), text.shape[1]):
            text[0, place] = model(text, use_cache=False).logits[0, place - 1].argmax()
        return text[0, len(PROMPT) :].tolist()
    output = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=BUDGET,
        pad_token_id=0,
    )
    return output[0, len(PROMPT) :].tolist()


def applicable(name):
    """The cells of an architecture's row when all is well."""
    has = {"forward": "lean" if name in LEAN else "hooked"}
    has |= {column: "-" for column, names in VARIANTS.items() if name not in names}
    return [name, *(has.get(column, "yes") for column in COLUMNS[1:])]


def found(row, passed):
    """The cells of a row as they were found, after its name."""
    cells = zip(row[1:], COLUMNS[1:], strict=True)
    return [
        cell if cell == "-" or (row[0], column) in passed else "**no**" for cell, column in cells
    ]


def render(rows):
    """The page."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return INTRODUCTION + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


@pytest.fixture(scope="module")
def passed():
    """Cells (architecture, column) whose tests passed."""
    return set()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_plain_decoding_is_transformers_greedy(name, variant, passed):
    expected = expected_tokens(name, variant)
    assert len(expected) == BUDGET
    assert len(set(expected)) > 2
    for pool in pools_of(name, variant):
        for exact in (True, False):
            state, _ = decode(pool, [DecodeRequest(PROMPT, BUDGET)], exact=exact)
            assert state.output() == expected
    compiled, *fused = (pool.model("target") for pool in pools_of(name, variant))
    assert (compiled.compiled is not None) == is_compiled(name, variant)
    assert (compiled.lean is not None) == (name in LEAN and not is_compiled(name, variant))
    assert all(member.compiled is None and member.lean is not None for member in fused)
    passed |= {(name, "forward"), (name, "plain")} if variant == "plain" else set()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_chain_with_any_k_is_plain_decoding(name, variant, passed):
    for pool in pools_of(name, variant):
        rng, tried = random.Random(0), []
        for chain, exact in itertools.product(pool.chains, (True, False)):
            state, results = decode(
                pool,
                [DecodeRequest(PROMPT, BUDGET)],
                lambda state: Plan(chain, rng.choice(pool.k_values)),  # noqa: B023
                exact=exact,
            )
            assert state.output() == expected_tokens(name, variant)
            tried += results
        assert any(result.num_accepted for result in tried)
        assert any(result.num_drafted > result.num_accepted for result in tried)
    passed.add((name, "chains" if variant == "plain" else variant))


@pytest.mark.parametrize(("name", "variant"), HARDEST)
def test_a_batch_with_holes_decodes_each_row_as_if_alone(name, variant, passed):
    requests = [DecodeRequest(PROMPT[start:], BUDGET) for start in (0, 3, 8)]
    for pool in pools_of(name, variant):
        alone = [decode(pool, [each])[0].output() for each in requests[1:]]
        state, results = decode(pool, requests, random_plans(pool, 2))
        outputs = [state.output(row) for row in range(3)]
        assert outputs == [expected_tokens(name, variant), *alone]
        assert any(result.num_drafted > result.num_accepted for result in results)
    passed.add((name, "batch"))


@pytest.mark.parametrize(("name", "variant"), HARDEST)
def test_bf16_in_exact_mode_gives_the_same_bits_under_any_plans(name, variant, passed):
    held = len(PROMPT) + BUDGET - 1
    pools = pools_of(name, variant, torch.bfloat16)
    for pool, seed in itertools.product(pools, range(2)):
        plain, _ = decode(pool, [DecodeRequest(PROMPT, BUDGET)])
        state, _ = decode(pool, [DecodeRequest(PROMPT, BUDGET)], random_plans(pool, seed))
        assert state.output() == plain.output()
        memories = [each.memories["target"].buffers for each in (state, plain)]
        for ours, theirs in zip(*memories, strict=True):
            for a, b in zip(ours.states(), theirs.states(), strict=True):
                assert torch.equal(a[:, :, :held], b[:, :, :held])
    passed.add((name, "bf16"))


def test_the_page_has_the_table_of_exactly_these_architectures(passed, request):
    """Last in this file: with `--write-docs` it writes the page from the tests before it."""
    rows = [applicable(name) for name in ARCHITECTURES]
    if request.config.getoption("--write-docs"):
        PAGE.write_text(render([[row[0], *found(row, passed)] for row in rows]))
    assert PAGE.read_text() == render(rows)
