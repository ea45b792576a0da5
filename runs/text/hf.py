"""transformers' own ``generate`` over a pool: ``model.generate(custom_generate=hf_generate(...))``.

transformers owns the call: it prepares prompts, options, stopping criteria and streamer, and hands
them to the callable made here, which decodes and asks the criteria after every single token.
What cannot be honoured raises: an option is never silently without effect.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
)

from specgym.engine.pool import ModelPool
from specgym.engine.types import DecodeRequest, SamplingParams
from specgym.runs.loop import Controller
from specgym.runs.settings import DEFAULT_CONTROLLER
from specgym.runs.text.hf_options import (
    argument_of_generate,
    check_model,
    check_options,
    padded,
    sampling_of,
    token_ids,
    unpadded,
)
from specgym.runs.text.session import Session

logger = logging.getLogger(__name__)


def hf_generate(
    pool: ModelPool, controller: Controller | str = DEFAULT_CONTROLLER, *, exact: bool = True
) -> PoolGenerate:
    """What ``model.generate(..., custom_generate=...)`` takes to decode with a pool.

    ```python
    from specgym.engine import hf_generate, load_pool

    pool = load_pool("draft=PATH,target=PATH")
    model.generate(**inputs, max_new_tokens=64, custom_generate=hf_generate(pool, "specrouter"))
    ```

    The tokens are the pool's target's, which must be the model ``generate`` is called on (or one
    loaded from the same files). Supported: ``max_new_tokens``, ``max_length``, ``max_time``,
    ``eos_token_id``, ``do_sample`` with ``temperature``, ``top_k``, ``top_p`` and
    ``num_return_sequences``, stopping criteria, streamers, left-padded batches (row by row),
    ``return_dict_in_generate``. Everything else that would change the tokens raises. Sampling draws
    from torch's global stream: ``torch.manual_seed`` repeats it. For stop strings give
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``: transformers keeps the option
    ``stop_strings`` from any callable.

    Args:
        pool: The models.
        controller: Who picks the plans, or its name; it goes on learning from call to call.
        exact: Bit-exact fixed shapes (see ``specgym.engine.start``).

    Raises:
        ValueError: If there is no controller of that name.
    """
    return PoolGenerate(Session(pool, controller, exact=exact))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of generate, as rows are decoded under it.

    Attributes:
        budget: New tokens of a row at most.
        sampling: How logits become tokens, but for the seed.
        eos_ids: Token ids that end a row.
        criteria: transformers' stopping criteria, asked after every token.
        streamer: Gets every token, where there is one.
    """

    budget: int
    sampling: SamplingParams
    eos_ids: frozenset[int]
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None


class PoolGenerate:
    """The decoding loop that ``generate`` calls; made by ``hf_generate``."""

    def __init__(self, session: Session):
        self.session = session

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Prompts and what was decoded, [B, L], padded on the right behind rows that ended.

        Raises:
            ValueError: If an option, an input or the model is not supported.
            StepError: If the engine failed.
        """
        if streamer is None:
            streamer = argument_of_generate("streamer")
        check_model(self.session.env.pool, model)
        check_options(generation_config, argument_of_generate("assistant_model"))
        prompts = unpadded(input_ids, model_kwargs)
        if streamer is not None and len(prompts) > 1:
            raise ValueError(
                f"streamer: rows are decoded one by one; give 1 row, not {len(prompts)}"
            )
        limit = stopping_criteria.max_length or generation_config.max_length
        call = Call(
            max(limit - input_ids.shape[1], 1),
            sampling_of(logits_processor, is_greedy=not generation_config.do_sample),
            token_ids(generation_config._eos_token_tensor),
            stopping_criteria,
            streamer,
        )
        rows = [
            torch.cat([given, given.new_tensor(self.decode(prompt, given, call))])
            for prompt, given in zip(prompts, input_ids, strict=True)
        ]
        if streamer is not None:
            streamer.end()
        sequences: Any = padded(rows, token_ids(generation_config._pad_token_tensor))
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def decode(self, prompt: tuple[int, ...], given: torch.Tensor, call: Call) -> list[int]:
        """One row's new tokens.

        Args:
            prompt: Token ids, without padding.
            given: Token ids [L] with padding, as the criteria see them.
            call: The call.
        """
        seed = 0 if call.sampling.is_greedy else int(torch.randint(2**62, ()))
        request = DecodeRequest(
            prompt,
            call.budget,
            sampling=dataclasses.replace(call.sampling, seed=seed),
            eos_ids=call.eos_ids,
        )
        text = torch.cat([given, given.new_zeros(call.budget)])
        output: list[int] = []
        for token in self.tokens(request):
            text[len(given) + len(output)] = token
            output.append(token)
            is_done = call.criteria(text[None, : len(given) + len(output)], None)
            if call.streamer is not None:
                call.streamer.put(torch.tensor([token]))
            if bool(is_done.all()):
                break
        return output

    def tokens(self, request: DecodeRequest) -> Iterator[int]:
        """Every token of a request, one by one."""
        for tokens, info in self.session.steps(request):
            yield from tokens
            if info["finish_reason"] == "context":
                logger.warning("the text ends early: the target's context is full")
