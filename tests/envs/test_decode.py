import itertools

import pytest

from specgym.engine.types import SamplingParams

STEP_KEYS = {
    "tokens",
    "drafted",
    "accepted",
    "accepted_per_level",
    "chain",
    "k",
    "iter_seconds",
    "draft_seconds",
    "verify_seconds",
    "catchup_seconds",
    "baseline_seconds",
    "utility",
    "forwards",
    "proposed_per_level",
    "executed_action",
    "kv_len",
    "context_len",
    "unique_experts",
    "finish_reason",
    "request_id",
    "controller_seconds",
    "action_mask",
}
RESET_KEYS = {"request_id", "num_prompt", "max_new_tokens", "action_mask", "baseline_seconds"}


@pytest.fixture
def plain(make_env, play, request_of):
    """Plain decoding's output for a text."""
    return lambda text, **changes: play(make_env(**changes), options=request_of(text)).infos[-1][
        "output"
    ]


def assert_step_adds_up(env, action, info):
    """The identities between the numbers of one step."""
    proposed, accepted = info["proposed_per_level"], info["accepted_per_level"]
    chain, k = env.plans[info["executed_action"]]
    assert info["chain"] == ">".join(chain)
    assert info["k"] == k
    assert info["asked_action"] == action
    assert (info["executed_action"] == action) == (info["reason"] == "")
    assert info["executed_action"] in (action, 0)
    assert len(proposed) == len(accepted) == len(chain) - 1
    assert all(0 <= a <= p for a, p in zip(accepted, proposed, strict=True))
    assert [a + 1 for a in accepted[:-1]] == proposed[1:]
    assert info["drafted"] == (proposed[0] if proposed else 0) <= k
    assert info["accepted"] == (accepted[-1] if accepted else 0)
    if info["finish_reason"] is None:
        assert info["tokens"] == info["accepted"] + 1
    assert 1 <= info["tokens"] <= info["accepted"] + 1
    assert {forward["member"] for forward in info["forwards"]} <= set(chain)
    assert info["forwards"][-1]["member"] == "target"
    relative = info["iter_seconds"] / info["baseline_seconds"]
    assert info["utility"] == pytest.approx(info["tokens"] / relative)
    assert info["action_mask"].dtype == bool
    assert info["action_mask"].shape == (len(env.table),)
    assert info["unique_experts"] == 1.0


# What a step says


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("masked", [True, False])
def test_the_numbers_of_every_step_add_up(make_env, play, by_chance, exact, temperature, masked):
    env = make_env(exact=exact, sampling=SamplingParams(temperature, seed=1), num_requests=4)
    episode = play(env, by_chance(2, masked), seed=2)
    assert episode.reset_info.keys() >= RESET_KEYS
    request = episode.reset_info
    tokens = 0
    for action, info in zip(episode.actions, episode.infos, strict=True):
        assert info.keys() >= STEP_KEYS
        assert_step_adds_up(env, action, info)
        assert info["request_id"] == request["request_id"]
        tokens += info["tokens"]
        assert info["context_len"] == request["num_prompt"] + tokens
        assert ("output" in info) == (info["finish_reason"] is not None)
        if info["finish_reason"] is not None:
            assert tokens == len(info["output"]) == 24
            tokens, request = 0, info.get("next_request")
    assert ("masked" in episode.column("reason")) == (not masked)


def test_speculation_is_exercised_and_some_of_it_is_accepted(make_env, play, by_chance):
    """Guards the identities above: they would hold where nothing was ever accepted."""
    episode = play(make_env(num_requests=6), by_chance(0), seed=0)
    assert {len(levels) for levels in episode.column("proposed_per_level")} == {0, 1, 2}
    assert max(episode.column("accepted")) >= 4
    assert "no_proposal" in episode.column("reason")


def test_a_drafter_that_finds_nothing_is_reported_with_what_was_asked(make_env, request_of):
    env = make_env()
    env.reset(options=request_of("abcdefgh"))
    action = env.action_names.index("ngram@4")
    *_, info = env.step(action)
    assert info["reason"] == "no_proposal"
    assert (info["asked_action"], info["executed_action"]) == (action, 0)
    assert (info["k"], info["drafted"], info["chain"]) == (0, 0, "target")


def test_a_masked_action_runs_as_no_speculation_and_says_so(make_env, play, plain, request_of):
    env = make_env(max_new_tokens=3)
    _, info = env.reset(options=request_of("aaaa"))
    action = env.action_names.index("ngram@6")
    assert not info["action_mask"][action]
    *_, info = env.step(action)
    assert info["reason"] == "masked"
    assert (info["asked_action"], info["executed_action"], info["tokens"]) == (action, 0, 1)
    episode = play(env, action, options=request_of("aaaa"))
    assert set(episode.column("reason")) == {"masked"}
    assert episode.infos[-1]["output"] == plain("aaaa", max_new_tokens=3)


