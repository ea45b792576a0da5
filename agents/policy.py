"""A learned policy as plain arrays: its file, the pools that it fits, and its scores.

Legend: A actions, F features.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specgym.baselines.plans import Plan, check_plans, plan_name

SCHEMA = "specgym-policy"
SCHEMA_VERSION = 1
ACTIVATIONS = ("tanh", "relu")


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A multi-layer perceptron with one score per action; the allowed action of largest score runs.

    A linear policy is one of a single layer. All arrays are kept as float32.

    Attributes:
        plans: (chain, K) of each action, [A].
        features: Names of the observation's entries, [F].
        features_version: Version of the table of features that they are from.
        mean: Subtracted from the observation, [F].
        scale: What the difference is divided by, [F].
        clip: The quotient is clipped to +- this.
        layers: (weights [out, in], biases [out]) from the observation to the scores; the activation
            stands between them, not after the last.
        activation: ``tanh`` or ``relu``.
        about: Where it comes from, as JSON values: algorithm, settings, traces.

    Raises:
        ValueError: If the arrays do not go together, or hold values that are no numbers.
    """

    plans: tuple[Plan, ...]
    features: tuple[str, ...]
    features_version: int
    mean: np.ndarray
    scale: np.ndarray
    clip: float
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    activation: str = "tanh"
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = tuple((as_float32(w), as_float32(b)) for w, b in self.layers)
        changes = {
            "plans": check_plans(self.plans),
            "features": tuple(self.features),
            "mean": as_float32(self.mean),
            "scale": as_float32(self.scale),
            "layers": layers,
        }
        for name, value in changes.items():
            object.__setattr__(self, name, value)
        check_policy(self)

    @property
    def plan_names(self) -> tuple[str, ...]:
        """Name of each action's plan, [A]."""
        return tuple(plan_name(plan) for plan in self.plans)

    def scores(self, observation: np.ndarray) -> np.ndarray:
        """The actions' scores, float32 [..., A], of observations [..., F]."""
        x = ((observation - self.mean) / self.scale).astype(np.float32)
        x = np.clip(x, -self.clip, self.clip)
        for weight, bias in self.layers[:-1]:
            x = x @ weight.T + bias
            x = np.tanh(x) if self.activation == "tanh" else np.maximum(x, 0.0)
        weight, bias = self.layers[-1]
        return x @ weight.T + bias

    def fit(
        self,
        plans: Sequence[Plan],
        features: Sequence[str],
        features_version: int | None = None,
    ) -> Policy:
        """This policy over another table of plans and features, where they go together by name.

        Plans in another order are mapped. Plans that the pool lacks are dropped, and those that the
        policy does not know never run; of the chains that both know, one of the two must have every
        plan of the other.
        Features are mapped by name; those that the policy does not know are left out.

        Args:
            plans: The pool's plan table, indexed by action.
            features: Names of the observation's entries.
            features_version: Version of the pool's table of features, where it is known.

        Raises:
            ValueError: If of the chains that both know each has plans that the other lacks, if they
                share no speculation, if a feature is missing, or if the features are of another
                version.
        """
        table = check_plans(plans)
        if features_version not in (None, self.features_version):
            raise ValueError(
                f"policy: it was trained on version {self.features_version} of the features, this "
                f"environment has version {features_version}; train it again"
            )
        names = [plan_name(plan) for plan in table]
        check_names(self.plan_names, names)
        missing = [name for name in self.features if name not in features]
        if missing:
            raise ValueError(
                f"policy: it looks at {missing[0]!r} and {len(missing) - 1} more features that "
                f"this pool lacks; give the pool the chains it was trained with, or train on it"
            )
        if (tuple(names), tuple(features)) == (self.plan_names, self.features):
            return self
        layers = with_rows(self.layers, [self.find(name) for name in names])
        columns = [list(features).index(name) for name in self.features]
        return dataclasses.replace(
            self,
            plans=table,
            features=tuple(features),
            mean=spread(self.mean, columns, len(features), 0.0),
            scale=spread(self.scale, columns, len(features), 1.0),
            layers=with_columns(layers, columns, len(features)),
        )

    def find(self, name: str) -> int | None:
        """The action of the plan of this name, if there is one."""
        return self.plan_names.index(name) if name in self.plan_names else None


def as_float32(values: Any) -> np.ndarray:
    """The values as a float32 array that lies row by row."""
    return np.ascontiguousarray(values, dtype=np.float32)


