"""Recipes: what the papers' pools weigh, and that tiny models of the same shapes run in them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specgym.engine.forward.eagle import EagleHead, EagleShape
from specgym.engine.members.eagle import EagleMember
from specgym.engine.pools.loading import load_pool, parse_pool
from specgym.engine.pools.recipes import RECIPES
from specgym.engine.testing import decode, random_plans, tiny_tokenizer
from specgym.engine.types import DecodeRequest, Plan

BUDGET, PADS = 24, 30
SHRUNK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
}
PHI_ROPE = {  # what Phi-3.5-MoE publishes, with as many factors as a tiny head has
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [4.0, 3.0, 2.0, 1.5],
    "short_mscale": 1.24,
    "long_mscale": 1.24,
    "original_max_position_embeddings": 32,
}
PUBLISHED = {  # billions of parameters and of active ones: model cards and papers
    "llama-2": {"small": 0.068, "mid": 1.10, "target": 6.74},
    "llama-3": {"small": 1.24, "mid": 3.21, "target": 8.03},
    "qwen3": {"small": 0.596, "mid": 4.02, "target": (30.5, 3.3)},
    "mixtral": {"eagle": 0.28, "target": (46.7, 12.9)},
    "phi-3.5-moe": {"target": (41.9, 6.6)},
    "olmoe": {"target": (6.92, 1.3)},
    "deepseek-moe": {"target": (16.4, 2.8)},
    "qwen1.5-moe": {"target": (14.3, 2.7)},
}
MEMBERS = [(name, member) for name, recipe in RECIPES.items() for member in recipe.members]


def shrunk(member, name):
    """The member's own configuration with small numbers; what shapes it is as published."""
    own = {key: value for key, value in SHRUNK.items() if key in member.sizes}
    is_grouped = member.sizes["num_key_value_heads"] < member.sizes["num_attention_heads"]
    own["num_key_value_heads"] = 2 if is_grouped else 4
    own["vocab_size"] = 98 + (PADS if name == "small" else 0)  # real drafters are padded unlike
    if "num_experts_per_tok" in member.sizes:
        own["num_experts_per_tok"] = min(member.sizes["num_experts_per_tok"], 3)
    if member.architecture == "Phimoe":
        own["rope_parameters"] = PHI_ROPE
    return member.config(own | {"initializer_range": 0.2})


def write_head(folder, config, seed=1):
    """A head in EAGLE's first published layout, with the keys its config.json has."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = EagleHead(EagleShape(config, (), True, config.vocab_size, config.hidden_size))
        weights = {name: w.detach() for name, w in head.state_dict().items()}
        weights["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    values = config.to_diff_dict() | {"model_type": "mixtral", "rope_scaling": None}
    values |= {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.32.0.dev0"}
    (folder / "config.json").write_text(json.dumps(values))


def write_model(folder, config, seed):
    """A random model with its tokenizer, in the layout in which checkpoints are published."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = []
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module", params=RECIPES)
def saved(request, tmp_path_factory):
    """A recipe, and its spec when its weights are tiny local ones."""
    recipe, root = RECIPES[request.param], tmp_path_factory.mktemp("recipe")
    for seed, (name, member) in enumerate(recipe.members.items()):
        if member.kind == "eagle":
            write_head(root / name, shrunk(member, name))
        else:
            write_model(root / name, shrunk(member, name), seed)
    changes = ",".join(f"{name}={root / name}" for name in recipe.members)
    return recipe, f"{recipe.name}:{changes}"


@pytest.fixture(scope="module")
def built(saved):
    """A recipe, and the pool it gives in fp32."""
    recipe, spec = saved
    return recipe, load_pool(spec, dtype=torch.float32)


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_parameters_computed_from_the_configuration_are_the_published_ones(name, member):
    published = PUBLISHED[name][member]
    total, active = published if isinstance(published, tuple) else (published, published)
    size = RECIPES[name].members[member].size()
    assert size.num_parameters == pytest.approx(1e9 * total, rel=0.02)
    assert size.num_active == pytest.approx(1e9 * active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "member", "gigabytes"),
    [
        ("llama-2", "small", 0.272),  # float32
        ("qwen3", "small", 1.503),  # its file holds the tied head
        ("qwen3", "mid", 8.045),
        ("deepseek-moe", "target", 32.77),
    ],
)
def test_bytes_to_download_are_those_of_the_published_files(name, member, gigabytes):
    size = RECIPES[name].members[member].size()
    assert size.num_download_bytes == pytest.approx(1e9 * gigabytes, rel=0.002)


def test_the_members_of_a_recipe_share_a_padded_vocabulary():
    for recipe in RECIPES.values():
        assert len({member.sizes["vocab_size"] for member in recipe.members.values()}) == 1
        assert list(recipe.members)[-1] == "target"