@pytest.mark.parametrize("name", ["draft@1", "mid@3", "draft>mid@4", "ngram>draft@6"])
def test_the_k_of_an_executed_plan_is_the_k_asked_for(make_env, play, name):
    env = make_env(max_new_tokens=40)
    episode = play(env, env.action_names.index(name), seed=1)
    executed = [info for info in episode.infos if not info["reason"]]
    assert executed
    assert {info["k"] for info in executed} == {int(name[-1])}
    if not name.startswith("ngram"):
        assert {info["drafted"] for info in executed} == {int(name[-1])}


def test_the_output_does_not_depend_on_the_plans(make_env, play, by_chance):
    outputs = [
        [
            info["output"]
            for info in play(make_env(num_requests=4), c, seed=3).infos
            if "output" in info
        ]
        for c in (0, by_chance(1), by_chance(2, masked=False))
    ]
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[1] == outputs[2]


# Ends


@pytest.mark.parametrize("name", ["none", "draft@6", "draft>mid@6", "ngram@6"])
def test_the_token_budget_truncates(make_env, play, name):
    for budget in (1, 2, 7, 24):
        env = make_env(max_new_tokens=budget)
        episode = play(env, env.action_names.index(name), seed=0)
        assert (episode.terminated, episode.truncated) == (False, True)
        assert episode.infos[-1]["finish_reason"] == "length"
        assert len(episode.infos[-1]["output"]) == budget


@pytest.mark.parametrize("name", ["none", "mid@6", "draft>mid@6", "ngram@6"])
def test_eos_terminates_wherever_in_a_block_it_falls(
    make_env, play, plain, variant, request_of, name
):
    text = "one two one two one"
    output = plain(text)
    for eos in dict.fromkeys(output):
        env = make_env(pool=variant(eos_ids=[eos]))
        episode = play(env, env.action_names.index(name), options=request_of(text))
        assert (episode.terminated, episode.truncated) == (True, False)
        assert episode.infos[-1]["finish_reason"] == "eos"
        assert episode.infos[-1]["output"] == output[: output.index(eos) + 1]


def test_a_stop_string_terminates(make_env, play, plain, pool, request_of):
    text = "one two one two one"
    output = plain(text)
    stop = pool.tokenizer.decode(output[8:10])
    first = pool.tokenizer.decode(output).index(stop)
    episode = play(env := make_env(stop=[stop]), 5, options=request_of(text))
    assert (episode.terminated, episode.truncated) == (True, False)
    assert episode.infos[-1]["finish_reason"] == "stop"
    assert episode.infos[-1]["output"] == output[: first + 2]
    assert env.stop == (stop,)


def test_eos_on_the_last_token_of_the_budget_terminates(make_env, play, plain, variant, request_of):
    output = plain("aaaa")
    budget = max(output.index(token) for token in output) + 1
    env = make_env(pool=variant(eos_ids=[output[budget - 1]]), max_new_tokens=budget)
    episode = play(env, options=request_of("aaaa"))
    assert (episode.terminated, episode.truncated) == (True, False)


def test_the_end_of_the_context_truncates(make_env, play, variant, request_of):
    env = make_env(pool=variant({"target": 12}))
    episode = play(env, env.action_names.index("draft@2"), options=request_of("aaaaa"))
    assert (episode.terminated, episode.truncated) == (False, True)
    assert episode.infos[-1]["finish_reason"] == "context"
    assert episode.reset_info["max_new_tokens"] == 7
    assert len(episode.infos[-1]["output"]) == 7


def test_in_a_stream_only_the_last_end_is_the_episodes(make_env, play, plain, variant, by_chance):
    eos = plain("one two one two one")[5]
    env = make_env(pool=variant(eos_ids=[eos]), num_requests=6)
    episode = play(env, by_chance(0), seed=0)
    ends = [info for info in episode.infos if info["finish_reason"] is not None]
    assert len(ends) == 6
    assert {"eos", "length"} == {info["finish_reason"] for info in ends}
    assert ends[-1] is episode.infos[-1]
    assert episode.terminated == (ends[-1]["finish_reason"] == "eos") == (not episode.truncated)
    assert len({info["request_id"] for info in ends}) == 6
    for info, following in itertools.pairwise(ends):
        assert info["next_request"]["request_id"] == following["request_id"]
        assert info["next_request"].keys() == episode.reset_info.keys()
        assert (info["next_request"]["action_mask"] == info["action_mask"]).all()
    assert "next_request" not in ends[-1]


def test_after_an_internal_end_observation_and_mask_are_the_next_requests(make_env):
    env = make_env(max_new_tokens=2, num_requests=2)
    env.reset(seed=0)
    env.step(0)
    observation, _, terminated, truncated, info = env.step(0)
    assert (info["finish_reason"], terminated, truncated) == ("length", False, False)
    assert observation.tolist() == env.observer.observe(env.state).tolist()
    assert env.state.num_generated(0) == 0
    assert (info["action_mask"] == env.action_masks()).all()
    assert info["action_mask"].sum() > 1


# Rendering


def test_render_gives_the_text_so_far(make_env, play, pool, variant):
    env = make_env(render_mode="ansi")
    assert env.render() is None
    episode = play(env, seed=0)
    assert env.render() == pool.tokenizer.decode(episode.infos[-1]["output"])
    assert make_env().render() is None
