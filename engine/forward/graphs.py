"""Forwards captured once and replayed: CUDA graphs, or compiled code, over static buffers.

A captured forward reads and writes fixed addresses. So each batch size of a member has a *stage*,
a masked cache whose buffers stay where they are, and the memory that decodes lies in them; when
another one wants to run, it moves out into buffers of its own. What changes from window to window
(tokens, positions, slots, mask) comes in through inputs of fixed shape, with the mask over the
length of a context bucket. What cannot be captured runs as it always did, and the log says why.

Legend: B batch, T tokens of a window, L attended length.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.cache_layers import StaticWindow
from specgym.engine.forward.experts import ExpertDispatch

logger = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]
Forward = Callable[[Tensors], Tensors]
Capture = Callable[[Forward, Tensors], Forward]  # (forward, inputs) -> replay
Mask = torch.Tensor | dict[str, torch.Tensor]
MAX_TOKENS = 32  # of a window; longer ones are prefills, whose shapes seldom come again
MAX_GRAPHS = 64  # of a member; the one that was not used for longest is let go
SMALLEST_BUCKET = 256  # slots; buckets are powers of two


class Model(Protocol):
    """A member whose forwards can be captured.

    Attributes:
        name: Its name in chains.
        num_layers: Layers with a cache.
        taps: Layers whose inputs are kept.
        dispatch: How its experts run; None for a dense model.
        setup_seconds: Seconds spent on captures so far.
    """

    name: str
    num_layers: int
    device: torch.device
    dtype: torch.dtype
    taps: tuple[int, ...]
    dispatch: ExpertDispatch | None
    setup_seconds: float

    def run(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask: Mask,
        memory: MaskedKVCache,
        need_logits: bool,
        last: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return logits and the tapped states; the forward itself, of tensors alone."""


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """What a captured forward is made for.

    Attributes:
        batch: Rows of the batch.
        tokens: Tokens of the window, pads included.
        is_ragged: Whether each row has slots of its own, instead of all the same.
        length: Attended length: the context bucket's, or the request's in exact mode.
        need_logits: Whether the head runs.
        last_only: Whether the head reads the last tokens only.
        taps: Layers whose inputs are kept.
    """

    batch: int
    tokens: int
    is_ragged: bool
    length: int
    need_logits: bool
    last_only: bool
    taps: tuple[int, ...]


