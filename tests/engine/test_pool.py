"""Pools: members, legal chains and plans, sources' specs, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from specgym.engine.decoding import decode_step, start
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import eos_ids_of, load_pool, parse_pool
from specgym.engine.testing import TableLM, decode, table_pool, tiny_pool, tiny_tokenizer
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan


def member(name):
    return ModelMember(name, TableLM(torch.zeros(5, 5)))


@pytest.fixture(scope="module")
def pool():
    return tiny_pool()


def test_default_chains_are_every_drafter_and_every_drafter_before_a_larger_model(pool):
    assert [">".join(chain) for chain in pool.chains] == [
        "ngram>target",
        "draft>target",
        "mid>target",
        "ngram>draft>target",
        "ngram>mid>target",
        "draft>mid>target",
    ]


def test_plans_begin_with_no_speculation_then_every_chain_with_every_k(pool):
    plans = pool.plans()
    assert plans[0] == Plan(("target",), 0)
    assert plans[1:] == [Plan(chain, k) for chain in pool.chains for k in (1, 2, 3, 4, 6)]
    assert len({plan.name for plan in plans}) == len(plans)
    assert all(pool.plan(plan.name) == plan for plan in plans)
    with pytest.raises(ValueError, match=r"no plan 'ngram@9'; plans are none, ngram@1"):
        pool.plan("ngram@9")


def test_the_window_holds_the_largest_k_and_the_longest_chain_in_eights():
    assert tiny_pool(k_values=[1, 6]).window == 8  # 6 + 2 verifiers
    assert tiny_pool(k_values=[7]).window == 16
    assert ModelPool([NGramMember(), member("target")], k_values=[7]).window == 8
    assert ModelPool([member("target")], k_values=[8]).window == 16


def test_a_pool_of_the_target_alone_never_speculates():
    pool = ModelPool([member("target")])
    assert pool.chains == ()
    assert pool.plans() == [Plan(("target",), 0)]


def test_chains_given_replace_the_default_ones_even_when_there_are_none():
    members = [NGramMember(), member("draft"), member("target")]
    chain = ("ngram", "draft", "target")
    assert ModelPool(members, chains=[chain]).chains == (chain,)
    assert ModelPool(members, chains=[]).chains == ()


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (("small", "target"), "no member 'small'; members are ngram, draft, target"),
        (("draft", "ngram", "target"), "'ngram' cannot verify; put it first"),
        (("target", "draft"), "must run from a drafter to the target 'target'"),
        (("ngram", "draft"), "must run from a drafter to the target 'target'"),
        (("draft", "draft", "target"), "naming each member once"),
        (("target",), "must run from a drafter"),
    ],
)
def test_chains_that_make_no_sense_are_refused(chain, message):
    members = [NGramMember(), member("draft"), member("target")]
    with pytest.raises(ValueError, match=message):
        ModelPool(members, chains=[chain])


def test_members_must_differ_in_name_and_have_a_model_for_a_target():
    with pytest.raises(ValueError, match="names must differ"):
        ModelPool([member("target"), member("target")])
    with pytest.raises(ValueError, match="must be the target model 'target'"):
        ModelPool([member("draft")])
    with pytest.raises(ValueError, match="must be the target model 'ngram'"):
        ModelPool([NGramMember(), member("draft")], target="ngram")
    assert ModelPool([member("a"), member("b")], target="b").chains == (("a", "b"),)


@pytest.mark.parametrize("k_values", [[], [0, 1], [-1], [1.5]])
def test_k_values_must_be_positive_integers(k_values):
    with pytest.raises(ValueError, match="k_values: must be integers >= 1"):
        ModelPool([member("target")], k_values=k_values)


def test_k_values_are_sorted_and_counted_once():
    assert ModelPool([member("target")], k_values=[4, 1, 4]).k_values == (1, 4)


def test_a_step_refuses_plans_the_pool_cannot_run_and_does_nothing(pool):
    state, clock = start(pool, [DecodeRequest((1, 2, 1), 20)], CountingClock()), CountingClock()
    for plan, message in (
        (Plan(("small", "target"), 2), "no member 'small'"),
        (Plan(("draft",), 0), "must run from a drafter to the target"),
        (Plan(("target", "draft"), 2), "must run from a drafter to the target"),
        (Plan(("draft", "target"), 8), "need 9 rows, the pool's window has 8"),
        (Plan(("ngram", "draft", "mid", "target"), 6), "need 9 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_step(pool, state, plan, clock)
    assert state.output() == []
    assert clock.seconds == 0


def test_a_plan_off_the_table_runs_where_it_is_sound(pool):
    """K = 5 is not in the table, and the chain of four is not listed; both fit the window."""
    request = DecodeRequest((1, 2, 3, 1, 2), 24)
    expected = decode(pool, [request])[0].output()
    for plan in (Plan(("draft", "target"), 5), Plan(("ngram", "draft", "mid", "target"), 4)):
        state, results = decode(pool, [request], lambda state: plan)  # noqa: B023
        assert any(result.executed == plan for result in results)
        assert state.output() == expected


@pytest.mark.parametrize(
    ("spec", "sources"),
    [
        (
            "smollm2",
            {
                **{n: f"shipped:smollm2-135m/{n}" for n in ("eagle", "small", "mid")},
                "target": "smollm2-135m",
            },
        ),
        ("target=/a/b", {"target": "/a/b"}),
        ("draft = x/y , target=/a", {"draft": "x/y", "target": "/a"}),
        ("target=/a,draft=/b=c", {"target": "/a", "draft": "/b=c"}),
    ],
)
def test_a_spec_is_a_built_in_name_or_a_list(spec, sources):
    assert parse_pool(spec) == sources


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "smollm",
            r"neither a built-in pool \(smollm2, smollm2-moe\), nor a recipe \(llama-2, .* a list",
        ),
        ("", "neither a built-in pool"),
        ("target=", "trouble at 'target='"),
        ("target=/a,", "trouble at ''"),
        ("draft=/a", "names no target; add target=PATH"),
        ("target=/a,target=/b", "used once"),
        ("ngram=/a,target=/b", "not 'ngram'"),
        ("my draft=/a,target=/b", "must be a word"),
    ],
)
def test_a_spec_that_cannot_be_read_says_where(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_pool(spec)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_pool(f"target={tmp_path / 'nowhere'}")


def test_eos_ids_come_from_the_generation_config_then_the_tokenizer_then_nowhere():
    def model(eos):
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))

    tokenizer = tiny_tokenizer()
    assert eos_ids_of(model(7), tokenizer) == [7]
    assert eos_ids_of(model([7, 9]), tokenizer) == [7, 9]
    assert eos_ids_of(model(0), tokenizer) == [0]
    assert eos_ids_of(model(None), tokenizer) == [tokenizer.eos_token_id]
    assert eos_ids_of(model(None), None) == []
    assert eos_ids_of(SimpleNamespace(generation_config=None), None) == []


def test_text_is_encoded_as_a_chat_turn_where_there_is_a_template():
    tokenizer = tiny_tokenizer()
    pool = table_pool([torch.zeros(98, 98)] * 2, tokenizer=tokenizer)
    assert pool.encode("ab c") == tuple(tokenizer.encode("ab c"))
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    assert tokenizer.decode(list(pool.encode("ab c"))) == "(user)ab c:"
    for blank in ("", "  \n"):
        with pytest.raises(ValueError, match="prompt: must not be empty or blank"):
            pool.encode(blank)
    with pytest.raises(ValueError, match="has no tokenizer; give token ids"):
        tiny_pool().encode("ab")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": (), "max_new_tokens": 4}, "prompt: must hold at least one token"),
        (
            {"prompt": (1,), "max_new_tokens": -1},
            "max_new_tokens: must be a whole number >= 0; got -1",
        ),
    ],
)
def test_requests_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DecodeRequest(**fields)


def test_starting_without_requests_and_stepping_past_the_end_are_refused(pool):
    with pytest.raises(ValueError, match="requests: must hold at least one"):
        start(pool, [], CountingClock())
    state, _ = decode(pool, [DecodeRequest((1,), 2)])
    with pytest.raises(ValueError, match="every row has ended"):
        decode_step(pool, state, Plan(("target",), 0), CountingClock())
