"""An EAGLE head in training computes, at every depth, what it drafts in a chain."""

import contextlib
import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM

from specgym.engine.compiled.rotary import frequencies
from specgym.engine.forward.eagle import EagleCheckpoint, load_eagle, save_eagle
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.model import ModelMember
from specgym.engine.pools.students import check_layers
from specgym.engine.testing import tiny_llama
from specgym.engine.training import eagle as eagle_training
from specgym.engine.training.eagle import EagleTrainee, default_taps, init_eagle
from specgym.engine.training.fitting import Batch, FitConfig, fit, measure

NUM_LAYERS, VOCAB, TAPS, NUM_DEPTHS = 4, 61, (1, 2), 3
IDS = torch.arange(0, VOCAB, 2)
TOKENS = torch.randint(0, VOCAB, (2, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def in_float32(monkeypatch):
    """Training without its bf16 autocast, so that it can be compared closely."""
    monkeypatch.setattr(eagle_training.torch, "autocast", lambda *_: contextlib.nullcontext())


def make_head(target, num_layers=1, noise=0.15):
    torch.manual_seed(5)
    head = init_eagle(target, TAPS, len(IDS), num_layers)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(noise * torch.randn_like(p))
    return head


def make_batch(target, lengths=(14, 14)):
    states = target(TOKENS, output_hidden_states=True).hidden_states
    features = torch.cat([states[tap] for tap in (*TAPS, NUM_LAYERS)], dim=-1)
    weights = torch.zeros(TOKENS.shape)
    tokens = TOKENS.clone()
    for row, length in enumerate(lengths):
        weights[row, : length - 1] = 1.0
        tokens[row, length:] = 0
        features[row, length:] = 0.0
    return Batch(tokens, features, weights, ("a", "b"))


def make_trainee(target, head, num_depths=NUM_DEPTHS):
    embedding = target.model.embed_tokens.weight
    return EagleTrainee(head, embedding, target.lm_head.weight, IDS, num_depths)


def drafted_logits(tokens, head, depths, compiled):
    """The member's logits with each number of known tokens: {(known, depth): [V]}."""
    seen = {}
    for known in range(1, len(tokens) - depths):
        target = tiny_llama(0, num_layers=NUM_LAYERS)
        checkpoint = EagleCheckpoint(head, IDS, None, None)
        member = EagleMember("eagle", checkpoint, target, compiled=compiled)
        verifier = ModelMember("target", target, compiled=compiled)
        verifier.tap((*TAPS, NUM_LAYERS))
        member.find_columns((*TAPS, NUM_LAYERS))
        source, memory = verifier.new_memory(1, 32), member.new_memory(1, 32)
        memory.source = source
        verifier.forward(source, [tokens[:known]])
        fed = tokens[1 : known + 1]
        for depth in range(depths):
            logits = member.forward(memory, [fed])
            seen[known, depth] = logits[0, 0, IDS]
            fed = [tokens[known + 1 + depth]]
    return seen


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_every_depth_is_what_the_member_drafts(num_layers, compiled, in_float32):
    """With the text's own tokens as drafts: position t, depth d knows t - d + 1 tokens."""
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    head = make_head(target, num_layers)
    batch = make_batch(target)
    logits, _, weights = make_trainee(target, head).outputs(batch)
    used = (batch.weights[:, 1:] > 0).nonzero()
    drafted = drafted_logits(TOKENS[1].tolist(), head, NUM_DEPTHS, compiled)
    num_compared = 0
    for place, (row, t) in enumerate(used.tolist()):
        for depth in range(NUM_DEPTHS):
            wanted = drafted.get((t - depth + 1, depth))
            if row == 1 and wanted is not None:
                num_compared += 1
                torch.testing.assert_close(logits[depth][place], wanted, atol=2e-4, rtol=1e-3)
            assert (weights[depth][place] > 0) == (t >= depth)
    assert num_compared >= 28


@torch.no_grad()
def test_padded_ends_change_nothing(in_float32):
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    trainee = make_trainee(target, make_head(target))
    batch = make_batch(target, (14, 9))
    alone = Batch(
        batch.tokens[1:, :9], batch.features[1:, :9], batch.weights[1:, :9], batch.topics[1:]
    )
    together, by_itself = trainee.outputs(batch), trainee.outputs(alone)
    pairs = zip((*together[0], together[1]), (*by_itself[0], by_itself[1]), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours[-len(theirs) :], theirs, atol=1e-5, rtol=1e-4)
    assert torch.equal(trainee.agreement(batch)[1], trainee.agreement(alone)[0])


@torch.no_grad()
def test_the_teacher_is_the_targets_law_of_the_token_behind(in_float32):
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    batch = make_batch(target, (14, 9))
    _, teacher, _ = make_trainee(target, make_head(target)).outputs(batch)
    expected = target(TOKENS).logits[..., IDS]
    places = (batch.weights[:, 1:] > 0).nonzero().tolist()
    for theirs, (row, t) in zip(teacher, places, strict=True):
        torch.testing.assert_close(theirs, expected[row, t + 1], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_agreement_counts_answer_tokens_that_are_said(in_float32):
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    trainee = make_trainee(target, make_head(target))
    batch = make_batch(target, (14, 9))
    logits, _, _ = trainee.outputs(batch)
    counts = trainee.agreement(batch)
    hits = torch.zeros(2, NUM_DEPTHS)
    for place, (row, t) in enumerate((batch.weights[:, 1:] > 0).nonzero().tolist()):
        for depth in range(min(NUM_DEPTHS, t + 1)):
            said = IDS[logits[depth][place].argmax()]
            hits[row, depth] += float(said == batch.tokens[row, t + 2])
    assert torch.equal(counts[..., 0], hits)
    assert counts[..., 1].tolist() == [[12, 11, 10], [7, 6, 5]]


def test_a_new_head_thinks_like_the_end_of_the_target():
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    torch.manual_seed(0)
    head, last = init_eagle(target, TAPS, len(IDS)), target.model.layers[-1]
    assert torch.equal(head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], last.self_attn.q_proj.weight)
    assert head.shape.num_features == 64
    two = init_eagle(target, TAPS, len(IDS), 2)
    assert torch.equal(two.layers["1"].mlp.up_proj.weight, last.mlp.up_proj.weight)


def test_training_teaches_and_the_file_holds_what_was_learnt(texts, tmp_path):
    target = tiny_llama(0, num_layers=3, vocab_size=98)
    ids, embedding = torch.arange(0, 98, 2), target.model.embed_tokens.weight
    torch.manual_seed(0)
    head = init_eagle(target, TAPS, len(ids))
    trainee = EagleTrainee(head, embedding, target.lm_head.weight, ids)
    config, losses = FitConfig(25, 120, 3e-3, 2, checkpoint_every=25), []
    fit(trainee, texts, config, tmp_path / "c.pt", lambda _, n: losses.append(n), lambda _: None)
    assert sum(n["loss"] for n in losses[-5:]) < sum(n["loss"] for n in losses[:5])
    assert losses[0].keys() == {"agreement_0", "agreement_1", "rate", "gradient_norm", "loss"}
    save_eagle(tmp_path, head, ids, "f" * 64, {"training": {"steps": 25}})
    loaded = load_eagle(tmp_path, 3, torch.float32)
    assert loaded.target_fingerprint == "f" * 64
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {"steps": 25}
    assert loaded.head.shape.taps == TAPS
    assert torch.equal(loaded.draft_ids, ids)
    assert loaded.lm_head is None
    assert loaded.embedding is None
    for name, weight in head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], weight.bfloat16().float())
    twin = EagleTrainee(loaded.head, embedding, target.lm_head.weight, ids)
    theirs = measure(twin, texts)
    for topic, depths in measure(trainee, texts).items():
        assert theirs[topic] == pytest.approx(depths, abs=0.1)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_head_is_turned_by_float32_frequencies_whatever_its_type(tmp_path, compiled):
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    head = make_head(target)
    exact = head.rotary.inv_freq.clone()
    save_eagle(tmp_path, head, IDS)
    checkpoint = load_eagle(tmp_path, NUM_LAYERS, torch.bfloat16)
    assert checkpoint.target_fingerprint is None
    member = EagleMember("eagle", checkpoint, target.to(torch.bfloat16), compiled=compiled)
    assert member.dtype == torch.bfloat16
    assert (member.compiled is not None) == compiled
    rotary = member.compiled.rotary if compiled else member.lean.rotary
    assert torch.equal(rotary.inv_freq, exact)
    assert torch.equal(rotary.original_inv_freq, exact)
    if compiled:
        turns = frequencies(rotary)
        assert turns.dtype == np.float32
        np.testing.assert_allclose(turns, exact, rtol=1e-6)


