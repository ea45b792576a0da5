"""Every command that takes ``--prompts`` checks all of them before anything runs."""

import json

import pytest

from specgym.envs.replay.traces import load_traces
from specgym.runs.cli import main


@pytest.fixture
def prompts_file(tmp_path):
    """Twelve prompts in two categories; those of lines 4 and 5 exceed the tiny pool's context."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"{kind}-{n}", "category": kind, "prompt": "abc " * (400 if number in (4, 5) else 2)}
        for number, (n, kind) in enumerate(((n, k) for n in range(6) for k in ("le", "ri")), 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def commands(tiny_spec, prompts_file, tmp_path):
    """Every command with its arguments."""
    live = ("--pool", tiny_spec, "--dtype", "float32", "--prompts", str(prompts_file))
    env = (*live, "--workload", "all", "--clock", "counting", "--max-new-tokens", "8")
    here = ("--runs", str(tmp_path / "runs"), "--name", "run")
    figures = ("--json", str(tmp_path / "figures.json"))
    one = ("--num-requests", "1", "--split", "all")
    rounds = ("--new-tokens", "4", "--repeats", "1")
    return {
        "compare": ("compare", *env, *here, *one, "--controllers", "none"),
        "compare ppo": (
            *("compare", *env, *here, "--num-requests", "1", "--controllers", "ppo"),
            *("--train-steps", "128", "--split", "held-out"),
        ),
        "train": ("train", "ppo", *env, *here, "--ppo.num-steps", "128", "--split", "all"),
        "record": (
            *("record", *env, "--num-requests", "6", "--cost-steps", "9"),
            *("--out", str(tmp_path / "t.npz")),
        ),
        "drafters": ("bench", "drafters", *live, *figures, "--limit", "1", "--new-tokens", "4"),
        "batch": (
            *("bench", "batch", *live, "--workload", "all", *figures, *rounds, "--sizes", "1"),
            *("--prompt-tokens", "9999", "--scheduler", "ucb"),
        ),
    }


ASKING = ("compare", "compare ppo", "train", "record", "drafters")


def said(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize("name", ASKING)
def test_a_long_prompt_is_refused_before_anything_is_written(commands, tmp_path, capsys, name):
    before = sorted(tmp_path.rglob("*"))
    assert main(list(commands[name])) == 2
    told = said(capsys)
    assert "prompts.jsonl, line " in told
    assert "--skip-too-long" in told
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ASKING)
def test_long_prompts_are_skipped_on_request_and_counted(commands, tmp_path, capsys, name):
    assert main([*commands[name], "--skip-too-long"]) == 0
    assert "left out: too long for the target's context" in said(capsys)
    counts = {
        path.name: json.loads(path.read_text())["skipped_prompts"]
        for path in (tmp_path / "runs/run/results.json", tmp_path / "figures.json")
        if path.exists()
    }
    if name == "record":
        counts["t.npz"] = load_traces(tmp_path / "t.npz").about["skipped_prompts"]
    wanted = {"compare": 2, "compare ppo": 1, "drafters": 2, "record": 2}
    assert list(counts.values()) == [wanted[name] for _ in range(name in wanted)]


def test_a_batch_bench_says_how_many_it_left_out(commands, tmp_path, capsys):
    assert main(list(commands["batch"])) == 0
    assert "2 prompts are longer, and left out" in said(capsys)
    assert json.loads((tmp_path / "figures.json").read_text())["skipped_prompts"] == 2
