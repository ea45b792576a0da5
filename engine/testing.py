"""Small pools and law tests, for our tests and for users' own.

Tiny random models are real transformers models of the full code path, only small.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

from specgym.engine.decoding import decode_step, start
from specgym.engine.joining import join
from specgym.engine.members.lookups import make_lookups
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import DEFAULT_K_VALUES, ModelPool
from specgym.engine.state import DecodeState
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan, StepResult

Model = TypeVar("Model", bound=PreTrainedModel)
SPECIAL_TOKENS = ("<unk>", "<eos>")
CHARACTERS = (  # the commonest first; all of printable ASCII
    " etaoinshrdlucmfwypvbgkjqxz\n.,:;!?'\"()0123456789-_=+*/<>[]{}"
    "ETAOINSHRDLUCMFWYPVBGKJQXZ#$%&@\\^`|~"
)


def tiny_llama(
    seed: int = 0,
    *,
    vocab_size: int = 61,
    num_layers: int = 2,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A random Llama of some ten thousand parameters, with laws neither flat nor certain."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return frozen(model, dtype)


def tiny_mixtral(
    seed: int = 0, *, vocab_size: int = 61, dtype: torch.dtype = torch.float32
) -> MixtralForCausalLM:
    """A random mixture of six experts, two per token, otherwise like ``tiny_llama``."""
    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MixtralForCausalLM(config)
    return frozen(model, dtype)


def tiny_tokenizer(vocab_size: int = 98) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters: ``<unk>``, ``<eos>``, then the commonest of ASCII.

    Args:
        vocab_size: Size of the vocabulary; 98 holds all of printable ASCII and the newline.

    Raises:
        ValueError: If the vocabulary is smaller than 3 or larger than 98.
    """
    tokens = (*SPECIAL_TOKENS, *CHARACTERS)
    if not len(SPECIAL_TOKENS) < vocab_size <= len(tokens):
        raise ValueError(f"vocab_size: must be in 3..{len(tokens)}; got {vocab_size}")
    vocabulary = {token: index for index, token in enumerate(tokens[:vocab_size])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token=SPECIAL_TOKENS[0]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        clean_up_tokenization_spaces=False,
    )


def frozen(model: Model, dtype: torch.dtype) -> Model:
    """The model in this type, for inference only."""
    nn.Module.to(model, dtype)
    return model.eval().requires_grad_(False)


def perturbed(model: Model, noise: float, seed: int = 0) -> Model:
    """A copy of a model with relative Gaussian noise on its weights: a drafter that half agrees."""
    twin = type(model)(copy.deepcopy(model.config))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: value + noise * value.std() * torch.randn(value.shape, generator=generator)
        if value.dim() > 1
        else value.clone()
        for name, value in model.float().state_dict().items()
    }
    twin.load_state_dict(weights)
    return frozen(twin, model.dtype)


