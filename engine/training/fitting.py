"""Training drafters on a target's distributions: batches, losses, the loop.

Legend: B texts, T tokens, F features, V tokens of the drafter's own vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from specgym.engine.training.corpus import Corpus


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts of about one length, padded at their ends.

    Attributes:
        tokens: Token ids [B, T].
        features: The target's features [B, T, F]; the last ``hidden`` of them feed its head.
        weights: Of each position, [B, T]: how much the token that follows it matters; 0 for pads.
        topics: Category of each text.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    weights: torch.Tensor
    topics: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How a drafter is trained.

    Attributes:
        num_steps: Optimiser steps.
        batch_tokens: Tokens of a batch, about.
        learning_rate: Its peak.
        warmup_steps: Steps to the peak.
        decay_share: Share of the steps at the end over which the rate falls to a twentieth.
        weight_decay: Of matrices.
        prompt_weight: Weight of a position in a prompt; one in an answer has 1.
        checkpoint_every: Steps between checkpoints (and measurements on held-out texts).
        seed: Seeds the order of texts.
    """

    num_steps: int = 3000
    batch_tokens: int = 3072
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay_share: float = 0.5
    weight_decay: float = 0.05
    prompt_weight: float = 0.2
    checkpoint_every: int = 100
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, flat, then a cosine down to a twentieth."""
        start = self.num_steps * (1.0 - self.decay_share)
        done = min(max((step - start) / max(self.num_steps - start, 1.0), 0.0), 1.0)
        cosine = 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate * min((step + 1) / max(self.warmup_steps, 1), 1.0) * cosine


class Trainee(Protocol):
    """What the loop trains."""

    @property
    def module(self) -> nn.Module:
        """What holds the weights."""
        ...

    def losses(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss to descend, and what to report."""
        ...

    def agreement(self, batch: Batch) -> torch.Tensor:
        """Per text and depth: answer tokens where the drafter's best is the target's, and all.

        Shape [B, depths, 2].
        """
        ...


def collate(corpus: Corpus, indices: Sequence[int], prompt_weight: float) -> Batch:
    """Some texts as one batch."""
    texts = [corpus.text(index) for index in indices]
    length = max(len(text.tokens) for text in texts)
    features = [corpus.features(index) for index in indices]
    tokens_BT = torch.zeros(len(texts), length, dtype=torch.long)
    features_BTF = torch.zeros(len(texts), length, features[0].shape[-1], dtype=torch.bfloat16)
    weights_BT = torch.zeros(len(texts), length)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text.tokens)] = text.tokens
        features_BTF[row, : len(text.tokens)] = features[row]
        # Position t of the target judges token t + 1; the last position was never fed.
        weights_BT[row, : text.num_prompt - 1] = prompt_weight
        weights_BT[row, text.num_prompt - 1 : len(text.tokens) - 1] = 1.0
    return Batch(tokens_BT, features_BTF, weights_BT, tuple(text.topic for text in texts))


