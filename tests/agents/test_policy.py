"""The file of a learned policy: what is in it, what is refused, and the pools it fits."""

import json

import numpy as np
import pytest

from specgym.agents.policy import load_policy, save_policy


@pytest.fixture
def observations():
    return np.random.default_rng(1).normal(size=(50, 5)).astype(np.float32)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_file_holds_the_whole_policy(make_policy, tmp_path, observations, activation):
    policy = make_policy(activation=activation)
    save_policy(tmp_path / "p.npz", policy)
    loaded = load_policy(tmp_path / "p.npz")
    assert loaded.plans == policy.plans
    assert loaded.features == policy.features
    assert loaded.features_version == policy.features_version
    assert loaded.about == policy.about
    assert np.array_equal(loaded.scores(observations), policy.scores(observations))
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def test_scores_are_those_of_the_network(make_policy, observations):
    policy = make_policy()
    (first, first_bias), (last, last_bias) = policy.layers
    x = ((observations[3] - policy.mean) / policy.scale).clip(-3.0, 3.0)
    by_hand = last @ np.tanh(first @ x + first_bias) + last_bias
    assert policy.scores(observations)[3] == pytest.approx(by_hand, abs=1e-5)


def test_the_same_table_fits_as_it_is(make_policy):
    policy = make_policy()
    assert policy.fit(policy.plans, policy.features, 2) is policy


def test_another_order_is_mapped_by_name(make_policy, observations):
    policy = make_policy()
    order = [0, 6, 5, 4, 3, 2, 1]
    features = [*policy.features[::-1], "new"]
    mapped = policy.fit([policy.plans[action] for action in order], features)
    seen = np.column_stack([observations[:, ::-1], np.full(50, 7.0, np.float32)])
    expected = policy.scores(observations)[:, order]
    assert mapped.scores(seen) == pytest.approx(expected, abs=1e-6)


def test_fewer_plans_keep_their_scores(make_policy, observations):
    policy = make_policy()
    kept = [0, 1, 4, 5]
    mapped = policy.fit([policy.plans[action] for action in kept], policy.features)
    expected = policy.scores(observations)[:, kept]
    assert mapped.scores(observations) == pytest.approx(expected, abs=1e-6)


def test_plans_it_does_not_know_never_run(make_policy, observations, tmp_path):
    policy = make_policy()
    more = [*policy.plans[:4], (("ngram", "target"), 6), *policy.plans[4:]]
    mapped = policy.fit(more, policy.features)
    scores = mapped.scores(observations)
    assert (scores[:, 4] == -np.inf).all()
    assert np.delete(scores, 4, axis=1) == pytest.approx(policy.scores(observations), abs=1e-6)
    save_policy(tmp_path / "p.npz", mapped)
    assert np.array_equal(load_policy(tmp_path / "p.npz").scores(observations), scores)


def test_a_chain_that_came_later_never_runs_beside_fewer_plans(make_policy, observations):
    """The pool lacks plans that the policy knows, and has a drafter that it does not know."""
    policy = make_policy()
    kept = [0, 1, 4]
    mapped = policy.fit([policy.plans[a] for a in kept] + [(("x", "target"), 1)], policy.features)
    scores = mapped.scores(observations)
    assert scores[:, :3] == pytest.approx(policy.scores(observations)[:, kept], abs=1e-6)
    assert (scores[:, 3] == -np.inf).all()
    other_k = [*policy.plans[:2], (("ngram", "target"), 5)]
    with pytest.raises(ValueError, match=r"lacks ngram@2.*has ngram@5"):
        policy.fit(other_k, policy.features)


@pytest.mark.parametrize(
    ("plans", "features", "version", "message"),
    [
        ([(("t",), 0), (("x", "t"), 1)], "same", 2, "lacks ngram@1.*has x@1"),
        ([(("t",), 0)], "same", 2, "lacks ngram@1"),
        ("same", ("a", "b"), 2, "looks at 'c"),
        ("same", "same", 3, "version 2 of the features"),
    ],
)
def test_pools_that_do_not_fit_are_refused(make_policy, plans, features, version, message):
    policy = make_policy()
    plans = policy.plans if plans == "same" else plans
    features = policy.features if features == "same" else features
    with pytest.raises(ValueError, match=message):
        policy.fit(plans, features, version)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": np.zeros(4)}, "mean: must be finite numbers of shape"),
        ({"scale": np.zeros(5)}, "above 0"),
        ({"clip": 0.0}, "above 0"),
        ({"features": ("a", "b", "b", "d", "e")}, "different names"),
        ({"layers": ()}, "at least one layer"),
        ({"layers": ((np.zeros((6, 5)), np.zeros(6)),)}, "weight.0"),
        ({"layers": ((np.full((7, 5), np.nan), np.zeros(7)),)}, "weight.0: must be finite"),
        ({"activation": "gelu"}, "one of tanh, relu"),
        ({"plans": ((("ngram", "target"), 1),)}, "no speculation"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(make_policy, changes, message):
    with pytest.raises(ValueError, match=message):
        make_policy(**changes)


def test_broken_files_are_refused_with_a_reason(make_policy, tmp_path):
    path = tmp_path / "p.npz"
    with pytest.raises(ValueError, match="no file"):
        load_policy(path)
    save_policy(path, make_policy())
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be used.*specgym train"):
            load_policy(path)
    path.write_bytes(whole)
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    for changes, message in (
        ({"schema": "other"}, "something else"),
        ({"version": 9}, "version is 9"),
        ({"num_layers": 3}, "weight.2"),
        ({"plans": 3}, "cannot be used"),
    ):
        np.savez(path, **arrays | {"header": np.array(json.dumps(header | changes))})
        with pytest.raises(ValueError, match=message):
            load_policy(path)
    np.savez(path, something=np.zeros(3))
    with pytest.raises(ValueError, match="cannot be used"):
        load_policy(path)
    np.savez(path, **arrays | {"header": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="cannot be used"):
        load_policy(path)
