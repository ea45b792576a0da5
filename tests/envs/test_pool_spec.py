import dataclasses
import json

import pytest

from specgym.engine.members.traits import HEAD, LOOKUP, MODEL
from specgym.engine.testing import tiny_pool
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.synthetic import synthetic_layout


def test_a_layout_says_what_its_pool_does(pool):
    layout = Layout.of(pool)
    assert list(layout.plans()) == pool.plans()
    assert layout.chains == layout.speculative_chains == pool.chains
    assert layout.drafters == ("ngram", "draft", "mid")
    assert layout.followers == ("draft", "mid")
    assert layout.traits == {
        "ngram": dataclasses.replace(LOOKUP, max_ngram=3),
        **dict.fromkeys(("draft", "mid", "target"), MODEL),
    }
    assert layout.context_limits == {n: m.context_limit for n, m in pool.members.items()}
    assert (layout.window, layout.max_ngram) == (pool.window, 3)
    assert layout.experts_per_token == 0
    assert (layout.max_verifiers, layout.max_proposed) == (2, 7)


def test_pairs_are_in_order_of_appearance():
    pairs = ("ngram>target", "eagle>target", "small>target", "mid>target")
    assert synthetic_layout().pairs == (*pairs, "ngram>mid", "eagle>mid", "small>mid")


def test_json_brings_a_layout_back(pool):
    for layout in (Layout.of(pool), synthetic_layout(2)):
        assert Layout.from_plain(json.loads(json.dumps(layout.as_plain()))) == layout


def test_a_layout_without_lookup_or_chains_is_fine():
    pool = tiny_pool()
    layout = dataclasses.replace(Layout.of(pool), chains=())
    assert (layout.drafters, layout.pairs, layout.max_verifiers) == ((), (), 1)
    assert [plan.name for plan in layout.plans()] == ["none"]


def test_a_subset_of_k_values_keeps_all_else(pool):
    layout = Layout.of(pool)
    some = layout.with_k_values((4, 1))
    assert some.k_values == (1, 4)
    assert dataclasses.replace(some, k_values=layout.k_values) == layout
    for wrong in ((), (5,), (1, 7)):
        with pytest.raises(ValueError, match=r"k_values: must be some of 1, 2, 3, 4, 6"):
            layout.with_k_values(wrong)


def test_what_does_not_go_together_is_refused(pool):
    plain = Layout.of(pool).as_plain()
    with pytest.raises(ValueError, match="missing or unknown entries: window"):
        Layout.from_plain({name: value for name, value in plain.items() if name != "window"})
    with pytest.raises(ValueError, match="missing or unknown entries: colour"):
        Layout.from_plain({**plain, "colour": 1})
    with pytest.raises(ValueError, match="must name the same members"):
        Layout.from_plain({**plain, "chains": [["other", "target"]]})
    with pytest.raises(ValueError, match="must name the same members"):
        Layout.from_plain({**plain, "context_limits": {"target": 9}})
    with pytest.raises(ValueError, match="missing or unknown entries: traits"):
        Layout.from_plain({name: value for name, value in plain.items() if name != "traits"})


OLD_KINDS = {"ngram": "ngram", "eagle": "eagle"} | dict.fromkeys(
    ("small", "mid", "target"), "model"
)


def test_kinds_of_older_files_become_traits():
    layout = synthetic_layout()
    plain = layout.as_plain()
    del plain["traits"]
    old = plain | {"kinds": OLD_KINDS, "ngram_window": 3}
    assert Layout.from_plain(old) == layout
    assert layout.traits["eagle"] == HEAD
    assert Layout.from_plain(old | {"ngram_window": 5}).max_ngram == 5
    with pytest.raises(ValueError, match="kinds: must be of ngram, model, eagle; got 'bird'"):
        Layout.from_plain(old | {"kinds": OLD_KINDS | {"mid": "bird"}})
