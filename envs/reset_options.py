"""The options of a reset."""

from __future__ import annotations

from types import UnionType
from typing import Any

import numpy as np


def check_options(
    options: dict[str, Any] | None, request_type: type | UnionType, request_text: str
) -> dict[str, Any]:
    """The options of a reset.

    Args:
        options: As a user gave them.
        request_type: What the request may be.
        request_text: The same in words.

    Raises:
        ValueError: If there are unknown ones, or one has the wrong type.
    """
    options = options or {}
    unknown = sorted(options.keys() - {"request", "divergence_every"})
    if unknown:
        raise ValueError(
            f"options: {unknown[0]!r} is unknown; there are 'request' and 'divergence_every'"
        )
    request = options.get("request")
    if request is not None and not isinstance(request, request_type):
        raise ValueError(f"options['request']: must be {request_text}; got {request!r}")
    every = options.get("divergence_every", 0)
    if isinstance(every, bool) or not isinstance(every, int | np.integer) or every < 0:
        raise ValueError(
            f"options['divergence_every']: must be a whole number of steps, 0 for never; "
            f"got {every!r}"
        )
    return options
