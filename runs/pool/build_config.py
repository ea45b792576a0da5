"""Settings of ``pool build``: their defaults, what depends on them, and what a folder has begun."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from specgym.engine.pools.sources import LoadedModel
from specgym.engine.pools.students import check_layers, spread
from specgym.engine.training.eagle import default_taps
from specgym.engine.training.fitting import FitConfig
from specgym.runs.configs import BuildConfig
from specgym.runs.results import write_json

SETTINGS_FILE, FINISHED_FILE = "settings.json", "config.json"
DEFAULT_STEPS = {"eagle": 800, "small": 800, "mid": 300}
DEFAULT_RATES = {"eagle": 1e-3, "small": 1e-3, "mid": 1.5e-3}


def check_config(config: BuildConfig) -> None:
    """Refuses settings that are out of range.

    Raises:
        ValueError: Which, and what it must be.
    """
    if not config.target:
        raise ValueError(
            "target: must be given: a local folder, a hub id, or smollm2-135m, as in "
            "`specgym pool build smollm2-135m --out drafters`"
        )
    positive = ("tokens", "rank", "vocabulary", "depths", "texts_per_shard", "held_out", "rows",
                "batch_tokens", "checkpoint_every")  # fmt: skip
    for name in positive:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: must be at least 1; got {getattr(config, name)}")
    if not config.drafters or len(set(config.drafters)) != len(config.drafters):
        raise ValueError(f"drafters: must be some of eagle, small, mid; got {config.drafters}")
    for name in ("steps", "learning_rates"):
        values = getattr(config, name)
        if len(values) not in (0, 1, len(config.drafters)) or any(value <= 0 for value in values):
            raise ValueError(
                f"{name}: must be a positive number, or one for each of {len(config.drafters)} "
                f"drafters; got {values}"
            )


def fill_in(config: BuildConfig, target: LoadedModel) -> BuildConfig:
    """The configuration with its layers and taps spelled out for this target.

    Raises:
        ValueError: If the target has no such layers.
    """
    num_layers = target.model.config.num_hidden_layers
    layers = {}
    for name in ("small_layers", "mid_layers"):
        given = getattr(config, name)
        if len(given) == 1:
            if not 1 <= given[0] <= num_layers:
                raise ValueError(f"{name}: must be in 1..{num_layers}; got {given[0]}")
            given = tuple(spread(num_layers, given[0]))
        if name.removesuffix("_layers") in config.drafters:
            check_layers(given, num_layers)
        layers[name] = given
    taps = config.taps or default_taps(num_layers)
    check_layers(taps, num_layers, "taps")
    return dataclasses.replace(config, taps=taps, **layers)


def text_settings(config: BuildConfig, target: LoadedModel) -> dict[str, Any]:
    """What the texts depend on."""
    names = ("seed", "tokens", "taps", "texts_per_shard", "held_out", "rows")
    named = {name: getattr(config, name) for name in names}
    return {"target": target.fingerprint, "origin": target.origin, **named}


def drafter_settings(config: BuildConfig, name: str, fingerprint: str) -> dict[str, Any]:
    """What a drafter depends on.

    Args:
        config: Settings.
        name: ``eagle``, ``small`` or ``mid``.
        fingerprint: Hash of the target's weights.
    """
    own: dict[str, dict[str, Any]] = {
        "eagle": {"taps": config.taps, "depths": config.depths},
        "small": {"layers": config.small_layers},
        "mid": {"layers": config.mid_layers, "rank": config.rank},
    }
    fitting = dataclasses.asdict(fit_config(config, name))
    texts = {key: getattr(config, key) for key in ("tokens", "texts_per_shard", "held_out")}
    return {
        "target": fingerprint,
        **texts,
        **own[name],
        "vocabulary": config.vocabulary,
        **fitting,
    }


def fit_config(config: BuildConfig, name: str) -> FitConfig:
    """How a drafter is trained."""
    place = config.drafters.index(name)  # type: ignore[arg-type]
    steps = config.steps or (DEFAULT_STEPS[name],)
    rates = config.learning_rates or (DEFAULT_RATES[name],)
    return FitConfig(
        num_steps=steps[place if len(steps) > 1 else 0],
        learning_rate=rates[place if len(rates) > 1 else 0],
        batch_tokens=config.batch_tokens,
        warmup_steps=30,
        checkpoint_every=config.checkpoint_every,
        seed=config.seed,
    )


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Writes down what a folder's content depends on; a begun one must be given the same.

    Raises:
        ValueError: If it was begun with something else.
    """
    path, ours = folder / SETTINGS_FILE, json.loads(json.dumps(settings))
    if not path.exists():
        if (folder / FINISHED_FILE).exists():
            raise ValueError(f"out: {folder} holds something else; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, ours)
        return
    theirs = json.loads(path.read_text())
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{key}: {folder} was begun with {theirs.get(key)!r}, this asks for "
                f"{ours.get(key)!r}; give the same to go on, choose another --out, or remove "
                f"{folder} and what was trained on it"
            )
