"""``specgym bench peers`` on tiny models: rows, ratios, the byte floor, and peers that are absent.

Peers that specgym does not depend on are never installed here: a stand-alone worker process that
speaks the same lines stands in for them.
"""

import copy
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from specgym.engine.forward.eagle import EagleCheckpoint
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.engine.pools.sources import LoadedModel
from specgym.engine.testing import tiny_llama
from specgym.engine.training.eagle import init_eagle
from specgym.runs.bench.bandwidth import MemoryReader, read
from specgym.runs.bench.configs import PeersBench
from specgym.runs.cli import main
from specgym.runs.peers import bench as bench_peers
from specgym.runs.peers import environments as peer_envs
from specgym.runs.peers import workers as peer_workers
from specgym.runs.peers.bench import bench_prompts
from specgym.runs.peers.byte_floor import ByteFloor, weight_bytes
from specgym.runs.peers.contestants import (
    Contestant,
    Run,
    WideHead,
    equal_share,
    load_assistant,
    run_rounds,
    total_seconds,
)
from specgym.runs.peers.environments import READY, PeerError, PeerRecipe, build_environment
from specgym.runs.peers.process import PeerProcess
from specgym.runs.peers.ratios import AIMS

QUIET = Console(quiet=True)
NEW_TOKENS = 6
FAKE_WORKER = """
import json, sys
print(json.dumps({"version": "1.0"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if 9999 in request["prompt"]:
        print("no memory", file=sys.stderr)
        sys.exit(3)
    if not request["prompt"]:
        answer = {"error": "ValueError: no prompt"}
    else:
        answer = {"tokens": [7] * min(request["new_tokens"], 100), "seconds": 0.5}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker_script(tmp_path):
    """A stand-alone program that answers as a peer's worker would."""
    path = tmp_path / "fake_worker.py"
    path.write_text(FAKE_WORKER)
    return path


@pytest.fixture
def worker(worker_script, tmp_path):
    """A running fake worker."""
    process = PeerProcess([sys.executable, str(worker_script)], tmp_path / "log", {})
    yield process
    process.close()


@pytest.fixture
def options(tiny_spec):
    """Command-line options of the smallest bench."""
    target = tiny_spec.partition("target=")[2]
    settings = {"pool": tiny_spec, "mixture": f"target=upcycled:8:2:{target}", "prompts": 1}
    settings |= {"assistant": "draft", "dtype": "float32", "repeats": 1, "mixture-repeats": 1}
    settings |= {"new-tokens": NEW_TOKENS}
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def test_report(options, tmp_path, capsys):
    file = tmp_path / "peers.json"
    assert main(["bench", "peers", *options, "--peers", "transformers", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    modes = ("plain", "exact", "lookup", "assisted")
    ours = [f"specgym, {mode}" for mode in modes]
    theirs = [f"transformers, {mode}" for mode in ("plain", "lookup", "assisted")]
    moe = ["specgym, plain", "specgym, exact", "transformers, plain"]
    assert [row["name"] for row in report["rows"]] == [*ours, *theirs, *moe]
    for row in report["rows"]:
        assert row["num_tokens"] == NEW_TOKENS
        assert row["equal_tokens"] == 1.0  # in float32 all decode the same text
        assert row["tokens_per_second"] == pytest.approx(NEW_TOKENS / row["median"])
        assert row["precision"] == "float32"
        assert row["same_precision"]
    assert report["ratios"].keys() == AIMS.keys() - {"plain_over_vllm"} | {
        "assisted_over_transformers"
    }
    assert report["absent"] == report["versions"] == {}
    assert report["settings"]["k"] == 4
    assert report["machine"]["threads"]
    floor = report["byte_floor"]
    assert floor["seconds"] == pytest.approx(floor["bytes"] / floor["bytes_per_second"])
    assert report["ratios"]["over_byte_floor"] == pytest.approx(
        floor["iteration_seconds"] / floor["seconds"]
    )
    assert "plain_over_transformers: " in (text := capsys.readouterr().out)
    assert "(aim >= 1.8)" in text


def test_peers_in_workers_and_absent_ones(options, worker_script, tmp_path, capsys, monkeypatch):
    """One peer answers from its worker, the other cannot be built and gets a line."""

    def environment(recipe, console):
        if recipe.name == "vllm":
            raise PeerError("its environment could not be built: no such package")
        return Path(sys.executable)

    monkeypatch.setenv("SPECGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peer_workers, "build_environment", environment)
    monkeypatch.setattr(peer_workers, "SCRIPT", worker_script)
    file = tmp_path / "peers.json"
    arguments = [*options, "--mixture", "none", "--peers", "vllm,llama-cpp", "--json", str(file)]
    assert main(["bench", "peers", *arguments]) == 0
    report = json.loads(file.read_text())
    row = next(row for row in report["rows"] if row["peer"] == "llama-cpp")
    assert (row["name"], row["median"]) == ("llama-cpp, bf16", 0.5)
    assert row["equal_tokens"] < 1.0
    assert row["precision"] == "bfloat16"  # whatever ours is
    assert report["versions"] == {"llama-cpp": "1.0"}
    ratios = ("plain_over_llama_cpp_bf16", "exact_over_fast", "over_byte_floor")
    assert sorted(report["ratios"]) == sorted(ratios)
    line = "vllm: not to be had: its environment could not be built: no such package"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--peers", "transformers,sglang"],
            "peers: no peer 'sglang'; there are transformers, vllm",
        ),
        (["--peers", "vllm,vllm"], "peers: must name each peer once"),
        (["--k", "0"], "k: must be >= 1; got 0"),
        (["--repeats", "0"], "repeats: must be >= 1"),
        (["--new-tokens", "-1"], "new_tokens: must be >= 1"),
        (["--new-tokens", "5000"], "new_tokens: must be <= "),
        (["--json", "no/such/folder/x.json"], "json: must lie in a folder that exists"),
        (["--mixture", "nothing"], "pool: 'nothing' is neither"),
    ],
)
def test_arguments_are_refused(arguments, message, options, capsys):
    assert main(["bench", "peers", *options, "--peers", "transformers", *arguments]) == 2
    text = " ".join(capsys.readouterr().err.replace("|", " ").split())  # without box and breaks
    assert message in text


