"""Training data without a data set: the target writes prompts and answers them.

A shard is a file of some hundred texts, written whole or not at all, and depends on nothing but
the target, the seed and its own number; so a killed run goes on with the next shard.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import safe_open
from safetensors.torch import save_file

from specgym.engine.forward.lean_llama import LeanLlama
from specgym.engine.training.text_writer import BatchGenerator, Job
from specgym.engine.training.topics import TOPICS, Topic

MARK = "@@opening@@"


@dataclasses.dataclass(frozen=True)
class Text:
    """One written text: token ids, where the answer starts, its category."""

    tokens: torch.Tensor
    num_prompt: int
    topic: str


class Writer:
    """The stream of jobs of one shard: prompts first, and each prompt's answer after it.

    Args:
        tokenizer: The target's, with a chat template.
        eos_ids: Ids that end a turn.
        rng: Draws topics and openings.
        num_texts: Prompts to be written.
        max_answer_tokens: Longest answer.
        num_slots: Longest text, prompt included; a prompt that leaves no room for an answer is
            dropped.
        topics: What to write about.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        rng: random.Random,
        num_texts: int,
        max_answer_tokens: int = 176,
        num_slots: int | None = None,
        topics: Sequence[Topic] = TOPICS,
    ):
        self.tokenizer, self.eos_ids, self.rng = tokenizer, frozenset(eos_ids), rng
        self.num_left, self.max_answer_tokens = num_texts, max_answer_tokens
        self.topics = tuple(topics)
        self.num_slots = self.longest_text() if num_slots is None else num_slots
        self.answers: collections.deque[Job] = collections.deque()

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        """The next job; StopIteration only says that there is none at the moment."""
        if self.answers:
            return self.answers.popleft()
        if not self.num_left:
            raise StopIteration
        self.num_left -= 1
        topic = self.rng.choices(self.topics, [topic.weight for topic in self.topics])[0]
        opening = topic.open(self.rng)
        prompt = self.encode(self.before_opening(topic) + opening)
        return Job(prompt, topic.max_prompt_tokens, 0.9, self.turn_end(topic), (topic, opening))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered chat."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: list[dict[str, str]], *, answer: bool) -> str:
        """A chat as text."""
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer
            )
        )

    def before_opening(self, topic: Topic) -> str:
        """The chat up to where the user's turn starts, under the topic's system turn."""
        system = {"role": "system", "content": topic.system}
        try:
            text = self.render([system, {"role": "user", "content": MARK}], answer=False)
        except TemplateError:  # a target without system turns is told in the user's own
            told = f"{topic.system}\n\n{MARK}"
            text = self.render([{"role": "user", "content": told}], answer=False)
        return text[: text.index(MARK)]

    def before_prompt(self) -> str:
        """The chat up to where a user's turn starts, as a user of the target sees it."""
        text = self.render([{"role": "user", "content": MARK}], answer=True)
        return text[: text.index(MARK)]

    def longest_text(self) -> int:
        """Tokens that a text may take, in whole blocks of 32."""
        behind = max(
            max(len(self.encode(opening)) for opening in topic.longest_openings())
            + topic.max_prompt_tokens
            for topic in self.topics
        )
        before = max(len(self.encode(self.before_opening(topic))) for topic in self.topics)
        asked = len(self.encode(self.render([{"role": "user", "content": MARK}], answer=True)))
        return -(-(behind + max(before, asked + self.max_answer_tokens)) // 32) * 32

    def turn_end(self, topic: Topic) -> Callable[[list[int]], bool]:
        """Whether a user's turn has ended: at an end token or behind the topic's stop text."""
        stops = topic.stop.split("|") if topic.stop else []

        def is_done(output: list[int]) -> bool:
            if output[-1] in self.eos_ids:
                return True
            tail = self.tokenizer.decode(output[-6:])
            return any(stop in tail for stop in stops)

        return is_done

    def answer(self, job: Job) -> None:
        """Queues the answer to a prompt that was written."""
        assert isinstance(job.payload, tuple)
        topic, opening = job.payload
        written = [token for token in job.output if token not in self.eos_ids]
        text = (opening + self.tokenizer.decode(written)).rstrip(" ")
        for stop in topic.stop.split("|") if topic.stop else ():
            first = text.find(stop, len(opening))
            if first >= 0:
                text = text[: first + len(stop)] + ("\n" if topic.name == "code" else "")
        if topic.name == "qa" and self.rng.random() < 0.5:
            text = text.rstrip("?")
        chat = self.render([{"role": "user", "content": text}], answer=True)
        prompt, budget = self.encode(chat), self.max_answer_tokens
        if len(prompt) < self.num_slots:
            self.answers.append(Job(prompt, budget, 0.0, self.answer_end, topic.name))

    def answer_end(self, output: list[int]) -> bool:
        """Whether an answer has ended: at an end token, or going round in a circle."""
        return output[-1] in self.eos_ids or is_circling(output)


def is_circling(output: Sequence[int], least: int = 24, longest: int = 40) -> bool:
    """Whether the last tokens are three times the same, ``least`` tokens or more in all.

    Greedy texts of small models often end in a loop; its third round has nothing to teach.
    """
    for period in range(1, longest + 1):
        rounds = max(3, -(-least // period))
        tail = output[-rounds * period :]
        if len(tail) == rounds * period and tail[period:] == tail[:-period]:
            return True
    return False


def make_generator(
    model: LeanLlama, writer: Writer, num_rows: int, taps: tuple[int, ...], dtype: torch.dtype
) -> BatchGenerator:
    """A generator for a writer's jobs that has computed the beginnings they share."""
    generator = BatchGenerator(model, num_rows, writer.num_slots, taps, dtype)
    with torch.inference_mode():
        for topic in writer.topics:
            generator.share(writer.encode(writer.before_opening(topic)))
        generator.share(writer.encode(writer.before_prompt()))
    return generator


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(
    path: Path,
    generator: BatchGenerator,
    writer: Writer,
    seed: int,
    report: Callable[[int], None] = lambda num_tokens: None,
) -> int:
    """Writes one shard; returns its tokens.

    Args:
        path: The file, put in place only when it is complete.
        generator: Writes the texts.
        writer: The shard's jobs.
        seed: Seeds the sampling of prompts.
        report: Called with the tokens of each finished text.

    Raises:
        ValueError: If no text fits the target's context.
    """
    finished: list[Job] = []
    for job in generator.run(writer, torch.Generator().manual_seed(seed)):
        if isinstance(job.payload, tuple):
            writer.answer(job)
        else:
            finished.append(job)
            report(len(job.prompt) + len(job.output))
    if not finished:
        raise ValueError(
            f"texts: not one prompt leaves room for an answer in {generator.num_slots} tokens; "
            f"take a target with a longer context"
        )
    topics = sorted({str(job.payload) for job in finished})
    tensors = {
        "tokens": torch.tensor([t for job in finished for t in [*job.prompt, *job.output]]),
        "lengths": torch.tensor([len(job.prompt) + len(job.output) for job in finished]),
        "num_prompt": torch.tensor([len(job.prompt) for job in finished]),
        "topics": torch.tensor([topics.index(str(job.payload)) for job in finished]),
        # The last token of a text is never fed; its row of features is zero.
        "features": torch.cat([block for job in finished for block in with_last(job)]),
    }
    tensors["tokens"] = tensors["tokens"].to(torch.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # One entry: safetensors writes several in no fixed order, and equal texts are equal files.
    save_file(tensors, partial, metadata={"topics": ",".join(topics)})
    os.replace(partial, path)
    return len(tensors["tokens"])


def num_shard_tokens(path: Path) -> int:
    """Tokens of a shard, read from its header."""
    with safe_open(path, framework="pt") as file:
        return int(file.get_slice("tokens").get_shape()[0])


def with_last(job: Job) -> list[torch.Tensor]:
    """A job's features, one row a token."""
    return [*job.features, torch.zeros_like(job.features[-1][:1])]


class Corpus:
    """The shards of a folder as texts with features, read lazily."""

    def __init__(self, paths: Sequence[Path]):
        self.entries: list[tuple[Any, int, Text]] = []
        for path in paths:
            file = safe_open(path, framework="pt")
            names = file.metadata()["topics"].split(",")
            lengths = file.get_tensor("lengths").tolist()
            prompts = file.get_tensor("num_prompt").tolist()
            topics = file.get_tensor("topics").tolist()
            start = 0
            parts = file.get_tensor("tokens").long().split(lengths)
            for tokens, num_prompt, topic in zip(parts, prompts, topics, strict=True):
                self.entries.append((file, start, Text(tokens, num_prompt, names[topic])))
                start += len(tokens)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.tokens) for _, _, text in self.entries)

    def text(self, index: int) -> Text:
        """One text."""
        return self.entries[index][2]

    def features(self, index: int) -> torch.Tensor:
        """One text's features, [T, F]."""
        file, start, text = self.entries[index]
        return file.get_slice("features")[start : start + len(text.tokens)]
