"""Drafts whose tokens the host reads only at the end, as on CUDA; driven on a CPU here."""

import pytest
import torch

from specgym.engine import decoding
from specgym.engine.decoding import DecodeRequest, decode_step, start
from specgym.engine.testing import decode, random_plans, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import EngineFault, Plan


@pytest.mark.parametrize("exact", [True, False])
def test_tokens_that_stay_on_the_device_are_the_same(exact, monkeypatch):
    requests = [DecodeRequest((9,), 12), DecodeRequest((5, 9, 2, 7, 9), 25)]
    results, entropies = [], []
    for is_unread in (False, True):
        monkeypatch.setattr(decoding, "draws_unread", lambda *arguments, on=is_unread: on)
        pool = tiny_pool(7)
        _, steps = decode(pool, requests, random_plans(pool, 2), exact=exact)
        results.append([(step.tokens, step.proposed_per_level) for step in steps])
        entropies.append([step.draft_entropy for step in steps])
    assert results[0] == results[1]
    assert entropies[0] == pytest.approx(entropies[1])


def test_divergence_of_unread_tokens_is_the_same(monkeypatch):
    seen = []
    for is_unread in (False, True):
        monkeypatch.setattr(decoding, "draws_unread", lambda *arguments, on=is_unread: on)
        pool = tiny_pool(7)
        state = start(pool, [DecodeRequest((5, 9, 2, 7, 9), 25)], CountingClock())
        state.measure_divergence = True
        plan = Plan(("draft", "mid", "target"), 3)
        seen.append(decode_step(pool, state, plan, CountingClock()).divergence)
    assert seen[0] == pytest.approx(seen[1])
    assert set(seen[0]) == {"draft>mid", "mid>target"}


def test_a_fault_of_unread_tokens_names_the_member(monkeypatch):
    monkeypatch.setattr(decoding, "draws_unread", lambda *arguments: True)
    pool = tiny_pool(7)
    state = start(pool, [DecodeRequest((5, 9, 2), 25)], CountingClock())
    pool.model("draft").lean.embedding.data[:] = torch.nan
    with pytest.raises(EngineFault, match="member 'draft': logits are not finite"):
        decode_step(pool, state, Plan(("draft", "target"), 3), CountingClock())
