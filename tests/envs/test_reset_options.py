"""Resets, seeds, misuse, and environments side by side."""

import numpy as np
import pytest

from specgym.engine.types import DecodeRequest, SamplingParams

# Reset


def test_a_request_given_to_reset_is_decoded_and_the_stream_goes_on_after_it(
    make_env, play, request_of
):
    env = make_env(num_requests=2)
    ids = [env.reset(seed=4)[1]["request_id"], env.reset()[1]["request_id"]]
    episode = play(env, seed=4, options=request_of("hello"))
    assert list(dict.fromkeys(episode.column("request_id"))) == ["given", ids[0]]
    assert episode.reset_info["num_prompt"] == 5
    assert env.reset()[1]["request_id"] == ids[1]


def test_token_ids_given_to_reset_are_decoded_with_their_own_budget_and_ends(make_env, play):
    env = make_env()
    prompt = env.pool.encode("one two one two")
    whole = play(env, 0, seed=0, options={"request": DecodeRequest(prompt, 9)})
    assert whole.reset_info["request_id"] == "given"
    assert (whole.reset_info["num_prompt"], whole.reset_info["max_new_tokens"]) == (15, 9)
    output = whole.infos[-1]["output"]
    assert len(output) == 9
    ending = DecodeRequest(prompt, 9, eos_ids=frozenset(output[4:5]))
    episode = play(env, 0, options={"request": ending})
    assert episode.infos[-1]["output"] == output[: output.index(output[4]) + 1]
    assert episode.terminated


def test_the_same_seed_gives_the_same_episode_to_the_bit(make_env, play, by_chance):
    used, fresh = make_env(num_requests=3), make_env(num_requests=3)
    play(used, by_chance(9), seed=7)
    first, second, third = (play(env, by_chance(1), seed=5) for env in (used, used, fresh))
    for other in (second, third):
        assert first.rewards == other.rewards
        assert first.actions == other.actions
        assert np.array_equal(first.observations, other.observations)
        for key in ("iter_seconds", "total_seconds", "utility", "request_id", "accepted_per_level"):
            assert first.column(key) == other.column(key)


def test_another_seed_gives_another_order(make_env):
    env = make_env()
    orders = [
        [env.reset(seed=seed)[1]["request_id"], *(env.reset()[1]["request_id"] for _ in range(5))]
        for seed in range(4)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert all(len(set(order)) == 6 for order in orders)


# Misuse


def test_a_step_after_the_end_or_before_the_start_raises(make_env, play):
    env = make_env()
    with pytest.raises(ValueError, match=r"step: .* call reset\(\)"):
        env.step(0)
    with pytest.raises(ValueError, match=r"action_masks: .* call reset\(\)"):
        env.action_masks()
    play(env, seed=0)
    assert np.flatnonzero(env.action_masks()).tolist() == [0]
    with pytest.raises(ValueError, match=r"step: .* call reset\(\)"):
        env.step(0)


@pytest.mark.parametrize("action", [-1, 31, 1.0, 0.5, "1", None, np.float32(1), np.array([1])])
def test_an_invalid_action_raises_and_changes_nothing(make_env, action):
    env = make_env()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action: must be in 0\.\.30"):
        env.step(action)
    assert env.state.num_generated(0) == 0
    env.step(1)


@pytest.mark.parametrize("action", [3, np.int64(3), np.int32(3), np.array(3)])
def test_any_integer_is_an_action(make_env, action):
    env = make_env()
    env.reset(seed=0)
    *_, info = env.step(action)
    assert info["asked_action"] == 3
    assert type(info["asked_action"]) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": None}, "'requests' is unknown.*'request' and 'divergence_every'"),
        ({"request": "some text"}, r"options\['request'\]: must be a Request"),
        ({"divergence_every": -1}, r"options\['divergence_every'\]: .*-1"),
        ({"divergence_every": 1.5}, r"options\['divergence_every'\]: .*1.5"),
        ({"divergence_every": True}, r"options\['divergence_every'\]: .*True"),
    ],
)
def test_wrong_reset_options_raise_and_leave_the_episode_alone(make_env, options, message):
    env = make_env()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.reset(seed=1, options=options)
    *_, info = env.step(0)
    assert info["context_len"] == len(env.state.tokens[0])


def test_a_reset_that_fails_ends_the_episode(make_env, request_of, variant):
    env = make_env(pool=variant({"target": 60}))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="100 tokens leave no room"):
        env.reset(options=request_of("a" * 100))
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)
    env.reset()
    env.step(0)


@pytest.mark.parametrize("name", ["draft", "mid", "target"])
def test_a_reset_in_the_middle_of_an_iteration_starts_afresh(make_env, play, monkeypatch, name):
    """A signal or a wrapper resets while a member's forward runs; the step then says it failed."""
    env, wanted = make_env(), play(make_env(), 0, seed=3)
    action = env.action_names.index("draft>mid@3")
    env.reset(seed=0)
    env.step(action)
    member = env.pool.members[name]
    forward = member.forward

    def reset_within(*args, **kwargs):
        monkeypatch.undo()
        logits = forward(*args, **kwargs)
        env.reset(seed=3)
        raise KeyboardInterrupt if logits is not None else AssertionError

    monkeypatch.setattr(member, "forward", reset_within)
    with pytest.raises(KeyboardInterrupt):
        env.step(action)
    assert env.state.num_generated(0) == 0
    outputs, done = [], False
    while not done:
        *_, terminated, truncated, info = env.step(action if env.action_masks()[action] else 0)
        done = terminated or truncated
        outputs = info.get("output", outputs)
    assert outputs == wanted.infos[-1]["output"]


@pytest.mark.parametrize("controller_action", ["ngram@3", "draft>mid@3"])
def test_a_reset_between_steps_leaves_nothing_of_the_dropped_request(
    make_env, play, controller_action
):
    env, wanted = make_env(), play(make_env(), 0, seed=3)
    action = env.action_names.index(controller_action)
    for steps in range(1, 5):
        env.reset(seed=steps)
        for _ in range(steps):
            env.step(action)
        assert play(env, action, seed=3).infos[-1]["output"] == wanted.infos[-1]["output"]


# Sharing


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interleaved_environments_on_one_pool_do_not_disturb_each_other(
    make_env, play, by_chance, temperature
):
    def both():
        greedy = [make_env(sampling=SamplingParams(temperature, seed=seed)) for seed in (1, 2)]
        return greedy, [by_chance(1), by_chance(2)]

    envs, policies = both()
    alone = [play(e, c, seed=s) for s, (e, c) in enumerate(zip(envs, policies, strict=True))]
    envs, policies = both()
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    rewards, ended = [[], []], [False, False]
    while not all(ended):
        for index in (0, 1):
            if not ended[index]:
                _, reward, terminated, truncated, info = envs[index].step(
                    policies[index](envs[index])
                )
                rewards[index].append(reward)
                ended[index] = terminated or truncated
                if ended[index]:
                    assert info["output"] == alone[index].infos[-1]["output"]
    assert rewards == [episode.rewards for episode in alone]


def test_requests_are_sampled_with_the_seed_whatever_came_before(make_env, play, request_of):
    outputs = []
    for warm_up in (0, 2):
        env = make_env(sampling=SamplingParams(1.0, seed=5))
        for _ in range(warm_up):
            play(env, seed=1)
        outputs.append(play(env, options=request_of("hello")).infos[-1]["output"])
    assert outputs[0] == outputs[1]
