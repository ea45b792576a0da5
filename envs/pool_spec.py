"""What a pool offers, as plain values: members, chains, plans and limits, without any weights."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from specgym.engine.members.traits import HEAD, LOOKUP, MODEL, MemberTraits
from specgym.engine.pool import ModelPool
from specgym.engine.types import Plan

KINDS = {"ngram": LOOKUP, "model": MODEL, "eagle": HEAD}  # what older files say of a member


@dataclasses.dataclass(frozen=True)
class Layout:
    """A pool as plain values: what actions, features and traces are tables over.

    Attributes:
        target: Name of the target.
        chains: Speculative chains, drafter first and target last.
        k_values: Numbers of drafted tokens that plans may ask for, ascending.
        window: Rows of a forward in exact mode.
        context_limits: The longest text each member takes, in tokens.
        traits: How each member behaves, cheapest first.
        experts_per_token: Routed experts that each token visits in the target; 0 for a dense one.

    Raises:
        ValueError: If a chain or a table of members names one that is not there.
    """

    target: str
    chains: tuple[tuple[str, ...], ...]
    k_values: tuple[int, ...]
    window: int
    context_limits: Mapping[str, int]
    traits: Mapping[str, MemberTraits]
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        named = {self.target, *itertools.chain.from_iterable(self.chains)}
        unknown = sorted(named - self.traits.keys())
        if unknown or self.traits.keys() != self.context_limits.keys():
            raise ValueError(
                f"layout: chains, traits and context_limits must name the same members; got chains "
                f"of {sorted(named)}, traits of {sorted(self.traits)} and context_limits of "
                f"{sorted(self.context_limits)}"
            )

    @staticmethod
    def of(pool: ModelPool) -> Layout:
        """The layout of a pool."""
        experts = pool.model(pool.target).experts
        return Layout(
            target=pool.target,
            chains=pool.chains,
            k_values=pool.k_values,
            window=pool.window,
            context_limits={name: m.context_limit for name, m in pool.members.items()},
            traits={name: member.traits for name, member in pool.members.items()},
            experts_per_token=0 if experts is None else experts.experts_per_token,
        )

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Layout:
        """Return the layout that ``as_plain`` wrote, in this version or an older one.

        Raises:
            ValueError: If an entry is missing or unknown, or they do not go together.
        """
        plain = with_traits(plain)
        wanted = {field.name for field in dataclasses.fields(Layout)}
        if plain.keys() != wanted:
            wrong = ", ".join(sorted(plain.keys() ^ wanted))
            raise ValueError(f"layout: missing or unknown entries: {wrong}")
        chains = tuple(tuple(chain) for chain in plain["chains"])
        traits = {name: MemberTraits(**each) for name, each in plain["traits"].items()}
        k_values = tuple(plain["k_values"])
        return Layout(**{**plain, "chains": chains, "k_values": k_values, "traits": traits})

    def as_plain(self) -> dict[str, Any]:
        """The layout as values that JSON can hold."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        chains = [list(chain) for chain in self.chains]
        return plain | {
            "chains": chains,
            "k_values": list(self.k_values),
            "context_limits": dict(self.context_limits),
            "traits": {name: dataclasses.asdict(each) for name, each in self.traits.items()},
        }

    def with_k_values(self, k_values: tuple[int, ...]) -> Layout:
        """The layout of the plans that draft one of these numbers of tokens.

        Raises:
            ValueError: If there is none, or one that the layout does not have.
        """
        foreign = [k for k in k_values if k not in self.k_values]
        if foreign or not k_values:
            raise ValueError(
                f"k_values: must be some of {', '.join(map(str, self.k_values))}; got {k_values}"
            )
        return dataclasses.replace(self, k_values=tuple(sorted(set(k_values))))

    @property
    def speculative_chains(self) -> tuple[tuple[str, ...], ...]:
        """The chains that draft: all of them, as they are in the table of plans."""
        return self.chains

    @property
    def drafters(self) -> tuple[str, ...]:
        """Members that head a chain, in order of appearance."""
        return tuple(dict.fromkeys(chain[0] for chain in self.chains))

    @property
    def followers(self) -> tuple[str, ...]:
        """Members other than the target that keep a KV, and so have to catch up."""
        return tuple(n for n, each in self.traits.items() if each.has_kv and n != self.target)

    @property
    def max_ngram(self) -> int:
        """Longest n-gram that prompt lookup looks up; 0 without it."""
        return max((each.max_ngram for each in self.traits.values()), default=0)

    @property
    def pairs(self) -> tuple[str, ...]:
        """``"ngram>target"`` for every two neighbours in some chain, in order of appearance."""
        pairs = (f"{a}>{b}" for chain in self.chains for a, b in itertools.pairwise(chain))
        return tuple(dict.fromkeys(pairs))

    @property
    def max_verifiers(self) -> int:
        """Verifiers of the longest chain."""
        return max((len(chain) - 1 for chain in self.chains), default=1)

    @property
    def max_proposed(self) -> int:
        """The most tokens that are ever proposed to a verifier."""
        return max(self.k_values) + self.max_verifiers - 1

    def plans(self) -> tuple[Plan, ...]:
        """All plans: no speculation, then every chain with every K; the order of the pool's."""
        speculative = (Plan(chain, k) for chain in self.chains for k in self.k_values)
        return (Plan((self.target,), 0), *speculative)


def with_traits(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored layout with traits, where an older file has the kinds of members.

    Raises:
        ValueError: If a kind is unknown.
    """
    if "kinds" not in plain:
        return plain
    rest = {name: value for name, value in plain.items() if name not in ("kinds", "ngram_window")}
    wrong = [kind for kind in plain["kinds"].values() if kind not in KINDS]
    if wrong:
        raise ValueError(f"layout.kinds: must be of {', '.join(KINDS)}; got {wrong[0]!r}")
    traits = {name: dataclasses.asdict(KINDS[kind]) for name, kind in plain["kinds"].items()}
    for name, kind in plain["kinds"].items():
        if kind == "ngram":
            traits[name]["max_ngram"] = plain["ngram_window"]
    return {**rest, "traits": traits}
