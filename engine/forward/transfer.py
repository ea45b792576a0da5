"""Small host values on their way to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """These numbers as a tensor on a device.

    On CUDA they go through pinned memory, so that the host does not wait until the device has
    finished all it was given before, as ``torch.tensor(values, device="cuda")`` does.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
