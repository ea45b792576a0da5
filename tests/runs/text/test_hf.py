"""transformers' own generate over a pool: its tokens, criteria, streamers; the rest is refused."""

import logging

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation import (
    BaseStreamer,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgym.engine import hf_generate
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import chi_square, perturbed, tiny_llama, tiny_tokenizer
from specgym.engine.verification import law
from specgym.runs.text.hf_options import sampling_of

SEED, VOCAB = 3, 61
CONTROLLERS = ["none", "static:draft@4", "static:ngram@2", "random", "specrouter", "ucb"]
PROMPT = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
pytestmark = [  # transformers' advice on lengths that are meant here
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints"),
]


def pool_of(model, noise=0.05):
    """Lookup, a drafter and a target of this model, which is taken over."""
    draft = perturbed(model, noise, 1)
    return ModelPool([NGramMember(), ModelMember("draft", draft), ModelMember("target", model)])


@pytest.fixture(scope="module")
def model():
    return tiny_llama(SEED)


@pytest.fixture(scope="module")
def pool():
    return pool_of(tiny_llama(SEED))


@pytest.fixture(scope="module")
def plain(model):
    """40 greedy tokens of transformers after the prompt."""
    return model.generate(PROMPT, max_new_tokens=40)[0, PROMPT.shape[1] :].tolist()


def both(model, pool, controller, inputs=PROMPT, **options):
    """What transformers decodes, and what it decodes over the pool."""
    ours = hf_generate(pool, controller)
    return model.generate(inputs, **options), model.generate(
        inputs, custom_generate=ours, **options
    )


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 40},
        {"max_length": 30},
        {},
        {"max_new_tokens": 1},
        {"max_new_tokens": 12, "temperature": 0.5, "top_k": 3, "renormalize_logits": False},
        {"max_new_tokens": 12, "min_new_tokens": 5, "eos_token_id": None},
    ],
    ids=str,
)
def test_greedy_tokens_are_transformers_own(model, pool, controller, options):
    expected, output = both(model, pool, controller, **options)
    assert torch.equal(output, expected)
    assert output.dtype == expected.dtype


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("index", [0, 3, 9])
def test_eos_ends_a_row_where_it_ends_for_transformers(model, pool, plain, controller, index):
    options = {"max_new_tokens": 40, "pad_token_id": 0}
    for eos in (plain[index], [plain[index], plain[index + 2]]):
        expected, output = both(model, pool, controller, eos_token_id=eos, **options)
        assert torch.equal(output, expected)
        assert output.shape[1] <= PROMPT.shape[1] + index + 1


def test_a_hooked_architecture_gives_its_own_tokens_too():
    config = GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    reference = GPT2LMHeadModel(config).eval()
    twin = GPT2LMHeadModel(config).eval()
    twin.load_state_dict(reference.state_dict())
    options = {"max_new_tokens": 30, "eos_token_id": None}
    expected, output = both(reference, pool_of(twin), "static:draft@3", **options)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_left_padded_batch_gives_transformers_rows(model, pool, plain, controller):
    rows = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7], [9] * 6]
    inputs = torch.tensor([[0] * (8 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (8 - len(row)) + [1] * len(row) for row in rows])
    options = {"attention_mask": mask, "max_new_tokens": 24}
    expected, output = both(model, pool, controller, inputs, **options)
    assert torch.equal(output, expected)
    options |= {"eos_token_id": plain[5], "pad_token_id": 60}
    expected, output = both(model, pool, controller, inputs, **options)
    assert torch.equal(output, expected)
    assert 60 in output


class Recorder(StoppingCriteria, BaseStreamer):
    """Writes down what it is shown as a criterion or a streamer; ends at a length."""

    def __init__(self, stop_at=10**9):
        self.stop_at, self.seen = stop_at, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.stop_at)

    def put(self, value):
        self.seen.append((value.tolist(), value.device.type))

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("num_new", [1, 2, 7])
def test_criteria_are_asked_after_every_token_as_transformers_asks(
    model, pool, controller, num_new
):
    recorders = [Recorder(PROMPT.shape[1] + num_new) for _ in range(2)]
    expected = model.generate(PROMPT, max_new_tokens=20, stopping_criteria=[recorders[0]])
    ours = hf_generate(pool, controller)
    output = model.generate(
        PROMPT, max_new_tokens=20, stopping_criteria=[recorders[1]], custom_generate=ours
    )
    assert torch.equal(output, expected)
    assert recorders[1].seen == recorders[0].seen
    assert len(recorders[0].seen) == num_new


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_streamer_gets_what_transformers_gives_it(model, pool, controller):
    recorders = [Recorder(), Recorder()]
    model.generate(PROMPT, max_new_tokens=20, streamer=recorders[0])
    ours = hf_generate(pool, controller)
    model.generate(PROMPT, max_new_tokens=20, streamer=recorders[1], custom_generate=ours)
    assert recorders[1].seen == recorders[0].seen
    assert recorders[0].seen[-1] == "end"
    assert len(recorders[0].seen) == 22


