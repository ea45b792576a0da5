"""Experts that branches off a text visit: those that each would visit alone."""

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from specgym.engine import expert_paths as branches
from specgym.engine.expert_paths import Branch, visited_experts
from specgym.engine.members.model import ModelMember
from specgym.engine.testing import tiny_llama

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=8)),
    "sliding": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=8, sliding_window=5)
    ),
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2
        )
    ),
}
TEXT = tuple(range(3, 25))
BRANCHES = (Branch(4, (9, 8, 7)), Branch(4, (30,)), Branch(22, (1, 2)), Branch(10, (5, 5, 5, 5)))


@pytest.mark.parametrize("rows", [256, 5])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_branch_visits_what_it_would_alone(name, lean, rows, monkeypatch):
    monkeypatch.setattr(branches, "ROWS", rows)
    torch.manual_seed(0)
    member = ModelMember("target", MODELS[name]().eval(), lean=lean)
    visited, off = visited_experts(member, TEXT, BRANCHES)
    assert visited.shape == (len(TEXT), 2, 8)
    assert (visited.sum(axis=2) == 2).all()
    for branch, found in zip(BRANCHES, off, strict=True):
        alone, _ = visited_experts(member, (*TEXT[: branch.start], *branch.tokens), ())
        np.testing.assert_array_equal(found, alone[branch.start :])
    assert member.dispatch is None or member.dispatch.choices is None


def test_no_branch_is_no_forward_and_a_dense_model_is_a_mistake():
    torch.manual_seed(0)
    member = ModelMember("target", MODELS["mixtral"]().eval())
    assert visited_experts(member, TEXT, ())[1] == []
    with pytest.raises(AssertionError, match="no experts"):
        visited_experts(ModelMember("dense", tiny_llama(0)), TEXT, ())
