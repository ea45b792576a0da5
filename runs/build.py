"""``specgym pool build``: trains a target's drafters on what the target itself writes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from specgym.engine.architectures import refuse_unlike_llama
from specgym.engine.corpus import (
    Corpus,
    Writer,
    make_generator,
    num_shard_tokens,
    shard_path,
    write_shard,
)
from specgym.engine.distill import FitConfig, Trainee, fit, frequent_tokens, num_trained_steps
from specgym.engine.eagle import save_eagle
from specgym.engine.eagle_training import EagleTrainee, check_taps, default_taps, init_eagle
from specgym.engine.kernels import LeanLlama, is_lean
from specgym.engine.pool import eos_ids_of
from specgym.engine.sources import LoadedModel, load_source
from specgym.engine.student_training import StudentTrainee, make_mid, make_small
from specgym.engine.students import check_layers, save_student, spread
from specgym.runs.board import Board
from specgym.runs.build_watch import TextWatcher, Watcher
from specgym.runs.model_card import Facts, model_card
from specgym.runs.results import write_json

SETTINGS_FILE, CHECKPOINT_FILE, FINISHED_FILE = "settings.json", "checkpoint.pt", "config.json"
Drafter = Literal["eagle", "small", "mid"]
DEFAULT_STEPS = {"eagle": 1500, "small": 3000, "mid": 3000}
DEFAULT_RATES = {"eagle": 1e-3, "small": 1e-3, "mid": 2e-3}


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """Trains drafters for a target, with no data set: the target writes the texts.

    What is killed goes on with the same command; what is finished is not done again.

    Attributes:
        target: The model they draft for: a local folder, a hub id, or ``smollm2-135m``.
        out: Folder that gets ``texts``, ``events`` (TensorBoard) and one folder per drafter.
        drafters: What to train: ``eagle`` (a head on the target's features), ``small`` (few layers
            of the target), ``mid`` (low-rank deltas on more of them, a middle verifier).
        tokens: Tokens of text to train on, at least.
        steps: Optimiser steps: of all drafters, or one number for each; by default 1500 for
            ``eagle`` and 3000 for the students.
        learning_rates: Their peaks, likewise; by default 1e-3, and 2e-3 for ``mid``.
        seed: Seeds texts and training: the same seed gives the same weights.
        small_layers: Layers of ``small``: how many, spread evenly, or which.
        mid_layers: Layers of ``mid``, likewise.
        rank: Rank of the deltas of ``mid``.
        vocabulary: Most frequent tokens that drafters can say.
        taps: Target layers whose inputs ``eagle`` reads; by default 2, n/2 and n - 3 of n.
        depths: Tokens in a row that ``eagle`` is trained to draft.
        texts_per_shard: Texts of a file of texts; a killed run writes the begun one anew.
        held_out: Files of texts that are kept from training, to measure on.
        rows: Texts that are written at the same time.
        batch_tokens: Tokens of a training batch, about.
        checkpoint_every: Steps between checkpoints; each measures on the held-out texts.
    """

    target: str = "smollm2-135m"
    out: Path = Path("drafters")
    drafters: tuple[Drafter, ...] = ("eagle", "small", "mid")
    tokens: int = 3_000_000
    steps: tuple[int, ...] = ()
    learning_rates: tuple[float, ...] = ()
    seed: int = 0
    small_layers: tuple[int, ...] = (5,)
    mid_layers: tuple[int, ...] = (14,)
    rank: int = 64
    vocabulary: int = 8192
    taps: tuple[int, ...] = ()
    depths: int = 2
    texts_per_shard: int = 256
    held_out: int = 1
    rows: int = 48
    batch_tokens: int = 3072
    checkpoint_every: int = 100


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
    begin(config.out / "texts", text_settings(config, target))
    for name in config.drafters:  # refused before an hour of writing
        begin(config.out / name, drafter_settings(config, name))
    try:
        train, held = write_texts(config, target, console)
        texts = read_texts(config, train, held, target.model.config.vocab_size)
        for name in config.drafters:
            build_drafter(name, config, texts, console)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on with what is in {config.out}")
        raise
    chain = ",".join(f"{name}={config.out / name}" for name in config.drafters)
    console.print(f'a pool of them: --pool "{chain},target={config.target}"', markup=False)


def check_config(config: BuildConfig) -> None:
    """Refuses settings that are out of range.

    Raises:
        ValueError: Which, and what it must be.
    """
    positive = ("tokens", "rank", "vocabulary", "depths", "texts_per_shard", "held_out", "rows",
                "batch_tokens", "checkpoint_every")  # fmt: skip
    for name in positive:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: must be at least 1; got {getattr(config, name)}")
    if not config.drafters or len(set(config.drafters)) != len(config.drafters):
        raise ValueError(f"drafters: must be some of eagle, small, mid; got {config.drafters}")
    for name in ("steps", "learning_rates"):
        values = getattr(config, name)
        if len(values) not in (0, 1, len(config.drafters)) or any(value <= 0 for value in values):
            raise ValueError(
                f"{name}: must be a positive number, or one for each of {len(config.drafters)} "
                f"drafters; got {values}"
            )


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


def fill_in(config: BuildConfig, target: LoadedModel) -> BuildConfig:
    """The configuration with its layers and taps spelled out for this target.

    Raises:
        ValueError: If the target has no such layers.
    """
    num_layers = target.model.config.num_hidden_layers
    layers = {}
    for name in ("small_layers", "mid_layers"):
        given = getattr(config, name)
        if len(given) == 1:
            if not 1 <= given[0] <= num_layers:
                raise ValueError(f"{name}: must be in 1..{num_layers}; got {given[0]}")
            given = tuple(spread(num_layers, given[0]))
        if name.removesuffix("_layers") in config.drafters:
            check_layers(given, num_layers)
        layers[name] = given
    taps = config.taps or default_taps(num_layers)
    check_taps(taps, num_layers)
    return dataclasses.replace(config, taps=taps, **layers)


def text_settings(config: BuildConfig, target: LoadedModel) -> dict[str, Any]:
    """What the texts depend on."""
    names = ("seed", "tokens", "taps", "texts_per_shard", "held_out", "rows")
    named = {name: getattr(config, name) for name in names}
    return {"target": target.fingerprint, "origin": target.origin, **named}


def drafter_settings(config: BuildConfig, name: str) -> dict[str, Any]:
    """What a drafter depends on, beside the texts."""
    own = {
        "eagle": {"taps": config.taps, "depths": config.depths},
        "small": {"layers": config.small_layers},
        "mid": {"layers": config.mid_layers, "rank": config.rank},
    }[name]
    return {**own, "vocabulary": config.vocabulary, **dataclasses.asdict(fit_config(config, name))}


def fit_config(config: BuildConfig, name: str) -> FitConfig:
    """How a drafter is trained."""
    place = config.drafters.index(name)  # type: ignore[arg-type]
    steps = config.steps or (DEFAULT_STEPS[name],)
    rates = config.learning_rates or (DEFAULT_RATES[name],)
    return FitConfig(
        num_steps=steps[place if len(steps) > 1 else 0],
        learning_rate=rates[place if len(rates) > 1 else 0],
        batch_tokens=config.batch_tokens,
        warmup_steps=30,
        checkpoint_every=config.checkpoint_every,
        seed=config.seed,
    )


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Writes down what a folder's content depends on; a begun one must be given the same.

    Raises:
        ValueError: If it was begun with something else.
    """
    path, ours = folder / SETTINGS_FILE, json.loads(json.dumps(settings))
    if not path.exists():
        if (folder / FINISHED_FILE).exists():
            raise ValueError(f"out: {folder} holds something else; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, ours)
        return
    theirs = json.loads(path.read_text())
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{key}: {folder} was begun with {theirs.get(key)!r}, this asks for "
                f"{ours.get(key)!r}; give the same to go on, choose another --out, or remove "
                f"{folder} and what was trained on it"
            )


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
    with watcher.bar:
        fit(trainee, texts.train, settings, checkpoint, watcher.report, watcher.on_checkpoint)
    board.close()
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
        settings=drafter_settings(config, name),
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
