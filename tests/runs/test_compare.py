import json
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specgym.runs import compare as module
from specgym.runs.cli import main
from specgym.runs.tensorboard import Board

CONTROLLERS = (
    "none",
    "static:draft@2",
    "random",
    "specrouter",
    "test-and-set",
    "ucb",
    "ppo",
)
ENTRY_KEYS = {
    "speedup",
    "ci95",
    "request_speedup",
    "tokens",
    "seconds",
    "iterations",
    "speedup_vs_fast",
    "end_to_end_speedup",
    "share_k0",
    "share_chains",
    "mean_accepted",
    "controller_seconds",
}


@pytest.fixture
def command(tiny_spec, short_prompts, tmp_path):
    """The arguments of a small, deterministic comparison."""

    def build(name, *more, controllers=("none", "static:draft@2", "ucb"), requests=3):
        return [
            *("compare", "--pool", tiny_spec, "--prompts", str(short_prompts)),
            *("--workload", "all", "--split", "all", "--clock", "counting", "--dtype", "float32"),
            *("--max-new-tokens", "24", "--num-requests", str(requests)),
            *("--controllers", ",".join(controllers)),
            *("--runs", str(tmp_path), "--name", name, *more),
        ]

    return build


def read(tmp_path, name):
    return json.loads((tmp_path / name / "results.json").read_text())


def read_steps(tmp_path, name):
    keys = ("controller", "request", "step", "action", "tokens")
    lines = map(json.loads, (tmp_path / name / "steps.jsonl").open())
    return sorted(tuple(line[key] for key in keys) for line in lines)


