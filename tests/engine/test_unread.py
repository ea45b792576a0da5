"""Drafts whose tokens the host reads only at the end, as on CUDA; driven on a CPU here."""

import pytest
import torch

from specgym.engine import drafting
from specgym.engine.decoding import decode_step, start
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, EngineFault, Plan


@pytest.mark.parametrize("exact", [True, False])
def test_tokens_that_stay_on_the_device_are_the_same(exact, monkeypatch):
    requests = [DecodeRequest((9,), 12), DecodeRequest((5, 9, 2, 7, 9), 25)]
    results, entropies = [], []
    for is_unread in (False, True):
        monkeypatch.setattr(drafting, "can_draft_on_device", lambda *arguments, on=is_unread: on)
        pool = tiny_pool(7, compiled=False)
        _, steps = decode(pool, requests, random_plans(pool, 2), exact=exact)
        results.append([(step.tokens, step.proposed_per_level) for step in steps])
        entropies.append([step.draft_entropy for step in steps])
    assert results[0] == results[1]
    assert entropies[0] == pytest.approx(entropies[1])


def test_divergence_of_unread_tokens_is_the_same(monkeypatch):
    seen = []
    for is_unread in (False, True):
        monkeypatch.setattr(drafting, "can_draft_on_device", lambda *arguments, on=is_unread: on)
        pool = tiny_pool(7, compiled=False)
        state = start(pool, [DecodeRequest((5, 9, 2, 7, 9), 25)], CountingClock())
        plan = Plan(("draft", "mid", "target"), 3)
        step = decode_step(pool, state, plan, CountingClock(), measure_divergence=True)
        seen.append(step.divergence)
    assert seen[0] == pytest.approx(seen[1])
    assert set(seen[0]) == {"draft>mid", "mid>target"}


@pytest.mark.parametrize("measured", [True, False])
def test_rows_of_a_trimmed_head_are_named_on_the_device(measured, monkeypatch):
    ids, seen = torch.arange(0, 61, 2), []
    for is_unread in (False, True):
        monkeypatch.setattr(drafting, "can_draft_on_device", lambda *arguments, on=is_unread: on)
        trimmed = tiny_llama(7)
        trimmed.lm_head.weight = torch.nn.Parameter(trimmed.lm_head.weight[ids], False)
        drafter = ModelMember("draft", trimmed, draft_ids=ids, compiled=False)
        pool = ModelPool([drafter, ModelMember("target", tiny_llama(7), compiled=False)])
        state = start(pool, [DecodeRequest((5, 9, 2, 7, 9), 25)], CountingClock())
        plan, steps = Plan(("draft", "target"), 4), []
        while not state.is_finished:
            clock = CountingClock()
            steps.append(decode_step(pool, state, plan, clock, measure_divergence=measured))
        seen.append([(s.tokens, s.accepted_per_level, s.divergence) for s in steps])
    assert seen[0] == seen[1]
    assert sum(sum(accepted) for _, accepted, _ in seen[0]) > 0


def test_a_fault_of_unread_tokens_names_the_member(monkeypatch):
    monkeypatch.setattr(drafting, "can_draft_on_device", lambda *arguments: True)
    pool = tiny_pool(7, compiled=False)
    state = start(pool, [DecodeRequest((5, 9, 2), 25)], CountingClock())
    pool.model("draft").lean.embedding.data[:] = torch.nan
    with pytest.raises(EngineFault, match="member 'draft': logits are not finite"):
        decode_step(pool, state, Plan(("draft", "target"), 3), CountingClock())
