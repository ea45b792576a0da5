"""Seeded streams of prompts: single categories, balanced mixes and regime changes."""

import difflib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

Split = Literal["train", "held-out", "all"]

MIXES = {"all-3": "code+math+extract", "all-4": "code+math+extract+chat"}
PROMPT_FIELDS = ("prompt", "turns", "question")
ID_FIELDS = ("id", "task_id", "question_id")


@dataclass(frozen=True)
class Request:
    """One prompt with its name and its category.

    Attributes:
        id: The name.
        prompt: The text.
        category: The category.
        source: File and line that it comes from, where there is such a thing.

    Raises:
        ValueError: If one is not a text.
    """

    id: str
    prompt: str
    category: str
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("id", "prompt", "category"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"request.{name}: must be a text, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Workload:
    """A pool of requests in groups, and the rule by which a stream walks over the groups.

    Attributes:
        name: What the user called it.
        groups: Requests that are drawn from together; for mixes and phases one group a category.
        run_length: Requests drawn from one group before the stream goes on to the next.
        num_skipped: Prompts that were left out as too long (see `specgym.envs.prompt_room`).

    Raises:
        ValueError: If a group is empty or holds something else, or the run length is below 1.
    """

    name: str
    groups: tuple[tuple[Request, ...], ...]
    run_length: int = 1
    num_skipped: int = 0

    def __post_init__(self) -> None:
        groups = self.groups if isinstance(self.groups, tuple) else (None,)
        is_nested = all(isinstance(group, tuple) for group in groups)
        if not is_nested or not all(isinstance(r, Request) for group in self.groups for r in group):
            raise ValueError(f"groups: must be tuples of Requests, not {_shown(self.groups)}")
        if not self.groups or not all(self.groups):
            raise ValueError("groups: must hold a Request each, at least one group; add some")
        _whole("run_length", self.run_length, least=1)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request of the pool once, in the order of the file within each group."""
        return tuple(itertools.chain.from_iterable(self.groups))

    def stream(self, seed: int | np.random.Generator) -> Iterator[Request]:
        """An endless stream that is the same for the same seed in every process.

        The groups follow each other in a cycle whose order is drawn once, `run_length` requests
        each. So every window of n * run_length * len(groups) requests holds the same number of
        each group, and with two groups or more none follows itself. Within its group a request
        comes again only after all the others have come. A Generator in place of the seed is
        drawn from as the stream goes on. Source: ours.

        Raises:
            ValueError: If the seed is neither a Generator nor a whole number of 0 or more.
        """
        if not isinstance(seed, np.random.Generator):
            seed = np.random.default_rng(_whole("seed", seed))
        return self._draw(seed)

    def select(self, n: int, seed: int | np.random.Generator) -> tuple[Request, ...]:
        """The first n requests of the stream; past the size of the pool the same ids come again.

        Raises:
            ValueError: If n is not a non-negative int, or the seed is not valid.
        """
        return tuple(itertools.islice(self.stream(seed), _whole("n", n)))

    def _draw(self, rng: np.random.Generator) -> Iterator[Request]:
        decks = [_deck(self.groups[index], rng) for index in rng.permutation(len(self.groups))]
        for deck in itertools.cycle(decks):
            yield from itertools.islice(deck, self.run_length)


def get_workload(
    name: str, *, prompts: Path | None = None, split: Split = "all", phase_length: int = 6
) -> Workload:
    """The workload of this name over the built-in prompts, or over those of a file.

    Names are a category, categories joined by "+" (a balanced mix), "all" (every prompt once
    before any comes again, whatever its category), and "phases" (runs of one category after the
    other: regime changes inside the stream). "all-3" is code, math and extract; "all-4" adds
    chat.

    Args:
        name: One of the above. The order of the categories in a mix makes no difference.
        prompts: A JSONL file for `load_prompts`; None for the built-in prompts.
        split: "held-out" is every third prompt of each category, in the order of the file,
            "train" the others: what was learned is compared on requests that it never saw.
        phase_length: Requests of one category in a row; only "phases" reads it.

    Raises:
        ValueError: If the name or the split is unknown, the split leaves nothing of a category,
            the phase length is below 1, or the file is not valid.
    """
    if not isinstance(name, str):
        raise ValueError(f"workload: must be a name such as 'code+math', not {name!r}")
    if split not in get_args(Split):
        raise ValueError(f"split: must be one of {_listed(get_args(Split))}, not {split!r}")
    pool = built_in_prompts() if prompts is None else load_prompts(prompts)
    parts: dict[str, tuple[Request, ...]] = {}
    for category in _categories(name, tuple(dict.fromkeys(r.category for r in pool))):
        parts[category] = _part([r for r in pool if r.category == category], split)
    groups = tuple(parts.values())
    if name == "all":
        groups = (tuple(itertools.chain.from_iterable(groups)),)
    if not all(groups):
        empty = _listed(category for category, part in parts.items() if not part)
        raise ValueError(
            f"split: {split!r} must leave a prompt of each category, but leaves none of {empty}, "
            "since only every third is held out; add prompts to the file or use split 'all'"
        )
    run_length = _whole("phase_length", phase_length, least=1)
    return Workload(name, groups, run_length if name == "phases" else 1)


def built_in_prompts() -> tuple[Request, ...]:
    """The prompts that were written for this project, 36 a category."""
    source = resources.files("specgym.envs").joinpath("prompts.jsonl")
    return _parse(source.read_bytes(), "the built-in prompts")


def load_prompts(path: Path) -> tuple[Request, ...]:
    """The requests of a JSONL file, in its order.

    The text is `prompt` (HumanEval, our own form), the first of `turns` (MT-Bench, Spec-Bench) or
    `question` (GSM8K). The id is `id`, `task_id` or `question_id`, else "line-N". The category is
    `category`, else "code" beside a `task_id`, "math" for a `question`, "custom" for the rest.
    Other fields are not read. A byte order mark, blank lines and CRLF are fine.

    Raises:
        ValueError: If the file cannot be read or a line is wrong; names the line and the field.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"prompts: must be the path of a JSONL file, not {path!r}")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
        raise ValueError(f"prompts: {reason}; give the path of a JSONL file") from error
    return _parse(data, str(path))