def scalars(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_all_controllers_head_to_head(command, tmp_path, capsys):
    flags = ("--train-steps", "128", "--split", "held-out")
    assert main(command("full", *flags, controllers=CONTROLLERS)) == 0
    results = read(tmp_path, "full")
    assert results["schema"] == 1
    assert set(results["controllers"]) == set(CONTROLLERS)
    assert all(set(entry) == ENTRY_KEYS for entry in results["controllers"].values())
    assert results["controllers"]["none"]["speedup"] == 1.0
    assert results["controllers"]["none"]["share_chains"] == {"target": 1.0}
    assert results["controllers"]["none"]["share_k0"] == {"chosen": 1.0, "executed": 1.0}
    lossless = results["lossless"]
    assert lossless["checked"] == lossless["identical"] == 3 * len(CONTROLLERS)
    assert lossless["near_ties"] == lossless["mismatches"] == 0
    steps = [json.loads(line) for line in (tmp_path / "full" / "steps.jsonl").open()]
    tokens = sum(step["tokens"] for step in steps if step["controller"] == "ucb")
    assert tokens == results["controllers"]["ucb"]["tokens"]
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config["max_new_tokens"] == 24
    assert results["calibration"]["specrouter"]["plans"]


def test_tensorboard_has_the_same_tags_for_every_controller(command, tmp_path):
    assert main(command("tags")) == 0
    tags = {name: set(scalars(tmp_path / "tags" / name)) for name in ("none", "ucb")}
    assert tags["none"] == tags["ucb"]
    assert tags["ucb"] >= {
        "spec/utility",
        "spec/speedup",
        "spec/slowdown_worst",
        "spec/k",
        "spec/chain",
        "spec/accepted",
        "spec/share_k0",
        "spec/tokens_per_second",
        "time/draft_ms",
        "time/verify_ms",
        "time/controller_ms",
    }
    accumulator = EventAccumulator(str(tmp_path / "tags" / "ucb"))
    accumulator.Reload()
    assert "hyperparameters/text_summary" in accumulator.Tags()["tensors"]
    assert "custom_scalars__config__" in accumulator.Tags()["tensors"]


def test_stopped_comparison_goes_on_to_the_same_results(command, tmp_path, monkeypatch, capsys):
    assert main(command("whole")) == 0
    run_request, calls = module.run_request, []

    def stops(env, controller, request):
        calls.append(request.id)
        if len(calls) == 7:  # in the middle of the second round
            raise KeyboardInterrupt
        return run_request(env, controller, request)

    monkeypatch.setattr(module, "run_request", stops)
    assert main(command("halted")) == 130
    assert "stopped" in capsys.readouterr().err
    monkeypatch.setattr(module, "run_request", run_request)
    assert main(command("halted", "--seed", "1")) == 2  # other settings: refused
    assert "seed" in capsys.readouterr().err
    assert main(command("halted")) == 0
    assert "going on after 1" in capsys.readouterr().err
    whole, halted = read(tmp_path, "whole"), read(tmp_path, "halted")
    assert {n: e["tokens"] for n, e in whole["controllers"].items()} == {
        n: e["tokens"] for n, e in halted["controllers"].items()
    }
    for name, entry in whole["controllers"].items():
        assert halted["controllers"][name]["speedup"] == pytest.approx(entry["speedup"])
    keys = ("controller", "request", "step", "action", "tokens")
    lines = [
        [
            tuple(json.loads(line)[key] for key in keys)
            for line in (tmp_path / n / "steps.jsonl").open()
        ]
        for n in ("whole", "halted")
    ]
    assert sorted(lines[0]) == sorted(lines[1])
    steps = [step for step, _ in scalars(tmp_path / "halted" / "ucb")["spec/utility"]]
    assert steps == [24, 48, 72]


def test_a_resumed_curve_is_clean_within_the_same_second(tmp_path):
    for first_step, steps in ((1, (10, 20, 30)), (21, (30, 40))):
        board = Board(tmp_path, first_step)
        for step in steps:
            board.scalars({"x": float(first_step)}, step)
        board.close()
        for path in tmp_path.glob("*events*"):  # as of a process of a larger id: sorts last
            path.rename(tmp_path / re.sub(r"\.(\d+)\.(\d+)$", r".9999999.\2", path.name))
    assert scalars(tmp_path)["x"] == [(10, 1.0), (20, 1.0), (30, 21.0), (40, 21.0)]


def test_ppo_is_never_trained_on_what_is_compared(command, capsys):
    assert main(command("mixed", controllers=("none", "ppo"))) == 2
    assert "held-out" in capsys.readouterr().err


def test_a_refused_command_leaves_nothing_in_the_way(command, tmp_path, capsys):
    assert main(command("name", controllers=("none", "ubc"))) == 2
    assert "did you mean" in capsys.readouterr().err
    assert not (tmp_path / "name").exists()
    assert main(command("name", requests=1)) == 0


def test_overwrite_replaces_a_stopped_run_of_other_settings(command, tmp_path, monkeypatch):
    def stops(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "run_request", stops)
        assert main(command("stopped")) == 130
    assert main(command("stopped", "--seed", "1", requests=1)) == 2
    assert main(command("stopped", "--seed", "1", "--overwrite", requests=1)) == 0


def test_near_ties_fail_the_command_in_exact_mode_alone(command, monkeypatch):
    def two_near_ties(*_, **__):
        return {"checked": 3, "identical": 1, "near_ties": 2, "mismatches": 0}

    monkeypatch.setattr(module, "check_lossless", two_near_ties)
    assert main(command("exact", requests=1)) == 1
    assert main(command("fast", "--no-exact", requests=1)) == 0


def test_finished_run_is_not_touched_without_being_asked(command, tmp_path, capsys):
    assert main(command("twice", requests=1)) == 0
    before = (tmp_path / "twice" / "results.json").read_text()
    assert main(command("twice", requests=1)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "twice" / "results.json").read_text() == before
    assert main(command("twice", "--overwrite", requests=1)) == 0


def test_a_wrong_text_fails_the_command(command, tmp_path, monkeypatch, capsys):
    run_request = module.run_request

    def tampers(env, controller, request):
        record = run_request(env, controller, request)
        if type(controller).__name__ == "UCB":
            record.output[5] = (record.output[5] + 1) % 90
        return record

    monkeypatch.setattr(module, "run_request", tampers)
    assert main(command("wrong", requests=1)) == 1
    assert "differ from plain decoding" in capsys.readouterr().err
    assert read(tmp_path, "wrong")["lossless"]["mismatches"] == 1


def test_an_engine_fault_fails_the_command(command, monkeypatch, capsys):
    def faulty(*_, **__):
        raise RuntimeError("the engine broke")

    monkeypatch.setattr("specgym.envs.decode.decode_step", faulty)
    assert main(command("fault", requests=1)) == 1
    assert "the engine broke" in capsys.readouterr().err


def test_every_flag_reaches_the_run(command, tmp_path):
    assert main(command("base", requests=1)) == 0
    base = read(tmp_path, "base")
    for name, flags in {
        "tokens": ("--max-new-tokens", "12"),
        "fast": ("--no-exact",),
        "k": ("--k-values", "1,2"),
        "chains": ("--chains", "draft>target"),
        "seed": ("--seed", "3"),
    }.items():
        assert main(command(name, *flags, requests=1)) == 0
        other = read(tmp_path, name)
        entry = other["controllers"]["ucb"]
        assert entry != base["controllers"]["ucb"] or other["exact"] != base["exact"], name
