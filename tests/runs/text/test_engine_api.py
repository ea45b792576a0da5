"""The text API: whole or streamed, under any controller, always plain decoding's text."""

import copy

import numpy as np
import pytest

import specgym.engine
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, tiny_pool, tiny_tokenizer
from specgym.engine.types import DecodeRequest, SamplingParams
from specgym.runs.controllers import make_controller
from specgym.runs.loop import StepError
from specgym.runs.text.engine_api import Engine
from specgym.runs.text.session import Session

PROMPTS = ["the cat sat on the mat, the cat sat", "one two one two", "x = f(x)\ny = f("]
CONTROLLERS = ["none", "static:draft>mid@2", "random", "specrouter", "test-and-set", "ucb"]


@pytest.fixture(scope="module")
def pool():
    return tiny_pool(noise=(0.04, 0.01), tokenizer=tiny_tokenizer(), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(pool):
    return Engine(pool, clock="counting")


@pytest.fixture(scope="module")
def plain(pool):
    """Token ids of plain decoding, 40 for each prompt."""
    requests = [DecodeRequest(pool.encode(prompt), 40) for prompt in PROMPTS]
    return [tuple(decode(pool, [request])[0].output()) for request in requests]


def varying(pool, limits=None, **settings):
    """The pool of the same weights with other ends or contexts."""
    members = [copy.copy(member) for member in pool.members.values()]
    for member in members:
        member.context_limit = (limits or {}).get(member.name, member.context_limit)
    return ModelPool(members, tokenizer=pool.tokenizer, name="variant", **settings)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_every_controller_writes_plain_decodings_texts(engine, plain, controller):
    results = engine.generate(PROMPTS, controller=controller, max_new_tokens=40)
    assert [result.tokens for result in results] == plain
    tokenizer = engine.pool.tokenizer
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt == prompt
        assert result.text == tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert result.finish_reason == "length"
        assert result.tokens_per_iteration == 40 / result.num_iterations
        assert result.tokens_per_second == pytest.approx(40 / result.seconds)
        assert result.prefill_seconds > 0
    if controller == "none":
        assert results[0].num_iterations == 40
        assert results[0].speedup == pytest.approx(1.0)


def test_a_stream_gives_the_text_in_pieces_and_then_the_result(engine):
    whole = engine.generate(PROMPTS[0], controller="static:draft@4", max_new_tokens=40)
    assert len(whole) == 1
    stream = engine.stream(PROMPTS[0], controller="static:draft@4", max_new_tokens=40)
    pieces = list(stream)
    assert len(pieces) > 4
    assert all(pieces)
    assert "".join(pieces) == whole[0].text
    assert stream.result == whole[0]


def test_the_result_of_a_stream_does_not_wait_for_its_pieces(engine):
    stream = engine.stream(PROMPTS[0], max_new_tokens=20)
    next(stream)
    assert len(stream.result.tokens) == 20
    assert list(stream) == []


def test_a_stream_that_is_dropped_leaves_nothing_behind(engine, plain):
    next(engine.stream(PROMPTS[1], controller="ucb", max_new_tokens=40))
    session = Session(engine.pool, "static:mid@4", clock="counting")
    next(session.steps(DecodeRequest(engine.pool.encode(PROMPTS[1]), 40)))
    request = DecodeRequest(engine.pool.encode(PROMPTS[0]), 40)
    assert tuple(token for tokens, _ in session.steps(request) for token in tokens) == plain[0]


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(engine):
    text = engine.generate(PROMPTS[0], controller="none", max_new_tokens=40)[0].text
    stop = text[11:14]
    for controller in CONTROLLERS:
        stream = engine.stream(
            PROMPTS[0], controller=controller, max_new_tokens=40, stop=["never", stop]
        )
        assert "".join(stream) == text[: text.find(stop)]
        assert stream.result.finish_reason == "stop"
        assert stop in engine.pool.tokenizer.decode(stream.result.tokens)


def test_eos_and_the_context_end_a_text(pool, plain):
    ending = Engine(varying(pool, eos_ids=[plain[0][7]]))
    result = ending.generate(PROMPTS[0], controller="static:draft@4")[0]
    assert result.finish_reason == "eos"
    assert result.tokens == plain[0][: plain[0].index(plain[0][7]) + 1]
    narrow = Engine(varying(pool, {"target": 60}))
    result = narrow.generate(PROMPTS[0], controller="static:draft@4")[0]
    assert result.finish_reason == "context"
    assert len(result.tokens) == 60 - len(pool.encode(PROMPTS[0]))


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_drafter_with_a_shorter_context_drops_out_and_the_text_goes_on(pool, plain, controller):
    short = Engine(varying(pool, {"draft": 45, "mid": 60}), clock="counting")
    result = short.generate(PROMPTS[0], controller=controller, max_new_tokens=40)[0]
    assert result.tokens == plain[0]


def test_sampling_repeats_with_its_seed_and_prompts_have_their_own(engine):
    hot = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=5)
    arguments = {"controller": "static:draft@2", "max_new_tokens": 30, "sampling": hot}
    first, twin = engine.generate([PROMPTS[0]] * 2, **arguments)
    again = engine.generate([PROMPTS[0]], **arguments)[0]
    assert again.tokens == first.tokens
    assert twin.tokens != first.tokens
    assert engine.stream(PROMPTS[0], **arguments).result.tokens == first.tokens


