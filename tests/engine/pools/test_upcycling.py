"""A dense model upcycled: the same function, copies of its own, a router that routes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specgym.engine.members.model import ModelMember
from specgym.engine.pools.loading import load_pool, parse_pool
from specgym.engine.pools.sources import is_local, load_source
from specgym.engine.pools.upcycling import Upcycling, parse_upcycling, upcycle
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_tokenizer
from specgym.engine.types import DecodeRequest

PROMPT = tuple(range(3, 43))
FEW_ROWS = 8
SHAPES = ((8, 2), (2, 1), (16, 4), (3, 3))


@pytest.fixture
def folder(tmp_path):
    """A dense checkpoint with a tokenizer."""
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("num_experts", "per_token"), SHAPES)
@pytest.mark.parametrize("lean", [True, False])
def test_it_computes_the_dense_models_function(num_experts, per_token, lean):
    dense = tiny_llama(4)
    expected = dense(torch.tensor([PROMPT])).logits
    mixture = upcycle(dense, Upcycling(num_experts, per_token, "tiny"))
    torch.testing.assert_close(mixture(torch.tensor([PROMPT])).logits, expected)
    member = ModelMember("target", mixture, lean=lean)
    logits = member.forward(member.new_memory(1, 64), [PROMPT])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    assert (member.compiled is not None) == lean


def test_in_bf16_the_most_likely_tokens_are_the_dense_models():
    dense = tiny_llama(4, dtype=torch.bfloat16)
    member = ModelMember("target", upcycle(dense, Upcycling(8, 2, "tiny")))
    plain = ModelMember("dense", dense)
    ours, theirs = (m.forward(m.new_memory(1, 64), [PROMPT])[0] for m in (member, plain))
    assert torch.equal(ours.argmax(dim=-1), theirs.argmax(dim=-1))


def test_experts_are_physical_copies_and_the_dense_model_is_left_alone():
    dense = tiny_llama(4)
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    experts = upcycle(dense, Upcycling(8, 2, "tiny")).model.layers[0].mlp.experts
    assert experts.down_proj.shape[0] == 8
    assert experts.down_proj.is_contiguous()
    assert experts.gate_up_proj.is_contiguous()
    experts.down_proj.data[3].zero_()
    assert experts.down_proj.data[4].any()
    for name, value in dense.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_router_is_seeded_and_spreads_tokens_over_the_experts():
    routers = [
        upcycle(tiny_llama(4), Upcycling(8, 2, "tiny")).model.layers[1].mlp.gate.weight
        for _ in range(2)
    ]
    assert torch.equal(*routers)
    member = ModelMember("target", upcycle(tiny_llama(4), Upcycling(8, 2, "tiny")))
    member.forward(member.new_memory(1, 64), [PROMPT])
    assert min(member.unique_experts) >= 5


def test_tied_embeddings_stay_tied():
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    dense = LlamaForCausalLM(config).eval()
    mixture = upcycle(dense, Upcycling(4, 2, "tiny"))
    assert mixture.lm_head.weight is mixture.model.embed_tokens.weight
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(mixture(tokens).logits, dense(tokens).logits)


def test_only_a_llama_without_biases_can_be_upcycled():
    biased = LlamaForCausalLM(LlamaConfig(**tiny_llama().config.to_dict() | {"mlp_bias": True}))
    mixture = upcycle(tiny_llama(), Upcycling(4, 2, "tiny"))
    for model in (biased, mixture):
        with pytest.raises(ValueError, match="only a Llama without biases"):
            upcycle(model, Upcycling(4, 2, "tiny"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("upcycled:8:2", "EXPERTS:TOP_K:SOURCE"),
        ("upcycled:8:two:x", "EXPERTS:TOP_K:SOURCE"),
        ("upcycled:17:2:x", "experts: must be in 2..16; got 17"),
        ("upcycled:1:1:x", "experts: must be in 2..16; got 1"),
        ("upcycled:8:5:x", "top-k: must be in 1..4 with 8 experts; got 5"),
        ("upcycled:3:4:x", "top-k: must be in 1..3 with 3 experts; got 4"),
        ("upcycled:8:0:x", "top-k: must be in 1..4"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        parse_upcycling(source)


def test_sources_and_recipes_are_two_ways_to_write_the_same():
    recipe = Upcycling(16, 4, "some:where/else")
    assert parse_upcycling(recipe.source) == recipe
    assert parse_upcycling("smollm2-135m") is None


def test_a_pool_spec_says_how_many_experts():
    for spec, target in (
        ("smollm2-moe", "upcycled:8:2:smollm2-135m"),
        ("smollm2-moe:top-k=4", "upcycled:8:4:smollm2-135m"),
        ("smollm2-moe:experts=16:top-k=1", "upcycled:16:1:smollm2-135m"),
    ):
        sources = parse_pool(spec)
        assert sources["target"] == target
        assert sources.keys() == {"eagle", "small", "mid", "target"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smollm2-moe:expert=16", "takes experts=NUMBER and top-k=NUMBER"),
        ("smollm2-moe:experts=many", "takes experts=NUMBER and top-k=NUMBER"),
        ("smollm2-moe:experts", "takes experts=NUMBER and top-k=NUMBER"),
        ("smollm2-moe:experts=99", "experts: must be in 2..16"),
        ("smollm2-moe:top-k=9", "top-k: must be in 1..4"),
    ],
)
def test_a_pool_spec_that_makes_no_sense_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_pool(spec)


def test_a_folder_upcycled_by_a_pool_says_so_everywhere(folder):
    pool = load_pool(f"target=upcycled:4:2:{folder}", dtype=torch.float32)
    assert pool.name.endswith("(upcycled: 4 experts, top-2)")
    assert pool.model("target").architecture == "upcycled MixtralForCausalLM"
    assert pool.chains == (("ngram", "target"),)
    loaded = load_source(f"upcycled:4:2:{folder}", dtype=torch.float32, device="cpu")
    assert loaded.origin.endswith(", upcycled: 4 experts, top-2")
    assert pool.fingerprints == {"target": loaded.fingerprint}
    other = load_source(f"upcycled:4:1:{folder}", dtype=torch.float32, device="cpu")
    assert other.model.config.num_experts_per_tok == 1
    assert is_local(f"upcycled:4:2:{folder}")
    assert not is_local("upcycled:4:2:org/name")
    dense = load_source(str(folder), dtype=torch.float32, device="cpu")
    assert len({loaded.fingerprint, dense.fingerprint}) == 2


def test_a_saved_mixture_keeps_its_label(tmp_path):
    upcycle(tiny_llama(4), Upcycling(4, 2, "tiny")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.upcycled == "upcycled: 4 experts, top-2"
    assert ModelMember("target", model).architecture == "upcycled MixtralForCausalLM"


def test_the_dense_model_is_a_member_only_where_a_chain_names_it(folder):
    """It computes the target's function: whatever it accepts, the target accepts."""
    spec = f"target=upcycled:4:2:{folder}"
    chains = [("ngram", "target"), ("ngram", "dense", "target")]
    pool = load_pool(spec, chains=chains, dtype=torch.float32)
    assert list(pool.members) == ["ngram", "dense", "target"]
    assert pool.model("dense").experts is None
    _, results = decode(pool, [DecodeRequest(PROMPT, 40)], random_plans(pool, 0))
    staged = [result for result in results if result.executed.num_verifiers == 2]
    assert staged
    for result in staged[:-1]:
        assert result.accepted_per_level[1] == result.proposed_per_level[1]
    assert "dense" not in load_pool(spec, dtype=torch.float32).members


