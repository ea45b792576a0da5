import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import groupby, islice

import numpy as np
import pytest

from specgym.envs.workloads import Request, Workload, built_in_prompts, get_workload, load_prompts

CATEGORIES = ("code", "math", "extract", "chat")
MIXES = {
    "code+math": 2,
    "math+extract": 2,
    "code+extract": 2,
    "all-3": 3,
    "all-4": 4,
    "chat+code+extract": 3,
}
NAMES = (*CATEGORIES, *MIXES, "all", "phases")


def ids(requests):
    return [request.id for request in requests]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def bench_file(tmp_path):
    """Two categories of unequal size in the form of Spec-Bench."""
    sizes = [("qa", 7), ("writing", 3)]
    records = [
        {"question_id": 100 * len(category) + n, "category": category, "turns": [f"{category} {n}"]}
        for category, size in sizes
        for n in range(size)
    ]
    return write(tmp_path / "bench.jsonl", *records)


# Built-in prompts


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_category_has_36_different_prompts_of_varied_length(category):
    prompts = [request.prompt for request in get_workload(category).requests]
    lengths = sorted(len(prompt.split()) for prompt in prompts)
    assert len(set(prompts)) == len(prompts) == 36
    assert lengths[0] <= 20
    assert lengths[-1] >= 150
    assert lengths[-9] >= 2 * lengths[9]


def test_built_in_ids_are_unique_and_name_the_category():
    prompts = built_in_prompts()
    assert len(set(ids(prompts))) == len(prompts) == 144
    assert all(request.id.startswith(request.category + "-") for request in prompts)
    assert all(request.prompt == request.prompt.strip() for request in prompts)


# Streams


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides_the_stream(name):
    workload = get_workload(name)
    assert workload.select(90, seed=3) == workload.select(90, seed=3)
    assert workload.select(90, seed=3) != workload.select(90, seed=4)
    assert workload.select(90, seed=np.random.default_rng(3)) == workload.select(90, seed=3)


def test_interleaved_streams_do_not_disturb_each_other():
    workload = get_workload("all-3")
    first, second = workload.stream(1), workload.stream(2)
    pairs = [(next(first), next(second)) for _ in range(40)]
    assert tuple(zip(*pairs, strict=True)) == (workload.select(40, 1), workload.select(40, 2))


