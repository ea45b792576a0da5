"""Compiled forwards: a row's bits are its own, on every processor, whatever else is computed."""

import gc
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from specgym.engine.compiled import program, rotary, team
from specgym.engine.compiled.linear import CompiledLinear
from specgym.engine.compiled.llama import why_not_compiled
from specgym.engine.forward.linears import RowLinear, linear, replace_linears
from specgym.engine.members.model import ModelMember
from specgym.engine.testing import tiny_llama, tiny_mixtral

TOKENS = [(7 * step + 3) % 61 for step in range(24)]
# SHA-256 of the logits' bits, the same on AVX2, AVX-512 and ARM with FMA. A change of the order in
# which anything is added moves them: then raise ``NUMERICS`` and put the new ones here.
GOLDEN = {
    ("llama", torch.float32): "0359d3822f4ad27c22616cd2997d6cc4ec57c82724df4e75c3f9a8ebc315fcb4",
    ("llama", torch.bfloat16): "1410d6e7b523c5b25d520497953428b9b5606189dc52e441658701ed4d5ff5d9",
    ("mixtral", torch.float32): "e02a1c2874936db4cf3b9fc847d60d5471c707aa0177f472d01a7633fce636c4",
    ("mixtral", torch.bfloat16): "f67fcd11919c20ea34b7bcbe55265a19073d2619ab06dcb126c9eaf4eade633c",
}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Threads beside the first, wherever the tests run and however small a model is."""
    before = torch.get_num_threads()
    monkeypatch.setattr(program, "SMALL", 0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def exact_model(kind, dtype):
    """A model whose weights are small fractions: no library's random numbers move its logits."""
    model = (tiny_llama if kind == "llama" else tiny_mixtral)(0)
    for index, weight in enumerate(model.parameters()):
        count = torch.arange(weight.numel(), dtype=torch.int64)
        numbers = ((count * 7919 + index * 104729) % 257 - 128).float() / 256
        scale = 1.0 if weight.dim() > 1 else 0.1
        weight.data = (numbers * scale + (weight.dim() == 1)).view(weight.shape).to(dtype)
    return model.to(dtype)


def logits_of(member, sizes, tokens=TOKENS):
    """Logits of a text that is fed in windows of these sizes."""
    memory, parts, first = member.new_memory(1, 64), [], 0
    for size in sizes:
        window = tokens[first : first + size]
        if window:
            parts.append(member.forward(memory, [window])[0])
        first += size
    return torch.cat(parts)


@pytest.fixture(scope="module")
def members():
    """A compiled member of each kind."""
    made = {}
    for kind, dtype in GOLDEN:
        made[kind, dtype] = ModelMember("target", exact_model(kind, dtype))
        assert made[kind, dtype].compiled is not None
    return made


@pytest.mark.parametrize("key", GOLDEN, ids=lambda key: f"{key[0]}-{key[1]}")
def test_logits_are_the_golden_bits(members, key):
    bits = logits_of(members[key], [len(TOKENS)]).numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest() == GOLDEN[key]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 17), min_size=len(TOKENS), max_size=len(TOKENS)),
    threads=st.integers(1, 3),
    key=st.sampled_from(list(GOLDEN)),
)
def test_a_tokens_bits_depend_on_no_window_and_no_number_of_threads(members, sizes, threads, key):
    expected = logits_of(members[key], [len(TOKENS)])
    torch.set_num_threads(threads)
    assert torch.equal(logits_of(members[key], sizes), expected)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.integers(1, 9), min_size=2, max_size=6), exact=st.booleans())
def test_a_rows_bits_depend_on_no_other_row(members, rows, exact):
    member = members["mixtral", torch.bfloat16]
    memory = member.new_memory(len(rows), 64, aligned=exact)
    texts = [[(token + 5 * row) % 61 for token in TOKENS] for row in range(len(rows))]
    parts = [[] for _ in rows]
    firsts = [0] * len(rows)
    for _ in range(3):
        fed = [texts[row][firsts[row] : firsts[row] + size] for row, size in enumerate(rows)]
        logits = member.forward(memory, fed)
        for row, window in enumerate(fed):
            parts[row].append(logits[row, : len(window)])
            firsts[row] += len(window)
    for row, text in enumerate(texts):
        alone = logits_of(member, [firsts[row]], text)
        assert torch.equal(torch.cat(parts[row]), alone)


