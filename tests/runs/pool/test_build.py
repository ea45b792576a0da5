"""``pool build`` from a folder with a tiny target to drafters that a pool loads."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specgym.engine.forward.eagle import load_eagle
from specgym.engine.pools.checkpoints import hash_weights
from specgym.engine.pools.loading import load_pool
from specgym.engine.pools.sources import load_source
from specgym.engine.pools.students import load_student
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_tokenizer
from specgym.engine.training.corpus import Corpus
from specgym.engine.training.eagle import EagleTrainee
from specgym.engine.training.fitting import measure
from specgym.engine.types import DecodeRequest
from specgym.runs.cli import main
from specgym.runs.pool import build
from specgym.runs.run_folder import LOCK_FILE, one_writer

DRAFTERS = ("eagle", "small", "mid")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A folder with a tiny target that chats."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(vocab_size=len(tokenizer), num_layers=4, max_position_embeddings=1024)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(target, out, *more):
    return [
        *("pool", "build", str(target), "--out", str(out), "--tokens", "1500"),
        *("--texts-per-shard", "4", "--rows", "4", "--steps", "6", "--checkpoint-every", "2"),
        *("--small-layers", "1", "--mid-layers", "0,1,3", "--rank", "2", "--vocabulary", "40"),
        *("--batch-tokens", "900", *more),
    ]


@pytest.fixture(scope="session")
def built(target, tmp_path_factory):
    """A whole build, done once."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(command(target, out)) == 0
    return out


def test_a_second_writer_is_refused_with_the_first_ones_process(target, tmp_path, capsys):
    with one_writer(tmp_path, tmp_path / LOCK_FILE, "", option="--out"):
        assert main(command(target, tmp_path)) == 2
        assert f"process {os.getpid()}" in " ".join(capsys.readouterr().err.split())
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_the_files_are_there_and_a_pool_takes_the_head(built, target):
    for name in DRAFTERS:
        files = {path.name for path in (built / name).iterdir()}
        assert files == {
            "README.md", "checkpoint.pt", "config.json", "curve.json", "model.safetensors",
            "settings.json",
        }  # fmt: skip
        assert (built / name / "model.safetensors").stat().st_mode & 0o777 == 0o644
        stored = load_file(built / name / "model.safetensors")
        kinds = {w.dtype for w in stored.values()}
        assert kinds <= {torch.bfloat16, torch.int32, torch.int64}
    pool = load_pool(f"eagle={built / 'eagle'},target={target}", dtype=torch.float32)
    request = DecodeRequest(pool.encode("hello there"), 12)
    plain, _ = decode(pool, [request])
    assert decode(pool, [request], random_plans(pool, 0))[0].output() == plain.output()


def test_drafters_are_bound_to_their_target(built, target):
    source = load_source(str(target), dtype=torch.bfloat16, device="cpu")
    head = load_eagle(built / "eagle", 4, torch.bfloat16)
    assert head.target_fingerprint == source.fingerprint == hash_weights(source.model)
    for name, layers, rank in (("small", (3,), None), ("mid", (0, 1, 3), 2)):
        student = load_student(built / name, source.model, torch.bfloat16)
        assert student.target_fingerprint == source.fingerprint
        assert (student.layers, student.rank) == (layers, rank)
        assert student.model.lm_head.out_features == len(student.draft_ids) == 40
        assert student.training["num_steps"] == 6


def test_what_was_measured_is_what_the_file_does(built, target):
    """The card's acceptance, measured anew with the exported weights on the held-out texts."""
    shards = sorted((built / "texts").glob("*.safetensors"))
    model = load_source(str(target), dtype=torch.bfloat16, device="cpu").model
    checkpoint = load_eagle(built / "eagle", 4, torch.float32)
    embedding, rows = model.model.embed_tokens.weight, model.lm_head.weight
    trainee = EagleTrainee(checkpoint.head, embedding, rows, checkpoint.draft_ids)
    measured = measure(trainee, Corpus(shards[-1:]))
    last = json.loads((built / "eagle" / "curve.json").read_text())[-1]
    assert last["step"] == 6
    assert last["acceptance"].keys() == measured.keys()
    for topic, depths in measured.items():
        assert last["acceptance"][topic] == pytest.approx(list(depths.values()), abs=0.05)


def test_texts_to_measure_on_are_kept_from_training(built):
    shards = sorted((built / "texts").glob("*.safetensors"))
    train, held = Corpus(shards[:-1]), Corpus(shards[-1:])
    assert train.num_tokens >= 1500
    assert Corpus(shards[:-2]).num_tokens < 1500
    facts = json.loads((built / "small" / "config.json").read_text())["training"]
    assert (facts["num_texts"], facts["num_tokens"]) == (len(train), train.num_tokens)
    assert facts["held_out_texts"] == len(held)


