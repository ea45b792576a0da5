"""Students: what is taken, trained, stored, and merged again into a model that a pool takes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from specgym.engine.forward.lean_families import is_lean
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.student_files import holds_student
from specgym.engine.pools.students import (
    load_student,
    save_student,
    spread,
    take_layers,
)
from specgym.engine.testing import decode, tiny_llama
from specgym.engine.training.fitting import Batch
from specgym.engine.training.students import LowRankLinear, StudentTrainee, make_mid, make_small
from specgym.engine.types import DecodeRequest

VOCAB, RANK, LAYERS = 61, 3, [0, 2, 5]
IDS = torch.arange(0, VOCAB, 2)
TOKENS = torch.tensor([[5, 9, 2, 33, 60, 7, 7, 1], [8, 8, 4, 1, 17, 0, 0, 0]])
KINDS = ("small", "mid")


def make_target(dtype=torch.float32, bias=False):
    target = tiny_llama(0, num_layers=6)
    if bias:
        config = LlamaConfig(**target.config.to_diff_dict() | {"attention_bias": True})
        with torch.random.fork_rng():
            torch.manual_seed(1)
            target = LlamaForCausalLM(config).eval().requires_grad_(False)
        for layer in target.model.layers:
            layer.self_attn.q_proj.bias.normal_()
    for p in target.parameters():  # what a bf16 checkpoint holds, in whatever type
        p.data = p.data.to(torch.bfloat16).to(dtype)
    return target


def make_trained(kind, target):
    """A student with every trained weight moved, to values that bf16 holds."""
    student = make_small(target, LAYERS) if kind == "small" else make_mid(target, LAYERS, RANK)
    generator = torch.Generator().manual_seed(3)
    for p in student.parameters():
        if p.requires_grad:
            noise = 0.1 * torch.randn(p.shape, generator=generator)
            p.data = (p.data + noise).to(torch.bfloat16).float()
    return student


def save(kind, folder, target):
    student = make_trained(kind, target)
    save_student(
        folder,
        student,
        IDS,
        LAYERS,
        target_fingerprint="f" * 64,
        target_origin="tiny",
        rank=RANK if kind == "mid" else None,
        training={"steps": 7},
    )
    return student


def expected_logits(student, target, tokens=TOKENS):
    hidden = student.model(input_ids=tokens).last_hidden_state
    return F.linear(hidden, target.lm_head.weight.float()[IDS])


def test_layers_are_spread_from_first_to_last():
    assert spread(30, 5) == [0, 7, 14, 22, 29]
    assert spread(30, 1) == [29]
    assert spread(4, 4) == [0, 1, 2, 3]


def test_layers_are_taken_without_a_change_to_the_target():
    target = make_target(torch.bfloat16)
    student = take_layers(target, LAYERS)
    assert len(target.model.layers) == 6
    assert student.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in student.model.layers] == [0, 1, 2]
    assert torch.equal(
        student.model.layers[1].mlp.up_proj.weight, target.model.layers[2].mlp.up_proj.weight
    )
    assert student.model.rotary_emb.inv_freq.dtype == torch.float32


def test_all_layers_taken_compute_the_target():
    target = make_target()
    student = take_layers(target, range(6))
    torch.testing.assert_close(student(TOKENS).logits, target(TOKENS).logits)


def test_a_fresh_delta_changes_nothing():
    target = make_target(bias=True)
    left, right = make_small(target, LAYERS), make_mid(target, LAYERS, RANK, seed=5)
    assert isinstance(right.model.layers[0].self_attn.q_proj, LowRankLinear)
    torch.testing.assert_close(left(TOKENS).logits, right(TOKENS).logits)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_comes_back_from_its_file(kind, bias, tmp_path):
    target = make_target(bias=bias)
    student = save(kind, tmp_path, target)
    loaded = load_student(tmp_path, target, torch.float32)
    torch.testing.assert_close(loaded.model(TOKENS).logits, expected_logits(student, target))
    assert torch.equal(loaded.draft_ids, IDS)
    assert (loaded.layers, loaded.rank) == (tuple(LAYERS), RANK if kind == "mid" else None)
    assert loaded.target_fingerprint == "f" * 64
    assert loaded.target_origin == "tiny"
    assert loaded.training == {"steps": 7}
    assert len(target.model.layers) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_are_merged_before_they_are_rounded(kind, tmp_path):
    target = make_target(torch.bfloat16)
    student = save(kind, tmp_path, target)
    loaded = load_student(tmp_path, target, torch.bfloat16).model
    q_proj = student.model.layers[1].self_attn.q_proj
    weight = q_proj.weight if kind == "small" else q_proj.weight + q_proj.up @ q_proj.down
    own = loaded.model.layers[1].self_attn.q_proj.weight
    assert own.dtype == torch.bfloat16
    assert torch.equal(own, weight.to(torch.bfloat16))
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_targets_is_neither_stored_nor_copied(kind, tmp_path):
    target = make_target(torch.bfloat16)
    save(kind, tmp_path, target)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in stored)
    assert ("layers.0.mlp.up_proj.weight" in stored) == (kind == "small")
    model = load_student(tmp_path, target, torch.bfloat16).model
    assert model.model.embed_tokens.weight is target.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, target.lm_head.weight[IDS])
    before = target.model.layers[0].mlp.up_proj.weight.clone()
    model.model.layers[0].mlp.up_proj.weight.zero_()
    assert torch.equal(target.model.layers[0].mlp.up_proj.weight, before)


def test_a_pool_takes_a_student(tmp_path):
    """Its type, its layers, its head: what ``ModelMember`` looks at."""
    target = make_target()
    save("mid", tmp_path, target)
    loaded = load_student(tmp_path, target, torch.float32)
    model = loaded.model
    assert is_lean(model)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.out_features == len(IDS)
    assert model.config.vocab_size == VOCAB
    assert model.config.num_hidden_layers == 3
    assert model.config.tie_word_embeddings is False
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    wanted = model(TOKENS[:1]).logits
    for lean in (True, False):
        member = ModelMember("mid", load_student(tmp_path, target, torch.float32).model, lean=lean)
        logits = member.forward(member.new_memory(1, 16), TOKENS[:1].tolist())
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4)
    pool = ModelPool([NGramMember(), ModelMember("target", target)])
    decode(pool, [DecodeRequest((5, 9, 2), 4)])  # the target is intact


def test_padded_ends_do_not_reach_what_is_before_them():
    target = make_target()
    trainee = StudentTrainee(make_trained("small", target), target.lm_head.weight, IDS)
    trainee.module.train()
    weights = torch.zeros(2, 8)
    weights[0, :7], weights[1, :4] = 1.0, 1.0
    batch = Batch(TOKENS, torch.randn(2, 8, 32), weights, ("a", "b"))
    short = Batch(TOKENS[1:, :5], batch.features[1:, :5], weights[1:, :5], ("b",))
    together, alone = trainee.outputs(batch)[0][7:], trainee.outputs(short)[0]
    torch.testing.assert_close(together, alone, atol=0.02, rtol=0.02)  # autocast to bf16
    assert torch.equal(trainee.agreement(batch)[1], trainee.agreement(short)[0])


def test_the_teacher_and_the_agreement_are_the_targets():
    """A student of all layers agrees with its target everywhere, on the target's own path."""
    target = make_target()
    tokens = target.generate(TOKENS[:1, :4], max_new_tokens=12, do_sample=False)
    states = target.model(tokens).last_hidden_state
    weights = torch.zeros(1, tokens.shape[1])
    weights[:, 3:-1] = 1.0
    batch = Batch(tokens, states, weights, ("a",))
    trainee = StudentTrainee(
        make_small(target, range(6)), target.lm_head.weight, torch.arange(VOCAB)
    )
    logits, teacher, _ = trainee.outputs(batch)
    torch.testing.assert_close(logits.float(), teacher.float(), atol=0.15, rtol=0.02)
    hits, answers = trainee.agreement(batch)[0, 0]
    assert answers == tokens.shape[1] - 4
    assert hits >= answers - 1  # bf16 against float32


