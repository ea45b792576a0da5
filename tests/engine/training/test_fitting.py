"""The training loop: batches, losses, schedules, and that a killed run ends as a whole one."""

import dataclasses
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specgym.engine.testing import tiny_llama
from specgym.engine.training.corpus import Corpus
from specgym.engine.training.fitting import (
    FitConfig,
    collate,
    epoch,
    fit,
    frequent_tokens,
    make_optimizer,
    measure,
    num_trained_steps,
    schedule,
    shifted,
    soft_loss,
    trained_state,
)
from specgym.engine.training.students import StudentTrainee, make_mid, make_small

CONFIG = FitConfig(
    num_steps=12, batch_tokens=120, learning_rate=3e-3, warmup_steps=2, checkpoint_every=4
)


class KilledError(Exception):
    pass


def make_trainee(kind):
    target = tiny_llama(0, num_layers=3, vocab_size=98)
    student = make_small(target, [0, 2]) if kind == "small" else make_mid(target, [0, 2], 4)
    return StudentTrainee(student, target.lm_head.weight, torch.arange(0, 98, 2))


def train(texts, checkpoint, config=CONFIG, kind="small", kill_at=None):
    """The trained weights, the losses by step, and the steps that were measured at."""
    trainee, losses, measured = make_trainee(kind), {}, []

    def report(step, numbers):
        losses[step] = numbers["loss"]
        if step == kill_at:
            raise KilledError

    try:
        fit(trainee, texts, config, checkpoint, report, measured.append)
    except KilledError:
        return None, losses, measured
    weights = {name: p.clone() for name, p in trained_state(trainee.module).items()}
    return weights, losses, measured


def test_a_batch_weighs_what_the_target_judged(texts):
    batch = collate(texts, [0, 5, 3], 0.2)
    lengths = [len(texts.text(index).tokens) for index in (0, 5, 3)]
    assert batch.tokens.shape == (3, max(lengths))
    for row, (index, length) in enumerate(zip((0, 5, 3), lengths, strict=True)):
        text, weights = texts.text(index), batch.weights[row]
        assert torch.equal(batch.tokens[row, :length], text.tokens)
        assert (weights[: text.num_prompt - 1] == torch.tensor(0.2)).all()
        assert (weights[text.num_prompt - 1 : length - 1] == 1).all()
        assert not weights[length - 1 :].any()
        features = texts.features(index).bfloat16()
        assert torch.equal(batch.features[row, :length], features)
        assert not batch.features[row, length:].any()


def test_the_soft_loss_is_smallest_at_the_teachers_law():
    torch.manual_seed(0)
    teacher, weights = torch.randn(5, 7), torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0])
    law = teacher.softmax(-1)
    entropy = -(law * law.log()).sum(-1)
    least = (entropy * weights).sum() / weights.sum()
    torch.testing.assert_close(soft_loss(teacher + 3.0, teacher, weights), least)
    assert soft_loss(torch.randn(5, 7), teacher, weights) > least
    moved = teacher.clone()
    moved[1] = 100.0
    torch.testing.assert_close(soft_loss(moved, teacher, weights), least)


