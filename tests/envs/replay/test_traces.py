"""The file of traces: what is written is read again, by numpy alone; what is broken is refused."""

import dataclasses
import json

import numpy as np
import pytest

from specgym.engine.members.traits import LOOKUP, MODEL
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import CostTable
from specgym.envs.replay.traces import (
    ARRAYS,
    Trace,
    TraceSet,
    accepted_per_level,
    check_trace,
    load_traces,
    save_traces,
)

LAYOUT = Layout(
    target="target",
    chains=(("ngram", "target"), ("small", "mid", "target")),
    k_values=(1, 3),
    window=8,
    context_limits={"ngram": 99, "small": 99, "mid": 99, "target": 99},
    traits={"ngram": LOOKUP, "small": MODEL, "mid": MODEL, "target": MODEL},
)


def make_trace(name="r", num_prompt=5, length=7, seed=0, split="train"):
    rng = np.random.default_rng(seed)
    sizes = {"P": num_prompt, "N": length, "T": num_prompt + length}
    sizes |= {"D": 2, "C": 2, "V": 2, "W": 4, "X": 5}
    arrays = {
        key: rng.integers(0, 4, [sizes[axis] for axis in axes]).astype(kind)
        for key, (kind, axes) in ARRAYS.items()
    }
    return Trace(name, "code", split, "length", length, **arrays)


def make_costs():
    sizes = {"kv_lengths": (1,), "baseline": (1,), "seconds": (3, 4, 8, 1), "experts": (3, 4, 8, 1)}
    sizes |= {"seconds_per_expert": (3,), "prefill": (3, 2), "overhead": (3, 2), "spread": (3, 4)}
    arrays = {name: np.full(size, 2.0) for name, size in sizes.items()}
    return CostTable(("target", "small", "mid"), (("target",), *LAYOUT.chains), **arrays)


@pytest.fixture
def traces():
    held = make_trace("h", 3, 9, seed=1, split="held-out")
    return TraceSet((make_trace(), held), LAYOUT, make_costs(), {"pool": "tiny", "exact": True})


def test_what_is_written_is_read_again(traces, tmp_path):
    path = tmp_path / "new" / "t.npz"
    save_traces(path, traces)
    again = load_traces(path)
    assert again.layout == traces.layout
    assert again.about == traces.about
    for before, after in zip(traces.traces, again.traces, strict=True):
        for field in dataclasses.fields(Trace):
            np.testing.assert_array_equal(getattr(before, field.name), getattr(after, field.name))
    for name, array in traces.costs.arrays().items():
        np.testing.assert_array_equal(array, again.costs.arrays()[name])
    assert [p.name for p in path.parent.iterdir()] == ["t.npz"]


def test_numpy_alone_reads_the_file(traces, tmp_path):
    save_traces(tmp_path / "t.npz", traces)
    with np.load(tmp_path / "t.npz", allow_pickle=False) as file:
        header = json.loads(str(file["header"]))
        assert header["labels"][1]["request_id"] == "h"
        first, second = np.split(file["output"], file["output.ends"][:-1])
        np.testing.assert_array_equal(second, traces.traces[1].output)
        assert len(first) == 7


def test_a_file_without_costs(traces, tmp_path):
    save_traces(tmp_path / "t.npz", dataclasses.replace(traces, costs=None))
    assert load_traces(tmp_path / "t.npz").costs is None


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_a_file_cut_short_is_refused(traces, tmp_path, share):
    path = tmp_path / "t.npz"
    save_traces(path, traces)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"cannot be used.*specgym record"):
        load_traces(path)


def rewrite(path, change):
    """Changes what a file of traces holds."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    change(header, arrays)
    arrays["header"] = np.array(json.dumps(header))
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, a: h.update(version=99), "version is 99"),
        (lambda h, a: h.update(schema="x"), "something else"),
        (lambda h, a: a.pop("matches"), "matches"),
        (lambda h, a: h["labels"].pop(), "1 labels"),
        (lambda h, a: a.update(matches=a["matches"][:, :1]), "matches of trace 'r'"),
        (lambda h, a: a.update(entropy=a["entropy"].astype(np.float64)), "must be float32"),
        (lambda h, a: h["layout"].pop("window"), "window"),
    ],
)
def test_a_foreign_file_is_refused(traces, tmp_path, change, message):
    path = tmp_path / "t.npz"
    save_traces(path, traces)
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        load_traces(path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 rubbish"])
def test_what_is_no_file_of_traces_is_refused(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be used"):
        load_traces(path)
    with pytest.raises(ValueError, match="no file"):
        load_traces(tmp_path / "none.npz")


def test_another_npz_is_refused(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="cannot be used"):
        load_traces(tmp_path / "t.npz")


def test_splits(traces):
    assert [t.request_id for t in traces.part("train").traces] == ["r"]
    assert [t.request_id for t in traces.part("held-out").traces] == ["h"]
    assert len(traces.part("all").traces) == 2
    with pytest.raises(ValueError, match="split"):
        traces.part("test")
    with pytest.raises(ValueError, match="no trace"):
        traces.part("train").part("held-out")


@pytest.mark.parametrize(
    ("matches", "drafted", "proposed", "accepted"),
    [
        ((3,), 2, [2], [2]),
        ((3,), 6, [6], [3]),
        ((2, 6), 4, [4, 3], [2, 3]),
        ((2, 1), 4, [4, 3], [2, 1]),
        ((6, 6), 1, [1, 2], [1, 2]),
        ((0, 0), 3, [3, 1], [0, 0]),
    ],
)
def test_levels_follow_by_prefix(matches, drafted, proposed, accepted):
    assert accepted_per_level(matches, drafted) == (proposed, accepted)


def test_arrays_must_go_together(traces):
    trace = dataclasses.replace(traces.traces[0], entropy=np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"entropy of trace 'r'.*\(7, 2\)"):
        check_trace(trace, LAYOUT)
