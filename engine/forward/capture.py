"""How a forward is captured: as a CUDA graph, or by torch.compile; and for which members."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from specgym.engine.forward.graphs import MAX_GRAPHS, Forward, GraphRunner, Tensors, log_eager


class CudaCapture:
    """Captures forwards as CUDA graphs that share one memory pool.

    Args:
        device: The device.
        compiled: Compile a forward before it is captured.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False):
        self.device, self.compiled = device, compiled
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward, inputs: Tensors) -> Forward:
        """A replay: copies inputs in, runs the graph, and gives its own output tensors.

        Raises:
            RuntimeError: If the forward waits for the device, or cannot be captured.
        """
        with torch.cuda.device(self.device):
            static = {name: each.clone() for name, each in inputs.items()}
            run = compile_forward(forward, static) if self.compiled else forward
            self.warm_up(run, static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = run(static)
            torch.cuda.synchronize()

        def replay(fresh: Tensors) -> Tensors:
            for name, each in static.items():
                each.copy_(fresh[name], non_blocking=True)
            graph.replay()
            return outputs

        return replay

    def warm_up(self, forward: Forward, static: Tensors) -> None:
        """Runs a forward beside the main stream, so that libraries make what they need first.

        The second run refuses to wait for the device: a forward that does, as one whose shapes
        depend on data, is found out before a broken capture could do harm.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(static)
            with no_waiting():
                forward(static)
        torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Makes whatever waits for the device inside raise a RuntimeError."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that it may not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class EagerCapture:
    """What a CUDA graph does, without one: fixed inputs and outputs, the forward run anew.

    For dry runs and tests on a CPU.

    Attributes:
        num_captures: Forwards taken in.
        num_replays: Replays of them all.
    """

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, forward: Forward, inputs: Tensors) -> Forward:
        """A replay that gives its own output tensors."""
        self.num_captures += 1
        static = {name: each.clone() for name, each in inputs.items()}
        outputs = {name: each.clone() for name, each in forward(static).items()}

        def replay(fresh: Tensors) -> Tensors:
            self.num_replays += 1
            for name, each in static.items():
                each.copy_(fresh[name])
            for name, each in forward(static).items():
                outputs[name].copy_(each)
            return outputs

        return replay


def compile_forward(forward: Forward, inputs: Tensors) -> Forward:
    """The forward compiled for inputs of these shapes, in tens of seconds.

    Raises:
        RuntimeError: If it cannot be compiled as a whole.
    """
    # One code object serves every shape: torch's limit on its variants would end in eager runs.
    limit = {"recompile_limit": MAX_GRAPHS, "accumulated_recompile_limit": 16 * MAX_GRAPHS}
    with torch._dynamo.config.patch(limit):
        compiled = torch.compile(forward, dynamic=False, fullgraph=True)
        compiled(inputs)
    return compiled


def accelerate(members: Iterable[Any], *, graphs: bool = True, compiled: bool = False) -> None:
    """Gives members captured forwards where they can have them; the log says where not and why.

    Args:
        members: Members of a pool.
        graphs: Use CUDA graphs on CUDA.
        compiled: Compile the lean forward first.
    """
    shared: dict[torch.device, CudaCapture] = {}
    for member in members:
        if not member.traits.has_kv:
            continue
        on_cuda = member.device.type == "cuda"
        reason = why_eager(member, compiled=compiled)
        if reason:
            is_news = compiled or (graphs and on_cuda)
            log_eager(member.name, reason, logging.WARNING if is_news else logging.INFO)
        elif graphs and on_cuda:
            if member.device not in shared:
                shared[member.device] = CudaCapture(member.device, compiled=compiled)
            member.graphs = GraphRunner(member, shared[member.device])


def why_eager(member: Any, *, compiled: bool) -> str:
    """Why a member cannot have captured forwards; empty when it can, as far as can be told."""
    if member.traits.reads_target:
        return "the features an EAGLE head reads are picked on the host"
    on_cuda = member.device.type == "cuda"
    if not on_cuda:
        return "there are no CUDA graphs on this device, and its forwards are compiled as they are"
    if compiled and member.lean is None:
        return f"only lean forwards are compiled, and there is none for a {member.architecture}"
    if member.frozen_rotaries:
        return "its rotary factors are chosen per request"
    return ""
