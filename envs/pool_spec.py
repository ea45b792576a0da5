"""What a pool offers, as plain values: members, chains, plans and limits, without any weights."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from specgym.engine.eagle_member import EagleMember
from specgym.engine.members import NGramMember
from specgym.engine.pool import Member, ModelPool
from specgym.engine.types import Plan

KINDS = ("ngram", "model", "eagle")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A pool as plain values: what actions, features and traces are tables over.

    Attributes:
        target: Name of the target.
        chains: Speculative chains, drafter first and target last.
        k_values: Numbers of drafted tokens that plans may ask for, ascending.
        window: Rows of a forward in exact mode.
        context_limits: The longest text each member takes, in tokens.
        kinds: What each member is, cheapest first: ``ngram``, ``model`` or ``eagle``.
        ngram_window: Longest suffix that prompt lookup looks up; 0 without it.
        experts_per_token: Routed experts that each token visits in the target; 0 for a dense one.

    Raises:
        ValueError: If a chain or a table of members names one that is not there.
    """

    target: str
    chains: tuple[tuple[str, ...], ...]
    k_values: tuple[int, ...]
    window: int
    context_limits: Mapping[str, int]
    kinds: Mapping[str, str]
    ngram_window: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        named = {self.target, *itertools.chain.from_iterable(self.chains)}
        unknown = sorted(named - self.kinds.keys())
        if unknown or self.kinds.keys() != self.context_limits.keys():
            raise ValueError(
                f"layout: chains, kinds and context_limits must name the same members; got chains "
                f"of {sorted(named)}, kinds of {sorted(self.kinds)} and context_limits of "
                f"{sorted(self.context_limits)}"
            )
        wrong = [kind for kind in self.kinds.values() if kind not in KINDS]
        if wrong:
            raise ValueError(f"layout.kinds: must be of {', '.join(KINDS)}; got {wrong[0]!r}")

    @staticmethod
    def of(pool: ModelPool) -> Layout:
        """The layout of a pool."""
        lookup = [m.max_window for m in pool.members.values() if isinstance(m, NGramMember)]
        experts = pool.model(pool.target).experts
        return Layout(
            target=pool.target,
            chains=pool.chains,
            k_values=pool.k_values,
            window=pool.window,
            context_limits={name: m.context_limit for name, m in pool.members.items()},
            kinds={name: kind_of(member) for name, member in pool.members.items()},
            ngram_window=lookup[0] if lookup else 0,
            experts_per_token=0 if experts is None else experts.experts_per_token,
        )

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Layout:
        """The layout that ``as_plain`` wrote.

        Raises:
            ValueError: If an entry is missing or unknown, or they do not go together.
        """
        wanted = {field.name for field in dataclasses.fields(Layout)}
        if plain.keys() != wanted:
            wrong = ", ".join(sorted(plain.keys() ^ wanted))
            raise ValueError(f"layout: missing or unknown entries: {wrong}")
        chains = tuple(tuple(chain) for chain in plain["chains"])
        return Layout(**{**plain, "chains": chains, "k_values": tuple(plain["k_values"])})

    def as_plain(self) -> dict[str, Any]:
        """The layout as values that JSON can hold."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        chains = [list(chain) for chain in self.chains]
        return plain | {
            "chains": chains,
            "k_values": list(self.k_values),
            "context_limits": dict(self.context_limits),
            "kinds": dict(self.kinds),
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
        return tuple(n for n, kind in self.kinds.items() if kind != "ngram" and n != self.target)

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


def kind_of(member: Member) -> str:
    """What a member is: ``ngram``, ``model`` or ``eagle``."""
    if isinstance(member, EagleMember):
        return "eagle"
    return "model" if member.is_neural else "ngram"
