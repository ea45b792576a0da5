"""How long a learned controller takes to decide, at batch 1, from the text to the action."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specgym.agents.cost_networks import add_networks
from specgym.agents.imitation import CLIP
from specgym.agents.policy import Policy
from specgym.agents.policy_controller import LearnedController
from specgym.baselines.plans import Plan
from specgym.envs.features import FEATURES_VERSION
from specgym.envs.observer import Observer, position_values
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.traces import Trace
from specgym.runs.train.configs import ImitationTraining


def time_decisions(library: TraceLibrary, policy: Path | None, repeats: int) -> dict[str, float]:
    """Milliseconds of a decision on one core, the median of repeats over all tokens.

    ``decision`` is all that lies between a text that has grown by a token and the action: text
    features, observation and scores; ``act`` is the controller's part of it.

    Args:
        library: The requests.
        policy: File of a policy; None takes random weights, as many as imitation has.
        repeats: Repeats.
    """
    observer, plans = Observer(library.layout), library.table.arrays()
    features = [feature.name for feature in observer.features]
    controller = LearnedController(plans, features, policy or random_policy(plans, features))
    runs = []
    for _ in range(repeats):
        total = np.zeros(2)
        for trace in library.traces:
            total += request_seconds(observer, controller, trace, library.masks(trace))
        runs.append(1e3 * total / sum(map(len, library.traces)))
    decision, act = (statistics.median(run[part] for run in runs) for part in (0, 1))
    return {"decision": decision, "act": act}


def request_seconds(
    observer: Observer, controller: LearnedController, trace: Trace, masks: np.ndarray
) -> tuple[float, float]:
    """Seconds of all decisions of a request, one per token, and of the controller's part."""
    tokens, num_prompt = trace.prompt.tolist(), len(trace.prompt)
    observer.reader.clear()
    observer.reader.read(0, tokens, num_prompt)  # the prompt is read once, before the first token
    lags = [0] * len(observer.layout.followers)
    decided = acted = 0.0
    for number, token in enumerate(trace.output.tolist()):
        started = time.process_time()
        text = observer.reader.read(0, tokens, num_prompt)
        budget = trace.max_new_tokens
        position = position_values(text, len(tokens), number, budget, observer.context_limit)
        observation = observer.observation(position, lags)
        observed = time.process_time()
        controller.act(observation, masks[number])
        ended = time.process_time()
        decided, acted = decided + ended - started, acted + ended - observed
        tokens.append(token)
    return decided, acted


def random_policy(plans: Sequence[Plan], features: Sequence[str]) -> Policy:
    """A policy as large as imitation's, with random weights."""
    recipe, rng = ImitationTraining().recipe, np.random.default_rng(0)
    sizes = (len(features), *recipe.fit.hidden_sizes, len(plans))
    networks = [
        tuple((rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in itertools.pairwise(sizes))
        for _ in range(recipe.num_networks)
    ]
    return Policy(
        plans=tuple(plans),
        features=tuple(features),
        features_version=FEATURES_VERSION,
        mean=np.zeros(len(features)),
        scale=np.ones(len(features)),
        clip=CLIP,
        layers=add_networks(networks),
    )
