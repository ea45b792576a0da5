"""Text generation for scripts: any pool under any controller, whole or streamed.

``specgym.engine`` offers what users need of this by name: ``Engine``, and ``hf_generate`` of
``specgym.runs.text.hf``. They live here because a controller sees what the environment measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from specgym.engine.checks import check_flag, check_stop_strings, check_text, check_whole
from specgym.engine.pool import DEFAULT_K_VALUES, ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.engine.timing import Clock
from specgym.engine.types import DecodeRequest, SamplingParams
from specgym.envs.arguments import check_chains, check_k_values
from specgym.envs.decode import make_clock
from specgym.runs.loop import Controller, StepError
from specgym.runs.settings import DEFAULT_CONTROLLER
from specgym.runs.text.detokenizer import Detokenizer
from specgym.runs.text.session import Session

GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Generation:
    """What came of one prompt.

    Attributes:
        prompt: The prompt.
        text: The text, without special tokens, cut before the stop string that ended it.
        tokens: All token ids that were decoded.
        finish_reason: ``eos``, ``stop``, ``length``, or ``context`` where the target's is full.
        seconds: From the end of the target's prefill to the last token.
        prefill_seconds: The target's prefill.
        num_iterations: Decode iterations.
        speedup: Over no speculation, by the baseline that was probed on the way.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    seconds: float
    prefill_seconds: float
    num_iterations: int
    speedup: float

    @property
    def tokens_per_iteration(self) -> float:
        """Tokens that an iteration gave, in the mean."""
        return len(self.tokens) / self.num_iterations

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, without the prefill."""
        return len(self.tokens) / self.seconds


class TextStream(Iterator[str]):
    """Pieces of one text while it is decoded; ``result`` when it has ended.

    A piece never ends inside a character, and no piece shows what a stop string cuts.

    Args:
        prompt: The prompt.
        request: What is decoded.
        session: What decodes it; one stream at a time.
    """

    def __init__(self, prompt: str, request: DecodeRequest, session: Session):
        self.prompt = prompt
        self.session = session
        self.detokenizer = Detokenizer(session.env.pool.tokenizer, request.stop)
        self.steps = session.steps(request)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.infos: list[dict[str, Any]] = []

    def __next__(self) -> str:
        """The next piece, never empty."""
        for tokens, info in self.steps:
            self.tokens += tokens
            self.infos.append(info)
            reason = info["finish_reason"]
            if reason is None:
                piece = self.detokenizer.push(tokens)
            else:
                piece = self.detokenizer.finish(tokens, is_stopped=reason == "stop")
            if piece:
                self.pieces.append(piece)
                return piece
        raise StopIteration

    @property
    def result(self) -> Generation:
        """What came of the prompt; decodes what was not asked for yet.

        Raises:
            StepError: If the engine failed.
        """
        for _ in self:
            pass
        if not self.infos or self.infos[-1]["finish_reason"] is None:
            raise StepError("the engine failed before the end of the text; there is no result")
        seconds = sum(info["total_seconds"] for info in self.infos)
        plain_seconds = sum(info["tokens"] * info["baseline_seconds"] for info in self.infos)
        return Generation(
            self.prompt,
            "".join(self.pieces),
            tuple(self.tokens),
            self.infos[-1]["finish_reason"],
            seconds,
            self.session.prefill_seconds,
            len(self.infos),
            plain_seconds / seconds,
        )


class Engine:
    """Text out of a pool of models, under any controller; the texts are plain decoding's.

    ```python
    from specgym.engine import Engine

    engine = Engine.from_pool("smollm2")
    for result in engine.generate(["Name a river.", "Name a lake."], controller="specrouter"):
        print(result.text, result.finish_reason, result.tokens_per_iteration)
    for piece in engine.stream("Tell a story.", controller="ucb", max_new_tokens=64):
        print(piece, end="", flush=True)
    ```

    A prompt is a chat turn where the tokenizer has a template. A controller is a name with options
    (``none``, ``static:ngram@4``, ``specrouter:window=4``) or an object with the controllers'
    methods (see ``specgym.runs.loop.Controller``), which keeps what it learned from call to call.

    Args:
        pool: The models; it needs a tokenizer.
        exact: Bit-exact fixed shapes (see ``specgym.engine.start``).
        clock: ``wall`` measures, ``counting`` is deterministic; or a ``Clock``.

    Raises:
        ValueError: If the pool has no tokenizer.
    """

    def __init__(self, pool: ModelPool, *, exact: bool = True, clock: Clock | str = "wall"):
        if not isinstance(pool, ModelPool):
            raise ValueError(
                f"pool: must be a ModelPool; got {pool!r}; Engine.from_pool takes names and specs"
            )
        if pool.tokenizer is None:
            raise ValueError(f"pool {pool.name!r} has no tokenizer; text needs a pool with one")
        self.pool = pool
        self.exact = check_flag("exact", exact)
        self.clock = make_clock(clock, pool.model(pool.target).device)

    @classmethod
    def from_pool(
        cls,
        name: str = "smollm2",
        *,
        k_values: Sequence[int] = DEFAULT_K_VALUES,
        chains: Sequence[str] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        exact: bool = True,
        compiled: bool = False,
    ) -> Engine:
        """An engine over the pool of this name or spec; see ``specgym.engine.load_pool``.

        Args:
            name: ``smollm2``, or ``"draft=PATH,target=PATH"`` with folders or hub ids.
            k_values: Numbers of drafted tokens that plans may ask for.
            chains: Legal chains such as ``"ngram>target"``; None takes the default ones.
            device: Where the models run.
            dtype: Type of the weights.
            exact: Bit-exact fixed shapes.
            compiled: Compile the lean forwards: tens of seconds per shape.

        Raises:
            ValueError: If the spec cannot be read or the models do not go together.
            OSError: If weights cannot be had.
        """
        pool = load_pool(
            check_text("name", name),
            k_values=check_k_values(k_values),
            chains=None if chains is None else check_chains(chains),
            device=check_text("device", device),
            dtype=dtype,
            compiled=check_flag("compiled", compiled),
        )
        return cls(pool, exact=exact)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        controller: Controller | str = DEFAULT_CONTROLLER,
        max_new_tokens: int = 256,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """What comes of every prompt, in order; one prompt gives a list of one.

        Prompts are decoded one after another, so that the controller decides for each; the i-th
        is sampled with ``sampling.seed + i``.

        Args:
            prompts: A prompt or several.
            controller: Who picks the plans.
            max_new_tokens: Token budget of each.
            sampling: How logits become tokens; its seed also seeds a controller given by name.
            stop: Strings that end a text; they are not part of it.

        Raises:
            ValueError: If an argument is refused or a prompt does not fit the target's context.
            StepError: If the engine failed.
        """
        texts = check_prompts(prompts)
        check_sampling(sampling)
        requests = [
            self.request(
                text,
                max_new_tokens,
                dataclasses.replace(sampling, seed=sampling.seed + index),
                stop,
            )
            for index, text in enumerate(texts)
        ]
        session = self.session(controller, sampling.seed)
        return [
            TextStream(text, request, session).result
            for text, request in zip(texts, requests, strict=True)
        ]

    def stream(
        self,
        prompt: str,
        *,
        controller: Controller | str = DEFAULT_CONTROLLER,
        max_new_tokens: int = 256,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> TextStream:
        """The text of one prompt in pieces, as it is decoded; then its ``result``.

        Arguments are those of ``generate``.

        Raises:
            ValueError: If an argument is refused or the prompt does not fit the target's context.
        """
        request = self.request(prompt, max_new_tokens, sampling, stop)
        return TextStream(prompt, request, self.session(controller, sampling.seed))

    def session(self, controller: Controller | str, seed: int) -> Session:
        """The pool under this controller."""
        return Session(self.pool, controller, exact=self.exact, clock=self.clock, seed=seed)

    def request(
        self, prompt: str, max_new_tokens: int, sampling: SamplingParams, stop: Sequence[str]
    ) -> DecodeRequest:
        """What the engine is asked for; refused here, before anything is decoded."""
        budget, ends = check_whole("max_new_tokens", max_new_tokens, 1), check_stop_strings(stop)
        tokens = self.pool.encode(check_text("prompt", prompt))
        request = DecodeRequest(tokens, budget, check_sampling(sampling), stop=ends)
        self.pool.budget(request)  # refuses what does not fit the target's context
        return request


def check_prompts(prompts: Any) -> list[str]:
    """One prompt or several, as a list.

    Raises:
        ValueError: If they are no texts.
    """
    if isinstance(prompts, str):
        return [prompts]
    texts: list[Any] = list(prompts) if isinstance(prompts, Iterable) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompts: must be a text or a list of texts; got {prompts!r}")
    return texts


def check_sampling(sampling: Any) -> SamplingParams:
    """How logits become tokens, as a user gave it.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling: must be SamplingParams(...); got {sampling!r}; greedy is SamplingParams()"
        )
    return sampling
