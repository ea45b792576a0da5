"""``specgym pool``: list, show, fetch or build pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from specgym.runs.configs import BuildConfig, FetchConfig
from specgym.runs.settings import PoolSettings

USAGE = (
    "usage: specgym pool list | show POOL [options] | fetch POOL [--wheel FILE] | "
    "build TARGET [options]"
)


def run_pool(arguments: list[str], parse: Callable[..., Any]) -> None:
    """Runs ``pool list``, ``pool show``, ``pool fetch`` or ``pool build``.

    Raises:
        ValueError: If the action or the pool is unknown.
    """
    console = Console()
    action, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if action in ("-h", "--help"):
        console.print(USAGE, markup=False)
        return
    if action not in ("list", "show", "fetch", "build"):
        raise ValueError(f"pool: no action {action!r}\n{USAGE}")
    if rest and not rest[0].startswith("-"):
        rest = ["--target" if action == "build" else "--pool", *rest]
    if action == "list":
        run_list(rest, console)
        return
    kind = {"show": PoolSettings, "fetch": FetchConfig, "build": BuildConfig}[action]
    config = parse(f"pool {action}", rest, kind)
    if action == "build":
        from specgym.runs.pool.build import build

        build(config, Console(stderr=True))
        return
    from specgym.runs.pool.listing import fetch_pool, show

    (show if action == "show" else fetch_pool)(config, console)


def run_list(arguments: list[str], console: Console) -> None:
    """Runs ``pool list``.

    Raises:
        ValueError: If options come with it.
    """
    if arguments in (["-h"], ["--help"]):
        console.print(USAGE, markup=False)
        return
    if arguments:
        raise ValueError(f"pool list: takes no options; got {arguments[0]!r}\n{USAGE}")
    from specgym.runs.pool.listing import list_pools

    list_pools(console)