def test_a_dense_mixture_is_refused(options, tiny_spec, capsys):
    arguments = [*options, "--peers", "transformers", "--mixture", tiny_spec]
    assert main(["bench", "peers", *arguments]) == 2
    assert "is no mixture of experts; name another pool, or 'none'" in capsys.readouterr().err


def test_an_assistant_that_is_not_there_gets_a_line(options, capsys):
    arguments = [*options, "--mixture", "none", "--peers", "transformers", "--assistant", "huge"]
    assert main(["bench", "peers", *arguments]) == 0
    text = capsys.readouterr().out
    assert "has no member 'huge'; it has ngram, draft, target" in text
    assert "specgym, assisted" not in text


class TestByteFloor:
    def test_arithmetic(self):
        assert ByteFloor(num_bytes=270, bandwidth=30.0).seconds == 9.0

    def test_of_a_dense_model_all_but_the_embedding_is_read(self, tiny_spec):
        pool = load_pool(tiny_spec, dtype=torch.bfloat16)
        whole = tiny_llama(vocab_size=98, max_position_embeddings=1024)
        embedding = whole.get_input_embeddings().weight.numel()
        everything = sum(p.numel() for p in whole.parameters())
        assert weight_bytes(pool.model("target")) == 2 * (everything - embedding)

    def test_of_a_tied_model_the_embedding_is_read_once(self, tmp_path):
        model = tiny_llama()
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(tmp_path)
        pool = load_pool(f"target={tmp_path}", dtype=torch.float32)
        assert weight_bytes(pool.model("target")) == 2 * sum(p.numel() for p in model.parameters())

    def test_of_a_mixture_only_visited_experts_are_read(self, tiny_spec):
        source = tiny_spec.partition("target=")[2]
        dense = load_pool(f"target={source}", dtype=torch.float32).model("target")
        pool = load_pool(f"target=upcycled:8:2:{source}", dtype=torch.float32)
        mlps, routers = 2 * 3 * 32 * 48, 2 * 8 * 32  # two layers
        wanted = weight_bytes(dense) + 2 * (mlps + routers)  # two experts instead of one MLP
        assert weight_bytes(pool.model("target")) == wanted

    def test_of_drafters_layers_and_their_own_head_are_read(self, tmp_path):
        """Embeddings are not, be they the target's or an EAGLE head's own."""
        target = tiny_llama(vocab_size=98, num_layers=6)
        ids, size = torch.arange(0, 98, 2), target.config.hidden_size
        head = init_eagle(target, (1, 3, 5), len(ids))
        own = torch.zeros(98, size)
        members = [
            EagleMember("eagle", EagleCheckpoint(head, ids, None, None), target),
            EagleMember("richer", EagleCheckpoint(head, ids, None, own), target),
            ModelMember("small", trimmed(target, ids), draft_ids=ids),
            ModelMember("target", target),
        ]
        pool = ModelPool(members)
        rows = len(ids) * size
        in_head = sum(p.numel() for p in head.parameters())
        assert weight_bytes(pool.neural("eagle")) == 2 * (in_head + rows)
        assert weight_bytes(pool.neural("richer")) == 2 * (in_head + rows)
        in_layers = weight_bytes(pool.model("target")) - 2 * 98 * size
        assert weight_bytes(pool.neural("small")) == in_layers + 2 * rows


