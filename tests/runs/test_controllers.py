import pytest

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
    ],
)
def test_errors_say_the_way_out(spec, message):
    with pytest.raises(ValueError, match=message):
        make_controller(spec, PLANS, [], 0)


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