def _parse(data: bytes, source: str) -> tuple[Request, ...]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = error.object[: error.start].count(b"\n") + 1
        found = f"must be UTF-8, but holds the byte 0x{error.object[error.start]:02x}"
        raise ValueError(f"{source}, line {line_number}: {found}; save it as UTF-8") from error
    requests: list[Request] = []
    first: dict[str, int] = {}
    # Only "\n" ends a line: str.splitlines also splits at U+2028 and others inside JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        request = _request(line, f"{source}, line {number}", f"line-{number}")
        if first.setdefault(request.id, number) != number:
            found = f"the id must be new, but {request.id!r} is that of line {first[request.id]}"
            raise ValueError(f"{source}, line {number}: {found}; change one of them")
        requests.append(request)
    if not requests:
        raise ValueError(f"{source}: must hold at least one prompt, but is empty; add a line")
    return tuple(requests)


def _request(line: str, where: str, default_id: str) -> Request:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        place = str(error).replace(": line 1 column", ", column")
        found = f"must be JSON, but is {_shown(line)} ({place})"
        raise ValueError(f"{where}: {found}; write one object a line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be a JSON object, not {_shown(line)}; write one a line")
    field = next((field for field in PROMPT_FIELDS if field in record), None)
    if field is None:
        rule = f"must have one of the fields {_listed(PROMPT_FIELDS)}"
        raise ValueError(f"{where}: {rule}, but has {_shown(list(record))}; add 'prompt'")
    prompt = record[field]
    if field == "turns":
        if not (isinstance(prompt, list) and prompt and all(isinstance(t, str) for t in prompt)):
            raise _wrong(where, field, "a list of one string or more", prompt)
        prompt, field = prompt[0], "turns[0]"
    default = "code" if "task_id" in record else "math" if field == "question" else "custom"
    id_field = next((field for field in ID_FIELDS if field in record), "id")
    name = record.get(id_field, default_id)
    return Request(
        id=str(name) if type(name) is int else _text(name, where, id_field),
        prompt=_text(prompt, where, field),
        category=_text(record.get("category", default), where, "category"),
        source=where,
    )


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, field, "a string that is not blank", value)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _wrong(where, field, "without halves of surrogate pairs", value)
    return value


def _wrong(where: str, field: str, rule: str, value: Any) -> ValueError:
    found = f"must be {rule}, but is {_shown(value)}"
    return ValueError(f"{where}, field {field!r}: {found}; correct it or delete the line")


def _categories(name: str, known: Sequence[str]) -> Sequence[str]:
    """The categories that a workload's name stands for, in the order of the pool."""
    if name == "all" or (name == "phases" and len(known) > 1):
        return known
    parts = [name] if name in known else MIXES.get(name, name).split("+")
    if set(parts) <= set(known) and len(set(parts)) == len(parts):
        return [category for category in known if category in parts]
    mixes = [mix for mix, of in MIXES.items() if set(of.split("+")) <= set(known)]
    names = [*known, *mixes, "all", *(["phases"] if len(known) > 1 else [])]
    close = [difflib.get_close_matches(part, names, n=1) for part in parts]
    guess = "+".join(dict.fromkeys(match[0] for match in close if match))
    hint = f"; did you mean {guess!r}?" if all(close) else ""
    rule = f"must be one of {_listed(names)}, or different categories joined by '+'"
    raise ValueError(f"workload: {rule}, not {name!r}{hint}")


def _part(requests: Sequence[Request], split: Split) -> tuple[Request, ...]:
    if split == "all":
        return tuple(requests)
    return tuple(r for index, r in enumerate(requests) if (index % 3 == 2) == (split == "held-out"))


def _deck(requests: tuple[Request, ...], rng: np.random.Generator) -> Iterator[Request]:
    while True:
        for index in rng.permutation(len(requests)):
            yield requests[index]


def _whole(field: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{field}: must be a whole number of {least} or more, not {value!r}")
    return int(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
