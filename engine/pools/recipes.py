"""Recipes: the pools of the papers, by hub id."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from specgym.engine.pools.deepseek import DeepseekConfig
from specgym.engine.pools.recipe import PoolRecipe, RecipeMember

SPECROUTER = "SpecRouter (arXiv 2505.07680)"
CASCADE = "Cascade (arXiv 2506.20675)"


def split_recipe(spec: str) -> tuple[PoolRecipe, str] | None:
    """The recipe that ``NAME`` or ``NAME:member=PATH`` means, and its changes; None for others."""
    name, _, changes = spec.partition(":")
    return (RECIPES[name], changes) if name in RECIPES else None


def llama_rope(factor: float) -> dict[str, Any]:
    """The rotary parameters that Llama 3.1 and 3.2 publish."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }


def sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int], context: int
) -> dict[str, Any]:
    """Entries that all decoders share; heads are query and key-value heads."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }


TIED = {"tie_word_embeddings": True}
STAGED_CHAINS = (
    ("ngram", "target"),
    ("small", "target"),
    ("mid", "target"),
    ("ngram", "mid", "target"),
    ("small", "mid", "target"),
)
LOOKUP_CHAINS = (("ngram", "target"),)

LLAMA_2 = PoolRecipe(
    "llama-2",
    {
        "small": RecipeMember(
            "JackFram/llama-68m",
            LlamaConfig,
            sizes(32000, 768, 3072, 2, (12, 12), 2048) | {"rms_norm_eps": 1e-6},
            "Apache-2.0",
            bytes_stored=4,
        ),
        "mid": RecipeMember(
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            LlamaConfig,
            sizes(32000, 2048, 5632, 22, (32, 4), 2048) | {"rms_norm_eps": 1e-5},
            "Apache-2.0",
        ),
        "target": RecipeMember(
            "meta-llama/Llama-2-7b-chat-hf",
            LlamaConfig,
            sizes(32000, 4096, 11008, 32, (32, 32), 4096) | {"rms_norm_eps": 1e-5},
            "Llama 2 Community",
            is_gated=True,
        ),
    },
    STAGED_CHAINS,
    SPECROUTER,
)
LLAMA_3 = PoolRecipe(
    "llama-3",
    {
        "small": RecipeMember(
            "meta-llama/Llama-3.2-1B-Instruct",
            LlamaConfig,
            sizes(128256, 2048, 8192, 16, (32, 8), 131072)
            | TIED
            | {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_parameters": llama_rope(32.0)},
            "Llama 3.2 Community",
            is_gated=True,
        ),
        "mid": RecipeMember(
            "meta-llama/Llama-3.2-3B-Instruct",
            LlamaConfig,
            sizes(128256, 3072, 8192, 28, (24, 8), 131072)
            | TIED
            | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": llama_rope(32.0)},
            "Llama 3.2 Community",
            is_gated=True,
        ),
        "target": RecipeMember(
            "meta-llama/Llama-3.1-8B-Instruct",
            LlamaConfig,
            sizes(128256, 4096, 14336, 32, (32, 8), 131072)
            | {"rms_norm_eps": 1e-5, "rope_parameters": llama_rope(8.0)},
            "Llama 3.1 Community",
            is_gated=True,
        ),
    },
    STAGED_CHAINS,
    f"three sizes of one family, as in {SPECROUTER}",
)
QWEN3 = PoolRecipe(
    "qwen3",
    {
        "small": RecipeMember(
            "Qwen/Qwen3-0.6B",
            Qwen3Config,
            sizes(151936, 1024, 3072, 28, (16, 8), 40960) | TIED | {"head_dim": 128},
            "Apache-2.0",
            stores_tied_head=True,
        ),
        "mid": RecipeMember(
            "Qwen/Qwen3-4B",
            Qwen3Config,
            sizes(151936, 2560, 9728, 36, (32, 8), 40960) | TIED | {"head_dim": 128},
            "Apache-2.0",
        ),
        "target": RecipeMember(
            "Qwen/Qwen3-30B-A3B",
            Qwen3MoeConfig,
            sizes(151936, 2048, 6144, 48, (32, 4), 40960)
            | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
            | {"moe_intermediate_size": 768, "norm_topk_prob": True},
            "Apache-2.0",
        ),
    },
    STAGED_CHAINS,
    f"three sizes of one family, as in {SPECROUTER}",
)
MIXTRAL = PoolRecipe(
    "mixtral",
    {
        "eagle": RecipeMember(
            "yuhuili/EAGLE-mixtral-instruct-8x7B",
            LlamaConfig,
            sizes(32000, 4096, 14336, 1, (32, 32), 4096) | {"rms_norm_eps": 1e-6},
            "Apache-2.0",
            kind="eagle",
        ),
        "target": RecipeMember(
            "mistralai/Mixtral-8x7B-Instruct-v0.1",
            MixtralConfig,
            sizes(32000, 4096, 14336, 32, (32, 8), 32768)
            | {"num_local_experts": 8, "num_experts_per_tok": 2},
            "Apache-2.0",
        ),
    },
    (*LOOKUP_CHAINS, ("eagle", "target")),
    CASCADE,
)
# Its published rotary factors (LongRoPE) shape nothing, so they are not written down here.
PHI = RecipeMember(
    "microsoft/Phi-3.5-MoE-instruct",
    PhimoeConfig,
    sizes(32064, 4096, 6400, 32, (32, 8), 131072)
    | {"num_local_experts": 16, "num_experts_per_tok": 2}
    | {"attention_bias": True, "lm_head_bias": True},
    "MIT",
)
OLMOE = RecipeMember(
    "allenai/OLMoE-1B-7B-0924-Instruct",
    OlmoeConfig,
    sizes(50304, 2048, 1024, 16, (16, 16), 4096) | {"num_experts": 64, "num_experts_per_tok": 8},
    "Apache-2.0",
)
DEEPSEEK = RecipeMember(
    "deepseek-ai/deepseek-moe-16b-chat",
    DeepseekConfig,
    sizes(102400, 2048, 10944, 28, (16, 16), 4096)
    | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "DeepSeek Model Agreement",
)
QWEN_MOE = RecipeMember(
    "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    Qwen2MoeConfig,
    sizes(151936, 2048, 5632, 24, (16, 16), 32768)
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_experts": 60, "num_experts_per_tok": 4},
    "Tongyi Qianwen",
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        LLAMA_2,
        LLAMA_3,
        QWEN3,
        MIXTRAL,
        PoolRecipe("phi-3.5-moe", {"target": PHI}, LOOKUP_CHAINS, CASCADE),
        PoolRecipe("olmoe", {"target": OLMOE}, LOOKUP_CHAINS, CASCADE),
        PoolRecipe("deepseek-moe", {"target": DEEPSEEK}, LOOKUP_CHAINS, CASCADE),
        PoolRecipe("qwen1.5-moe", {"target": QWEN_MOE}, LOOKUP_CHAINS, CASCADE),
    )
}
