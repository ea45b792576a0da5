import contextlib
import dataclasses
import inspect

import numpy as np
import pytest

from specgym.agents.policy import Policy, load_policy, save_policy
from specgym.envs.features import FEATURES_VERSION
from specgym.runs import controllers
from specgym.runs.controllers import FACTORIES, make_controller

PLANS = [
    (("target",), 0),
    *[(("ngram", "target"), k) for k in (1, 2, 4)],
    (("draft", "mid", "target"), 2),
]


@pytest.mark.parametrize("name", FACTORIES)
def test_every_name_makes_a_controller(name):
    controller = make_controller(name, PLANS, [], 0)
    assert isinstance(controller.needs_divergence, bool)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tset-and-set", "did you mean 'test-and-set'"),
        ("static:ngram@9", "ngram@4"),
        ("ucb:scope", "option=value"),
        ("ucb:scop=request", "scope"),
        ("ucb:scope=never", "scope"),
        ("none:x=1", "no options"),
        ("ppo", "ppo:"),
        ("ppo:nowhere", "no finished model"),
        ("learned", "no policy is shipped for the pool ''.*specgym record.*specgym train"),
        ("learned:nowhere.npz", "no file nowhere.npz"),
        ("none:state=x", "no options"),
        ("static:", "'static:': nothing stands behind the colon; leave it out"),
        ("ucb:", "nothing stands behind the colon"),
        ("learned:", "nothing stands behind the colon"),
        ("ppo:", "nothing stands behind the colon"),
        ("static:4", "plan must be one of .*, got '4'"),
        ("ucb:exploration=abc", "'ucb:exploration=abc': exploration must be a number .* 'abc'"),
        ("ucb:exploration=true", "exploration must be a number from 0 to 1e.06, got True"),
        ("ucb:exploration=none", "exploration must be a number .*, got None"),
        ("ucb:scope=2", "scope must be one of request, stream, got 2"),
        ("ucb:scope=request:scope=stream", "scope is given twice"),
        ("linucb:num_warm_up=2.5", "num_warm_up must be a whole number >= 2, got 2.5"),
        ("linucb:state=", "there is no file"),
        ("random:seed=abc", "seed must be a whole number >= 0, got 'abc'"),
        ("specrouter:window=abc", "window must be a whole number >= 1, got 'abc'"),
        ("specrouter:window=true", "window must be a whole number >= 1, got True"),
        ("specrouter:memory=abc", "memory must be a number from 0 to 1, got 'abc'"),
        ("test-and-set:own_baseline=maybe", "own_baseline must be true or false, got 'maybe'"),
        ("test-and-set:k_max=2.5", "k_max must be a whole number >= 1, got 2.5"),
        ("test-and-set:chain=5:chains=fixed", "chain must be one of .*, got 5"),
        ("test-and-set:tolerance=x", "tolerance must be a number from 0 to 1, got 'x'"),
    ],
)
def test_errors_say_the_way_out(spec, message):
    with pytest.raises(ValueError, match=message):
        make_controller(spec, PLANS, [], 0)


@pytest.fixture
def policy():
    """A policy that always prefers the last plan."""
    bias = np.arange(len(PLANS))
    layers = ((np.zeros((len(PLANS), 2)), bias),)
    scale = np.ones(2)
    return Policy(tuple(PLANS), ("a", "b"), FEATURES_VERSION, 0 * scale, scale, 9.0, layers)


@pytest.mark.parametrize(
    ("pool", "file"),
    [
        ("smollm2", "smollm2.npz"),
        ("smollm2-moe (upcycled: 8 experts, top-2)", "smollm2-moe.npz"),
        ("smollm2-moe:experts=16:top-k=4 (upcycled: ...)", "smollm2-moe-experts=16-top-k=4.npz"),
    ],
)
def test_learned_takes_the_policy_that_is_shipped_for_the_pool(
    policy, tmp_path, monkeypatch, pool, file
):
    monkeypatch.setattr(controllers, "SHIPPED", tmp_path)
    with pytest.raises(ValueError, match="no policy is shipped"):
        make_controller("learned", PLANS, ["a", "b"], 0, pool)
    save_policy(tmp_path / file, policy)
    controller = make_controller("learned", PLANS, ["a", "b"], 0, pool)
    mask = np.ones(len(PLANS), dtype=bool)
    assert controller.act(np.zeros(2, np.float32), mask) == len(PLANS) - 1
    mask[-1] = False
    assert controller.act(np.zeros(2, np.float32), mask) == len(PLANS) - 2


def test_a_policy_of_older_features_or_other_plans_is_refused(policy, tmp_path):
    older = dataclasses.replace(policy, features_version=FEATURES_VERSION - 1)
    save_policy(tmp_path / "p.npz", older)
    with pytest.raises(ValueError, match="of the features"):
        make_controller(f"learned:{tmp_path / 'p.npz'}", PLANS, ["a", "b"], 0)
    save_policy(tmp_path / "p.npz", policy)
    with pytest.raises(ValueError, match="this pool lacks"):
        make_controller(f"learned:{tmp_path / 'p.npz'}", [PLANS[0], (("x", "target"), 1)], [], 0)


def test_every_shipped_policy_is_whole():
    for path in controllers.SHIPPED.glob("*.npz"):
        assert load_policy(path).features_version == FEATURES_VERSION


def test_options_reach_the_controller():
    request = make_controller("ucb:scope=request", PLANS, [], 0)
    stream = make_controller("ucb:scope=stream", PLANS, [], 0)
    info = {
        "reason": "",
        "executed_action": 0,
        "tokens": 1,
        "iter_seconds": 1.0,
        "baseline_seconds": 1.0,
    }
    for controller in (request, stream):
        controller.observe(0, 0.0, info)
        controller.begin({})
    assert request.state_dict() != stream.state_dict()


def test_static_runs_a_plan_of_any_chain():
    mask = [True] * len(PLANS)
    assert make_controller("static:draft>mid@2", PLANS, [], 0).act(None, mask) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("value", ["abc", "2.5", "true", "none", "-1", "nan", ""])
def test_no_value_of_an_option_fails_in_the_depths(name, value):
    """Each is taken, or refused with a ValueError: never another error."""
    parameters = inspect.signature(FACTORIES[name]).parameters
    for option in [each for each in parameters if each not in ("plans", "plan", "features")]:
        with contextlib.suppress(ValueError):
            make_controller(f"{name}:{option}={value}", PLANS, [], 0)
