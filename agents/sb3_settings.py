"""Settings of what learns: imported without torch, so that help is quick."""

from __future__ import annotations

import dataclasses

from specgym.baselines.checks import check_choice, check_count, check_range


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that all algorithms share.

    Attributes:
        num_steps: Iterations to train on, of all rows together.
        num_envs: Rows that are stepped at once.
        learning_rate: Adam's, at the start; it falls to a tenth linearly.
        gamma: Discount per iteration.
        hidden_size: Width of the two hidden layers.
        batch_size: Samples of a gradient step.
        noise: Noise on costs while training, in units of the measured spread.
        forget_after: Requests after which a row's statistics are forgotten, so that the policy
            also learns to begin.
        pace: What a token is worth in the reward, in units of t_base; 0 takes what it costs under
            the best fixed plan, 1 is ``net_utility`` (see ``specgym.envs.rewards``).

    Raises:
        ValueError: If a setting is out of range.
    """

    num_steps: int = 2_000_000
    num_envs: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.95
    hidden_size: int = 64
    batch_size: int = 1024
    noise: float = 1.0
    forget_after: int = 12
    pace: float = 0.0

    def __post_init__(self) -> None:
        whole = [f.name for f in dataclasses.fields(self) if isinstance(getattr(self, f.name), int)]
        for name in whole:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1; got {getattr(self, name)}")
        if not (0.0 <= self.gamma <= 1.0 and self.learning_rate > 0.0):
            raise ValueError(
                f"gamma must be in [0, 1] and learning_rate > 0; got {self.gamma} and "
                f"{self.learning_rate}"
            )
        if self.noise < 0.0 or self.pace < 0.0:
            raise ValueError(f"noise and pace: must be >= 0; got {self.noise} and {self.pace}")


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Recipe):
    """Settings of PPO and of MaskablePPO.

    Attributes:
        rollout_steps: Iterations of each row between updates.
        num_epochs: Passes over a rollout.
        gae_lambda: Of the advantage estimate.
        entropy_coefficient: Weight of the entropy bonus.
        clip_range: How far the ratio of new to old probabilities may go.
        prior: How strongly an untrained policy prefers the plans that are fast throughout: a plan
            that takes a tenth more time than the fastest begins with exp(-prior / 10) of its
            probability. 0 begins with all alike.
    """

    rollout_steps: int = 64
    num_epochs: int = 5
    gae_lambda: float = 0.9
    entropy_coefficient: float = 0.003
    clip_range: float = 0.2
    prior: float = 15.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior < 0.0:
            raise ValueError(f"prior: must be >= 0; got {self.prior}")
        samples = self.num_envs * self.rollout_steps
        if self.batch_size < 2 or samples % self.batch_size:
            raise ValueError(
                f"batch_size: must be at least 2 and divide num_envs x rollout_steps = {samples} "
                f"(a minibatch of one has no advantage to normalise); got {self.batch_size}"
            )


@dataclasses.dataclass(frozen=True)
class QLearning(Recipe):
    """Settings of DQN.

    Attributes:
        buffer_size: Iterations that are remembered.
        learning_starts: Iterations before the first update.
        train_every: Iterations of each row between updates.
        gradient_steps: Gradient steps of an update.
        target_update: Iterations between updates of the target network.
        exploration_share: Share of the training in which exploration falls to its end.
        exploration_end: Share of random actions from there on.
    """

    buffer_size: int = 200_000
    learning_starts: int = 10_000
    train_every: int = 1
    gradient_steps: int = 1
    target_update: int = 4_000
    exploration_share: float = 0.3
    exploration_end: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0.0 < self.exploration_share <= 1.0 and 0.0 <= self.exploration_end <= 1.0):
            raise ValueError(
                f"exploration_share and exploration_end: must be in (0, 1] and [0, 1]; got "
                f"{self.exploration_share} and {self.exploration_end}"
            )


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Settings of a training.

    The horizon is short (``gamma`` 0.9): what an iteration saves is paid at once, and only
    catch-up and where the text stands reach further. Ours; close to Learning-to-Draft's setting.

    Attributes:
        num_steps: Iterations to train on; rounded up to whole rollouts.
        rollout_steps: Iterations between updates; a multiple of the batch size.
        batch_size: Samples of a gradient step.
        num_epochs: Passes over a rollout.
        learning_rate: Adam's.
        gamma: Discount.
        gae_lambda: Of the advantage estimate.
        entropy_coefficient: Weight of the entropy bonus.
        hidden_size: Width of the two hidden layers.
    """

    num_steps: int = 3072
    rollout_steps: int = 128
    batch_size: int = 64
    num_epochs: int = 10
    learning_rate: float = 1e-3
    gamma: float = 0.9
    gae_lambda: float = 0.95
    entropy_coefficient: float = 0.01
    hidden_size: int = 64

    def __post_init__(self) -> None:
        for field in ("num_steps", "rollout_steps", "batch_size", "num_epochs", "hidden_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"ppo.{field}: must be >= 1; got {getattr(self, field)}")
        if self.batch_size < 2 or self.rollout_steps % self.batch_size:
            raise ValueError(
                f"ppo.batch_size: must be at least 2 and divide rollout_steps "
                f"{self.rollout_steps} (a minibatch of one has no advantage to normalise); "
                f"got {self.batch_size}"
            )
        if not 0.0 <= self.gamma <= 1.0 or self.learning_rate <= 0.0:
            raise ValueError(
                f"ppo: gamma must be in [0, 1] and learning_rate > 0; "
                f"got {self.gamma} and {self.learning_rate}"
            )


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """Settings of a fit.

    Attributes:
        loss: ``cost`` is the mean cost of the softmax policy; ``values`` is the error of scores as
            negative costs, those of a visit centred.
        hidden_sizes: Widths of the hidden layers.
        num_epochs: Passes over the visits at most.
        patience: Passes without a better validation that end a fit.
        batch_size: Visits of a gradient step.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        entropy: Weight of the entropy bonus of the loss ``cost``.
        dropout: Share of features that are left out while fitting.
    """

    loss: str = "cost"
    hidden_sizes: tuple[int, ...] = (64, 64)
    num_epochs: int = 20
    patience: int = 5
    batch_size: int = 512
    learning_rate: float = 3e-3
    weight_decay: float = 0.03
    entropy: float = 0.02
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_choice("fit.loss", self.loss, ("values", "cost"))
        for field in ("num_epochs", "patience", "batch_size"):
            check_count(f"fit.{field}", getattr(self, field), 1)
        if not self.hidden_sizes:
            raise ValueError("fit.hidden_sizes: must be at least one width, got none")
        for size in self.hidden_sizes:
            check_count("fit.hidden_sizes", size, 1)
        for field, high in (("learning_rate", 1.0), ("weight_decay", 10.0), ("entropy", 10.0)):
            check_range(f"fit.{field}", getattr(self, field), 0.0, high)
        check_range("fit.dropout", self.dropout, 0.0, 0.9)


@dataclasses.dataclass(frozen=True)
class ImitationConfig:
    """Settings of a training.

    Attributes:
        oracle_rounds: Rounds of visiting states and fitting to the oracle's values.
        own_rounds: Rounds after them, of fitting to the policy's own values.
        num_networks: Networks, each judged on other requests; their scores are added.
        kept_rounds: Last rounds whose visits a fit uses.
        fit: Settings of each fit.
    """

    oracle_rounds: int = 1
    own_rounds: int = 1
    num_networks: int = 4
    kept_rounds: int = 3
    fit: FitConfig = FitConfig()

    def __post_init__(self) -> None:
        check_count("imitation.oracle_rounds", self.oracle_rounds, 0)
        check_count("imitation.own_rounds", self.own_rounds, 0)
        check_count("imitation.num_networks", self.num_networks, 2)
        check_count("imitation.kept_rounds", self.kept_rounds, 1)
        if self.num_rounds < 1:
            raise ValueError("imitation.oracle_rounds and own_rounds: one of them must be >= 1")

    @property
    def num_rounds(self) -> int:
        """All rounds."""
        return self.oracle_rounds + self.own_rounds


def ppo_recipe() -> PolicyGradient:
    """PPO's settings, as MaskablePPO's."""
    return maskable_ppo_recipe()


def maskable_ppo_recipe() -> PolicyGradient:
    """MaskablePPO's settings, chosen by hand; the search of docs/recipes.md found none better.

    Updates must be many: the clipping lets a plan's probability grow by a fifth per update, so
    rollouts are short and rows are many. What an iteration changes for later ones (lags, and what
    is known of the chains) is paid within some ten iterations, hence the discount.
    """
    return PolicyGradient(
        num_steps=1_000_000,
        num_envs=256,
        rollout_steps=8,
        batch_size=256,
        num_epochs=4,
        learning_rate=3e-3,
        gamma=0.95,
    )


def dqn_recipe() -> QLearning:
    """DQN's settings, chosen by hand; no other is better on both pools (docs/recipes.md).

    Per iteration it learns faster than PPO, for it goes through what it remembers again and again.
    """
    return QLearning(
        num_steps=1_000_000,
        num_envs=64,
        batch_size=512,
        hidden_size=128,
        learning_rate=1e-3,
        gamma=0.9,
        learning_starts=5_000,
    )
