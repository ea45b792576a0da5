"""How likely one member accepts another's token: similarity, calibrated on what was accepted."""

import math
from collections.abc import Mapping
from typing import Any

PRIOR_PRECISION = (4.0, 16.0)  # of intercept and slope; ours: worth about 16 tokens
SCORE_MARGIN = 0.01  # similarities are kept this far from 0 and 1, where the logit has no end


class PairAcceptance:
    """SimScore of a pair of members, and the acceptance rate alpha predicted from it.

    SimScore = 1 - EMA[D_TV] [paper]. alpha = f(SimScore), f "e.g. a calibrated sigmoid" [paper].
    Ours is f(s) = sigmoid(a + b logit(s)), which is the identity at the prior a = 0, b = 1, with a
    and b fitted on line to the tokens that the pair accepted and rejected: 1 - D_TV is the
    acceptance rate of speculative *sampling*, while under greedy decoding a token is accepted
    where the argmaxes agree. The fit is a Newton step per iteration whose evidence fades, so that
    it follows a drifting workload; b never falls below 0, so that a more similar pair is never
    predicted to accept less. Before a first D_TV the similarity counts as 1/2 [ours], and the fit
    starts afresh when there is one.

    Args:
        alpha_sim: weight of a new D_TV in its moving average.
        memory: share of the fit's evidence that is kept from one iteration to the next.

    Source: SpecRouter, arXiv 2505.07680, Eq. 5 and 6; constants and calibration are ours.
    """

    def __init__(self, alpha_sim: float, memory: float) -> None:
        self._alpha_sim = alpha_sim
        self._memory = memory
        self.sim_score: float | None = None
        self._reset_fit()
        self._record = [0.0, 0, 0]  # sum of predictions, accepted tokens, judged tokens

    @property
    def alpha(self) -> float:
        """The predicted probability that one proposed token is accepted."""
        z = self._intercept + self._slope * self._logit()
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, z))))

    def observe_divergence(self, divergence: float) -> None:
        """Takes in a measured D_TV, in 0..1."""
        similarity = 1.0 - divergence
        if self.sim_score is None:
            self.sim_score = similarity
            self._reset_fit()
        else:
            self.sim_score += self._alpha_sim * (similarity - self.sim_score)

    def observe_acceptance(self, num_accepted: int, num_proposed: int) -> None:
        """Takes in what one verification made of a proposal.

        Args:
            num_accepted: tokens accepted.
            num_proposed: tokens proposed; those after the first rejection were never judged.
        """
        num_judged = num_accepted + (num_accepted < num_proposed)
        if num_judged == 0:
            return
        alpha, x = self.alpha, self._logit()
        self._record[0] += num_judged * alpha
        self._record[1] += num_accepted
        self._record[2] += num_judged
        self._fit(num_accepted - num_judged * alpha, num_judged * alpha * (1.0 - alpha), x)

    def report(self) -> dict[str, Any]:
        """Returns predicted against realised acceptance, over all tokens that were judged.

        Rates are per judged token, and None before there was one.
        """
        predicted, num_accepted, num_judged = self._record
        return {
            "sim_score": self.sim_score,
            "alpha": self.alpha,
            "num_judged": num_judged,
            "predicted_rate": predicted / num_judged if num_judged else None,
            "realised_rate": num_accepted / num_judged if num_judged else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the similarity, the fit and the record."""
        return {
            "sim_score": self.sim_score,
            "fit": [self._intercept, self._slope, *self._precision],
            "record": list(self._record),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the similarity, the fit and the record."""
        self.sim_score = state["sim_score"]
        self._intercept, self._slope, *self._precision = state["fit"]
        self._record = list(state["record"])

    def _logit(self) -> float:
        score = 0.5 if self.sim_score is None else self.sim_score
        score = max(SCORE_MARGIN, min(1.0 - SCORE_MARGIN, score))
        return math.log(score / (1.0 - score))

    def _reset_fit(self) -> None:
        self._intercept, self._slope = 0.0, 1.0
        self._precision = [PRIOR_PRECISION[0], 0.0, PRIOR_PRECISION[1]]  # aa, ab, bb

    def _fit(self, residual: float, weight: float, x: float) -> None:
        """One Newton step of the logistic likelihood, on evidence that fades to the prior."""
        keep = self._memory
        aa, ab, bb = self._precision
        aa = keep * aa + (1.0 - keep) * PRIOR_PRECISION[0] + weight
        ab = keep * ab + weight * x
        bb = keep * bb + (1.0 - keep) * PRIOR_PRECISION[1] + weight * x * x
        self._precision = [aa, ab, bb]
        scale = residual / (aa * bb - ab * ab)
        self._intercept += scale * (bb - ab * x)
        self._slope = max(0.0, self._slope + scale * (aa * x - ab))
