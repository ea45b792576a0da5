"""The vector environment of Gymnasium: its form, and the same numbers as one by one."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from specgym.envs import ReplayEnv, ReplayVectorEnv
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.traces import save_traces

ID = "specgym/Replay-v0"


@pytest.fixture(scope="module")
def traces():
    return TraceLibrary(synthetic_traces(8, 30, seed=1))


def choose(masks, rng):
    return np.array([rng.choice(np.flatnonzero(mask)) for mask in masks])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["vector_entry_point", None])
def test_make_vec_makes_what_gymnasium_calls_a_vector_environment(traces, mode):
    envs = gym.make_vec(ID, num_envs=5, vectorization_mode=mode, traces=traces)
    assert isinstance(envs, VectorEnv)
    assert isinstance(envs.unwrapped, ReplayVectorEnv)
    assert envs.num_envs == 5
    assert envs.spec.id == ID
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    single = gym.make(ID, traces=traces)
    assert envs.single_observation_space == single.observation_space
    assert envs.single_action_space == single.action_space
    assert envs.observation_space.shape == (5, *single.observation_space.shape)
    assert envs.action_space.shape == (5,)
    observations, infos = envs.reset(seed=1)
    assert observations in envs.observation_space
    assert infos["action_mask"].shape == (5, single.action_space.n)
    envs.action_space.seed(0)
    for _ in range(50):
        observations, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
        assert observations in envs.observation_space
        assert (rewards.dtype, rewards.shape) == (np.float64, (5,))
        assert terminated.dtype == truncated.dtype == bool
        assert not (terminated & truncated).any()
    envs.close()
    assert envs.closed


def test_a_file_of_traces_is_taken_by_its_name(tmp_path):
    save_traces(tmp_path / "t.npz", synthetic_traces(4, 20))
    envs = gym.make_vec(f"specgym.envs:{ID}", 3, traces=str(tmp_path / "t.npz"), num_requests=2)
    assert envs.reset(seed=0)[0].shape[0] == 3


@pytest.mark.parametrize("num_requests", [1, 3])
def test_it_is_gymnasiums_own_vector_of_single_ones(traces, num_requests):
    makers = [lambda: ReplayEnv(traces, num_requests=num_requests)] * 4
    theirs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = gym.make_vec(ID, 4, traces=traces, num_requests=num_requests)
    rng, num_ends = np.random.default_rng(0), 0
    (a, infos), (b, expected) = (envs.reset(seed=5) for envs in (ours, theirs))
    np.testing.assert_array_equal(a, b)
    for _ in range(150):
        np.testing.assert_array_equal(infos["action_mask"], expected["action_mask"])
        actions = choose(infos["action_mask"], rng)
        (a, r, t, u, infos), (b, s, v, w, expected) = (e.step(actions) for e in (ours, theirs))
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(r, s, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(t, v)
        np.testing.assert_array_equal(u, w)
        ended = np.flatnonzero(t | u)
        assert ("final_obs" in infos) == (len(ended) > 0)
        for row in ended:
            np.testing.assert_array_equal(infos["final_obs"][row], expected["final_obs"][row])
            ids = (each["final_info"]["request_id"][row] for each in (infos, expected))
            assert len(set(ids)) == 1
            assert infos["final_info"]["episode"]["l"][row] > 0
        if len(ended):
            np.testing.assert_array_equal(infos["_final_obs"], t | u)
        num_ends += len(ended)
    assert num_ends > 4


def test_gymnasiums_wrappers_go_on_top(traces):
    envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec(ID, 6, traces=traces))
    rng = np.random.default_rng(0)
    _, infos = envs.reset(seed=0)
    returns = []
    for _ in range(100):
        *_, infos = envs.step(choose(infos["action_mask"], rng))
        if "episode" in infos:
            rows = np.flatnonzero(infos["_episode"])
            ours = infos["final_info"]["episode"]["r"][rows]
            np.testing.assert_allclose(infos["episode"]["r"][rows], ours, rtol=1e-4)
            returns += ours.tolist()
    assert len(returns) > 6


def test_a_seed_repeats_and_no_seed_goes_on(traces):
    envs = gym.make_vec(ID, 3, traces=traces)
    first = envs.reset(seed=4)[0]
    assert envs.unwrapped.np_random_seed == 4
    assert not np.array_equal(envs.reset()[0], first)
    assert np.array_equal(envs.reset(seed=4)[0], first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs: must be a whole number >= 1; got 0"),
        ({"num_envs": 2.5}, "num_envs: must be a whole number >= 1; got 2.5"),
        ({"num_requests": "2"}, "num_requests: must be a whole number >= 1; got '2'"),
        ({"forget_after": True}, "forget_after: must be a whole number >= 1 .*; got True"),
        ({"reward": 5}, "reward: no reward 5"),
        ({"disturbance": 0.5}, "disturbance: must be Disturbance"),
    ],
)
def test_wrong_arguments_are_refused(traces, arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplayVectorEnv(**{"traces": traces} | arguments)


def test_wrong_calls_are_refused(traces):
    envs = ReplayVectorEnv(2, traces=traces)
    with pytest.raises(ValueError, match="call reset"):
        envs.step(np.zeros(2, int))
    for seed in (1.5, "x", -1):
        with pytest.raises(ValueError, match="seed: must be a whole number >= 0"):
            envs.reset(seed=seed)
    with pytest.raises(ValueError, match="options: there are none"):
        envs.reset(options={"request": "synthetic-1"})
    with pytest.raises(ValueError, match="traces: must be a TraceSet or its file; got 5"):
        ReplayVectorEnv(2, traces=5)
