"""Packed linears: torch's numbers, a row's bits whatever its company, plain ones in need."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from specgym.engine import kernels, linears
from specgym.engine.kernels import attend_folded, fold_mask, gated
from specgym.engine.linears import (
    FEW_ROWS,
    PackedLinear,
    by_rows,
    fits_half,
    half_works,
    is_rowwise,
    linear,
    pack_linears,
    packing_works,
    rows_are_alike,
    stream_dtype,
)
from specgym.engine.members import ModelMember, num_computed
from specgym.engine.testing import tiny_llama, tiny_mixtral


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 8, 33])
def test_a_packed_linear_is_the_linear(bias, rows):
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias).bfloat16().requires_grad_(False)
    inputs = torch.randn(2, rows, 64).bfloat16()
    expected = functional.linear(inputs.float(), layer.weight.float())
    expected = expected + layer.bias.float() if bias else expected
    outputs = linear(layer.weight, layer.bias)(inputs)
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), expected, atol=0.02, rtol=0.02)


def test_linears_are_packed_where_the_processor_can_and_the_tied_embedding_stays():
    model = tiny_llama(dtype=torch.bfloat16, num_layers=3)
    embedding = model.model.embed_tokens.weight.clone()
    count = pack_linears(model)
    if packing_works(torch.bfloat16):
        assert count == 3 * 7 + 1
        assert isinstance(model.lm_head, PackedLinear)
        assert not any(type(module) is nn.Linear for module in model.modules())
    else:
        assert count == 0
    assert torch.equal(model.model.embed_tokens.weight, embedding)


def test_float32_is_not_packed():
    model = tiny_llama()
    assert not packing_works(torch.float32)
    assert pack_linears(model) == 0
    assert type(model.lm_head) is nn.Linear
    assert linear(model.lm_head.weight).func is functional.linear


def test_without_packing_plain_linears_are_used_and_the_log_says_why(monkeypatch, caplog):
    monkeypatch.setattr(linears, "FEW_ROWS", "no such thing")
    with caplog.at_level(logging.WARNING):
        assert not packing_works.__wrapped__(torch.bfloat16)
    assert "packed linears are not to be had here" in caplog.text


def test_wrong_numbers_of_packed_linears_are_noticed(monkeypatch, caplog):
    expected = "wrong numbers" if packing_works(torch.bfloat16) else "not to be had"
    monkeypatch.setattr(linears.torch, "allclose", lambda *args, **options: False)
    with caplog.at_level(logging.WARNING):
        assert not packing_works.__wrapped__(torch.bfloat16)
    assert expected in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_window_of_few_rows(dtype):
    torch.manual_seed(0)
    packed = linear(torch.randn(192, 576).bfloat16(), torch.randn(192).bfloat16())
    if not (packing_works(torch.bfloat16) and half_works() and rows_are_alike()):
        assert not is_rowwise([torch.ones(2, 2).bfloat16()])
        return
    rows = torch.randn(1, FEW_ROWS, 576).to(dtype)
    alone = torch.cat([packed(rows[:, i : i + 1]) for i in range(FEW_ROWS)], dim=1)
    assert alone.dtype == dtype
    for count in range(2, FEW_ROWS + 1):
        assert torch.equal(packed(rows[:, :count]), alone[:, :count])


def test_a_weight_beyond_fp16_is_read_in_bf16_and_its_model_is_padded():
    torch.manual_seed(0)
    weight = torch.randn(16, 32).bfloat16()
    assert fits_half(weight)
    assert is_rowwise([weight]) == (half_works() and rows_are_alike())
    weight[3, 5] = 1e5
    assert not fits_half(weight)
    assert not is_rowwise([weight])
    rows = torch.randn(2, 32)
    narrow = rows.bfloat16().float()
    expected = narrow @ weight.float().T
    torch.testing.assert_close(linear(weight)(rows), expected, atol=0.1, rtol=0.02)
    weight[3, 5] = torch.nan
    assert not fits_half(weight)
    assert linear(weight)(rows)[:, 3].isnan().all()


def test_linears_in_float32_are_rowwise_nowhere():
    assert not is_rowwise([torch.ones(2, 2)])
    assert stream_dtype(torch.ones(2)) == torch.float32


def test_a_kernel_that_mixes_rows_is_noticed(monkeypatch, caplog):
    monkeypatch.setattr(linears, "run_few", lambda rows, packed: rows + len(rows))
    with caplog.at_level(logging.WARNING):
        assert not rows_are_alike.__wrapped__()
    assert "exact mode pads all operations" in caplog.text


@pytest.mark.parametrize("make", [tiny_llama, tiny_mixtral])
def test_without_the_fp16_kernel_states_are_bf16_and_exact_mode_pads(monkeypatch, make):
    monkeypatch.setattr(linears, "half_works", lambda: False)
    member = ModelMember("target", make(dtype=torch.bfloat16))
    assert not member.is_rowwise
    assert member.lean.stream == torch.bfloat16
    logits = member.forward(member.new_memory(1, 64, 64, aligned=True), [[1, 2, 3]], 8)
    assert logits.shape == (1, 8, member.vocab_size)
    assert logits.dtype == torch.bfloat16


def test_a_member_computes_the_tokens_fed_where_its_linears_are_rowwise():
    member = ModelMember("target", tiny_llama(dtype=torch.bfloat16))
    memory, open_ended = member.new_memory(1, 64, 64, aligned=True), member.new_memory(1, 64)
    assert num_computed(True, memory, [3], FEW_ROWS) == 3
    assert num_computed(True, memory, [3], None) == 3
    assert num_computed(True, memory, [3, 1], FEW_ROWS) == FEW_ROWS
    assert num_computed(True, memory, [3], FEW_ROWS + 1) == FEW_ROWS + 1
    assert num_computed(True, open_ended, [3], FEW_ROWS) == FEW_ROWS  # it attends to what is used
    assert num_computed(False, memory, [3], FEW_ROWS) == FEW_ROWS
    width = 3 if member.is_rowwise else FEW_ROWS
    for each in (memory, open_ended):
        logits = member.forward(each, [[1, 2, 3]], FEW_ROWS)
        assert logits.shape[1] == (width if each is memory else FEW_ROWS)


def test_a_model_whose_rows_mix_is_padded_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(linears, "fits_half", lambda weight: True)
    if not ModelMember("target", tiny_llama(dtype=torch.bfloat16)).is_rowwise:
        return
    monkeypatch.setattr(kernels, "gated", lambda hidden: gated(hidden) * (1 + hidden.shape[1] / 64))
    with caplog.at_level(logging.WARNING):
        assert not ModelMember("target", tiny_llama(dtype=torch.bfloat16)).is_rowwise
    assert "rows of a window mix" in caplog.text


def test_an_expert_beyond_fp16_makes_its_model_padded():
    model = tiny_mixtral(dtype=torch.bfloat16)
    model.model.layers[1].mlp.experts.down_proj.data[4, 2, 1] = 1e5
    assert not ModelMember("target", model).is_rowwise


@pytest.mark.parametrize("size", [1536, 11008, 18944, 40000])
def test_a_wide_gate_is_computed_row_by_row_alike_with_any_number_of_threads(size):
    threads = torch.get_num_threads()
    states = torch.randn(1, FEW_ROWS, 2 * size, generator=torch.Generator().manual_seed(0))
    try:
        for torch_threads in (1, 2, 3, 4):
            torch.set_num_threads(torch_threads)
            alone = [by_rows(gated, states[:, row : row + 1]) for row in range(FEW_ROWS)]
            for count in range(2, FEW_ROWS + 1):
                together = by_rows(gated, states[:, :count])
                assert torch.equal(together, torch.cat(alone[:count], dim=1))
    finally:
        torch.set_num_threads(threads)


def test_attention_pads_its_queries_to_the_rows_of_the_mask():
    torch.manual_seed(0)
    queries, keys, values = (
        torch.randn(1, 2, 4, 8),
        torch.randn(1, 2, 5, 8),
        torch.randn(1, 2, 5, 8),
    )
    mask = torch.randn(1, 1, 6, 5)
    full = functional.pad(queries, (0, 0, 0, 0, 0, 4))
    expected = attend_folded(full, keys, values, fold_mask(mask, 2))[:, :2]
    assert torch.equal(attend_folded(queries, keys, values, fold_mask(mask, 2)), expected)
