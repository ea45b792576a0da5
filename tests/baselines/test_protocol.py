"""What every controller must do: obey masks, survive anything that a step reports, restore."""

import inspect
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.runs.controllers import FACTORIES, WRAPPERS, make_controller


def maker(spec):
    """Returns what makes the controller of a spec over a plan table."""
    return lambda plans: make_controller(spec, plans, [], 0)


def draws(spec):
    """Returns whether the spec's controller, or the one inside it, draws when it acts."""
    names = [part for part in spec.split(":") if part in FACTORIES]
    return any("seed" in inspect.signature(FACTORIES[name]).parameters for name in names)


SPECS = (
    *FACTORIES,
    *(f"{name}:throughput-aware" for name in WRAPPERS),
    "specrouter:window=4",
    "test-and-set:own_baseline=true:chains=fixed",
    "ucb:scope=request",
    "linucb:scope=request",
    "throughput-aware:scope=request",
    "heuristic:chain=ngram:scope=request",
    "batch-table:gate_tokens=1.5:gate_window=2",
    "goodput:rate=judged",
    "ucb-spec:reward=utility:scope=stream",
    "exp3-spec:loss=cost:mix=0.1:scope=stream",
    "hedge-spec:reward=length",
    "hold:n=4:ucb",
    "hold:n=3:lints",
    "restart:detector=cusum:threshold=1.0:nightjar",
    "restart:delta=0.5:hold:n=2:thompson",
)
OBSERVATION = np.zeros(2, dtype=np.float32)
every_controller = pytest.mark.parametrize("make", [maker(spec) for spec in SPECS], ids=SPECS)


@every_controller
@pytest.mark.parametrize("num_steps", [0, 3, 13, 70, 333])
def test_restored_controller_acts_alike(all_plans, make_decoder, drive, make, num_steps):
    original, restored = make(all_plans), make(all_plans)
    decoder = make_decoder(all_plans, hit_rate=0.7, per_token=0.1)
    drive(original, decoder, num_steps)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    runs = [
        drive(controller, make_decoder(all_plans, hit_rate=0.7, seed=5), 200, begins=False)
        for controller in (original, restored)
    ]
    assert runs[0] == runs[1]
    assert original.state_dict() == restored.state_dict()


@every_controller
def test_restored_state_is_a_copy(all_plans, make_decoder, drive, make):
    controller = make(all_plans)
    drive(controller, make_decoder(all_plans), 50)
    state = controller.state_dict()
    before = json.dumps(state)
    other = make(all_plans)
    other.load_state_dict(state)
    drive(controller, make_decoder(all_plans), 50)
    drive(other, make_decoder(all_plans), 50)
    assert json.dumps(state) == before


@every_controller
def test_state_of_another_table_is_refused(all_plans, ngram_plans, make):
    with pytest.raises(ValueError, match="state must come from a controller over the plans"):
        make(ngram_plans).load_state_dict(make(all_plans).state_dict())


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not draws(spec)])
def test_acting_twice_changes_nothing(all_plans, make_decoder, spec):
    controller = make_controller(spec, all_plans, [], 0)
    decoder = make_decoder(all_plans, hit_rate=0.7)
    mask = np.ones(len(all_plans), dtype=bool)
    for _ in range(150):
        action = controller.act(OBSERVATION, mask)
        assert controller.act(OBSERVATION, mask) == action
        controller.observe(action, 0.0, decoder.step(action, mask))


@every_controller
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_masks_are_obeyed(all_plans, make_decoder, make, data):
    controller = make(all_plans)
    decoder = make_decoder(all_plans, hit_rate=0.5, seed=data.draw(st.integers(0, 99)))
    rows = st.lists(st.booleans(), min_size=len(all_plans), max_size=len(all_plans))
    masks = data.draw(st.lists(rows, min_size=1, max_size=4))
    for step in range(60):
        if step % 25 == 0:
            controller.begin({"request_id": str(step), "num_prompt": 3, "max_new_tokens": 25})
        mask = np.array(masks[step % len(masks)])
        mask[0] = True
        action = controller.act(OBSERVATION, mask)
        assert isinstance(action, int)
        assert mask[action]
        controller.observe(action, 0.0, decoder.step(action, mask))


