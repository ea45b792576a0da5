import dataclasses

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
