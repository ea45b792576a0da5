"""A tiny pool that takes text, environments over it on the counting clock, and a way to play."""

import copy
import dataclasses

import numpy as np
import pytest

from specgym.engine.pool import ModelPool
from specgym.engine.testing import tiny_pool, tiny_tokenizer
from specgym.envs import SpecDecodeEnv
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
