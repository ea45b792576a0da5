"""What a recipe's pool needs, printed without downloading anything."""

from __future__ import annotations

from rich.console import Console

from specgym.engine.pools.hub import is_hub_id
from specgym.engine.pools.recipe import MemberSize, PoolRecipe
from specgym.engine.pools.recipes import RECIPES, split_recipe
from specgym.engine.pools.sources import is_local
from specgym.runs.tables import NumberTable

NARROW = (0, 2, 0, 0)


def find_missing(spec: str) -> PoolRecipe | None:
    """The recipe that a pool's name means, where it is one and not all of it is on this machine."""
    if (found := split_recipe(spec)) is None:
        return None
    recipe, changes = found
    return None if all(map(is_local, recipe.sources(changes).values())) else recipe


def list_recipes(console: Console) -> None:
    """Prints the recipes: members, bytes to download, and where they come from."""
    table = NumberTable(None, ("recipe", "members, beside prompt lookup"), ("download",))
    for recipe in RECIPES.values():
        members = "\n".join(member.source for member in recipe.members.values())
        num_bytes = sum(member.size().num_download_bytes for member in recipe.members.values())
        table.add_row(recipe.name, members, gigabytes(num_bytes))
    console.print(table)
    console.print("what a recipe needs, without downloading it: specgym pool show RECIPE")


def show_recipe(recipe: PoolRecipe, spec: str, console: Console) -> None:
    """Prints what each member is and weighs, the total, the chains, and how to get them."""
    sources = recipe.sources(spec.partition(":")[2])
    for name, source in sources.items():
        if not is_local(source) and not is_hub_id(source):
            raise ValueError(
                f"pool: {name} of {recipe.name} must be a folder that exists or a hub id; "
                f"got {source!r}"
            )
    console.print(size_table(recipe))
    console.print("memory: weights in bfloat16; caches come on top")
    console.print("active: parameters that a single token uses")
    console.print(f"chains: {', '.join('>'.join(chain) for chain in recipe.chains)}", markup=False)
    for name, member in recipe.members.items():
        here = "on this machine" if is_local(sources[name]) else "not on this machine"
        gate = ", gated: accept it on its page of the hub and log in" if member.is_gated else ""
        text = f"{name}: {sources[name]}, {here} (licence: {member.licence}{gate})"
        console.print(text, markup=False, soft_wrap=True)
    missing = [name for name, source in sources.items() if not is_local(source)]
    paths = ",".join(f"{name}=PATH" for name in missing)
    console.print("what is missing is downloaded when the pool is first used, as in", markup=False)
    console.print(f'  specgym compare --pool "{spec}"', markup=False, soft_wrap=True)
    console.print(f'or taken from folders: --pool "{recipe.name}:{paths}"', soft_wrap=True)


def size_table(recipe: PoolRecipe) -> NumberTable:
    """A row per member, and the total where there are several."""
    title = f"{recipe.name}: {recipe.paper}"
    numbers = ("parameters", "active", "download", "memory")
    table = NumberTable(title, ("member", "kind"), numbers, padding=NARROW)
    sizes = {name: member.size() for name, member in recipe.members.items()}
    for name, member in recipe.members.items():
        table.add_row(name, member.architecture, *cells(sizes[name]))
    if len(sizes) > 1:
        table.add_row("total", "", *cells(total(list(sizes.values()))))
    return table


def cells(size: MemberSize) -> tuple[str, str, str, str]:
    """A member's columns."""
    return (
        billions(size.num_parameters),
        billions(size.num_active),
        gigabytes(size.num_download_bytes),
        gigabytes(size.num_memory_bytes),
    )


def total(sizes: list[MemberSize]) -> MemberSize:
    """All sizes added up."""
    return MemberSize(
        sum(size.num_parameters for size in sizes),
        sum(size.num_active for size in sizes),
        sum(size.num_download_bytes for size in sizes),
        sum(size.num_memory_bytes for size in sizes),
    )


def billions(count: int) -> str:
    """A number of parameters: billions, or millions where those are fewer than one."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def gigabytes(num_bytes: int) -> str:
    """A number of bytes in decimal gigabytes, as download pages state it."""
    return f"{num_bytes / 1e9:.2f} GB"
