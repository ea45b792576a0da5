"""Controllers by name: ``none``, ``static:ngram@4``, ``ucb:scope=request``, ``ppo:FOLDER``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgym.agents.ucb import UCB
from specgym.baselines.specrouter import SpecRouter
from specgym.baselines.static import NoSpeculation, Random, Static
from specgym.baselines.test_and_set import TestAndSet
from specgym.runs.loop import Controller

FACTORIES: dict[str, Callable[..., Controller]] = {
    "none": NoSpeculation,
    "static": Static,
    "random": Random,
    "specrouter": SpecRouter,
    "test-and-set": TestAndSet,
    "ucb": UCB,
}
NAMES = (*FACTORIES, "ppo")


def make_controller(
    spec: str, plans: Sequence[tuple[tuple[str, ...], int]], features: Sequence[str], seed: int
) -> Controller:
    """The controller a spec names.

    A spec is a name, or a name with options: ``static:PLAN``, ``ppo:FOLDER``, or
    ``NAME:option=value:option=value`` with the constructor's options.

    Raises:
        ValueError: If the name or an option is unknown, or a value is refused.
    """
    name, _, rest = spec.partition(":")
    if name == "ppo":
        from specgym.agents.ppo import PPOController  # stable-baselines3 is slow to import

        if not rest:
            raise ValueError("controller 'ppo': say which model, for example ppo:runs/NAME/ppo")
        return PPOController(plans, features, Path(rest))
    if name not in FACTORIES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"controller: no controller {name!r}{hint}; there are {', '.join(NAMES)}")
    factory = FACTORIES[name]
    options: dict[str, Any] = {"plan": rest} if name == "static" and rest else {}
    if name != "static" and rest:
        options = parse_options(spec, rest, factory)
    if "seed" in inspect.signature(factory).parameters:
        options.setdefault("seed", seed)
    return factory(plans, **options)


def describe_options(spec: str) -> dict[str, Any]:
    """A controller's settings by name: its constructor's defaults, and what the spec changes."""
    name, _, rest = spec.partition(":")
    if name not in FACTORIES:
        return {"controller": name, "model": rest}
    factory = FACTORIES[name]
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    if name == "static":
        changed = {"plan": rest} if rest else {}
    else:
        changed = parse_options(spec, rest, factory) if rest else {}
    return {"controller": name} | defaults | changed


def parse_options(spec: str, text: str, factory: Callable[..., Any]) -> dict[str, Any]:
    """Options ``name=value`` of a spec, checked against the constructor's.

    Raises:
        ValueError: If one is malformed or unknown.
    """
    known = [name for name in inspect.signature(factory).parameters if name != "plans"]
    options = {}
    for part in text.split(":"):
        name, equals, value = part.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"controller {spec!r}: {part!r} is not option=value with one of "
                f"{', '.join(known) or 'no options'}"
            )
        options[name] = parse_value(value)
    return options


def parse_value(text: str) -> Any:
    """A number, truth value, None, or the text itself."""
    literals = {"true": True, "false": False, "none": None}
    if text.lower() in literals:
        return literals[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
