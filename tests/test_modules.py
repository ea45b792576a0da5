"""Every module can be imported, from wherever specgym is installed."""

import importlib
import pkgutil

import pytest

from specgym.runs.bench.command import BENCHES
from specgym.runs.cli import ROOMS, find
from specgym.runs.configs import CONFIGS

PACKAGES = ("engine", "envs", "agents", "baselines", "runs")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_module_can_be_imported(name):
    package = importlib.import_module(f"specgym.{name}")
    found = [each.name for each in pkgutil.walk_packages(package.__path__, f"specgym.{name}.")]
    assert len(found) > 10
    for each in found:
        importlib.import_module(each)


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_a_bench_is_in_the_room_that_its_table_names(name):
    BENCHES[name].load()


@pytest.mark.parametrize("command", sorted(CONFIGS))
def test_a_command_is_in_the_room_that_its_table_names(command):
    find(f"specgym.runs.{ROOMS.get(command, command)}", command)
