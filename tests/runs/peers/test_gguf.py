"""A Llama as a GGUF file: transformers' own reader gets back what was written."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from specgym.engine.pools.upcycling import Upcycling, upcycle
from specgym.engine.testing import tiny_llama
from specgym.runs.peers.gguf import write_gguf

SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
BF16 = gguf.GGMLQuantizationType.BF16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_come_back(tmp_path, dtype, is_tied):
    model = tiny_llama(dtype=dtype)
    if is_tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    write_gguf(model, tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=dtype)
    weights = read.state_dict()
    assert weights.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    for name in SETTINGS:
        assert getattr(read.config, name) == getattr(model.config, name), name
    assert read.config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)  # held in 32 bits
    rope_theta = model.config.rope_parameters["rope_theta"]
    assert read.config.rope_parameters["rope_theta"] == rope_theta


def test_matrices_keep_their_precision(tmp_path):
    write_gguf(tiny_llama(dtype=torch.bfloat16), tmp_path / "model.gguf")
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == BF16
    assert kinds["output_norm.weight"] == gguf.GGMLQuantizationType.F32


def test_other_models_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(
        ValueError, match=r"only a Llama without biases .* got a MixtralForCausalLM"
    ):
        write_gguf(upcycle(tiny_llama(), Upcycling(2, 1, "tiny")), path)
    scaled = tiny_llama()
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="only plain rotary positions"):
        write_gguf(scaled, path)
    with pytest.raises(ValueError, match=r"bfloat16 or float32; got torch\.float16"):
        write_gguf(tiny_llama(dtype=torch.float16), path)
    assert not path.exists()


def test_a_model_may_be_stored_in_another_type(tmp_path):
    model = tiny_llama()
    write_gguf(model, tmp_path / "narrow.gguf", torch.bfloat16)
    write_gguf(model.to(torch.bfloat16), tmp_path / "same.gguf")
    narrow, same = (tmp_path / f"{name}.gguf" for name in ("narrow", "same"))
    assert narrow.read_bytes() == same.read_bytes()
