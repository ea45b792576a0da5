"""The masked cache: rollback, holes and packing against recomputing everything from the tokens."""

import itertools
import random

import pytest
import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.members.model import ModelMember
from specgym.engine.testing import decode, tiny_llama, tiny_pool
from specgym.engine.types import DecodeRequest, common_prefix

VOCAB = 61
NUM_DRAFTED = 3
PATTERNS = tuple(itertools.product((True, False), repeat=NUM_DRAFTED))
TOLERANCE = 1e-5


FORMS = {"compiled": {}, "fused": {"compiled": False}, "hooked": {"lean": False}}


@pytest.fixture(scope="module", params=FORMS)
def member(request):
    made = ModelMember("target", tiny_llama(), **FORMS[request.param])
    assert (made.compiled is not None) == (request.param == "compiled")
    assert (made.lean is not None) == (request.param == "fused")
    return made


@pytest.fixture(scope="module")
def reference():
    return tiny_llama()


class Batch:
    """Rows of tokens beside the memory that holds them, and the tokens each slot row was fed."""

    def __init__(self, member, lengths=(9, 4), kv_length=None, seed=0, aligned=False):
        self.member = member
        self.rng = random.Random(seed)
        self.tokens = [self.draw(length) for length in lengths]
        self.memory = member.new_memory(len(lengths), 96, kv_length, aligned=aligned)
        member.forward(self.memory, [row[:-1] for row in self.tokens])

    def draw(self, count):
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def pending(self):
        return [row[self.memory.num_valid(i) :] for i, row in enumerate(self.tokens)]

    def settle(self, drafted, patterns):
        """Accepts each row's drafts up to its pattern's first refusal, and adds a bonus token."""
        for row, (drafts, pattern) in enumerate(zip(drafted, patterns, strict=True)):
            num_accepted = common_prefix(pattern, (True,) * len(pattern))
            bonus = self.rng.randrange(VOCAB)
            if num_accepted < len(drafts) and bonus == drafts[num_accepted]:
                bonus = (bonus + 1) % VOCAB
            self.tokens[row] += [*drafts[:num_accepted], bonus]
        self.memory.keep([len(row) - 1 for row in self.tokens])
        self.memory.check_integrity()

    def play(self, *rounds):
        """Rounds of drafting and settling; a round holds each row's pattern."""
        for patterns in rounds:
            drafted = [self.draw(NUM_DRAFTED) for _ in self.tokens]
            fed = [tail + d for tail, d in zip(self.pending(), drafted, strict=True)]
            self.member.forward(self.memory, fed)
            self.settle(drafted, patterns)
        return self

    def probe(self, num_rows=None):
        """Logits [B, V] after every row's tokens; the memory is left as it was."""
        held = [self.memory.num_valid(row) for row in range(len(self.tokens))]
        fed = self.pending()
        logits = self.member.forward(self.memory, fed, num_rows)
        self.memory.keep(held)
        return torch.stack([logits[row, len(tail) - 1] for row, tail in enumerate(fed)])


