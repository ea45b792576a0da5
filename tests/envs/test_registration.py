"""The documented ways to an environment, in an editable install and as a wheel lays it out."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "by module": """
envs = gym.make_vec("specgym.envs:specgym/Replay-v0", num_envs=3, traces=PATH)
env = gym.make("specgym.envs:specgym/Replay-v0", traces=PATH)
""",
    "by import": """
import specgym.envs
envs = gym.make_vec(
    "specgym/Replay-v0", num_envs=3, vectorization_mode="vector_entry_point", traces=PATH
)
env = gym.make("specgym/Replay-v0", traces=PATH)
assert gym.spec("specgym/SpecDecode-v0").entry_point == "specgym.envs.decode:SpecDecodeEnv"
""",
}
SCRIPT = """
import sys
import gymnasium as gym
PATH, HOME = sys.argv[1:]
{way}
assert envs.reset(seed=0)[0].shape[0] == 3
env.reset(seed=0)
import specgym.envs
assert specgym.envs.__file__.startswith(HOME), specgym.envs.__file__
"""


@pytest.fixture(scope="session")
def wheel_home(tmp_path_factory):
    """The packages as a wheel unpacks them, without the weights that ship beside the engine."""
    if not (ROOT / "engine").is_dir():
        pytest.skip("beside a built wheel there are no sources to lay out")
    home = tmp_path_factory.mktemp("wheel")
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    for package, folder in options["setuptools"]["package-dir"].items():
        ignored = shutil.ignore_patterns("shipped", "__pycache__", "*.pyc")
        target = home / package.replace(".", "/")
        shutil.copytree(ROOT / folder, target, ignore=ignored, dirs_exist_ok=True)
    return home


@pytest.fixture(scope="session")
def trace_path(tmp_path_factory):
    from specgym.envs.replay.synthetic import synthetic_traces
    from specgym.envs.replay.traces import save_traces

    path = tmp_path_factory.mktemp("traces") / "t.npz"
    save_traces(path, synthetic_traces(4, 20))
    return path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("install", ["editable", "wheel"])
def test_the_documented_ways_lead_to_the_environments(way, install, trace_path, request, tmp_path):
    home, more = ROOT, {}
    if install == "wheel":
        home = request.getfixturevalue("wheel_home")
        more = {"PYTHONPATH": str(home)}
    script = SCRIPT.format(way=WAYS[way])
    subprocess.run(
        [sys.executable, "-c", script, str(trace_path), str(home)],
        env=os.environ | more,
        cwd=tmp_path,
        check=True,
    )
