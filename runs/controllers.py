"""Controllers by name: ``none``, ``static:ngram@4``, ``ucb:scope=request``, ``learned``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgym import agents
from specgym.agents.learned import LearnedController
from specgym.agents.linucb import LinUCB
from specgym.agents.saved_state import load_state
from specgym.agents.ucb import UCB
from specgym.baselines.specrouter import SpecRouter
from specgym.baselines.static import NoSpeculation, Random, Static
from specgym.baselines.test_and_set import TestAndSet
from specgym.envs.features import FEATURES_VERSION
from specgym.runs.loop import Controller

FACTORIES: dict[str, Callable[..., Controller]] = {
    "none": NoSpeculation,
    "static": Static,
    "random": Random,
    "specrouter": SpecRouter,
    "test-and-set": TestAndSet,
    "ucb": UCB,
    "linucb": LinUCB,
}
NAMES = (*FACTORIES, "learned", "ppo")
LEARNERS: tuple[Callable[..., Controller], ...] = (
    UCB,
    LinUCB,
)  # `specgym train` leaves their state
SHIPPED = Path(agents.__file__).parent / "shipped"
POLICY_FILE = "policy.npz"


def make_controller(
    spec: str,
    plans: Sequence[tuple[tuple[str, ...], int]],
    features: Sequence[str],
    seed: int,
    pool: str = "",
) -> Controller:
    """The controller a spec names.

    A spec is a name, or a name with options: ``static:PLAN``, ``learned:FILE``, ``ppo:FOLDER``, or
    ``NAME:option=value:option=value`` with the constructor's options. ``NAME:state=FILE`` begins
    with what ``specgym train NAME`` left; ``learned`` alone takes the policy shipped for the pool.

    Args:
        spec: The spec.
        plans: (chain, K) of every action.
        features: Names of the observation's entries.
        seed: Of a controller that is random.
        pool: The pool's name.

    Raises:
        ValueError: If the name or an option is unknown, a value is refused, or a policy does not
            fit.
    """
    name, colon, rest = spec.partition(":")
    if colon and not rest:
        raise ValueError(
            f"controller {spec!r}: nothing stands behind the colon; leave it out, or say what is "
            f"meant, as in static:ngram@4, ucb:scope=request or learned:FILE"
        )
    if name == "learned":
        path = policy_file(rest) if rest else shipped_policy(pool)
        return LearnedController(plans, features, path, FEATURES_VERSION)
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
    state = options.pop("state", None)
    parameters = inspect.signature(factory).parameters
    if "seed" in parameters:
        options.setdefault("seed", seed)
    if "features" in parameters:
        options["features"] = features
    try:
        controller = factory(plans, **options)
    except ValueError as error:
        raise ValueError(f"controller {spec!r}: {error}") from error
    if state is not None:
        controller.load_state_dict(load_state(Path(str(state)), name))
    return controller


def policy_file(text: str) -> Path:
    """The file of a policy: itself, or that of a training's folder."""
    path = Path(text)
    return path / POLICY_FILE if path.is_dir() else path


def shipped_policy(pool: str) -> Path:
    """The policy that comes with the package for the pool of this name.

    Raises:
        ValueError: If there is none.
    """
    name = pool.partition(" ")[0].replace(":", "-").replace("/", "-")  # the rest describes it
    path = SHIPPED / f"{name}.npz"
    if not path.is_file():
        raise ValueError(
            f"controller 'learned': no policy is shipped for the pool {pool!r}; make one: "
            f"`specgym record --pool POOL`, then `specgym train maskable-ppo --env replay --traces "
            f"FILE`, and name it with learned:FILE"
        )
    return path


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
        ValueError: If one is malformed, unknown or given twice.
    """
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in ("plans", "features")]
    known += ["state"] if factory in LEARNERS else []
    options: dict[str, Any] = {}
    for part in text.split(":"):
        name, equals, value = part.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"controller {spec!r}: {part!r} is not option=value with one of "
                f"{', '.join(known) or 'no options'}"
            )
        if name in options:
            raise ValueError(f"controller {spec!r}: {name} is given twice; give it once")
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