def test_the_first_depth_attends_as_usual_and_a_later_one_to_what_is_true():
    """Against attention written out position by position."""
    torch.manual_seed(0)
    T, D = 6, 8
    q = torch.randn(NUM_DEPTHS, 1, T, 4, D)
    k, v = torch.randn(2, NUM_DEPTHS, 1, T, 2, D)
    attention = eagle_training.DepthAttention()
    for depth in range(NUM_DEPTHS):
        mixed = attention.at(depth)(0, q[depth], k[depth], v[depth])
        for t in range(depth, T):
            sources = [(0, s) for s in range(t - depth + 1)]
            sources += [(i, t - depth + i) for i in range(1, depth + 1)]
            for head in range(4):
                keys = torch.stack([k[i, 0, s, head // 2] for i, s in sources])
                values = torch.stack([v[i, 0, s, head // 2] for i, s in sources])
                shares = (keys @ q[depth, 0, t, head] * D**-0.5).softmax(-1)
                torch.testing.assert_close(mixed[0, t, head], shares @ values)


def test_taps_are_checked():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(2) == (0, 1)
    for taps in ((), (2, 1), (1, 1), (0, 4)):
        with pytest.raises(ValueError, match="ascending"):
            check_layers(taps, NUM_LAYERS, "taps")


def test_a_target_of_another_architecture_is_refused():
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="got a MistralForCausalLM"):
        init_eagle(MistralForCausalLM(config), (1,), 8)


def test_biases_of_the_target_are_taken_along():
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    config = type(target.config)(**target.config.to_diff_dict() | {"attention_bias": True})
    biased = type(target)(config).requires_grad_(False)
    biased.model.layers[-1].self_attn.k_proj.bias.fill_(0.5)
    head = init_eagle(biased, TAPS, len(IDS))
    assert (head.midlayer.self_attn.k_proj.bias == 0.5).all()
    assert F.linear(torch.zeros(1, 64), head.midlayer.self_attn.k_proj.weight).shape == (1, 16)
