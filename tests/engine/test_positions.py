"""Where tokens stand: learned positions, LongRoPE's factors, one position vector in all layers."""

import torch
import transformers

from specgym.engine.forward.cache_layers import MaskedLayer
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, random_plans, tiny_llama
from specgym.engine.types import DecodeRequest, Plan

VOCAB, BUDGET = 61, 24
PROMPT = (17, 3, 44, 8, 25, 17, 3, 51, 30)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
}
QWEN3 = COMMON | {"head_dim": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build(config_name, options):
    """A random model in fp32."""
    config = getattr(transformers, config_name)(**options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.float().eval().requires_grad_(False)


def pool_of(model):
    """Prompt lookup, a perturbed twin and the model, all driven through its own forward."""
    twin = perturbed(model, 0.1, 1)
    return ModelPool(
        [
            NGramMember(),
            ModelMember("draft", twin, lean=False),
            ModelMember("target", model, lean=False),
        ]
    )


def test_learned_positions_decode_up_to_the_last_one():
    """Pads of the last windows count past the table of positions; they must not be looked up."""
    pool = pool_of(build("GPT2Config", GPT2))
    prompt = tuple(range(50))
    for exact in (True, False):
        expected, _ = decode(pool, [DecodeRequest(prompt, 99)], exact=exact)
        assert len(expected.output()) == 14
        assert expected.finish_reasons == ["context"]
        rows = [DecodeRequest(prompt, 99), DecodeRequest((5,), 20)]
        state, _ = decode(pool, rows, random_plans(pool, 0), exact=exact)
        assert state.output(0) == expected.output()


def test_longrope_factors_are_frozen_per_request():
    """Windows that end beyond the border, or do not, must not turn tokens another way."""
    options = COMMON | {"max_position_embeddings": 256, "rope_parameters": LONGROPE}
    model = build("Phi3Config", options | {"original_max_position_embeddings": 64})
    pool = pool_of(model)
    for prompt, budget in ((PROMPT, 20), (PROMPT * 6, 20)):
        request = DecodeRequest(prompt, budget)
        for exact in (True, False):
            plain, _ = decode(pool, [request], exact=exact)
            for seed in range(3):
                state, _ = decode(pool, [request], random_plans(pool, seed), exact=exact)
                assert state.output() == plain.output()


def test_longrope_uses_the_factors_of_the_requests_length():
    options = COMMON | {"max_position_embeddings": 256, "rope_parameters": LONGROPE}
    options |= {"original_max_position_embeddings": 64}
    member = ModelMember("target", build("Phi3Config", options))
    reference = build("Phi3Config", options)
    tokens = tuple(i * 7 % VOCAB for i in range(80))
    for num_tokens, num_slots in ((40, 64), (80, 128), (30, 64)):
        memory = member.new_memory(1, num_slots)
        logits = member.forward(memory, [tokens[:num_tokens]])
        expected = reference(torch.tensor([tokens[:num_tokens]])).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_every_layer_of_a_forward_sees_one_position_vector_and_one_write_position(monkeypatch):
    model, seen, used = tiny_llama(num_layers=3), [], []
    pool = pool_of(model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]),
            with_kwargs=True,
        )
    state, _ = decode(pool, [DecodeRequest(PROMPT, 4), DecodeRequest(PROMPT[5:], 9)])
    memory = state.memories["target"]
    update = MaskedLayer.update

    def watched(self, *states, **options):
        used.append(self.owner.num_used)
        return update(self, *states, **options)

    monkeypatch.setattr(MaskedLayer, "update", watched)
    seen.clear()
    memory.keep([6, 4])
    pool.model("target").forward(memory, [[1, 2, 3], [4]])
    assert used == [6, 6, 6]
    assert len(seen) == 3
    wanted = model.model.rotary_emb(torch.zeros(1, 1, 8), torch.tensor([[6, 7, 8], [4, 5, 6]]))
    for cos, sin in seen:
        assert torch.equal(cos, wanted[0])
        assert torch.equal(sin, wanted[1])


def test_a_plan_over_a_mixed_architecture_chain_is_lossless():
    """Drafter, middle and target of three families with one vocabulary."""
    members = [
        ModelMember("draft", build("GPT2Config", GPT2)),
        ModelMember("mid", perturbed(build("Qwen3Config", QWEN3), 0.05, 1)),
        ModelMember("target", build("Qwen3Config", QWEN3)),
    ]
    pool = ModelPool(members)
    request = DecodeRequest(PROMPT, BUDGET)
    plain, _ = decode(pool, [request])
    state, results = decode(pool, [request], lambda state: Plan(("draft", "mid", "target"), 3))
    assert state.output() == plain.output()
    assert any(result.num_accepted for result in results)