def trimmed(target, ids):
    """A copy of a model that shares its embedding and has these rows of its head."""
    student = copy.deepcopy(target)
    student.set_input_embeddings(target.get_input_embeddings())
    student.lm_head = torch.nn.Linear(target.config.hidden_size, len(ids), bias=False)
    return student


class TestMemoryReader:
    def test_every_word_is_read(self):
        words = np.arange(4096, dtype=np.int64)
        assert read(words) == np.bitwise_xor.reduce(words)

    def test_the_fastest_pass_counts_and_the_median_call(self, monkeypatch):
        reader = MemoryReader(8000, num_threads=2)
        assert [len(part) for part in reader.parts] == [500, 500]
        passes = iter([4.0, 2.0, 9.0, 1.0, 1.0, 1.0, 8.0, 8.0, 4.0])
        monkeypatch.setattr(reader, "run_pass", lambda: next(passes))
        assert [reader() for _ in range(3)] == [2.0, 1.0, 4.0]
        assert reader.rates == [4000.0, 8000.0, 2000.0]
        assert reader.rate == 4000.0


def test_total_is_of_medians_and_equal_tokens_are_counted():
    runs = [Run(0, [1, 2], s) for s in (3.0, 1.0, 2.0)] + [
        Run(1, [3, 4], s) for s in (5.0, 5.0, 9.0)
    ]
    assert total_seconds(runs) == 2.0 + 5.0
    assert equal_share(runs, [Run(0, [1, 9], 1.0), Run(1, [3, 4], 1.0)]) == 0.75


def test_rounds_alternate_and_leave_out_what_fails():
    order = []

    def decoder(name, fails_after=99):
        def decode(prompt):
            if order.count(name) == fails_after:
                raise PeerError("it said nothing")
            order.append(name)
            return [1], 1.0

        return Contestant(name, name, "float32", decode)

    absent = {}
    contestants = [decoder("a"), decoder("b"), decoder("c", fails_after=2)]
    runs = run_rounds(contestants, [(1,), (2,)], 2, absent, QUIET)
    assert order == [*"abc", *"bca", *"ab", *"ab", *"ba"]
    assert absent == {"c": "it said nothing"}
    assert {name: [run.prompt for run in each] for name, each in runs.items()} == {
        "a": [0, 1, 0, 1],
        "b": [0, 1, 0, 1],
    }


class TestWorkerProcess:
    def test_it_stays_up(self, worker):
        assert worker.version == "1.0"
        assert worker.run((1, 2), 3) == ([7, 7, 7], 0.5)
        assert worker.run((1, 2), 1) == ([7], 0.5)

    def test_what_fails_is_said(self, worker):
        with pytest.raises(PeerError, match="it failed: ValueError: no prompt"):
            worker.run((), 3)
        with pytest.raises(PeerError, match="decoded 100 tokens where 101 were asked for"):
            worker.run((1,), 101)
        with pytest.raises(PeerError, match="its worker ended: no memory"):
            worker.run((9999,), 3)
        with pytest.raises(PeerError, match="its worker ended: no memory"):
            worker.run((1,), 3)

    def test_one_that_does_not_start(self, tmp_path):
        command = [sys.executable, "-c", "raise SystemExit('no such module')"]
        with pytest.raises(PeerError, match="its worker ended: no such module"):
            PeerProcess(command, tmp_path / "log", {})


