"""What is refused at build with its reason, and what keeps transformers' own forward."""

import pytest
import torch
import transformers
from torch import nn

from specgym.engine.compiled.llama import why_not_compiled
from specgym.engine.forward.lean_families import is_lean
from specgym.engine.forward.linears import replace_linears
from specgym.engine.members.model import ModelMember
from specgym.engine.pools.checkpoints import load_folder
from specgym.engine.pools.loading import load_pool
from specgym.engine.testing import decode, random_plans, tiny_llama
from specgym.engine.types import DecodeRequest

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS |= {"pad_token_id": 0}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
STATES = {
    "mamba": ("MambaConfig", SIZES),
    "mamba2": ("Mamba2Config", SIZES | {"num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "falcon-mamba": ("FalconMambaConfig", SIZES),
    "rwkv": ("RwkvConfig", SIZES | {"attention_hidden_size": 32}),
    "xlstm": ("xLSTMConfig", SIZES | {"num_heads": 2}),
    "falcon-h1": (
        "FalconH1Config",
        HEADS | MAMBA2 | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "head_dim": 8},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        HEADS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "jamba": (
        "JambaConfig",
        HEADS | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "bamba": ("BambaConfig", HEADS | MAMBA2),
    "zamba2": (
        "Zamba2Config",
        HEADS | {"n_mamba_heads": 8, "mamba_ngroups": 1, "layer_types": ["mamba", "hybrid"]},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        HEADS | MAMBA2 | {"layer_types": ["mamba", "attention"]},
    ),
    "recurrent-gemma": ("RecurrentGemmaConfig", HEADS | {"num_hidden_layers": 3}),
    "lfm2-convolution": ("Lfm2Config", HEADS | {"layer_types": ["conv", "full_attention"]}),
    "minimax": ("MiniMaxConfig", HEADS | {"num_local_experts": 2}),
    "kimi-linear": ("KimiLinearConfig", HEADS),
    "olmo-hybrid": ("OlmoHybridConfig", HEADS),
}
LLAMA4 = HEADS | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
LOCAL = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
OTHERS = {
    "llama4-chunked": ("Llama4TextConfig", LLAMA4, r"no mask \(chunked_attention\)"),
    "openai-gpt": (
        "OpenAIGPTConfig",
        {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4},
        "keeps no keys and values",
    ),
    "gpt-neo-local": (
        "GPTNeoConfig",
        LOCAL | {"attention_types": [[["global", "local"], 1]]},
        "local layers by cache slot",
    ),
    "bloom": ("BloomConfig", {"vocab_size": 61, "hidden_size": 32, "n_layer": 1}, "ALiBi"),
    "mpt": ("MptConfig", {"vocab_size": 61, "d_model": 32, "n_layers": 1, "n_heads": 4}, "ALiBi"),
    "falcon-alibi": ("FalconConfig", SIZES | {"alibi": True, "num_attention_heads": 4}, "ALiBi"),
    "dynamic-rope": (
        "LlamaConfig",
        HEADS | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "'dynamic' change with the length",
    ),
}
REFUSED = {
    name: (config, options, r"memory cannot be rolled back when drafted tokens are rejected \(\w")
    for name, (config, options) in STATES.items()
} | OTHERS
PROMPT, BUDGET = (17, 3, 44, 8, 25, 17, 3, 51, 30), 24


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_rollback_would_corrupt_are_refused_at_build(name):
    config, options, reason = REFUSED[name]
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**options)
        )
    with pytest.raises(ValueError, match=f"member 'small': .*{reason}.*; (use|set) "):
        ModelMember("small", model.eval())


class Int8Weight(torch.Tensor):
    """A weight of another class than torch's own, as quantised ones are."""

    @classmethod
    def of(cls, weight):
        """The weight, rounded to 8 bits by row."""
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return nn.Parameter(((weight / scale).round() * scale).as_subclass(cls), False)


def quantised_llama(dtype=torch.float32):
    model = tiny_llama(0, dtype=dtype)
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.weight = Int8Weight.of(module.weight)
    return model


def test_linears_over_quantised_weights_keep_transformers_forward():
    model = quantised_llama()
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert not is_lean(model)
    assert "quantized" in why_not_compiled(model)
    tokens = torch.tensor([PROMPT])
    expected = model(tokens).logits
    member = ModelMember("target", model)
    assert member.lean is None
    assert member.compiled is None
    logits = member.forward(member.new_memory(1, 64), [PROMPT])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_quantised_weights_are_never_packed():
    model = quantised_llama(torch.bfloat16)
    assert replace_linears(model) in (0, 1)  # the head is not quantised
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, Int8Weight)


@torch.compiler.set_stance("force_eager")  # its activations' rounding is compiled, for a minute
def test_a_checkpoint_that_transformers_quantises_decodes_losslessly(tmp_path):
    """BitNet's ternary linears, the one scheme that needs no further package."""
    published = tiny_llama(0)
    published.config.quantization_config = transformers.BitNetQuantConfig(
        linear_class="autobitlinear", quantization_mode="online"
    )
    published.generation_config.eos_token_id = None
    published.save_pretrained(tmp_path)
    model = load_folder(tmp_path, torch.float32, "cpu")[0]
    kind = type(model.model.layers[0].mlp.up_proj)
    assert kind is not nn.Linear
    output = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=BUDGET,
        pad_token_id=0,
    )
    pool = load_pool(f"target={tmp_path}", dtype=torch.float32)
    target = pool.model("target")
    assert target.lean is None
    assert target.compiled is None
    assert type(target.model.model.layers[0].mlp.up_proj) is kind
    for exact in (True, False):
        for seed in range(2):
            request = DecodeRequest(PROMPT, BUDGET)
            state, _ = decode(pool, [request], random_plans(pool, seed), exact=exact)
            assert state.output() == output[0, len(PROMPT) :].tolist()
