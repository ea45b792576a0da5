"""Pools by name: the built-in ones, the papers' recipes, and lists of sources."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specgym.engine.forward.capture import accelerate
from specgym.engine.members.lookups import LOOKUPS, make_lookups
from specgym.engine.members.protocol import Member
from specgym.engine.pool import DEFAULT_K_VALUES, ModelPool
from specgym.engine.pools.drafters import binding, drafter_folder, hash_drafter, load_drafter
from specgym.engine.pools.hub import fetch_head
from specgym.engine.pools.recipes import RECIPES, split_recipe
from specgym.engine.pools.sources import SMOLLM2, LoadedModel, load_source
from specgym.engine.pools.upcycling import Upcycling, parse_upcycling
from specgym.engine.pools.vocabulary import check_tokenizers, count_tokens, make_member

DENSE_POOL, MIXTURE_POOL = "smollm2", "smollm2-moe"
SHIPPED_DRAFTERS = ",".join(f"{n}=shipped:{SMOLLM2}/{n}" for n in ("eagle", "small", "mid"))
BUILT_IN_POOLS = {
    DENSE_POOL: f"{SHIPPED_DRAFTERS},target={SMOLLM2}",
    MIXTURE_POOL: f"{SHIPPED_DRAFTERS},target=upcycled:8:2:{SMOLLM2}",
}
BUILT_IN_CHAINS = (
    ("ngram", "target"),
    ("small", "target"),
    ("eagle", "target"),
    ("small", "mid", "target"),
    ("ngram", "mid", "target"),
)
MIXTURE_OPTIONS = ("experts", "top-k")
DENSE_MEMBER = "dense"  # what a mixture was upcycled from; a member only where a chain names it


def mixture_sources(spec: str) -> str:
    """The built-in mixture of ``smollm2-moe:experts=E:top-k=K`` as a list of sources.

    Raises:
        ValueError: If an option is unknown, no number, or out of range.
    """
    name, *options = spec.split(":")
    values = {"experts": "8", "top-k": "2"}
    for option in options:
        key, _, value = option.partition("=")
        if key not in MIXTURE_OPTIONS or not value.isdecimal():
            raise ValueError(
                f"pool: {name} takes experts=NUMBER and top-k=NUMBER, "
                f'like "{name}:experts=16:top-k=4"; got {option!r}'
            )
        values[key] = value
    recipe = Upcycling(int(values["experts"]), int(values["top-k"]), SMOLLM2)
    return f"{SHIPPED_DRAFTERS},target={recipe.source}"


def parse_pool(spec: str) -> dict[str, str]:
    """Member names and sources of ``smollm2``, a recipe, or ``"draft=PATH,target=PATH"``.

    Raises:
        ValueError: If the text is neither a built-in pool, nor a recipe, nor such a list with a
            target.
    """
    if (found := split_recipe(spec)) is not None:
        recipe, changes = found
        return recipe.sources(changes)
    is_mixture = spec.partition(":")[0] == MIXTURE_POOL
    text = mixture_sources(spec) if is_mixture else BUILT_IN_POOLS.get(spec, spec)
    sources: dict[str, str] = {}
    for part in text.split(","):
        name, separator, source = (piece.strip() for piece in part.partition("="))
        if not separator or not name or not source:
            raise ValueError(
                f"pool: {spec!r} is neither a built-in pool ({', '.join(BUILT_IN_POOLS)}), nor a "
                f"recipe ({', '.join(RECIPES)}), nor a "
                f'list like "draft=PATH,target=PATH"; trouble at {part!r}'
            )
        if name in sources or name in LOOKUPS or not name.isidentifier():
            taken = " or ".join(map(repr, LOOKUPS))
            raise ValueError(
                f"pool: member name {name!r} must be a word, used once, and not {taken} "
                f"(always in the pool)"
            )
        sources[name] = source
    if "target" not in sources:
        raise ValueError(f"pool: {spec!r} names no target; add target=PATH")
    return sources


def load_pool(
    spec: str = "smollm2",
    *,
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    chains: Sequence[tuple[str, ...]] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    graphs: bool = True,
    compiled: bool = False,
) -> ModelPool:
    """A pool from a built-in name or a list of local folders and hub ids.

    Args:
        spec: ``smollm2``, ``smollm2-moe`` (``smollm2-moe:experts=16:top-k=4``), a recipe of
            ``RECIPES`` by name (``mixtral:target=PATH`` where weights are local), or
            ``"draft=PATH,target=PATH"`` with any member names, cheapest first.
        k_values: Numbers of drafted tokens that plans may ask for.
        chains: Legal chains; None takes the default ones. With ``smollm2-moe`` a chain may name
            ``dense``, what the target was upcycled from: it computes the same function, so its
            acceptance is an artefact, and it is in no default chain.
        device: Where the models run.
        dtype: Type of the weights.
        graphs: Replay captured CUDA graphs where the device has them.
        compiled: Compile the lean forwards on CUDA with torch.compile, for tens of seconds per
            shape; in exact mode the tokens may then be other ones at near-ties than without.

    Raises:
        ValueError: If the spec cannot be read, a folder holds no model, or tokenizers differ.
        OSError: If weights cannot be had.
    """
    sources = parse_pool(spec)
    recipe = parse_upcycling(sources["target"])
    if recipe is not None and any(DENSE_MEMBER in chain for chain in chains or ()):
        sources = {DENSE_MEMBER: recipe.base, **sources}
    sources = {n: source if n == "target" else fetch_head(source) for n, source in sources.items()}
    folders = {name: drafter_folder(source) for name, source in sources.items()}
    loaded = {
        name: load_source(source, dtype=dtype, device=device)
        for name, source in sources.items()
        if folders[name] is None
    }
    target = loaded["target"]
    drafters = {name: folder for name, folder in folders.items() if folder is not None}
    members = load_members(loaded, drafters)
    accelerate(members, graphs=graphs, compiled=compiled)
    pool = ModelPool(
        members,
        chains=default_chains(spec) if chains is None else chains,
        k_values=k_values,
        tokenizer=target.tokenizer,
        eos_ids=eos_ids_of(target.model, target.tokenizer),
        name=spec if recipe is None else f"{spec} ({recipe.label})",
        fingerprints={
            **{name: hash_drafter(folder) for name, folder in drafters.items()},
            **{name: each.fingerprint for name, each in loaded.items()},
        },
    )
    loaded.clear()
    give_back_memory()
    return pool


def give_back_memory() -> None:
    """Return what loading has freed to the system, where the allocator would keep it (glibc)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def load_members(loaded: Mapping[str, LoadedModel], drafters: Mapping[str, Path]) -> list[Member]:
    """Return the lookups, the trained drafters, and the models as members; target last.

    Args:
        loaded: Models by name, the target among them.
        drafters: Folders of trained drafters by name.

    Raises:
        ValueError: If a tokenizer differs, or a drafter was trained for another target.
    """
    target = loaded["target"]
    for each in loaded.values():  # a view of a mapped file would keep all of it in memory
        embedding = each.model.get_input_embeddings().weight
        embedding.data = embedding.data.clone()
    for name, drafter in loaded.items():
        if drafter.tokenizer is not None and target.tokenizer is not None:
            check_tokenizers(name, drafter.tokenizer, target.tokenizer)
    num_tokens = None
    if target.tokenizer is not None:
        num_rows = target.model.config.get_text_config().vocab_size
        num_tokens = count_tokens(target.tokenizer, num_rows)
    members: list[Member] = [*make_lookups()]
    bound = binding(target) if drafters else ""
    for name, folder in drafters.items():  # before the target's own weights are packed
        members.append(load_drafter(name, folder, target, bound, num_tokens))
    # The target comes last whatever the order it was given in.
    for name in sorted(loaded, key=lambda each: each == "target"):
        each = loaded[name]
        members.append(make_member(name, each.model, num_tokens, each.tokenizer, target.tokenizer))
    return members


def default_chains(spec: str) -> Sequence[tuple[str, ...]] | None:
    """Return the chains of a recipe or a built-in pool; None for a list of sources.

    Each lookup has a chain of its own in front of those that the pool names.
    """
    if (found := split_recipe(spec)) is not None:
        named = found[0].chains
    elif spec.partition(":")[0] in BUILT_IN_POOLS:
        named = BUILT_IN_CHAINS
    else:
        return None
    return tuple(dict.fromkeys([*((name, "target") for name in LOOKUPS), *named]))


def eos_ids_of(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end a text: the generation config's, else the tokenizer's, else none."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]
