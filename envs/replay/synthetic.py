"""Traces that nobody recorded: seeded chance in the shape of a pool, for tests and benches.

They say nothing about any model. Texts repeat themselves, drafters are good for a while and then
bad for a while, and costs are round numbers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specgym.engine.members.traits import HEAD, LOOKUP, MODEL
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import ROLES, CostTable
from specgym.envs.replay.traces import Trace, TraceSet

VOCABULARY = 500
COSTS = {"target": 1.0, "eagle": 0.08, "small": 0.1, "mid": 0.3}  # of a forward of one token
SKILLS = {"ngram": 0.35, "eagle": 0.6, "small": 0.55, "mid": 0.75}  # tokens that agree
SEEN = 0.02  # share of a forward that each more token costs
UNIQUE = 2.0  # more experts per token verified, over those of one


def synthetic_layout(experts_per_token: int = 0) -> Layout:
    """Lookup, a head and two models before a target; seven chains of up to three members."""
    heads = ("ngram", "eagle", "small")
    return Layout(
        target="target",
        chains=(
            *((name, "target") for name in (*heads, "mid")),
            *((name, "mid", "target") for name in heads),
        ),
        k_values=(1, 2, 3, 4, 6),
        window=8,
        context_limits=dict.fromkeys(("ngram", "eagle", "small", "mid", "target"), 8192),
        traits={"ngram": dataclasses.replace(LOOKUP, max_ngram=3), "eagle": HEAD}
        | dict.fromkeys(("small", "mid", "target"), MODEL),
        experts_per_token=experts_per_token,
    )


def synthetic_traces(
    num_requests: int = 24, num_tokens: int = 64, seed: int = 0, experts_per_token: int = 0
) -> TraceSet:
    """Traces by chance, the same for the same arguments; every third request is held out.

    Raises:
        ValueError: If there would be no request or no token.
    """
    if num_requests < 1 or num_tokens < 1:
        raise ValueError(
            f"num_requests and num_tokens: must be >= 1; got {num_requests} and {num_tokens}"
        )
    rng = np.random.default_rng(seed)
    layout = synthetic_layout(experts_per_token)
    traces = tuple(synthetic_trace(layout, index, num_tokens, rng) for index in range(num_requests))
    return TraceSet(traces, layout, synthetic_costs(layout), {"pool": "synthetic", "exact": True})


def synthetic_trace(layout: Layout, index: int, num_tokens: int, rng: np.random.Generator) -> Trace:
    """One request; every fourth ends by itself before its budget."""
    num_prompt, most = int(rng.integers(8, 80)), max(layout.k_values)
    ends_early = index % 4 == 3
    count = max(num_tokens - int(rng.integers(1, 9)), 1) if ends_early else num_tokens
    text = synthetic_text(num_prompt + count, rng)
    matches = agreement(layout, count, rng)
    num_proposed = np.full((count, len(layout.drafters)), most, dtype=np.uint8)
    lookup = layout.drafters.index("ngram")
    num_proposed[:, lookup] *= rng.random(count) < 0.7
    levels = layout.max_verifiers
    shape = (count, len(layout.chains), levels)
    return Trace(
        request_id=f"synthetic-{index}",
        category=("calm", "lively")[index % 2],
        split="held-out" if index % 3 == 2 else "train",
        finish_reason="eos" if ends_early else "length",
        max_new_tokens=num_tokens,
        prompt=text[:num_prompt],
        output=text[num_prompt:],
        num_proposed=num_proposed,
        draft_matches=np.stack([matches[name] for name in layout.drafters], axis=1),
        matches=chain_matches(layout, matches),
        entropy=rng.gamma(2.0, 0.5, (count, len(layout.drafters))).astype(np.float32),
        divergence=rng.random((*shape, layout.max_proposed)).astype(np.float16),
        experts=synthetic_experts(layout, count, rng),
        classes=rng.integers(0, 16, len(text)).astype(np.uint8),
    )


def synthetic_text(length: int, rng: np.random.Generator) -> np.ndarray:
    """Token ids, int32 [length], in which earlier stretches come again."""
    text = rng.integers(0, VOCABULARY, length).astype(np.int32)
    place = 16
    while place < length:
        stretch = int(rng.integers(4, 16))
        source = int(rng.integers(0, place))
        copied = text[source : source + min(stretch, length - place)]
        text[place : place + len(copied)] = copied
        place += stretch + int(rng.integers(4, 16))
    return text


def agreement(layout: Layout, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Leading tokens of each member that the target says too, uint8 [count]; it has bad times."""
    most = layout.max_proposed
    good_times = np.cumsum(rng.random(count) < 0.1) % 2
    matches = {}
    for name, skill in SKILLS.items():
        rates = np.clip(skill + np.where(good_times, 0.2, -0.2), 0.05, 0.95)
        agrees = rng.random((count, most)) < rates[:, None]
        matches[name] = agrees.cumprod(axis=1).sum(axis=1).astype(np.uint8)
        matches[name] = np.minimum(matches[name], max(layout.k_values))
    return matches


def chain_matches(layout: Layout, matches: dict[str, np.ndarray]) -> np.ndarray:
    """Matches by chain and level, [N, C, V]: a middle verifier passes on what it agrees with."""
    count = len(matches[layout.drafters[0]])
    levels = np.zeros((count, len(layout.chains), layout.max_verifiers), np.uint8)
    for index, chain in enumerate(layout.chains):
        for level, name in enumerate(chain[:-1]):
            levels[:, index, level] = matches[name]
    return levels


def synthetic_experts(layout: Layout, count: int, rng: np.random.Generator) -> np.ndarray:
    """Unique experts by tokens verified, float16 [N, C, W + 1]; zeros for a dense target."""
    shape = (count, len(layout.chains), layout.max_proposed + 1)
    if not layout.experts_per_token:
        return np.zeros(shape, np.float16)
    more = rng.random(shape) * UNIQUE
    more[..., 0] = 0.0
    return (layout.experts_per_token + more.cumsum(axis=-1)).astype(np.float16)


def synthetic_costs(layout: Layout) -> CostTable:
    """Round numbers: milliseconds that grow with the tokens fed."""
    members = (layout.target, *layout.followers)
    own = 1e-2 * np.array([COSTS[name] for name in members])
    tokens = 1.0 + SEEN * np.arange(layout.window)
    shape = (len(members), len(ROLES), layout.window, 1)
    seconds = np.broadcast_to((own[:, None] * tokens)[:, None, :, None], shape).copy()
    experts = np.zeros(shape)
    if layout.experts_per_token:
        experts[0] = layout.experts_per_token
    chains = ((layout.target,), *layout.chains)
    return CostTable(
        members=members,
        chains=chains,
        kv_lengths=np.array([64]),
        baseline=own[:1] + 2e-4,
        seconds=seconds,
        experts=experts,
        seconds_per_expert=np.where(np.arange(len(members)) == 0, 3e-4, 0.0),
        prefill=np.stack([own, 0.1 * own], axis=1),
        overhead=np.full((len(chains), 2), (2e-4, 2e-5)),
        spread=np.full((len(chains), max(layout.k_values) + 1), 0.1),
    )
