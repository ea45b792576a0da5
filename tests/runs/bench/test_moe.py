"""``specgym bench moe`` on tiny models: every row, ratio and file it promises."""

import json

import pytest
from rich.console import Console

from specgym.engine.testing import tiny_llama, tiny_tokenizer
from specgym.runs.bench.configs import MoeBench
from specgym.runs.bench.moe import STATIC_K, bench_moe
from specgym.runs.cli import main

RATIOS = {
    "moe_4_over_1",
    "dense_4_over_1",
    "dispatch_over_transformers",
    "moe_over_byte_floor",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense checkpoint that takes text."""
    path = tmp_path_factory.mktemp("dense")
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=8192).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def options(folder):
    """Command-line options of the smallest bench."""
    settings = {"dense": f"target={folder}", "pool": f"target=upcycled:8:2:{folder}"}
    settings |= {"dtype": "float32", "repeats": 1, "requests": 1, "new-tokens": 6}
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def test_rows_ratios_and_plot(options, tmp_path, capsys):
    report_file, plot = tmp_path / "moe.json", tmp_path / "moe.png"
    files = ["--json", str(report_file), "--plot", str(plot)]
    assert main(["bench", "moe", *options, "--workloads", "code,chat", *files]) == 0
    assert "dispatch_over_transformers" in capsys.readouterr().out
    assert plot.read_bytes()[1:4] == b"PNG"
    report = json.loads(report_file.read_text())
    assert report["ratios"].keys() == RATIOS
    assert "upcycled: 8 experts, top-2" in report["pools"]["moe"]
    assert report["machine"]["threads"]
    timed = [row for row in report["rows"] if "tokens" in row]
    assert len(timed) == 4 * 8
    by_tokens = {row["tokens"]: row for row in timed if row["target"] == "moe"}
    assert by_tokens[1]["unique_experts"] == by_tokens[1]["expected_unique"] == 2
    assert 2 < by_tokens[8]["unique_experts"] <= 8
    assert {row["name"] for row in report["rows"]} > {"moe, plain iteration", "memory, read"}
    static = [row for row in report["rows"] if "k" in row]
    assert len(static) == 2 * 2 * (1 + len(STATIC_K))
    assert {row["drafter"] for row in static} == {"ngram"}
    for row in static:
        assert row["tokens_per_iteration"] >= 1.0
        assert (row["unique_experts"] >= 2) == (row["target"] == "moe")
        assert row["k"] or row["utility"] == 1.0


def test_a_dense_pool_is_refused(folder, options, capsys):
    arguments = [*options, "--pool", f"target={folder}"]
    assert main(["bench", "moe", *arguments]) == 2
    assert "must be a mixture of experts" in capsys.readouterr().err


def test_numbers_of_experts_go_into_the_built_in_pool():
    assert MoeBench().mixture == "smollm2-moe"
    assert MoeBench(experts=16, top_k=4).mixture == "smollm2-moe:experts=16:top-k=4"
    assert MoeBench(pool="target=x").mixture == "target=x"
    with pytest.raises(ValueError, match="built-in pool"):
        MoeBench(pool="target=x", experts=16)
    with pytest.raises(ValueError, match="experts: must be in"):
        bench_moe(MoeBench(experts=99), Console(quiet=True))


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match="repeats, requests and new_tokens: must be >= 1"):
        MoeBench(repeats=0)
