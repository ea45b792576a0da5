"""A causal language model as a member: it drafts, verifies, or is the target.

Legend: B batch, T tokens of a forward, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specgym.engine.compiled.llama import CompiledLlama, why_not_compiled
from specgym.engine.forward.architectures import freeze_rotaries, refuse_unmaskable
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.experts import ExpertShape, count_unique, hook_experts, shape_of_experts
from specgym.engine.forward.graphs import GraphRunner
from specgym.engine.forward.lean_families import make_lean
from specgym.engine.forward.lean_llama import last_rows, pad_tokens, widen
from specgym.engine.forward.linears import replace_linears
from specgym.engine.members.traits import MODEL
from specgym.engine.timing import SECONDS_PER_PARAMETER

logger = logging.getLogger(__name__)


class ModelMember:
    """A causal language model of transformers, driven window by window over a masked cache.

    Args:
        name: The member's name in chains.
        model: The model, in eval mode. It is taken over: its linears are packed on CPU, its
            experts run by our dispatch.
        num_tokens: Token ids the tokenizer knows; logits beyond (padded vocabularies) are cut
            off. None takes the model's whole vocabulary.
        lean: Use a forward of our own where the architecture has one: compiled on the CPU, else
            fused.
        compiled: Use the compiled one where there is one (tests of the fused one do not).
        draft_ids: Token id of each row of the model's head, where it is trimmed: tokens without a
            row have no mass.

    Raises:
        ValueError: If the architecture cannot be rolled back over a masked cache, or the
            vocabulary is smaller than ``num_tokens``.
    """

    traits = MODEL
    takes_drawn = True
    setup_seconds = 0.0  # spent on capturing forwards

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        num_tokens: int | None = None,
        lean: bool = True,
        draft_ids: torch.Tensor | None = None,
        compiled: bool = True,
    ):
        refuse_unmaskable(name, model)
        config = model.config.get_text_config()
        self.name = name
        self.vocab_size = num_tokens or config.vocab_size
        if config.vocab_size < self.vocab_size:
            raise ValueError(
                f"member {name!r}: its vocabulary has {config.vocab_size} entries, the tokenizer "
                f"has {num_tokens}; use a model with the target's tokenizer"
            )
        self.context_limit: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.num_layers = config.num_hidden_layers
        self.layer_types = set(getattr(config, "layer_types", None) or ())
        self.sliding_window = getattr(config, "sliding_window", None)
        if draft_ids is not None and int(draft_ids.max()) >= self.vocab_size:
            raise ValueError(
                f"member {name!r}: its head goes up to token id {int(draft_ids.max())}, the "
                f"vocabulary has {self.vocab_size}; use a drafter that was made for this target"
            )
        self.draft_ids = None if draft_ids is None else draft_ids.to(model.device)
        self.token_ids: list[int] | None = None if draft_ids is None else draft_ids.tolist()
        self.num_parameters, self.num_bytes = count_parameters(model, draft_ids is not None)
        self.dtype, self.device = model.dtype, model.device
        self.architecture = type(model).__name__
        if getattr(config, "upcycled", None):  # nobody trained such a mixture: say what it is
            self.architecture = f"upcycled {self.architecture}"
        self.frozen_rotaries = freeze_rotaries(name, model)
        num_in_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        self.compiled: CompiledLlama | None = None
        reason = why_not_compiled(model) if lean and compiled else "it is not wanted"
        self.dispatch = None if not reason else hook_experts(model)
        self.expert_shape = shape_of_experts(model)
        self.num_active_parameters = self.num_parameters
        if self.experts is not None:
            idle_share = 1.0 - self.experts.experts_per_token / self.experts.num_experts
            self.num_active_parameters -= round(idle_share * num_in_experts)
        if not reason:
            self.compiled = CompiledLlama(model)
        elif self.device.type == "cpu" and lean and compiled:
            logger.info("member %r has no compiled forward: %s", name, reason)
        self.lean = make_lean(model) if lean and self.compiled is None else None
        if self.compiled is None and self.lean is None and self.device.type == "cpu":
            replace_linears(model)
        self.model = model
        self.taps: tuple[int, ...] = ()
        self.graphs: GraphRunner | None = None

    @property
    def is_exact(self) -> bool:
        """Whether a token's bits never depend on what else a forward computes."""
        return self.compiled is not None

    def tap(self, taps: tuple[int, ...]) -> None:
        """Keep the inputs of these layers as features, for heads that read them."""
        self.taps = taps
        if self.compiled is not None:
            self.compiled.set_taps(taps)

    @property
    def clock_cost(self) -> float:
        """Modelled seconds of a one-row forward, for the counting clock."""
        return self.num_active_parameters * SECONDS_PER_PARAMETER

    @property
    def num_read_parameters(self) -> int:
        """Parameters that a forward of one token reads.

        Of a mixture's experts those that a token visits; of an embedding none (a row is less than
        a thousandth), unless it is the vocabulary head too.
        """
        is_tied = self.model.config.get_text_config().tie_word_embeddings
        if self.draft_ids is not None or is_tied:
            return self.num_active_parameters
        embedding = self.model.get_input_embeddings().get_parameter("weight")
        return self.num_active_parameters - embedding.numel()

    def token_of(self, row: int) -> int:
        """Return the token id of a row of its vocabulary head."""
        return row if self.token_ids is None else self.token_ids[row]

    @property
    def experts(self) -> ExpertShape | None:
        """How many experts its mixtures have; None for a dense model."""
        return self.expert_shape

    @property
    def loads(self) -> Sequence[Any]:
        """Tokens per expert of the last forward, per mixture layer, as ``count_unique`` reads."""
        if self.expert_shape is None:
            return ()
        if self.compiled is not None:
            return self.compiled.loads.tolist()
        assert self.dispatch is not None
        return self.dispatch.loads

    @property
    def unique_experts(self) -> tuple[int, ...]:
        """Experts the last forward's real tokens visited, per mixture layer; none when dense."""
        return count_unique(self.loads)

    def new_memory(
        self,
        batch_size: int,
        num_slots: int,
        kv_length: int | None = None,
        *,
        aligned: bool = False,
    ) -> MaskedKVCache:
        """An empty cache for a batch of requests."""
        if self.graphs is not None:
            num_slots = self.graphs.num_slots(num_slots, kv_length)
        return MaskedKVCache(
            self.num_layers,
            batch_size,
            num_slots,
            self.device,
            self.dtype,
            kv_length=kv_length,
            sliding_window=self.sliding_window,
            name=self.name,
            aligned=aligned,
        )

    def forward(
        self,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        num_rows: int | None = None,
        *,
        need_logits: bool = True,
        last_only: bool = False,
        drawn_B: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Feeds each row its tokens and takes them into the memory.

        Args:
            memory: The rows' cache.
            fed: Tokens of each row; rows may differ in length, and may be empty.
            num_rows: Rows of the token dimension, pads included, so that a token's bits do not
                depend on how many are fed; None takes the longest row.
            need_logits: False spares the head.
            last_only: The head reads each row's last token only, as drafting needs it, and a
                trimmed head's logits stay as they are (``token_of`` names its rows).
            drawn_B: Tokens that stand for each row's first one, which the host has not read.

        Returns:
            Logits [B, T, vocab_size] of ``num_rows`` or the longest row's tokens: entry t predicts
            what follows the row's t-th token; entries of pads mean nothing. [B, 1, rows of the
            head] with ``last_only``. None when not needed.
        """
        counts = [len(tokens) for tokens in fed]
        if self.compiled is not None and self.graphs is None:
            logits = self.forward_compiled(
                memory, fed, counts, need_logits=need_logits, last_only=last_only
            )
        else:
            logits = self.forward_torch(
                memory,
                fed,
                counts,
                num_rows,
                need_logits=need_logits,
                last_only=last_only,
                drawn_B=drawn_B,
            )
        if logits is None or (last_only and self.draft_ids is not None):
            return logits
        return widen(logits, self.draft_ids, self.vocab_size)

    @torch.inference_mode()
    def forward_torch(
        self,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        counts: list[int],
        num_rows: int | None,
        *,
        need_logits: bool,
        last_only: bool,
        drawn_B: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """As ``forward``, by torch's operations: logits [B, T, V rows]."""
        width = num_rows or max(counts)
        memory.make_room(width)
        tokens_BT = pad_tokens(fed, width, self.device)
        if drawn_B is not None:
            tokens_BT[:, 0] = drawn_B
        ends = [memory.num_valid(row) + count for row, count in enumerate(counts)]
        assert max(ends) <= self.context_limit, f"{self.name}: {max(ends)} tokens overrun it"
        # Pads count on past a row's end: held back, a table of learned positions is not overrun.
        positions_BT = memory.positions(width).clamp_max(self.context_limit - 1)
        for rotary in self.frozen_rotaries:
            rotary.num_positions = memory.num_slots
        run = self.run
        if self.graphs is not None and self.graphs.prepare(memory, width):
            run = self.graphs.run
        mask = self.masks(memory, counts, num_rows or width)
        last = last_rows(counts, self.device) if last_only else None
        with self.window(counts, width, is_fixed=width == num_rows):
            logits, states = run(tokens_BT, positions_BT, mask, memory, need_logits, last)
        if self.taps:
            features = torch.cat([states[tap] for tap in self.taps], dim=-1)
            memory.write_features(features.to(self.dtype))
        memory.advance(counts, width)
        return logits if need_logits else None

    def forward_compiled(
        self,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        counts: list[int],
        *,
        need_logits: bool,
        last_only: bool,
    ) -> torch.Tensor | None:
        """As ``forward``, in one compiled call that computes no pads: logits [B, T, V rows]."""
        assert self.compiled is not None
        width = max(counts)
        memory.make_room(width)
        ends = [memory.num_valid(row) + count for row, count in enumerate(counts)]
        assert max(ends) <= self.context_limit, f"{self.name}: {max(ends)} tokens overrun it"
        out = None
        if need_logits:
            make = torch.empty if min(counts) == width else torch.zeros  # pads are finite
            out = make(len(fed), 1 if last_only else width, self.compiled.num_outputs)
        self.compiled.forward(memory, fed, out, last_only=last_only)
        memory.advance(counts, width)
        return out

    def window(
        self, counts: list[int], width: int, *, is_fixed: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Tells the experts, where there are any, which rows of the forward inside are real."""
        if self.dispatch is None:
            return contextlib.nullcontext()
        return self.dispatch.window(counts, width, self.device, is_fixed=is_fixed)

    def run(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        memory: MaskedKVCache,
        need_logits: bool,
        last: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Logits [B, T, V] and the tapped states; the lean forward where there is one.

        State i feeds layer i, the state after the last layer feeds the head; of that, only the
        entries ``last`` where it is given.
        """
        if self.lean is not None:
            inner = [tap for tap in self.taps if tap < self.num_layers]
            states = self.lean.states(tokens_BT, positions_BT, mask, memory, tuple(inner))
            read = states[-1] if last is None else states[-1][last][:, None]
            logits = self.lean.head(read) if need_logits else None
            return logits, dict(zip([*inner, self.num_layers], states, strict=True))
        result = self.model(
            input_ids=tokens_BT,
            position_ids=positions_BT,
            attention_mask=mask,
            cache=memory,
            use_cache=True,
            logits_to_keep=0 if need_logits else 1,
            output_hidden_states=bool(self.taps),
        )
        logits = result.logits if last is None or not need_logits else result.logits[last][:, None]
        return logits, {tap: result.hidden_states[tap] for tap in self.taps}

    def masks(
        self, memory: MaskedKVCache, counts: list[int], width: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The window's mask; one per layer type where a model mixes them."""
        if len(self.layer_types) > 1:
            return {
                kind: memory.mask(counts, width, sliding="sliding" in kind)
                for kind in self.layer_types
            }
        everywhere = self.layer_types == {"sliding_attention"} or not self.layer_types
        return memory.mask(counts, width, sliding=everywhere)


def count_parameters(model: PreTrainedModel, shares_embedding: bool) -> tuple[int, int]:
    """Parameters of a model and their bytes, without an embedding it shares with the target."""
    shared = set(model.get_input_embeddings().parameters()) if shares_embedding else set()
    own = [parameter for parameter in model.parameters() if parameter not in shared]
    return sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
