"""Texts that a target writes: prompts, their ends, the answers, and the files they lie in."""

import random

import pytest
import torch

from specgym.engine.testing import tiny_llama
from specgym.engine.training.corpus import Corpus, Writer, is_circling, num_shard_tokens, shard_path
from specgym.engine.training.text_writer import Job
from specgym.engine.training.topics import CODE, QA, TOPICS, Topic

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.fixture
def writer(chat_tokenizer):
    return Writer(chat_tokenizer, [1], random.Random(0), 5)


def answer_to(writer, topic, opening, written):
    """The chat that the target is asked to answer."""
    output = [*writer.encode(written), 1]
    writer.answer(Job([], 0, 0.9, lambda _: True, (topic, opening), output))
    return writer.tokenizer.decode(writer.answers[-1].prompt)


def test_a_shard_comes_back_as_it_was_written(texts, chat_tokenizer):
    target = tiny_llama(0, num_layers=3, vocab_size=98)
    assert {texts.text(i).topic for i in range(len(texts))} == {"left", "right"}
    assert texts.num_tokens == sum(len(texts.text(i).tokens) for i in range(len(texts)))
    for index in range(len(texts)):
        text, features = texts.text(index), texts.features(index)
        prompt = chat_tokenizer.decode(text.tokens[: text.num_prompt])
        assert prompt.startswith("<user>")
        assert prompt.endswith("<assistant>")
        assert 1 <= len(text.tokens) - text.num_prompt <= 20
        states = target(text.tokens[None, :-1], output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap] for tap in (1, 2, 3)], dim=-1)[0]
        torch.testing.assert_close(features[:-1], expected, atol=2e-5, rtol=1e-4)
        assert not features[-1].any()


def test_answers_are_the_targets_greedy_ones(texts):
    target = tiny_llama(0, num_layers=3, vocab_size=98)
    for index in range(len(texts)):
        text = texts.text(index)
        best = target(text.tokens[None]).logits[0].argmax(dim=-1)
        assert torch.equal(best[text.num_prompt - 1 : -1], text.tokens[text.num_prompt :])


def test_a_shard_depends_on_its_number_alone(tmp_path, chat_tokenizer, write_tiny):
    for name, indices in (("both", (0, 1)), ("second", (1,))):
        for index in indices:
            write_tiny(tmp_path / name, chat_tokenizer, index)
    files = [shard_path(tmp_path / name, 1).read_bytes() for name in ("both", "second")]
    assert files[0] == files[1]
    first = shard_path(tmp_path / "both", 0)
    assert first.read_bytes() != files[0]
    assert num_shard_tokens(first) == Corpus([first]).num_tokens
    assert not list(tmp_path.rglob("*.partial"))


def test_prompts_start_with_their_opening_under_the_topics_system_turn(writer):
    job = next(writer)
    topic, opening = job.payload
    text = writer.tokenizer.decode(job.prompt)
    assert text == f"<system>{topic.system}\n<user>{opening}"
    assert (job.temperature, job.max_new_tokens) == (0.9, topic.max_prompt_tokens)
    assert len([job, *writer]) == 5


def test_a_target_without_system_turns_is_told_in_the_users(chat_tokenizer, writer):
    plain = writer.before_opening(QA)
    template = chat_tokenizer.chat_template
    try:
        chat_tokenizer.chat_template = NO_SYSTEM + template
        assert writer.before_opening(QA) == f"<user>{QA.system}\n\n"
    finally:
        chat_tokenizer.chat_template = template
    assert writer.before_opening(QA) == plain == f"<system>{QA.system}\n<user>"


def test_a_users_turn_ends_at_an_end_token_or_its_stop_text(writer):
    is_done = writer.turn_end(QA)
    assert not is_done(writer.encode("is it"))
    assert is_done(writer.encode("is it?"))
    assert is_done([*writer.encode("is"), 1])
    assert writer.turn_end(CODE)(writer.encode(" x '''"))
    open_end = Topic("chat", 1.0, "", ("",), {})
    assert not writer.turn_end(open_end)(writer.encode("is it?"))


def test_an_answer_is_asked_for_what_was_written_up_to_its_stop(writer):
    text = answer_to(writer, CODE, 'def f():\n    """ ', 'Adds.\n    """\n    return')
    assert text == '<user>def f():\n    """ Adds.\n    """\n\n<assistant>'
    asked = {answer_to(writer, QA, "who is", " it? yes") for _ in range(20)}
    assert asked == {"<user>who is it?\n<assistant>", "<user>who is it\n<assistant>"}


def test_a_prompt_that_leaves_no_room_is_dropped(chat_tokenizer):
    writer = Writer(chat_tokenizer, [1], random.Random(0), 5, num_slots=30)
    output = writer.encode("a" * 40)
    writer.answer(Job([], 0, 0.9, lambda _: True, (QA, "who"), output))
    assert not writer.answers


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.openings[0][:12])
def test_openings_are_filled_and_the_longest_is_known(topic, writer):
    rng = random.Random(0)
    longest = max(map(len, topic.longest_openings()))
    for _ in range(200):
        opening = topic.open(rng)
        assert len(opening) <= longest
        assert not any(f"{{{part}}}" in opening for part in topic.parts)
    assert longest + topic.max_prompt_tokens + len(topic.system) < writer.longest_text()


def test_circles_are_told_from_texts():
    assert is_circling([7] * 24)
    assert not is_circling([7] * 23)
    assert is_circling([3, 4, *([1, 2, 3, 4, 5] * 5)])
    assert not is_circling([1, 2, 3, 4, 5] * 4)
    assert is_circling(list(range(40)) * 3)
    assert not is_circling(list(range(41)) * 3)
    assert not is_circling(list(range(200)))
    assert not is_circling([])
    assert not is_circling([*([7] * 30), 8])
