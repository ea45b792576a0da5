"""``specgym bench gpu``: a dry run without a GPU goes through all of it but the capture."""

import json

import pytest
import torch

from specgym.runs.bench import gpu as bench_gpu
from specgym.runs.bench.gpu_models import DENSE, MIXTURE, TINY_MIXTURE, fit, make_pool
from specgym.runs.cli import main

DRY = ("--device", "cpu", "--tiny", "--new-tokens", "10", "--context", "20", "--repeats", "1")
CHAINS = ("ngram>target", "draft>target", "mid>target", "draft>mid>target")


def run(tmp_path, *more):
    path = tmp_path / "gpu.json"
    status = main(["bench", "gpu", *DRY, "--json", str(path), *more])
    return status, json.loads(path.read_text())


def test_a_dry_run_passes_every_check(tmp_path, capsys):
    status, report = run(tmp_path)
    assert status == 0
    assert report["failed"] == []
    names = {check["name"] for check in report["checks"]}
    assert {f"dense: lossless: {chain}" for chain in CHAINS} <= names
    for model in ("dense", "mixture"):
        assert f"{model}: graph equals eager (exact)" in names
        assert f"{model}: captured" in names
        rows = [row for row in report["rows"] if row["model"] == model]
        assert [row["what"] for row in rows][:4] == [f"forward of {n}" for n in (1, 2, 4, 8)]
        assert all(row["eager_ms"] > 0 and row["graph_ms"] > 0 for row in rows)
        assert all(row["floor_ms"] > 0 for row in rows[:4])
    assert report["bandwidth"] > 0
    printed = capsys.readouterr().out
    assert "byte floor" in printed
    assert "a dry run: eager" in printed


def test_a_wrong_replay_fails_and_is_named(tmp_path, monkeypatch, capsys):
    class Wrong(bench_gpu.EagerCapture):
        def __call__(self, forward, inputs):
            replay = super().__call__(forward, inputs)

            def off(fresh):
                outputs = dict(replay(fresh))
                if "logits" in outputs:
                    outputs["logits"] = outputs["logits"].roll(1, dims=-1)
                return outputs

            return off

    monkeypatch.setattr(bench_gpu, "EagerCapture", Wrong)
    monkeypatch.setattr(bench_gpu, "TINY_MIXTURE", bench_gpu.TINY_DENSE)
    status, report = run(tmp_path)
    assert status == 1
    assert "dense: graph equals eager (exact)" in report["failed"]
    error = capsys.readouterr().err
    assert "dense: graph equals eager (exact)" in error


def test_without_a_device_it_says_so_and_exits_with_3(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == bench_gpu.NO_DEVICE == 3
    assert "no CUDA device here" in capsys.readouterr().err


def test_settings_that_cannot_work_are_refused(capsys):
    assert main(["bench", "gpu", "--device", "cpu", "--repeats", "0"]) == 2
    assert "repeats" in capsys.readouterr().err


def test_shapes_are_realistic_and_the_mixture_fits(monkeypatch):
    assert DENSE.layers * DENSE.layer_bytes > 1e9
    assert fit(MIXTURE, torch.device("cpu")) == MIXTURE
    for free, layers in ((10**12, 4), (3 * MIXTURE.layer_bytes * 3, 3), (10**9, 2)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        assert fit(MIXTURE, torch.device("cuda")).layers == layers


def test_bytes_read_count_the_experts_that_were_visited():
    pool = make_pool(TINY_MIXTURE, 64, torch.device("cpu"), 0)
    member = pool.model("target")
    memory = member.new_memory(1, 64)
    member.forward(memory, [[1]])
    one = bench_gpu.bytes_read(member)
    assert one == pytest.approx(2 * member.num_active_parameters, rel=0.01)
    member.forward(memory, [list(range(20))])
    assert one < bench_gpu.bytes_read(member) <= member.num_bytes