def recompute(reference, tokens):
    """Logits [T, V] of transformers' own forward, without any cache."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens]), use_cache=False).logits[0]


def ragged(member, **options):
    """A batch whose rows accepted unequally, so that both have holes."""
    no, yes = (False,) * NUM_DRAFTED, (True,) * NUM_DRAFTED
    return Batch(member, **options).play((yes, no), (no, yes), (yes, no), (no, yes))


@pytest.mark.parametrize("kv_length", [None, 96], ids=["as-used", "fixed"])
def test_logits_equal_full_recomputation_after_every_reject_pattern(member, reference, kv_length):
    num_rows = 8 if kv_length else None
    for seed, patterns in enumerate(itertools.product(PATTERNS, repeat=2)):
        batch = Batch(member, kv_length=kv_length, seed=seed)
        mirrored = tuple(pattern[::-1] for pattern in patterns)
        for each in (patterns, mirrored):
            drafted = [batch.draw(NUM_DRAFTED) for _ in batch.tokens]
            pending = batch.pending()
            fed = [tail + d for tail, d in zip(pending, drafted, strict=True)]
            logits = member.forward(batch.memory, fed, num_rows)
            for row, tokens in enumerate(batch.tokens):
                expected = recompute(reference, tokens + drafted[row])[-len(fed[row]) :]
                torch.testing.assert_close(
                    logits[row, : len(fed[row])], expected, atol=TOLERANCE, rtol=0
                )
            batch.settle(drafted, each)
        expected = [recompute(reference, tokens)[-1] for tokens in batch.tokens]
        torch.testing.assert_close(
            batch.probe(num_rows), torch.stack(expected), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("kv_length", [None, 96], ids=["as-used", "fixed"])
def test_masked_slots_have_no_influence_whatever_they_hold(member, kv_length):
    batch = ragged(member, kv_length=kv_length)
    memory = batch.memory
    assert memory.num_packable > 0
    before = batch.probe()
    empty = ~memory.valid_BS[:, None, :, None]
    with torch.inference_mode():
        for layer in memory.layers:
            layer.keys.masked_fill_(empty, 1e4)
            layer.values.masked_fill_(empty, 1e4)
    assert torch.equal(batch.probe(), before)


@pytest.mark.parametrize("kv_length", [None, 96], ids=["as-used", "fixed"])
@pytest.mark.parametrize("num_rows", [None, 8])
def test_an_aligned_cache_has_no_holes_and_the_same_logits(member, reference, kv_length, num_rows):
    batch = ragged(member, kv_length=kv_length, aligned=True)
    assert batch.memory.num_packable == 0
    assert [len(slots) for slots in batch.memory.row_slots] == [len(t) - 1 for t in batch.tokens]
    expected = [recompute(reference, tokens)[-1] for tokens in batch.tokens]
    logits = batch.probe(num_rows)
    torch.testing.assert_close(logits, torch.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_is_fed_alone_takes_no_other_along(member, reference, aligned, row):
    batch = ragged(member, aligned=aligned)
    other = 1 - row
    memory, kept = batch.memory, list(batch.memory.row_slots[other])
    memory.forget(row)
    batch.tokens[row] = batch.draw(40)
    with memory.alone(row) as view:
        member.forward(view, [batch.tokens[row][:30]], need_logits=False)
        member.forward(view, [batch.tokens[row][30:-1]], need_logits=False)
    memory.check_integrity()
    assert memory.row_slots[row] == list(range(39))
    assert memory.row_slots[other] == kept
    expected = [recompute(reference, tokens)[-1] for tokens in batch.tokens]
    torch.testing.assert_close(batch.probe(), torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_valid_slots_have_influence(member):
    batch = ragged(member)
    before = batch.probe()
    with torch.inference_mode():
        for row, slots in enumerate(batch.memory.row_slots):
            batch.memory.layers[0].values[row, :, slots[1]] += 1.0
    assert ((batch.probe() - before).abs().amax(dim=-1) > 1e-3).all()


def test_scrub_removes_what_would_poison_a_masked_slot(member):
    """The compiled form reads no masked slot, so nothing there can poison it."""
    batch = ragged(member)
    before = batch.probe()
    empty = ~batch.memory.valid_BS[:, None, :, None]
    with torch.inference_mode():
        for layer in batch.memory.layers:
            layer.values.masked_fill_(empty, float("nan"))
    if member.compiled is not None:
        assert torch.equal(batch.probe(), before)
    else:
        assert batch.probe().isnan().any()
    batch.memory.scrub()
    assert not any(layer.values.isnan().any() for layer in batch.memory.layers)
    assert torch.equal(batch.probe(), before)


def test_compact_moves_slots_and_no_logits(member):
    batch = ragged(member)
    before, used = batch.probe(), batch.memory.num_used
    batch.memory.compact()
    batch.memory.check_integrity()
    longest = max(map(len, batch.tokens)) - 1
    assert used > longest
    assert batch.memory.num_used == longest
    assert batch.memory.num_packable == 0
    torch.testing.assert_close(batch.probe(), before, atol=TOLERANCE, rtol=0)


def test_keep_nothing_starts_over(member, reference):
    batch = ragged(member)
    batch.memory.keep([0, 0])
    batch.memory.check_integrity()
    assert batch.memory.num_used == 0
    expected = [recompute(reference, tokens)[-1] for tokens in batch.tokens]
    torch.testing.assert_close(batch.probe(), torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_keep_everything_changes_nothing(member):
    batch = ragged(member)
    slots, used = [list(each) for each in batch.memory.row_slots], batch.memory.num_used
    before = batch.probe()
    batch.memory.keep([len(each) for each in slots])
    assert batch.memory.row_slots == slots
    assert batch.memory.num_used == used
    assert torch.equal(batch.probe(), before)


@pytest.mark.parametrize("excess", [1, 50])
def test_keep_more_than_a_row_holds_is_refused_and_changes_nothing(member, excess):
    batch = ragged(member)
    slots = [list(each) for each in batch.memory.row_slots]
    with pytest.raises(ValueError, match="row 1 holds"):
        batch.memory.keep([1, len(slots[1]) + excess])
    assert batch.memory.row_slots == slots
    batch.memory.check_integrity()


def test_keep_refuses_a_negative_count(member):
    batch = ragged(member)
    with pytest.raises(ValueError, match="cannot keep -1"):
        batch.memory.keep([-1, 3])
    with pytest.raises(ValueError, match="zip"):
        batch.memory.keep([3])


def test_truncation_gives_back_only_what_no_row_holds(member):
    batch = Batch(member, lengths=(9, 4))
    assert batch.memory.num_used == 8
    batch.memory.keep([5, 3])
    assert batch.memory.num_used == 5
    batch.memory.keep([1, 3])
    assert batch.memory.num_used == 3


def test_a_single_row_never_has_holes(member):
    batch = Batch(member, lengths=(6,))
    for pattern in PATTERNS:
        batch.play((pattern,))
        assert batch.memory.num_used == len(batch.tokens[0]) - 1
        assert batch.memory.num_packable == 0


def bare(num_slots, *windows):
    """A memory without a model that took these windows, each as tokens per row."""
    memory = MaskedKVCache(1, 2, num_slots, torch.device("cpu"), torch.float32)
    for counts in windows:
        memory.advance(counts, max(counts))
    memory.check_integrity()
    return memory


def test_make_room_packs_when_slots_run_out_and_says_when_none_are_left():
    memory = bare(16, [8, 8], [2, 0], [0, 2])
    memory.make_room(4)
    assert memory.num_used == 12
    memory.make_room(5)
    assert memory.num_used == 10
    memory.check_integrity()
    with pytest.raises(ValueError, match="7 rows does not fit behind 10 of 16 slots"):
        memory.make_room(7)


def test_make_room_packs_when_that_gives_back_more_than_a_quarter():
    memory = bare(64, [4, 4], [2, 0], [0, 2])
    memory.make_room(1)
    assert memory.num_used == 8
    memory = bare(64, [4, 4], [3, 0], [0, 3])
    memory.make_room(1)
    assert memory.num_used == 7
    memory.check_integrity()


def test_rows_of_unequal_length_do_not_pack_at_every_forward(monkeypatch):
    """Slots that only the longest row fills cannot be given back: copying them is in vain."""
    calls, compact = [], MaskedKVCache.compact
    monkeypatch.setattr(MaskedKVCache, "compact", lambda self: (calls.append(1), compact(self)))
    requests = [DecodeRequest(tuple(range(60)), 20), DecodeRequest((1, 2), 20)]
    decode(tiny_pool(), requests)
    assert not calls


@pytest.mark.parametrize(
    "damage",
    [
        lambda memory: memory.valid_BS.__setitem__((0, 2), False),
        lambda memory: memory.valid_BS.__setitem__((1, memory.num_used + 1), True),
        lambda memory: memory.positions_BS.__setitem__((0, 3), 7),
        lambda memory: memory.row_slots[0].reverse(),
        lambda memory: setattr(memory, "num_used", memory.num_used + 1),
        lambda memory: setattr(memory, "num_used", memory.num_used - 1),
    ],
    ids=["lost", "stray", "position", "order", "too-long", "too-short"],
)
def test_check_integrity_sees_damage(member, damage):
    batch = ragged(member)
    batch.memory.check_integrity()
    damage(batch.memory)
    with pytest.raises(AssertionError):
        batch.memory.check_integrity()


def test_a_pad_sees_itself_alone_and_no_token_sees_a_pad():
    memory = bare(16, [3, 1])
    visible = memory.mask([2, 1], 3)[:, 0] == 0
    T, F = True, False
    assert visible.tolist() == [
        [[T, T, T, T, F, F], [T, T, T, T, T, F], [F, F, F, F, F, T]],
        [[T, F, F, T, F, F], [F, F, F, F, T, F], [F, F, F, F, F, T]],
    ]


def test_a_sliding_window_counts_positions_not_slots():
    memory = MaskedKVCache(1, 2, 16, torch.device("cpu"), torch.float32, sliding_window=3)
    memory.advance([5, 5], 5)
    memory.keep([5, 2])
    visible = memory.mask([1, 1], 1, sliding=True)[:, 0, 0] == 0
    T, F = True, False
    assert visible.tolist() == [[F, F, F, T, T, T], [T, T, F, F, F, T]]
    assert memory.mask([1, 1], 1)[0, 0, 0].eq(0).all()
