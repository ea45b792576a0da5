"""Every constructor argument changes something that is recorded: none is taken and dropped."""

import inspect
import json

import numpy as np
import pytest
from transformers import GenerationConfig

from specgym.engine.testing import tiny_llama, tiny_tokenizer
from specgym.engine.timing import Baseline, CountingClock
from specgym.engine.types import SamplingParams
from specgym.envs import SpecDecodeEnv, decode
from specgym.envs.workloads import Request, Workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer, as a user would have it on disk."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_llama(vocab_size=98, max_position_embeddings=4096)
    model.generation_config = GenerationConfig()
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"mine-{n}", "prompt": "a b a b", "category": "mine"} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def recorded(make_env, play):
    """What an episode of one fixed plan records under these arguments."""

    def run(**changes):
        env = make_env(**changes)
        episode = play(env, env.action_names.index("ngram@1"), seed=0)
        return {
            "names": env.action_names,
            "ids": [info["request_id"] for info in episode.infos if info["finish_reason"]],
            "output": episode.infos[-1]["output"],
            "finish": episode.infos[-1]["finish_reason"],
            "rewards": episode.rewards,
            "utility": episode.column("utility"),
            "rows": {row["num_rows"] for info in episode.infos for row in info["forwards"]},
            "seconds": episode.column("iter_seconds"),
            "baseline": set(episode.column("baseline_seconds")),
            "render": env.render(),
        }

    return run


def slow_baseline():
    """A baseline that thinks it knows all lengths: nine seconds."""
    baseline = Baseline(bucket=4096)
    baseline.add(0, [9.0])
    return baseline


CHANGES = {
    "max_new_tokens": ({"max_new_tokens": 9}, "output"),
    "num_requests": ({"num_requests": 3}, "ids"),
    "reward": ({"reward": "log_utility"}, "rewards"),
    "exact": ({"exact": False}, "rows"),
    "clock": ({"clock": CountingClock(per_row=0.5)}, "seconds"),
    "stop": ({"stop": [" ", "a", "Y", "1", "="]}, "finish"),
    "baseline": ({"baseline": slow_baseline()}, "baseline"),
    "render_mode": ({"render_mode": "ansi"}, "render"),
    "sampling": ({"sampling": SamplingParams(temperature=2.0)}, "output"),
    "workload": ({"workload": Workload("one", ((Request("z", "zz", "z"),),))}, "ids"),
}
# Tests below; of batches in test_batch.py.
ON_THEIR_OWN = {"pool", "prompts", "split", "k_values", "chains", "device", "batch_size"}
ON_THEIR_OWN |= {"skip_too_long"}  # in test_room.py


def test_every_argument_has_a_test_here():
    arguments = set(inspect.signature(SpecDecodeEnv).parameters)
    assert arguments == CHANGES.keys() | ON_THEIR_OWN


@pytest.mark.parametrize("name", CHANGES)
def test_an_argument_changes_what_is_recorded(recorded, name):
    changes, key = CHANGES[name]
    usual, changed = recorded(), recorded(**changes)
    assert changed[key] != usual[key]


def test_the_budget_and_the_number_of_requests_are_kept(recorded):
    assert len(recorded(max_new_tokens=9)["output"]) == 9
    assert len(recorded(num_requests=3)["ids"]) == 3


def test_every_reward_is_its_own(recorded):
    by_name = {name: recorded(reward=name) for name in ("net_utility", "utility", "log_utility")}
    assert by_name["utility"]["rewards"] == by_name["utility"]["utility"]
    assert len({tuple(each["rewards"]) for each in by_name.values()}) == 3
    assert len({tuple(each["utility"]) for each in by_name.values()}) == 1


@pytest.mark.parametrize(
    "changed",
    [
        SamplingParams(1.5, seed=2),
        SamplingParams(0.5, seed=1),
        SamplingParams(1.5, top_k=1, seed=1),
        SamplingParams(1.5, top_p=0.1, seed=1),
    ],
)
def test_every_part_of_sampling_counts_and_a_seed_repeats(recorded, changed):
    usual = SamplingParams(1.5, seed=1)
    assert recorded(sampling=usual)["output"] == recorded(sampling=usual)["output"]
    assert recorded(sampling=usual)["output"] != recorded(sampling=changed)["output"]


def test_of_top_k_one_token_is_left_which_is_greedy_decodings(recorded):
    greedy = recorded()["output"]
    assert recorded(sampling=SamplingParams(1.5, top_k=1))["output"] == greedy


