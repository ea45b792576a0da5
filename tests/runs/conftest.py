"""A tiny pool on disk, as a user would have one, and a file of short prompts."""

import json
from pathlib import Path

import pytest

from specgym.engine.testing import perturbed, tiny_llama, tiny_tokenizer
from specgym.runs.cli import main


@pytest.fixture(scope="session")
def tiny_spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pool spec of two local folders: a drafter and a target with one tokenizer."""
    home = tmp_path_factory.mktemp("pool")
    tokenizer = tiny_tokenizer()
    target = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=1024)
    for name, model in (("draft", perturbed(target, 0.1)), ("target", target)):
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return f"draft={home / 'draft'},target={home / 'target'}"


@pytest.fixture(scope="session")
def short_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file of twelve short prompts in two categories."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"id": f"{kind}-{i}", "category": kind, "prompt": f"{kind} number {i}: abc abc abc"}
        for i in range(6)
        for kind in ("left", "right")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def trace_file(
    tiny_spec: str, short_prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Recorded traces of the tiny pool, a third of them held out."""
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    arguments = [
        *("record", "--pool", tiny_spec, "--prompts", str(short_prompts), "--workload", "all"),
        *("--num-requests", "12", "--max-new-tokens", "24", "--cost-steps", "60"),
        *("--clock", "counting", "--out", str(path)),
    ]
    assert main(arguments) == 0
    return path