def test_another_process_with_another_hash_seed_draws_the_same_stream():
    script = (
        "from specgym.envs.workloads import get_workload\n"
        "for name in ('all-3', 'phases', 'all'):\n"
        "    print([r.id for r in get_workload(name, split='train').select(50, seed=11)])\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 3


@pytest.mark.parametrize(("name", "size"), MIXES.items())
def test_every_window_of_a_mix_is_balanced(name, size):
    categories = [request.category for request in get_workload(name).select(150, seed=5)]
    for blocks in (1, 2, 7):
        for start in range(150 - blocks * size):
            window = Counter(categories[start : start + blocks * size])
            assert set(window.values()) == {blocks}
            assert len(window) == size


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_comes_again_only_after_all_of_its_category(name):
    stream = get_workload(name).stream(seed=8)
    by_category = {}
    for request in islice(stream, 300):
        by_category.setdefault(request.category, []).append(request.id)
    if name == "all":
        by_category = {"all": ids(get_workload("all").select(288, seed=8))}
    size = len(get_workload(name).groups[0])
    for drawn in by_category.values():
        for start in range(0, len(drawn) - size, size):
            assert len(set(drawn[start : start + size])) == size


def test_the_order_is_drawn_anew_when_a_category_is_used_up():
    drawn = get_workload("math").select(72, seed=0)
    assert sorted(ids(drawn[:36])) == sorted(ids(drawn[36:]))
    assert drawn[:36] != drawn[36:]


def test_the_order_of_names_in_a_mix_makes_no_difference():
    forward, backward = get_workload("code+math"), get_workload("math+code")
    assert forward.select(20, seed=1) == backward.select(20, seed=1)


@pytest.mark.parametrize(("arguments", "length"), [({}, 6), ({"phase_length": 4}, 4)])
def test_phases_are_runs_of_one_category_and_never_the_same_twice(arguments, length):
    drawn = get_workload("phases", **arguments).select(length * 12, seed=2)
    runs = [(category, len(list(run))) for category, run in groupby(r.category for r in drawn)]
    assert [size for _, size in runs] == [length] * 12
    assert Counter(category for category, _ in runs) == dict.fromkeys(CATEGORIES, 3)


def test_select_of_none_is_empty_and_past_the_pool_repeats_ids():
    workload = get_workload("chat")
    assert workload.select(0, seed=0) == ()
    assert len(workload.select(100, seed=0)) == 100
    assert set(workload.select(100, seed=0)) == set(workload.requests)


# Splits


@pytest.mark.parametrize("name", NAMES)
def test_the_splits_are_disjoint_and_together_everything(name):
    train, held_out, everything = (
        set(get_workload(name, split=split).requests) for split in ("train", "held-out", "all")
    )
    assert train.isdisjoint(held_out)
    assert train | held_out == everything
    assert len(train) == 2 * len(held_out)


def test_a_stream_keeps_to_its_split():
    held_out = get_workload("phases", split="held-out").select(200, seed=0)
    assert {int(request.id[-2:]) % 3 for request in held_out} == {0}
    assert len(set(held_out)) == 48


def test_a_file_is_split_by_the_order_of_its_lines(bench_file):
    assert ids(get_workload("qa", prompts=bench_file, split="held-out").requests) == ["202", "205"]
    train = get_workload("all", prompts=bench_file, split="train").requests
    assert ids(train) == ["200", "201", "203", "204", "206", "700", "701"]


def test_an_empty_split_names_the_category_and_the_way_out(tmp_path):
    path = write(tmp_path / "two.jsonl", {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(ValueError, match=r"split: 'held-out' .* none of 'custom', .* split 'all'"):
        get_workload("custom", prompts=path, split="held-out")


# Names


def test_categories_of_a_file_can_be_chosen_mixed_and_alternated(bench_file):
    assert len(get_workload("writing", prompts=bench_file).requests) == 3
    mix = get_workload("qa+writing", prompts=bench_file).select(12, seed=0)
    assert Counter(request.category for request in mix) == {"qa": 6, "writing": 6}
    phases = get_workload("phases", prompts=bench_file, phase_length=2).select(8, seed=0)
    assert [len(list(run)) for _, run in groupby(r.category for r in phases)] == [2, 2, 2, 2]


def test_all_of_a_file_gives_each_line_once_before_any_comes_again(bench_file):
    drawn = get_workload("all", prompts=bench_file).select(20, seed=0)
    assert set(drawn[:10]) == set(drawn[10:]) == set(load_prompts(bench_file))


def test_a_category_with_a_plus_in_its_name_can_be_chosen(tmp_path):
    path = write(tmp_path / "plus.jsonl", {"prompt": "a", "category": "c++"}, {"prompt": "b"})
    assert ids(get_workload("c++", prompts=path).requests) == ["line-1"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cod", "did you mean 'code'?"),
        ("Math", "did you mean 'math'?"),
        ("all3", "did you mean 'all-3'?"),
        ("code+maht", "did you mean 'code+math'?"),
        ("code+code", "did you mean 'code'?"),
        ("phase", "did you mean 'phases'?"),
    ],
)
def test_an_unknown_name_lists_the_names_and_the_closest(name, hint):
    with pytest.raises(ValueError, match="workload: must be one of 'code', 'math', ") as error:
        get_workload(name)
    assert str(error.value).endswith(f"not {name!r}; {hint}")


def test_a_name_that_is_close_to_none_gets_no_hint():
    with pytest.raises(ValueError, match=r"'all', 'phases', or .* joined by '\+', not 'zzz'$"):
        get_workload("zzz")


def test_names_of_a_file_are_its_own(bench_file, tmp_path):
    with pytest.raises(ValueError, match=r"one of 'qa', 'writing', 'all', 'phases', or .* 'code'"):
        get_workload("code", prompts=bench_file)
    path = write(tmp_path / "one.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match=r"one of 'custom', 'all', or .* not 'phases'"):
        get_workload("phases", prompts=path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.stream(-1), "seed: must be a whole number of 0 or more, not -1"),
        (lambda w: w.stream(None), "seed: must be a whole number of 0 or more, not None"),
        (lambda w: w.stream(1.0), "seed: must be a whole number of 0 or more, not 1.0"),
        (lambda w: w.stream(True), "seed: must be a whole number of 0 or more, not True"),
        (lambda w: w.select(-2, 0), "n: must be a whole number of 0 or more, not -2"),
        (
            lambda w: get_workload("phases", phase_length=0),
            "phase_length: must be a whole number of 1 or more, not 0",
        ),
        (
            lambda w: get_workload("code", split="test"),
            "split: must be one of 'train', 'held-out', 'all', not 'test'",
        ),
    ],
)
def test_wrong_arguments_are_named_at_once(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(Workload("code", (built_in_prompts(),)))


# Files


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"task_id": "HumanEval/7", "prompt": "def f():\n", "entry_point": "f", "test": ""},
            ("HumanEval/7", "def f():\n", "code"),
        ),
        ({"question": "How many?", "answer": "#### 3"}, ("line-1", "How many?", "math")),
        (
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
            ("81", "Write.", "writing"),
        ),
        ({"prompt": "Hi"}, ("line-1", "Hi", "custom")),
        ({"id": "a", "category": "chat", "prompt": "Hi", "extra": [1]}, ("a", "Hi", "chat")),
        ({"id": 0, "prompt": "caf\u00e9 \U0001f600"}, ("0", "caf\u00e9 \U0001f600", "custom")),
    ],
    ids=["humaneval", "gsm8k", "spec-bench", "prompt-only", "own", "unicode"],
)
def test_each_form_of_file(tmp_path, record, expected):
    (request,) = load_prompts(write(tmp_path / "file.jsonl", record))
    assert (request.id, request.prompt, request.category) == expected


