"""Unique experts of a mixture in ``info``, and what TensorBoard makes of them."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import tiny_tokenizer


@pytest.fixture(scope="module")
def mixture():
    """Prompt lookup before a mixture of 8 experts, 2 per token, in 3 layers."""
    tokenizer = tiny_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MixtralForCausalLM(config).eval().requires_grad_(False)
    members = [NGramMember(), ModelMember("target", model)]
    return ModelPool(members, tokenizer=tokenizer, name="mixture")


@pytest.mark.parametrize("exact", [True, False])
def test_the_ratio_is_one_for_a_token_and_grows_with_what_is_verified(
    make_env, play, mixture, exact
):
    env = make_env(pool=mixture, exact=exact)
    plain = play(env, seed=0)
    assert set(plain.column("unique_experts")) == {1.0}
    drafted = play(env, env.action_names.index("ngram@6"), seed=0).infos
    assert max(info["unique_experts"] for info in drafted) > 1.0
    for info in drafted:
        counts = info["forwards"][-1]["unique_experts"]
        assert len(counts) == 3
        assert info["unique_experts"] == pytest.approx(sum(counts) / 3 / 2)
        num_tokens = info["forwards"][-1]["num_tokens"]
        assert 1.0 <= info["unique_experts"] <= min(num_tokens, 4)
        assert num_tokens > 1 or info["unique_experts"] == 1.0


def test_a_dense_target_has_ratio_one_whatever_is_verified(make_env, play, by_chance):
    episode = play(make_env(), by_chance(0))
    assert set(episode.column("unique_experts")) == {1.0}
    assert all(f["unique_experts"] == [] for info in episode.infos for f in info["forwards"])


def test_the_observation_follows_the_ratio(make_env, play, mixture):
    env = make_env(pool=mixture)
    index = [feature.name for feature in env.features].index("unique_experts")
    episode = play(env, env.action_names.index("ngram@6"), seed=0)
    seen = [observation[index] for observation in episode.observations]
    assert seen[0] == 1.0
    assert max(seen) > 1.0
    assert all(env.observation_space.contains(each) for each in episode.observations)
