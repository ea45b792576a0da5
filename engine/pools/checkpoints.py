"""Checkpoints on disk or on a hub, read into plain dense models; and the hash of their weights."""

import hashlib
import io
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_folder(folder: Path, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Model and tokenizer (or None) of a local folder, without a look at the network.

    Raises:
        ValueError: the folder holds no complete and readable causal LM.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"source: a model folder needs a config.json, {folder} has none")
    try:
        return load_pretrained(str(folder), dtype, device, local=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"source: {folder} cannot be loaded: {error}") from error


def load_pretrained(name: str, dtype: torch.dtype, device: str, *, local: bool) -> tuple[Any, Any]:
    """Model and tokenizer; no tokenizer where a local folder holds none.

    Attention is transformers' own choice: SDPA, and eager for a model that lacks it.

    Raises:
        ValueError: the checkpoint lacks weights, which transformers would draw at random.
        OSError: it cannot be found or read.
    """
    with quiet_transformers(bars=not local):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, device_map=device, local_files_only=local, output_loading_info=True
        )
        model = _complete(name, *loaded)
        if local and not any(Path(name, file).is_file() for file in TOKENIZER_FILES):
            return model, None
        return model, AutoTokenizer.from_pretrained(name, local_files_only=local)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model (on the CPU) and tokenizer of a GGUF file, dequantised: it can be saved again.

    Raises:
        ValueError: the file is no GGUF file of a causal LM.
    """
    if path.suffix != ".gguf":
        raise ValueError(f"source: a file of weights must end in .gguf, got {path}")
    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    dense: dict[str, Any] = {"dtype": dtype, "quantization_config": GgufConfig(dequantize=True)}
    try:
        with quiet_transformers(bars=False), redirect_stderr(io.StringIO()):  # a bar of its own
            read: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, output_loading_info=True, **dense, **place
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise ValueError(f"source: {path} cannot be loaded: {error}") from error
    loaded = _complete(str(path), *read)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)  # there is none where nothing is quantised
    config = type(loaded.config).from_dict(values)
    with torch.random.fork_rng(devices=[]):  # from_config draws weights, which we overwrite
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer


def _complete(name: str, model: Any, report: dict[str, Any]) -> Any:
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"source: {name} must hold every weight of a {type(model).__name__}, it lacks "
            f"{len(missing)} ({', '.join(missing[:3])}): give a complete causal LM"
        )
    return model


def hash_weights(model: torch.nn.Module, dtype: torch.dtype | None = None) -> str:
    """SHA-256 (hex) over the names, dtypes, shapes and bytes of all weights, sorted by name.

    Args:
        model: Any module.
        dtype: The weights are hashed as if they were of this type; None takes them as they are.
    """

    def describe(item: tuple[str, torch.Tensor]) -> str:
        name, tensor = item
        tensor = tensor if dtype is None else tensor.to(dtype)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"

    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing does not hold the GIL
        lines = list(threads.map(describe, sorted(model.state_dict().items())))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextmanager
def quiet_transformers(*, bars: bool) -> Iterator[None]:
    """Hide transformers' loading chatter within, and leave its settings as they were."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
