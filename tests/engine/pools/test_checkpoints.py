"""Checkpoints: what a folder must hold, what a load leaves alone, and what the hash sees."""

import hashlib
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from specgym.engine.pools.checkpoints import (
    hash_weights,
    load_folder,
    load_gguf,
    quiet_transformers,
)


def make_llama(seed: int = 0, *, tied: bool = False) -> Any:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {char: index for index, char in enumerate("abcdefghijklmnopqrstuvwxyz?")}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    make_llama().save_pretrained(path)
    return path


def test_a_folder_gives_back_the_model_that_was_saved(folder: Path) -> None:
    model, tokenizer = load_folder(folder, torch.float32, "cpu")
    tokens_BT = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT).logits, make_llama()(tokens_BT).logits)
    assert tokenizer is None
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_tokenizer_in_the_folder_is_loaded(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    _, tokenizer = load_folder(folder, torch.float32, "cpu")
    assert tokenizer.encode("cab") == [2, 0, 1]


def test_a_folder_is_loaded_without_a_look_at_the_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    make_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load_folder(folder, torch.float32, "cpu")


def test_a_load_leaves_random_state_and_logging_alone(folder: Path) -> None:
    before = torch.random.get_rng_state()
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    load_folder(folder, torch.bfloat16, "cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert transformers_logging.get_verbosity() == verbosity
    assert transformers_logging.is_progress_bar_enabled() == bars


def test_bars_that_were_off_stay_off() -> None:
    transformers_logging.disable_progress_bar()
    try:
        with quiet_transformers(bars=True):
            pass
        assert not transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.enable_progress_bar()


def test_a_model_without_sdpa_falls_back_to_eager(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt_oss",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, _ = load_folder(tmp_path, torch.float32, "cpu")
    assert model.config._attn_implementation == "eager"


def test_tied_embeddings_stay_tied_and_are_saved_once(tmp_path: Path) -> None:
    make_llama(tied=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model, _ = load_folder(tmp_path, torch.float32, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_missing_weights_are_refused_and_never_drawn_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load_folder(folder, torch.float32, "cpu")


def test_truncated_weights_are_a_clear_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_folder(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("lost", "text"),
    [("config.json", "needs a config.json"), ("model.safetensors", "cannot be loaded")],
)
def test_a_folder_without_a_file_it_needs_is_refused(folder: Path, lost: str, text: str) -> None:
    (folder / lost).unlink()
    with pytest.raises(ValueError, match=text):
        load_folder(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    "content", [b"", b"not a model at all, only text", b"GGUF\x03\x00\x00\x00"]
)
def test_a_broken_gguf_file_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        load_gguf(file, torch.float32)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ValueError, match=r"must end in \.gguf"):
        load_gguf(file, torch.float32)


def test_the_hash_is_what_its_docstring_says() -> None:
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0]]))
        module.bias.zero_()
    bias = hashlib.sha256(bytes(4)).hexdigest()
    weight = hashlib.sha256(bytes.fromhex("0000803f000000c0")).hexdigest()
    text = f"bias torch.float32 [1] {bias}\nweight torch.float32 [1, 2] {weight}"
    assert hash_weights(module) == hashlib.sha256(text.encode()).hexdigest()


def test_the_hash_does_not_depend_on_how_weights_are_stored(folder: Path) -> None:
    one, _ = load_folder(folder, torch.float32, "cpu")
    shutil.rmtree(folder)
    make_llama().save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    many, _ = load_folder(folder, torch.float32, "cpu")
    assert hash_weights(one) == hash_weights(many) == hash_weights(make_llama())


def test_the_hash_sees_one_changed_weight_and_the_dtype() -> None:
    changed = make_llama()
    with torch.no_grad():
        changed.get_parameter("model.norm.weight")[3] += 1e-6
    hashes = {hash_weights(model) for model in (make_llama(), changed, make_llama().bfloat16())}
    assert len(hashes) == 3


def test_the_hash_takes_any_layout_and_empty_weights() -> None:
    module = torch.nn.Module()
    module.register_buffer("scalar", torch.tensor(3.0))
    module.register_buffer("empty", torch.zeros(0, 4))
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    straight = torch.nn.Module()
    straight.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T.contiguous())
    straight.register_buffer("empty", torch.zeros(0, 4))
    straight.register_buffer("scalar", torch.tensor(3.0))
    assert hash_weights(module) == hash_weights(straight)
