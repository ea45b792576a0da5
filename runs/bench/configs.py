"""Settings of the benches; imported without torch, so that help is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from specgym.runs.settings import MIXTURE_POOL, PoolSettings

BUILT_IN_POOLS = ("smollm2", MIXTURE_POOL)
PEERS = ("transformers", "vllm", "llama-cpp")
NO_MIXTURE = "none"


@dataclasses.dataclass(frozen=True)
class DecodeBench(PoolSettings):
    """Plain decoding against transformers and the byte floor, and what the environment adds to it.

    Attributes:
        new_tokens: Tokens decoded per repeat.
        repeats: Alternated repeats of plain decoding.
        pairs: Alternated pairs of a bare loop and the environment at K = 0.
        pair_tokens: Tokens of such a pair's runs; few, so that both meet the machine alike.
        json: Where the numbers are written.
    """

    new_tokens: int = 128
    repeats: int = 7
    pairs: int = 61
    pair_tokens: int = 24
    json: Path | None = None


@dataclasses.dataclass(frozen=True)
class BatchBench(PoolSettings):
    """Tokens per second of plain decoding, two chains and a schedule at several batch sizes.

    Attributes:
        sizes: Batch sizes.
        two_level: A plan of a drafter and the target, such as ``small@3``; by default the first
            such chain of the pool.
        three_level: A plan of two drafters and the target; by default the first such chain.
        scheduler: The controller that picks the chain.
        workload: Where the requests come from.
        prompts: JSONL file with prompts of your own; None takes the built-in ones.
        prompt_tokens: Longest prompt that is taken: prefilling long ones would take most of the
            time, and is not what is measured.
        new_tokens: Tokens decoded per row and run.
        request_tokens: Token budget of a request: rows that end are filled again.
        repeats: Alternated repeats of every run, after one that is not measured.
        seed: Picks the requests.
        json: Where the numbers are written.
        plot: Where a picture of them is written (its ending says the format).
    """

    exact: bool = False
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    two_level: str = ""
    three_level: str = ""
    scheduler: str = "specrouter"
    workload: str = "all-4"
    prompts: Path | None = None
    prompt_tokens: int = 64
    new_tokens: int = 20
    request_tokens: int = 96
    repeats: int = 3
    seed: int = 0
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        counts = (*self.sizes, self.prompt_tokens, self.new_tokens, self.request_tokens)
        if not self.sizes or min(*counts, self.repeats) < 1:
            raise ValueError(
                f"sizes, prompt_tokens, new_tokens, request_tokens and repeats: must be >= 1; "
                f"got {counts} and {self.repeats}"
            )


@dataclasses.dataclass(frozen=True)
class DrafterBench(PoolSettings):
    """Agreement of every drafter's first token along the target's greedy text, and its seconds.

    Attributes:
        prompts: JSONL files with prompts of your own; none takes the built-in held-out ones.
        skip_too_long: Leave out prompts that do not fit the target's context, and say how many; by
            default they are refused.
        categories: Categories to measure on; all by default.
        limit: Prompts of each category, from the first on.
        new_tokens: Tokens decoded per prompt.
        json: Where the numbers are written.
    """

    prompts: tuple[Path, ...] = ()
    skip_too_long: bool = False
    categories: tuple[str, ...] = ()
    limit: int = 20
    new_tokens: int = 96
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1; got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class GpuBench:
    """Captured forwards against eager ones: same results, every chain lossless, and the time.

    Attributes:
        device: Where the models run; ``cpu`` is a dry run without graphs.
        tiny: Models of toy size, for a dry run.
        new_tokens: Tokens decoded per chain.
        context: Tokens in front of the timed windows.
        repeats: Alternated repeats of every timed forward.
        seed: Draws weights, prompts and plans.
        json: Where the numbers are written.
    """

    device: str = "cuda"
    tiny: bool = False
    new_tokens: int = 64
    context: int = 400
    repeats: int = 15
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("new_tokens", "context", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1; got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class MoeBench(PoolSettings):
    """Milliseconds and unique experts against tokens verified, and utility of static K.

    Attributes:
        dense: The pool with the dense target to compare with.
        experts: Experts of the built-in mixture.
        top_k: Experts that each token visits.
        repeats: Alternated repeats of every timed forward.
        drafters: Drafters to decode with; by default ngram, and eagle where the pool has one.
        workloads: Workloads to decode with every static K.
        requests: Requests of each.
        new_tokens: Tokens decoded per request and K.
        json: Where the numbers are written.
        plot: Where a picture of them is written (its ending says the format).
    """

    pool: str = MIXTURE_POOL
    exact: bool = False
    dense: str = "smollm2"
    experts: int = 8
    top_k: int = 2
    repeats: int = 9
    drafters: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("code", "math", "extract", "chat")
    requests: int = 3
    new_tokens: int = 48
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.requests < 1 or self.new_tokens < 1:
            raise ValueError(
                f"repeats, requests and new_tokens: must be >= 1; "
                f"got {self.repeats}, {self.requests} and {self.new_tokens}"
            )
        if self.pool != MIXTURE_POOL and (self.experts, self.top_k) != (8, 2):
            raise ValueError(
                f"experts and top_k: go with the built-in pool {MIXTURE_POOL}; got {self.pool!r}"
            )

    @property
    def mixture(self) -> str:
        """The pool with the mixture, its numbers of experts spelled out where they are changed."""
        if self.pool != MIXTURE_POOL or (self.experts, self.top_k) == (8, 2):
            return self.pool
        return f"{MIXTURE_POOL}:experts={self.experts}:top-k={self.top_k}"


@dataclasses.dataclass(frozen=True)
class PeersBench:
    """Our engine against its peers on the CPU: same weights, precision, prompts, token counts.

    Attributes:
        pool: The dense pool; its target decodes everywhere.
        mixture: The pool with a mixture of experts, against transformers; ``none`` leaves it out.
        dtype: Type of the weights; ``auto`` is bfloat16.
        peers: Whom to compare with: ``transformers``, ``vllm``, ``llama-cpp``. The last two get
            environments of their own in the user's cache, which are built once.
        assistant: The member of the pool that is transformers' assistant model, and our drafter in
            the row beside it.
        k: Drafted tokens wherever anyone speculates.
        prompts: Prompts, in turn of code, math, extract and chat.
        repeats: Alternated repeats of every prompt.
        mixture_repeats: Those of the mixture.
        new_tokens: Tokens decoded per prompt.
        json: Where the numbers are written.
    """

    pool: str = "smollm2"
    mixture: str = MIXTURE_POOL
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    peers: tuple[str, ...] = PEERS
    assistant: str = "small"
    k: int = 4
    prompts: int = 4
    repeats: int = 3
    mixture_repeats: int = 2
    new_tokens: int = 128
    json: Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.peers if name not in PEERS]
        if unknown:
            raise ValueError(f"peers: no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError(f"peers: must name each peer once; got {', '.join(self.peers)}")
        for name in ("k", "prompts", "repeats", "mixture_repeats", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1; got {getattr(self, name)}")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ValueError(
                f"json: must lie in a folder that exists; there is no {self.json.parent}"
            )


@dataclasses.dataclass(frozen=True)
class ReplayBench:
    """Steps a second of replays under random allowed actions, and a learned decision's time.

    Attributes:
        traces: File of recorded traces; None takes synthetic ones of seven chains.
        num_envs: Rows of the vectorised environment.
        single_steps: Steps of the single environment per repeat.
        vector_steps: Steps of all rows per repeat.
        repeats: Repeats; the median counts.
        policy: File of a learned policy, of the traces' plans; None takes random weights, as many
            as imitation has.
        seed: Draws requests and actions.
        json: Where the numbers are written.
    """

    traces: Path | None = None
    num_envs: int = 4096
    single_steps: int = 10_000
    vector_steps: int = 100
    repeats: int = 5
    policy: Path | None = None
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_envs", "single_steps", "vector_steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1; got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class SoakBench:
    """Many short requests through one engine: does memory grow, does anything fail.

    Attributes:
        num_requests: Requests.
        max_new_tokens: Longest token budget; each request's is drawn from 1 up to it.
        max_prompt_tokens: Longest prompt.
        num_reports: Times that memory is looked at.
        seed: Draws requests and plans.
        json: Where the numbers are written.
    """

    num_requests: int = 10_000
    max_new_tokens: int = 8
    max_prompt_tokens: int = 32
    num_reports: int = 20
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_requests", "max_new_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1; got {getattr(self, name)}")
        if not 2 <= self.num_reports <= max(self.num_requests, 2):
            raise ValueError(f"num_reports: must be in 2..num_requests; got {self.num_reports}")


@dataclasses.dataclass(frozen=True)
class FootprintBench:
    """What a pool takes: memory, seconds of loading, and a core that another process wants too.

    Attributes:
        pools: The pools; the first one is decoded by two processes at once.
        dtype: Type of the weights; ``auto`` is bfloat16.
        exact: Decode in fixed shapes.
        loads: Processes that load each pool, one after the other; at least two.
        tokens: Tokens of the request after which memory is looked at.
        repeats: Alternated repeats of one process decoding and of two.
        seconds: How long each of those decodes.
        json: Where the numbers are written.
    """

    pools: tuple[str, ...] = BUILT_IN_POOLS
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    exact: bool = False
    loads: int = 4
    tokens: int = 64
    repeats: int = 7
    seconds: float = 3.0
    json: Path | None = None

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError(
                "pools: must name a pool; got none; leave it out for the built-in ones"
            )
        for name, least in (("loads", 2), ("tokens", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be >= {least}; got {getattr(self, name)}")
        if self.seconds <= 0:
            raise ValueError(f"seconds: must be > 0; got {self.seconds}")


SETTINGS: dict[str, type] = {
    "batch": BatchBench,
    "decode": DecodeBench,
    "drafters": DrafterBench,
    "footprint": FootprintBench,
    "gpu": GpuBench,
    "moe": MoeBench,
    "peers": PeersBench,
    "replay": ReplayBench,
    "soak": SoakBench,
}
