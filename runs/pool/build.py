"""``specgym pool build``: trains a target's drafters on what the target itself writes."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specgym.engine.forward.architectures import refuse_unlike_llama
from specgym.engine.forward.eagle import save_eagle
from specgym.engine.forward.lean_families import is_lean
from specgym.engine.forward.lean_llama import LeanLlama
from specgym.engine.pools.loading import eos_ids_of
from specgym.engine.pools.sources import LoadedModel, load_source
from specgym.engine.pools.students import save_student
from specgym.engine.training.corpus import (
    Corpus,
    Writer,
    make_generator,
    num_shard_tokens,
    shard_path,
    write_shard,
)
from specgym.engine.training.eagle import EagleTrainee, init_eagle
from specgym.engine.training.fitting import Trainee, fit, frequent_tokens, num_trained_steps
from specgym.engine.training.students import StudentTrainee, make_mid, make_small
from specgym.runs.disk import writing
from specgym.runs.pool.build_config import (
    FINISHED_FILE,
    BuildConfig,
    begin,
    check_config,
    drafter_settings,
    fill_in,
    fit_config,
    text_settings,
)
from specgym.runs.pool.build_watcher import TextWatcher, Watcher
from specgym.runs.pool.model_card import Facts, model_card
from specgym.runs.run_folder import LOCK_FILE, kept_in, one_writer
from specgym.runs.tensorboard import Board

CHECKPOINT_FILE = "checkpoint.pt"


@dataclasses.dataclass(frozen=True)
class Texts:
    """What drafters are trained and measured on."""

    train: Corpus
    held: Corpus
    draft_ids: torch.Tensor


def build(config: BuildConfig, console: Console) -> None:
    """Writes the texts and trains the drafters, or goes on where a stopped run was.

    Raises:
        ValueError: If a setting is out of range, the target cannot be drafted for, or the folder
            was begun with other settings.
    """
    check_config(config)
    target = load_target(config.target)
    config = fill_in(config, target)
    lock, way_out = config.out / LOCK_FILE, kept_in(config.out)
    with one_writer(config.out, lock, way_out, option="--out"):
        build_in(config, target, console)


def build_in(config: BuildConfig, target: LoadedModel, console: Console) -> None:
    """Writes and trains what is missing in the output's folder.

    Raises:
        ValueError: If it was begun with other settings.
    """
    begin(config.out / "texts", text_settings(config, target))
    for name in config.drafters:  # refused before an hour of writing
        begin(config.out / name, drafter_settings(config, name, target.fingerprint))
    vocab_size = target.model.config.vocab_size
    try:
        train, held = write_texts(config, target, console)
        del target  # every drafter loads its own: this one's linears may be packed by now
        texts = read_texts(config, train, held, vocab_size)
        for name in config.drafters:
            build_drafter(name, config, texts, console)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on with what is in {config.out}")
        raise
    chain = ",".join(f"{name}={config.out / name}" for name in config.drafters)
    console.print(f'a pool of them: --pool "{chain},target={config.target}"', markup=False)


def load_target(source: str) -> LoadedModel:
    """The target in bf16, as its fingerprint is defined.

    Raises:
        ValueError: If texts cannot be written with it, or no drafter can be made from it.
    """
    target = load_source(source, dtype=torch.bfloat16, device="cpu")
    refuse_unlike_llama("a drafter", target.model)
    if not is_lean(target.model):
        raise ValueError(
            "target: must have SiLU feed-forward blocks and plain linears; use one that is not "
            "quantised"
        )
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise ValueError(
            f"target: {source} must have a tokenizer with a chat template, for it is asked to "
            f"write prompts and to answer them; use an instruct model"
        )
    return target


def write_texts(
    config: BuildConfig, target: LoadedModel, console: Console
) -> tuple[list[Path], list[Path]]:
    """The files of texts to train on and to measure on; those that are missing are written."""
    folder, eos_ids = config.out / "texts", eos_ids_of(target.model, target.tokenizer)
    lean: LeanLlama | None = None
    train: list[Path] = []
    held: list[Path] = []
    watcher = TextWatcher(config.tokens, config.held_out, console)
    with watcher.bar:
        while len(held) < config.held_out:
            index = len(train) + len(held)
            path = shard_path(folder, index)
            if not path.exists():
                lean = lean or LeanLlama(target.model)
                seed = config.seed * 1_000_000 + index
                rng, limit = random.Random(seed), target.model.config.max_position_embeddings
                writer = Writer(target.tokenizer, eos_ids, rng, config.texts_per_shard)
                writer.num_slots = min(writer.num_slots, limit)
                dtype = target.model.dtype
                generator = make_generator(lean, writer, config.rows, config.taps, dtype)
                with writing(path):
                    write_shard(path, generator, writer, seed, watcher.on_text)
            is_held = watcher.num_tokens >= config.tokens
            watcher.on_shard(num_shard_tokens(path), is_held)
            (held if is_held else train).append(path)
    return train, held


def read_texts(config: BuildConfig, train: list[Path], held: list[Path], vocab_size: int) -> Texts:
    """The texts, and the tokens that are most frequent in them."""
    corpus = Corpus(train)
    draft_ids = frequent_tokens(corpus, config.vocabulary, vocab_size)
    return Texts(corpus, Corpus(held), draft_ids)


def build_drafter(name: str, config: BuildConfig, texts: Texts, console: Console) -> None:
    """Trains and writes one drafter, unless it is there."""
    folder = config.out / name
    if (folder / FINISHED_FILE).exists():
        console.print(f"{name}: finished, in {folder}", soft_wrap=True)
        return
    target = load_target(config.target)
    settings = fit_config(config, name)
    trainee = make_trainee(name, config, target.model, texts.draft_ids)
    checkpoint = folder / CHECKPOINT_FILE
    done = num_trained_steps(checkpoint)
    board = Board(config.out / "events" / name, first_step=done + 1)
    watcher = Watcher(name, folder, trainee, texts.held, settings, done, board, console)
    with watcher.bar, writing(checkpoint):
        fit(trainee, texts.train, settings, checkpoint, watcher.report, watcher.on_checkpoint)
    board.close()
    with writing(folder):
        export(name, config, target, texts, trainee, watcher)
    console.print(f"{name}: {folder}  ({watcher.note})", soft_wrap=True)


def make_trainee(name: str, config: BuildConfig, model: Any, draft_ids: torch.Tensor) -> Trainee:
    """A drafter as it is before the first step."""
    embedding = model.get_input_embeddings().weight.detach()
    vocab_head = model.get_output_embeddings().weight.detach()
    if name == "eagle":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            head = init_eagle(model, config.taps, len(draft_ids))
        return EagleTrainee(head, embedding, vocab_head, draft_ids, config.depths)
    if name == "small":
        student = make_small(model, config.small_layers)
    else:
        student = make_mid(model, config.mid_layers, config.rank, config.seed)
    return StudentTrainee(student, vocab_head, draft_ids)


def export(
    name: str,
    config: BuildConfig,
    target: LoadedModel,
    texts: Texts,
    trainee: Trainee,
    watcher: Watcher,
) -> None:
    """Writes a trained drafter and its card; the folder counts as finished with the last file."""
    folder, staging = config.out / name, config.out / name / ".export"
    shutil.rmtree(staging, ignore_errors=True)
    facts = gather_facts(name, config, target, texts, watcher)
    training = facts.training()
    if name == "eagle":
        extra = {"target_origin": target.origin, "training": training}
        save_eagle(staging, trainee.module, texts.draft_ids, target.fingerprint, extra)  # type: ignore[arg-type]
    else:
        save_student(
            staging,
            trainee.module,
            texts.draft_ids,
            config.small_layers if name == "small" else config.mid_layers,
            target_fingerprint=target.fingerprint,
            target_origin=target.origin,
            rank=config.rank if name == "mid" else None,
            training=training,
        )
    num_bytes = (staging / "model.safetensors").stat().st_size
    (staging / "README.md").write_text(model_card(facts, num_bytes))
    for file in sorted(staging.iterdir(), key=lambda path: path.name == FINISHED_FILE):
        file.chmod(0o644)  # safetensors makes files that others cannot read
        os.replace(file, folder / file.name)
    staging.rmdir()


def gather_facts(
    name: str, config: BuildConfig, target: LoadedModel, texts: Texts, watcher: Watcher
) -> Facts:
    """What the card and config.json say."""
    return Facts(
        name=name,
        target_origin=target.origin,
        target_fingerprint=target.fingerprint,
        settings=drafter_settings(config, name, target.fingerprint),
        num_texts=len(texts.train),
        num_tokens=texts.train.num_tokens,
        num_held=len(texts.held),
        curve=watcher.curve,
        coverage=coverage(texts.held, texts.draft_ids),
        date=time.strftime("%Y-%m-%d"),
    )


def coverage(held: Corpus, draft_ids: torch.Tensor) -> float:
    """Share of the held-out answers' tokens that the draft vocabulary can say."""
    hits = num_tokens = 0
    for index in range(len(held)):
        text = held.text(index)
        answer = text.tokens[text.num_prompt :]
        hits += int(torch.isin(answer, draft_ids).sum())
        num_tokens += len(answer)
    return hits / max(num_tokens, 1)
