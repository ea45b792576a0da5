"""Training distilled students on what the target wrote.

``small`` trains whole layers and is a drafter; ``mid`` trains low-rank deltas on more of the
target's own layers and is a middle verifier. Embedding and the rows of the vocabulary head are the
target's, and stay as they are.

Legend: B texts, T tokens, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specgym.engine.pools.students import take_layers
from specgym.engine.training.fitting import Batch, matched, soft_loss


class LowRankLinear(nn.Module):
    """A frozen linear layer and a trained delta of low rank.

    Source: Hu et al. 2021, LoRA (arXiv 2106.09685); scale 1, so the delta is up @ down.
    """

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), False)
        down = torch.randn(rank, linear.in_features, generator=generator)
        self.down = nn.Parameter(down * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ (weight + up @ down).T + bias``."""
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)


def make_small(model: Any, layers: Sequence[int]) -> Any:
    """A student whose layers and final norm are trained."""
    student = take_layers(model, layers)
    student.model.layers.requires_grad_(True)
    student.model.norm.requires_grad_(True)
    return student


def make_mid(model: Any, layers: Sequence[int], rank: int, seed: int = 0) -> Any:
    """A student whose linears have trained deltas; norms are trained too."""
    student = take_layers(model, layers)
    generator = torch.Generator().manual_seed(seed)
    for layer in student.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LowRankLinear(child, rank, generator))
        layer.input_layernorm.requires_grad_(True)
        layer.post_attention_layernorm.requires_grad_(True)
    student.model.norm.requires_grad_(True)
    return student


class StudentTrainee:
    """A student in training.

    Args:
        student: From ``make_small`` or ``make_mid``.
        vocab_head: The target's head, [vocab, hidden].
        draft_ids: Token ids of the draft vocabulary, [V].
    """

    def __init__(self, student: Any, vocab_head: torch.Tensor, draft_ids: torch.Tensor):
        self.module = student
        self.draft_ids, self.vocab_head = draft_ids, vocab_head[draft_ids]

    def outputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [N, V], the teacher's, and weights [N], over used positions."""
        size = self.vocab_head.shape[1]
        used = batch.weights > 0
        with torch.autocast("cpu", torch.bfloat16):
            teacher = F.linear(batch.features[..., -size:][used], self.vocab_head)
            hidden = self.module.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
            logits = F.linear(hidden[used], self.vocab_head)
        return logits, teacher, batch.weights[used]

    def losses(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """The soft cross entropy, and the share of agreement on answers."""
        logits, teacher, weights = self.outputs(batch)
        answers = (weights == 1).float()
        hits = (matched(logits.detach(), teacher) * answers).sum()
        agreement = float(hits / answers.sum().clamp_min(1))
        return soft_loss(logits, teacher, weights), {"agreement_0": agreement}

    def agreement(self, batch: Batch) -> torch.Tensor:
        """Agreeing answer tokens and all of them, [B, 1, 2]."""
        logits, _, weights = self.outputs(batch)
        used = batch.weights > 0
        rows = used.nonzero()[:, 0]
        following = F.pad(batch.tokens[:, 1:], (0, 1))[used]
        answers = (weights == 1).float()
        hits = (self.draft_ids[logits.max(dim=-1).indices] == following) * answers
        counts = torch.zeros(len(batch.tokens), 1, 2)
        counts[:, 0, 0].index_add_(0, rows, hits)
        counts[:, 0, 1].index_add_(0, rows, answers)
        return counts
