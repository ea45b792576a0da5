"""The replay environment: the live one's decision problem, looked up in recorded traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from specgym.envs.observer import Observer
from specgym.envs.replay.disturbances import CostFactors, Disturbance, check_disturbance
from specgym.envs.replay.library import TraceLibrary, make_library
from specgym.envs.replay.playback import Factors, Playback
from specgym.envs.replay.request_order import Deck, Order, check_stream
from specgym.envs.replay.traces import TraceSet
from specgym.envs.reset_options import check_options
from specgym.envs.rewards import get_reward
from specgym.envs.step_info import describe_step
from specgym.envs.workloads import Request


class ReplayEnv(gym.Env[np.ndarray, np.int64]):
    """Speculative decoding as a Markov decision process, replayed from recorded traces.

    Description:
        ``SpecDecodeEnv`` without an engine: what each plan gets and costs at each position is
        looked up. Spaces, features and ``info`` are the live environment's, from the same code.
        Deterministic for a seed.

    Action Space:
        ``Discrete(n)``, as of ``SpecDecodeEnv``.

    Observation Space:
        ``Box`` of float32, as of ``SpecDecodeEnv``; one entry per row of ``features``.

    Starting State:
        The next request of the stream. ``reset(seed=s)`` restarts the stream and forgets all
        statistics and drifts; ``reset()`` goes on. ``options={"request": "code-3"}`` (an id, or a
        ``Request``) plays that request; ``options={"divergence_every": n}`` puts D_TV into a
        chain's first and every n-th use; it costs nothing here. Options hold for one episode.

    Rewards:
        ``net_utility`` (default), ``utility`` or ``log_utility``; see ``specgym.envs.rewards``.

    Episode End:
        As of ``SpecDecodeEnv``: EOS or a stop string terminates, budget and context truncate.

    Information:
        As of ``SpecDecodeEnv``. ``controller_seconds`` is 0 and ``total_seconds`` is the
        iteration's; of unique experts a forward has the mean alone.

    Arguments:
        traces: A ``TraceSet``, its file, or a ``TraceLibrary`` that several environments share.
        split: ``all``, ``train`` or ``held-out`` requests. Not beside a library.
        k_values: K values of the action table; None takes the recorded ones. Not beside a library.
        num_requests: Requests of an episode.
        reward: Name of the reward.
        order: ``permuted`` draws every request once before any comes again; ``recorded`` keeps
            the file's order.
        disturbance: What happens to costs: noise, drift, changes of regime.

    Raises:
        ValueError: If an argument is out of range, or the traces cannot be used.

    References:
        The design of traces and their dynamics is ours.

    Version History:
        v0: first version.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (gymnasium's form)

    def __init__(
        self,
        traces: TraceLibrary | TraceSet | Path | str,
        split: str = "all",
        k_values: Sequence[int] | None = None,
        num_requests: int = 1,
        reward: str = "net_utility",
        order: Order = "permuted",
        disturbance: Disturbance = Disturbance(),  # noqa: B008 (frozen)
    ):
        self.library = make_library(traces, split, k_values)
        self.num_requests = check_stream(num_requests, order)
        self.order = order
        self.reward_of = get_reward(reward)
        self.disturbance = check_disturbance(disturbance)
        self.layout, self.table = self.library.layout, self.library.table
        self.observer = Observer(self.layout)
        self.features = self.observer.features
        self.action_space = gym.spaces.Discrete(len(self.table))
        self.observation_space = gym.spaces.Box(
            self.observer.low, self.observer.high, dtype=np.float32
        )
        self.playback = Playback(self.library)
        self.deck: Deck | None = None
        self.is_running = False

    @property
    def plans(self) -> Sequence[tuple[tuple[str, ...], int]]:
        """(chain, K) of every action."""
        return self.table.arrays()

    @property
    def action_names(self) -> tuple[str, ...]:
        """Name of every action."""
        return self.table.names

    def action_masks(self) -> np.ndarray:
        """Which actions can run now, [n] bool (the name sb3-contrib looks for)."""
        if not self.is_running:
            raise ValueError("action_masks: the episode has ended or not begun; call reset()")
        return self.library.allowed[self.playback.row].copy()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode; see the class for ``options``."""
        options = check_options(options, Request | str, "a Request or its id")
        chosen = self.find(options.get("request"))
        super().reset(seed=seed)
        if self.deck is None or seed is not None:
            noise = np.random.default_rng(self.np_random.integers(2**63))
            self.factors = CostFactors(self.disturbance, 1, noise)
            self.deck = Deck(len(self.library), self.order, self.np_random)
            self.num_begun = 0
            self.observer.clear()
        self.divergence_every = options.get("divergence_every", 0)
        self.num_speculative: Counter[tuple[str, ...]] = Counter()
        self.num_left = self.num_requests
        self.is_running = True
        return self.begin(chosen)

    def find(self, request: Request | str | None) -> int | None:
        """Where the request that was asked for is.

        Raises:
            ValueError: If it was not recorded.
        """
        if request is None:
            return None
        wanted = request.id if isinstance(request, Request) else request
        for index, trace in enumerate(self.library.traces):
            if trace.request_id == wanted:
                return index
        raise ValueError(
            f"options['request']: no trace of {wanted!r} among these {len(self.library)}; record "
            f"it, or choose another split"
        )

    def begin(self, request: int | None) -> tuple[np.ndarray, dict[str, Any]]:
        """Goes to the start of a request, the stream's next by default."""
        assert self.deck is not None
        self.playback.begin(next(self.deck) if request is None else request)
        self.factors.begin(0, self.num_begun)
        self.num_begun += 1
        self.num_left -= 1
        trace = self.playback.trace
        info = {
            "request_id": trace.request_id,
            "num_prompt": len(trace.prompt),
            "max_new_tokens": trace.max_new_tokens,
            "prefill_seconds": float(self.library.target_prefill[self.playback.request]),
            "baseline_seconds": self.playback.baseline_seconds(self.costs()),
            "action_mask": self.action_masks(),
        }
        return self.observe(), info

    def costs(self, spread: float | None = None) -> Factors:
        """Factors on costs now, with noise where the spread of seconds is given."""
        if self.factors.is_quiet:
            return Factors()
        target, drafters = self.factors.factors()
        noise = 1.0 if spread is None else float(self.factors.noise(np.array([spread]))[0])
        return Factors(float(target[0]), float(drafters[0]), noise)

    def observe(self) -> np.ndarray:
        """The observation here."""
        position = self.library.position[self.playback.row].tolist()
        return self.observer.observation(position, self.playback.feature_lags)

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Plays one iteration under the action's plan."""
        if not self.is_running:
            raise ValueError("step: the episode has ended or not begun; call reset()")
        if not self.table.has(action):
            raise ValueError(f"action: must be in 0..{len(self.table) - 1}; got {action}")
        playback, asked = self.playback, int(action)
        allowed = bool(self.library.allowed[playback.row, asked])
        run = asked if allowed else 0
        costs = self.costs(float(self.library.columns["spread"][playback.row, run]))
        baseline_seconds = playback.baseline_seconds(costs)
        result = playback.play(run, costs, self.is_divergence_due(playback, run))
        self.factors.advance()
        if result.executed.k:
            self.num_speculative[result.executed.chain] += 1
        info: dict[str, Any] = {
            "request_id": playback.trace.request_id,
            "asked_action": asked,
        }
        info |= describe_step(result, baseline_seconds, self.table, self.layout.experts_per_token)
        if not allowed:
            info["reason"] = "masked"
        self.observer.update(result, info["utility"], info["unique_experts"])
        reward = float(self.reward_of(result.num_tokens, result.seconds, baseline_seconds))
        return self.conclude(reward, info)

    def conclude(
        self, reward: float, info: dict[str, Any]
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The step's return; inside a stream the next request begins."""
        playback = self.playback
        info |= {
            "kv_len": playback.kv_length,
            "context_len": playback.num_tokens,
            "controller_seconds": 0.0,
            "total_seconds": info["iter_seconds"],
            "action_mask": self.action_masks(),
        }
        if not playback.is_finished:
            return self.observe(), reward, False, False, info
        info["output"] = list(playback.output)
        if self.num_left:
            observation, info["next_request"] = self.begin(None)
            info["action_mask"] = self.action_masks()
            return observation, reward, False, False, info
        self.is_running = False
        terminated = bool(self.library.is_terminal[playback.request])
        return self.observe(), reward, terminated, not terminated, info

    def is_divergence_due(self, playback: Playback, action: int) -> bool:
        """Whether D_TV is asked for in this step: a chain's first and every n-th."""
        plan = self.table.plans[self.library.columns["executed"][playback.row, action]]
        is_asked = plan.k > 0 and self.divergence_every > 0
        return is_asked and self.num_speculative[plan.chain] % self.divergence_every == 0
