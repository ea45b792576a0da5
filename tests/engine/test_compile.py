"""``--compile``: compiled forwards give the eager results."""

import logging

import pytest
import torch

from specgym.engine.capture import accelerate
from specgym.engine.decoding import DecodeRequest
from specgym.engine.linears import linear
from specgym.engine.members import ModelMember
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_pool

WINDOWS = ([7], [3, 4], [5], [1, 2])


def test_compiled_logits_are_the_eager_ones_in_bf16():
    members = [ModelMember("target", tiny_llama(3, dtype=torch.bfloat16)) for _ in range(2)]
    accelerate(members[1:], compiled=True)
    memories = [member.new_memory(1, 64, 64) for member in members]
    for window in ([1, 2, 3], *WINDOWS):
        eager, compiled = (
            member.forward(memory, [window], 8)[:, : len(window)]
            for member, memory in zip(members, memories, strict=True)
        )
        torch.testing.assert_close(compiled, eager, atol=0.1, rtol=1e-2)
    runner = members[1].graphs
    assert not runner.reason
    assert len(runner.replays) == 1
    assert members[1].setup_seconds > 0


def test_compiled_chains_give_the_eager_tokens():
    eager, compiled = (tiny_pool(7, noise=()) for _ in range(2))
    accelerate(compiled.members.values(), compiled=True)
    request = DecodeRequest((5, 9, 2, 7, 9, 2, 7), 30)
    state, _ = decode(compiled, [request], random_plans(compiled, 1))
    expected, _ = decode(eager, [request], random_plans(eager, 1))
    assert state.output() == expected.output()
    assert not compiled.model("target").graphs.reason


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_linear_is_compiled_as_one_piece(has_bias):
    weight, rows = torch.randn(48, 32).bfloat16(), torch.randn(2, 32).bfloat16()
    packed = linear(weight, torch.randn(48).bfloat16() if has_bias else None)
    compiled = torch.compile(lambda rows: packed(rows) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(rows), packed(rows) + 1, atol=0.1, rtol=1e-2)


def test_what_has_no_lean_forward_is_not_compiled_and_the_log_says_so(caplog):
    member = ModelMember("draft", tiny_llama(3), lean=False)
    with caplog.at_level(logging.WARNING, logger="specgym"):
        accelerate([member], compiled=True)
    assert member.graphs is None
    assert "member 'draft' runs eagerly: only lean forwards are compiled" in caplog.text
    assert "LlamaForCausalLM" in caplog.text
