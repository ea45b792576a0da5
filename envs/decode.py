"""The live environment: an agent picks a plan before every iteration of a real engine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from specgym.engine.checks import check_flag, check_stop_strings, check_text
from specgym.engine.decoding import decode_step, probe_baseline, start
from specgym.engine.pool import DEFAULT_K_VALUES, ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.engine.state import DecodeState
from specgym.engine.timing import Baseline, Clock, CountingClock, WallClock
from specgym.engine.types import DecodeRequest, Plan, SamplingParams, StepResult
from specgym.envs.actions import ActionTable
from specgym.envs.arguments import check_chains, check_counts, check_k_values, check_kinds
from specgym.envs.batch_rows import Rows
from specgym.envs.observer import Observer
from specgym.envs.pool_spec import Layout
from specgym.envs.prompt_room import fit_workload
from specgym.envs.reset_options import check_options
from specgym.envs.rewards import get_reward
from specgym.envs.step_info import describe_step
from specgym.envs.text_features import class_bytes
from specgym.envs.workloads import Request, Split, Workload, get_workload

logger = logging.getLogger(__name__)
GIVEN = "given"  # the id of a request that came as token ids


class SpecDecodeEnv(gym.Env[np.ndarray, np.int64]):
    """Speculative decoding as a Markov decision process.

    Description:
        One step is one decode iteration of a real engine on real weights. The agent picks a plan:
        which chain of models drafts and verifies, and how many tokens K are drafted. The engine
        runs it, and measures what it cost. The decoded text does not depend on the plans.

    Action Space:
        ``Discrete(n)``: 0 is no speculation, then every legal chain with every K. ``plans`` and
        ``action_names`` list them; ``action_masks()`` says which can run now. A masked action that
        comes all the same runs as no speculation and says so in ``info``.

    Observation Space:
        ``Box`` of float32, one entry per row of ``features`` (name, unit, bounds, source).

    Starting State:
        The prompt of the workload's next request, prefilled. ``reset(seed=s)`` restarts the
        stream of requests; ``reset()`` goes on with it. ``options={"request": Request(...)}``
        decodes that request, a ``DecodeRequest`` there (token ids) with its own budget, sampling
        and ends; ``options={"divergence_every": n}`` measures D_TV of adjacent members in a
        chain's first and every n-th use (its time counts). Options hold for one episode.

    Rewards:
        ``net_utility`` (default), ``utility`` or ``log_utility``; see ``specgym.envs.rewards``.

    Episode End:
        EOS or a stop string of the last request terminates; the token budget or the context
        truncates. In a stream of ``num_requests`` the other ends are internal:
        ``info["finish_reason"]``. An engine fault truncates, with ``info["error"]``.

    Batch:
        With ``batch_size`` above 1 that many requests decode together, and one action holds for
        all of them. A row that ends goes to the stream's next request at once, until
        ``num_requests`` have begun; the episode ends with the last row. Counts in ``info`` are
        sums over the ``num_active`` rows that decoded, and ``baseline_seconds`` is what a token
        costs in plain decoding of the same rows, so that a utility of 1 is break-even here too;
        the observation shows means over rows. ``finish_reason`` is set when every row has ended;
        ``ends`` lists the requests that ended in the step (row, id, reason, output),
        ``next_requests`` those that joined.

    Information:
        Every step: ``tokens, drafted, accepted, accepted_per_level, proposed_per_level, chain, k,
        asked_action, executed_action, reason, iter_seconds, draft_seconds, verify_seconds,
        catchup_seconds, baseline_seconds, controller_seconds, total_seconds, utility, forwards,
        divergence, kv_len, context_len, unique_experts, finish_reason, request_id, action_mask``.
        Seconds are floats; ``total_seconds`` is the controller, the iteration and the bookkeeping,
        but no baseline probe and no prefill of the target. The end of a request adds ``output``
        (its token ids), and inside a stream ``next_request``, what ``reset`` would say of the
        request that follows. A step with ``error`` may lack all but ``asked_action, request_id,
        action_mask``.

    Arguments:
        pool: A ``ModelPool``, or a spec for ``load_pool`` such as ``"smollm2"``.
        workload: A ``Workload``, or a name for ``get_workload``.
        prompts: JSONL file the workload's requests come from; None takes the built-in ones. Only
            where ``workload`` is a name.
        split: ``all``, ``train`` or ``held-out`` requests. Only where ``workload`` is a name.
        max_new_tokens: Token budget of a request.
        num_requests: Requests of an episode, at least ``batch_size``; None takes just as many.
        batch_size: Requests that are decoded together.
        skip_too_long: Leave out prompts that do not fit the target's context (how many is
            ``workload.num_skipped``); by default they are refused. Only where ``workload`` is a
            name: the prompts of a ``Workload`` are not looked at before their turn.
        reward: Name of the reward.
        exact: Bit-exact fixed shapes (see ``specgym.engine.start``).
        clock: ``wall`` or ``counting`` (deterministic), or a ``Clock``.
        sampling: How logits become tokens; greedy by default. Each request's seed is
            ``sampling.seed``.
        stop: Strings that end a request.
        baseline: Shared by environments that are compared (of one batch size); None makes one.
        k_values: K values of the action table; None takes 1, 2, 3, 4, 6. Only where ``pool`` is a
            spec.
        chains: Legal chains like ``"ngram>target"``; None takes the default ones. Only where
            ``pool`` is a spec.
        device: Where the models run; None takes the CPU. Only where ``pool`` is a spec.
        render_mode: ``ansi`` renders the text so far.

    Raises:
        ValueError: If an argument is out of range, or does not go with the pool or workload.

    References:
        SpecRouter (arXiv 2505.07680); Cascade (arXiv 2506.20675).

    Version History:
        v0: first version.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (gymnasium's form)

    def __init__(
        self,
        pool: ModelPool | str = "smollm2",
        workload: Workload | str = "all-4",
        prompts: Path | None = None,
        split: Split = "all",
        max_new_tokens: int = 128,
        num_requests: int | None = None,
        reward: str = "net_utility",
        exact: bool = True,
        clock: Clock | str = "wall",
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        stop: Sequence[str] = (),
        baseline: Baseline | None = None,
        k_values: Sequence[int] | None = None,
        chains: Sequence[str] | None = None,
        device: str | None = None,
        render_mode: str | None = None,
        batch_size: int = 1,
        skip_too_long: bool = False,
    ):
        counts = check_counts(max_new_tokens, num_requests, batch_size)
        self.max_new_tokens, self.num_requests, self.batch_size = counts
        self.stop, self.sampling = check_stop_strings(stop), sampling
        check_kinds(pool, workload, sampling, baseline)
        self.exact = check_flag("exact", exact)
        check_flag("skip_too_long", skip_too_long)
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode: must be None or 'ansi'; got {render_mode!r}")
        self.reward_of = get_reward(reward)
        self.workload = make_workload(workload, prompts, split, skip_too_long)
        self.pool = make_pool(pool, k_values, chains, device)
        if isinstance(workload, str):
            self.workload = fit_workload(self.workload, self.pool, skip_too_long=skip_too_long)
        self.clock = make_clock(clock, self.pool.model(self.pool.target).device)
        self.baseline = baseline or Baseline()
        self.layout = Layout.of(self.pool)
        self.table = ActionTable(self.layout)
        self.rows = Rows(
            self.pool, self.workload, self.batch_size, self.max_new_tokens, sampling, self.stop
        )
        vocab_size = self.pool.model(self.pool.target).vocab_size
        self.observer = Observer(self.layout, class_bytes(self.pool.tokenizer, vocab_size))
        self.features = self.observer.features
        self.action_space = gym.spaces.Discrete(len(self.table))
        self.observation_space = gym.spaces.Box(
            self.observer.low, self.observer.high, dtype=np.float32
        )
        self.render_mode = render_mode
        self.stream: Iterator[Request] | None = None
        self.state: DecodeState | None = None
        self.request: Request | DecodeRequest | None = None
        self.divergence_every = 0

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
        if self.state is None:
            raise ValueError("action_masks: the episode has ended or not begun; call reset()")
        return self.table.mask(self.state)

    def resume(self) -> None:
        """Goes on after a pause: the time since the last step is charged to nobody."""
        self.mark = self.clock.now()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle takes along: all but the episode, so a copy must be reset."""
        return {**self.__dict__, "stream": None, "state": None, "request": None}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode; see the class for ``options``."""
        options = check_options(options, Request | DecodeRequest, "a Request or a DecodeRequest")
        if self.batch_size > 1 and "request" in options:
            raise ValueError("options['request']: goes with batch_size=1; give a workload instead")
        super().reset(seed=seed)
        if self.stream is None or seed is not None:
            self.stream = self.workload.stream(self.np_random)
            self.observer.clear()
        self.divergence_every = options.get("divergence_every", 0)
        self.num_speculative: Counter[tuple[str, ...]] = Counter()
        self.num_left = self.num_requests
        if self.batch_size > 1:
            return self.begin_batch()
        return self.begin(options.get("request"))

    def begin_batch(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Prefills a request in every row and measures the baseline if due."""
        assert self.stream is not None
        self.state = None  # stays so where this raises
        started = self.clock.now()
        state = self.rows.start(self.stream, self.clock, self.exact)
        prefill_seconds = self.clock.now() - started
        self.num_left -= self.batch_size
        self.refresh_baseline(state, state.kv_length)
        requests = [self.rows.describe(state, row) for row in range(self.batch_size)]
        info = {
            "request_id": self.request_id,
            "num_prompt": max(each["num_prompt"] for each in requests),
            "max_new_tokens": max(each["max_new_tokens"] for each in requests),
            "prefill_seconds": prefill_seconds,
            "baseline_seconds": self.baseline.seconds(state.kv_length) / self.batch_size,
            "action_mask": self.table.mask(state),
            "next_requests": requests,
        }
        self.observation = self.observer.observe(state)
        self.state = state
        self.mark = self.clock.now()
        return self.observation, info

    def begin(self, request: Request | DecodeRequest | None) -> tuple[np.ndarray, dict[str, Any]]:
        """Prefills a request (the stream's next by default) and measures the baseline if due."""
        assert self.stream is not None
        self.state = None  # stays so where this raises
        self.request = request or next(self.stream)
        self.num_left -= 1
        decode_request = self.rows.decode_request(self.request)
        started = self.clock.now()
        state = start(self.pool, [decode_request], self.clock, exact=self.exact)
        prefill_seconds = self.clock.now() - started
        self.refresh_baseline(state, state.kv_length)
        info = {
            "request_id": self.request_id,
            "num_prompt": len(decode_request.prompt),
            "max_new_tokens": state.budgets[0],
            "prefill_seconds": prefill_seconds,
            "baseline_seconds": self.baseline.seconds(state.kv_length),
            "action_mask": self.table.mask(state),
        }
        self.observation = self.observer.observe(state)
        self.state = state
        self.mark = self.clock.now()
        return self.observation, info

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Runs one iteration under the action's plan."""
        if self.state is None or self.state.is_finished:
            raise ValueError("step: the episode has ended or not begun; call reset()")
        if not self.table.has(action):
            raise ValueError(f"action: must be in 0..{len(self.table) - 1}; got {action}")
        controller_seconds = self.clock.now() - self.mark
        allowed = self.table.allows(self.state, int(action))
        plan = self.table.plans[int(action) if allowed else 0]
        baseline_seconds = self.baseline.seconds(self.state.kv_length)
        baseline_seconds /= self.state.num_active
        known = {"request_id": self.request_id, "asked_action": int(action)}
        try:
            result = decode_step(
                self.pool,
                self.state,
                plan,
                self.clock,
                measure_divergence=self.is_divergence_due(plan),
            )
        except Exception as error:  # whatever it is, the step reports it
            return self.fault(error, 0.0, {**known, "action_mask": self.action_masks()})
        if result.executed.k:
            self.num_speculative[result.executed.chain] += 1
        info = self.describe(result, baseline_seconds)
        info |= known
        if not allowed:
            info["reason"] = "masked"
        info["controller_seconds"] = controller_seconds
        self.observer.update(result, info["utility"], info["unique_experts"])
        reward = self.reward_of(info["tokens"], result.seconds, baseline_seconds)
        self.observation = self.observer.observe(self.state)
        info["action_mask"] = self.action_masks()
        info["total_seconds"] = self.clock.now() - self.mark
        if self.batch_size > 1:
            info |= {"num_active": result.num_active, "ends": self.rows.ends(self.state, result)}
            return self.conclude_batch(reward, info)
        return self.conclude(reward, info)

    def conclude_batch(
        self, reward: float, info: dict[str, Any]
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """``conclude`` for a batch: freed rows go to the requests that follow."""
        assert self.state is not None
        assert self.stream is not None
        self.baseline.count_step()
        try:
            joined = self.rows.fill(self.state, self.stream, self.num_left, self.clock)
            self.num_left -= len(joined)
            if not self.state.is_finished:
                self.refresh_baseline(self.state, self.state.kv_length)
        except Exception as error:  # the probe's or a prefill's
            return self.fault(error, reward, info)
        if joined:
            info["next_requests"], info["action_mask"] = joined, self.action_masks()
            self.observation = self.observer.observe(self.state)
        is_last = self.state.is_finished
        terminated = is_last and info["finish_reason"] in ("eos", "stop")
        self.mark = self.clock.now()
        return self.observation, reward, terminated, is_last and not terminated, info

    def conclude(
        self, reward: float, info: dict[str, Any]
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The step's return, after the work that is charged to nobody."""
        assert self.state is not None
        is_last = self.state.is_finished and self.num_left == 0
        terminated = is_last and info["finish_reason"] in ("eos", "stop")
        self.baseline.count_step()
        try:
            if self.state.is_finished:
                info["output"] = self.state.output()
                if not is_last:
                    _, info["next_request"] = self.begin(None)
                    info["action_mask"] = self.action_masks()
            else:
                self.refresh_baseline(self.state, info["kv_len"])
        except Exception as error:  # the probe's or the next prefill's
            return self.fault(error, reward, info)
        self.mark = self.clock.now()
        return self.observation, reward, terminated, is_last and not terminated, info

    def fault(
        self, error: Exception, reward: float, info: dict[str, Any]
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The return of a step in which the engine failed: the episode is truncated."""
        where = "" if self.request_id == info["request_id"] else f"request {self.request_id!r}: "
        info["error"] = f"{where}{type(error).__name__}: {error}"
        logger.warning("the episode is truncated: %s", info["error"], exc_info=error)
        self.state = None
        return self.observation.copy(), reward, False, True, info

    @property
    def request_id(self) -> str:
        """Id of the request that is decoded; a batch has one of its own, token ids have none."""
        if self.batch_size > 1:
            return f"batch of {self.batch_size}"
        assert self.request is not None
        return self.request.id if isinstance(self.request, Request) else GIVEN

    def is_divergence_due(self, plan: Plan) -> bool:
        """Return whether to measure D_TV: in a chain's first and every n-th step, if asked for."""
        is_asked = plan.k > 0 and self.divergence_every > 0
        return is_asked and self.num_speculative[plan.chain] % self.divergence_every == 0

    def refresh_baseline(self, state: DecodeState, length: int) -> None:
        """Probes the baseline at this KV length when that is due; charged to nobody."""
        if self.baseline.is_due(length):
            samples = probe_baseline(self.pool, state, self.clock, self.baseline.num_samples)
            self.baseline.add(length, samples)

    def describe(self, result: StepResult, baseline_seconds: float) -> dict[str, Any]:
        """The step's ``info``, but for what the environment alone knows."""
        assert self.state is not None
        info = describe_step(result, baseline_seconds, self.table, self.layout.experts_per_token)
        info["kv_len"] = self.state.kv_length
        info["context_len"] = max(map(len, self.state.tokens))
        return info

    def render(self) -> str | None:  # type: ignore[override]
        """The request's text so far (token ids without a tokenizer), in mode ``ansi``."""
        if self.render_mode != "ansi" or self.state is None:
            return None
        outputs = [self.state.output(row) for row in range(self.batch_size)]
        decode = self.pool.tokenizer.decode if self.pool.tokenizer else str
        return "\n\n".join(map(decode, outputs))


def make_workload(
    workload: Workload | str, prompts: Path | None, split: Split, skip_too_long: bool
) -> Workload:
    """The workload of this name, or the workload itself.

    Raises:
        ValueError: If there is none of this name, or what only a name needs comes with a
            ``Workload``.
    """
    if isinstance(workload, str):
        return get_workload(workload, prompts=prompts, split=split)
    if prompts is not None or split != "all" or skip_too_long:
        raise ValueError(
            f"prompts, split and skip_too_long: the workload {workload.name!r} was given with its "
            f"requests; give them to get_workload and fit_workload instead"
        )
    return workload


def make_pool(
    pool: ModelPool | str,
    k_values: Sequence[int] | None,
    chains: Sequence[str] | None,
    device: str | None,
) -> ModelPool:
    """The pool of this spec, or the pool itself.

    Raises:
        ValueError: If the spec is not valid, or what only a spec needs comes with a ``ModelPool``.
    """
    if isinstance(pool, str):
        return load_pool(
            pool,
            k_values=DEFAULT_K_VALUES if k_values is None else check_k_values(k_values),
            chains=None if chains is None else check_chains(chains),
            device="cpu" if device is None else check_text("device", device),
        )
    if not (k_values is chains is device is None):
        raise ValueError(
            f"k_values, chains and device: the pool {pool.name!r} was built with its own; give "
            f"them to ModelPool or load_pool instead"
        )
    return pool


def make_clock(clock: Clock | str, device: torch.device | str) -> Clock:
    """The clock of this name, or the clock itself.

    Raises:
        ValueError: If the name is neither ``wall`` nor ``counting``.
    """
    if isinstance(clock, Clock):
        return clock
    if clock == "wall":
        return WallClock(device)
    if clock == "counting":
        return CountingClock()
    raise ValueError(f"clock: must be 'wall', 'counting' or a Clock; got {clock!r}")
