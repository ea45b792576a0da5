"""Training an EAGLE head on what the target wrote.

Legend: B texts, T positions, H query heads, G key/value heads, D head size, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from specgym.engine.forward.architectures import refuse_unlike_llama
from specgym.engine.forward.eagle import Attend, EagleHead, EagleShape
from specgym.engine.pools.students import check_layers
from specgym.engine.training.fitting import Batch, matched, shifted, soft_loss


def init_eagle(
    model: Any, taps: tuple[int, ...], num_draft_tokens: int, num_layers: int = 1
) -> EagleHead:
    """A new head for a Llama target: its layers start as the target's last ones.

    The half of the first layer that reads the embedding starts small, and ``fc`` passes the last
    tap on, so that training starts from a head that thinks like the end of the target. What is
    random in it comes from torch's global generator.

    Raises:
        ValueError: If the target is no Llama, or has no such taps.
    """
    refuse_unlike_llama("an EAGLE head", model)
    check_layers(taps, model.config.num_hidden_layers, "taps")
    source = model.config
    sizes = {
        key: getattr(source, key)
        for key in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "rms_norm_eps", "max_position_embeddings", "rope_parameters", "vocab_size",
            "attention_bias", "mlp_bias",
        )
    }  # fmt: skip
    head_dim = (
        getattr(source, "head_dim", None) or sizes["hidden_size"] // sizes["num_attention_heads"]
    )
    config = LlamaConfig(**sizes, head_dim=head_dim, num_hidden_layers=num_layers)
    size = config.hidden_size
    head = EagleHead(EagleShape(config, taps, False, num_draft_tokens, size))
    layers = [head.midlayer, *head.layers.values()]
    with torch.no_grad():
        for layer, theirs in zip(layers, model.model.layers[-num_layers:], strict=True):
            state = {name: w.float() for name, w in theirs.state_dict().items()}
            if layer is head.midlayer:
                state["hidden_norm.weight"] = state["input_layernorm.weight"].clone()
                for name in ("q_proj", "k_proj", "v_proj"):
                    weight = state[f"self_attn.{name}.weight"]
                    state[f"self_attn.{name}.weight"] = torch.cat([0.1 * weight, weight], dim=-1)
            layer.load_state_dict(state)
        head.norm.weight.copy_(model.model.norm.weight.float())
        torch.nn.init.normal_(head.fc.weight, std=0.01 / len(taps))
        head.fc.weight[:, -size:] += torch.eye(size)
    return head


def default_taps(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's: the inputs of layers 2, n/2 and n - 3; fewer where the target is that small."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(tap, 0), num_layers - 1) for tap in wanted}))


class EagleTrainee:
    """An EAGLE head in training, drafting ``num_depths`` tokens from its own outputs.

    Args:
        head: The head.
        embedding: The target's embedding, [vocab, hidden].
        vocab_head: The target's head, [vocab, hidden].
        draft_ids: Token ids of the draft vocabulary, [V].
        num_depths: Depth 0 reads the target's features, depth d the output of depth d - 1.
        depth_decay: Weight of a depth relative to the one before.

    Source: EAGLE-3's training-time test; one-pass attention over true keys plus each depth's own.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: torch.Tensor,
        vocab_head: torch.Tensor,
        draft_ids: torch.Tensor,
        num_depths: int = 2,
        depth_decay: float = 0.7,
    ):
        self.module = head
        self.embedding, self.draft_ids = embedding, draft_ids
        self.vocab_head = vocab_head[draft_ids]
        self.num_depths, self.depth_decay = num_depths, depth_decay

    def outputs(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Logits of each depth [N, V], the teacher's, and weights [depths, N], over used positions.

        Position t is judged by the target's position t + 1.
        """
        size = self.embedding.shape[1]
        weights = batch.weights[:, 1:]
        used = weights > 0
        features = batch.features[:, :-1]
        embeds = F.embedding(batch.tokens[:, 1:], self.embedding)
        positions = torch.arange(embeds.shape[1])[None].expand(len(embeds), -1)
        attention = DepthAttention()
        depth_weights, logits = [], []
        with torch.autocast("cpu", torch.bfloat16):
            teacher = F.linear(batch.features[:, 1:, -size:][used], self.vocab_head)
            hidden = self.module.take_in(features[..., : self.module.shape.num_features])
            for depth in range(self.num_depths):
                if depth:
                    hidden = shifted(hidden, 1)
                hidden = self.module(embeds, hidden, positions, attention.at(depth))
                logits.append(F.linear(self.module.before_head(hidden)[used], self.vocab_head))
                reached = (positions >= depth).float()
                depth_weights.append((weights * reached)[used])
        return logits, teacher, torch.stack(depth_weights)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """The depths' soft cross entropies, weighted, and the share of agreement of each."""
        logits, teacher, weights = self.outputs(batch)
        total, numbers = torch.zeros(()), {}
        for depth, (own, weight) in enumerate(zip(logits, weights, strict=True)):
            total = total + self.depth_decay**depth * soft_loss(own, teacher, weight)
            answers = (weight == 1).float()
            hits = (matched(own.detach(), teacher) * answers).sum()
            numbers[f"agreement_{depth}"] = float(hits / answers.sum().clamp_min(1))
        return total, numbers

    def agreement(self, batch: Batch) -> torch.Tensor:
        """Agreeing answer tokens and all of them, [B, depths, 2]."""
        logits, _, weights = self.outputs(batch)
        used = batch.weights[:, 1:] > 0
        rows = used.nonzero()[:, 0]
        # The target's best tokens along its greedy path are the path itself.
        following = F.pad(batch.tokens[:, 2:], (0, 1))[used]
        counts = torch.zeros(len(batch.tokens), self.num_depths, 2)
        for depth, (own, weight) in enumerate(zip(logits, weights, strict=True)):
            answers = (weight == 1).float()
            counts[:, depth, 0].index_add_(
                0, rows, (self.draft_ids[own.max(dim=-1).indices] == following) * answers
            )
            counts[:, depth, 1].index_add_(0, rows, answers)
        return counts


class DepthAttention:
    """Causal attention in which depth d sees true keys up to t - d and each depth's own after it.

    Depth d at position t stands where d tokens were drafted: positions up to t - d come from the
    target's features (depth 0), position t - d + i from depth i.
    """

    def __init__(self) -> None:
        self.kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def at(self, depth: int) -> Attend:
        """The ``attend`` of one depth; depths are run in order."""

        def attend(
            index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            passes = self.kept.setdefault(index, [])
            passes.append((keys, values))
            return self.mix(queries, passes, depth)

        return attend

    def mix(
        self, queries: torch.Tensor, passes: list[tuple[torch.Tensor, torch.Tensor]], depth: int
    ) -> torch.Tensor:
        """Mixed values [B, T, H, D] of queries at one depth."""
        _, T, H, D = queries.shape
        groups = H // passes[0][0].shape[2]
        q = queries.transpose(1, 2) * D**-0.5
        wide = [
            tuple(shifted(s, depth - i if i else 0).repeat_interleave(groups, 2).transpose(1, 2)
                  for s in each)
            for i, each in enumerate(passes)
        ]  # fmt: skip
        if depth == 0:
            keys, values = wide[0]
            mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=1.0)
            return mixed.transpose(1, 2)
        scores = q @ wide[0][0].transpose(2, 3)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1 - depth)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        own = [(q * keys).sum(dim=-1, keepdim=True) for keys, _ in wide[1:]]
        shares = torch.cat([scores, *own], dim=-1).float().softmax(dim=-1).to(q.dtype)
        mixed = shares[..., :T] @ wide[0][1]
        for column, (_, values) in enumerate(wide[1:]):
            mixed = mixed + shares[..., T + column : T + column + 1] * values
        return mixed.transpose(1, 2)
