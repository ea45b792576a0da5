"""Help is quick: what is slow to import waits for the command itself."""

import subprocess
import sys

import pytest

from specgym.engine.pool import DEFAULT_K_VALUES
from specgym.engine.pools.loading import BUILT_IN_POOLS, MIXTURE_POOL
from specgym.runs import settings
from specgym.runs.bench import configs as bench_configs
from specgym.runs.bench.command import BENCHES
from specgym.runs.cli import COMMANDS, main
from specgym.runs.peers.environments import RECIPES
from specgym.runs.train.configs import SETTINGS
from specgym.runs.train.offline import AGENTS

HEAVY = {
    *("torch", "transformers", "stable_baselines3", "sb3_contrib", "matplotlib", "gymnasium"),
    *("tensorboard", "pandas", "scipy", "accelerate"),
}
HELP = """
import sys
from specgym.runs.cli import main
status = main(sys.argv[1:])
loaded = {name.partition(".")[0] for name in sys.modules}
print(status, *sorted(loaded), file=sys.stderr)
"""
ASKED = [
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in COMMANDS),
    ["compare", "--recipe", "demo", "--help"],
    *(["train", agent, "--env", "replay", "--help"] for agent in SETTINGS),
    *(["pool", action, "--help"] for action in ("list", "show", "fetch", "build")),
    *(["bench", name, "--help"] for name in BENCHES),
]


@pytest.mark.parametrize("arguments", ASKED, ids=" ".join)
def test_help_loads_nothing_that_is_slow(arguments):
    command = [sys.executable, "-c", HELP, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, *loaded = done.stderr.splitlines()[-1].split()
    assert status == "0"
    assert HEAVY & set(loaded) == set()
    assert len(done.stdout) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--nonsense"], "--nonsense"),
        (["compare", "--controllers", "none,none"], "named twice"),
        (["bench", "speed"], "no bench"),
        (["train", "sarsa", "--env", "replay"], "no agent 'sarsa' learns from traces"),
    ],
)
def test_a_slip_is_told_as_quickly(arguments, message):
    command = [sys.executable, "-c", HELP, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, *loaded = done.stderr.splitlines()[-1].split()
    assert status == "2"
    assert message in done.stdout + done.stderr
    assert HEAVY & set(loaded) == set()


def test_help_knows_the_engines_own_constants():
    assert settings.K_VALUES == DEFAULT_K_VALUES
    assert settings.MIXTURE_POOL == MIXTURE_POOL
    assert ("transformers", *RECIPES) == bench_configs.PEERS
    assert tuple(BUILT_IN_POOLS) == bench_configs.BUILT_IN_POOLS
    assert {
        name: entry.load().settings for name, entry in BENCHES.items()
    } == bench_configs.SETTINGS
    assert list(AGENTS) == list(SETTINGS)


def test_help_says_what_every_bench_is_for(capsys):
    assert main(["bench", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in BENCHES)