def test_a_recipes_pool_has_its_members_architectures_and_chains(built):
    recipe, pool = built
    assert pool.chains == recipe.chains
    for name, member in recipe.members.items():
        loaded = pool.members[name]
        if member.kind == "eagle":
            assert isinstance(loaded, EagleMember)
        else:
            assert loaded.architecture == f"{member.architecture}ForCausalLM"
            assert (loaded.experts is not None) == ("num_experts_per_tok" in member.sizes)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_every_recipe_decodes_losslessly_with_any_plans(built, exact):
    recipe, pool = built
    requests = [DecodeRequest(pool.encode(text), BUDGET) for text in ("the cat", "a b a b a b")]
    plain = [decode(pool, [request], exact=exact)[0].output() for request in requests]
    assert all(len(output) == BUDGET for output in plain)
    for seed in range(3):
        state, _ = decode(pool, requests, random_plans(pool, seed), exact=exact)
        assert [state.output(row) for row in range(2)] == plain
    for chain in recipe.chains:
        plan = Plan(chain, 3)
        state, results = decode(pool, requests[1:], lambda _: plan, exact=exact)  # noqa: B023
        assert state.output() == plain[1]
        assert any(result.executed == plan for result in results)


def test_every_recipe_decodes_bit_for_bit_in_bf16(saved):
    """With packed weights, where the CPU has them; the experts are run by our dispatch."""
    recipe, spec = saved
    pool = load_pool(spec, dtype=torch.bfloat16)
    request = DecodeRequest(pool.encode("a b a b a b"), BUDGET)
    plain, results = decode(pool, [request])
    for seed in range(3):
        state, _ = decode(pool, [request], random_plans(pool, seed))
        assert state.output() == plain.output()
    if "num_experts_per_tok" in recipe.members["target"].sizes:
        visited = results[-1].forwards[-1].unique_experts
        assert set(visited) == {pool.model("target").experts.experts_per_token}


def test_plain_decoding_of_a_recipes_target_is_transformers_greedy(built):
    recipe, pool = built
    config = shrunk(recipe.members["target"], "target")
    with torch.random.fork_rng():
        torch.manual_seed(len(recipe.members) - 1)
        model = AutoModelForCausalLM.from_config(config).eval()
    prompt = pool.encode("the cat")
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=BUDGET,
        eos_token_id=None,
        pad_token_id=0,
    )
    state, _ = decode(pool, [DecodeRequest(prompt, BUDGET)], exact=False)
    assert state.output() == output[0, len(prompt) :].tolist()


def test_a_recipes_sources_may_be_local_one_by_one():
    assert parse_pool("mixtral")["target"] == "mistralai/Mixtral-8x7B-Instruct-v0.1"
    sources = parse_pool("mixtral:target=here/large")
    assert sources == {"eagle": "yuhuili/EAGLE-mixtral-instruct-8x7B", "target": "here/large"}


@pytest.mark.parametrize("changes", ["small=x", "target=", "target"])
def test_a_change_that_fits_no_member_is_refused(changes):
    with pytest.raises(ValueError, match=r'takes eagle=PATH, target=PATH, like "mixtral:target=PA'):
        parse_pool(f"mixtral:{changes}")


# DeepSeek-MoE, whose checkpoint asks for remote code


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A tiny checkpoint with the files of the published one, but for the code."""
    folder = tmp_path_factory.mktemp("deepseek")
    write_model(folder, shrunk(RECIPES["deepseek-moe"].members["target"], "target"), 0)
    values = {
        "architectures": ["DeepseekForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekConfig",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "rope_scaling": None,
        "rope_theta": 10000,
        "seq_aux": True,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
    }
    file = folder / "config.json"
    published = json.loads(file.read_text()) | values
    for derived in ("mlp_layer_types", "rope_parameters", "topk_method", "head_dim"):
        published.pop(derived, None)
    file.write_text(json.dumps(published))
    return folder


def test_a_deepseek_checkpoint_loads_as_published_without_remote_code(deepseek):
    names = set(load_file(deepseek / "model.safetensors"))
    layer = "model.layers.1.mlp"
    assert f"{layer}.experts.7.down_proj.weight" in names
    assert f"{layer}.shared_experts.up_proj.weight" in names
    assert f"{layer}.gate.weight" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    pool = load_pool(f"target={deepseek}", dtype=torch.float32)
    assert pool.model("target").experts.num_shared == 2
    assert pool.model("target").architecture == "DeepseekForCausalLM"


def test_a_deepseek_layer_is_the_papers_equation(deepseek):
    """Shared experts plus the top-k of the softmax, unnormalised: DeepSeekMoE, Eq. 9 to 11."""
    weights = load_file(deepseek / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(deepseek, dtype=torch.float32)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    def expert(name, x):
        w = {part: weights[f"model.layers.1.mlp.{name}.{part}_proj.weight"].float()
             for part in ("gate", "up", "down")}  # fmt: skip
        return (torch.nn.functional.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T

    scores = (x @ weights["model.layers.1.mlp.gate.weight"].float().T).softmax(-1)
    expected = expert("shared_experts", x)
    for row in range(5):
        for index in scores[row].topk(3).indices.tolist():
            expected[row] += scores[row, index] * expert(f"experts.{index}", x[row])
    actual = model.model.layers[1].mlp(x[None])[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"), [("norm_topk_prob", True), ("scoring_func", "sigmoid")]
)
def test_a_deepseek_variant_that_would_be_computed_wrongly_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: must be"):
        RECIPES["deepseek-moe"].members["target"].config({field: value})