def test_a_controller_object_goes_on_learning_and_never_sees_the_environment(engine):
    session = engine.session("none", 0)
    ucb = make_controller("ucb", session.env.plans, [], 0)
    engine.generate(PROMPTS[:1], controller=ucb, max_new_tokens=20)
    learned = ucb.state_dict()
    engine.generate(PROMPTS[1:2], controller=ucb, max_new_tokens=20)
    assert str(ucb.state_dict()) != str(learned)


def test_an_engine_fault_names_its_member_and_there_is_no_result(engine):
    stream = engine.stream(PROMPTS[0], controller="static:mid@1", max_new_tokens=40)
    next(stream)
    compiled = engine.pool.members["mid"].compiled
    arena, norm = compiled.program.arena, compiled.final_norm
    weight = arena.view(norm.weight, compiled.states.width)
    good = weight.copy()
    weight[:] = float("nan")
    try:
        with pytest.raises(StepError, match="EngineFault: member 'mid': logits are not finite"):
            list(stream)
    finally:
        weight[:] = good
    with pytest.raises(StepError, match="there is no result"):
        stream.result  # noqa: B018 (a property)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number >= 1"),
        ({"stop": "END"}, "stop: must be a list"),
        ({"stop": [""]}, "strings that are not empty"),
        ({"controller": "specruter"}, "did you mean 'specrouter'"),
        ({"controller": "static:draft@5"}, "draft@5"),
        ({"prompts": "  "}, "prompt: must not be empty"),
        ({"prompts": ["fine", "a" * 600]}, "600 tokens leave no room"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_decoded(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(**{"prompts": "abc", "controller": "none"} | arguments)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="has no tokenizer"):
        Engine(tiny_pool())


def test_an_engine_comes_from_a_pool_by_name(tiny_spec):
    engine = specgym.engine.Engine.from_pool(tiny_spec, chains=["ngram>target"], k_values=[2])
    assert [plan.name for plan in engine.pool.plans()] == ["none", "ngram@2"]
    assert engine.stream("abc abc", controller="static:ngram@2", max_new_tokens=4).result.text
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        specgym.engine.Engin  # noqa: B018 (the lookup raises)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts", None),
        ("prompts", 5),
        ("prompts", b"bytes"),
        ("prompts", ["fine", None]),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "8"),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("sampling", None),
        ("sampling", {"temperature": 1.0}),
        ("stop", None),
        ("stop", "end"),
        ("stop", [1]),
        ("controller", None),
        ("controller", 3),
        ("controller", object()),
    ],
)
def test_arguments_of_another_type_are_refused_with_field_and_value(engine, field, value):
    calls = [lambda: engine.generate(**{"prompts": "a b", field: value})]
    given = {"prompt" if field == "prompts" else field: value}
    calls.append(lambda: engine.stream(**{"prompt": "a b"} | given))
    for call in calls:
        with pytest.raises(ValueError, match=f"^{field.removesuffix('s')}s?: must be ") as error:
            call()
        assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool": "smollm2"}, "pool: must be a ModelPool; got 'smollm2'; Engine.from_pool"),
        ({"exact": "yes"}, "exact: must be True or False; got 'yes'"),
        ({"clock": 5}, "clock: must be 'wall', 'counting' or a Clock; got 5"),
    ],
)
def test_an_engine_of_other_things_is_refused(pool, arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine(**{"pool": pool} | arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", None), ("k_values", 4), ("k_values", (1.5,)), ("chains", "a>b"), ("compiled", 1)],
)
def test_a_spec_goes_with_values_of_their_types(field, value):
    with pytest.raises(ValueError, match=f"^{field}: must be "):
        Engine.from_pool(**{field: value})


def test_numbers_of_numpy_are_fine(engine, plain):
    result = engine.generate(PROMPTS[0], controller="none", max_new_tokens=np.int64(4))[0]
    assert result.tokens == plain[0][:4]
