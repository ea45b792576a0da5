"""What a comparison has measured so far, in a file from which a stopped one goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgym.agents.saved_state import load_state, save_state
from specgym.runs.disk import writing
from specgym.runs.loop import RequestRecord

STATE_FILE, STEPS_FILE = "state.npz", "steps.jsonl"
OWNER = "compare"
ANEW = "begin the comparison anew with --overwrite"
HEAD = ("controller", "request", "request_id", "step")  # of a line; the rest is the iteration


@dataclasses.dataclass
class Progressed:
    """What a comparison has measured so far; saved after every round, so a kill loses one.

    Attributes:
        records: Per controller, one record per finished request.
        states: Per controller, its state and its environment's statistics.
        baselines: The shared baselines' samples: of exact mode, and of the fast one.
        steps_size: Bytes of ``steps.jsonl`` that belong to finished rounds.
    """

    records: dict[str, list[RequestRecord]]
    states: dict[str, Any] = dataclasses.field(default_factory=dict)
    baselines: dict[bool, dict[int, list[float]]] = dataclasses.field(default_factory=dict)
    steps_size: int = 0

    @property
    def num_rounds(self) -> int:
        """Finished requests."""
        return min(map(len, self.records.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens of the finished requests: TensorBoard's steps, the same for all controllers."""
        return sum(record.tokens for record in self.records["none"][: self.num_rounds])

    def save(self, folder: Path) -> None:
        """Writes all but the iterations, which are in ``steps.jsonl``."""
        state = {
            "records": {
                name: [vars(record) | {"steps": []} for record in records]
                for name, records in self.records.items()
            },
            "states": self.states,
            "baselines": [
                [exact, bucket, samples]
                for exact, buckets in self.baselines.items()
                for bucket, samples in buckets.items()
            ],
            "steps_size": self.steps_size,
        }
        with writing(folder / STATE_FILE):
            save_state(folder / STATE_FILE, OWNER, state)

    @classmethod
    def load(cls, folder: Path) -> Progressed:
        """What the folder of a stopped comparison holds.

        Raises:
            ValueError: If a file of it is missing or is not whole.
        """
        state = load_state(folder / STATE_FILE, OWNER, ANEW)
        records = {
            name: [RequestRecord(**record) for record in each]
            for name, each in state["records"].items()
        }
        read_steps(folder / STEPS_FILE, state["steps_size"], records)
        baselines: dict[bool, dict[int, list[float]]] = {}
        for exact, bucket, samples in state["baselines"]:
            baselines.setdefault(exact, {})[bucket] = samples
        return cls(records, state["states"], baselines, state["steps_size"])


def read_steps(path: Path, size: int, records: Mapping[str, list[RequestRecord]]) -> None:
    """Gives the records their iterations, which are the first bytes of a file.

    Raises:
        ValueError: If the file is missing or cut short.
    """
    data = path.read_bytes()[:size] if path.is_file() else b""
    if len(data) < size:
        raise ValueError(f"{path}: must hold {size} bytes of iterations, has {len(data)}; {ANEW}")
    for line in data.splitlines():
        step = json.loads(line)
        name, index, _, _ = (step.pop(key) for key in HEAD)
        records[name][index].steps.append(step)


def write_steps(file: Any, name: str, index: int, record: RequestRecord) -> None:
    """Appends a request's iterations to a file, one JSON line each."""
    with writing(Path(file.name)):
        for number, step in enumerate(record.steps):
            head = dict(zip(HEAD, (name, index, record.request_id, number), strict=True))
            file.write((json.dumps(head | step) + "\n").encode())
        file.flush()
