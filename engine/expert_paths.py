"""Which experts tokens visit that leave a text: branches of a tree, many in one forward.

Legend: T rows of a forward, S slots, L mixture layers, E experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.members.model import ModelMember

ROWS = 256  # of a forward: wide enough that reading weights no longer counts


@dataclasses.dataclass(frozen=True)
class Branch:
    """Tokens that follow the first ``start`` tokens of a text in place of the text's own."""

    start: int
    tokens: tuple[int, ...]


@torch.inference_mode()
def visited_experts(
    member: ModelMember, text: Sequence[int], branches: Sequence[Branch]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Experts that each token of a text, and of each branch off it, visits.

    Shapes are not those of decoding, so in bf16 a near-tie of the router may fall otherwise.

    Args:
        member: A model with experts.
        text: Token ids.
        branches: Each at most ``ROWS`` tokens long.

    Returns:
        bool [len(text), L, E], and bool [len(branch), L, E] for each branch.
    """
    assert member.experts is not None, f"{member.name} has no experts"
    memory = member.new_memory(1, len(text) + ROWS)
    parts = []
    for first in range(0, len(text), ROWS):
        fed = list(text[first : first + ROWS])
        with listening(member) as choices:
            member.forward(memory, [fed], need_logits=False)
        parts.append(choices())
    visited: list[np.ndarray] = []
    for group in groups(branches):
        visited += visit_group(member, memory, group)
    return np.concatenate(parts), visited


@contextlib.contextmanager
def listening(member: ModelMember) -> Iterator[Callable[[], np.ndarray]]:
    """Have a forward inside remember the router's choices; yields what reads them.

    That is bool [T, L, E], to be read inside or behind.
    """
    experts, dispatch, compiled = member.experts, member.dispatch, member.compiled
    assert experts is not None
    chosen: list[torch.Tensor] = []
    if dispatch is not None:
        dispatch.choices = chosen

    def read() -> np.ndarray:
        if compiled is not None:
            chosen_LTK = torch.from_numpy(compiled.chosen.astype(np.int64))
        else:
            chosen_LTK = torch.stack(chosen).cpu()
        layers, rows, _ = chosen_LTK.shape
        is_chosen = torch.zeros(layers, rows, experts.num_experts, dtype=torch.bool)
        return is_chosen.scatter_(2, chosen_LTK, True).transpose(0, 1).numpy()

    try:
        yield read
    finally:
        if dispatch is not None:
            dispatch.choices = None


def groups(branches: Sequence[Branch]) -> Iterator[list[Branch]]:
    """The branches in order, as many at a time as fit a forward."""
    group: list[Branch] = []
    for branch in branches:
        if group and sum(len(b.tokens) for b in group) + len(branch.tokens) > ROWS:
            yield group
            group = []
        group.append(branch)
    if group:
        yield group


def visit_group(
    member: ModelMember, memory: MaskedKVCache, group: list[Branch]
) -> list[np.ndarray]:
    """Experts of each token of some branches, in one forward that leaves no trace."""
    lengths = [len(branch.tokens) for branch in group]
    num_rows, held = sum(lengths), memory.num_used
    starts = np.repeat([branch.start for branch in group], lengths)
    depths = np.concatenate([np.arange(length) for length in lengths])
    branch_of = np.repeat(np.arange(len(group)), lengths)
    is_before = np.arange(held) < starts[:, None]
    rows = np.arange(num_rows)
    is_ancestor = (branch_of[:, None] == branch_of) & (rows[:, None] >= rows)
    visible_TS = torch.from_numpy(np.concatenate([is_before, is_ancestor], axis=1))
    positions_T = torch.from_numpy(starts + depths)
    slots_S = torch.cat([torch.arange(held), positions_T])
    tokens = list(itertools.chain.from_iterable(branch.tokens for branch in group))
    with listening(member) as choices:
        if member.compiled is not None:
            if member.sliding_window is not None:
                visible_TS &= positions_T[:, None] - slots_S < member.sliding_window
            member.compiled.look(memory, tokens, positions_T.numpy(), visible_TS.numpy())
            return np.split(choices(), np.cumsum(lengths)[:-1])
        assert member.dispatch is not None
        with member.dispatch.window([num_rows], num_rows, member.device, is_fixed=False):
            member.run(
                torch.tensor([tokens], device=member.device),
                positions_T[None].to(member.device),
                branch_masks(member, visible_TS, positions_T, slots_S),
                memory,
                need_logits=False,
                last=None,
            )
        return np.split(choices(), np.cumsum(lengths)[:-1])


def branch_masks(
    member: ModelMember,
    visible_TS: torch.Tensor,
    positions_T: torch.Tensor,
    slots_S: torch.Tensor,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive masks [1, 1, T, S], one per layer type where a model mixes them."""
    kinds = member.layer_types or {"sliding_attention"}
    masks = {}
    for kind in kinds:
        visible = visible_TS
        if "sliding" in kind and member.sliding_window is not None:
            visible = visible & (positions_T[:, None] - slots_S < member.sliding_window)
        mask = torch.zeros(visible.shape, dtype=member.dtype)
        mask.masked_fill_(~visible, torch.finfo(member.dtype).min)
        masks[kind] = mask[None, None].to(member.device)
    return masks if len(masks) > 1 else next(iter(masks.values()))
