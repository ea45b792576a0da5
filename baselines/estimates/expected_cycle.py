"""Expected tokens and seconds of one cycle of a chain: the expansion of SpecRouter's Eq. 7.

A cycle is one iteration: the drafter proposes, each verifier in turn passes on what it emitted,
and what the target emits is committed.
"""

from collections.abc import Sequence


def expected_verification(
    alphas: Sequence[float], seconds: Sequence[Sequence[float]], max_k: int
) -> tuple[list[float], list[float]]:
    """Returns expected committed tokens and verification seconds, by proposals n = 0..max_k.

    A verifier with acceptance rate alpha that is given n tokens emits j + 1 of them with
    probability alpha^j (1 - alpha) for j < n, and n + 1 with alpha^n; whatever it emits is what
    the next one is given. The whole distribution is propagated, not its mean. At n = 0 no chain
    runs: the target decodes one plain token.

    Args:
        alphas: acceptance rate of every verifier, in chain order.
        seconds: every verifier's forward seconds by number of tokens fed, entries
            0..max_k + number of verifiers; given n tokens it is fed n + 1.
        max_k: the most tokens drafted.

    Source: SpecRouter, arXiv 2505.07680, Eq. 7; the expansion is ours.
    """
    tokens = [float(num) for num in range(max_k + len(alphas) + 1)]
    costs = [0.0] * len(tokens)
    for alpha, curve in zip(reversed(alphas), reversed(seconds), strict=True):
        tokens = expected_after(alpha, tokens)
        costs = [curve[n + 1] + cost for n, cost in enumerate(expected_after(alpha, costs))]
    tokens[0], costs[0] = 1.0, seconds[-1][1]
    return tokens, costs


def expected_after(alpha: float, values: Sequence[float]) -> list[float]:
    """Returns E[values[emitted]] of a verifier that is given n = 0..len(values) - 2 tokens.

    With one more token given, only the outcome "all accepted" changes: E(n) = E(n - 1) + alpha^n
    (values[n + 1] - values[n]).
    """
    expected = [values[1]]
    all_accepted = 1.0
    for n in range(1, len(values) - 1):
        all_accepted *= alpha
        expected.append(expected[-1] + all_accepted * (values[n + 1] - values[n]))
    return expected


def expected_over_lengths(at_least: Sequence[float], values: Sequence[float]) -> list[float]:
    """Returns E[values[proposed]] for k = 0..len(values) - 1 tokens asked for.

    Args:
        at_least: probability that at least n tokens are proposed, by n, where enough are asked.
        values: value by number of tokens proposed.
    """
    expected = [values[0]]
    for k in range(1, len(values)):
        expected.append(expected[-1] + at_least[k] * (values[k] - values[k - 1]))
    return expected
