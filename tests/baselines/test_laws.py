"""Laws for every controller that learns: it finds what is best, and units do not matter."""

import inspect

import numpy as np
import pytest

from specgym.baselines.online import OnlineController
from specgym.runs.controllers import FACTORIES, make_controller

CHAINS = (("eagle", "target"), ("small", "target"))
PLANS = [(("target",), 0), *((chain, k) for chain in CHAINS for k in (1, 2, 4))]
ALPHAS = {"eagle": 0.85, "small": 0.6}
COSTS = {"eagle": (1.15, 1.2, 2.4), "small": (1.1, 1.3, 1.7)}  # the best is eagle@2: 2.57 at 1.2
BEST = 2
OBSERVATION = np.zeros(1)
SHARES = {  # of the best arm among the last plays of 5,000
    "specrouter": None,  # reads forwards, which are not made here
    "throughput-aware:margin=1.0:probe_every=none:window=200": 0.95,
    "goodput:rate=judged:probe_every=none:window=200": None,  # its cost is linear in K
    "marginal-cost:probe_every=none:window=200": None,  # stops where the next K does not pay
    "thompson": 0.95,
    "ucb": 0.8,
    "ucb-tuned": 0.8,
    "discounted-ucb:gamma=0.998": 0.8,
    "sliding-ucb:window=500:exploration=0.05": 0.8,
    "ucb-spec:scope=stream:reward=utility": None,  # round-robin for thousands of plays
    "gaussian-thompson": 0.9,
    "beta-thompson": 0.9,
    "hedge-spec:window=200": 0.8,
    "nightjar": 0.8,
    "linucb": 0.8,
    "lints": 0.8,
    "hold:n=5:ucb": 0.8,
    "restart:ucb": 0.8,
}
FINDERS = {spec: share for spec, share in SHARES.items() if share is not None}


def play(controller, make_info, num_steps, order=None, unit=1.0):
    """Plays a table of known costs and rates; the plans that ran, by their place in PLANS."""
    order = list(range(len(PLANS))) if order is None else order
    rng, ran, mask = np.random.default_rng(0), [], np.ones(len(PLANS), dtype=bool)
    for _ in range(num_steps):
        action = controller.act(OBSERVATION, mask)
        ran.append(order[action])
        chain, k = PLANS[order[action]]
        draws = rng.random(4)
        accepted = int((draws[:k] < ALPHAS[chain[0]]).cumprod().sum()) if k else 0
        cost = COSTS[chain[0]][(1, 2, 4).index(k)] if k else 1.0
        controller.observe(action, 0.0, make_info(action, accepted, cost=cost, baseline=unit))
    return ran


@pytest.mark.parametrize("spec", FINDERS)
def test_the_best_arm_is_found(make_info, spec):
    ran = play(make_controller(spec, PLANS, [], 0), make_info, 5000)
    assert ran[-1000:].count(BEST) >= FINDERS[spec] * 1000


@pytest.mark.parametrize("spec", [spec for spec in SHARES if spec != "specrouter"])
def test_units_of_time_do_not_matter(make_info, spec):
    """By a power of two, so that ratios are the same to the last bit."""
    runs = [
        play(make_controller(spec, PLANS, [], 0), make_info, 600, unit=unit) for unit in (1.0, 8.0)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("spec", FINDERS)
def test_the_order_of_arms_does_not_matter_in_the_end(make_info, spec):
    order = [0, 6, 2, 4, 1, 5, 3]
    plans = [PLANS[index] for index in order]
    ran = play(make_controller(spec, plans, [], 0), make_info, 5000, order=order)
    assert ran[-1000:].count(BEST) >= FINDERS[spec] * 1000


@pytest.mark.parametrize("spec", [spec for spec in SHARES if spec != "specrouter"])
def test_results_that_come_two_steps_late_do_no_harm(make_info, spec):
    controller, mask = make_controller(spec, PLANS, [], 0), np.ones(len(PLANS), dtype=bool)
    late = []
    for step in range(300):
        late.append(controller.act(OBSERVATION, mask))
        assert mask[late[-1]]
        if step >= 2:
            action = late.pop(0)
            controller.observe(action, 0.0, make_info(action, min(step % 3, PLANS[action][1])))


SCOPED = [
    name
    for name, factory in FACTORIES.items()
    if issubclass(factory, OnlineController) and "scope" in inspect.signature(factory).parameters
]


@pytest.mark.parametrize("scope", ["request", "stream"])
@pytest.mark.parametrize("name", SCOPED)
def test_a_request_ends_what_is_known_where_the_scope_is_the_request(make_info, name, scope):
    controller = make_controller(f"{name}:scope={scope}", PLANS, [], 0)
    fresh = controller.state_dict() | {"rng": None}
    play(controller, make_info, 40)
    known = controller.state_dict() | {"rng": None}
    controller.begin({"request_id": "next", "num_prompt": 3, "max_new_tokens": 9})
    now = controller.state_dict() | {"rng": None}
    assert now == (fresh if scope == "request" else known)
    assert known != fresh