class Stage:
    """The static buffers of one batch size, and which memory lies in them.

    Args:
        cache: A cache of that many rows; its layers' buffers are made when a memory moves in.
    """

    def __init__(self, cache: MaskedKVCache):
        self.cache = cache
        self.tenant: Callable[[], MaskedKVCache | None] = lambda: None
        self.lent: list[torch.Tensor | None] = []

    def holds(self, memory: MaskedKVCache) -> bool:
        """Whether this memory lies here; not any more when its buffers were made anew."""
        if self.tenant() is not memory:
            return False
        return all(a.keys is b for a, b in zip(memory.buffers, self.lent, strict=True))

    def admit(self, memory: MaskedKVCache) -> None:
        """Moves a memory in, and whoever was here out."""
        if self.holds(memory):
            return
        self.vacate()
        for mine, layer in zip(self.cache.buffers, memory.buffers, strict=True):
            if layer.keys is None or layer.values is None:  # a layer that keeps nothing
                continue
            if not mine.is_initialized:
                mine.lazy_initialization(layer.keys, layer.values)
            assert mine.keys is not None
            assert mine.values is not None
            layer.keys = move(layer.keys, mine.keys)
            layer.values = move(layer.values, mine.values)
        self.tenant = weakref.ref(memory)
        self.lent = [layer.keys for layer in memory.buffers]

    def vacate(self) -> None:
        """Gives the memory that lies here buffers of its own."""
        memory = self.tenant()
        if memory is None:
            return
        for layer, lent in zip(memory.buffers, self.lent, strict=True):
            if layer.keys is lent and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def move(states: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The same states [B, H, S, D] in the first slots of another buffer."""
    inside = place[:, :, : states.shape[2]]
    return inside.copy_(states)


class GraphRunner:
    """Runs a member's windows through captured forwards, one per ``GraphKey``.

    Args:
        member: The member.
        capture: Makes a replay of a forward and inputs like those it will get. A replay may give
            its outputs in the same tensors each time.
        max_tokens: Longest window that is captured.
        max_graphs: Captured forwards that are kept.
    """

    def __init__(
        self,
        member: Model,
        capture: Capture,
        max_tokens: int = MAX_TOKENS,
        max_graphs: int = MAX_GRAPHS,
    ):
        self.member, self.capture = member, capture
        self.max_tokens, self.max_graphs = max_tokens, max_graphs
        self.stages: dict[int, Stage] = {}
        self.replays: collections.OrderedDict[GraphKey, Forward] = collections.OrderedDict()
        self.reason = ""  # why nothing is captured any more

    def num_slots(self, wanted: int, kv_length: int | None) -> int:
        """Slots for a new memory: a bucket's, where its attended length is not fixed."""
        return wanted if kv_length is not None else bucket_of(wanted)

    def prepare(self, memory: MaskedKVCache, width: int) -> bool:
        """Whether the memory's next window is replayed; its mask then spans the bucket.

        A row that is fed by itself is prefilled, and somebody who listens to the router must be
        in the forward: neither is replayed.
        """
        memory.window = None
        dispatch = self.member.dispatch
        is_heard = dispatch is not None and dispatch.choices is not None
        is_empty = not any(layer.is_initialized for layer in memory.buffers)
        if self.reason or width > self.max_tokens or memory.is_view or is_heard or is_empty:
            return False
        self.stage_for(memory).admit(memory)
        stop = memory.num_used + width
        length = memory.kv_length or min(bucket_of(stop), memory.num_slots)
        slots = memory.window_slots_BT
        if slots is None:
            slots = memory.steps_S[memory.num_used : stop]
        memory.window = StaticWindow(slots, length)
        return True

    def stage_for(self, memory: MaskedKVCache) -> Stage:
        """The stage of the memory's batch size; a larger one when it has too few slots.

        Forwards that were captured on the smaller one's buffers are let go.
        """
        batch = memory.num_sequences
        stage = self.stages.get(batch)
        if stage is None or stage.cache.num_slots < memory.num_slots:
            member, slots = self.member, bucket_of(memory.num_slots)
            shape = (member.num_layers, batch, slots, member.device, member.dtype)
            stage = self.stages[batch] = Stage(MaskedKVCache(*shape, name=member.name))
            for key in [key for key in self.replays if key.batch == batch]:
                del self.replays[key]
        return stage

    def run(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask: Mask,
        memory: MaskedKVCache,
        need_logits: bool,
        last: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """What the member's own ``run`` returns; the states are good until the next window."""
        window, memory.window = memory.window, None
        assert window is not None
        inputs = {"tokens": tokens_BT, "positions": positions_BT, "slots": window.slots}
        masks = mask if isinstance(mask, dict) else {"": mask}
        inputs |= {f"mask {kind}": each for kind, each in masks.items()}
        if last is not None:
            inputs["last rows"], inputs["last columns"] = last
        if (dispatch := self.member.dispatch) is not None:
            is_pad_N = dispatch.is_pad_N
            inputs["is pad"] = (
                torch.zeros_like(tokens_BT, dtype=torch.bool).view(-1)
                if is_pad_N is None
                else is_pad_N
            )
        batch, width = tokens_BT.shape
        taps = self.member.taps
        is_ragged = window.slots.ndim == 2
        key = GraphKey(batch, width, is_ragged, window.length, need_logits, last is not None, taps)
        return self.read(self.replay_of(key, inputs)(inputs), taps)

    def replay_of(self, key: GraphKey, inputs: Tensors) -> Forward:
        """The captured forward, captured now where there is none; the plain one if that fails."""
        if key in self.replays:
            self.replays.move_to_end(key)
            return self.replays[key]
        forward = make_forward(self.member, self.stages[key.batch].cache, key)
        started = time.perf_counter()
        try:
            replay = self.capture(forward, inputs)
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            self.reason = f"its forward could not be captured ({first_line})"
            self.replays.clear()
            log_eager(self.member.name, self.reason)
            return forward
        finally:
            self.member.setup_seconds += time.perf_counter() - started
        self.replays[key] = replay
        if len(self.replays) > self.max_graphs:
            self.replays.popitem(last=False)
        return replay

    def read(
        self, outputs: Tensors, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Logits, copied out of the replay's own, and the tapped states; notes experts' loads."""
        if self.member.dispatch is not None:
            self.member.dispatch.loads = list(outputs["loads"].clone().unbind())
        logits = outputs.get("logits")
        states = {tap: outputs[f"state {tap}"] for tap in taps}
        return None if logits is None else logits.clone(), states


def make_forward(member: Model, cache: MaskedKVCache, key: GraphKey) -> Forward:
    """A member's forward as a function of tensors of fixed shapes, over a stage's cache."""

    def forward(inputs: Tensors) -> Tensors:
        cache.window = StaticWindow(inputs["slots"], key.length)
        if member.dispatch is not None:
            member.dispatch.loads, member.dispatch.is_pad_N = [], inputs["is pad"]
        masks = {name[5:]: each for name, each in inputs.items() if name.startswith("mask ")}
        last = (inputs["last rows"], inputs["last columns"]) if key.last_only else None
        logits, states = member.run(
            inputs["tokens"],
            inputs["positions"],
            masks.get("", masks),
            cache,
            key.need_logits,
            last,
        )
        outputs = {f"state {tap}": states[tap] for tap in key.taps}
        if key.need_logits and logits is not None:
            outputs["logits"] = logits
        if member.dispatch is not None:
            outputs["loads"] = torch.stack(member.dispatch.loads)
        return outputs

    return forward


def bucket_of(num_slots: int) -> int:
    """The context bucket of so many slots: the next power of two."""
    return max(1 << (num_slots - 1).bit_length(), SMALLEST_BUCKET)


def log_eager(name: str, reason: str, level: int = logging.WARNING) -> None:
    """Says in the log why a member runs without captured forwards."""
    logger.log(level, "member %r runs eagerly: %s", name, reason)
