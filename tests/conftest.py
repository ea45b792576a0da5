"""What all tests share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # tiny models gain nothing from a second thread, and stall on a busy one


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that lets tests write the pages they check."""
    parser.addoption("--write-docs", action="store_true", help="write docs/ from what passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked ``gpu`` out where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=for_gpu)
    items[:] = [item for item in items if item not in for_gpu]


@pytest.fixture(scope="session")
def make_info() -> Callable[..., dict[str, Any]]:
    """What makes the info of an iteration, as far as controllers that learn on line read it."""

    def make(
        action: int,
        accepted: float = 0.0,
        cost: float = 1.0,
        rows: int = 1,
        catchup: float = 0.0,
        baseline: float = 2.0,
        **changes: Any,
    ) -> dict[str, Any]:
        info = {
            "tokens": rows * (accepted + 1),
            "accepted_per_level": [rows * accepted] if action else [],
            "iter_seconds": baseline * cost,
            "catchup_seconds": baseline * catchup,
            "baseline_seconds": baseline / rows,
            "num_active": rows,
            "executed_action": action,
            "reason": "",
            "finish_reason": None,
        }
        return {**info, **changes}

    return make
