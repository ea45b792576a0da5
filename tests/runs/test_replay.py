"""``specgym replay``: controllers on traces, against fixed plans and the oracle."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from specgym.baselines.hindsight.references import solve_references
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.traces import save_traces
from specgym.runs.cli import main
from specgym.runs.replay import paired, resamples
from specgym.runs.traces.yardstick import make_problem
from specgym.runs.train.candidates import changed

CONTROLLERS = "none,static:ngram@2,test-and-set,ucb"


@pytest.fixture(scope="module")
def traces():
    return synthetic_traces(12, 40, seed=3)


@pytest.fixture(scope="module")
def path(traces, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    save_traces(path, traces)
    return path


@pytest.fixture(scope="module")
def figures(path):
    out = path.with_suffix(".json")
    options = ["--traces", str(path), "--controllers", CONTROLLERS, "--json", str(out)]
    assert main(["replay", *options, "--subject", "ucb"]) == 0
    return json.loads(out.read_text())


def test_references_are_in_order_and_in_the_table(figures):
    entries = figures["entries"]
    speedups = {name: entry["speedup"] for name, entry in entries.items()}
    assert speedups["none"] == pytest.approx(1.0)
    assert speedups["oracle"] >= speedups["greedy oracle"]
    assert speedups["oracle"] >= speedups["best fixed, each"] >= speedups["best fixed, hindsight"]
    assert speedups["best fixed, hindsight"] >= speedups["best fixed, training"]
    assert max(speedups[name] for name in CONTROLLERS.split(",")) <= speedups["oracle"]
    assert entries["oracle"]["headroom_share"] == pytest.approx(1.0)
    assert entries["best fixed, training"]["headroom_share"] == pytest.approx(0.0)
    assert figures["oracle_is_exact"]


def test_a_fixed_plan_played_is_the_fixed_plan_computed(figures, traces):
    """The environment and the references agree on what a plan costs."""
    problems = [
        make_problem(traces, trace, traces.layout.k_values)
        for trace in traces.part("held-out").traces
    ]
    references = solve_references(problems)
    action = [plan.name for plan in traces.layout.plans()].index("ngram@2")
    played = figures["entries"]["static:ngram@2"]["seconds"]
    np.testing.assert_allclose(played, references.fixed[:, action])


def test_regret_adds_up_to_the_distance_from_the_oracle(figures):
    entries = figures["entries"]
    for name in CONTROLLERS.split(","):
        regret = entries[name]["regret"]
        assert regret["per_step"] >= -1e-9
        assert regret["cumulative"][-1] == pytest.approx(regret["per_request"])
        assert np.all(np.diff(regret["cumulative"]) >= -1e-9)


def test_pairs_are_compared_on_the_same_requests(figures):
    assert figures["subject"] == "ucb"
    entry = figures["entries"]["none"]["subject_minus_this"]
    assert entry["difference"] == pytest.approx(figures["entries"]["ucb"]["speedup"] - 1.0)
    assert entry["ci95"][0] <= entry["difference"] <= entry["ci95"][1]
    own = figures["entries"]["ucb"]["subject_minus_this"]
    assert own == {"difference": 0.0, "ci95": [0.0, 0.0]}


def test_an_interval_of_a_sure_difference_excludes_zero():
    none = np.linspace(2.0, 3.0, 30)
    found = paired(none, none / 1.5, none / 1.2, resamples(30, 0))
    assert found["difference"] == pytest.approx(0.3)
    assert found["ci95"] == pytest.approx([0.3, 0.3])


def test_seen_requests_change_what_is_learnt_and_do_not_count(path, tmp_path):
    out = tmp_path / "warm.json"
    options = ["--traces", str(path), "--controllers", "none,ucb", "--warm-requests", "4"]
    assert main(["replay", *options, "--json", str(out)]) == 0
    warm = json.loads(out.read_text())
    assert warm["warm_requests"] == 4
    assert len(warm["entries"]["ucb"]["seconds"]) == len(warm["requests"]) == 4


def test_an_estimate_of_the_best_causal_policy_is_a_row(path, traces, tmp_path, monkeypatch):
    from specgym.runs.train import cross_validation as folds

    agent = folds.find_agent("imitation")
    small = changed(
        agent.settings, "num_rows=16 num_steps=12 recipe.own_rounds=1 recipe.num_networks=2"
    )
    monkeypatch.setattr(
        folds, "find_agent", lambda name: dataclasses.replace(agent, settings=small)
    )
    out = tmp_path / "causal.json"
    options = ["--traces", str(path), "--controllers", "none", "--causal-folds", "2"]
    assert main(["replay", *options, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    estimate = figures["entries"]["best causal, estimated"]
    assert estimate["speedup"] <= figures["entries"]["oracle"]["speedup"]
    names = figures["requests"]
    parts = list(folds.make_folds(traces, names, 2))
    again = folds.estimate_causal("imitation", parts, names, 0, Console(quiet=True))
    assert np.array_equal(estimate["seconds"], again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--causal-folds", "5"], "folds: must be from 2 to the 4 requests"),
        (["--causal-agent", "nobody"], "no agent 'nobody' learns from traces"),
        (["--controllers", "nobody"], "no controller 'nobody'"),
        (["--controllers", "ucb,ucb"], "named twice"),
        (["--subject", "ppo"], "subject: must be one of"),
        (["--warm-requests", "-1"], "warm_requests"),
        (["--traces", "none.npz"], "there is no file"),
    ],
)
def test_wrong_settings_are_refused(path, capsys, options, message):
    assert main(["replay", "--traces", str(path), *options]) == 2
    assert message in capsys.readouterr().err
