"""Checks of hyper-parameters: what a user passed, the rule that it breaks, and the way out."""

from collections.abc import Sequence


def check_count(field: str, value: int, minimum: int) -> int:
    """Returns `value`, a whole number that is at least `minimum`.

    Raises:
        ValueError: it is not a whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{field} must be a whole number >= {minimum}, got {value!r}")
    return value


def check_range(field: str, value: float, low: float, high: float) -> float:
    """Returns `value`, a number with `low` <= value <= `high`.

    Raises:
        ValueError: it lies outside, is NaN, or is no number.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ValueError(f"{field} must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def check_choice(field: str, value: str, choices: Sequence[str]) -> str:
    """Returns `value`, one of `choices`.

    Raises:
        ValueError: it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")
    return value
