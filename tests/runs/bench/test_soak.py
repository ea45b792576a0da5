import json
import mmap

import pytest

from specgym.runs.bench.soak import resident_bytes
from specgym.runs.cli import main


def soak(tmp_path, *more):
    path = tmp_path / "soak.json"
    status = main(["bench", "soak", "--num-requests", "40", "--json", str(path), *more])
    return status, json.loads(path.read_text()) if status == 0 else None


def test_a_soak_reports_memory_and_faults(tmp_path, capsys):
    status, report = soak(tmp_path, "--num-reports", "4")
    assert status == 0
    assert [row["requests"] for row in report["rows"]] == [10, 20, 30, 40]
    assert report["ratios"]["num_faults"] == 0
    assert abs(report["ratios"]["memory_growth"]) < 50
    assert report["num_tokens"] > 40
    printed = capsys.readouterr()
    assert "memory_growth: " in printed.out
    assert "num_faults: 0" in printed.out
    assert "30 requests, " in printed.err


def test_faults_are_counted_and_the_soak_goes_on(tmp_path, monkeypatch):
    from specgym.engine.members.ngram import NGramMember

    def broken(self, memory, tokens, k):
        raise IndexError("no such token")

    monkeypatch.setattr(NGramMember, "propose", broken)
    _, report = soak(tmp_path, "--num-reports", "2")
    assert report["rows"][-1]["requests"] == 40
    assert report["ratios"]["num_faults"] == len(report["faults"]) > 5
    assert "IndexError: no such token" in report["faults"][0]


@pytest.mark.parametrize("arguments", [("--num-reports", "1"), ("--max-new-tokens", "0")])
def test_settings_that_cannot_work_are_refused(tmp_path, arguments, capsys):
    assert soak(tmp_path, *arguments)[0] == 2
    assert arguments[0].strip("-").replace("-", "_") in capsys.readouterr().err


def test_resident_memory_is_seen():
    before = resident_bytes()
    # Pages of its own: an allocator may hand out what a test before has left resident.
    with mmap.mmap(-1, 64_000_000) as block:
        for start in range(0, len(block), 4096):
            block[start] = 1
        assert resident_bytes() - before > 40_000_000
