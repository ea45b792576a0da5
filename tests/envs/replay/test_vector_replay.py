"""Thousands of replays at once are each what the single one is."""

import numpy as np
import pytest

from specgym.envs import ReplayEnv
from specgym.envs.replay.disturbances import Change, Disturbance
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.vector_replay import VectorReplay

NUM_ENVS = 5


@pytest.fixture(scope="module")
def mixture():
    return TraceLibrary(synthetic_traces(8, 30, experts_per_token=2))


def choose(masks, rng):
    """An action for each row, now and then one that is masked."""
    return np.array(
        [
            rng.choice(np.flatnonzero(m)) if rng.random() < 0.9 else rng.integers(len(m))
            for m in masks
        ]
    )


@pytest.mark.parametrize("kind", ["library", "mixture"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_requests": 3, "reward": "utility"},
        {"order": "recorded", "reward": "log_utility"},
        {"disturbance": Disturbance(changes=(Change(1, 2.0, 0.5), Change(2, 0.7)))},
    ],
    ids=str,
)
def test_each_row_is_the_single_environment(request, kind, arguments):
    library = request.getfixturevalue(kind)
    rng = np.random.default_rng(0)
    envs = VectorReplay(library, NUM_ENVS, **arguments)
    singles = [ReplayEnv(library, **arguments) for _ in range(NUM_ENVS)]
    observations = envs.reset(7)
    seen = [single.reset(seed=7 + row)[0] for row, single in enumerate(singles)]
    np.testing.assert_array_equal(observations, seen)
    returns, lengths, num_ends = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int), 0
    seconds = np.zeros(NUM_ENVS)
    for _ in range(200):
        masks = envs.action_masks()
        assert masks.tolist() == [single.action_masks().tolist() for single in singles]
        actions = choose(masks, rng)
        observations, rewards, ends, infos = envs.step(actions)
        for row, single in enumerate(singles):
            seen, reward, terminated, truncated, info = single.step(actions[row])
            returns[row] += reward
            lengths[row] += 1
            seconds[row] += info["iter_seconds"]
            assert rewards[row] == pytest.approx(reward, rel=1e-5, abs=1e-6)
            assert ends[row] == (terminated or truncated)
            if not ends[row]:
                assert infos[row] == {}
            else:
                last = infos[row].pop("terminal_observation")
                np.testing.assert_array_equal(last, seen)
                assert infos[row] == {
                    "episode": {
                        "r": pytest.approx(returns[row]),
                        "l": lengths[row],
                        "seconds": pytest.approx(seconds[row]),
                    },
                    "request_id": info["request_id"],
                    "TimeLimit.truncated": truncated,
                }
                seen, _ = single.reset()
                returns[row] = seconds[row] = 0.0
                lengths[row], num_ends = 0, num_ends + 1
            np.testing.assert_array_equal(observations[row], seen)
    assert num_ends >= NUM_ENVS


@pytest.mark.parametrize("disturbance", [Disturbance(), Disturbance(1.0, 0.05, 0.01)])
def test_a_seed_reproduces_everything(mixture, disturbance):
    def run(seed):
        envs = VectorReplay(mixture, 16, disturbance=disturbance)
        seen, rng = [envs.reset(seed)], np.random.default_rng(0)
        for _ in range(60):
            observations, rewards, *_ = envs.step(choose(envs.action_masks(), rng))
            seen += [observations, rewards]
        return np.concatenate([each.ravel() for each in seen])

    assert run(1).tolist() == run(1).tolist()
    assert run(1).tolist() != run(2).tolist()


def test_seeding_again_starts_anew_and_a_reset_alone_goes_on(mixture):
    envs = VectorReplay(mixture, 4)
    first = envs.reset(3)
    for _ in range(20):
        envs.step(np.full(4, 5))
    assert envs.reset().tolist() != first.tolist()
    assert envs.reset(3).tolist() == first.tolist()


def test_noise_and_drift_are_in_the_rewards_of_every_row(mixture):
    rewards = []
    for disturbance in (Disturbance(), Disturbance(noise=1.0), Disturbance(drift=0.2)):
        envs = VectorReplay(mixture, 64, disturbance=disturbance)
        envs.reset(0)
        action = envs.action_names.index("small@2")
        rewards.append(np.stack([envs.step(np.full(64, action))[1] for _ in range(5)]))
    quiet, noisy, drifting = rewards
    assert (noisy != quiet).all()
    assert (drifting[1:] != quiet[1:]).mean() > 0.9
    assert np.isfinite(rewards).all()


def test_observations_are_finite_and_within_the_space(mixture):
    envs = VectorReplay(mixture, 32, disturbance=Disturbance(3.0, 0.5))
    rng = np.random.default_rng(0)
    observations = envs.reset()
    for _ in range(100):
        assert observations.dtype == np.float32
        assert np.isfinite(observations).all()
        assert (observations >= envs.observation_space.low).all()
        assert (observations <= envs.observation_space.high).all()
        observations, *_ = envs.step(choose(envs.action_masks(), rng))


def test_what_was_returned_does_not_change_later(mixture):
    envs = VectorReplay(mixture, 8)
    observations, masks = envs.reset(), envs.action_masks()
    kept = observations.copy(), masks.copy()
    envs.step(np.full(8, 6))
    assert observations.tolist() == kept[0].tolist()
    assert masks.tolist() == kept[1].tolist()


def test_wrong_calls_are_refused(mixture):
    envs = VectorReplay(mixture, 2)
    with pytest.raises(ValueError, match="call reset"):
        envs.step(np.zeros(2, int))
    envs.reset()
    for actions in ([0], [0, 36], [-1, 0]):
        with pytest.raises(ValueError, match=r"actions: must be 2 of 0\.\.35"):
            envs.step(np.array(actions))
    for wrong in ({"num_envs": 0}, {"num_requests": 0}, {"order": "odd"}, {"split": "train"}):
        with pytest.raises(ValueError, match=r"must be|made with its own"):
            VectorReplay(mixture, **wrong)
