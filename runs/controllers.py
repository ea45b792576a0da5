"""Controllers by name: ``none``, ``static:ngram@4``, ``ucb:scope=request``, ``hold:n=4:ucb``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgym import agents
from specgym.agents.bandits.beta_thompson import BetaThompson
from specgym.agents.bandits.discounted_ucb import DiscountedUCB
from specgym.agents.bandits.exp3_spec import EXP3Spec
from specgym.agents.bandits.gaussian_thompson import GaussianThompson
from specgym.agents.bandits.hedge_spec import HedgeSpec
from specgym.agents.bandits.lints import LinTS
from specgym.agents.bandits.linucb import LinUCB
from specgym.agents.bandits.nightjar import Nightjar
from specgym.agents.bandits.sliding_ucb import SlidingUCB
from specgym.agents.bandits.thompson import Thompson
from specgym.agents.bandits.ucb import UCB
from specgym.agents.bandits.ucb_spec import UCBSpec
from specgym.agents.bandits.ucb_tuned import UCBTuned
from specgym.agents.policy_controller import LearnedController
from specgym.agents.saved_state import load_state
from specgym.baselines.batch_table import BatchTable
from specgym.baselines.cascade import TestAndSet
from specgym.baselines.censored_ema import CensoredEMA
from specgym.baselines.ema_tiers import EMATiers
from specgym.baselines.goodput import Goodput
from specgym.baselines.heuristic import Heuristic
from specgym.baselines.hold import Hold
from specgym.baselines.marginal_cost import MarginalCost
from specgym.baselines.restart import Restart
from specgym.baselines.specrouter import SpecRouter
from specgym.baselines.static import NoSpeculation, Random, Static
from specgym.baselines.throughput_aware import ThroughputAware
from specgym.envs.features import FEATURES_VERSION
from specgym.runs.loop import Controller

FACTORIES: dict[str, Callable[..., Controller]] = {
    "none": NoSpeculation,
    "static": Static,
    "random": Random,
    "batch-table": BatchTable,
    "heuristic": Heuristic,
    "censored-ema": CensoredEMA,
    "ema-tiers": EMATiers,
    "specrouter": SpecRouter,
    "test-and-set": TestAndSet,
    "throughput-aware": ThroughputAware,
    "goodput": Goodput,
    "marginal-cost": MarginalCost,
    "thompson": Thompson,
    "ucb": UCB,
    "ucb-tuned": UCBTuned,
    "discounted-ucb": DiscountedUCB,
    "sliding-ucb": SlidingUCB,
    "ucb-spec": UCBSpec,
    "exp3-spec": EXP3Spec,
    "gaussian-thompson": GaussianThompson,
    "beta-thompson": BetaThompson,
    "hedge-spec": HedgeSpec,
    "nightjar": Nightjar,
    "linucb": LinUCB,
    "lints": LinTS,
}
WRAPPERS: dict[str, Callable[..., Controller]] = {"hold": Hold, "restart": Restart}
NAMES = (*FACTORIES, *WRAPPERS, "learned", "ppo")
LEARNERS: tuple[Callable[..., Controller], ...] = (
    UCB,
    LinUCB,
)  # `specgym train` leaves their state
GIVEN = ("plans", "features", "inner")  # arguments that are no options
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
    ``hold`` and ``restart`` go around another spec, which follows their own options:
    ``hold:n=4:ucb:scope=request``, ``restart:hold:ucb``.

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
    if name in WRAPPERS:
        options, inside = split_wrapper(spec)
        inner = make_controller(inside, plans, features, seed, pool)
        return WRAPPERS[name](plans, inner, **options)
    if name == "learned":
        path = policy_file(rest) if rest else shipped_policy(pool)
        return LearnedController(plans, features, path, FEATURES_VERSION)
    if name == "ppo":
        from specgym.agents.ppo import PPOController  # stable-baselines3 is slow to import

        if not rest:
            raise ValueError("controller 'ppo': say which model, for example ppo:runs/NAME/ppo")
        return PPOController(plans, features, Path(rest))
    return make_listed(spec, plans, features, seed)


def make_listed(
    spec: str, plans: Sequence[tuple[tuple[str, ...], int]], features: Sequence[str], seed: int
) -> Controller:
    """The controller of ``FACTORIES`` a spec names.

    Raises:
        ValueError: If there is none, or an option is refused.
    """
    name, options = spec.partition(":")[0], options_of(spec)
    state = options.pop("state", None)
    parameters = inspect.signature(FACTORIES[name]).parameters
    if "seed" in parameters:
        options.setdefault("seed", seed)
    if "features" in parameters:
        options["features"] = features
    try:
        controller = FACTORIES[name](plans, **options)
    except ValueError as error:
        raise ValueError(f"controller {spec!r}: {error}") from error
    if state is not None:
        controller.load_state_dict(load_state(Path(str(state)), name))
    return controller


def options_of(spec: str) -> dict[str, Any]:
    """The options that a spec of ``FACTORIES`` gives.

    Raises:
        ValueError: If there is no such controller, or an option is refused.
    """
    name, _, rest = spec.partition(":")
    if name not in FACTORIES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"controller: no controller {name!r}{hint}; there are {', '.join(NAMES)}")
    if not rest:
        return {}
    return {"plan": rest} if name == "static" else parse_options(spec, rest, FACTORIES[name])


def split_wrapper(spec: str) -> tuple[dict[str, Any], str]:
    """The options of a controller that goes around another, and the spec of the one inside.

    Raises:
        ValueError: If an option is refused, or none is inside.
    """
    name, *parts = spec.split(":")
    count = next((n for n, part in enumerate(parts) if "=" not in part), len(parts))
    if not any(parts[count:]):
        example = ":".join([name, *parts[:count], "ucb"])
        raise ValueError(
            f"controller {spec!r}: say which controller is inside, for example {example}"
        )
    text = ":".join(parts[:count])
    options = parse_options(spec, text, WRAPPERS[name]) if count else {}
    return options, ":".join(parts[count:])


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
    if name in WRAPPERS:
        changed, inside = split_wrapper(spec)
        return {"controller": name} | defaults_of(WRAPPERS[name]) | changed | {"inside": inside}
    if name not in FACTORIES:
        return {"controller": name, "model": rest}
    return {"controller": name} | defaults_of(FACTORIES[name]) | options_of(spec)


def defaults_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """The options of a constructor that have a default, and their defaults."""
    return {
        key: parameter.default
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is not inspect.Parameter.empty and key not in GIVEN
    }


def parse_options(spec: str, text: str, factory: Callable[..., Any]) -> dict[str, Any]:
    """Options ``name=value`` of a spec, checked against the constructor's.

    Raises:
        ValueError: If one is malformed, unknown or given twice.
    """
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in GIVEN]
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