def tiny_pool(
    seed: int = 0,
    *,
    noise: Sequence[float] = (0.15, 0.05),
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    vocab_size: int = 61,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
    eos_ids: Sequence[int] = (),
    lean: bool = True,
    compiled: bool = True,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> ModelPool:
    """The lookups, two drafters of growing quality (``draft``, ``mid``) and a target.

    Chains: every drafter alone, and ``ngram>draft``, ``ngram>mid`` and ``draft>mid`` before the
    target. With a tokenizer (``tiny_tokenizer()``) the pool takes text, and its vocabulary.
    """
    target = tiny_llama(
        seed,
        vocab_size=vocab_size if tokenizer is None else len(tokenizer),
        max_position_embeddings=max_position_embeddings,
        dtype=torch.float32,
    )
    names = ("draft", "mid")
    drafters = [perturbed(target, each, seed + 1 + i) for i, each in enumerate(noise)]
    models = [*zip(names, drafters, strict=False), ("target", target)]
    members = [
        ModelMember(name, frozen(model, dtype), lean=lean, compiled=compiled)
        for name, model in models
    ]
    return ModelPool(
        [*make_lookups(), *members],
        k_values=k_values,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        name="tiny",
    )


class TableLM(PreTrainedModel):
    """A causal LM whose logits are the row of a table at the last token: its law is known exactly.

    Args:
        logits_VV: Entry [last token, next token].
        max_position_embeddings: The context limit.
    """

    def __init__(self, logits_VV: torch.Tensor, max_position_embeddings: int = 512):
        config = PreTrainedConfig()
        config.vocab_size = logits_VV.shape[-1]
        config.num_hidden_layers = 1
        config.max_position_embeddings = max_position_embeddings
        super().__init__(config)
        self.logits_VV = nn.Parameter(logits_VV.clone(), requires_grad=False)
        self.eval()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: object = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> CausalLMOutput:
        """Logits [B, T, V]; what a table has no use for is taken as any other model takes it."""
        return CausalLMOutput(logits=self.logits_VV[input_ids[:, -logits_to_keep:]])


def table_pool(
    tables: Sequence[torch.Tensor],
    *,
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    eos_ids: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> ModelPool:
    """The lookups and one ``TableLM`` per table, cheapest first: ``draft``, ``mid``, ``target``.

    Args:
        tables: The target's logits last, drafters' before; at most three.
        k_values: Numbers of drafted tokens that plans may ask for.
        eos_ids: Token ids that end a text.
        tokenizer: The tokenizer of the tables' ids.
    """
    names = (*("draft", "mid")[: len(tables) - 1], "target")
    members = [ModelMember(name, TableLM(table)) for name, table in zip(names, tables, strict=True)]
    return ModelPool(
        [*make_lookups(), *members],
        k_values=k_values,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        name="table",
    )


def random_plans(
    pool: ModelPool, seed: int, plans: Sequence[Plan] = ()
) -> Callable[[DecodeState], Plan]:
    """A chooser of plans for ``decode``: any of these, or of the pool's, anew at every step."""
    rng, choices = random.Random(seed), plans or pool.plans()
    return lambda state: rng.choice(choices)


def decode(
    pool: ModelPool,
    requests: Sequence[DecodeRequest],
    pick: Callable[[DecodeState], Plan] | None = None,
    *,
    exact: bool = True,
) -> tuple[DecodeState, list[StepResult]]:
    """The state after its last step, and every step's result; memories are checked at each.

    Args:
        pool: The members.
        requests: One per row of the batch.
        pick: Chooses each step's plan; None never speculates (plain decoding).
        exact: See ``start``.
    """
    clock, results = CountingClock(), []
    state = start(pool, requests, clock, exact=exact)
    while not state.is_finished:
        plan = Plan((pool.target,), 0) if pick is None else pick(state)
        results.append(decode_step(pool, state, plan, clock))
        for memory in state.memories.values():
            memory.check_integrity()
    return state, results


def serve(
    pool: ModelPool,
    queue: Sequence[DecodeRequest],
    batch_size: int,
    pick: Callable[[DecodeState], Plan],
    *,
    exact: bool = True,
    row_tokens: int | None = None,
    delay: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Every request's output under continuous batching; memories are checked at each step.

    Args:
        pool: The members.
        queue: The requests; they start and join in this order.
        batch_size: Rows.
        pick: Chooses each step's plan.
        exact: See ``start``.
        row_tokens: See ``start``; None takes the longest of the whole queue.
        delay: Asked before a request joins a free row, whether it waits for another step.
    """
    clock = CountingClock()
    longest = max(len(request.prompt) + request.max_new_tokens for request in queue)
    room = row_tokens or longest
    state = start(pool, queue[:batch_size], clock, exact=exact, row_tokens=room)
    holders, waiting = list(range(batch_size)), list(range(batch_size, len(queue)))
    outputs: list[list[int]] = [[] for _ in queue]
    while not state.is_finished or waiting:
        for row in range(batch_size):
            if not state.is_active(row):
                outputs[holders[row]] = state.output(row)
                if waiting and (state.is_finished or not delay()):
                    holders[row] = waiting.pop(0)
                    join(pool, state, row, queue[holders[row]], clock)
        if not state.is_finished:
            decode_step(pool, state, pick(state), clock)
        for memory in state.memories.values():
            memory.check_integrity()
    for row, holder in enumerate(holders):
        outputs[holder] = state.output(row)
    return outputs


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> float:
    """Pearson's statistic over its mean under the law (degrees of freedom): about 1 if it holds.

    Categories expected fewer than five times are pooled.

    Args:
        counts: Observations per category.
        expected: Probability per category.
    """
    total = sum(counts)
    pooled_count, pooled_expected, terms = 0.0, 0.0, []
    for count, probability in zip(counts, expected, strict=True):
        mean = probability * total
        if mean < 5.0:
            pooled_count, pooled_expected = pooled_count + count, pooled_expected + mean
        else:
            terms.append((count - mean) ** 2 / mean)
    if pooled_expected >= 5.0:
        terms.append((pooled_count - pooled_expected) ** 2 / pooled_expected)
    elif pooled_count > 25:
        return float("inf")
    return sum(terms) / max(len(terms) - 1, 1)
