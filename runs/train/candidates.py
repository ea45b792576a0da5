"""Settings that ``specgym search`` judges beside an agent's own, a few per agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specgym.runs.controllers import parse_value

# Changes of an agent's settings, several of them with a space between.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "ppo": (
        "recipe.learning_rate=0.001",
        "recipe.gamma=0.8",
        "recipe.entropy_coefficient=0.01",
        "recipe.prior=0",
    ),
    "maskable-ppo": (
        "recipe.learning_rate=0.001",
        "recipe.gamma=0.8",
        "recipe.entropy_coefficient=0.01",
        "recipe.prior=0",
    ),
    "dqn": (
        "recipe.learning_rate=0.0003",
        "recipe.gamma=0.8",
        "recipe.hidden_size=64",
        "recipe.exploration_end=0.2",
    ),
    "imitation": (
        "recipe.fit.loss=values",
        "recipe.own_rounds=3",
        "recipe.fit.learning_rate=0.001",
        "recipe.fit.dropout=0.25",
        "recipe.fit.hidden_sizes=32x32",
        "recipe.num_networks=8",
    ),
    "ucb": (
        "options=exploration=0.03",
        "options=exploration=0.3",
        "options=scope=request",
    ),
    "linucb": (
        "options=exploration=0.1",
        "options=exploration=1.0",
        "options=ridge=100.0",
        "options=scope=request",
    ),
}


def changed(settings: Any, candidate: str) -> Any:
    """The settings with a candidate's changes, ``recipe.fit.dropout=0.2 num_rows=64``.

    A list of numbers is written ``64x64``.

    Raises:
        ValueError: If a change is malformed, or names no setting.
    """
    tree: dict[str, Any] = {}
    for change in candidate.split():
        path, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"candidates: {change!r} is not setting=value")
        *parents, last = path.split(".")
        branch = tree
        for name in parents:
            branch = branch.setdefault(name, {})
        branch[last] = text
    return with_values(settings, tree)


def with_values(settings: Any, tree: Mapping[str, Any]) -> Any:
    """The settings with other values, as text, by field name; a field of fields takes a mapping.

    Raises:
        ValueError: If there is no such field, or a value is refused.
    """
    known = [field.name for field in dataclasses.fields(settings)]
    values = {}
    for name, text in tree.items():
        if name not in known:
            raise ValueError(f"candidates: no setting {name!r}; there are {', '.join(known)}")
        current = getattr(settings, name)
        is_tree = isinstance(text, Mapping)
        values[name] = with_values(current, text) if is_tree else as_value(name, text, current)
    return dataclasses.replace(settings, **values)


def as_value(name: str, text: str, current: Any) -> Any:
    """A text as a value of the type of the current one.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(current, tuple):
        return tuple(map(parse_value, text.split("x")))
    value = parse_value(text)
    if isinstance(current, float) and isinstance(value, int):
        value = float(value)
    if not isinstance(value, type(current)):
        raise ValueError(
            f"candidates: {name} must be of type {type(current).__name__}; got {text!r}"
        )
    return value
