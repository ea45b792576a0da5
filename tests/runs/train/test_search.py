"""``specgym search``: folds over training requests, changes of settings, the table."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.traces import load_traces, save_traces
from specgym.runs.cli import main
from specgym.runs.train import cross_validation as folds_module
from specgym.runs.train import search as search_module
from specgym.runs.train.candidates import CANDIDATES, changed
from specgym.runs.train.configs import ImitationTraining
from specgym.runs.train.cross_validation import cross_validate, estimate_causal, make_folds
from specgym.runs.train.offline import AGENTS
from specgym.runs.train.search import RECIPE

SMALL = "num_rows=8 num_steps=12 recipe.own_rounds=1 recipe.num_networks=2"


@pytest.fixture(scope="module")
def traces():
    return synthetic_traces(12, 24, seed=3)


@pytest.fixture(scope="module")
def path(traces, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    save_traces(path, traces)
    return path


@pytest.fixture
def fold_sets(monkeypatch):
    """What was given to trainings, fold by fold: trained on and judged."""
    seen = []
    original = folds_module.ReplayTraining

    def watched(settings, traces):
        training = original(settings, traces)
        libraries = (training.train, training.held_out)
        seen.append([{t.request_id for t in library.traces} for library in libraries])
        return training

    monkeypatch.setattr(folds_module, "ReplayTraining", watched)
    return seen


def ids(traces, split):
    return [trace.request_id for trace in traces.part(split).traces]


def test_every_judged_request_is_held_out_once(traces):
    judged = ids(traces, "held-out")
    folds = list(make_folds(traces, judged, 2))
    held_out = [ids(fold, "held-out") for fold in folds]
    assert held_out == [judged[::2], judged[1::2]]
    for fold, held in zip(folds, held_out, strict=True):
        assert ids(fold, "train") == [name for name in ids(traces, "all") if name not in held]


@pytest.mark.parametrize("count", [1, 9])
def test_folds_without_requests_are_refused(traces, count):
    with pytest.raises(ValueError, match="folds: must be from 2 to the 8 requests"):
        list(make_folds(traces, ids(traces, "train"), count))


def test_a_search_looks_at_training_requests_alone(path, traces, fold_sets, tmp_path, capsys):
    out = tmp_path / "search.json"
    worse = "options=exploration=1000"
    arguments = ["search", "ucb", "--traces", str(path), "--folds", "2", "--candidates", worse]
    assert main([*arguments, "--json", str(out)]) == 0
    train = set(ids(traces, "train"))
    assert len(fold_sets) == 4
    assert all(fitted | judged == train and not fitted & judged for fitted, judged in fold_sets)
    figures = json.loads(out.read_text())
    assert set(figures["requests"]) == train
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == [RECIPE, worse]
    assert rows[RECIPE]["minus_own"] == {"difference": 0.0, "ci95": [0.0, 0.0]}
    lead = rows[worse]["minus_own"]
    assert lead["difference"] == pytest.approx(rows[worse]["speedup"] - rows[RECIPE]["speedup"])
    assert figures["best"] == max(rows.values(), key=lambda row: row["speedup"])["name"]
    captured = capsys.readouterr()
    assert f"best: {figures['best']}" in captured.out
    assert f"search ucb: {worse}" in " ".join(captured.err.split())


def test_fewer_folds_judge_fewer_requests(path, tmp_path):
    out = tmp_path / "search.json"
    arguments = ["search", "ucb", "--traces", str(path), "--folds", "4", "--num-judged", "1"]
    arguments += ["--candidates", "num_passes=1"]
    assert main([*arguments, "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())["requests"]) == 2


def test_seconds_of_folds_are_by_request(traces):
    settings = changed(AGENTS["imitation"].settings, SMALL)
    judged = ids(traces, "train")
    done = []
    seconds = cross_validate(settings, list(make_folds(traces, judged, 2)), lambda: done.append(1))
    assert len(done) == 2
    assert sorted(seconds) == sorted(judged)
    assert all(taken > 0.0 for _, taken in seconds.values())


@pytest.mark.parametrize("agent", ["maskable-ppo", "dqn"])
def test_networks_are_judged_too(path, agent, tmp_path, monkeypatch):
    small = (
        "recipe.num_steps=64 recipe.num_envs=4 recipe.batch_size=32 num_evaluations=1 "
        "validate_every=2 "
    ) + ("recipe.rollout_steps=16" if agent == "maskable-ppo" else "recipe.learning_starts=32")
    monkeypatch.setattr(search_module, "find_agent", lambda name: small_agent(name, small))
    monkeypatch.setattr(folds_module, "find_agent", lambda name: small_agent(name, small))
    out = tmp_path / "search.json"
    arguments = ["search", agent, "--traces", str(path), "--folds", "2", "--num-judged", "1"]
    assert main([*arguments, "--candidates", "recipe.gamma=0.5", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == [RECIPE, "recipe.gamma=0.5"]


def small_agent(name, changes):
    agent = AGENTS[name]
    return dataclasses.replace(agent, settings=changed(agent.settings, changes))


def test_the_causal_estimate_judges_every_request_by_another_policy(traces, monkeypatch, fold_sets):
    monkeypatch.setattr(folds_module, "find_agent", lambda name: small_agent(name, SMALL))
    judged = ids(traces, "held-out")
    folds = list(make_folds(traces, judged, 2))
    seconds = estimate_causal("imitation", folds, judged, 0, Console(quiet=True))
    assert seconds.shape == (4,)
    assert [held for _, held in fold_sets] == [set(judged[::2]), set(judged[1::2])]
    assert all(fitted >= set(ids(traces, "train")) for fitted, _ in fold_sets)
    again = estimate_causal("imitation", folds, judged, 0, Console(quiet=True))
    assert np.array_equal(seconds, again)


@pytest.mark.parametrize("agent", AGENTS)
def test_every_candidate_is_one_of_the_agent(agent):
    settings = AGENTS[agent].settings
    assert 3 <= len(CANDIDATES[agent]) <= 6
    for candidate in CANDIDATES[agent]:
        assert changed(settings, candidate) != settings


def test_changes_reach_nested_settings():
    settings = changed(ImitationTraining(), "recipe.fit.hidden_sizes=8x4 num_rows=7")
    assert settings.recipe.fit.hidden_sizes == (8, 4)
    assert settings.num_rows == 7
    assert changed(AGENTS["ucb"].settings, "options=scope=request").options == "scope=request"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--candidates", "recipe.fit.drop=0.2"], "no setting 'drop'; there are loss"),
        (["--candidates", "dropout"], "'dropout' is not setting=value"),
        (["--candidates", "recipe.fit.dropout=2"], "fit.dropout"),
        (["--candidates", "recipe.fit.dropout=much"], "dropout must be of type float"),
        (["--num-judged", "7"], "num_judged: must be from 0 to the 3 folds"),
        (["--agent", "specrouter"], "no agent 'specrouter' learns"),
        (["--folds", "99"], "folds: must be from 2"),
        (["--traces", "none.npz"], "there is no file"),
    ],
)
def test_wrong_settings_are_refused(path, options, message, capsys):
    assert main(["search", "imitation", "--traces", str(path), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_file_is_not_changed_by_a_search(path, traces):
    assert ids(load_traces(path), "held-out") == ids(traces, "held-out")