def test_byte_order_mark_blank_lines_crlf_and_no_final_newline(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}')
    assert [(r.id, r.prompt) for r in load_prompts(path)] == [("line-1", "a"), ("line-4", "b")]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x7f", "\u00a0"])
def test_separators_inside_a_string_do_not_end_the_line(tmp_path, separator):
    path = tmp_path / "separators.jsonl"
    prompt = f"one{separator}two"
    path.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [request.prompt for request in load_prompts(path)] == [prompt]


GOOD = b'{"prompt": "fine"}\n'


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ["file.jsonl: must hold at least one prompt", "empty", "add a line"]),
        (b"\n \r\n", ["file.jsonl: must hold at least one prompt"]),
        (GOOD + b'{"prompt": "caf\xe9"}', ["line 2", "UTF-8", "0xe9", "save it as UTF-8"]),
        (b"\xef\xbb\xbf" + GOOD + b"\xff", ["line 2", "UTF-8", "0xff"]),
        (GOOD + b"{prompt: 1}", ["line 2", "must be JSON", "'{prompt: 1}'", "column 2"]),
        (GOOD + b"\n{", ["line 3", "must be JSON", "one object a line"]),
        (b"[" * 100_000, ["line 1", "must be JSON", "[[[..."]),
        (GOOD + b'["fine"]', ["line 2", "must be a JSON object", '["fine"]']),
        (b"null", ["line 1", "must be a JSON object", "'null'"]),
        (b'{"text": "a"}', ["line 1", "'prompt', 'turns', 'question'", "'text'", "add 'prompt'"]),
        (b"{}", ["line 1", "but has []"]),
        (b'{"prompt": 3}', ["line 1, field 'prompt'", "string", "but is 3", "correct it"]),
        (b'{"prompt": null}', ["field 'prompt'", "but is None"]),
        (b'{"prompt": " \\n"}', ["field 'prompt'", "not blank", "but is ' \\n'"]),
        (b'{"question": []}', ["field 'question'", "string", "but is []"]),
        (b'{"prompt": "\\ud800"}', ["field 'prompt'", "surrogate", "'\\ud800'"]),
        (b'{"turns": []}', ["field 'turns'", "a list of one string or more", "but is []"]),
        (b'{"turns": "hello"}', ["field 'turns'", "a list of one string or more", "'hello'"]),
        (b'{"turns": ["a", 2]}', ["field 'turns'", "a list of one string or more", "['a', 2]"]),
        (b'{"turns": [""]}', ["field 'turns[0]'", "not blank", "but is ''"]),
        (b'{"prompt": "a", "id": ""}', ["field 'id'", "not blank"]),
        (b'{"prompt": "a", "id": true}', ["field 'id'", "but is True"]),
        (b'{"prompt": "a", "task_id": 1.5}', ["field 'task_id'", "but is 1.5"]),
        (b'{"prompt": "a", "category": null}', ["field 'category'", "but is None"]),
        (
            b'{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}',
            ["line 2", "the id must be new", "'1'", "line 1", "change one"],
        ),
        (b'{"prompt": "' + b"x" * 999 + b'"', ["xxx...", "must be JSON"]),
    ],
)
def test_a_wrong_file_says_what_is_wrong_where(tmp_path, data, parts):
    path = tmp_path / "file.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"file\.jsonl") as error:
        load_prompts(path)
    assert [part for part in parts if part not in str(error.value)] == []
    assert len(str(error.value)) < 300 + len(str(path))


def test_a_path_that_is_no_file_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"prompts: .*none\.jsonl cannot be read .*JSONL file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"prompts: .* cannot be read .*; give the path"):
        get_workload("all", prompts=tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_workload(5), "^workload: must be a name .*, not 5$"),
        (lambda: get_workload(None), "^workload: must be a name .*, not None$"),
        (lambda: get_workload("all", prompts=5), "^prompts: must be the path .*, not 5$"),
        (lambda: get_workload("all", split=None), "^split: must be one of .*, not None$"),
        (lambda: get_workload("phases", phase_length=2.5), "^phase_length: .*, not 2.5$"),
        (lambda: get_workload("phases", phase_length=True), "^phase_length: .*, not True$"),
        (lambda: load_prompts(None), "^prompts: must be the path .*, not None$"),
        (lambda: Request("a", None, "x"), "^request.prompt: must be a text, not None$"),
        (lambda: Request(1, "a", "x"), "^request.id: must be a text, not 1$"),
        (lambda: Workload("w", [Request("a", "a", "x")]), "^groups: must be tuples of Requests"),
        (lambda: Workload("w", (("text",),)), "^groups: must be tuples of Requests"),
        (lambda: Workload("w", ()), "^groups: must hold"),
        (lambda: Workload("w", ((),)), "^groups: must hold"),
        (lambda: Workload("w", ((Request("a", "a", "x"),),), 1.5), "^run_length: .*, not 1.5$"),
    ],
)
def test_values_of_another_type_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
