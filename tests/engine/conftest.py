"""What tests of drafter training share: a target that chats, and texts of its own."""

import functools
import random

import pytest
import torch

from specgym.engine.forward.eagle import EagleCheckpoint, EagleHead, EagleShape
from specgym.engine.forward.lean_llama import LeanLlama
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.lookups import make_lookups
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import perturbed, tiny_llama, tiny_mixtral, tiny_tokenizer
from specgym.engine.training.corpus import Corpus, Writer, make_generator, shard_path, write_shard
from specgym.engine.training.topics import Topic

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TAPS = (1, 2)
TOPICS = (
    Topic("left", 0.6, "asks", ("a {word} ", "the {word}"), {"word": ("cat", "dog")}, "e|t", 12),
    Topic("right", 0.4, "tells", ("now ",), {}, "", 8),
)


@pytest.fixture(scope="session")
def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_tiny(folder, tokenizer, index=0, num_rows=4, num_texts=9):
    """One shard of a tiny target's texts, and the writer of its jobs."""
    writer = Writer(
        tokenizer, [1], random.Random(index), num_texts, max_answer_tokens=20, topics=TOPICS
    )
    lean = LeanLlama(tiny_llama(0, num_layers=3, vocab_size=98))
    generator = make_generator(lean, writer, num_rows, TAPS, torch.float32)
    return write_shard(shard_path(folder, index), generator, writer, index), writer


@pytest.fixture(scope="session")
def texts(tmp_path_factory, chat_tokenizer):
    """Two shards of texts with float32 features."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(2):
        write_tiny(folder, chat_tokenizer, index)
    return Corpus([shard_path(folder, index) for index in range(2)])


@pytest.fixture(scope="session", name="write_tiny")
def write_tiny_fixture():
    """The function itself: a test folder has no modules to import from."""
    return write_tiny


def tiny_eagle(target, dtype, compiled=True):
    """A random head on a tiny target, before a member takes the target over."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        head = EagleHead(EagleShape(tiny_llama().config, (), True, 61, 32))
    for weight in head.parameters():
        weight.data.mul_(2.0 if weight.ndim > 1 else 1.0).requires_grad_(False)
    checkpoint = EagleCheckpoint(head.to(dtype), None, None, None)
    return EagleMember("eagle", checkpoint, target, compiled=compiled)


@functools.cache
def make_full_pool(kind="llama", dtype=torch.float32, lean=True, compiled=True):
    """Every kind of member: lookup, an EAGLE head, two models, a target (dense or a mixture)."""
    target = (tiny_llama if kind == "llama" else tiny_mixtral)(3)
    drafters = [perturbed(target, noise, seed) for seed, noise in ((4, 0.15), (5, 0.05))]
    target = target.to(dtype)
    members = [*make_lookups(), tiny_eagle(target, dtype, compiled)]
    for name, model in zip(("draft", "mid"), drafters, strict=True):
        members.append(ModelMember(name, model.to(dtype), lean=lean, compiled=compiled))
    members.append(ModelMember("target", target, lean=lean, compiled=compiled))
    return ModelPool(members, k_values=range(1, 7))


@pytest.fixture(scope="session")
def full_pool():
    """Makes a pool with every kind of member; the same pool for the same arguments."""
    return make_full_pool
