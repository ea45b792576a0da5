"""Every module can be imported, from wherever specgym is installed."""

import importlib
import pkgutil

import pytest

PACKAGES = ("engine", "envs", "agents", "baselines", "runs")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_module_can_be_imported(name):
    package = importlib.import_module(f"specgym.{name}")
    found = [each.name for each in pkgutil.walk_packages(package.__path__, f"specgym.{name}.")]
    assert len(found) > 10
    for each in found:
        importlib.import_module(each)
