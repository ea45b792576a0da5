"""What all tests share."""

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
