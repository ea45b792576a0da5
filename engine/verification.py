"""Acceptance of proposals: pure functions of laws and tokens. No model, no cache.

Legend: N proposed tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from specgym.engine.types import Proposal, SamplingParams, Verdict, common_prefix


def law(logits_NV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution tokens are sampled from, [N, V] float32: temperature, top-k, top-p.

    The order is transformers': temperature first, then top-k, then top-p. Only for sampling.
    """
    scores_NV = logits_NV.float() / params.temperature
    if 0 < params.top_k < scores_NV.shape[-1]:
        smallest_N1 = scores_NV.topk(params.top_k, dim=-1).values[..., -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < smallest_N1, -torch.inf)
    if params.top_p < 1.0:
        sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
        probs_NV = sorted_NV.softmax(dim=-1)
        before_NV = probs_NV.cumsum(dim=-1) - probs_NV
        beyond_NV = before_NV >= params.top_p
        cut_NV = beyond_NV.scatter(-1, order_NV, beyond_NV)
        scores_NV = scores_NV.masked_fill(cut_NV, -torch.inf)
    return scores_NV.softmax(dim=-1)


def sample(law_V: torch.Tensor, generator: torch.Generator) -> int:
    """One token drawn from a law (which need not be normalised)."""
    return int(torch.multinomial(law_V.cpu(), 1, generator=generator))


def accept_greedy(proposal: Proposal, best: list[int]) -> Verdict:
    """The verdict of greedy decoding: accept while the proposal is the verifier's argmax.

    Args:
        proposal: N proposed tokens.
        best: The verifier's N + 1 argmaxes: at each proposed position and after the last.
    """
    num_accepted = common_prefix(proposal.tokens, best)
    return Verdict(num_accepted, Proposal(tuple(best[: num_accepted + 1])))


def accept_sampling(
    proposal: Proposal, laws_NV: torch.Tensor, generator: torch.Generator
) -> Verdict:
    """The verdict of speculative sampling; emitted tokens follow the verifier's law exactly.

    Token x drawn from q is kept with probability min(1, p(x) / q(x)); at the first rejection one
    token comes from the normalised residual max(p - q, 0); when all are kept, one from p. The
    emitted proposal carries *p*, so a further verifier composes without bias.

    Args:
        proposal: N proposed tokens and their laws q (None: one-hot).
        laws_NV: The verifier's laws p, [N + 1, V].
        generator: The request's random stream.

    Source: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023.
    """
    emitted: list[int] = []
    for index, token in enumerate(proposal.tokens):
        p_V = laws_NV[index]
        q_V = one_hot(token, p_V) if proposal.laws_NV is None else proposal.laws_NV[index]
        coin = float(torch.rand((), generator=generator))
        if coin * float(q_V[token]) >= float(p_V[token]):
            emitted.append(sample(residual(p_V, q_V), generator))
            break
        emitted.append(token)
    else:
        emitted.append(sample(laws_NV[len(proposal.tokens)], generator))
    return Verdict(len(emitted) - 1, Proposal(tuple(emitted), laws_NV[: len(emitted)]))


def one_hot(token: int, like_V: torch.Tensor) -> torch.Tensor:
    """The law of a certain token, shaped like another law."""
    law_V = torch.zeros_like(like_V)
    law_V[token] = 1.0
    return law_V


def residual(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), not normalised; p itself where rounding leaves no mass at all."""
    rest_V = (p_V - q_V).clamp_min(0.0)
    return rest_V if float(rest_V.sum()) > 0.0 else p_V


def total_variation(p_NV: torch.Tensor, q_NV: torch.Tensor) -> float:
    """Mean over rows of D_TV(p, q) = 1/2 sum |p - q|, in 0..1. Source: SpecRouter, Eq. 5."""
    distances_N = (p_NV - q_NV).abs().sum(dim=-1) / 2
    return float(distances_N.clamp_max(1.0).mean())  # rounding can pass 1 where laws are disjoint