@pytest.fixture(scope="module")
def real_pool():
    return load_pool("smollm2-moe")


@pytest.mark.wheel
def test_the_real_mixture_is_lossless_and_labelled(real_pool):
    assert real_pool.name == "smollm2-moe (upcycled: 8 experts, top-2)"
    assert real_pool.model("target").num_bytes > 1.3e9
    text = "Repeat exactly: red green blue red green blue red green blue."
    request = DecodeRequest(real_pool.encode(text), 32)
    plain, _ = decode(real_pool, [request])
    for seed in range(2):
        state, results = decode(real_pool, [request], random_plans(real_pool, seed))
        assert state.output() == plain.output()
        verified = [r.forwards[-1] for r in results if r.executed.k]
        assert all(2 <= count <= 8 for cost in verified for count in cost.unique_experts)


@pytest.mark.wheel
def test_the_real_mixture_writes_what_the_dense_model_writes(real_pool):
    dense = load_pool("smollm2")
    request = DecodeRequest(dense.encode("What is 17 + 25? Show the steps."), 32)
    assert decode(real_pool, [request])[0].output() == decode(dense, [request])[0].output()
    tokens = list(request.prompt)
    best = []
    for member in (real_pool.model("target"), dense.model("target")):
        memory = member.new_memory(1, 128)
        windows = [tokens[first : first + FEW_ROWS] for first in range(0, len(tokens), FEW_ROWS)]
        logits = [member.forward(memory, [window])[0] for window in windows]
        best.append(torch.cat(logits).argmax(dim=-1))
    assert torch.equal(*best)
