import json

import numpy as np
import pytest

from specgym.runs.loop import RequestRecord
from specgym.runs.results import bootstrap, results_table, speedup, summarize, write_json


def record(seconds: float, tokens: int, action: int = 1) -> RequestRecord:
    step = {
        "tokens": tokens,
        "action": action,
        "executed_action": action,
        "chain": "draft>target" if action else "target",
        "accepted": tokens - 1,
        "controller_seconds": 0.001,
    }
    return RequestRecord("id", "kind", 0.5, seconds, list(range(tokens)), [step])


def test_speedup_is_a_ratio_of_sums_not_a_mean_of_ratios():
    none, ours = [record(1.0, 4), record(10.0, 40)], [record(2.0, 4), record(5.0, 40)]
    assert speedup(none, ours) == pytest.approx(11.0 / 7.0)
    assert speedup(none, ours) != pytest.approx((0.5 + 2.0) / 2)


def test_a_shorter_text_is_no_speed_up():
    none, cut = [record(4.0, 40)], [record(1.0, 10)]
    assert speedup(none, cut) == pytest.approx(1.0)
    assert bootstrap(none, cut) == pytest.approx((1.0, 1.0))


def test_interval_holds_the_ratio_and_widens_with_spread():
    rng = np.random.default_rng(0)
    none = [record(1.0, 4) for _ in range(40)]
    steady = [record(0.5, 4) for _ in range(40)]
    spread = [record(float(s), 4) for s in rng.uniform(0.1, 0.9, 40)]
    assert bootstrap(none, steady) == pytest.approx((2.0, 2.0))
    low, high = bootstrap(none, spread)
    assert low < speedup(none, spread) < high
    assert high - low > 0.2


def test_summary_counts_worst_request_and_fast_baseline_per_token():
    none = [record(1.0, 4, 0), record(1.0, 4, 0)]
    fast = [record(0.5, 2, 0), record(0.5, 2, 0)]  # other text: half the tokens
    ours = [record(0.5, 4), record(2.0, 4)]
    entry = summarize(none, fast, ours)
    assert entry["request_speedup"]["worst"] == pytest.approx(0.5)
    assert entry["speedup_vs_fast"] == pytest.approx((1.0 / 4) / (2.5 / 8))
    assert entry["end_to_end_speedup"] == pytest.approx(3.0 / 3.5)
    assert entry["share_k0"] == {"chosen": 0.0, "executed": 0.0}
    assert entry["mean_accepted"] == 3.0
    assert entry["share_chains"] == {"draft>target": 1.0}


def test_table_of_plain_decoding_alone_has_no_nan():
    none = [record(1.0, 1, 0)]
    entry = summarize(none, none, none)
    assert np.isfinite(json.loads(json.dumps(entry))["speedup"])
    table = results_table({"pool": "p", "workload": "w", "controllers": {"none": entry}})
    assert table.row_count == 1


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
