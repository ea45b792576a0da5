"""Forward seconds by member and number of tokens."""

import pytest

from specgym.baselines.estimates.forward_seconds import ForwardSeconds, interpolate


def test_average_by_hand(ngram_plans, make_decoder):
    seconds = ForwardSeconds(ngram_plans, alpha=0.2)
    assert seconds.verify("target") is None
    assert seconds.draft("ngram", 3) is None
    for target in (1.0, 2.0):
        decoder = make_decoder(ngram_plans, seconds={"target": target})
        seconds.observe(ngram_plans[2], decoder.step(2))
    assert seconds.verify("target")[3] == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([None, None], None),
        ([None, 2.0, None, None, 5.0, None], [2.0, 2.0, 3.0, 4.0, 5.0, 5.0]),
        ([None, None, 3.0, None], [3.0, 3.0, 3.0, 3.0]),
        ([None, 4.0, 2.0], [4.0, 4.0, 2.0]),
    ],
)
def test_interpolation(row, expected):
    assert interpolate(row) == expected


def test_prompt_lookup_costs_nothing_whatever_k(ngram_plans, make_decoder):
    seconds = ForwardSeconds(ngram_plans, alpha=0.2)
    seconds.observe(ngram_plans[4], make_decoder(ngram_plans, hit_rate=0.0).step(4))
    assert seconds.draft("ngram", 6) == 0.0


def test_one_forward_for_a_whole_proposal_is_charged_once(ngram_plans, make_decoder):
    info = make_decoder(ngram_plans).step(3)
    info["forwards"].insert(0, make_decoder(ngram_plans).forward("target", "draft", 1))
    info["forwards"][0].update(member="ngram", seconds=0.01)
    seconds = ForwardSeconds(ngram_plans, alpha=0.2)
    seconds.observe(ngram_plans[3], info)
    assert seconds.draft("ngram", 6) == 0.01


def test_a_model_is_charged_per_token(all_plans, make_decoder):
    seconds = ForwardSeconds(all_plans, alpha=0.2)
    seconds.observe(all_plans[7], make_decoder(all_plans).step(7))  # small@2
    assert seconds.draft("small", 6) == pytest.approx(0.6)


def test_a_verifier_not_yet_measured_costs_what_its_drafting_does(make_decoder):
    plans = [
        (("target",), 0),
        (("mid", "target"), 2),
        (("small", "mid", "target"), 2),
    ]
    decoder = make_decoder(plans, alphas={"mid>target": 0.5})
    seconds = ForwardSeconds(plans, alpha=0.2)
    seconds.observe(plans[1], decoder.step(1))
    assert seconds.verify("mid") == pytest.approx([0.3] * 5)


def test_catch_up_is_left_out(ngram_plans, make_decoder):
    info = make_decoder(ngram_plans).step(0)
    info["forwards"].insert(0, {**info["forwards"][0], "role": "catchup", "seconds": 50.0})
    seconds = ForwardSeconds(ngram_plans, alpha=0.2)
    seconds.observe(ngram_plans[0], info)
    assert seconds.verify("target")[1] == 1.0