def epoch(corpus: Corpus, batch_tokens: int, rng: random.Random) -> list[list[int]]:
    """Every text once, in batches of like length, the batches in random order."""
    order = list(range(len(corpus)))
    rng.shuffle(order)
    order.sort(key=lambda index: len(corpus.text(index).tokens) // 32)
    batches: list[list[int]] = [[]]
    for index in order:
        longest = max(len(corpus.text(each).tokens) for each in [*batches[-1], index])
        if longest * (len(batches[-1]) + 1) > batch_tokens and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


def schedule(corpus: Corpus, config: FitConfig, first_step: int) -> Iterator[list[int]]:
    """The texts of each step from ``first_step`` on; the same for the same seed and corpus."""
    step, number = 0, 0
    while True:
        for indices in epoch(corpus, config.batch_tokens, random.Random(f"{config.seed}/{number}")):
            if step >= config.num_steps:
                return
            if step >= first_step:
                yield indices
            step += 1
        number += 1


def soft_loss(logits: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross entropy of logits [N, V] against a teacher's logits [N, V]."""
    target = teacher.float().softmax(dim=-1)
    per_row = -(target * logits.float().log_softmax(dim=-1)).sum(dim=-1)
    return (per_row * weights).sum() / weights.sum().clamp_min(1e-6)


def frequent_tokens(corpus: Corpus, num_tokens: int, vocab_size: int) -> torch.Tensor:
    """Ids of the most frequent tokens of the answers (prompts count a tenth), ascending."""
    counts = torch.zeros(vocab_size)
    for index in range(len(corpus)):
        text = corpus.text(index)
        shares = torch.full((len(text.tokens),), 0.1)
        shares[text.num_prompt :] = 1.0
        counts.index_add_(0, text.tokens, shares)
    order = counts.sort(descending=True, stable=True).indices
    return order[:num_tokens].sort().values


def measure(
    trainee: Trainee, corpus: Corpus, batch_tokens: int = 4096
) -> dict[str, dict[int, float]]:
    """Share of answer tokens on which drafter and target agree, per category and depth."""
    sums: dict[str, torch.Tensor] = {}
    trainee.module.eval()
    for indices in epoch(corpus, batch_tokens, random.Random(0)):
        batch = collate(corpus, indices, 0.0)
        with torch.no_grad():
            counts = trainee.agreement(batch)
        for topic, count in zip(batch.topics, counts, strict=True):
            sums[topic] = sums.get(topic, torch.zeros_like(count)) + count
    trainee.module.train()
    return {
        topic: {depth: float(c[0] / c[1].clamp_min(1)) for depth, c in enumerate(count)}
        for topic, count in sorted(sums.items())
    }


def make_optimizer(module: nn.Module, config: FitConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; only matrices decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
    )


def fit(
    trainee: Trainee,
    corpus: Corpus,
    config: FitConfig,
    checkpoint: Path,
    report: Callable[[int, dict[str, float]], None],
    on_checkpoint: Callable[[int], None],
) -> None:
    """Trains to the end of the schedule, from the checkpoint where there is one.

    Args:
        trainee: What is trained; at the end it holds the final weights.
        corpus: Training texts.
        config: Settings; a checkpoint of others is refused.
        checkpoint: File that a killed run goes on from.
        report: Called each step with the step and its numbers.
        on_checkpoint: Called with the steps done: at the start, and after each checkpoint.

    Raises:
        ValueError: If there are no texts, or the checkpoint was made with other settings or texts.
    """
    if not len(corpus):
        raise ValueError("corpus: must hold at least one text to train on; write texts first")
    optimizer = make_optimizer(trainee.module, config)
    identity = {**dataclasses.asdict(config), "num_texts": len(corpus)}
    first = restore(checkpoint, trainee.module, optimizer, identity)
    trainee.module.train()
    on_checkpoint(first)
    for step, indices in enumerate(schedule(corpus, config, first), start=first):
        for group in optimizer.param_groups:
            group["lr"] = config.rate_at(step)
        batch = collate(corpus, indices, config.prompt_weight)
        loss, numbers = trainee.losses(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trainee.module.parameters(), 1.0)
        optimizer.step()
        numbers |= {"rate": config.rate_at(step), "gradient_norm": float(norm)}
        report(step, numbers | {"loss": float(loss.detach())})
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.num_steps:
            store(checkpoint, step + 1, trainee.module, optimizer, identity)
            on_checkpoint(step + 1)


def trained_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are trained."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def store(
    path: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, identity: Any
) -> None:
    """Writes a checkpoint, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {"step": step, "identity": identity, "weights": trained_state(module)}
    torch.save(state | {"optimizer": optimizer.state_dict()}, partial)
    os.replace(partial, path)


def num_trained_steps(path: Path) -> int:
    """Steps behind a checkpoint; 0 where there is none."""
    if not path.is_file():
        return 0
    return int(torch.load(path, weights_only=True, mmap=True)["step"])


def restore(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, identity: Any) -> int:
    """Takes a checkpoint up; returns the next step, 0 where there is none.

    Raises:
        ValueError: If it was made with other settings.
    """
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    if state["identity"] != identity:
        raise ValueError(
            f"checkpoint: {path} was made with {state['identity']}, now it is {identity}; "
            f"give the same settings to go on, or remove the file to start again"
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in state["weights"]:
                parameter.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def matched(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Whether the largest entries agree, [..., V] twice -> [...]."""
    return logits.max(dim=-1).indices == teacher.max(dim=-1).indices


def shifted(states: torch.Tensor, steps: int) -> torch.Tensor:
    """States [B, T, ...] moved ``steps`` positions later; the first positions become zero."""
    if steps == 0:
        return states
    return F.pad(states[:, :-steps], (0,) * (2 * (states.ndim - 2)) + (steps, 0))
