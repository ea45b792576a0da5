"""Expert dispatch: runs the experts that have tokens, and tells how many those were.

Registered with transformers' ``ExpertsInterface``, so it serves every mixture-of-experts
architecture that goes through it. Legend: N rows (batch times tokens of a window), E experts,
K experts per token, S = N * K choices, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specgym.engine.forward.linears import linear
from specgym.engine.forward.stable_topk import route_stably
from specgym.engine.forward.transfer import to_device

IMPLEMENTATION = "specgym"  # the name our dispatch goes by in transformers
FEW_ROWS = 8  # up to here running a row in vain costs less than gathering those that count


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """How many experts a mixture has, per layer.

    Attributes:
        num_experts: Routed experts, E.
        experts_per_token: Routed experts that every token visits, K.
        num_shared: Experts that all tokens visit; they count in no load.
    """

    num_experts: int
    experts_per_token: int
    num_shared: int = 0

    def expected_unique(self, num_tokens: int) -> float:
        """Unique experts of tokens that choose independently: E (1 - (1 - K/E)^n).

        Source: Cascade (arXiv 2506.20675), the balls-and-bins estimate.
        """
        missed = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - missed)


class ExpertDispatch:
    """What the mixture layers of one model share: the window at hand, and their loads.

    Args:
        shape: Experts of a layer.
    """

    def __init__(self, shape: ExpertShape):
        self.shape = shape
        self.loads: list[Any] = []  # per layer, tokens per expert: lists, or tensors of a device
        self.choices: list[torch.Tensor] | None = None  # per layer [N, K], while someone listens
        self.clear()

    def clear(self) -> None:
        """Forgets the window: all rows are real, and shapes are free."""
        self.real_rows: list[int] | None = None
        self.is_pad_N: torch.Tensor | None = None
        self.block_rows: int | None = None

    @contextlib.contextmanager
    def window(
        self, num_fed: Sequence[int], num_rows: int, device: torch.device, *, is_fixed: bool
    ) -> Iterator[None]:
        """Tells the layers about the forward that runs inside.

        Args:
            num_fed: Real tokens of each row of the batch; the rest are pads, which reach no expert.
            num_rows: Width of the window, pads included.
            device: Where the model runs.
            is_fixed: Experts are run on blocks of exactly ``num_rows`` rows: exact mode, where the
                linears need it.
        """
        self.loads = []
        if min(num_fed) < num_rows:
            is_pad = [step >= count for count in num_fed for step in range(num_rows)]
            self.real_rows = [row for row, pad in enumerate(is_pad) if not pad]
            self.is_pad_N = to_device(is_pad, device)
        self.block_rows = num_rows if is_fixed else None
        try:
            yield
        finally:
            self.clear()

    @property
    def tokens_per_expert(self) -> list[list[int]]:
        """Real tokens that visited each expert in the last forward, [layers][E]."""
        return read_loads(self.loads)

    def group(self, chosen_NK: list[list[int]]) -> dict[int, list[int]]:
        """Rows of each expert that has any, experts and rows ascending; takes the load down."""
        rows_of: list[list[int]] = [[] for _ in range(self.shape.num_experts)]
        for row in range(len(chosen_NK)) if self.real_rows is None else self.real_rows:
            for expert in chosen_NK[row]:
                rows_of[expert].append(row)
        self.loads.append([len(rows) for rows in rows_of])
        return {expert: rows for expert, rows in enumerate(rows_of) if rows}


def read_loads(loads: Sequence[Any]) -> list[list[int]]:
    """A forward's loads as numbers; where they are a device's, this waits for it."""
    if loads and isinstance(loads[0], torch.Tensor):
        return torch.stack(list(loads)).tolist()
    return list(loads)


def count_unique(loads: Sequence[Any]) -> tuple[int, ...]:
    """Experts that had tokens in a forward, per layer."""
    return tuple(sum(count > 0 for count in load) for load in read_loads(loads))


class ExpertBank:
    """One layer's experts, each of which can be run alone on the CPU.

    Where weights are packed, the module's own copy is dropped at once, so that never more than one
    projection of one layer is held beside its packed form.

    Args:
        experts: transformers' module: ``up_proj`` or ``gate_up_proj``, and ``down_proj``, [E, ...].
    """

    def __init__(self, experts: Any):
        self.experts = experts
        self.up = self.take("gate_up_proj" if experts.has_gate else "up_proj")
        self.down = self.take("down_proj")

    def take(self, name: str) -> list[Any]:
        """One callable per expert for this projection."""
        weight = getattr(self.experts, name).detach()
        bias = getattr(self.experts, f"{name}_bias").detach() if self.experts.has_bias else None
        linears = [
            linear(
                weight[expert].T if self.experts.is_transposed else weight[expert],
                None if bias is None else bias[expert],
            )
            for expert in range(len(weight))
        ]
        if weight.device.type == "cpu":
            empty = nn.Parameter(weight.new_empty(0), requires_grad=False)
            setattr(self.experts, name, empty)
        return linears

    def run(self, expert: int, rows_NH: torch.Tensor) -> torch.Tensor:
        """One expert's output, [N, H]."""
        hidden = self.up[expert](rows_NH)
        gate = self.experts._apply_gate if self.experts.has_gate else self.experts.act_fn
        out = self.down[expert](gate(hidden))
        return self.experts.post_expert_norm(out) if self.experts.has_post_expert_norm else out


