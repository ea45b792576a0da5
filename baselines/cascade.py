"""Cascade's test-and-set: try a few plans briefly, run the best for a while, back off from 0."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_choice, check_count, check_flag, check_range
from specgym.baselines.estimates.forward_seconds import ForwardSeconds
from specgym.baselines.estimates.hill_climb import HillClimb
from specgym.baselines.estimates.outcomes import is_sound
from specgym.baselines.plans import Plan, charged_action, check_plans, check_state, plan_name

ALPHA_TIME = 0.2  # of the moving averages that order the ladder; ours


class TestAndSet:
    """Alternates a test phase, which climbs to the best plan, with a set phase, which runs it.

    From the paper: every request starts with a test of at most `max_trials` trials of
    `trial_iterations` iterations; a trial's utility is U = (sum tokens) t0 / (sum seconds); it
    starts from the K that was best in recent history, and climbs (`HillClimb`); U < 1 at K = 1
    ends the test with K = 0, even where another K did better; otherwise the best K of the test
    runs for `set_iterations` iterations; each decision for K = 0 doubles the next set phase.
    Ours, where the paper is silent:

    - Without history the test starts at the lowest rung. The climb's steps go over the K values
      of the plan table, and its "K = 1" is a chain's lowest K there.
    - No trial with U >= 1 means K = 0 as well.
    - The set phases of successive decisions for K = 0 last 16, 32, 64, ... iterations, at most
      `max_set_iterations`; a decision for K > 0, or a new request, goes back to 16.
    - `chains="climb"` climbs over the plans of all chains, ordered by predicted seconds: k draft
      forwards and one forward per verifier, the average seconds of each as measured so far. There
      the early exit closes one chain, and the test goes on with the others while trials are left.
      `chains="fixed"` is the paper's form.
    - t0 is the environment's free probe. `own_baseline=True` is the paper's form: the first
      `baseline_iterations` of a request run at K = 0, and again before the first test after
      `baseline_refresh` iterations.
    - A trial leaves out catch-up seconds, which staying at K > 0 would not cost again, and the
      iterations in which its plan could not run. A proposal of no tokens does count.
    - The end of a request drops an unfinished phase: a trial never mixes two requests. With
      `scope="stream"` the best plan of the last test that had one is where the next request's
      test starts; with `scope="request"` the next request knows nothing. Only the order of the
      ladder outlives both.
    - A test whose next plan is masked ends with the trials that it has.

    Args:
        plans: the plan table, indexed by action.
        chains: `climb` over all chains or stay on a `fixed` one.
        chain: the fixed chain, such as `ngram>target`; None takes the table's first.
        k_max: the largest K that is tried; None takes the table's largest.
        trial_iterations: iterations of a trial.
        max_trials: trials of a test at most.
        set_iterations: iterations of a set phase.
        max_set_iterations: cap of the doubling.
        tolerance: relative difference below which two successive trials count as equal.
        own_baseline: spend iterations at K = 0 on t0.
        baseline_iterations: how many, each time.
        baseline_refresh: iterations after which t0 is measured anew.
        scope: whether the best plan survives a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range, or no plan is left to try.

    Source: Cascade (Utility-Driven Speculative Decoding), arXiv 2506.20675.
    """

    __test__ = False  # the name looks like a test to pytest
    needs_divergence = False

    def __init__(
        self,
        plans: Sequence[Plan],
        chains: str = "climb",
        chain: str | None = None,
        k_max: int | None = None,
        trial_iterations: int = 4,
        max_trials: int = 4,
        set_iterations: int = 16,
        max_set_iterations: int = 512,
        tolerance: float = 0.10,
        own_baseline: bool = False,
        baseline_iterations: int = 4,
        baseline_refresh: int = 100,
        scope: str = "stream",
    ) -> None:
        self._plans = check_plans(plans)
        self._is_fixed = check_choice("chains", chains, ("climb", "fixed")) == "fixed"
        if k_max is not None:
            check_count("k_max", k_max, 1)
        self._rungs = rungs(self._plans, self._is_fixed, chain, k_max)
        self._trial_iterations = check_count("trial_iterations", trial_iterations, 1)
        self._max_trials = check_count("max_trials", max_trials, 1)
        self._set_iterations = check_count("set_iterations", set_iterations, 1)
        self._max_set_iterations = check_count(
            "max_set_iterations", max_set_iterations, set_iterations
        )
        self._tolerance = check_range("tolerance", tolerance, 0.0, 1.0)
        self._own_baseline = check_flag("own_baseline", own_baseline)
        self._baseline_iterations = check_count("baseline_iterations", baseline_iterations, 1)
        self._baseline_refresh = check_count("baseline_refresh", baseline_refresh, 1)
        self._scope = check_choice("scope", scope, ("request", "stream"))
        self._seconds = ForwardSeconds(self._plans, ALPHA_TIME)
        self._best: int | None = None
        self._trials: list[tuple[int, float]] = []  # action and utility, this test's
        self._closed: list[tuple[str, ...]] = []
        self._ladder: list[int] = []
        self._climb: HillClimb | None = None
        self._start_request()

    def begin(self, request: Mapping[str, Any]) -> None:
        """Starts the request with a new test (or its baseline); see `scope` for what survives."""
        if self._scope == "request":
            self._best = None
        self._start_request()

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan on trial or set, or 0 where it is forbidden."""
        if self._phase in ("choose", "test"):
            self._choose_trial(mask)
        return self._action if mask[self._action] else 0

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Counts an iteration towards the phase that it belongs to."""
        if not is_sound(info):
            return
        charged = charged_action(action, info)
        self._seconds.observe(self._plans[charged], info)
        self._since_baseline += 1
        if self._phase == "set":
            self._num_left -= 1
            if self._num_left == 0:
                self._start_cycle()
        elif self._phase != "choose" and charged == self._action:
            seconds = info["iter_seconds"] - info["catchup_seconds"]
            t0 = self._t0 if self._own_baseline else info["baseline_seconds"]
            self._tokens += info["tokens"]
            self._cost += seconds if self._phase == "baseline" else seconds / t0
            self._num_left -= 1
            if self._num_left == 0:
                self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns everything learned, and where the phases stand."""
        return {
            "plans": [plan_name(plan) for plan in self._plans],
            "seconds": self._seconds.state_dict(),
            "best": self._best,
            "phase": [self._phase, self._action, self._num_left, self._tokens, self._cost],
            "test": [list(self._ladder), [list(trial) for trial in self._trials]],
            "closed": [list(chain) for chain in self._closed],
            "climb": None if self._climb is None else self._climb.state_dict(),
            "next_set": self._next_set,
            "baseline": [self._t0, self._since_baseline],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores everything learned, and the phases."""
        check_state(state, self._plans)
        self._seconds.load_state_dict(state["seconds"])
        self._best = state["best"]
        self._phase, self._action, self._num_left, self._tokens, self._cost = state["phase"]
        ladder, trials = state["test"]
        self._ladder = list(ladder)
        self._trials = [(action, utility) for action, utility in trials]
        self._closed = [tuple(chain) for chain in state["closed"]]
        self._climb = None
        if state["climb"] is not None:
            self._climb = HillClimb(1, 0, self._tolerance)
            self._climb.load_state_dict(state["climb"])
        self._next_set = state["next_set"]
        self._t0, self._since_baseline = state["baseline"]

    def _start_request(self) -> None:
        self._next_set = self._set_iterations
        self._t0 = 0.0
        self._since_baseline = self._baseline_refresh
        self._start_cycle()

    def _start_cycle(self) -> None:
        """Starts the baseline where it is wanted and due, else a test."""
        self._trials, self._closed, self._ladder, self._climb = [], [], [], None
        is_due = self._own_baseline and self._since_baseline >= self._baseline_refresh
        if is_due:
            self._run("baseline", 0, self._baseline_iterations)
        else:
            self._run("choose", 0, 0)

    def _run(self, phase: str, action: int, num_iterations: int) -> None:
        """Enters a phase: `baseline`, `choose` (no plan on trial yet), `test` or `set`."""
        self._phase, self._action, self._num_left = phase, action, num_iterations
        self._tokens, self._cost = 0, 0.0

    def _choose_trial(self, mask: np.ndarray) -> None:
        """Makes the climb's next plan the one on trial; decides where there is none to try."""
        if self._climb is None:
            self._ladder = self._order(mask)
            if not self._ladder:
                self._decide()
                return
            start = self._ladder.index(self._best) if self._best in self._ladder else 0
            self._climb = HillClimb(len(self._ladder), start, self._tolerance)
        assert self._climb.rung is not None
        action = self._ladder[self._climb.rung]
        if not mask[action]:
            self._decide()
        elif self._phase == "choose":
            self._run("test", action, self._trial_iterations)

    def _order(self, mask: np.ndarray) -> list[int]:
        """The actions open to the climb, by predicted cost."""
        options = [a for a in self._rungs if mask[a] and self._plans[a][0] not in self._closed]
        if self._is_fixed:
            return options  # in order of K
        return sorted(
            options, key=lambda a: (self._predicted_seconds(self._plans[a]), self._plans[a][1])
        )

    def _predicted_seconds(self, plan: Plan) -> float:
        """k draft forwards and one forward per verifier; an unmeasured member is as dear as any."""
        chain, k = plan
        curves = {name: self._seconds.verify(name) for name in self._plans[0][0] + chain[1:]}
        known = {name: curve[1] for name, curve in curves.items() if curve is not None}
        dearest = max(known.values(), default=1.0)
        drafting = self._seconds.draft(chain[0], 1)
        drafting = dearest if drafting is None else drafting
        return k * drafting + sum(known.get(name, dearest) for name in chain[1:])

    def _finish(self) -> None:
        """Concludes the baseline, or a trial: early exit, climb on, or decide."""
        if self._phase == "baseline":
            self._t0 = self._cost / self._baseline_iterations
            self._since_baseline = 0
            self._start_cycle()
            return
        utility = self._tokens / self._cost
        self._trials.append((self._action, utility))
        chain, k = self._plans[self._action]
        lowest = min(self._plans[a][1] for a in self._rungs if self._plans[a][0] == chain)
        if k == lowest and utility < 1.0:
            self._closed.append(chain)
            self._climb = None
        else:
            assert self._climb is not None
            self._climb.record(utility)
        is_over = self._climb is not None and self._climb.rung is None
        if is_over or len(self._trials) == self._max_trials:
            self._decide()
        else:
            self._run("choose", 0, 0)

    def _decide(self) -> None:
        """Sets the best plan of the test, or no speculation where none was worth it."""
        worthy = [
            (utility, -index, action)
            for index, (action, utility) in enumerate(self._trials)
            if utility >= 1.0 and self._plans[action][0] not in self._closed
        ]
        if worthy:
            self._best = max(worthy)[-1]
            self._next_set = self._set_iterations
            self._run("set", self._best, self._set_iterations)
        else:
            self._run("set", 0, self._next_set)
            self._next_set = min(2 * self._next_set, self._max_set_iterations)


def rungs(plans: Sequence[Plan], is_fixed: bool, chain: str | None, k_max: int | None) -> list[int]:
    """Returns the speculative actions that a climb may visit, in order of K.

    Args:
        plans: the plan table, indexed by action.
        is_fixed: keep to one chain.
        chain: that chain's name, such as `ngram>target`; None takes the table's first.
        k_max: the largest K; None takes all.

    Raises:
        ValueError: the chain is not in the table, was given without being fixed, or no K is left.
    """
    names = list(dict.fromkeys(">".join(members) for members, _ in plans[1:]))
    if chain is not None and not is_fixed:
        raise ValueError(f'chain needs chains="fixed", got chain={chain!r} with chains="climb"')
    if chain is not None and chain not in names:
        raise ValueError(f"chain must be one of {', '.join(names) or 'none'}, got {chain!r}")
    wanted = [chain or names[0]] if is_fixed and names else names
    found = [
        action
        for action, (members, k) in enumerate(plans)
        if ">".join(members) in wanted and (k_max is None or k <= k_max)
    ]
    if not found and k_max is not None:
        known = sorted({k for members, k in plans[1:] if ">".join(members) in wanted})
        raise ValueError(f"k_max must be at least the least K of {known}, got {k_max!r}")
    return sorted(found, key=lambda action: plans[action][1])
