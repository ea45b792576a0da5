"""Kernels change speed only: the same numbers as transformers' and torch's own."""

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specgym.engine.forward.lean_families import is_lean
from specgym.engine.forward.lean_llama import fuse, rotate, rotation
from specgym.engine.members.model import ModelMember
from specgym.engine.testing import tiny_llama

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
VARIANTS = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-groups": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 16},
    "scaled-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = MIXTURE | {"shared_expert_intermediate_size": 48}
SLIDING = {"sliding_window": 12, "use_sliding_window": True}
FAMILIES = {  # class, options
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 12, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed": ("Qwen2", SLIDING | {"max_window_layers": 1}),
    "qwen2-sliding": ("Qwen2", SLIDING | {"max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3-mixed": ("Qwen3", SLIDING | {"head_dim": 8, "max_window_layers": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 4, "sliding_window": 12}),
    "olmoe": ("Olmoe", MIXTURE),
    "olmoe-normalised": ("Olmoe", MIXTURE | {"norm_topk_prob": True}),
    "olmoe-clipped": ("Olmoe", MIXTURE | {"clip_qkv": 0.7, "attention_bias": True}),
    "qwen2-moe": ("Qwen2Moe", SHARED),
    "qwen2-moe-normalised": ("Qwen2Moe", SHARED | {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2-moe-mixed": ("Qwen2Moe", SHARED | SLIDING),
    "qwen2-moe-some-dense": ("Qwen2Moe", SHARED | {"decoder_sparse_step": 2}),
    "qwen3-moe": ("Qwen3Moe", MIXTURE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-sliding": ("Qwen3Moe", MIXTURE | SLIDING | {"head_dim": 8}),
    "qwen3-moe-some-dense": ("Qwen3Moe", MIXTURE | {"head_dim": 8, "mlp_only_layers": [1]}),
}


def build(variant, dtype=torch.float32):
    """A random model whose biases, norms and experts are no defaults."""
    family, options = FAMILIES.get(variant) or ("Llama", VARIANTS[variant])
    config = getattr(transformers, f"{family}Config")(**BASE | options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.data += 0.1 * torch.randn_like(weight)
            elif "experts." in name or ".gate." in name:
                weight.data.normal_(0.0, 0.2)
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("form", ["compiled", "fused"])
@pytest.mark.parametrize("variant", [*VARIANTS, *FAMILIES])
def test_the_lean_forward_gives_the_logits_of_transformers(variant, form):
    """In fp32, to 1e-5 where logits are about 1; past the window's edge where there is one."""
    member = ModelMember("target", build(variant), compiled=form == "compiled")
    assert (member.compiled if form == "compiled" else member.lean) is not None
    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = build(variant)(tokens).logits
    memory = member.new_memory(2, 64)
    windows = [member.forward(memory, tokens[:, a:b].tolist()) for a, b in ((0, 30), (30, 40))]
    torch.testing.assert_close(torch.cat(windows, dim=1), expected, atol=1e-5, rtol=0)
    assert 0.2 < expected.std() < 5


@pytest.mark.parametrize("form", ["compiled", "fused", "hooked"])
def test_packed_members_give_the_logits_of_transformers_in_bfloat16(form):
    """bf16 rounds at other places; the two must agree as closely as bf16 agrees with fp32."""
    tokens = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(1))
    exact = build("grouped").float()(tokens).logits
    rounded = build("grouped", torch.bfloat16)(tokens).logits.float()
    options = {"lean": form != "hooked", "compiled": form == "compiled"}
    member = ModelMember("target", build("grouped", torch.bfloat16), **options)
    logits = member.forward(member.new_memory(1, 64), tokens.tolist()).float()
    scale = (rounded - exact).abs().mean()
    assert (logits - exact).abs().mean() < 1.5 * scale


def test_only_known_families_with_silu_and_plain_linears_are_lean():
    assert is_lean(tiny_llama())
    assert not is_lean(GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)))
    model = LlamaForCausalLM(LlamaConfig(**BASE, hidden_act="gelu"))
    assert not is_lean(model)
    member = ModelMember("target", model)
    assert member.lean is None
    assert member.compiled is None


@pytest.mark.parametrize("bias", [True, False])
def test_fused_linears_stand_side_by_side(bias):
    torch.manual_seed(0)
    layers = [nn.Linear(16, size, bias=bias).requires_grad_(False) for size in (8, 4, 4)]
    inputs = torch.randn(3, 16)
    expected = torch.cat([layer(inputs) for layer in layers], dim=-1)
    torch.testing.assert_close(fuse(*layers)(inputs), expected)


def test_rotate_is_transformers_rotation():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 5, 3, 8, generator=generator)  # [B, T, heads, D]
    angles = torch.randn(2, 5, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    turned = states.transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(turned, turned, cos, sin)
    actual = rotate(states, *rotation(cos[:, :, None], sin[:, :, None]))
    torch.testing.assert_close(actual, expected.transpose(1, 2))
