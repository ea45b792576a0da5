"""The file of a controller's state."""

import numpy as np
import pytest

from specgym.agents.saved_state import load_state, save_state


def test_a_tree_with_arrays_comes_back(tmp_path):
    state = {
        "plans": ["none", "ngram@1"],
        "matrix": np.arange(6.0).reshape(2, 3),
        "nested": {"counts": [np.array([1, 2]), 3], "none": None, "scalar": np.float64(0.5)},
    }
    save_state(tmp_path / "s.npz", "ucb", state)
    loaded = load_state(tmp_path / "s.npz", "ucb")
    assert loaded["plans"] == state["plans"]
    assert np.array_equal(loaded["matrix"], state["matrix"])
    assert loaded["matrix"].dtype == state["matrix"].dtype
    assert np.array_equal(loaded["nested"]["counts"][0], [1, 2])
    assert loaded["nested"] | {"counts": 0} == {"counts": 0, "none": None, "scalar": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def test_broken_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "s.npz"
    with pytest.raises(ValueError, match="no file"):
        load_state(path, "ucb")
    save_state(path, "ucb", {"a": np.zeros(100)})
    with pytest.raises(ValueError, match=r"of ucb, not of linucb.*specgym train linucb"):
        load_state(path, "linucb")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="cannot be used"):
        load_state(path, "ucb")
