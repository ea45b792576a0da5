"""The plan table as a controller sees it: names, look-up, and whose outcome an iteration is.

A plan is (chain, k): the members' names, drafter first and target last, and the number of tokens
to draft. Action 0 is no speculation, `(("target",), 0)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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


def group_by_chain(plans: Sequence[Plan]) -> dict[tuple[str, ...], list[int]]:
    """Returns the speculative actions of every chain, each chain's in order of K."""
    actions_by_chain: dict[tuple[str, ...], list[int]] = {}
    for action in sorted(range(1, len(plans)), key=lambda action: plans[action][1]):
        actions_by_chain.setdefault(plans[action][0], []).append(action)
    return actions_by_chain


def num_positions(plan: Plan) -> int:
    """Returns how many drafted tokens the target may accept in one iteration of the plan.

    That is K, and one more for every verifier before the target, which may add a token of its own.
    """
    chain, k = plan
    return k + len(chain) - 2 if k else 0


def nearest_allowed(plans: Sequence[Plan], action: int, mask: np.ndarray) -> int:
    """Returns the action where the mask allows it, else its chain's largest smaller K, else 0.

    Masks forbid a plan because too few tokens are left for its K; a smaller K may still fit.
    """
    if mask[action]:
        return action
    chain, most = plans[action]
    smaller = [(k, other) for other, (name, k) in enumerate(plans) if name == chain and k < most]
    return max((pair for pair in smaller if mask[pair[1]]), default=(0, 0))[1]


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
