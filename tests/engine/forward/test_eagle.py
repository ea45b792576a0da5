"""EAGLE heads: published layouts, what they draft, and that their memory forgets the path."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig

from specgym.engine.forward.eagle import EagleHead, EagleShape, holds_eagle, load_eagle
from specgym.engine.forward.lean_llama import fold_mask, widen
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_tokenizer
from specgym.engine.types import DecodeRequest, Plan, SamplingParams

VOCAB, BUDGET, NUM_LAYERS = 61, 40, 6
PROMPTS = ((9,), (1, 2, 3, 1, 2, 3, 1), tuple(range(60, 0, -1)))
PLAN = Plan(("eagle", "target"), 4)
LAYOUTS = ("eagle", "eagle-3", "eagle-3-trimmed")
FORMS = ("compiled", "fused", "hooked")


def write_published(folder, layout, seed=1, vocab_size=VOCAB):
    """A random head in the files and under the names in which heads are published."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    wide = layout != "eagle"
    taps = (2, NUM_LAYERS // 2, NUM_LAYERS - 3) if wide else ()
    values = config.to_dict()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = EagleHead(EagleShape(config, taps, not wide, vocab_size, 32))
        weights = {name: 2 * w if w.ndim > 1 else w for name, w in head.state_dict().items()}
        if wide:
            ids = torch.arange(0, vocab_size, 2 if layout.endswith("trimmed") else 1)
            weights["d2t"] = ids - torch.arange(len(ids))
            weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
            weights["lm_head.weight"] = torch.randn(len(ids), 32)
            values["draft_vocab_size"] = len(ids)
        else:
            weights["embed_tokens.weight"] = torch.randn(vocab_size, 32)
    weights = {name: w.detach().contiguous() for name, w in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if wide:
        save_file(weights, folder / "model.safetensors")
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    return folder


def make_pool(folder, dtype=torch.float32, form="compiled"):
    """A head and its target, both compiled, both fused, or fused and transformers' own."""
    target = tiny_llama(0, num_layers=NUM_LAYERS).to(dtype)
    compiled, lean = form == "compiled", form != "hooked"
    checkpoint = load_eagle(folder, NUM_LAYERS, dtype)
    eagle = EagleMember("eagle", checkpoint, target, compiled=compiled)
    verifier = ModelMember("target", target, lean=lean, compiled=compiled)
    assert (eagle.compiled is not None) == (verifier.compiled is not None) == compiled
    assert (verifier.lean is not None) == (form == "fused")
    return ModelPool([NGramMember(), eagle, verifier], k_values=range(1, 7))


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request, tmp_path_factory):
    return write_published(tmp_path_factory.mktemp(request.param), request.param)


def decode_watched(pool, request, pick, monkeypatch):
    """The final state, and the head's logits by (tokens the target held, positions it holds)."""
    seen = {}
    original = EagleMember.forward

    def forward(member, memory, fed, num_rows=None, *, need_logits=True, last_only=False):
        logits = original(
            member, memory, fed, num_rows, need_logits=need_logits, last_only=last_only
        )
        if need_logits:
            full = widen(logits[0, 0], member.draft_ids, VOCAB) if last_only else logits[0, 0]
            seen.setdefault((memory.num_known(0), memory.num_valid(0)), full)
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(EagleMember, "forward", forward)
        state, _ = decode(pool, [request], pick)
    return state, seen


def computed_anew(pool, tokens, drafted, folder):
    """The head's next logits without any cache: a target forward, one pass, then the guesses."""
    target = tiny_llama(0, num_layers=NUM_LAYERS)
    checkpoint = load_eagle(folder, NUM_LAYERS, torch.float32)
    head, member = checkpoint.head, pool.members["eagle"]
    states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    taken = head.take_in(torch.cat([states[tap] for tap in member.taps], dim=-1))
    text = torch.tensor([[*tokens[1:], *drafted]])

    def attend(index, queries, keys, values):
        q, k, v = (states.transpose(1, 2) for states in (queries, keys, values))
        k, v = (states.repeat_interleave(2, dim=1) for states in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    for width in range(taken.shape[1], text.shape[1] + 1):
        embeds = F.embedding(text[:, :width], member.embedding)
        hidden = head(embeds, taken, torch.arange(width)[None], attend)
        taken = torch.cat([taken, hidden[:, -1:]], dim=1)
    rows = target.lm_head.weight if checkpoint.lm_head is None else checkpoint.lm_head
    ids = torch.arange(VOCAB) if checkpoint.draft_ids is None else checkpoint.draft_ids
    full = torch.full((VOCAB,), -torch.inf)
    full[ids] = F.linear(head.before_head(hidden[0, -1]), rows)
    return full


def test_a_published_head_is_told_from_a_model(folder, tmp_path):
    assert holds_eagle(str(folder))
    tiny_llama().save_pretrained(tmp_path)
    assert not holds_eagle(str(tmp_path))
    assert not holds_eagle("some/hub-id")


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_a_head_computed_anew(folder, form, monkeypatch):
    """Features, positions, the shifted embedding, the head's own outputs and its vocabulary."""
    pool = make_pool(folder, form=form)
    state, seen = decode_watched(pool, DecodeRequest(PROMPTS[1], 12), lambda _: PLAN, monkeypatch)
    firsts = [known for known, held in seen if held == known]
    assert len(firsts) > 2
    for known in firsts:
        text, drafted = state.tokens[0][: known + 1], []
        for depth in range(PLAN.k):
            if (known, known + depth) not in seen:
                break
            logits = seen[known, known + depth]
            expected = computed_anew(pool, text, drafted, folder)
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-4)
            drafted.append(int(logits.argmax()))


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("form", ["compiled", "fused"])
def test_any_plans_give_the_tokens_of_plain_decoding(folder, batch, exact, form):
    pool = make_pool(folder, form=form)
    requests = [DecodeRequest(prompt, BUDGET) for prompt in PROMPTS[:batch]]
    plain = [decode(pool, [request])[0].output() for request in requests]
    for seed in range(3):
        state, results = decode(pool, requests, random_plans(pool, seed), exact=exact)
        assert [state.output(row) for row in range(batch)] == plain
        assert any(result.executed.chain[0] == "eagle" for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("form", ["compiled", "fused"])
def test_after_idling_it_drafts_as_if_it_never_had(folder, prompt, dtype, form, monkeypatch):
    """Whatever ran before, at a position its logits are the same: bit for bit, save fused fp32."""
    pool = make_pool(folder, dtype, form)
    request = DecodeRequest(prompt, BUDGET)
    plain, _ = decode(pool, [request])
    always, expected = decode_watched(pool, request, lambda _: PLAN, monkeypatch)
    assert always.output() == plain.output()

    def late(state):
        return PLAN if state.num_generated(0) > 20 else PLAN.without_speculation()

    for pick in (late, random_plans(pool, 3)):
        state, seen = decode_watched(pool, request, pick, monkeypatch)
        assert state.output() == plain.output()
        common = seen.keys() & expected.keys()
        assert len(common) > 3
        for key in common:
            if dtype == torch.bfloat16 or form == "compiled":
                assert torch.equal(seen[key], expected[key])
            else:
                torch.testing.assert_close(seen[key], expected[key])


def test_a_prompt_of_one_token_is_decoded_plainly_at_first(folder):
    """The head reads features of tokens that the target has seen, and it has seen none yet."""
    _, results = decode(make_pool(folder), [DecodeRequest((9,), 12)], lambda _: PLAN)
    assert (results[0].executed.k, results[0].reason) == (0, "no_proposal")
    assert results[1].executed == PLAN


def test_tokens_outside_a_trimmed_vocabulary_are_never_proposed(tmp_path, monkeypatch):
    pool = make_pool(write_published(tmp_path, "eagle-3-trimmed"))
    _, seen = decode_watched(pool, DecodeRequest(PROMPTS[1], 20), lambda _: PLAN, monkeypatch)
    for logits in seen.values():
        assert torch.isinf(logits[1::2]).all()
        assert torch.isfinite(logits[0::2]).all()


def test_sampling_behind_a_trimmed_vocabulary_keeps_the_law(tmp_path):
    """Tokens that the head cannot say come as often as without it."""
    pool = make_pool(write_published(tmp_path, "eagle-3-trimmed"))
    shares = {}
    for plan in (Plan(("target",), 0), Plan(("eagle", "target"), 1)):
        outputs = [
            decode(pool, [DecodeRequest(PROMPTS[1], 2, SamplingParams(1.0, seed=seed))],
                   lambda _, plan=plan: plan)[0].output()
            for seed in range(300)
        ]  # fmt: skip
        tokens = [token for output in outputs for token in output]
        shares[plan] = sum(token % 2 for token in tokens) / len(tokens)
    left, right = shares.values()
    assert abs(left - right) < 0.09  # three standard deviations


def test_a_pool_takes_a_head_beside_its_target(tmp_path):
    tokenizer = tiny_tokenizer()
    target = tiny_llama(0, num_layers=NUM_LAYERS, vocab_size=len(tokenizer))
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    head = write_published(tmp_path / "head", "eagle-3-trimmed", vocab_size=len(tokenizer))
    pool = load_pool(f"eagle={head},target={tmp_path / 'target'}", dtype=torch.float32)
    assert ("eagle", "target") in pool.chains
    assert ("ngram", "eagle", "target") not in pool.chains
    request = DecodeRequest(pool.encode("hello"), 16)
    plain, _ = decode(pool, [request])
    assert decode(pool, [request], random_plans(pool, 0))[0].output() == plain.output()


def test_tokens_that_a_target_got_after_its_head_are_read_and_never_proposed(tmp_path):
    """The head's own embedding ends at 40; prompt and output go beyond."""
    pool = make_pool(write_published(tmp_path, "eagle", vocab_size=40))
    request = DecodeRequest((1, 60, 57, 60, 57), BUDGET)
    plain, _ = decode(pool, [request])
    assert max(plain.output()) >= 40
    assert int(pool.members["eagle"].draft_ids.max()) == 39
    state, results = decode(pool, [request], random_plans(pool, 0))
    assert state.output() == plain.output()
    assert any(result.executed.chain[0] == "eagle" for result in results)


def test_a_head_for_another_target_is_refused(tmp_path):
    checkpoint = load_eagle(write_published(tmp_path, "eagle-3-trimmed"), 6, torch.float32)
    with pytest.raises(ValueError, match="trained on this target"):
        EagleMember("eagle", checkpoint, tiny_llama(0, vocab_size=20, num_layers=NUM_LAYERS))
    with pytest.raises(ValueError, match="reads layers"):
        EagleMember("eagle", checkpoint, tiny_llama(0, num_layers=2))


def test_a_file_that_is_no_head_is_refused(tmp_path):
    folder = write_published(tmp_path, "eagle-3")
    save_file({"fc.weight": torch.zeros(32, 96)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing"):
        load_eagle(folder, NUM_LAYERS, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_lean_forward_is_the_modules(layout, tmp_path):
    """A window behind nothing, then one token behind it."""
    head = load_eagle(write_published(tmp_path, layout), NUM_LAYERS, torch.float32).head
    member = make_pool(tmp_path, form="fused").members["eagle"]
    memory = member.new_memory(1, 32)
    embeds, features = torch.randn(1, 5, 32), torch.randn(1, 5, head.shape.num_features)

    def attend(index, queries, keys, values):
        q, k, v = (states.transpose(1, 2) for states in (queries, keys, values))
        k, v = (states.repeat_interleave(2, dim=1) for states in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    taken = head.take_in(features)
    expected = head(embeds, taken, torch.arange(5)[None], attend)
    outputs = []
    for first, stop in ((0, 4), (4, 5)):
        width = stop - first
        mask = memory.bias([width], width)
        folded = None if mask is None else fold_mask(mask, member.groups)
        part = member.lean.take_in(features[:, first:stop])
        window = embeds[:, first:stop]
        outputs.append(member.lean(window, part, memory.rotation(width), folded, memory))
        memory.advance([width], width)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, atol=1e-5, rtol=1e-4)


TEXT = [5, 9, 2, 7, 41, 9, 2, 7, 33, 60, 1, 58, 9, 2, 16, 7, 22]
FED = len(TEXT) - 1  # a head's first position stands for the second token


def feed_head(pool, sizes, num_rows=1):
    """The first row's logits by the positions it holds, its memory, and the target's.

    Further rows are fed other tokens, in windows of which each is two longer than the last row's.
    """
    target, member = pool.model("target"), pool.members["eagle"]
    texts = [[(token + 3 * row) % VOCAB for token in TEXT] for row in range(num_rows)]
    source, memory = target.new_memory(num_rows, 64), member.new_memory(num_rows, 64)
    memory.source = source
    target.forward(source, texts)
    seen, firsts = {}, [1] * num_rows
    for size in sizes:
        stops = [first + size + 2 * row for row, first in enumerate(firsts)]
        fed = [text[a:b] for text, a, b in zip(texts, firsts, stops, strict=True)]
        firsts = [min(stop, len(TEXT)) for stop in stops]
        logits = member.forward(memory, fed)
        seen[memory.num_valid(0)] = logits[0, 0]
    return seen, memory, source


def test_the_compiled_forward_is_the_modules(folder):
    """Behind every token, from the same features; without a cache and with one."""
    pool = make_pool(folder)
    checkpoint = load_eagle(folder, NUM_LAYERS, torch.float32)
    head, member = checkpoint.head, pool.members["eagle"]
    seen, _, source = feed_head(pool, [1] * FED)

    def attend(index, queries, keys, values):
        q, k, v = (states.transpose(1, 2) for states in (queries, keys, values))
        k, v = (states.repeat_interleave(2, dim=1) for states in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    taken = head.take_in(source.features_BSF[:, :FED, member.columns])
    embeds = F.embedding(torch.tensor([TEXT[1:]]), member.embedding)
    hidden = head(embeds, taken, torch.arange(FED)[None], attend)
    rows = checkpoint.lm_head
    if rows is None:
        rows = tiny_llama(0, num_layers=NUM_LAYERS).lm_head.weight
    expected = F.linear(head.before_head(hidden[0]), rows)
    ours = torch.stack([seen[held + 1] for held in range(FED)])[:, member.draft_ids]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_windows_of_any_size_are_the_same_bits_compiled(folder, dtype, num_rows):
    """Logits, and keys and values; whatever other rows are fed."""
    pool = make_pool(folder, dtype)
    expected, alone, _ = feed_head(pool, [1] * FED)
    for sizes in ([FED], [1, 7, 8], [3, 3, 3, 3, 3, 1], [13, 3], [2] * 8):
        seen, memory, _ = feed_head(pool, sizes, num_rows)
        assert len(seen) == len(sizes)
        for held, logits in seen.items():
            assert torch.equal(logits, expected[held])
        slots = memory.row_slots[0]
        assert len(slots) == FED
        for ours, theirs in zip(memory.buffers, alone.buffers, strict=True):
            for a, b in zip(ours.states(), theirs.states(), strict=True):
                assert torch.equal(a[0][:, slots], b[0][:, :FED])


@pytest.mark.parametrize("form", ["compiled", "fused"])
def test_a_guess_is_one_row_and_committed_tokens_come_in_the_modes_windows(folder, form):
    """Guesses are dropped, so that only what stays needs a fixed shape."""
    pool = make_pool(folder, form=form)
    for exact, firsts in ((True, {pool.window}), (False, {1, 2, 3, 4, 5})):
        _, results = decode(pool, [DecodeRequest(PROMPTS[1], BUDGET)], lambda _: PLAN, exact=exact)
        drafts = [
            [cost.num_rows for cost in result.forwards if cost.role == "draft"]
            for result in results
            if result.executed == PLAN
        ]
        assert {rows[0] for rows in drafts} <= firsts
        assert {row for rows in drafts for row in rows[1:]} == {1}
