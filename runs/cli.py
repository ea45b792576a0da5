"""The ``specgym`` command."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from specgym.runs.disk import FULL

COMMANDS = {
    "compare": "several controllers on the same requests, head to head",
    "train": "an agent learns on the live engine, or on recorded traces",
    "search": "settings of an agent, judged on training requests of recorded traces",
    "record": "what every plan would get at every position, for replay",
    "replay": "controllers on recorded traces, against the oracle",
    "generate": "text out of any pool with any controller",
    "pool": "list, show or fetch pools of models, or train drafters for one",
    "bench": "measure the engine against its peers",
}
ROOMS = {  # the other commands are modules of runs
    "generate": "text.generate",
    "record": "traces.record",
    "search": "train.search",
}
USAGE = "usage: specgym [--version] COMMAND [options]    (specgym COMMAND --help)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 (failed), 2 (refused) or 130 (stopped)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + "\n")
        for name, text in COMMANDS.items():
            print(f"  {name:<10} {text}")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"specgym {version('specgym')}")
        return 0
    if arguments[0] not in COMMANDS:
        commands = ", ".join(COMMANDS)
        complain(f"no command {arguments[0]!r}; there are {commands}\n{USAGE}")
        return 2
    try:
        return run_command(arguments[0], arguments[1:], console)
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except SystemExit as ended:  # tyro has printed help, or what is wrong
        return ended.code if isinstance(ended.code, int) else 1
    except BrokenPipeError:
        return 141
    except ValueError as error:
        complain(str(error))
        return 2
    except (OSError, RuntimeError) as error:
        complain(str(error))
        if getattr(error, "errno", None) in FULL:
            complain("the disk is full: make room, and give the same command again")
        return 1


def complain(message: str) -> None:
    """Prints an error for a person."""
    print(f"specgym: {message}", file=sys.stderr)


def run_command(command: str, arguments: list[str], console: Console) -> int:
    """Parses a command's options and runs it; what is slow to import is not for help."""
    if command == "train":
        run_train(name_agent(arguments), console)
    elif command == "pool":
        from specgym.runs.pool.command import run_pool

        run_pool(arguments, parse)
    elif command == "bench":
        from specgym.runs.bench.command import run_bench

        run_bench(arguments, parse, console)
    else:
        from specgym.runs.configs import CONFIGS, RECIPES

        kind = CONFIGS[command]
        default = recipe_default(arguments, RECIPES, kind) if command == "compare" else None
        arguments = name_agent(arguments) if command == "search" else arguments
        config = parse(command, arguments, kind, default)
        find("specgym.runs." + ROOMS.get(command, command), command)(config, console)
    return 0


def find(module: str, name: str) -> Callable[..., Any]:
    """A function, whose module is imported now."""
    return getattr(importlib.import_module(module), name)


def run_train(arguments: list[str], console: Console) -> None:
    """Trains on the live engine, or on recorded traces with ``--env replay``."""
    if option(arguments, "--env") == "replay":
        from specgym.runs.train.configs import find_settings

        settings = find_settings(option(arguments, "--agent") or "maskable-ppo")
        config = parse("train", arguments, type(settings), settings)
        find("specgym.runs.train.offline", "find_agent")(settings.agent).train(config, console)
        return
    from specgym.runs.configs import TrainConfig

    config = parse("train", arguments, TrainConfig)
    find("specgym.runs.train.live", "train")(config, console)


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value that an option is given, if it is."""
    for index, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if given == name:
            return value if equals else "".join(arguments[index + 1 : index + 2])
    return None


def parse(command: str, arguments: Sequence[str], kind: type, default: Any = None) -> Any:
    """The command's configuration from its options."""
    import tyro

    if default is None:
        default = kind()
    return tyro.cli(
        kind, args=split_lists(kind, arguments), prog=f"specgym {command}", default=default
    )


def split_lists(kind: type, arguments: Sequence[str]) -> list[str]:
    """Lets ``--controllers a,b`` stand for ``--controllers a b`` in options that take a list."""
    fields = dataclasses.fields(kind)
    lists = {
        f"--{f.name.replace('_', '-')}"
        for f in fields
        if str(f.type).startswith("tuple[") and f.name != "stop"  # a stop string may hold a comma
    }
    result: list[str] = []
    in_list = False
    for argument in arguments:
        given, equals, value = argument.partition("=")
        if argument.startswith("--"):
            in_list = given.replace("_", "-") in lists
            result.append(given if in_list else argument)
            if in_list and equals:
                result += value.split(",")
        else:
            result += argument.split(",") if in_list else [argument]
    return result


def recipe_default(
    arguments: Sequence[str], recipes: dict[str, Callable[[], Any]], kind: type
) -> Any:
    """The settings to start from: a recipe's where ``--recipe NAME`` is given.

    Raises:
        ValueError: If there is no such recipe.
    """
    name = option(arguments, "--recipe")
    if name is not None:
        if name not in recipes:
            raise ValueError(f"recipe: no recipe {name!r}; there are {', '.join(recipes)}")
        return recipes[name]()
    return kind()


def name_agent(arguments: Sequence[str]) -> list[str]:
    """Lets ``train ppo`` stand for ``train --agent ppo``."""
    if arguments and not arguments[0].startswith("-"):
        return ["--agent", *arguments]
    return list(arguments)


if __name__ == "__main__":
    sys.exit(main())
