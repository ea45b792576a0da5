"""Rollback: what memories hold after every round, and drafts that never depend on the path."""

import collections

import pytest

from specgym.engine import decoding
from specgym.engine.decoding import decode_step, start
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, random_plans, tiny_llama, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan, SamplingParams, common_prefix

PROMPT = (1, 2, 3, 4, 1, 2, 3)
CHAINS = tiny_pool().chains
NUM_ROUNDS = 50


@pytest.fixture(scope="module")
def pool():
    return tiny_pool(3, k_values=range(1, 9), noise=(0.1, 0.05))


@pytest.fixture(scope="module")
def copies():
    """Drafter and middle are the target itself."""
    return tiny_pool(3, k_values=range(1, 9), noise=(0.0, 0.0), max_position_embeddings=1024)


@pytest.fixture
def fed(monkeypatch):
    """Tokens that every memory was fed, row by row, as its forwards saw them."""
    rows_by_memory, forward = {}, ModelMember.forward

    def watched(self, memory, tokens, num_rows=None, *, need_logits=True, last_only=False):
        rows = rows_by_memory.setdefault(self.name, collections.defaultdict(list))
        first = getattr(memory.buffers[0], "row", 0)  # a row that is fed by itself
        for row, more in enumerate(tokens):
            rows[first + row][memory.num_valid(row) :] = more
        return forward(self, memory, tokens, num_rows, need_logits=need_logits, last_only=last_only)

    monkeypatch.setattr(ModelMember, "forward", watched)
    return rows_by_memory


@pytest.fixture
def drafts(monkeypatch):
    """Tokens every step's drafter proposed, per row."""
    proposed, draft = [], decoding.draft

    def watched(*args, **options):
        proposals, entropy = draft(*args, **options)
        proposed.append([proposal.tokens for proposal in proposals])
        return proposals, entropy

    monkeypatch.setattr(decoding, "draft", watched)
    return proposed


@pytest.mark.parametrize(
    ("chain", "k"),
    [(("draft", "target"), k) for k in range(1, 9)] + [(CHAINS[-1], k) for k in (1, 4)],
)
def test_a_copy_of_the_target_is_accepted_in_full_round_after_round(copies, chain, k):
    """vllm#9730, mlxcel#994: nothing missing or stale in a drafter's memory at any K."""
    plan = Plan(chain, k)
    budget = NUM_ROUNDS * plan.max_tokens
    _, results = decode(
        copies, [DecodeRequest(PROMPT, budget)], lambda state: plan, exact=k % 2 == 0
    )
    assert len(results) == NUM_ROUNDS
    for result in results:
        assert result.proposed_per_level == tuple(k + level for level in range(len(chain) - 1))
        assert result.accepted_per_level == result.proposed_per_level
        assert result.num_tokens == plan.max_tokens


def test_a_sampling_copy_of_the_target_is_accepted_in_full_too(copies):
    request = DecodeRequest(PROMPT, 250, SamplingParams(1.0, seed=5))
    _, results = decode(copies, [request], lambda state: Plan(("draft", "target"), 4))
    assert all(result.num_accepted == 4 for result in results if result.executed.k)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_memory_holds_all_it_shares_with_the_text_and_nothing_else(
    pool, fed, num_rows, exact
):
    """After each round, whatever was accepted: a memory is the longest true prefix it was fed."""
    budgets, accepted = (90, 60, 75), set()
    clock = CountingClock()
    requests = [DecodeRequest(PROMPT[row:], budgets[row]) for row in range(num_rows)]
    state, plans = start(pool, requests, clock, exact=exact), random_plans(pool, 11)
    while not state.is_finished:
        result = decode_step(pool, state, plans(state), clock)
        accepted.add((result.executed.k, result.num_accepted))
        for name, memory in state.memories.items():
            for row, tokens in enumerate(state.tokens):
                shared = common_prefix(fed[name][row], tokens)
                assert memory.num_valid(row) == min(shared, len(tokens) - 1)
                del fed[name][row][memory.num_valid(row) :]
        if any(state.is_active(row) for row in range(num_rows)):
            target = state.memories["target"]
            for row, tokens in enumerate(state.tokens):
                assert target.num_valid(row) == len(tokens) - 1
    assert {count for _, count in accepted} >= {0, 1, 2, 3, 4}
    assert len(accepted) > 15


@pytest.mark.parametrize("num_rejected", range(5))
@pytest.mark.parametrize("chain", [("draft", "target"), ("draft", "mid", "target")])
def test_rejections_at_every_slot_leave_exact_lengths(monkeypatch, copies, chain, num_rejected):
    """A drafter that is right but for its last tokens: the lengths, spelled out per level."""
    draft = decoding.draft

    def spoiled(state, plan, meter, **options):
        proposals, entropy = draft(state, plan, meter, **options)
        tokens = proposals[0].tokens
        keep = len(tokens) - num_rejected
        wrong = tuple((token + 1) % 61 for token in tokens[keep:])
        return [decoding.Proposal(tokens[:keep] + wrong)], entropy

    clock, k = CountingClock(), 4
    state = start(copies, [DecodeRequest(PROMPT, 40)], clock)
    monkeypatch.setattr(decoding, "draft", spoiled)
    result = decode_step(copies, state, Plan(chain, k), clock)
    before, right = len(PROMPT), k - num_rejected
    emitted = right + 1 if num_rejected or len(chain) == 2 else right + 2
    if num_rejected and len(chain) == 3:  # the middle's own token is proposed to the target
        emitted = right + 2
    assert result.num_tokens == emitted
    assert len(state.tokens[0]) == before + emitted
    # The drafter never eats its last draft; the last committed token is pending everywhere.
    assert state.memories["draft"].num_valid(0) == before + min(right, k - 1)
    if len(chain) == 3:
        assert state.memories["mid"].num_valid(0) == before + right
    assert state.memories["target"].num_valid(0) == before + emitted - 1