def test_stop_strings_end_the_text_as_a_criterion():
    tokenizer = tiny_tokenizer()
    model = tiny_llama(SEED, vocab_size=len(tokenizer))
    pool = pool_of(tiny_llama(SEED, vocab_size=len(tokenizer)))
    inputs = tokenizer("abc abc", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(inputs, max_new_tokens=30)[0, inputs.shape[1] :])
    options = {"stop_strings": text[8:10], "tokenizer": tokenizer, "max_new_tokens": 30}
    expected = model.generate(inputs, **options)
    criterion = StopStringCriteria(tokenizer, text[8:10])
    ours = hf_generate(pool, "static:draft@4")
    output = model.generate(
        inputs, max_new_tokens=30, stopping_criteria=[criterion], custom_generate=ours
    )
    assert torch.equal(output, expected)
    assert output.shape[1] == inputs.shape[1] + text.find(text[8:10]) + 2


def test_a_time_limit_and_a_dictionary_are_transformers_own(model, pool):
    ours = hf_generate(pool, "random")
    options = {"max_time": 0.0, "return_dict_in_generate": True, "max_new_tokens": 20}
    output = model.generate(PROMPT, custom_generate=ours, **options)
    assert torch.equal(output.sequences, model.generate(PROMPT, **options).sequences)
    assert output.sequences.shape[1] == PROMPT.shape[1] + 1


def test_a_full_context_ends_the_text_with_a_warning(caplog):
    model = tiny_llama(SEED, max_position_embeddings=32)
    ours = hf_generate(pool_of(tiny_llama(SEED, max_position_embeddings=32)), "random")
    with caplog.at_level(logging.WARNING):
        output = model.generate(PROMPT, max_new_tokens=60, custom_generate=ours)
    assert output.shape[1] == 32
    assert "context is full" in caplog.text


# Sampling


GRID = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 8, "top_p": 0.6},
    {"top_k": 0},
    {"top_p": 1.0, "top_k": 1},
]


def transformers_warpers(temperature=1.0, top_k=50, top_p=1.0):
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


@pytest.mark.parametrize("options", GRID, ids=str)
def test_the_law_is_transformers_own(options):
    logits = 3.0 * torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0))
    warpers = transformers_warpers(**options)
    expected = warpers(torch.zeros(64, 1, dtype=torch.long), logits).softmax(dim=-1)
    torch.testing.assert_close(law(logits, sampling_of(warpers, is_greedy=False)), expected)


def pair_law(model, **options):
    """The exact law of the first two sampled tokens, [V * V]."""
    warpers = transformers_warpers(**options)
    first = warpers(PROMPT, model(PROMPT).logits[:, -1]).softmax(dim=-1)[0]
    tokens = torch.arange(VOCAB)
    inputs = torch.cat([PROMPT.expand(VOCAB, -1), tokens[:, None]], dim=1)
    second = warpers(inputs, model(inputs).logits[:, -1]).softmax(dim=-1)
    return (first[:, None] * second).flatten()


def test_samples_follow_transformers_law(model, pool):
    """Pairs of tokens, the second of which is drafted; another law is the negative control."""
    options = {"temperature": 0.8, "top_k": 5, "top_p": 0.9}
    torch.manual_seed(0)
    ours = hf_generate(pool, "static:draft@1", exact=False)
    output = model.generate(
        PROMPT.expand(600, -1), max_new_tokens=2, do_sample=True, custom_generate=ours, **options
    )
    pairs = output[:, -2] * VOCAB + output[:, -1]
    counts = torch.bincount(pairs, minlength=VOCAB * VOCAB).tolist()
    assert chi_square(counts, pair_law(model, **options).tolist()) < 1.9
    wrong = pair_law(model, temperature=1.2, top_k=5, top_p=0.9)
    assert chi_square(counts, wrong.tolist()) > 4.0


