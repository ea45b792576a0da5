"""Checks of what a user passes: the field, the rule that it breaks, the value, the way out."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, of numpy too; a truth value is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a real number, of numpy too; a truth value is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_whole(field: str, value: Any, least: int, remark: str = "") -> int:
    """The value as an int, where it is a whole number that is large enough.

    Args:
        field: What the user calls it.
        value: What the user passed.
        least: The smallest value there may be.
        remark: What else there is to say of the rule.

    Raises:
        ValueError: If it is not.
    """
    if not is_whole(value) or value < least:
        told = f" ({remark})" if remark else ""
        raise ValueError(f"{field}: must be a whole number >= {least}{told}; got {value!r}")
    return int(value)


def check_flag(field: str, value: Any) -> bool:
    """The value, where it is True or False.

    Raises:
        ValueError: If it is something else, however true.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{field}: must be True or False; got {value!r}")
    return value


def check_text(field: str, value: Any) -> str:
    """The value, where it is a text.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, str):
        raise ValueError(f"{field}: must be a text; got {value!r}")
    return value


def check_stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings that end a text.

    Raises:
        ValueError: If they are no list of strings, or one is empty.
    """
    texts = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else ("",)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            f"stop: must be a list of strings that are not empty; got {stop!r}; give [] for none"
        )
    return texts


def check_tokens(field: str, tokens: Any) -> tuple[int, ...]:
    """Token ids as ints.

    Raises:
        ValueError: If they are something else.
    """
    ids = tuple(tokens) if isinstance(tokens, Iterable) and not isinstance(tokens, str) else None
    if ids is None or not all(type(each) is int or is_whole(each) for each in ids):
        raise ValueError(
            f"{field}: must be token ids, whole numbers; got {tokens!r}; the pool's encode() makes "
            f"them of a text"
        )
    return tuple(map(int, ids))