def fresh_draft(pool, state, plan, exact):
    """What a new request whose prompt is all the text so far would draft and commit."""
    request = DecodeRequest(tuple(state.tokens[0]), state.num_remaining(0))
    clock = CountingClock()
    return decode_step(pool, start(pool, [request], clock, exact=exact), plan, clock)


PATTERNS = {
    "idle": [Plan(("draft", "target"), 4), *[Plan(("target",), 0)] * 3],
    "replaced": [Plan(("draft", "target"), 4), *[Plan(("ngram", "target"), 4)] * 3],
    "dropped-middle": [Plan(("draft", "mid", "target"), 3), *[Plan(("draft", "target"), 2)] * 4],
    "all": [Plan(chain, 1 + i) for i, chain in enumerate(CHAINS)],
    "long-idle": [Plan(("mid", "target"), 4), *[Plan(("target",), 0)] * 14],
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_drafts_and_acceptance_after_idling_equal_those_of_a_fresh_prefill(
    pool, drafts, pattern, exact
):
    """K 4, 0, 0, 0, 4 and members that leave and come back (vllm-metal#716)."""
    clock, num_compared = CountingClock(), 0
    state = start(pool, [DecodeRequest(PROMPT, 80)], clock, exact=exact)
    while state.num_remaining(0) > 8:
        plan = pattern[num_compared % len(pattern)]
        fresh = fresh_draft(pool, state, plan, exact)
        result = decode_step(pool, state, plan, clock)
        assert drafts[-1] == drafts[-2]
        assert result.tokens == fresh.tokens
        assert result.executed == fresh.executed
        assert result.proposed_per_level == fresh.proposed_per_level
        assert result.accepted_per_level == fresh.accepted_per_level
        num_compared += 1
    assert num_compared > 2 * len(pattern)


def test_an_idle_member_catches_up_and_the_catch_up_is_counted(pool):
    clock, plain = CountingClock(), Plan(("target",), 0)
    state = start(pool, [DecodeRequest(PROMPT, 60)], clock)
    assert state.num_lagging("draft") == len(PROMPT) - 1
    assert state.num_lagging("target") == 0
    first = decode_step(pool, state, Plan(("draft", "target"), 2), clock)
    lag = state.num_lagging("draft")
    assert lag == (1 if first.num_accepted == 2 else 0)
    for _ in range(20):
        decode_step(pool, state, plain, clock)
    assert state.num_lagging("draft") == lag + 20
    result = decode_step(pool, state, Plan(("draft", "target"), 2), clock)
    costs = [cost for cost in result.forwards if cost.member == "draft"]
    assert sum(cost.num_catchup for cost in costs) == lag + 20
    # A window of tokens in a forward of its own; the last ones ride with the first draft.
    assert pool.window == 16
    assert [cost.role for cost in costs] == ["catchup", "draft", "draft"]
    assert [cost.num_tokens for cost in costs] == [16, lag + 5, 1]
    assert [cost.num_catchup for cost in costs] == [16, lag + 4, 0]
    assert result.role_seconds["catchup"] > 0


@pytest.mark.parametrize("num_levels", [2, 3, 4])
def test_a_chain_of_any_length_at_the_largest_k_fits_its_window(num_levels):
    """llama.cpp#25719: each level adds one token to what the next one verifies."""
    target = tiny_llama(3)
    names = [f"level{index}" for index in range(num_levels)]
    members = [ModelMember(name, perturbed(target, 0.0)) for name in names]
    chain = (*names, "target")
    pool = ModelPool(
        [NGramMember(), *members, ModelMember("target", target)], chains=[chain], k_values=[6]
    )
    assert pool.window == 8 if num_levels == 2 else 16
    plan = Plan(chain, 6)
    request = DecodeRequest(PROMPT, 4 * plan.max_tokens)
    state, results = decode(pool, [request], lambda state: plan)
    assert [result.num_tokens for result in results] == [6 + num_levels] * 4
    assert results[0].proposed_per_level == tuple(6 + level for level in range(num_levels))
    assert state.output() == decode(pool, [request])[0].output()


@pytest.mark.parametrize("exact", [True, False])
def test_pads_do_not_shorten_what_is_accepted_at_a_long_k(exact):
    """vllm#26498: padded rows that stay valid cost acceptance."""
    pool = tiny_pool(3, k_values=[9, 16], noise=(0.0, 0.0))
    assert pool.window == 24
    for k in pool.k_values:
        plan = Plan(("draft", "target"), k)
        request = DecodeRequest(PROMPT, 8 * plan.max_tokens)
        _, results = decode(pool, [request], lambda state: plan, exact=exact)  # noqa: B023
        assert [result.num_accepted for result in results] == [k] * 8
