"""Drafters beside their target: bound to its weights, the shipped ones too."""

import json

import pytest
import torch

from specgym.engine.forward.eagle import save_eagle
from specgym.engine.members.model import ModelMember
from specgym.engine.pools.checkpoints import hash_weights
from specgym.engine.pools.drafters import PREFIX, SHIPPED, drafter_folder
from specgym.engine.pools.loading import BUILT_IN_CHAINS, load_pool
from specgym.engine.pools.students import save_student
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_tokenizer
from specgym.engine.timing import CountingClock
from specgym.engine.training.eagle import init_eagle
from specgym.engine.training.students import make_mid, make_small
from specgym.engine.types import DecodeRequest

LAYERS, RANK, TAPS = [0, 2, 5], 3, (1, 3, 5)
TARGET_FINGERPRINT = "a6f067acf0190734b513cdd38dd382c689644153d8cb03deecef0d78108c75ab"
LIMIT = 64 * 2**20  # bytes of all shipped drafters


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target on disk, and untrained drafters that were made for it."""
    home, tokenizer = tmp_path_factory.mktemp("drafters"), tiny_tokenizer()
    target = tiny_llama(0, num_layers=6, vocab_size=len(tokenizer)).to(torch.bfloat16)
    target.save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    bound = {"target_fingerprint": hash_weights(target), "target_origin": "tiny"}
    ids = torch.arange(0, len(tokenizer), 2)
    small, mid = make_small(target, LAYERS), make_mid(target, LAYERS, RANK)
    save_student(home / "small", small, ids, LAYERS, **bound)
    save_student(home / "mid", mid, ids, LAYERS, rank=RANK, **bound)
    eagle = init_eagle(target, TAPS, len(ids))
    save_eagle(home / "eagle", eagle, ids, bound["target_fingerprint"])
    return home


def spec_of(folders, target="target={}/target", names=("eagle", "small", "mid")):
    return ",".join([*(f"{n}={folders}/{n}" for n in names), target.format(folders)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["target={}/target", "target=upcycled:4:2:{}/target"])
def test_every_chain_is_lossless(folders, target, dtype):
    pool = load_pool(spec_of(folders, target), chains=BUILT_IN_CHAINS, dtype=dtype)
    assert pool.window == 8
    request = DecodeRequest(pool.encode("hello hello"), 40)
    plain, _ = decode(pool, [request])
    used = set()
    for seed in range(3):
        state, results = decode(pool, [request], random_plans(pool, seed))
        assert state.output() == plain.output()
        used |= {result.executed.chain for result in results}
    assert used == {*BUILT_IN_CHAINS, ("target",)}


def test_a_trimmed_head_proposes_and_accepts_its_own_tokens_only(folders):
    pool = load_pool(spec_of(folders), chains=BUILT_IN_CHAINS, dtype=torch.float32)
    assert pool.model("small").draft_ids.tolist() == list(
        range(0, pool.model("target").vocab_size, 2)
    )
    memory = pool.model("mid").new_memory(1, 64)
    logits = pool.model("mid").forward(memory, [[4, 5, 6]])
    assert logits.shape[-1] == pool.model("target").vocab_size
    assert logits[..., 1::2].isinf().all()
    assert logits[..., ::2].isfinite().all()


def test_what_is_shared_with_the_target_is_not_counted(folders):
    pool = load_pool(spec_of(folders), dtype=torch.float32)
    small, target = pool.model("small"), pool.model("target")
    layers = {name: m.num_parameters for name, m in (("small", small), ("target", target))}
    assert layers["small"] < layers["target"] / 2


def test_another_target_is_refused(folders, tmp_path):
    other = tiny_llama(1, num_layers=6, vocab_size=98)
    other.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for name in ("eagle", "small", "mid"):
        with pytest.raises(ValueError, match="was trained for the target with weights"):
            load_pool(f"{name}={folders}/{name},target={tmp_path}")


def test_a_head_past_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="goes up to token id 61"):
        ModelMember("small", tiny_llama(0), draft_ids=torch.tensor([1, 61]))


def test_a_mixture_costs_the_modelled_clock_its_active_experts_only(folders):
    members = [
        load_pool(f"target={source}", dtype=torch.float32).model("target")
        for source in (f"{folders}/target", f"upcycled:4:2:{folders}/target")
    ]
    dense, mixture = (member.clock_cost for member in members)
    assert dense < mixture < 1.6 * dense
    assert members[1].num_parameters > 1.5 * members[0].num_parameters
    clock = CountingClock()
    clock.charge(mixture, 1)
    assert clock.now() == pytest.approx(mixture)


def test_an_unknown_shipped_drafter_is_named():
    with pytest.raises(ValueError, match="no drafter 'shipped:other/eagle' is shipped; there are"):
        drafter_folder(PREFIX + "other/eagle")


def test_the_shipped_drafters_are_whole_and_small():
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LIMIT
    for name in ("eagle", "small", "mid"):
        folder = drafter_folder(f"{PREFIX}smollm2-135m/{name}")
        assert {path.name for path in folder.iterdir()} == {
            "config.json",
            "model.safetensors",
            "README.md",
        }
        values = json.loads((folder / "config.json").read_text())
        assert values["target_fingerprint"] == TARGET_FINGERPRINT
