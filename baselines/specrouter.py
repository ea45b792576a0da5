"""SpecRouter's scheduler: run the chain whose predicted time per token is least."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.acceptance import PairAcceptance
from specgym.baselines.estimates.expected_cycle import expected_over_lengths, expected_verification
from specgym.baselines.estimates.forward_seconds import ForwardSeconds
from specgym.baselines.estimates.outcomes import is_sound
from specgym.baselines.estimates.probing import Probing
from specgym.baselines.estimates.proposal_length import ProposalLength
from specgym.baselines.plans import (
    Plan,
    charged_action,
    check_plans,
    check_state,
    group_by_chain,
    plan_name,
)
from specgym.baselines.rows import per_row

Prediction = tuple[float, float]  # expected seconds and tokens of one cycle


class SpecRouter:
    """Predicts every plan's effective time per token, and runs the plan that has the least.

    From the paper: SimScore(i, j) = 1 - EMA[D_TV] (Eq. 5), alpha_ij = f(SimScore) (Eq. 6), T_i =
    EMA of a member's forward seconds, T_eff(C) = expected seconds per cycle over expected tokens
    per cycle (Eq. 7), and the argmin runs. Ours, where the paper is silent:

    - f is fitted on line (`PairAcceptance`), T depends on the tokens fed (`ForwardSeconds`), and
      Eq. 7 propagates distributions (`expected_verification`), with the measured one of how many
      tokens the drafter proposes (`ProposalLength`).
    - No speculation is a candidate with T_eff = t0, the environment's baseline.
    - K is searched as well as the chain. `window=4` is the paper's form.
    - Cold start: each chain runs for `profile_iterations` iterations, in turn with the largest
      and the smallest K that is allowed, before the argmin decides.
    - Every `probe_every`-th iteration runs the plan longest not run (the chain first, then its
      K): a chain whose estimate is bad would otherwise never be measured again. None never does.
    - What is learned survives requests: the paper's state is that of the server.

    Args:
        plans: the plan table, indexed by action.
        window: the one K that is used; None searches all of the table's.
        alpha_time: weight of a new forward's seconds.
        alpha_sim: weight of a new D_TV.
        alpha_length: weight of a new proposal in the distribution of lengths.
        memory: share of the calibration's evidence kept from one iteration to the next.
        profile_iterations: iterations that each chain is tried for at the start.
        probe_every: iterations from one probe to the next; None for no probes.

    Raises:
        ValueError: a hyper-parameter is out of range, or no plan has K = `window`.

    Source: SpecRouter, arXiv 2505.07680, Eq. 5-7 and Alg. 1.
    """

    needs_divergence = True

    def __init__(
        self,
        plans: Sequence[Plan],
        window: int | None = None,
        alpha_time: float = 0.2,
        alpha_sim: float = 0.1,
        alpha_length: float = 0.1,
        memory: float = 0.98,
        profile_iterations: int = 4,
        probe_every: int | None = 64,
    ) -> None:
        self._plans = check_plans(plans)
        check_range("alpha_time", alpha_time, 0.0, 1.0)
        check_range("alpha_sim", alpha_sim, 0.0, 1.0)
        check_range("alpha_length", alpha_length, 0.0, 1.0)
        check_range("memory", memory, 0.0, 1.0)
        self._actions_by_chain = candidates(self._plans, window)
        self._probing = Probing(
            self._actions_by_chain, len(self._plans), profile_iterations, probe_every
        )
        self._seconds = ForwardSeconds(self._plans, alpha_time)
        self._pairs = {
            f"{proposer}>{verifier}": PairAcceptance(alpha_sim, memory)
            for chain in self._actions_by_chain
            for proposer, verifier in pairwise(chain)
        }
        max_k = max(k for _, k in self._plans)
        self._lengths = {
            chain[0]: ProposalLength(max_k, alpha_length) for chain in self._actions_by_chain
        }
        self._baseline_seconds: float | None = None
        self._records = [[0, 0.0, 0.0, 0.0, 0] for _ in self._plans]
        self._predictions: list[Prediction | None] | None = None

    def begin(self, request: Mapping[str, Any]) -> None:
        """Takes note of a new request: what was learned stays."""

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the action to profile, to probe, or of least predicted time per token."""
        allowed = mask.tolist()
        tried = self._probing.due(allowed)
        return self._fastest(allowed) if tried is None else tried

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Learns from a step: forward seconds, similarities, acceptances, proposal lengths."""
        if not is_sound(info):
            return
        info = per_row(info)
        charged = charged_action(action, info)
        chain, k = self._plans[charged]
        self._record(charged, info)
        self._seconds.observe(self._plans[charged], info)
        self._baseline_seconds = info["baseline_seconds"]
        self._seconds.anchor(chain[-1], info["baseline_seconds"])
        for pair, divergence in info["divergence"].items():
            if pair in self._pairs:
                self._pairs[pair].observe_divergence(divergence)
        if chain in self._actions_by_chain:
            self._lengths[chain[0]].observe(info["drafted"], k)
            if info["executed_action"] == charged and info["finish_reason"] is None:
                self._judge(chain, info["accepted_per_level"], info["proposed_per_level"])
        self._probing.note(charged)
        self._predictions = None

    def predictions(self) -> dict[str, float | None]:
        """Returns T_eff of every plan by name, in seconds per token; None where unknown."""
        return {
            plan_name(plan): prediction and prediction[0] / prediction[1]
            for plan, prediction in zip(self._plans, self._predict(), strict=True)
        }

    def calibration(self) -> dict[str, Any]:
        """Returns what was predicted against what came out, for the report.

        `pairs` holds, per pair of members, predicted and realised acceptance per judged token.
        `plans` holds, per plan that ran, T_eff as predicted just before each of its iterations
        and as measured: ratios of sums, in seconds per token. The measured one leaves out
        catch-up, as Eq. 7 does, and holds what lies between the forwards, which Eq. 7 does not.
        """
        rows = {}
        for plan, record in zip(self._plans, self._records, strict=True):
            num_iterations, predicted_seconds, predicted_tokens, seconds, tokens = record
            if num_iterations:
                rows[plan_name(plan)] = {
                    "num_iterations": num_iterations,
                    "predicted_seconds_per_token": predicted_seconds / predicted_tokens,
                    "measured_seconds_per_token": seconds / tokens,
                }
        pairs = {name: pair.report() for name, pair in self._pairs.items()}
        return {"pairs": pairs, "plans": rows}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything learned."""
        return {
            "plans": [plan_name(plan) for plan in self._plans],
            "seconds": self._seconds.state_dict(),
            "pairs": {name: pair.state_dict() for name, pair in self._pairs.items()},
            "lengths": {name: length.state_dict() for name, length in self._lengths.items()},
            "probing": self._probing.state_dict(),
            "baseline_seconds": self._baseline_seconds,
            "records": [list(record) for record in self._records],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores everything learned."""
        check_state(state, self._plans)
        self._seconds.load_state_dict(state["seconds"])
        for name, pair in self._pairs.items():
            pair.load_state_dict(state["pairs"][name])
        for name, length in self._lengths.items():
            length.load_state_dict(state["lengths"][name])
        self._probing.load_state_dict(state["probing"])
        self._baseline_seconds = state["baseline_seconds"]
        self._records = [list(record) for record in state["records"]]
        self._predictions = None

    def _fastest(self, allowed: Sequence[bool]) -> int:
        best, least = 0, self._baseline_seconds
        for action, prediction in enumerate(self._predict()):
            if prediction is None or least is None or not allowed[action]:
                continue
            if prediction[0] < least * prediction[1]:
                best, least = action, prediction[0] / prediction[1]
        return best

    def _predict(self) -> list[Prediction | None]:
        """Expected seconds and tokens of a cycle by action; None where a member is unmeasured."""
        if self._predictions is None:
            self._predictions = [None] * len(self._plans)
            if self._baseline_seconds is not None:
                self._predictions[0] = (self._baseline_seconds, 1.0)
            for chain, actions in self._actions_by_chain.items():
                self._predict_chain(chain, actions, self._predictions)
        return self._predictions

    def _predict_chain(
        self, chain: tuple[str, ...], actions: Sequence[int], out: list[Prediction | None]
    ) -> None:
        """Eq. 7 for every K of one chain."""
        curves = [curve for name in chain[1:] if (curve := self._seconds.verify(name))]
        if len(curves) < len(chain) - 1 or self._seconds.draft(chain[0], 1) is None:
            return
        alphas = [
            self._pairs[f"{proposer}>{verifier}"].alpha for proposer, verifier in pairwise(chain)
        ]
        max_k = self._plans[actions[-1]][1]
        tokens, seconds = expected_verification(alphas, curves, max_k)
        at_least = self._lengths[chain[0]].at_least()
        tokens = expected_over_lengths(at_least, tokens)
        seconds = expected_over_lengths(at_least, seconds)
        for action in actions:
            k = self._plans[action][1]
            out[action] = ((self._seconds.draft(chain[0], k) or 0.0) + seconds[k], tokens[k])

    def _judge(
        self, chain: tuple[str, ...], accepted: Sequence[int], proposed: Sequence[int]
    ) -> None:
        """Hands every pair of the chain what its verifier accepted."""
        levels = zip(pairwise(chain), accepted, proposed, strict=True)
        for (proposer, verifier), num, out_of in levels:
            self._pairs[f"{proposer}>{verifier}"].observe_acceptance(num, out_of)

    def _record(self, action: int, info: Mapping[str, Any]) -> None:
        """Notes an iteration beside what was predicted of it, where anything was."""
        prediction = self._predict()[action]
        if prediction is None:
            return
        record = self._records[action]
        record[0] += 1
        record[1] += prediction[0]
        record[2] += prediction[1]
        record[3] += info["iter_seconds"] - info["catchup_seconds"]
        record[4] += info["tokens"]


def candidates(plans: Sequence[Plan], window: int | None) -> dict[tuple[str, ...], list[int]]:
    """Returns the speculative actions of every chain, in order of K.

    Args:
        plans: the plan table, indexed by action.
        window: the only K to take; None takes all.

    Raises:
        ValueError: no plan has that K.
    """
    if window is not None:
        window = check_count("window", window, 1)
    wanted = [action for action in range(1, len(plans)) if window in (None, plans[action][1])]
    actions_by_chain = {
        chain: chosen
        for chain, actions in group_by_chain(plans).items()
        if (chosen := [action for action in actions if action in wanted])
    }
    if window is not None and not actions_by_chain:
        known = sorted({k for _, k in plans[1:]})
        raise ValueError(
            f"window must be a K of the plan table, one of {known}, or None; got {window!r}"
        )
    return actions_by_chain
