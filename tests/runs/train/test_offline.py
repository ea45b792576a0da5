"""``specgym train AGENT --env replay`` on tiny traces: policies, refusals, resuming."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specgym.agents.policy import load_policy
from specgym.agents.ppo import newest_checkpoint
from specgym.agents.saved_state import load_state
from specgym.engine.pools.loading import load_pool
from specgym.envs import SpecDecodeEnv
from specgym.envs.replay.traces import load_traces
from specgym.runs.cli import main
from specgym.runs.controllers import make_controller
from specgym.runs.loop import run_request

SMALL = {
    "ppo": ("--recipe.num-envs", "4", "--recipe.rollout-steps", "16", "--recipe.batch-size", "32"),
    "dqn": (
        "--recipe.num-envs",
        "4",
        "--recipe.learning-starts",
        "64",
        "--recipe.batch-size",
        "32",
    ),
}
SMALL["maskable-ppo"] = SMALL["ppo"]


@pytest.fixture
def command(trace_file, tmp_path):
    """The arguments of a short training."""

    def build(agent, steps, *more, name="run"):
        return [
            *("train", agent, "--env", "replay", "--traces", str(trace_file)),
            *("--runs", str(tmp_path), "--name", name, "--validate-every", "3"),
            *("--num-evaluations", "2", "--recipe.num-steps", str(steps)),
            *SMALL[agent],
            *more,
        ]

    return build


@pytest.fixture
def env(tiny_spec, short_prompts):
    """A live environment of the tiny pool."""
    return SpecDecodeEnv(
        load_pool(tiny_spec), "all", prompts=short_prompts, max_new_tokens=24, clock="counting"
    )


@pytest.mark.parametrize("agent", SMALL)
def test_a_trained_policy_runs_on_the_live_engine(command, tmp_path, env, agent, capsys):
    assert main(command(agent, 256)) == 0
    folder = tmp_path / "run"
    said = " ".join(capsys.readouterr().err.split())  # a console wraps lines
    assert "of the headroom between the best fixed plan" in said
    policy = load_policy(folder / "policy.npz")
    assert policy.about["algorithm"] == agent
    assert policy.plan_names == env.action_names
    assert not (folder / "checkpoints").exists()
    assert not (folder / "best.npz").exists()
    curve = json.loads((folder / "curve.json").read_text())
    best = max(curve, key=lambda point: point["validation_speedup"])
    assert policy.about["step"] == best["step"]
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    scalars = accumulator.Scalars("eval/held_out_speedup")
    assert [event.step for event in scalars] == [point["step"] for point in curve]
    features = [feature.name for feature in env.features]
    for spec in (f"learned:{folder}", f"learned:{folder / 'policy.npz'}"):
        controller = make_controller(spec, env.plans, features, 0)
        record = run_request(env, controller, env.workload.requests[0])
        assert record.tokens == 24


def test_held_out_requests_are_not_trained_on(command, trace_file, monkeypatch):
    from specgym.runs.train import offline as module

    seen = []
    original = module.VectorReplay

    def watched(library, *rest, **settings):
        seen.extend(trace.request_id for trace in library.traces)
        return original(library, *rest, **settings)

    monkeypatch.setattr(module, "VectorReplay", watched)
    assert main(command("maskable-ppo", 64)) == 0
    train = [t.request_id for t in load_traces(trace_file).traces if t.split == "train"]
    assert seen == [name for index, name in enumerate(train) if index % 3 != 2]


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_killed_training_goes_on_with_one_clean_curve(command, tmp_path, agent):
    folder = tmp_path / "run"
    arguments = command(agent, 64_000, "--num-evaluations", "1000")
    process = subprocess.Popen(
        [sys.executable, "-m", "specgym.runs.cli", *arguments],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 240
    while newest_checkpoint(folder) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    newest = newest_checkpoint(folder)
    assert newest is not None
    done = int(newest.name)
    config = json.loads((folder / "config.json").read_text())
    config["recipe"]["num_steps"] = done + 128
    config["num_evaluations"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    assert main(command(agent, done + 128, "--num-evaluations", "1")) == 0
    curve = json.loads((folder / "curve.json").read_text())
    steps = [point["step"] for point in curve]
    assert steps == sorted(set(steps))
    assert done in steps
    assert steps[-1] >= done + 128
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("eval/held_out_share")] == steps


def test_the_same_seed_trains_the_same_policy(command, tmp_path):
    for name, more in (("a", ()), ("b", ()), ("c", ("--seed", "1"))):
        assert main(command("maskable-ppo", 64, *more, name=name)) == 0
    first, second, third = (
        load_policy(tmp_path / name / "policy.npz").layers[-1][1] for name in "abc"
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)


def test_imitation_learns_within_rounds(trace_file, tmp_path, env, capsys):
    arguments = [
        *("train", "imitation", "--env", "replay", "--traces", str(trace_file)),
        *("--runs", str(tmp_path), "--name", "run", "--num-rows", "8"),
        *("--num-steps", "12", "--recipe.oracle-rounds", "1", "--recipe.own-rounds", "1"),
        *("--recipe.num-networks", "2"),
    ]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "round 2, held-out speedup" in said
    policy = load_policy(tmp_path / "run" / "policy.npz")
    assert policy.about["algorithm"] == "imitation"
    features = [feature.name for feature in env.features]
    controller = make_controller(f"learned:{tmp_path / 'run'}", env.plans, features, 0)
    assert run_request(env, controller, env.workload.requests[0]).tokens == 24


def test_imitation_is_fitted_to_all_training_requests_and_no_other(
    trace_file, tmp_path, monkeypatch
):
    from specgym.runs.train import imitation as module

    seen = []
    original = module.collect_visits

    def watched(library, *rest):
        seen.append([trace.request_id for trace in library.traces])
        return original(library, *rest)

    monkeypatch.setattr(module, "collect_visits", watched)
    arguments = ["train", "imitation", "--env", "replay", "--traces", str(trace_file)]
    small = ("--num-rows", "8", "--num-steps", "12", "--recipe.own-rounds", "1")
    assert main([*arguments, "--runs", str(tmp_path), *small]) == 0
    train = [t.request_id for t in load_traces(trace_file).traces if t.split == "train"]
    assert seen == [train, train]


def test_a_contextual_bandit_goes_on_from_its_state(trace_file, tmp_path, env):
    arguments = ["train", "linucb", "--env", "replay", "--traces", str(trace_file)]
    assert main([*arguments, "--runs", str(tmp_path)]) == 0
    spec = f"linucb:state={tmp_path / 'linucb-t' / 'state.npz'}"
    features = [feature.name for feature in env.features]
    actions = []
    for _ in range(2):
        env.reset(seed=0)
        controller = make_controller(spec, env.plans, features, 0)
        record = run_request(env, controller, env.workload.requests[0])
        actions.append([step["action"] for step in record.steps])
    assert actions[0] == actions[1]


def test_a_bandit_keeps_what_it_learned(trace_file, tmp_path, env, capsys):
    arguments = [
        *("train", "ucb", "--env", "replay", "--traces", str(trace_file)),
        *("--runs", str(tmp_path), "--options", "exploration=0.2"),
    ]
    assert main(arguments) == 0
    assert "still learning" in " ".join(capsys.readouterr().err.split())
    path = tmp_path / "ucb-t" / "state.npz"
    state = load_state(path, "ucb")
    assert min(state["num_plays"]) > 0
    controller = make_controller(f"ucb:exploration=0.2:state={path}", env.plans, [], 0)
    assert controller.state_dict() == state
    with pytest.raises(ValueError, match="of ucb, not of random"):
        load_state(path, "random")
    with pytest.raises(ValueError, match="no file"):
        make_controller("ucb:state=nowhere.npz", env.plans, [], 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("specrouter",), "no agent 'specrouter' learns"),
        (("ppo", "--traces", "nowhere.npz"), "no file nowhere.npz"),
        (("ppo", "--validate-every", "1"), "validate_every"),
        (("dqn", "--num-evaluations", "0"), "num_evaluations"),
        (("ppo", "--recipe.batch-size", "77"), "batch_size"),
        (("dqn", "--recipe.gamma", "1.5"), "gamma"),
        (("ppo", "--recipe.num-envs", "0"), "num_envs"),
        (("dqn", "--recipe.exploration-share", "0"), "exploration_share"),
        (("ucb", "--num-passes", "0"), "num_passes"),
        (("imitation", "--num-rows", "0"), "num_rows"),
        (("imitation", "--exploration", "2"), "exploration"),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments, message, capsys):
    assert main(["train", arguments[0], "--env", "replay", *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_too_few_requests_are_refused(command, capsys):
    assert main([*command("ppo", 64), "--validate-every", "99"]) == 2
    assert "record more" in capsys.readouterr().err


def test_a_finished_run_is_kept(command, capsys):
    assert main(command("ppo", 64)) == 0
    assert main(command("ppo", 64)) == 2
    assert "is finished" in capsys.readouterr().err
