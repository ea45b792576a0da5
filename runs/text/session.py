"""A pool under one controller, decoding request after request: what every text API runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specgym.engine.pool import ModelPool
from specgym.engine.timing import Clock
from specgym.engine.types import DecodeRequest
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.workloads import Request, Workload
from specgym.runs.controllers import make_controller
from specgym.runs.loop import Controller, begin_request, run_steps
from specgym.runs.settings import DEFAULT_CONTROLLER

NEEDED = ("needs_divergence", "begin", "act", "observe")  # of a controller that decodes


class Session:
    """A pool under one controller, which goes on learning from request to request.

    Args:
        pool: The models.
        controller: A controller, or a name with options such as ``static:ngram@4``.
        exact: Bit-exact fixed shapes (see ``specgym.engine.start``).
        clock: ``wall`` measures, ``counting`` is deterministic; or a ``Clock``.
        seed: Seeds a controller given by name.

    Raises:
        ValueError: If there is no controller of that name, or an argument is of another type.
    """

    def __init__(
        self,
        pool: ModelPool,
        controller: Controller | str = DEFAULT_CONTROLLER,
        *,
        exact: bool = True,
        clock: Clock | str = "wall",
        seed: int = 0,
    ):
        nothing = Workload("given", ((Request("none", "none", "given"),),))  # requests are given
        self.env = SpecDecodeEnv(pool, nothing, exact=exact, clock=clock)
        if isinstance(controller, str):
            features = [feature.name for feature in self.env.features]
            controller = make_controller(controller, self.env.plans, features, seed, pool.name)
        missing = [name for name in NEEDED if not hasattr(controller, name)]
        if missing:
            raise ValueError(
                f"controller: must be a name such as 'static:ngram@4', or an object with "
                f"{', '.join(NEEDED)}; got {controller!r}, without {missing[0]}"
            )
        self.controller = controller
        self.prefill_seconds = 0.0

    def steps(self, request: DecodeRequest) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """New tokens and ``info`` of every iteration; whoever has enough just stops asking.

        Raises:
            ValueError: If the request does not fit the pool.
            StepError: If the engine failed.
        """
        observation, begun = begin_request(self.env, self.controller, request)
        self.prefill_seconds = begun["prefill_seconds"]
        for _, _, info in run_steps(self.env, self.controller, observation, begun):
            assert self.env.state is not None
            yield self.env.state.tokens[0][-info["tokens"] :], info
