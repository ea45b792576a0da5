"""Every registered controller where it is used: live, in batches, on traces; and its page."""

import inspect
import json
from pathlib import Path

import pytest

from specgym.engine.testing import tiny_pool, tiny_tokenizer
from specgym.envs import SpecDecodeEnv
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.workloads import Request, Workload
from specgym.runs.bench.batch import ENDLESS
from specgym.runs.cli import main
from specgym.runs.controllers import (
    FACTORIES,
    GIVEN,
    WRAPPERS,
    describe_options,
    make_controller,
    split_wrapper,
)
from specgym.runs.replay import play
from specgym.runs.text.engine_api import Engine

PROMPTS = ("the cat sat on the mat, the cat sat", "one two one two", "x = f(x)\ny = f(")
SPECS = (*FACTORIES, *(f"{name}:ucb" for name in WRAPPERS))
PAGE = Path(__file__).parents[2] / "docs" / "controllers.md"
PLANS = [(("target",), 0), *((("ngram", "target"), k) for k in (1, 2, 4))]


@pytest.fixture(scope="module")
def pool():
    return tiny_pool(noise=(0.04, 0.01), tokenizer=tiny_tokenizer(), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(pool):
    return Engine(pool, clock="counting")


@pytest.fixture(scope="module")
def plain(engine):
    """The texts of plain decoding."""
    results = engine.generate(list(PROMPTS), controller="none", max_new_tokens=40)
    return [result.tokens for result in results]


@pytest.mark.parametrize("spec", SPECS)
def test_generated_texts_are_plain_decodings(engine, plain, spec):
    results = engine.generate(list(PROMPTS), controller=spec, max_new_tokens=40)
    assert [result.tokens for result in results] == plain


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_is_decoded(pool, spec):
    requests = tuple(Request(f"tiny-{n}", text, "tiny") for n, text in enumerate(PROMPTS))
    env = SpecDecodeEnv(
        pool,
        Workload("tiny", (requests,)),
        max_new_tokens=12,
        batch_size=3,
        num_requests=ENDLESS,
        exact=False,
        clock="counting",
    )
    features = [feature.name for feature in env.features]
    controller = make_controller(spec, env.plans, features, 0)
    observation, info = env.reset(seed=0)
    for _ in range(40):
        for request in info.get("next_requests", []):
            controller.begin(request)
        action = controller.act(observation, info["action_mask"])
        assert info["action_mask"][action]
        observation, reward, _, _, info = env.step(action)
        assert "error" not in info
        controller.observe(action, reward, info)


@pytest.fixture(scope="module")
def replayed():
    """Recorded requests by chance."""
    return ReplayEnv(TraceLibrary(synthetic_traces(num_requests=3, num_tokens=48), "all"))


@pytest.mark.parametrize("spec", SPECS)
def test_traces_are_replayed(replayed, spec):
    features = [feature.name for feature in replayed.features]
    controller = make_controller(spec, replayed.plans, features, 0)
    for trace in replayed.library.traces:
        assert play(replayed, controller, trace)


def test_wrappers_take_their_own_options_first():
    options, inside = split_wrapper("restart:delta=0.1:hold:n=4:ucb:scope=request")
    assert (options, inside) == ({"delta": 0.1}, "hold:n=4:ucb:scope=request")
    assert split_wrapper("hold:static:ngram@4") == ({}, "static:ngram@4")
    described = describe_options("hold:n=4:ucb:scope=request")
    assert described == {"controller": "hold", "n": 4, "inside": "ucb:scope=request"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hold", "say which controller is inside, for example hold:ucb"),
        ("hold:n=4", "for example hold:n=4:ucb"),
        ("hold:n=4:", "for example hold:n=4:ucb"),
        ("hold:m=4:ucb", "'m=4' is not option=value with one of n"),
        ("hold:n=0:ucb", "n must be a whole number >= 1"),
        ("hold:inner=ucb:ucb", "'inner=ucb' is not option=value"),
        ("restart:hold:n=4:ubc", "no controller 'ubc' .did you mean 'ucb'"),
        ("restart:detector=t:ucb", "detector must be one of glr, cusum"),
        ("batch-table:table=4", "table must be ranges of batch sizes"),
        ("ema-tiers:chain=small", "chain must be one of ngram>target"),
        ("heuristic:features=x", "is not option=value"),
        ("ucb:exploration=much", "exploration must be a number from 0 to 1e.06, got 'much'"),
    ],
)
def test_errors_say_the_way_out(spec, message):
    with pytest.raises(ValueError, match=message):
        make_controller(spec, PLANS, [], 0)


@pytest.mark.parametrize("name", [*FACTORIES, *WRAPPERS])
def test_the_page_has_every_controller_with_its_options(name):
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    (row,) = [line for line in rows if line.startswith(f"| `{name}`")]
    parameters = inspect.signature((FACTORIES | WRAPPERS)[name]).parameters
    for option in parameters:
        if option not in GIVEN and name != "static":
            assert f"`{option}`" in row, f"docs/controllers.md: {name} lacks {option}"


def test_all_of_them_are_compared(tiny_spec, short_prompts, tmp_path):
    specs = ["static:draft@2" if spec == "static" else spec for spec in SPECS]
    arguments = [
        *("compare", "--pool", tiny_spec, "--prompts", str(short_prompts), "--workload", "all"),
        *("--split", "all", "--clock", "counting", "--dtype", "float32"),
        *("--max-new-tokens", "16", "--num-requests", "2", "--controllers", ",".join(specs)),
        *("--runs", str(tmp_path), "--name", "all"),
    ]
    assert main(arguments) == 0
    results = json.loads((tmp_path / "all" / "results.json").read_text())
    assert set(specs) <= set(results["controllers"])
    assert results["lossless"]["mismatches"] == 0