@every_controller
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_another_plan_than_asked_may_run(all_plans, make_decoder, make, data):
    """A server may do as it likes: outcomes of plans that were never asked for."""
    controller, decoder = make(all_plans), make_decoder(all_plans, hit_rate=0.5)
    actions = st.integers(0, len(all_plans) - 1)
    for action in data.draw(st.lists(actions, min_size=1, max_size=60)):
        controller.observe(action, 0.0, decoder.step(action))
        controller.act(OBSERVATION, np.ones(len(all_plans), dtype=bool))


@every_controller
@pytest.mark.parametrize("reason", ["masked", "budget", "context", "no_proposal"])
def test_an_episode_without_drafts(all_plans, make_decoder, make, reason):
    controller, decoder = make(all_plans), make_decoder(all_plans)
    mask = np.ones(len(all_plans), dtype=bool)
    controller.begin({"request_id": "r", "num_prompt": 5, "max_new_tokens": 200})
    for _ in range(200):
        action = controller.act(OBSERVATION, mask)
        controller.observe(action, 0.0, {**decoder.step(0), "reason": reason if action else ""})
    json.dumps(controller.state_dict(), allow_nan=False)


@every_controller
def test_only_no_speculation_allowed(all_plans, make_decoder, make):
    controller, decoder = make(all_plans), make_decoder(all_plans)
    mask = np.zeros(len(all_plans), dtype=bool)
    mask[0] = True
    for _ in range(200):
        assert controller.act(OBSERVATION, mask) == 0
        controller.observe(0, 0.0, decoder.step(0))


@every_controller
def test_a_fault_teaches_nothing(all_plans, make_decoder, drive, make):
    controller = make(all_plans)
    drive(controller, make_decoder(all_plans), 30)
    before = controller.state_dict()
    fault = {"error": "EngineFault: logits are not finite", "request_id": "r"}
    controller.observe(3, 0.0, fault)
    assert controller.state_dict() == before


@every_controller
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("field", ["iter_seconds", "baseline_seconds"])
def test_times_that_are_none_teach_nothing_wrong(all_plans, make_decoder, make, field, value):
    controller, decoder = make(all_plans), make_decoder(all_plans, hit_rate=0.7)
    mask = np.ones(len(all_plans), dtype=bool)
    for step in range(120):
        action = controller.act(OBSERVATION, mask)
        info = decoder.step(action, mask)
        controller.observe(action, 0.0, {**info, field: value} if step % 3 else info)
    json.dumps(controller.state_dict(), allow_nan=False)


@every_controller
@pytest.mark.parametrize("num_rows", [2, 7, 64])
def test_a_batch_of_rows(all_plans, make_decoder, make, num_rows):
    """Counts are sums over rows, and the baseline is of a token."""
    controller, decoder = make(all_plans), make_decoder(all_plans, hit_rate=0.9)
    mask = np.ones(len(all_plans), dtype=bool)
    for step in range(150):
        active = 1 + step % num_rows
        if step % 10 == 0:
            controller.begin({"request_id": str(step), "num_prompt": 3, "max_new_tokens": 25})
        action = controller.act(OBSERVATION, mask)
        assert mask[action]
        controller.observe(action, 0.0, decoder.batch_step(action, active))
    json.dumps(controller.state_dict(), allow_nan=False)


@every_controller
def test_a_pool_that_cannot_speculate(make, request):
    """One arm: nothing is divided by zero."""
    if any(name in request.node.callspec.id for name in ("static", "chain=", "window=4")):
        pytest.skip("names a plan")
    plans = [(("target",), 0)]
    info = {
        "tokens": 1,
        "drafted": 0,
        "accepted_per_level": [],
        "proposed_per_level": [],
        "executed_action": 0,
        "reason": "",
        "iter_seconds": 1.0,
        "draft_seconds": 0.0,
        "catchup_seconds": 0.0,
        "baseline_seconds": 1.0,
        "forwards": [],
        "divergence": {},
        "finish_reason": None,
    }
    controller = make(plans)
    for _ in range(100):
        assert controller.act(OBSERVATION, np.array([True])) == 0
        controller.observe(0, 0.0, info)


@every_controller
def test_same_seed_same_actions(all_plans, make_decoder, drive, make):
    runs = [drive(make(all_plans), make_decoder(all_plans, seed=3), 200) for _ in range(2)]
    assert runs[0] == runs[1]


def test_importing_controllers_loads_no_engine():
    code = (
        "import sys, specgym.agents, specgym.baselines; "
        "heavy = {'torch', 'stable_baselines3', 'specgym.engine', 'specgym.envs'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