def test_rejected_slots_in_front_move_no_bit(members):
    """In a batch without exact mode a row has holes where others accepted more."""
    member = members["llama", torch.bfloat16]
    memory = member.new_memory(2, 64)
    member.forward(memory, [TOKENS[:6], TOKENS[6:12]])
    memory.keep([2, 6])
    member.forward(memory, [TOKENS[2:4], TOKENS[12:16]])
    assert memory.row_slots[0] == [0, 1, 6, 7]
    logits = member.forward(memory, [TOKENS[4:7], TOKENS[16:17]])
    assert torch.equal(logits[0], logits_of(member, [7])[4:7])


def test_another_processors_code_gives_the_same_bits(tmp_path):
    """The golden bits again, compiled for a plain x86-64-v3 in a process of its own."""
    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor cannot run x86-64-v3")
    test = f"{__file__}::test_logits_are_the_golden_bits"
    variables = os.environ | {"SPECGYM_CPU": "x86-64-v3"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(GOLDEN)} passed" in done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 2), (16, 32), (61, 48), (200, 66)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_row_linear_is_torchs_and_its_rows_are_alone(dtype, shape, has_bias):
    torch.manual_seed(0)
    weight, rows = torch.randn(shape).to(dtype), torch.randn(2, 9, shape[1])
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    run = linear(weight, bias)
    expected = nn.functional.linear(rows, weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(run(rows), expected, atol=1e-4, rtol=1e-5)
    alone = torch.stack([run(rows[:, step]) for step in range(9)], dim=1)
    assert torch.equal(run(rows), alone)
    assert run(rows.to(dtype)).dtype == dtype
    assert run(rows[:, :0]).shape == (2, 0, shape[0])


def test_linears_of_other_models_are_replaced_and_an_odd_one_is_not():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert replace_linears(model) == 1
    assert isinstance(model[0], RowLinear)
    assert type(model[1]) is nn.Linear


def test_what_has_no_compiled_forward_says_why():
    assert why_not_compiled(tiny_llama()) == ""
    model = tiny_llama()
    model.config.hidden_act = "gelu"
    assert "gelu" in why_not_compiled(model)
    assert "Linear" in why_not_compiled(nn.Linear(2, 2))


def test_cosines_and_sines_are_those_of_the_library():
    angles = np.random.default_rng(0).uniform(0, 140_000, 10_000)
    cosines, sines = rotary.cosine_and_sine(angles)
    np.testing.assert_allclose(cosines, np.cos(angles), atol=1e-13)
    np.testing.assert_allclose(sines, np.sin(angles), atol=1e-13)


def test_threads_of_a_program_may_run_forwards_at_once(members):
    """They take turns."""
    member = members["llama", torch.float32]
    expected, wrong = logits_of(member, [24]), []
    twin = ModelMember("target", exact_model("llama", torch.float32))

    def work(each):
        for _ in range(20):
            if not torch.equal(logits_of(each, [5, 1, 18]), expected):
                wrong.append(each)

    threads = [threading.Thread(target=work, args=(each,)) for each in (member, twin)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own(members):
    member = members["llama", torch.float32]
    expected = logits_of(member, [24])
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(logits_of(member, [24]), expected) else 1)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < deadline, os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0


@pytest.mark.parametrize("damage", ["missing", "read-only", "garbage"])
def test_a_cache_folder_that_is_no_use_costs_only_time(tmp_path, damage, monkeypatch, caplog):
    """The smallest function stands for the forward: compiling that one takes long."""
    monkeypatch.setenv("SPECGYM_CACHE", str(tmp_path / "cache"))

    def compile_twice():
        for _ in range(2):
            function = team.njit(nogil=True)(lambda a: a + 1)
            function._cache = team.CodeCache(function.py_func)
            function.compile("int64(int64)")
            assert function(1) == 2

    if damage == "garbage":
        compile_twice()
        for path in (tmp_path / "cache" / "compiled").iterdir():
            path.write_bytes(b"garbage")
    elif damage == "read-only":
        (tmp_path / "cache").write_text("a file where a folder should be")
    compile_twice()
    if damage != "missing":
        assert "compiled code" in caplog.text


def test_an_empty_input_is_an_empty_output():
    assert CompiledLinear(torch.ones(4, 2))(torch.empty(0, 2)).shape == (0, 4)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_pickled_member_computes_the_same_when_the_first_is_gone(kind):
    member = ModelMember("target", exact_model(kind, torch.bfloat16))
    member.tap((0, 2))
    expected = logits_of(member, [24])
    content = pickle.dumps(member)
    del member
    gc.collect()
    twin = pickle.loads(content)
    assert torch.equal(logits_of(twin, [5, 19]), expected)
