"""Training of a bandit on recorded traces: it plays them, and what it knows is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from specgym.agents.saved_state import save_state
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.runs.controllers import make_controller
from specgym.runs.disk import writing
from specgym.runs.loop import DIVERGENCE_EVERY, Controller, run_steps
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.run_folder import open_run
from specgym.runs.train.configs import BanditConfig
from specgym.runs.train.training_set import ReplayTraining

STATE_FILE = "state.npz"


def train_bandit(config: BanditConfig, console: Console) -> Path:
    """Plays the training requests, saves the bandit's state and returns the run's folder.

    Raises:
        ValueError: If the traces or the options are refused, or a run of this name is finished.
    """
    training = ReplayTraining(config)
    controller = make_bandit(training)
    bar = make_bar(f"training {config.agent}", "requests", console)
    with open_run(config, config.run_name, STATE_FILE, goes_on=False) as folder:
        with bar:
            task = bar.add_task("", total=config.num_passes * len(training.train), note="")
            learn(training, controller, lambda: bar.advance(task))
        with writing(folder / STATE_FILE):
            save_state(folder / STATE_FILE, config.agent, controller.state_dict())
    yardstick = training.yardstick(console)
    seconds = play_all(training.held_out, controller, config.seed)
    console.print(
        f"held-out requests, still learning: {yardstick.speedup(seconds):.3f}x no speculation, "
        f"{yardstick.share(seconds):.1%} of the headroom"
    )
    console.print(
        f"state: {folder / STATE_FILE}  (compare it with --controllers "
        f"{config.spec}:state={folder / STATE_FILE})"
    )
    return folder


def make_bandit(training: ReplayTraining) -> Controller:
    """A bandit that knows nothing, with the options of the settings.

    Raises:
        ValueError: If the options are refused.
    """
    config = training.config
    assert isinstance(config, BanditConfig)
    return make_controller(config.spec, training.plans, training.features, config.seed)


def learn(training: ReplayTraining, controller: Controller, on_request: Callable[[], None]) -> None:
    """Has a bandit play all training requests as often as the settings say."""
    config = training.config
    assert isinstance(config, BanditConfig)
    env = ReplayEnv(training.train)
    for number in range(config.num_passes * len(training.train)):
        play_request(env, controller, None if number else config.seed)
        on_request()


def judge_bandit(training: ReplayTraining) -> np.ndarray:
    """Seconds on each held-out request of a bandit that played the others; it goes on learning."""
    controller = make_bandit(training)
    learn(training, controller, lambda: None)
    return play_all(training.held_out, controller, training.config.seed)


def play_all(library: TraceLibrary, controller: Controller, seed: int) -> np.ndarray:
    """Seconds of a controller on each request of a library, in the order of its stream."""
    env = ReplayEnv(library)
    seconds = np.zeros(len(library))
    for number in range(len(library)):
        taken = play_request(env, controller, None if number else seed)
        seconds[env.playback.request] = taken
    return seconds


def play_request(env: ReplayEnv, controller: Controller, seed: int | None) -> float:
    """Seconds of a controller on the stream's next request; a seed begins the stream."""
    every = DIVERGENCE_EVERY if controller.needs_divergence else 0
    observation, info = env.reset(seed=seed, options={"divergence_every": every})
    controller.begin({key: info[key] for key in ("request_id", "num_prompt", "max_new_tokens")})
    steps = run_steps(env, controller, observation, info)
    return sum(info["iter_seconds"] for _, _, info in steps)
