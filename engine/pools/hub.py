"""Hub repositories as local folders: which are cached, and fetching those that are no models."""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache

from specgym.engine.pools.checkpoints import quiet_transformers

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HEAD_FILES = ("config.json", "*.safetensors", "*.bin")
SHARD_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def is_hub_id(source: str) -> bool:
    """Whether a source can only be a hub id: it has that form, and no such path exists."""
    return bool(HUB_ID.fullmatch(source)) and not Path(source).expanduser().exists()


def find_cached(hub_id: str) -> Path | None:
    """The folder of a repository whose weights are all in the local hub cache; None otherwise.

    Does not look at the network.
    """
    config = try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    for name in SHARD_INDICES:
        if (folder / name).is_file():
            shards = set(json.loads((folder / name).read_text())["weight_map"].values())
            if all((folder / shard).is_file() for shard in shards):
                return folder
    return folder if any((folder / name).is_file() for name in WEIGHT_FILES) else None


def fetch_head(source: str) -> str:
    """A local folder in place of the hub id of an EAGLE head; any other source as it is.

    A head's configuration reads like a model's, so what tells it before it is here is its name:
    published heads have "eagle" in it (our rule).

    Raises:
        OSError: If it is not cached, and the hub is out of reach or refuses.
    """
    if not is_hub_id(source) or "eagle" not in source.lower():
        return source
    if (cached := find_cached(source)) is not None:
        return str(cached)
    try:
        with quiet_transformers(bars=True):
            return snapshot_download(source, allow_patterns=list(HEAD_FILES))
    except (OSError, ValueError) as error:
        raise OSError(
            f"{source!r} is no existing path, and as a hub id it cannot be loaded: "
            f"{str(error).strip().splitlines()[0]} Check name and connection, or give a local "
            f"folder (config.json and model.safetensors or pytorch_model.bin)"
        ) from error
