"""Expert dispatch: transformers' numbers, only the experts that have tokens, ties, and loads."""

import collections

import numpy
import pytest
import torch
import transformers

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.experts import (
    IMPLEMENTATION,
    ExpertBank,
    ExpertShape,
    find_experts,
    read_loads,
)
from specgym.engine.forward.stable_topk import stable_topk
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, random_plans
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
PLAIN = {"num_experts": 6, "num_experts_per_tok": 3}
SHARED = {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
SINKS = {
    "head_dim": 8,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS = {
    "mixtral": ("MixtralConfig", COMMON | LOCAL),
    "olmoe": ("OlmoeConfig", COMMON | PLAIN),
    "qwen2-moe": ("Qwen2MoeConfig", COMMON | PLAIN | SHARED),
    "qwen3-moe": ("Qwen3MoeConfig", COMMON | PLAIN | {"head_dim": 8, "norm_topk_prob": True}),
    "phimoe": ("PhimoeConfig", COMMON | LOCAL),
    "deepseek-v3": ("DeepseekV3Config", COMMON | LATENT),
    "gpt-oss": ("GptOssConfig", COMMON | LOCAL | SINKS),
}
PROMPT = (17, 3, 44, 8, 25, 17, 3, 51, 30, 9, 10, 11, 12)
NAMES = ("mixtral", "olmoe", "qwen2-moe")
LEAN = (*NAMES, "qwen3-moe")


def build(name, seed=0, dtype=torch.float32, **changes):
    config_name, options = CONFIGS[name]
    config = getattr(transformers, config_name)(**options | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for key, value in model.named_parameters():
            if "experts" in key or "gate." in key or "router." in key:  # some are left empty
                value.data.normal_(0.0, 0.2)
    return model.to(dtype).eval().requires_grad_(False)


FORMS = {"hooked": {"lean": False}, "fused": {"compiled": False}, "compiled": {}}


def torch_members(name, dtype=torch.float32, change=lambda model: None, **changes):
    """The forwards whose experts torch runs: hooked, and fused for those of Llama's shape."""
    forms = ("hooked", "fused") if name in LEAN else ("hooked",)
    made = []
    for form in forms:
        model = build(name, dtype=dtype, **changes)
        change(model)
        made.append(ModelMember("target", model, **FORMS[form]))
        assert made[-1].compiled is None
        assert (made[-1].lean is not None) == (form == "fused")
    return made


def members(name, dtype=torch.float32, change=lambda model: None, **changes):
    """All the forwards there are for this architecture; compiled is the last, if there is one."""
    made = torch_members(name, dtype, change, **changes)
    if name in LEAN:
        model = build(name, dtype=dtype, **changes)
        change(model)
        made.append(ModelMember("target", model))
        assert made[-1].compiled is not None
    return made


def windows(member, tokens, sizes, width=None):
    """Logits of the tokens fed in windows of these sizes, and the loads of every forward."""
    memory, rows, loads, first = member.new_memory(1, 64, None if width is None else 64), [], [], 0
    for size in sizes:
        logits = member.forward(memory, [tokens[first : first + size]], width)
        rows.append(logits[0, : len(tokens[first : first + size])])
        loads.append(read_loads(member.loads))
        first += size
    return torch.cat(rows), loads


def routers(model):
    """The routers of a model that no member has taken over."""
    found = [module for module in model.modules() if "Router" in type(module).__name__]
    found = [module for module in found if hasattr(module, "weight")]
    assert found
    return found


def zero_routers(model):
    """Make every expert as good as any other."""
    for module in routers(model):
        module.weight.zero_()
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.zero_()
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [[13], [1] * 13, [4, 9], [9, 4]], ids=str)
def test_logits_are_those_of_transformers(name, sizes):
    expected = build(name)(torch.tensor([PROMPT])).logits[0]
    for member in members(name):
        logits, _ = windows(member, PROMPT, sizes)
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_grouped_products_of_accelerators_give_the_same(name):
    """They run on a CPU too; pads are behind the last group and count nowhere."""
    model, twin = build(name), build(name)
    expected = model(torch.tensor([PROMPT])).logits[0]
    kept = [(experts, dict(experts.named_parameters())) for _, experts in find_experts(twin)]
    member = ModelMember("target", twin, lean=False)
    for experts, weights in kept:  # what an accelerator has in place of a bank
        del experts.bank
        for key, weight in weights.items():
            setattr(experts, key, weight)
    for width in (None, 16):
        logits, loads = windows(member, PROMPT, [13], width)
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
        assert {sum(load) for load in loads[0]} == {13 * member.experts.experts_per_token}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_implementation_alone_serves_a_model_that_is_no_member(name):
    model, twin = build(name), build(name)
    twin.set_experts_implementation(IMPLEMENTATION)
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    torch.testing.assert_close(twin(tokens).logits, model(tokens).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_read_from_the_configuration(name):
    expected = {
        "mixtral": (6, 2, 0),
        "olmoe": (6, 3, 0),
        "qwen2-moe": (6, 3, 1),
        "qwen3-moe": (6, 3, 0),
        "phimoe": (6, 2, 0),
        "deepseek-v3": (6, 2, 2),
        "gpt-oss": (6, 2, 0),
    }
    assert members(name)[0].experts == ExpertShape(*expected[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_loads_count_the_visits_of_real_tokens_and_no_shared_expert(name):
    for member in members(name):
        num_layers = 1 if name == "deepseek-v3" else 2
        per_token = member.experts.experts_per_token
        _, at_once = windows(member, PROMPT, [13], 16)
        _, one_by_one = windows(member, PROMPT, [1] * 13, 16)
        assert len(at_once[0]) == num_layers
        assert all(sum(load) == 13 * per_token for load in at_once[0])
        assert all(sorted(load)[-per_token:] == [1] * per_token for f in one_by_one for load in f)
        summed = torch.tensor(one_by_one).sum(dim=0).tolist()
        assert summed == at_once[0]
        assert member.unique_experts == (per_token,) * num_layers


@pytest.mark.parametrize("name", CONFIGS)
def test_ties_go_to_the_lower_index_one_token_or_many_at_once(name):
    """A router of zeros: every expert is as good; the first ones must be chosen, every time."""
    for member in members(name, change=zero_routers):
        per_token = member.experts.experts_per_token
        first = [1] * per_token + [0] * (member.experts.num_experts - per_token)
        for sizes, width in (([13], None), ([1] * 13, None), ([5, 8], 16), ([12, 1], 16)):
            for size, loads in zip(sizes, windows(member, PROMPT, sizes, width)[1], strict=True):
                assert loads == [[size * visits for visits in first]] * len(loads)


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_with_the_same_router_row_tie_alone_and_together(name, dtype):
    """Expert e + 3 is as good as e: of each pair the lower comes first, however many are fed."""

    def pair(model):
        for module in routers(model):
            module.weight[3:] = module.weight[:3]

    member = members(name, dtype, pair)[-1]
    per_token, memory = member.experts.experts_per_token, member.new_memory(1, 64)
    together = member.forward(memory, [list(PROMPT)])[0]
    chosen = member.compiled.chosen.copy()
    assert chosen.shape == (2, len(PROMPT), per_token)
    memory, alone, visited = member.new_memory(1, 64), [], []
    for token in PROMPT:
        alone.append(member.forward(memory, [[token]])[0])
        visited.append(member.compiled.chosen.copy())
    assert torch.equal(torch.cat(alone), together)
    assert (numpy.concatenate(visited, axis=1) == chosen).all()
    for experts in chosen.reshape(-1, per_token).tolist():
        visits = set(experts)
        assert len(visits) == per_token
        assert all(expert < 3 or expert - 3 in visits for expert in visits)
        assert any(expert >= 3 for expert in visits)
    assert len({tuple(sorted(row)) for row in chosen[0].tolist()}) > 1


def test_stable_topk_is_topk_where_nothing_ties():
    scores = torch.randn(50, 9)
    for largest in (True, False):
        ours, theirs = stable_topk(scores, 4, largest=largest), scores.topk(4, largest=largest)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.indices, theirs.indices)
    values, indices = stable_topk(torch.zeros(3, 40), 5, dim=1, sorted=False)
    assert indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert not values.any()


@pytest.fixture
def seen(monkeypatch):
    """Number of rows of every run of an expert."""
    rows, run = [], ExpertBank.run

    def watch(bank, expert, rows_NH):
        rows.append((bank, expert, len(rows_NH)))
        return run(bank, expert, rows_NH)

    monkeypatch.setattr(ExpertBank, "run", watch)
    return rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_tokens", [1, 4, 13])
def test_only_experts_that_have_tokens_run_and_each_once(seen, name, num_tokens):
    for member in torch_members(name):
        for width in (None, 16):
            seen.clear()
            windows(member, PROMPT, [num_tokens], width)
            ran = collections.Counter((bank, expert) for bank, expert, _ in seen)
            assert set(ran.values()) == {1}
            assert len(ran) == sum(member.unique_experts)
            if width is not None:
                assert {rows for *_, rows in seen} == {width}
            elif num_tokens == 13:  # gathered: an expert sees its own tokens
                assert sum(rows for *_, rows in seen) == 13 * 2 * member.experts.experts_per_token


def test_a_batch_in_exact_mode_runs_experts_on_blocks_of_the_windows_width(seen):
    for member in torch_members("mixtral"):
        seen.clear()
        memory = member.new_memory(3, 64, 64)
        member.forward(memory, [list(PROMPT[:8]), list(PROMPT[4:12]), [5]], 8)
        assert {rows for *_, rows in seen} == {8}
        blocks = [-(-count // 8) for load in member.dispatch.tokens_per_expert for count in load]
        assert len(seen) == sum(blocks)
        assert max(blocks) > 1


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_rows_are_the_same_bits_in_exact_mode_whatever_the_windows(name):
    """In bf16, packed: one token at a time or several, here or there in the window."""
    tokens = tuple(torch.randint(0, 61, (48,), generator=torch.manual_seed(1)).tolist())
    for member in members(name, torch.bfloat16, hidden_size=64, head_dim=16):
        expected, _ = windows(member, tokens, [1] * 48, 8)
        for sizes in ([8] * 6, [3, 5] * 6, [1, 7, 2, 6] * 3, [6] * 8):
            assert torch.equal(windows(member, tokens, sizes, 8)[0], expected)


def pool_of(name, dtype, form="compiled"):
    """Prompt lookup and a noisy copy, itself a mixture, before the target."""
    target = build(name, 2)
    drafter = perturbed(target, 0.05).to(dtype)
    return ModelPool(
        [
            NGramMember(),
            ModelMember("draft", drafter, **FORMS[form]),
            ModelMember("target", target.to(dtype), **FORMS[form]),
        ],
        k_values=range(1, 7),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_plans_give_the_tokens_of_plain_decoding(name, dtype):
    for form in FORMS:
        pool = pool_of(name, dtype, form)
        request = DecodeRequest(PROMPT, 48)
        plain, _ = decode(pool, [request])
        for seed in range(3):
            state, results = decode(pool, [request], random_plans(pool, seed))
            assert state.output() == plain.output()
            assert sum(result.num_accepted for result in results) > 0
            if dtype == torch.bfloat16:
                layers = [each.memories["target"].layers for each in (state, plain)]
                held = zip(*layers, strict=True)
                count = len(PROMPT) + 47
                for ours, theirs in held:
                    assert torch.equal(ours.keys[:, :, :count], theirs.keys[:, :, :count])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("form", ["compiled", "fused"])
def test_ragged_batches_are_lossless(name, exact, form):
    pool = pool_of(name, torch.float32, form)
    batch = [DecodeRequest(PROMPT[:n], budget) for n, budget in ((1, 30), (13, 9), (5, 20))]
    expected = [decode(pool, [request], exact=exact)[0].output() for request in batch]
    for seed in range(2):
        state, _ = decode(pool, batch, random_plans(pool, seed), exact=exact)
        assert [state.output(row) for row in range(3)] == expected


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_costs_carry_unique_experts_of_mixtures_alone(exact, form):
    pool = pool_of("mixtral", torch.float32, form)
    clock = CountingClock()
    state = start(pool, [DecodeRequest(PROMPT, 30)], clock, exact=exact)
    assert decode_step(pool, state, pool.plan("none"), clock).forwards[-1].unique_experts == (2, 2)
    result = decode_step(pool, state, pool.plan("draft@4"), clock)
    assert all(len(cost.unique_experts) == 2 for cost in result.forwards)
    assert all(2 <= count <= 6 for count in result.forwards[-1].unique_experts)
    assert max(result.forwards[-1].unique_experts) > 2


def test_a_window_is_forgotten_when_its_forward_fails():
    member = members("mixtral")[0]
    with (
        pytest.raises(RuntimeError, match="broken"),
        member.window([1], 8, is_fixed=True),
    ):
        raise RuntimeError("broken")
    dispatch = member.dispatch
    assert dispatch.real_rows is dispatch.is_pad_N is dispatch.block_rows is None


@pytest.mark.parametrize("form", ["hooked", "fused"])
def test_a_model_whose_experts_cannot_be_set_is_refused(form, monkeypatch):
    """Its own implementation would find the experts' weights packed away, or count no loads."""
    model = build("mixtral")
    monkeypatch.setattr(type(model), "_can_set_experts_implementation", lambda _: False)
    with pytest.raises(ValueError, match="experts of a MixtralForCausalLM must go through"):
        ModelMember("target", model, **FORMS[form])


def test_expected_unique_experts_are_balls_and_bins():
    shape = ExpertShape(8, 2)
    assert shape.expected_unique(0) == 0
    assert shape.expected_unique(1) == pytest.approx(2)
    assert shape.expected_unique(1000) == pytest.approx(8)
    generator = torch.manual_seed(0)
    drawn = [
        {i for _ in range(4) for i in torch.randperm(8, generator=generator)[:2].tolist()}
        for _ in range(4000)
    ]
    mean = sum(map(len, drawn)) / len(drawn)
    assert shape.expected_unique(4) == pytest.approx(mean, abs=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_on_cuda_experts_give_the_same_and_nothing_waits_for_the_device(name):
    expected = build(name, dtype=torch.bfloat16)(torch.tensor([PROMPT])).logits[0].float()
    model = build(name, dtype=torch.bfloat16).cuda()
    member = ModelMember("target", model, lean=False)
    logits, loads = windows(member, PROMPT, [5, 8], 16)
    torch.testing.assert_close(logits.float().cpu(), expected, atol=0.2, rtol=0.1)
    assert [sum(load) for load in loads[0]] == [5 * member.experts.experts_per_token] * 2
    experts = next(module for module in model.modules() if hasattr(module, "dispatch"))
    rows = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)
    chosen, weights = torch.randint(0, 6, (16, 2)).cuda(), torch.rand(16, 2).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(rows, chosen, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_of_no_speculation_visits_a_single_tokens_experts(form):
    pool = pool_of("olmoe", torch.float32, form)
    _, results = decode(pool, [DecodeRequest(PROMPT, 10)], lambda state: Plan(("target",), 0))
    assert {result.forwards[-1].unique_experts for result in results} == {(3, 3)}