def check_policy(policy: Policy) -> None:
    """Refuses a policy whose arrays do not go together.

    Raises:
        ValueError: If a shape, a value or the activation is wrong.
    """
    if policy.activation not in ACTIVATIONS:
        raise ValueError(
            f"policy.activation: must be one of {', '.join(ACTIVATIONS)}; got {policy.activation!r}"
        )
    if len(set(policy.features)) != len(policy.features) or not policy.layers:
        raise ValueError("policy: needs features of different names and at least one layer")
    width = len(policy.features)
    for name, array in (("mean", policy.mean), ("scale", policy.scale)):
        check_array(name, array, (width,))
    if not (policy.scale > 0.0).all() or not policy.clip > 0.0:
        raise ValueError("policy: scale and clip must be above 0")
    for number, (weight, bias) in enumerate(policy.layers):
        is_last = number == len(policy.layers) - 1
        rows = len(policy.plans) if is_last else len(bias)
        check_array(f"weight.{number}", weight, (rows, width))
        check_array(f"bias.{number}", np.where(bias == -np.inf, 0.0, bias), (rows,))
        width = rows


def check_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuses an array of another shape or with values that are not finite.

    Raises:
        ValueError: If it is such a one.
    """
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(
            f"policy.{name}: must be finite numbers of shape {shape}; got shape {array.shape}"
        )


def check_names(known: Sequence[str], names: Sequence[str]) -> None:
    """Raise if a policy's plans do not go together with a pool's.

    A chain that the policy does not know at all is no obstacle: its drafter came later.

    Raises:
        ValueError: If of the chains that both know each has plans that the other lacks, or if they
            share no speculation.
    """
    lacking = [name for name in known if name not in names]
    others = [name for name in names if name not in known]
    chains = {name.partition("@")[0] for name in known}
    differ = lacking and any(name.partition("@")[0] in chains for name in others)
    if differ or not set(known) & set(names) - {"none"}:
        raise ValueError(
            f"policy: it was trained on the plans {', '.join(known)}; this pool lacks "
            f"{', '.join(lacking)} and has {', '.join(others) or 'no others'}; choose the same "
            f"--chains and --k-values, or train on this pool"
        )


Layers = tuple[tuple[np.ndarray, np.ndarray], ...]


def with_rows(layers: Layers, rows: Sequence[int | None]) -> Layers:
    """Layers whose scores are those of these rows; one that is None never is the largest."""
    weight, bias = layers[-1]
    weights = [np.zeros_like(weight[0]) if row is None else weight[row] for row in rows]
    biases = [-np.inf if row is None else bias[row] for row in rows]
    return (*layers[:-1], (np.stack(weights), np.array(biases)))


def with_columns(layers: Layers, columns: Sequence[int], width: int) -> Layers:
    """Layers whose inputs lie in these columns of a wider observation."""
    weight, bias = layers[0]
    wide = np.zeros((len(weight), width), dtype=np.float32)
    wide[:, columns] = weight
    return ((wide, bias), *layers[1:])


def spread(values: np.ndarray, columns: Sequence[int], width: int, rest: float) -> np.ndarray:
    """The values at these places of a longer array."""
    wide = np.full(width, rest, dtype=np.float32)
    wide[list(columns)] = values
    return wide


def save_policy(path: Path, policy: Policy) -> None:
    """Writes a policy into one ``.npz`` file, whole or not at all; numpy alone can read it."""
    header = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "plans": [[list(chain), k] for chain, k in policy.plans],
        "features": list(policy.features),
        "features_version": policy.features_version,
        "clip": float(policy.clip),
        "activation": policy.activation,
        "num_layers": len(policy.layers),
        "about": dict(policy.about),
    }
    arrays = {"header": np.array(json.dumps(header)), "mean": policy.mean, "scale": policy.scale}
    for number, (weight, bias) in enumerate(policy.layers):
        arrays |= {f"weight.{number}": weight, f"bias.{number}": bias}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_policy(path: Path) -> Policy:
    """The policy of a file.

    Raises:
        ValueError: If there is no such file, it is cut short, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"policy: there is no file {path}; make one with specgym train")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        if header["schema"] != SCHEMA:
            raise ValueError("it holds something else")
        if header["version"] != SCHEMA_VERSION:
            raise ValueError(f"its version is {header['version']}, known is {SCHEMA_VERSION}")
        return assemble(header, arrays)
    except (zipfile.BadZipFile, EOFError, OSError, KeyError, TypeError, AttributeError) as error:
        raise broken(path, f"it is not whole, or is no policy ({error})") from error
    except ValueError as error:
        raise broken(path, str(error)) from error


def broken(path: Path, why: str) -> ValueError:
    """The error of a file that cannot be used."""
    return ValueError(f"policy: {path} cannot be used: {why}; train it again with specgym train")


def assemble(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Policy:
    """A policy from what a file holds."""
    return Policy(
        plans=tuple((tuple(chain), k) for chain, k in header["plans"]),
        features=tuple(header["features"]),
        features_version=header["features_version"],
        mean=arrays["mean"],
        scale=arrays["scale"],
        clip=header["clip"],
        layers=tuple(
            (arrays[f"weight.{number}"], arrays[f"bias.{number}"])
            for number in range(header["num_layers"])
        ),
        activation=header["activation"],
        about=header["about"],
    )
