"""What transformers' ``generate`` was asked for, in the engine's terms; the rest is refused."""

from __future__ import annotations

import dataclasses
import inspect
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgym.engine.pool import ModelPool
from specgym.engine.types import SamplingParams

IS_THE_POOLS = "the pool's members and its controller speculate"
NEEDS_LOGITS = "the logits of accepted drafts are not kept; use generate without custom_generate"
NEEDS_BEAMS = "a pool decodes one continuation; use num_return_sequences with do_sample"
REFUSED_OPTIONS = {  # generate's option: what to do instead; it may be unset, or as in NEUTRAL
    "num_beams": NEEDS_BEAMS,
    "penalty_alpha": NEEDS_BEAMS,
    "constraints": NEEDS_BEAMS,
    "force_words_ids": NEEDS_BEAMS,
    "dola_layers": "a pool has the target's last layer only",
    "use_mtp": IS_THE_POOLS,
    "assistant_early_exit": IS_THE_POOLS,
    "prompt_lookup_num_tokens": f"{IS_THE_POOLS}; prompt lookup is the member 'ngram'",
    "use_cache": "the pool keeps its own keys and values",
    "cache_implementation": "the pool keeps its own keys and values",
    "output_scores": NEEDS_LOGITS,
    "output_logits": NEEDS_LOGITS,
    "output_attentions": NEEDS_LOGITS,
    "output_hidden_states": NEEDS_LOGITS,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {"num_beams": (None, 1), "use_cache": (None, True)}
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in transformers' order
OPTION_OF_PROCESSOR = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinLengthLogitsProcessor": "min_length or min_new_tokens",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "MinPLogitsWarper": "min_p",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "LogitNormalization": "renormalize_logits",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
MODEL_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}


def argument_of_generate(name: str) -> Any:
    """An argument of the ``generate`` that is calling, None where it cannot be seen.

    transformers (5.24) hands a callable neither the streamer nor the assistant model it was given,
    so that the one would wait for ever and the other be ignored without a word.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


def check_model(pool: ModelPool, model: PreTrainedModel) -> None:
    """Refuses a model whose tokens the pool's target would not give.

    Sizes and embeddings are compared (every 64th part of the rows): what another training moves.

    Raises:
        ValueError: If they are not the target's.
    """
    target = pool.model(pool.target).model
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    ours, theirs = (
        {name: getattr(each.config.get_text_config(), name, None) for name in names}
        for each in (target, model)
    )
    if target is model:
        return
    if ours != theirs:
        raise ValueError(
            f"custom_generate: the pool's target is another model than generate's: {ours} against "
            f"{theirs}; make the pool with target=FOLDER of this model"
        )
    rows, own = (embedding_of(each) for each in (target, model))
    step = max(len(rows) // 64, 1)
    if not torch.equal(rows[::step].cpu(), own[::step].to("cpu", rows.dtype)):
        raise ValueError(
            "custom_generate: the pool's target has other weights than generate's model; make "
            "the pool with target=FOLDER of this model"
        )


def embedding_of(model: PreTrainedModel) -> torch.Tensor:
    """A model's embedding, [vocab, hidden]."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def check_options(config: GenerationConfig, assistant_model: object) -> None:
    """Refuses options of generate that the pool cannot honour.

    Raises:
        ValueError: If one is set, with the way out.
    """
    if assistant_model is not None:
        raise ValueError(f"assistant_model: {IS_THE_POOLS}; leave it out")
    for name, way_out in REFUSED_OPTIONS.items():
        value = getattr(config, name, None)
        if value not in NEUTRAL.get(name, (None, False)):
            raise ValueError(f"{name}: not supported with a pool ({way_out}); got {value!r}")


def sampling_of(processors: LogitsProcessorList, *, is_greedy: bool) -> SamplingParams:
    """The sampling that transformers' prepared processors stand for; greedy needs none.

    Raises:
        ValueError: If there is another processor than temperature, top-k and top-p, in that order.
    """
    order, params = -1, SamplingParams(temperature=0.0 if is_greedy else 1.0)
    for processor in processors:
        kind = next((n for n, each in enumerate(WARPERS) if type(processor) is each), -1)
        if is_greedy or kind <= order:
            name = type(processor).__name__
            option = OPTION_OF_PROCESSOR.get(name, "logits_processor")
            raise ValueError(
                f"{option}: not supported with a pool ({name} would change the logits that drafts "
                f"are checked against); leave it out, or call generate without custom_generate"
            )
        order = kind
        if isinstance(processor, TemperatureLogitsWarper):
            params = dataclasses.replace(params, temperature=float(processor.temperature))
        elif isinstance(processor, TopKLogitsWarper):
            params = dataclasses.replace(params, top_k=processor.top_k)
        elif isinstance(processor, TopPLogitsWarper):
            params = dataclasses.replace(params, top_p=processor.top_p)
    return params


def unpadded(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Every row's token ids without its left padding.

    Raises:
        ValueError: If there are inputs besides tokens and their mask, or padding elsewhere.
    """
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("cache: the pool keeps its own keys and values; give the whole prompt")
    others = [key for key, value in model_kwargs.items() if value is not None]
    unknown = sorted(set(others) - MODEL_INPUTS - {"cache"})
    if unknown:
        raise ValueError(f"{unknown[0]}: a pool takes token ids and their attention_mask only")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    positions = model_kwargs.get("position_ids")
    prompts = []
    for row, (tokens, real) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        count = int(real.sum())
        if not count or not bool(real[-count:].all()):
            raise ValueError(
                f"attention_mask: row {row} must be padded on the left only and hold a token; set "
                f"padding_side='left' on the tokenizer"
            )
        counted = torch.arange(count, device=input_ids.device)
        if positions is not None and not torch.equal(
            positions[row % len(positions)][-count:], counted
        ):
            raise ValueError(
                "position_ids: a pool counts from 0 at the first token; leave them out"
            )
        prompts.append(tuple(tokens[-count:].tolist()))
    return prompts


def token_ids(tensor: torch.Tensor | None) -> frozenset[int]:
    """The ids in one of transformers' prepared special-token tensors."""
    return frozenset() if tensor is None else frozenset(tensor.flatten().tolist())


def padded(rows: list[torch.Tensor], pad_ids: frozenset[int]) -> torch.Tensor:
    """Rows of token ids as one tensor [B, L], padded on the right.

    Raises:
        ValueError: If rows differ in length and there is no padding token.
    """
    if len({len(row) for row in rows}) > 1 and not pad_ids:
        raise ValueError("pad_token_id: rows end at different lengths; give the id that fills up")
    return torch.nn.utils.rnn.pad_sequence(rows, True, float(next(iter(pad_ids), 0)))
