"""Linear layers on the CPU through the compiled product, where no whole forward is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from specgym.engine.compiled.linear import CompiledLinear

NUMERICS = 3  # raised by every change that moves bits: recordings go by it


class RowLinear(nn.Module):
    """A linear layer whose weight lies packed: each row's bits are its own.

    States are float32 inside and come out in their own type. The weight cannot be read back; the
    module is for inference only.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.product = CompiledLinear(weight, bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T + bias``, [..., in_features] -> [..., out_features], in their type."""
        wide = rows.reshape(-1, self.in_features).float().contiguous()
        out = self.product(wide)
        return out.view(*rows.shape[:-1], self.out_features).to(rows.dtype)


def is_packable(weight: torch.Tensor) -> bool:
    """Whether the compiled product takes a weight."""
    kinds = (torch.bfloat16, torch.float32, torch.float16)
    return weight.device.type == "cpu" and weight.dtype in kinds and weight.shape[1] % 2 == 0


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable:
    """The fastest callable for a linear layer on the weight's device and type."""
    if is_packable(weight):
        return RowLinear(weight, bias).forward  # past the hooks of a module's call
    return functools.partial(F.linear, weight=weight, bias=bias)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is torch's own linear over a weight of numbers: not quantized, not adapted.

    Quantized linears may be another class, or torch's own over a weight of another class.
    """
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def replace_linears(model: nn.Module) -> int:
    """Replace the model's linears by compiled ones; returns how many.

    The unpacked copies are dropped; an embedding tied to the head keeps its own weight.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain_linear(child) and is_packable(child.weight):
                setattr(parent, name, RowLinear(child.weight, child.bias))
                count += 1
    return count
