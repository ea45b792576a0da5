"""What tests of drafter training share: a target that chats, and texts of its own."""

import random

import pytest
import torch

from specgym.engine.corpus import Corpus, Writer, make_generator, shard_path, write_shard
from specgym.engine.kernels import LeanLlama
from specgym.engine.testing import tiny_llama, tiny_tokenizer
from specgym.engine.topics import Topic

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