def dispatch_experts(
    experts: Any, rows_NH: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """The mixture's output [N, H]; zero for pads. What transformers calls in place of its own.

    Args:
        experts: The layer's experts.
        rows_NH: Hidden states.
        chosen_NK: The experts each row visits.
        weights_NK: What each visit counts.
    """
    dispatch = getattr(experts, "dispatch", None)
    if dispatch is None:  # a model that was not made a member: all rows are real
        dispatch = ExpertDispatch(ExpertShape(experts.num_experts, chosen_NK.shape[-1]))
    if dispatch.choices is not None:
        dispatch.choices.append(chosen_NK)
    bank = getattr(experts, "bank", None)
    if bank is None:
        return run_grouped(experts, dispatch, rows_NH, chosen_NK, weights_NK)
    return run_one_by_one(bank, dispatch, rows_NH, chosen_NK, weights_NK)


def run_one_by_one(
    bank: ExpertBank,
    dispatch: ExpertDispatch,
    rows_NH: torch.Tensor,
    chosen_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    """The mixture on a CPU: a loop over the experts that have tokens, in ascending order.

    A window of a few rows is run through such an expert as it stands: a foreign row costs less
    than gathering (reading the weights is what takes time), and counts zero. With ``block_rows``
    every expert sees exactly so many, so a token's bits depend on no other token. Sums are kept in
    float32.
    """
    num_rows, block = len(rows_NH), dispatch.block_rows
    rows_of = dispatch.group(chosen_NK.tolist())
    shape = (num_rows, dispatch.shape.num_experts)
    shares_NE = torch.zeros(shape).scatter_add_(1, chosen_NK, weights_NK.float())
    if dispatch.is_pad_N is not None:
        shares_NE.masked_fill_(dispatch.is_pad_N[:, None], 0.0)
    total_NH = torch.zeros(rows_NH.shape)
    if num_rows == block or (block is None and num_rows <= FEW_ROWS):
        for expert in rows_of:
            total_NH.addcmul_(bank.run(expert, rows_NH), shares_NE[:, expert, None])
        return total_NH.to(rows_NH.dtype)
    for expert, rows in rows_of.items():
        for first in range(0, len(rows), block or len(rows)):
            index = torch.tensor(rows[first : first + (block or len(rows))])
            out = bank.run(expert, gather(rows_NH, index, block))[: len(index)]
            total_NH.index_add_(0, index, out * shares_NE[index, expert, None])
    return total_NH.to(rows_NH.dtype)


def gather(rows_NH: torch.Tensor, index: torch.Tensor, block: int | None) -> torch.Tensor:
    """These rows, filled up with zeros to a block of fixed size where there is one."""
    gathered = rows_NH[index]
    return gathered if block is None else F.pad(gathered, (0, 0, 0, block - len(index)))


def run_grouped(
    experts: Any,
    dispatch: ExpertDispatch,
    rows_NH: torch.Tensor,
    chosen_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    """The mixture on an accelerator: choices sorted by expert, one grouped product per projection.

    Nothing here waits for the device: every shape follows from the window's. Choices of pads sort
    behind the last group, where no product reaches; so in exact mode all shapes are fixed.
    """
    num_experts, per_token = dispatch.shape.num_experts, chosen_NK.shape[-1]
    chosen_S = chosen_NK.reshape(-1)
    if dispatch.is_pad_N is not None:
        is_pad_S = dispatch.is_pad_N.repeat_interleave(per_token, output_size=len(chosen_S))
        chosen_S = chosen_S.masked_fill(is_pad_S, num_experts)
    sorted_S, order_S = chosen_S.sort(stable=True)
    one_hot_SE = chosen_S[:, None] == torch.arange(num_experts, device=chosen_S.device)
    load_E = one_hot_SE.sum(dim=0)
    dispatch.loads.append(load_E)
    ends_E = load_E.cumsum(dim=0).to(torch.int32)
    own_S = sorted_S.clamp_max(num_experts - 1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = grouped_linear(experts, name, rows_NH[order_S // per_token], own_S, ends_E)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    out_SH = grouped_linear(experts, "down_proj", hidden, own_S, ends_E)
    if experts.has_post_expert_norm:
        out_SH = experts.post_expert_norm(out_SH)
    out_SH = out_SH.float().masked_fill((sorted_S == num_experts)[:, None], 0.0)
    weighted_SH = torch.empty_like(out_SH)
    weighted_SH[order_S] = out_SH * weights_NK.reshape(-1)[order_S, None]
    return weighted_SH.view(len(rows_NH), per_token, -1).sum(dim=1).to(rows_NH.dtype)


def grouped_linear(
    experts: Any, name: str, rows_SH: torch.Tensor, expert_S: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """A projection of rows sorted by expert; rows behind the last group hold anything."""
    weight = getattr(experts, name)
    weight = weight if experts.is_transposed else weight.transpose(-2, -1)
    product = F.grouped_mm(rows_SH.to(weight.dtype), weight, offs=ends_E)
    return product + getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else product


def hook_experts(model: PreTrainedModel) -> ExpertDispatch | None:
    """Puts our dispatch into a model; None where it has no experts that go through the interface.

    On CPU the experts' weights are packed, layer by layer.

    Raises:
        ValueError: If transformers does not let the model's experts be run by another function.
    """
    blocks = find_experts(model)
    if not blocks:
        return None
    model.set_experts_implementation(IMPLEMENTATION)
    if blocks[0][1].config._experts_implementation != IMPLEMENTATION:
        raise ValueError(
            f"model: the experts of a {type(model).__name__} must go through transformers' "
            f"ExpertsInterface, but it does not let them be set; override its "
            f"_can_set_experts_implementation"
        )
    dispatch = ExpertDispatch(shape_of(model, blocks[0][1].num_experts))
    for block, experts in blocks:
        experts.dispatch = dispatch
        if model.device.type == "cpu":
            experts.bank = ExpertBank(experts)
        block.forward = functools.partial(route_stably, block.forward)
    return dispatch


def find_experts(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Each mixture block of a model, and its experts."""
    return [
        (block, child)
        for block in model.modules()
        for child in block.children()
        if hasattr(child, "has_post_expert_norm") and hasattr(child, "down_proj")
    ]


def shape_of_experts(model: PreTrainedModel) -> ExpertShape | None:
    """The shape of a model's mixtures; None for a dense model."""
    blocks = find_experts(model)
    return shape_of(model, blocks[0][1].num_experts) if blocks else None


def shape_of(model: PreTrainedModel, num_experts: int) -> ExpertShape:
    """The shape of a model's mixtures, from its configuration."""
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    per_token = next((getattr(config, name) for name in names if hasattr(config, name)), 1)
    num_shared = [getattr(config, f"{prefix}_shared_experts", None) for prefix in ("n", "num")]
    has_one = bool(getattr(config, "shared_expert_intermediate_size", None))
    return ExpertShape(num_experts, per_token, next(filter(None, num_shared), int(has_one)))


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, dispatch_experts)
