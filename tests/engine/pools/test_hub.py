"""Hub repositories: what counts as cached, and heads that are fetched as folders."""

import json

import huggingface_hub.constants
import pytest

from specgym.engine.pools import hub
from specgym.engine.pools.hub import fetch_head, find_cached
from specgym.engine.pools.sources import is_local


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and a hub that must not be asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def refuse(*_, **__):
        raise OSError("no network in this test.\nA long story follows")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    return tmp_path


def put(cache, hub_id, files):
    """A repository in the cache as the hub's library lays it."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


SHARDED = (".safetensors.index.json", "-1.safetensors", "-2.safetensors")


@pytest.mark.parametrize(
    ("files", "is_complete"),
    [
        (["config.json", "model.safetensors"], True),
        (["config.json", "pytorch_model.bin"], True),
        (["config.json"], False),
        (["model.safetensors"], False),
        (["config.json", "model.safetensors.index.json", "model-1.safetensors"], False),
        (
            ["config.json", *(f"model{end}" for end in SHARDED)],
            True,
        ),
    ],
)
def test_a_repository_is_cached_when_all_its_weights_are(cache, files, is_complete):
    folder = put(cache, "org/name", {name: INDEX if "index" in name else "" for name in files})
    assert find_cached("org/name") == (folder if is_complete else None)
    assert is_local("org/name") == is_complete
    assert find_cached("org/other") is None


def test_only_hub_ids_that_are_called_eagle_are_fetched_as_heads(cache, tmp_path):
    for source in ("org/name", "smollm2-135m", "upcycled:8:2:smollm2-135m", str(tmp_path)):
        assert fetch_head(source) == source
    folder = put(cache, "org/EAGLE-name", {"config.json": "", "pytorch_model.bin": ""})
    assert fetch_head("org/EAGLE-name") == str(folder)


def test_a_head_out_of_reach_says_what_to_do(cache):
    with pytest.raises(OSError, match=r"org/eagle-x.*no network in this test\. Check .* folder"):
        fetch_head("org/eagle-x")


def test_a_head_is_downloaded_with_what_it_needs_and_no_more(cache, monkeypatch):
    asked = []

    def download(repository, allow_patterns):
        asked.append((repository, allow_patterns))
        return "somewhere"

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert fetch_head("org/eagle-x") == "somewhere"
    assert asked == [("org/eagle-x", ["config.json", "*.safetensors", "*.bin"])]
