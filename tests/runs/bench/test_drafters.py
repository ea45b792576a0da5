"""``specgym bench drafters`` on tiny models: what agrees, what is refused."""

import json

import pytest

from specgym.runs.cli import main


@pytest.fixture
def options(tiny_spec, short_prompts):
    settings = {"pool": tiny_spec, "prompts": short_prompts, "dtype": "float32"}
    settings |= {"limit": 2, "new-tokens": 8}
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def test_agreement_per_drafter_and_category(options, tmp_path, capsys):
    path = tmp_path / "drafters.json"
    assert main(["bench", "drafters", *options, "--json", str(path)]) == 0
    assert "agreement of the first" in capsys.readouterr().out
    report = json.loads(path.read_text())
    rows = {(row["drafter"], row["category"]): row for row in report["rows"]}
    assert rows.keys() == {(d, c) for d in ("ngram", "draft") for c in ("left", "right")}
    for (drafter, _), row in rows.items():
        assert row["positions"] == 2 * 8
        assert 0.0 <= row["agreement"] <= row["proposed"] <= 1.0
        assert (row["proposed"] == 1.0) == (drafter == "draft")
    assert report["ratios"]["draft_agreement"] > 0.2
    assert report["ratios"]["draft_over_target_seconds"] > 0.0
    assert report["ratios"]["draft_over_byte_floor"] > 0.0
    assert not {"ngram_over_target_seconds", "ngram_over_byte_floor"} & report["ratios"].keys()
    assert [row["name"] for row in report["forwards"]] == ["draft", "target", "memory, read"]
    assert report["forwards"][-1]["unit"] == "GB/s"


def test_one_category_is_picked(options, tmp_path):
    path = tmp_path / "drafters.json"
    arguments = [*options, "--categories", "right", "--json", str(path)]
    assert main(["bench", "drafters", *arguments]) == 0
    assert json.loads(path.read_text())["categories"] == ["right"]


def test_wrong_options_are_refused(options, capsys):
    assert main(["bench", "drafters", *options, "--categories", "poetry"]) == 2
    assert "no prompt of 'poetry'; there are left, right" in capsys.readouterr().err
    assert main(["bench", "drafters", *options, "--limit", "0"]) == 2