def test_the_worker_program_speaks_lines(tmp_path):
    """Our worker with a fake binding in an environment of its own, started as the bench does."""
    (tmp_path / "llama_cpp.py").write_text(
        "class Llama:\n"
        "    def __init__(self, path, **settings): print('a banner')\n"
        "    def reset(self): pass\n"
        "    def generate(self, tokens, **settings):\n"
        "        while tokens: yield tokens[0]\n"
        "        raise RuntimeError('no tokens')\n"
    )
    (tmp_path / "llama_cpp_python-9.9.dist-info").mkdir()
    (tmp_path / "llama_cpp_python-9.9.dist-info" / "METADATA").write_text("Version: 9.9\n")
    command = [sys.executable, str(peer_workers.SCRIPT), "llama-cpp", "none.gguf"]
    worker = PeerProcess(command, tmp_path / "log", {"PYTHONPATH": str(tmp_path)})
    try:
        assert worker.version == "9.9"
        assert worker.run((5, 6), 3)[0] == [5, 5, 5]
        with pytest.raises(PeerError, match="RuntimeError: no tokens"):
            worker.run((), 3)
        assert worker.run((8,), 2)[0] == [8, 8]
    finally:
        worker.close()
    assert "a banner" in (tmp_path / "log").read_text()


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SPECGYM_CACHE", str(tmp_path / "cache"))

    @pytest.fixture
    def recipe(self):
        return PeerRecipe("fake", ("fake-peer==1",), "json", gigabytes=0.0, note="at once")

    @pytest.fixture
    def steps(self, monkeypatch):
        """Steps of the build, which are noted instead of run."""
        taken = []

        def run_step(recipe, command, console):
            recipe.python.parent.mkdir(parents=True, exist_ok=True)
            recipe.python.touch()
            taken.append(command[1:])

        monkeypatch.setattr(peer_envs, "run_step", run_step)
        return taken

    def test_it_is_built_once(self, recipe, steps):
        python = build_environment(recipe, QUIET)
        assert python.parts[-2:] == ("bin", "python")
        assert [step[:3] for step in steps] == [
            ["-m", "venv", "--clear"],
            ["-m", "pip", "install"],
            ["-I", "-c", "import json"],
        ]
        assert "fake-peer==1" in steps[1]
        assert (recipe.folder / READY).is_file()

    def test_a_stopped_build_goes_on(self, recipe, steps):
        recipe.python.parent.mkdir(parents=True)
        recipe.python.touch()
        build_environment(recipe, QUIET)
        assert steps[0][:3] == ["-m", "pip", "install"]
        assert build_environment(recipe, QUIET) == recipe.python
        assert len(steps) == 2

    def test_what_does_not_fit_is_removed(self, steps):
        recipe = peer_envs.RECIPES["vllm"]
        build_environment(dataclasses.replace(recipe, gigabytes=0.0), QUIET)
        assert steps[2] == ["-m", "pip", "uninstall", "--yes", *recipe.unwanted]

    def test_a_full_disk_is_said_before_it_is_full(self, steps):
        with pytest.raises(PeerError, match=r"takes 1e\+12 GB .* set SPECGYM_CACHE"):
            build_environment(PeerRecipe("big", ("x",), "x", 1e12, ""), QUIET)
        assert not steps

    def test_a_failed_step_gives_its_last_words(self, recipe, capsys):
        recipe.folder.parent.mkdir(parents=True)
        command = [sys.executable, "-c", "print('busy'); raise SystemExit('ERROR: no such thing')"]
        with pytest.raises(PeerError, match=r"built: ERROR: no such thing \(see .*log\)"):
            peer_envs.run_step(recipe, command, QUIET)

    def test_a_stopped_step_ends_all_it_started(self, recipe, monkeypatch, tmp_path):
        """The build's compilers must not go on when the user stops it."""
        recipe.folder.parent.mkdir(parents=True)
        child = tmp_path / "child"
        code = (
            "import subprocess, sys, pathlib, time\n"
            "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"pathlib.Path({str(child)!r}).write_text(str(p.pid)); time.sleep(600)\n"
        )

        def stop(process, *others):
            while not child.exists() or not child.read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

        monkeypatch.setattr(peer_envs, "watch", stop)
        with pytest.raises(KeyboardInterrupt):
            peer_envs.run_step(recipe, [sys.executable, "-c", code], QUIET)
        assert not is_running(child.read_text())


def is_running(pid):
    """Whether a process runs; one that has ended may still be waited for by its parent."""
    for _ in range(200):
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
        if state.stdout.strip()[:1] in ("", "Z"):
            return False
        time.sleep(0.05)
    return True


def test_prompts_are_of_every_category_first(tiny_spec):
    config = PeersBench(pool=tiny_spec, dtype="float32", prompts=4)
    assert len(set(bench_prompts(config, bench_peers.bench_pool(config, tiny_spec)))) == 4


def test_a_trimmed_head_has_no_mass_elsewhere():
    head = torch.nn.Linear(3, 2, bias=False)
    states = torch.ones(1, 1, 3)
    logits = WideHead(head, torch.tensor([1, 3]), vocab_size=5)(states)
    assert logits.shape == (1, 1, 5)
    assert torch.equal(logits[..., [1, 3]], head(states))
    assert logits[..., [0, 2, 4]].isneginf().all()


def test_a_head_on_the_target_is_no_assistant():
    target = LoadedModel(tiny_llama(), None, "", "tiny")
    with pytest.raises(PeerError, match="eagle is a head on the target"):
        load_assistant("shipped:smollm2-135m/eagle", target, 4)