def test_torchs_seed_repeats_a_sample_and_sequences_differ(model, pool):
    ours = hf_generate(pool, "static:draft@2")
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(
            model.generate(
                PROMPT,
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=16,
                custom_generate=ours,
            )
        )
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert len({tuple(row) for row in outputs[0].tolist()}) == 3


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams: not supported with a pool"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens: .*the member 'ngram'"),
        ({"repetition_penalty": 1.2}, "repetition_penalty: not supported .*leave it out"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size: "),
        ({"bad_words_ids": [[4]]}, "bad_words_ids: "),
        ({"suppress_tokens": [4]}, "suppress_tokens: "),
        ({"min_new_tokens": 3, "eos_token_id": 5}, "min_length or min_new_tokens: "),
        ({"min_length": 30, "eos_token_id": 5}, "min_length or min_new_tokens: "),
        ({"do_sample": True, "min_p": 0.1}, "min_p: "),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p: "),
        ({"do_sample": True, "top_h": 0.5}, "top_h: "),
        ({"sequence_bias": {(3,): 1.0}}, "sequence_bias: "),
        ({"guidance_scale": 2.0}, "guidance_scale: "),
        ({"renormalize_logits": True}, "renormalize_logits: "),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "prefix_allowed_tokens_fn: "),
        ({"logits_processor": [TopPLogitsWarper(0.5)], "do_sample": True}, "logits_processor: "),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: "),
        ({"return_dict_in_generate": True, "output_logits": True}, "output_logits: "),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions: "),
        ({"use_cache": False}, "use_cache: not supported"),
        ({"cache_implementation": "static"}, "cache_implementation: not supported"),
        ({"attention_mask": torch.tensor([[1] * 7 + [0]])}, "attention_mask: row 0 .*left"),
        ({"position_ids": torch.arange(8)[None] + 1}, "position_ids: a pool counts from 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_an_option_that_cannot_be_honoured_raises_and_names_itself(model, pool, options, message):
    ours = hf_generate(pool, "none")
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPT, **{"max_new_tokens": 8, "custom_generate": ours} | options)


def test_what_transformers_hides_from_a_callable_is_refused_all_the_same(model, pool):
    ours = hf_generate(pool, "none")
    with pytest.raises(ValueError, match="assistant_model: the pool's members"):
        model.generate(PROMPT, max_new_tokens=8, assistant_model=model, custom_generate=ours)
    with pytest.raises(ValueError, match="stop strings"):
        model.generate(PROMPT, stop_strings=["x"], tokenizer=tiny_tokenizer(), custom_generate=ours)
    with pytest.raises(ValueError, match="streamer: rows are decoded one by one"):
        model.generate(PROMPT.expand(2, -1), streamer=Recorder(), custom_generate=ours)


def test_a_cache_with_something_in_it_is_refused(model, pool):
    cache = model(PROMPT[:, :4], use_cache=True)
    held = getattr(cache, "cache", None) or cache.past_key_values
    with pytest.raises(ValueError, match="cache: the pool keeps its own"):
        model.generate(PROMPT, cache=held, custom_generate=hf_generate(pool, "none"))


def test_another_model_than_the_pools_target_is_refused(pool):
    other = tiny_llama(SEED, num_layers=3)
    with pytest.raises(ValueError, match=r"another model than generate's.*num_hidden_layers"):
        other.generate(PROMPT, max_new_tokens=4, custom_generate=hf_generate(pool, "none"))


def test_rows_of_different_lengths_need_a_padding_token(model, pool):
    class EndsOnAnEvenToken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 2 == 0

    inputs = torch.tensor([[token, 2, 3] for token in range(12)])
    with pytest.raises(ValueError, match="pad_token_id: rows end at different lengths"):
        model.generate(
            inputs,
            max_new_tokens=24,
            eos_token_id=None,
            stopping_criteria=[EndsOnAnEvenToken()],
            custom_generate=hf_generate(pool, "none"),
        )


# Controllers


def test_a_controller_object_is_driven_while_transformers_owns_the_loop(model, pool, plain):
    class Mine:
        needs_divergence = False

        def __init__(self):
            self.begun, self.observed = [], []

        def begin(self, request):
            self.begun.append(dict(request))

        def act(self, observation, mask):
            assert mask[0]
            return max(index for index in range(len(mask)) if mask[index])

        def observe(self, action, reward, info):
            self.observed.append((action, reward, info["tokens"]))

    mine = Mine()
    ours = hf_generate(pool, mine)
    for _ in range(2):
        output = model.generate(PROMPT, max_new_tokens=20, custom_generate=ours)
        assert output[0, PROMPT.shape[1] :].tolist() == plain[:20]
    assert [request["num_prompt"] for request in mine.begun] == [8, 8]
    assert [request["max_new_tokens"] for request in mine.begun] == [20, 20]
    assert sum(tokens for _, _, tokens in mine.observed) == 40
    assert all(isinstance(reward, float) for _, reward, _ in mine.observed)


def test_an_unknown_controller_is_refused_at_once(pool):
    with pytest.raises(ValueError, match="did you mean 'ucb'"):
        hf_generate(pool, "uucb")
