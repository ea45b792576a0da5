"""The experts of a mixture alone, for ``specgym bench moe``: transformers' own against ours.

``our_experts`` is all that knows how the engine runs them. Legend: N rows, H hidden size, K experts
per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specgym.engine.compiled.llama import CompiledMixture
from specgym.engine.forward.experts import find_experts, hook_experts
from specgym.engine.pools.sources import load_source
from specgym.engine.timing import WallClock
from specgym.envs.workloads import get_workload
from specgym.runs.bench.measuring import alternate, row

THEIRS, OURS = "transformers' experts", "our experts"
# A layer's output [N, H] for hidden states [N, H], choices [N, K] and what they count [N, K].
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """A layer's experts, and what they were given in a forward: hidden states, choices, weights."""

    experts: Experts
    rows_NH: torch.Tensor
    chosen_NK: torch.Tensor
    weights_NK: torch.Tensor

    def run(self, num_tokens: int) -> torch.Tensor:
        """The experts' output for the first so many tokens."""
        given = (self.rows_NH, self.chosen_NK, self.weights_NK)
        return self.experts(*(each[:num_tokens] for each in given))


def bench_experts(
    source: str, dtype: torch.dtype, device: str, counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Rows of milliseconds for the experts of all layers, as transformers runs them and as we do.

    Both get the same weights, and the hidden states and choices of a real text.

    Args:
        source: Of the mixture.
        dtype: Of its weights.
        device: Where it runs.
        counts: Numbers of tokens.
        repeats: Alternated repeats.

    Raises:
        ValueError: If the source is no mixture of experts.
    """
    theirs, ours = (load_source(source, dtype=dtype, device=device) for _ in range(2))
    text = theirs.tokenizer.encode(get_workload("all").requests[0].prompt)[: max(counts)]
    inputs = {THEIRS: capture_experts(theirs.model, text)}
    inputs[OURS] = [
        dataclasses.replace(layer, experts=experts)
        for layer, experts in zip(inputs[THEIRS], our_experts(ours.model), strict=True)
    ]
    clock = WallClock(device)
    runs = {(name, n): timed(layers, n, clock) for name, layers in inputs.items() for n in counts}
    return [
        row(f"{name}, {n} tokens", [1e3 * each for each in values], "ms")
        | {"target": name, "tokens": n}
        for (name, n), values in alternate(runs, repeats).items()
    ]


def timed(layers: Sequence[ExpertInputs], num_tokens: int, clock: WallClock) -> Callable[[], float]:
    """A run of all layers on so many tokens; it returns seconds."""

    @torch.inference_mode()
    def run() -> float:
        started = clock.now()
        for layer in layers:
            layer.run(num_tokens)
        return clock.now() - started

    return run


def our_experts(model: Any) -> list[Experts]:
    """Every layer's experts as our engine runs them, in order; the model is taken over.

    On a CPU they are compiled together with their router, which runs again.

    Raises:
        ValueError: If the model is no mixture of experts.
    """
    blocks = find_experts(model)
    if not blocks:
        raise ValueError(
            f"pool: its target must be a mixture of experts; it is a {type(model).__name__}; "
            f"name another pool"
        )
    if model.device.type == "cpu":
        return [CompiledMixture(block) for block, _ in blocks]
    hook_experts(model)
    return [module for module in model.modules() if hasattr(module, "dispatch")]


@torch.inference_mode()
def capture_experts(model: Any, text: list[int]) -> list[ExpertInputs]:
    """What the experts of every layer are given when transformers' model reads a text."""
    captured: list[ExpertInputs] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, given: captured.append(ExpertInputs(module, *given))
        )
        for module in model.modules()
        if hasattr(module, "has_post_expert_norm")
    ]
    model(torch.tensor([text], device=model.device))
    for hook in hooks:
        hook.remove()
    return captured