def test_an_epoch_has_every_text_once_in_batches_of_that_size(texts):
    batches = epoch(texts, 120, random.Random(0))
    assert sorted(index for batch in batches for index in batch) == list(range(len(texts)))
    for batch in batches:
        longest = max(len(texts.text(index).tokens) for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= 120


def test_a_schedule_goes_on_where_it_stopped(texts):
    whole = list(schedule(texts, CONFIG, 0))
    assert len(whole) == CONFIG.num_steps
    assert list(schedule(texts, CONFIG, 5)) == whole[5:]
    assert list(schedule(texts, dataclasses.replace(CONFIG, seed=1), 0)) != whole


def test_the_rate_warms_up_stays_and_falls():
    config = FitConfig(num_steps=100, learning_rate=1.0, warmup_steps=10)
    rates = [config.rate_at(step) for step in range(100)]
    assert rates[:2] == [0.1, 0.2]
    assert set(rates[9:51]) == {1.0}
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert math.isclose(config.rate_at(100), 0.05)
    assert dataclasses.replace(config, warmup_steps=0).rate_at(0) == 1.0


def test_only_matrices_decay_and_only_what_is_trained():
    groups = make_optimizer(make_trainee("mid").module, CONFIG).param_groups
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    assert all(p.ndim == 2 for p in groups[0]["params"])
    assert len(groups[0]["params"]) == 2 * 7 * 2  # up and down of seven linears in two layers
    assert len(groups[1]["params"]) == 2 * 2 + 1


@pytest.mark.parametrize("kind", ["small", "mid"])
def test_training_teaches(texts, tmp_path, kind):
    config = dataclasses.replace(CONFIG, num_steps=25, checkpoint_every=25)
    weights, losses, _ = train(texts, tmp_path / "c.pt", config, kind)
    assert sum(losses[step] for step in range(20, 25)) < sum(losses[s] for s in range(5))
    assert any(w.any() for name, w in weights.items() if name.endswith("up")) == (kind == "mid")


@pytest.mark.parametrize("kind", ["small", "mid"])
@pytest.mark.parametrize("kill_at", [2, 6])
def test_a_killed_run_ends_with_the_bits_of_a_whole_one(texts, tmp_path, kind, kill_at):
    whole, losses, measured = train(texts, tmp_path / "whole.pt", kind=kind)
    assert measured == [0, 4, 8, 12]
    path = tmp_path / "killed.pt"
    train(texts, path, kind=kind, kill_at=kill_at)
    assert num_trained_steps(path) == kill_at // 4 * 4
    resumed, later, measured = train(texts, path, kind=kind)
    assert measured[0] == kill_at // 4 * 4
    assert later == {step: loss for step, loss in losses.items() if step >= measured[0]}
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    again, nothing, measured = train(texts, path, kind=kind)
    assert (nothing, measured) == ({}, [12])
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_checkpoint_of_other_settings_is_refused(texts, tmp_path):
    path = tmp_path / "c.pt"
    train(texts, path, kill_at=5)
    with pytest.raises(ValueError, match="was made with"):
        train(texts, path, dataclasses.replace(CONFIG, learning_rate=1e-3))
    with pytest.raises(ValueError, match="at least one text"):
        train(Corpus([]), path)


def test_measuring_counts_answer_tokens_by_category(texts):
    """A trainee that is right on even tokens."""

    class Even:
        module = nn.Linear(1, 1)

        def losses(self, batch):
            raise AssertionError

        def agreement(self, batch):
            assert not self.module.training
            counts = torch.zeros(len(batch.tokens), 1, 2)
            following = F.pad(batch.tokens[:, 1:], (0, 1))
            counts[:, 0, 0] = ((following % 2 == 0) * batch.weights).sum(-1)
            counts[:, 0, 1] = batch.weights.sum(-1)
            return counts

    trainee = Even()
    measured = measure(trainee, texts, 150)
    assert trainee.module.training
    for topic, depths in measured.items():
        answers = [
            text.tokens[text.num_prompt :]
            for text in (texts.text(index) for index in range(len(texts)))
            if text.topic == topic
        ]
        share = (torch.cat(answers) % 2 == 0).float().mean()
        assert depths == {0: pytest.approx(float(share))}


def test_frequent_tokens_are_those_of_the_answers(texts):
    counts = torch.zeros(98)
    for index in range(len(texts)):
        text = texts.text(index)
        counts += torch.bincount(text.tokens[text.num_prompt :], minlength=98)
        counts += 0.1 * torch.bincount(text.tokens[: text.num_prompt], minlength=98)
    ids = frequent_tokens(texts, 6, 98)
    assert ids.tolist() == sorted(ids.tolist())
    others = torch.ones(98, dtype=torch.bool).index_fill(0, ids, False)
    assert counts[ids].min() >= counts[others].max() - 1e-4


def test_states_are_moved_to_later_positions():
    states = torch.arange(6.0).view(1, 3, 2)
    assert shifted(states, 0) is states
    assert shifted(states, 1).tolist() == [[[0, 0], [0, 1], [2, 3]]]
    assert shifted(states[..., None], 2).flatten().tolist() == [0, 0, 0, 0, 0, 1]