def test_targets_of_other_kinds_are_refused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    mistral = MistralForCausalLM(
        MistralConfig(vocab_size=VOCAB, num_hidden_layers=6, num_key_value_heads=2, **sizes)
    )
    target = make_target()
    save("small", tmp_path, target)
    for call in (
        lambda: take_layers(mistral, LAYERS),
        lambda: load_student(tmp_path, mistral, torch.float32),
    ):
        with pytest.raises(ValueError, match="LlamaForCausalLM; got a MistralForCausalLM"):
            call()
    with pytest.raises(ValueError, match="ascending"):
        take_layers(target, [0, 6])
    with pytest.raises(ValueError, match="on this target"):
        load_student(tmp_path, tiny_llama(0, num_layers=6, vocab_size=20), torch.float32)
    with pytest.raises(ValueError, match="among the target's"):
        load_student(tmp_path, tiny_llama(0, num_layers=4), torch.float32)
    ModelMember("target", target)
    with pytest.raises(ValueError, match="taken over"):
        load_student(tmp_path, target, torch.float32)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


DAMAGE = {
    "lacks model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "lacks config.json": lambda f: (f / "config.json").unlink(),
    "must say kind": lambda f: edit_config(f, kind="other"),
    "'layers' in": lambda f: edit_config(f, layers=None),
    "'rank' in": lambda f: edit_config(f, rank="3"),
    "cannot be read": lambda f: (f / "model.safetensors").write_bytes(b"none"),
    "must hold 'draft_ids'": lambda f: edit_weights(f, lambda w: w.pop("draft_ids")),
    "missing .*norm.weight": lambda f: edit_weights(f, lambda w: w.pop("norm.weight")),
    "unknown .*foreign": lambda f: edit_weights(f, lambda w: w.update(foreign=torch.ones(1))),
    "must have shape": lambda f: edit_weights(f, lambda w: w.update({"norm.weight": IDS})),
    "ascending token ids": lambda f: edit_weights(f, lambda w: w.update(draft_ids=IDS.flip(0))),
    "unknown .*down": lambda f: edit_config(f, rank=None),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_file_is_refused(message, tmp_path):
    target = make_target()
    save("mid", tmp_path, target)
    DAMAGE[message](tmp_path)
    with pytest.raises(ValueError, match=message):
        load_student(tmp_path, target, torch.float32)


def test_a_student_is_told_from_other_folders(tmp_path):
    save("small", tmp_path / "student", make_target())
    assert holds_student(str(tmp_path / "student"))
    tiny_llama().save_pretrained(tmp_path / "model")
    assert not holds_student(str(tmp_path / "model"))
    assert not holds_student("some/hub-id")
