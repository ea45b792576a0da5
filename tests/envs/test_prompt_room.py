"""Prompts that the target's context has no room for are found before anything runs."""

import json

import pytest

from specgym.envs.prompt_room import describe_skipped, fit_workload, keep_fitting
from specgym.envs.workloads import Request, Workload, get_workload, load_prompts


@pytest.fixture
def prompts_file(tmp_path):
    """Six prompts of two categories; the third and the fifth line are long (100 and 200)."""
    path = tmp_path / "prompts.jsonl"
    lengths = (5, 5, 100, 5, 200, 5)
    rows = [
        {"id": f"r{n}", "category": ("even", "odd")[n % 2], "prompt": "a" * length}
        for n, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_first_long_prompt_is_refused_with_file_line_and_way_out(variant, prompts_file):
    pool = variant({"target": 60})
    wanted = r"prompts\.jsonl, line 3 \(the first of 2\): .* context of 60, but .* has 1\d\d; .*"
    with pytest.raises(ValueError, match=wanted + "--skip-too-long"):
        fit_workload(get_workload("all", prompts=prompts_file), pool)


def test_an_environment_refuses_them_when_it_is_made(make_env, variant, prompts_file):
    arguments = {"pool": variant({"target": 60}), "workload": "even", "prompts": prompts_file}
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3"):
        make_env(**arguments)
    env = make_env(**arguments, skip_too_long=True)
    assert [request.id for request in env.workload.requests] == ["r0"]
    assert env.workload.num_skipped == 2
    for seed in range(3):
        assert env.reset(seed=seed)[1]["request_id"] == "r0"


def test_skipped_prompts_are_counted_and_the_rest_keeps_its_order(variant, prompts_file):
    workload = get_workload("even+odd", prompts=prompts_file)
    fitted = fit_workload(workload, variant({"target": 150}), skip_too_long=True)
    assert [[r.id for r in group] for group in fitted.groups] == [["r0", "r2"], ["r1", "r3", "r5"]]
    assert (fitted.num_skipped, fitted.name) == (1, workload.name)
    assert fit_workload(fitted, variant({"target": 150})).num_skipped == 1
    assert describe_skipped(1).startswith("1 prompt was left out")
    assert describe_skipped(2).startswith("2 prompts were left out")


def test_the_longest_prompt_that_fits_leaves_room_for_a_token(variant):
    pool = variant({"target": 60})
    bare = len(pool.encode("a")) - 1  # of the template, if any
    fits, does_not = (Request(f"{n}", "a" * n, "x") for n in (59 - bare, 60 - bare))
    assert keep_fitting([fits, does_not], pool, skip_too_long=True) == [fits]
    with pytest.raises(ValueError, match=f"^prompt '{does_not.id}': "):
        keep_fitting([fits, does_not], pool, skip_too_long=False)


def test_a_category_without_a_prompt_that_fits_is_refused(variant):
    groups = ((Request("a", "a", "x"),), (Request("b", "b" * 99, "y"),))
    with pytest.raises(ValueError, match="every one of 'y' is too long; give shorter"):
        fit_workload(Workload("two", groups), variant({"target": 60}), skip_too_long=True)


def test_requests_know_their_line(prompts_file):
    sources = [request.source for request in load_prompts(prompts_file)]
    assert sources == [f"{prompts_file}, line {n}" for n in range(1, 7)]
