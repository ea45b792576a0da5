"""Routers whose ties go to the lower index, one token at a time or many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StableTopK(TorchFunctionMode):
    """Makes ``topk`` prefer the lower index among equals, however many rows there are.

    ``torch.topk`` promises nothing about ties: an expert could depend on what else is verified.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result, or ours for ``topk``."""
        run = stable_topk if func in (torch.topk, torch.Tensor.topk) else func
        return run(*args, **(kwargs or {}))


def stable_topk(
    input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """Values and indices like ``torch.topk``'s, the lower index first among equals."""
    values, indices = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def route_stably(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A mixture block's forward with ties broken by the lower index."""
    with StableTopK():
        return forward(*args, **kwargs)
