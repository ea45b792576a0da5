"""The file from which a stopped comparison goes on."""

import numpy as np
import pytest

from specgym.runs.loop import RequestRecord
from specgym.runs.progress import STATE_FILE, STEPS_FILE, Progressed, write_steps


@pytest.fixture
def progressed(tmp_path):
    """Two rounds of two controllers, saved; bytes of a third that was stopped lie behind them."""
    done = Progressed({"none": [], "random": []})
    with (tmp_path / STEPS_FILE).open("wb") as file:
        for index in range(2):
            for name, records in done.records.items():
                steps = [{"tokens": 1, "seconds": 0.1 / 3, "divergence": {"a>b": 0.5}}] * 2
                record = RequestRecord(f"r{index}", "math", 0.25, 1.0 / 3, [7, 8], steps)
                records.append(record)
                write_steps(file, name, index, record)
        done.steps_size = file.tell()
        file.write(b'{"controller": "none", "req')
    generator = np.random.default_rng(3).bit_generator.state
    done.states = {
        "none": [{"plans": ["none"]}, {"tokens": {"a>b": 0.1}}],
        "random": [{"rng": generator}, {}],
    }
    done.baselines = {True: {0: [0.1, 0.2], 3: [1.0 / 3]}, False: {1: [0.5]}}
    done.save(tmp_path)
    return done


def test_what_was_measured_comes_back_bit_for_bit(progressed, tmp_path):
    assert Progressed.load(tmp_path) == progressed


def test_lost_iterations_are_refused(progressed, tmp_path):
    steps = tmp_path / STEPS_FILE
    steps.write_bytes(steps.read_bytes()[: progressed.steps_size - 1])
    with pytest.raises(ValueError, match=r"steps\.jsonl: must hold.*--overwrite"):
        Progressed.load(tmp_path)
    steps.unlink()
    with pytest.raises(ValueError, match="has 0"):
        Progressed.load(tmp_path)


def test_a_state_from_elsewhere_is_never_executed(progressed, tmp_path):
    marker = tmp_path / "executed"
    hostile = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()  # what unpickling would run
    for name in (STATE_FILE, "state.pkl"):
        (tmp_path / name).write_bytes(hostile)
    with pytest.raises(ValueError, match=r"cannot be used.*--overwrite"):
        Progressed.load(tmp_path)
    assert not marker.exists()
