"""The plan table as a controller sees it: names, look-up, and whose outcome an iteration is.

A plan is (chain, k): the members' names, drafter first and target last, and the number of tokens
to draft. Action 0 is no speculation, `(("target",), 0)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Plan = tuple[tuple[str, ...], int]


def plan_name(plan: Plan) -> str:
    """Returns the plan's name, such as `small>mid@2`; no speculation is `none`."""
    chain, k = plan
    return f"{'>'.join(chain[:-1])}@{k}" if len(chain) > 1 else "none"


def check_plans(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Returns the plan table, indexed by action, as a tuple.

    Raises:
        ValueError: the table is empty, does not start with no speculation, holds a plan twice, or
            one that drafts nothing or ends at another target.
    """
    table = tuple((tuple(chain), int(k)) for chain, k in plans)
    if not table or len(table[0][0]) != 1 or table[0][1] != 0:
        found = repr(table[0]) if table else "an empty table"
        raise ValueError(f"plans[0] must be no speculation, ((target,), 0), got {found}")
    target = table[0][0]
    for action, (chain, k) in enumerate(table[1:], start=1):
        if len(chain) < 2 or k < 1 or chain[-1:] != target:
            raise ValueError(
                f"plans[{action}] must be a drafter, any verifiers and the target {target[0]!r}, "
                f"with k >= 1, got {(chain, k)!r}"
            )
        if (chain, k) in table[:action]:
            raise ValueError(
                f"plans[{action}] must differ from those before it, got {(chain, k)!r}"
            )
    return table


def find_plan(plans: Sequence[Plan], name: str) -> int:
    """Returns the action of the plan called `name`.

    Raises:
        ValueError: no plan of the table has that name.
    """
    names = [plan_name(plan) for plan in plans]
    if name not in names:
        raise ValueError(
            f"plan must be one of {', '.join(names)}, got {name!r}; "
            f"--k-values and --chains say which plans there are"
        )
    return names.index(name)


def charged_action(action: int, info: Mapping[str, Any]) -> int:
    """Returns the action that an iteration's outcome belongs to.

    That is the executed one: where a mask or the budget turned the asked plan down, nothing was
    learned about it. A drafter that proposed nothing is another matter: one plain token is what
    choosing that plan yields there, so that outcome stays with the asked plan.

    Args:
        action: the action that was asked for.
        info: the step's info.

    Source: ours.
    """
    return action if info["reason"] == "no_proposal" else int(info["executed_action"])


def check_state(state: Mapping[str, Any], plans: Sequence[Plan]) -> None:
    """Checks that a saved state belongs to this plan table.

    Raises:
        ValueError: it was saved with another table.
    """
    names = [plan_name(plan) for plan in plans]
    if list(state["plans"]) != names:
        raise ValueError(
            f"state must come from a controller over the plans {', '.join(names)}, got one over "
            f"{', '.join(state['plans'])}: build the controller with the table it was saved with"
        )
