"""Batched generation: every row writes what it would write alone, whoever its neighbours are."""

import pytest
import torch

from specgym.engine.forward.lean_llama import LeanLlama
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, tiny_llama
from specgym.engine.training.text_writer import BatchGenerator, Job, draw
from specgym.engine.types import DecodeRequest

TAPS, NUM_SLOTS = (1, 2), 96
START = [7, 3, 50, 2]
PROMPTS = ([5], [*START, 9, 4], [1, 2, 3, 1, 2, 3], [*START, 8], list(range(60)), [9, 9], START)
BUDGETS = (30, 3, 17, 41, 36, 1, 25)


def make_generator(num_rows=3, num_slots=NUM_SLOTS, prefixes=()):
    lean = LeanLlama(tiny_llama(0, num_layers=3))
    generator = BatchGenerator(lean, num_rows, num_slots, TAPS, torch.float32)
    with torch.inference_mode():
        for prefix in prefixes:
            generator.share(prefix)
    return generator


def make_jobs(temperature=0.0, is_done=lambda output: False):
    pairs = enumerate(zip(PROMPTS, BUDGETS, strict=True))
    return [Job(list(p), budget, temperature, is_done, i) for i, (p, budget) in pairs]


def run(generator, jobs, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {job.payload: job for job in generator.run(iter(jobs), rng)}


def plain_output(prompt, budget):
    pool = ModelPool([NGramMember(), ModelMember("target", tiny_llama(0, num_layers=3))])
    return decode(pool, [DecodeRequest(tuple(prompt), budget)])[0].output()


@pytest.mark.parametrize("num_rows", [1, 3, 10])
@pytest.mark.parametrize("prefixes", [(), (START, START[:2], [5])], ids=["plain", "shared"])
def test_rows_write_what_plain_decoding_writes(num_rows, prefixes):
    finished = run(make_generator(num_rows, prefixes=prefixes), make_jobs())
    assert len(finished) == len(PROMPTS)
    for index, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS, strict=True)):
        assert finished[index].output == list(plain_output(prompt, budget)), index


@pytest.mark.parametrize("prefixes", [(), (START,)], ids=["plain", "shared"])
def test_features_are_those_of_a_forward_of_the_whole_text(prefixes):
    target = tiny_llama(0, num_layers=3)
    for job in run(make_generator(prefixes=prefixes), make_jobs()).values():
        text = torch.tensor([[*job.prompt, *job.output[:-1]]])
        states = target(text, output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap] for tap in (*TAPS, 3)], dim=-1)[0]
        torch.testing.assert_close(torch.cat(job.features), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("compiled", [True, False])
def test_features_are_those_that_a_member_keeps(compiled):
    member = ModelMember("target", tiny_llama(0, num_layers=3), compiled=compiled)
    member.tap((*TAPS, 3))
    job = run(make_generator(), make_jobs())[3]
    memory = member.new_memory(1, NUM_SLOTS)
    member.forward(memory, [[*job.prompt, *job.output[:-1]]])
    width = len(job.prompt) + len(job.output) - 1
    kept = memory.features_BSF[0, :width]
    torch.testing.assert_close(torch.cat(job.features), kept, atol=2e-5, rtol=1e-4)


def test_a_text_ends_where_its_caller_says_and_where_no_room_is_left():
    stopped = run(make_generator(), make_jobs(is_done=lambda output: len(output) == 2))
    assert {len(job.output) for job in stopped.values()} == {1, 2}
    full = run(make_generator(num_slots=64), make_jobs())
    assert len(full[4].output) == 4
    assert full[4].output == list(plain_output(PROMPTS[4], 4))
    with pytest.raises(ValueError, match=r"1\.\.59 tokens; got 60"):
        run(make_generator(num_slots=60), make_jobs())


def test_jobs_that_depend_on_finished_ones_are_asked_for_again():
    """A stream that has nothing at the moment is not a stream that has ended."""

    class Stream:
        def __init__(self):
            self.queue = [Job([5], 3, 0.0, lambda output: False, 0)]

        def __next__(self):
            if not self.queue:
                raise StopIteration
            return self.queue.pop()

        def __iter__(self):
            return self

    stream, order = Stream(), []
    for job in make_generator().run(stream, torch.Generator()):
        order.append(job.payload)
        if job.payload < 3:
            stream.queue.append(Job([6], 2, 0.0, lambda output: False, job.payload + 1))
    assert order == [0, 1, 2, 3]


def test_the_same_seed_draws_the_same_texts():
    outputs = [
        {i: job.output for i, job in run(make_generator(), make_jobs(0.9), seed).items()}
        for seed in (0, 0, 1)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_draws_follow_the_law():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rng = torch.Generator().manual_seed(0)
    rows = logits.expand(20_000, -1)
    drawn = draw(rows, torch.full((20_000,), 0.7), rng)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.7).softmax(-1), atol=0.012, rtol=0)
    mixed = draw(rows[:100], torch.tensor([0.0, 0.7]).repeat(50), rng)
    assert (mixed[::2] == 0).all()
    assert (mixed[1::2] != 0).any()
    best = draw(rows, torch.full((20_000,), 0.7), rng, top_k=2)
    assert best.max() == 1
