"""The table of features: every entry of the observation, with unit, bounds and source."""

from __future__ import annotations

import dataclasses

from specgym.envs.pool_spec import Layout
from specgym.envs.text_features import TEXT_FEATURES

FEATURES_VERSION = 2  # goes up when an entry changes its meaning, its bounds or its place


@dataclasses.dataclass(frozen=True)
class Feature:
    """One entry of the observation.

    Attributes:
        name: Unique name; per-pair, per-chain and per-member entries carry theirs in brackets.
        unit: What it is measured in.
        low: Smallest value; the observation is clipped to it.
        high: Largest value.
        source: Where it comes from.
    """

    name: str
    unit: str
    low: float
    high: float
    source: str


ITERATION_FEATURES = (
    Feature("last_utility", "ratio", 0, 16, "tokens / (t_iter / t_base), last iteration"),
    Feature("last_tokens", "tokens", 0, 32, "tokens emitted by the last iteration"),
    Feature("last_k", "tokens", 0, 32, "K that ran in the last iteration"),
    Feature("last_reject", "0/1", 0, 1, "the target rejected a draft in the last iteration"),
    Feature("unique_experts", "ratio", 0, 64, "unique experts over a single token's, EMA"),
    Feature("draft_entropy", "nats", 0, 16, "entropy of the drafter's first law, EMA"),
)
POSITION_FEATURES = (
    *(Feature(name, unit, 0, 1, source) for name, unit, source in TEXT_FEATURES),
    Feature("context_fraction", "share", 0, 1, "tokens so far over the target's context"),
    Feature("budget_fraction", "share", 0, 1, "tokens so far over the budget"),
    Feature("generated", "log tokens", 0, 16, "log(1 + tokens generated)"),
)


def feature_table(layout: Layout) -> tuple[Feature, ...]:
    """All entries of the observation for a pool of this layout, in order.

    First what iterations did, then what depends on the position in the text alone, then what is
    known of each pair, chain and member.
    """
    table = [*ITERATION_FEATURES, *POSITION_FEATURES]
    for pair in layout.pairs:
        table.append(
            Feature(f"acceptance[{pair}]", "share", 0, 1, "accepted over proposed to it, EMA")
        )
    for chain in map(">".join, layout.chains):
        table += [
            Feature(f"time_ratio[{chain}]", "ratio", 0, 64, "t_iter over t_base, EMA"),
            Feature(f"tokens[{chain}]", "tokens", 0, 32, "tokens per iteration, EMA"),
            Feature(f"rounds_since[{chain}]", "share", 0, 1, "1 - exp(-rounds since tried / 32)"),
        ]
    for name in layout.followers:
        table.append(Feature(f"lag[{name}]", "share", 0, 1, "tokens behind the text, over 64"))
    return tuple(table)