def test_a_pool_is_loaded_from_a_spec_with_its_k_values_and_chains(folder, recorded):
    spec = f"draft={folder},target={folder}"
    assert recorded(pool=spec)["names"][:7] == (
        "none",
        *(f"ngram@{k}" for k in (1, 2, 3, 4, 6)),
        "draft@1",
    )
    names = recorded(pool=spec, k_values=(1, 8), chains=["ngram>target", "ngram>draft>target"])
    assert names["names"] == ("none", "ngram@1", "ngram@8", "ngram>draft@1", "ngram>draft@8")


def test_the_device_reaches_the_pool_and_the_pools_device_the_clock(make_env, pool, monkeypatch):
    asked = []

    def load_pool(spec, *, k_values, chains, device):
        asked.append((spec, k_values, chains, device))
        return pool

    monkeypatch.setattr(decode, "load_pool", load_pool)
    make_env(pool="some", device="cuda:1")
    make_env(pool="some", chains=["ngram>target"])
    assert asked == [
        ("some", (1, 2, 3, 4, 6), None, "cuda:1"),
        ("some", (1, 2, 3, 4, 6), [("ngram", "target")], "cpu"),
    ]
    assert not make_env(clock="wall").clock.synchronizes
    assert decode.make_clock("wall", "cuda").synchronizes


def test_prompts_come_from_the_file(make_env, prompts_file):
    env = make_env(workload="mine", prompts=prompts_file)
    assert env.reset(seed=0)[1]["request_id"].startswith("mine-")


def test_splits_share_no_request(make_env):
    ids = {
        split: {request.id for request in make_env(workload="code", split=split).workload.requests}
        for split in ("train", "held-out", "all")
    }
    assert ids["train"].isdisjoint(ids["held-out"])
    assert ids["train"] | ids["held-out"] == ids["all"]


@pytest.mark.parametrize("name", ["code", "math", "extract", "chat"])
def test_a_workload_by_name_is_the_built_in_one(make_env, name):
    env = make_env(workload=name)
    assert env.reset(seed=0)[1]["request_id"].startswith(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_values": (1, 2)}, "the pool 'tiny' was built with its own"),
        ({"chains": ["ngram>target"]}, "the pool 'tiny' was built with its own"),
        ({"device": "cpu"}, "the pool 'tiny' was built with its own"),
        ({"split": "train"}, "the workload 'tiny' was given with its requests"),
        ({"prompts": "file.jsonl"}, "the workload 'tiny' was given with its requests"),
        ({"skip_too_long": True}, "the workload 'tiny' was given with its requests"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number >= 1; got 0"),
        ({"num_requests": 0}, "num_requests: must be a whole number >= 1; got 0"),
        ({"reward": "speed"}, "reward: no reward 'speed'"),
        ({"clock": "sun"}, "clock: must be 'wall', 'counting' or a Clock; got 'sun'"),
        ({"render_mode": "human"}, "render_mode: must be None or 'ansi'; got 'human'"),
        ({"stop": "end"}, "stop: must be a list of strings that are not empty; got 'end'"),
        ({"stop": ["end", ""]}, "stop: must be a list of strings that are not empty"),
        ({"workload": "cod"}, "did you mean 'code'"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused(make_env, changes, message):
    with pytest.raises(ValueError, match=message):
        make_env(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool", 5),
        ("workload", None),
        ("workload", 5),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "8"),
        ("max_new_tokens", True),
        ("num_requests", 1.5),
        ("batch_size", "2"),
        ("batch_size", True),
        ("reward", 3),
        ("exact", "yes"),
        ("exact", 1),
        ("clock", 5),
        ("sampling", {"temperature": 1.0}),
        ("stop", None),
        ("stop", [1]),
        ("baseline", 0.5),
        ("skip_too_long", "no"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_field_and_value(make_env, field, value):
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        make_env(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k_values", 4),
        ("k_values", "4"),
        ("k_values", (1, 2.5)),
        ("k_values", (True, 2)),
        ("k_values", ("a",)),
        ("chains", "ngram>target"),
        ("chains", [("ngram", "target")]),
        ("device", 0),
    ],
)
def test_a_spec_goes_with_arguments_of_their_types(make_env, monkeypatch, field, value):
    monkeypatch.setattr(decode, "load_pool", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=f"^{field}: "):
        make_env(**{"pool": "some", field: value})


def test_numbers_of_numpy_are_fine(make_env):
    counts = {"max_new_tokens": np.int64(5), "num_requests": np.int32(2), "batch_size": np.uint8(2)}
    env = make_env(**counts)
    json.dumps(env.reset(seed=0)[1]["max_new_tokens"])
    assert (env.max_new_tokens, env.num_requests, env.batch_size) == (5, 2, 2)
