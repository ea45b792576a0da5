"""The card of a drafter: what it is, from what, how it was trained, and what it is good for."""

from __future__ import annotations

import dataclasses
from typing import Any

from specgym.runs.pool.build_watcher import mean_acceptance

WHAT = {
    "eagle": (
        "An EAGLE-3 head: one layer on the features (the inputs of layers {taps}) of its target, "
        "which drafts the next tokens."
    ),
    "small": "A student of {num_layers} whole layers ({layers}) of its target: a drafter.",
    "mid": (
        "A student of {num_layers} layers ({layers}) of its target: deltas of rank {rank} on the "
        "target's own weights, merged when it is loaded: a middle verifier."
    ),
}
MAX_CURVE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a trained drafter.

    Attributes:
        name: ``eagle``, ``small`` or ``mid``.
        target_origin: Where its target came from.
        target_fingerprint: Hash of the target's weights in bf16.
        settings: What its weights depend on, beside the texts.
        num_texts: Texts it was trained on.
        num_tokens: Their tokens.
        num_held: Texts it was measured on.
        curve: Points of its learning curve.
        coverage: Share of the held-out tokens that its vocabulary can say.
        date: Day it was finished.
    """

    name: str
    target_origin: str
    target_fingerprint: str
    settings: dict[str, Any]
    num_texts: int
    num_tokens: int
    num_held: int
    curve: list[dict[str, Any]]
    coverage: float
    date: str

    def training(self) -> dict[str, Any]:
        """What config.json says of the training."""
        last = self.curve[-1]
        return {
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "num_steps": last["step"],
            "seed": self.settings["seed"],
            "seconds": round(last["seconds"], 1),
            "held_out_texts": self.num_held,
            "held_out_acceptance": last["acceptance"],
            "held_out_coverage": round(self.coverage, 4),
        }


def model_card(facts: Facts, num_bytes: int) -> str:
    """The card as Markdown."""
    settings = facts.settings
    layers = settings.get("layers", ())
    what = WHAT[facts.name].format(
        num_layers=len(layers),
        layers=", ".join(map(str, layers)),
        rank=settings.get("rank"),
        taps=", ".join(map(str, settings.get("taps", ()))),
    )
    rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    return f"""---
library_name: specgym
tags: [speculative-decoding, draft-model]
---

# {facts.name}

{what} Embedding and vocabulary head are rows of the target's own and are not stored: the
file has {num_bytes / 2**20:.1f} MiB in bf16 and is of use with this target only.

- target: {facts.target_origin}
- sha256 of the target's weights in bf16: `{facts.target_fingerprint}`
- finished: {facts.date}, by `specgym pool build`

## Training

No data set: the target wrote {facts.num_texts} prompts by category and answered them greedily,
{facts.num_tokens} tokens in all. The drafter was trained on the target's own distributions over
them (soft cross entropy), {facts.curve[-1]["step"]} steps in {minutes(facts.curve[-1])} minutes.

| setting | value |
| --- | --- |
{rows}

## Acceptance

Share of answer tokens at which the drafter's best token is the target's, along the target's greedy
path, on {facts.num_held} held-out texts of the same kind.

{acceptance_table(facts.curve[-1])}
{depth_note(facts.curve[-1])}
## Learning curve

Mean over the categories.

{curve_table(facts.curve)}

## Limits

- It drafts for these weights of the target alone; for others it is refused.
- It can say {facts.coverage:.1%} of the held-out answers' tokens: its vocabulary holds the most
  frequent ones of the training texts.
- Texts were short (an answer has at most 176 tokens), in English, and of the categories above.
  Elsewhere it will be accepted less.
"""


def minutes(point: dict[str, Any]) -> str:
    """Training time of a point of the curve, measuring included."""
    return f"{point['seconds'] / 60:.1f}"


def depth_names(point: dict[str, Any]) -> list[str]:
    """Headers of the depths of a point."""
    num_depths = len(mean_acceptance(point))
    if num_depths == 1:
        return ["acceptance"]
    return [f"drafted token {depth + 1}" for depth in range(num_depths)]


def depth_note(point: dict[str, Any]) -> str:
    """What the later depths mean; empty where there is one."""
    if len(mean_acceptance(point)) == 1:
        return ""
    return "\nA later drafted token is judged where those before it are the text's own.\n"


def acceptance_table(point: dict[str, Any]) -> str:
    """Acceptance by category and depth."""
    names = depth_names(point)
    lines = [row("category", *names), row(*["---"] * (len(names) + 1))]
    for topic, depths in point["acceptance"].items():
        lines.append(row(topic, *(f"{value:.3f}" for value in depths)))
    lines.append(row("mean", *(f"{value:.3f}" for value in mean_acceptance(point))))
    return "\n".join(lines)


def curve_table(curve: list[dict[str, Any]]) -> str:
    """The learning curve, thinned to some rows."""
    names = depth_names(curve[-1])
    lines = [row("steps", "minutes", "loss", *names), row(*["---"] * (len(names) + 3))]
    stride = -(-len(curve) // MAX_CURVE_ROWS)
    for point in [*curve[:-1:stride], curve[-1]]:
        loss = "" if point["loss"] is None else f"{point['loss']:.3f}"
        means = (f"{value:.3f}" for value in mean_acceptance(point))
        lines.append(row(str(point["step"]), minutes(point), loss, *means))
    return "\n".join(lines)


def row(*cells: str) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