def test_the_card_says_what_from_what_how_and_how_good(built):
    for name in DRAFTERS:
        card = (built / name / "README.md").read_text()
        curve = json.loads((built / name / "curve.json").read_text())
        assert [point["step"] for point in curve] == [0, 2, 4, 6]
        fingerprint = json.loads((built / name / "config.json").read_text())["target_fingerprint"]
        assert fingerprint in card
        assert "| seed | 0 |" in card
        for topic, depths in curve[-1]["acceptance"].items():
            assert f"| {topic} | {depths[0]:.3f} |" in card
        for point in curve[1:]:
            minutes = f"{point['seconds'] / 60:.1f}"
            assert f"| {point['step']} | {minutes} | {point['loss']:.3f} |" in card


def test_tensorboard_has_the_training(built):
    for name in DRAFTERS:
        events = EventAccumulator(str(built / "events" / name))
        events.Reload()
        tags = events.Tags()["scalars"]
        for tag in ("loss", "agreement_0", "rate", "gradient_norm"):
            assert [event.step for event in events.Scalars(f"train/{tag}")] == [1, 2, 3, 4, 5, 6]
        assert [event.step for event in events.Scalars("held_out_0/mean")] == [0, 2, 4, 6]
        assert ("train/agreement_1" in tags) == (name == "eagle")
        assert "held_out_0/math" in tags or "held_out_0/code" in tags


def test_a_finished_build_is_not_done_again(built, target, capsys):
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    assert main(command(target, built)) == 0
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before
    assert capsys.readouterr().err.count("finished, in") == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--seed", "1"), "seed: .* was begun with 0, this asks for 1"),
        (("--taps", "0,1"), r"taps: .* was begun with \[1, 2\], this asks for \[0, 1\]"),
        (("--steps", "6,6,8"), "num_steps: .*mid was begun with 6, this asks for 8"),
        (("--rank", "3"), "rank: .*mid was begun with 2"),
        (("--steps", "6,6"), "steps: must be a positive number, or one for each of 3"),
        (("--rank", "0"), "rank: must be at least 1"),
        (("--small-layers", "9"), r"small_layers: must be in 1\.\.4"),
        (("--mid-layers", "2,1"), "layers: must be ascending"),
        (("--drafters", "eagle,eagle"), "drafters: must be some of"),
    ],
)
def test_other_settings_are_refused(built, target, capsys, more, message):
    assert main(command(target, built, *more)) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def weights(out):
    return {name: (out / name / "model.safetensors").read_bytes() for name in DRAFTERS}


def test_a_killed_build_goes_on_and_gives_the_same_bits(built, target, tmp_path, monkeypatch):
    """Stopped after a file of texts, then killed while it trains."""
    out, original = tmp_path / "out", build.write_shard

    def write_first(path, *rest):
        if path.name != "shard-00000.safetensors":
            raise KeyboardInterrupt
        return original(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_shard", write_first)
        assert main(command(target, out)) == 130
    process = subprocess.Popen(
        [sys.executable, "-m", "specgym.runs.cli", *command(target, out)],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as this process: sums depend on it
    )
    while not (out / "eagle" / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (out / "small" / "config.json").exists()
    assert main(command(target, out)) == 0
    assert weights(out) == weights(built)
    for path in (built / "texts").glob("*.safetensors"):
        assert path.read_bytes() == (out / "texts" / path.name).read_bytes()
    for name in DRAFTERS:
        ours, theirs = (json.loads((o / name / "curve.json").read_text()) for o in (out, built))
        for mine, yours in zip(ours, theirs, strict=True):
            assert (mine["step"], mine["acceptance"]) == (yours["step"], yours["acceptance"])
            # Killed behind a checkpoint and before its measurement, the losses are forgotten.
            assert mine["loss"] in (yours["loss"], None)


def test_another_seed_gives_other_texts_and_weights(built, target, tmp_path):
    out = tmp_path / "out"
    more = ("--drafters", "small", "--seed", "1", "--steps", "2", "--tokens", "1")
    assert main(command(target, out, *more)) == 0
    first = Path("texts", "shard-00000.safetensors")
    assert (out / first).read_bytes() != (built / first).read_bytes()
    assert not (out / "eagle").exists()


def test_ctrl_c_says_how_to_go_on(target, tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "write_shard", stop)
    assert main(command(target, tmp_path / "out")) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_targets_that_cannot_be_drafted_for_are_refused(target, tmp_path, capsys):
    mute = tmp_path / "mute"
    shutil.copytree(target, mute)
    tiny_tokenizer().save_pretrained(mute)
    for path in mute.glob("chat_template*"):
        os.remove(path)
    assert main(command(mute, tmp_path / "a")) == 2
    assert "chat template" in capsys.readouterr().err
    mixture = f"upcycled:4:2:{target}"
    assert main(command(mixture, tmp_path / "b")) == 2
    assert "LlamaForCausalLM; got a MixtralForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    short = tmp_path / "short"
    shutil.copytree(target, short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 64}
    (short / "config.json").write_text(json.dumps(config))
    assert main(command(short, tmp_path / "c")) == 2
    assert "within the target's context" in capsys.readouterr().err
    foreign = tmp_path / "foreign"
    (foreign / "eagle").mkdir(parents=True)
    (foreign / "eagle" / "config.json").write_text("{}")
    assert main(command(target, foreign)) == 2
    assert "holds something else" in capsys.readouterr().err
