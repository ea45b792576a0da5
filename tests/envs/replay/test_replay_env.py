"""The single replay: what Gymnasium and stable-baselines3 expect, its options."""

import copy
import dataclasses
import itertools
import json
import pickle
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from specgym.envs import ReplayEnv
from specgym.envs.replay.disturbances import Disturbance
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.traces import save_traces
from specgym.envs.workloads import Request

ID = "specgym/Replay-v0"


@pytest.fixture(scope="module")
def mixture():
    """Synthetic traces of a mixture of experts with a head and two models."""
    return TraceLibrary(synthetic_traces(8, 30, experts_per_token=2))


# Checkers and copies


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_both_checkers_pass_it(mixture, noise):
    arguments = {"traces": mixture, "num_requests": 2, "disturbance": Disturbance(noise, 0.01)}
    check_env(ReplayEnv(**arguments), skip_render_check=True)  # it has no spec
    check_env(gym.make(ID, **arguments).unwrapped)
    check_env_sb3(ReplayEnv(**arguments))
    check_env_sb3(gym.make(ID, **arguments))


def test_it_is_registered_as_deterministic():
    assert not gym.spec(ID).nondeterministic
    assert gym.spec(ID).max_episode_steps is None


@pytest.mark.parametrize("how", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_as_the_original_does(mixture, by_chance, how):
    env = ReplayEnv(mixture, num_requests=2, disturbance=Disturbance(1.0, 0.1))
    env.reset(seed=1)
    for _ in range(5):
        env.step(0)
    twin = how(env)
    for step in range(40):
        action = by_chance(step)(env)
        returns = [each.step(action) for each in (env, twin)]
        assert returns[0][0].tolist() == returns[1][0].tolist()
        assert returns[0][1:4] == returns[1][1:4]
        if any(returns[0][2:4]):
            assert env.reset()[1]["request_id"] == twin.reset()[1]["request_id"]


def test_a_seed_makes_an_episode_and_what_follows_reproducible(mixture, play, by_chance):
    def three(seed):
        env = ReplayEnv(mixture, disturbance=Disturbance(1.0, 0.05))
        episodes = [play(env, by_chance(0), seed=seed), *(play(env, by_chance(1)) for _ in "12")]
        return [(e.reset_info["request_id"], e.rewards) for e in episodes]

    assert three(5) == three(5)
    assert three(5) != three(6)


def test_maskable_ppo_learns_on_it(mixture):
    model = MaskablePPO("MlpPolicy", ReplayEnv(mixture), n_steps=64, batch_size=32, seed=0)
    model.learn(128)


# Episodes


def test_ends_terminate_or_truncate_as_the_trace_says(mixture, play, by_chance):
    env = ReplayEnv(mixture)
    ends = set()
    for trace in mixture.traces:
        episode = play(env, by_chance(0), options={"request": trace.request_id})
        last = episode.infos[-1]
        ends.add((last["finish_reason"], episode.terminated, episode.truncated))
        assert last["output"] == trace.output.tolist()
        assert sum(episode.column("tokens")) == len(trace)
        assert last["context_len"] == len(trace.prompt) + len(trace)
        assert np.flatnonzero(last["action_mask"]).tolist() == [0]
        assert set(episode.column("finish_reason")[:-1]) <= {None}
    assert ends == {("eos", True, False), ("length", False, True)}


def test_a_stream_tells_of_the_next_request_and_ends_with_the_last(mixture, play, by_chance):
    episode = play(ReplayEnv(mixture, num_requests=3), by_chance(0), seed=0)
    ends = [index for index, reason in enumerate(episode.column("finish_reason")) if reason]
    assert len(ends) == 3
    assert ends[-1] == len(episode.infos) - 1
    for index in ends[:-1]:
        info = episode.infos[index]
        assert info["next_request"]["request_id"] == episode.infos[index + 1]["request_id"]
        assert info["action_mask"].tolist() == info["next_request"]["action_mask"].tolist()
    assert "next_request" not in episode.infos[-1]


def test_a_masked_action_runs_as_no_speculation_and_says_so(mixture):
    env = ReplayEnv(mixture)
    env.reset(seed=0)
    while env.action_masks().all():
        env.step(0)
    masked = int(np.flatnonzero(~env.action_masks())[0])
    info = env.step(masked)[-1]
    assert (info["asked_action"], info["executed_action"]) == (masked, 0)
    assert info["reason"] == "masked"
    assert info["tokens"] == 1


def test_what_proposes_nothing_is_no_speculation(mixture, play):
    env = ReplayEnv(mixture)
    episode = play(env, lambda env: 5 if env.action_masks()[5] else 0, seed=0)
    idle = [info for info in episode.infos if info["reason"] == "no_proposal"]
    assert idle
    assert {info["executed_action"] for info in idle} == {0}
    assert {(info["chain"], info["k"], info["tokens"]) for info in idle} == {("target", 0, 1)}


def test_seconds_add_up_and_info_is_json(mixture, play, by_chance):
    for info in play(ReplayEnv(mixture), by_chance(2), seed=0).infos:
        parts = sum(info[f"{part}_seconds"] for part in ("draft", "verify", "catchup"))
        assert 0 < parts < info["iter_seconds"] == info["total_seconds"]
        assert sum(f["seconds"] for f in info["forwards"]) == pytest.approx(parts)
        relative = info["iter_seconds"] / info["baseline_seconds"]
        assert info["utility"] == pytest.approx(info["tokens"] / relative)
        json.dumps({key: value for key, value in info.items() if key != "action_mask"})


def test_divergence_comes_when_it_is_asked_for(mixture, play, by_chance):
    env = ReplayEnv(mixture)
    assert not any(play(env, by_chance(0), seed=0).column("divergence"))
    episode = play(env, by_chance(0), seed=0, options={"divergence_every": 2})
    uses = Counter()
    for info in episode.infos:
        chain = info["chain"].split(">")
        wanted = info["k"] > 0 and uses[info["chain"]] % 2 == 0
        pairs = [f"{a}>{b}" for a, b in itertools.pairwise(chain)]
        assert list(info["divergence"]) == (pairs if wanted else [])
        uses[info["chain"]] += 1


def test_steps_out_of_turn_and_actions_out_of_range_are_refused(mixture):
    env = ReplayEnv(mixture)
    for call in (lambda: env.step(0), env.action_masks):
        with pytest.raises(ValueError, match="call reset"):
            call()
    env.reset(seed=0)
    for action in (-1, 36, 1.5, None):
        with pytest.raises(ValueError, match=r"action: must be in 0\.\.35"):
            env.step(action)


# Requests and splits


def test_every_request_comes_once_before_any_comes_again(mixture):
    env = ReplayEnv(mixture)
    ids = [env.reset(seed=3)[1]["request_id"]] + [env.reset()[1]["request_id"] for _ in range(15)]
    everyone = {trace.request_id for trace in mixture.traces}
    assert set(ids[:8]) == set(ids[8:]) == everyone
    assert ids[:8] != ids[8:]


def test_the_recorded_order_can_be_kept(mixture):
    env = ReplayEnv(mixture, order="recorded")
    ids = [env.reset(seed=3)[1]["request_id"]] + [env.reset()[1]["request_id"] for _ in range(7)]
    assert ids == [trace.request_id for trace in mixture.traces]


def test_splits_and_k_values_choose(traces):
    held_out = ReplayEnv(traces, split="held-out", k_values=(2, 4))
    assert {trace.split for trace in held_out.library.traces} == {"held-out"}
    assert held_out.action_names[:4] == ("none", "ngram@2", "ngram@4", "draft@2")
    assert len(ReplayEnv(traces).library) == 6
    assert held_out.features == ReplayEnv(traces, split="train").features


def test_a_subset_of_k_values_does_what_it_did_among_all(traces):
    all_, some = ReplayEnv(traces), ReplayEnv(traces, k_values=(3,))
    options = {"request": traces.traces[1].request_id}
    observations = [env.reset(seed=0, options=options)[0].tolist() for env in (all_, some)]
    assert observations[0] == observations[1]
    while some.action_masks()[-1]:
        name = some.action_names[some.np_random.integers(len(some.plans))]
        steps = [env.step(env.action_names.index(name)) for env in (all_, some)]
        assert steps[0][0].tolist() == steps[1][0].tolist()
        assert steps[0][1] == steps[1][1]


def test_requests_are_found_by_id(mixture):
    env = ReplayEnv(mixture)
    for request in ("synthetic-3", Request("synthetic-3", "", "")):
        assert env.reset(options={"request": request})[1]["request_id"] == "synthetic-3"
    with pytest.raises(ValueError, match="no trace of 'nobody' among these 8"):
        env.reset(options={"request": "nobody"})
    with pytest.raises(ValueError, match="must be a Request or its id; got 3"):
        env.reset(options={"request": 3})
    with pytest.raises(ValueError, match="'colour' is unknown"):
        env.reset(options={"colour": 3})


def test_a_file_is_as_good_as_its_traces(tmp_path, play, by_chance):
    traces = synthetic_traces(3, 12)
    save_traces(tmp_path / "some.npz", traces)
    sources = (traces, tmp_path / "some.npz", str(tmp_path / "some.npz"), TraceLibrary(traces))
    runs = [play(ReplayEnv(source), by_chance(0), seed=0).rewards for source in sources]
    assert runs == [runs[0]] * 4


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"num_requests": 0}, "num_requests: must be a whole number >= 1; got 0"),
        ({"order": "backwards"}, "order: must be permuted or recorded; got 'backwards'"),
        ({"reward": "fun"}, "reward: no reward 'fun'"),
        ({"split": "train"}, "the library was made with its own"),
        ({"k_values": (1,)}, "the library was made with its own"),
        ({"traces": "nowhere.npz"}, r"no file nowhere\.npz"),
        ({"traces": synthetic_traces(3, 4), "split": "odd"}, "split: must be train, held-out or"),
        ({"traces": synthetic_traces(3, 4), "k_values": (5,)}, "k_values: must be some of 1, 2"),
    ],
)
def test_wrong_arguments_are_refused(mixture, wrong, why):
    with pytest.raises(ValueError, match=why):
        ReplayEnv(**{"traces": mixture} | wrong)


def test_traces_without_costs_are_refused(traces):
    with pytest.raises(ValueError, match="no costs were measured"):
        ReplayEnv(dataclasses.replace(traces, costs=None))


def test_synthetic_traces_pass_the_checks_of_a_file(tmp_path):
    for experts in (0, 2):
        save_traces(tmp_path / "some.npz", synthetic_traces(4, 9, experts_per_token=experts))
        assert len(ReplayEnv(tmp_path / "some.npz").library) == 4
    with pytest.raises(ValueError, match="num_requests and num_tokens: must be >= 1"):
        synthetic_traces(0)
