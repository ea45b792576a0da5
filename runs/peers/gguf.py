"""A Llama's weights as a GGUF file, for llama.cpp: the same numbers in another container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaForCausalLM

TYPES = {
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    torch.float32: gguf.GGMLQuantizationType.F32,
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, path: Path, dtype: torch.dtype | None = None) -> None:
    """Writes a Llama without a tokenizer: whoever reads it takes token ids.

    Args:
        model: The transformers model, untouched by any member of a pool.
        path: The file to write.
        dtype: Type of the weights in the file, bfloat16 or float32; None keeps the model's.

    Raises:
        ValueError: If the model is no plain Llama, or the type is another one.
    """
    dtype = dtype or model.dtype
    check_plain(model, dtype)
    writer = gguf.GGUFWriter(path, "llama")
    try:
        write_settings(writer, model.config)
        for name, weight in named_weights(model):
            data, kind = as_stored(weight.to(dtype))
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def check_plain(model: Any, dtype: torch.dtype) -> None:
    """Refuses what this file's layout has no place for.

    Raises:
        ValueError: If the model is no Llama, has biases or scaled rotary factors, or the dtype is
            another one.
    """
    kind = type(model).__name__
    if type(model) is not LlamaForCausalLM or any(n.endswith("bias") for n in model.state_dict()):
        raise ValueError(f"model: only a Llama without biases can be written as GGUF; got a {kind}")
    rope = model.config.rope_parameters or {}
    if rope.get("rope_type") != "default":
        raise ValueError(f"model: only plain rotary positions can be written as GGUF; got {rope}")
    if dtype not in TYPES:
        raise ValueError(f"dtype: must be bfloat16 or float32; got {dtype}; name one of them")


def write_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    """Writes sizes and constants of a Llama's configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights under llama.cpp's names; a tied head is not written twice."""
    config = model.config
    yield "token_embd.weight", model.model.embed_tokens.weight
    for index, layer in enumerate(model.model.layers):
        for theirs, ours in LAYER_NAMES.items():
            weight = layer.get_parameter(f"{theirs}.weight")
            if theirs.endswith("q_proj"):
                weight = interleave_halves(weight, config.num_attention_heads)
            elif theirs.endswith("k_proj"):
                weight = interleave_halves(weight, config.num_key_value_heads)
            yield f"blk.{index}.{ours}.weight", weight
    yield "output_norm.weight", model.model.norm.weight
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        yield "output.weight", model.lm_head.weight


def interleave_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order.

    It rotates neighbouring pairs of a head; transformers rotates its first half with its second.
    """
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def as_stored(weight: torch.Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A weight as GGUF holds it, and its type there; vectors (norms) are always float32."""
    weight = weight.detach().cpu().contiguous()
    if weight.ndim == 1 or weight.dtype == torch.float32:
        return weight.float().numpy(), gguf.GGMLQuantizationType.F32
    return weight.view(torch.uint8).numpy(), TYPES[weight.dtype]
