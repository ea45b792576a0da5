"""A tiny pool that takes text, environments over it on the counting clock, and a way to play."""

import copy
import dataclasses

import numpy as np
import pytest

from specgym.engine.pool import ModelPool
from specgym.engine.testing import tiny_pool, tiny_tokenizer
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest
from specgym.envs import SpecDecodeEnv
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import ROLES, CostTable
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.recording import Recorder
from specgym.envs.replay.traces import TraceSet
from specgym.envs.workloads import Request, Workload

PROMPTS = (
    "the cat sat on the mat, the cat sat",
    "one two one two one",
    "abcdefghijklmnop",
    "x = f(x) + f(y)\ny = f(",
    "aaaa",
    "12:30, 12:45, 13:00, 13:",
)
WORKLOAD = Workload(
    "tiny", (tuple(Request(f"tiny-{n}", text, "tiny") for n, text in enumerate(PROMPTS)),)
)


@dataclasses.dataclass
class Episode:
    """What an episode returned, entry by entry."""

    reset_info: dict
    observations: list
    actions: list
    rewards: list
    infos: list
    terminated: bool
    truncated: bool

    def column(self, key):
        return [info[key] for info in self.infos]


@pytest.fixture(scope="session")
def pool():
    """Lookup, two drafters that often agree, and a target; all of printable ASCII."""
    return tiny_pool(noise=(0.04, 0.01), tokenizer=tiny_tokenizer(), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def variant(pool):
    """Builds a pool of the same weights with other ends, plans or contexts (by member)."""

    def build(context_limits=None, **settings):
        members = [copy.copy(member) for member in pool.members.values()]
        for member in members:
            member.context_limit = (context_limits or {}).get(member.name, member.context_limit)
        return ModelPool(members, tokenizer=pool.tokenizer, name="variant", **settings)

    return build


@pytest.fixture
def make_env(pool):
    """Makes an environment over the tiny pool on the counting clock; arguments can be changed."""

    def make(**changes):
        defaults = {"pool": pool, "workload": WORKLOAD, "clock": "counting", "max_new_tokens": 24}
        return SpecDecodeEnv(**defaults | changes)

    return make


@pytest.fixture
def by_chance():
    """Makes a policy that draws from the allowed actions, or from all, and is seeded."""

    def policy(seed, masked=True):
        rng = np.random.default_rng(seed)

        def choose(env):
            allowed = np.flatnonzero(env.action_masks()) if masked else np.arange(len(env.table))
            return int(rng.choice(allowed))

        return choose

    return policy


@pytest.fixture
def play():
    """Plays an episode: ``choose`` is an action for ever, or a function of the environment."""

    def run(env, choose=0, **reset):
        observation, reset_info = env.reset(**reset)
        episode = Episode(reset_info, [observation], [], [], [], False, False)
        while not (episode.terminated or episode.truncated):
            action = choose(env) if callable(choose) else choose
            observation, reward, episode.terminated, episode.truncated, info = env.step(action)
            episode.observations.append(observation)
            episode.actions.append(action)
            episode.rewards.append(reward)
            episode.infos.append(info)
        return episode

    return run


@pytest.fixture
def request_of():
    """Makes a reset's options that decode this text."""

    def options(text, **more):
        return {"request": Request("given", text, "tiny"), **more}

    return options


@pytest.fixture(scope="session")
def record():
    """Records requests on a pool, with ``counting_costs``; every third is held out."""

    def run(pool, requests=WORKLOAD.requests, max_new_tokens=24, exact=True, **settings):
        recorder = Recorder(pool, exact, CountingClock())
        traces = []
        for index, request in enumerate(requests):
            asked = DecodeRequest(pool.encode(request.prompt), max_new_tokens, **settings)
            split = "held-out" if index % 3 == 2 else "train"
            traces.append(recorder.record(request, asked, split))
        costs = counting_costs(pool, Layout.of(pool))
        return TraceSet(tuple(traces), Layout.of(pool), costs, {"exact": exact})

    return run


def counting_costs(pool, layout, spread=0.1):
    """What a counting clock charges whose rows after the first cost nothing."""
    names = (layout.target, *layout.followers)
    chains = ((layout.target,), *layout.chains)
    own = np.array([pool.members[name].clock_cost for name in names])
    seconds = np.tile(own[:, None, None, None], (1, len(ROLES), layout.window, 1))
    return CostTable(
        members=names,
        chains=chains,
        kv_lengths=np.array([64]),
        baseline=own[:1],
        seconds=seconds,
        experts=np.zeros_like(seconds),
        seconds_per_expert=np.zeros(len(names)),
        prefill=np.stack([own, 0.0 * own], axis=1),
        overhead=np.zeros((len(chains), 2)),
        spread=np.full((len(chains), max(layout.k_values) + 1), spread),
    )


@pytest.fixture(scope="session")
def traces(pool, record):
    """The tiny pool's traces of all prompts."""
    return record(pool)


@pytest.fixture(scope="session")
def library(traces):
    """Their tables."""
    return TraceLibrary(traces)
