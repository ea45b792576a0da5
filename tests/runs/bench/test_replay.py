import json

import pytest

from specgym.agents.policy_controller import LearnedController
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.traces import save_traces
from specgym.envs.replay.vector_replay import VectorReplay
from specgym.envs.text_features import CLASSES
from specgym.runs.bench.decision_latency import time_decisions
from specgym.runs.cli import main

SMALL = ("--num-envs", "16", "--single-steps", "50", "--vector-steps", "5", "--repeats", "2")


def test_it_reports_steps_a_second_of_both(tmp_path, capsys):
    save_traces(tmp_path / "some.npz", synthetic_traces(4, 12))
    path = tmp_path / "replay.json"
    arguments = ["--traces", str(tmp_path / "some.npz"), *SMALL, "--json", str(path)]
    assert main(["bench", "replay", *arguments]) == 0
    report = json.loads(path.read_text())
    assert set(report["ratios"]) == {
        "single_steps_per_second",
        "vector_steps_per_second",
        "learned_decision_milliseconds",
        "learned_act_milliseconds",
    }
    assert report["ratios"]["learned_act_milliseconds"] > 0.0
    assert (
        report["ratios"]["learned_decision_milliseconds"]
        > (report["ratios"]["learned_act_milliseconds"])
    )
    for row in report["rows"]:
        assert len(row["values"]) == 2
        assert min(row["values"]) > 0
        assert report["ratios"][f"{row['name']}_steps_per_second"] == row["median"]
    assert (report["num_traces"], report["num_actions"], report["num_envs"]) == (4, 36, 16)
    printed = capsys.readouterr().out
    assert "single_steps_per_second: " in printed
    assert "vector_steps_per_second: " in printed
    assert "learned_decision_milliseconds: " in printed


def test_a_decision_is_made_of_what_an_environment_observes(monkeypatch):
    """The observations that are timed are those of the replay's start and plain decoding."""
    seen = []
    act = LearnedController.act

    def watched(self, observation, mask):
        seen.append(observation.copy())
        return act(self, observation, mask)

    monkeypatch.setattr(LearnedController, "act", watched)
    library = TraceLibrary(synthetic_traces(2, 8))
    assert set(time_decisions(library, None, 1)) == {"decision", "act"}
    assert len(seen) == sum(map(len, library.traces))
    env = VectorReplay(library, 1, order="recorded")
    unknown = ("lag[", *CLASSES)  # followers run nowhere here, and traces name no tokenizer
    known = [not feature.name.startswith(unknown) for feature in env.features]
    assert seen[0][known] == pytest.approx(env.reset(0)[0][known])


def test_a_policy_that_is_not_there_is_refused(tmp_path, capsys):
    path = tmp_path / "nowhere.npz"
    assert main(["bench", "replay", *SMALL, "--policy", str(path)]) == 2
    assert f"there is no file {path}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["num-envs", "single-steps", "vector-steps", "repeats"])
def test_settings_below_one_are_refused(name, capsys):
    assert main(["bench", "replay", f"--{name}", "0"]) == 2
    assert f"{name.replace('-', '_')}: must be >= 1; got 0" in capsys.readouterr().err
