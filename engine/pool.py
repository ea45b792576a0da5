"""A pool of named members and the chains they may form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from specgym.engine.members.model import ModelMember
from specgym.engine.members.protocol import (
    HeadMember,
    LookupMember,
    Member,
    NeuralMember,
    has_kv,
    looks_up,
    reads_target,
)
from specgym.engine.types import DecodeRequest, Plan

DEFAULT_K_VALUES = (1, 2, 3, 4, 6)
WINDOW_ROUNDING = 8


class ModelPool:
    """Members that share one tokenizer, the target among them, and the legal chains.

    Args:
        members: The members, cheapest first; one of them is the target.
        target: Name of the target.
        chains: Legal chains, target last; None takes those of ``default_chains``.
        k_values: Numbers of drafted tokens that plans may ask for, ascending.
        tokenizer: The tokenizer all members share; None for pools of bare token ids.
        eos_ids: Token ids that end a text.
        name: What the pool is called in results.
        fingerprints: Hash of each neural member's weights.

    Raises:
        ValueError: If members, chains or K values do not fit together.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        target: str = "target",
        chains: Sequence[tuple[str, ...]] | None = None,
        k_values: Sequence[int] = DEFAULT_K_VALUES,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        name: str = "custom",
        fingerprints: Mapping[str, str] | None = None,
    ):
        self.members: dict[str, Member] = {member.name: member for member in members}
        self.target = target
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.fingerprints = dict(fingerprints or {})
        self.k_values = check_k_values(k_values)
        if len(self.members) != len(members):
            raise ValueError(
                f"members: names must differ; got {[member.name for member in members]}"
            )
        if target not in self.members or not self.members[target].traits.can_verify:
            raise ValueError(
                f"members: one must be the target model {target!r}; got {list(self.members)}"
            )
        wanted_chains = self.default_chains() if chains is None else chains
        self.chains = tuple(self.check_chain(chain) for chain in wanted_chains)
        check_vocabularies([self.model(m.name) for m in members if m.traits.can_verify])
        heads = [m for m in members if reads_target(m) and self.is_ready(m.name)]
        tap_target(self.model(target), heads)
        longest = max((len(chain) - 1 for chain in self.chains), default=1)
        wanted = max(self.k_values) + max(longest, 1)
        self.window = -(-wanted // WINDOW_ROUNDING) * WINDOW_ROUNDING

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelPool:
        """The pool itself: it keeps nothing of a request, and packed weights cannot be copied."""
        return self

    def default_chains(self) -> list[tuple[str, ...]]:
        """Return each drafter before the target, then each drafter and a later model before it.

        Of the lookups only the first stands before a model: the others would propose much the same.
        """
        drafters = [name for name in self.members if name != self.target]
        lookups = [name for name in drafters if looks_up(self.members[name])]
        staged = [
            (first, middle, self.target)
            for first, middle in itertools.combinations(drafters, 2)
            if self.members[middle].traits.can_verify and first not in lookups[1:]
        ]
        return [*((name, self.target) for name in drafters), *staged]

    def check_chain(self, chain: tuple[str, ...]) -> tuple[str, ...]:
        """The chain, when it is legal in this pool.

        Raises:
            ValueError: If it names unknown members, does not end at the target, or has a member
                that cannot verify anywhere but in front.
        """
        text = ">".join(chain)
        unknown = [name for name in chain if name not in self.members]
        if unknown:
            raise ValueError(
                f"chain {text!r}: no member {unknown[0]!r}; members are {', '.join(self.members)}"
            )
        if len(chain) < 2 or chain[-1] != self.target or len(set(chain)) != len(chain):
            raise ValueError(
                f"chain {text!r}: must run from a drafter to the target {self.target!r}, "
                f"naming each member once"
            )
        blind = [name for name in chain[1:] if not self.members[name].traits.can_verify]
        if blind:
            raise ValueError(f"chain {text!r}: {blind[0]!r} cannot verify; put it first")
        return tuple(chain)

    def plans(self) -> list[Plan]:
        """All plans: no speculation, then every chain with every K."""
        speculative = [Plan(chain, k) for chain in self.chains for k in self.k_values]
        return [Plan((self.target,), 0), *speculative]

    def plan(self, name: str) -> Plan:
        """The plan with this name, for example ``ngram@4``.

        Raises:
            ValueError: If there is none; the message lists the names there are.
        """
        by_name = {plan.name: plan for plan in self.plans()}
        if name not in by_name:
            raise ValueError(f"plan: no plan {name!r}; plans are {', '.join(by_name)}")
        return by_name[name]

    def check(self, plan: Plan) -> None:
        """Refuses a plan this pool cannot run.

        Raises:
            ValueError: If its chain is not legal, or it drafts more than the window holds.
        """
        if plan.chain == (self.target,):
            return
        if plan.chain not in self.chains:
            self.check_chain(plan.chain)
            idle = [name for name in plan.chain if not self.is_ready(name)]
            if idle:
                raise ValueError(
                    f"plan {plan.name!r}: the target keeps no features for {idle[0]!r}, which is "
                    f"in no chain of the pool; build the pool with this chain"
                )
        if plan.max_tokens > self.window:
            raise ValueError(
                f"plan {plan.name!r}: drafts and verifiers need {plan.max_tokens} rows, the "
                f"pool's window has {self.window}; build the pool with a larger K in k_values"
            )

    def is_ready(self, name: str) -> bool:
        """Return whether a member can run: a head on the target needs a chain that names it."""
        used = {member for chain in self.chains for member in chain}
        return name in used or not self.members[name].traits.reads_target

    def model(self, name: str) -> ModelMember:
        """Return the model with this name: a member that can verify."""
        member = self.members[name]
        assert member.traits.can_verify
        return cast(ModelMember, member)

    def neural(self, name: str) -> NeuralMember:
        """Return the member of this name, which runs forwards."""
        member = self.members[name]
        assert has_kv(member)
        return member

    def lookup(self, name: str) -> LookupMember:
        """Return the member of this name, which proposes from the text alone."""
        member = self.members[name]
        assert looks_up(member)
        return member

    def budget(self, request: DecodeRequest) -> int:
        """Tokens a request may get: what it asks for, cut to the target's context.

        Raises:
            ValueError: If the prompt leaves no room for a single token, or has foreign ids.
        """
        target = self.model(self.target)
        room = target.context_limit - len(request.prompt)
        if room < 1:
            raise ValueError(
                f"prompt: {len(request.prompt)} tokens leave no room in the target's context of "
                f"{target.context_limit}; shorten the prompt"
            )
        foreign = [token for token in request.prompt if not 0 <= token < target.vocab_size]
        if foreign:
            raise ValueError(
                f"prompt: token id {foreign[0]} is outside the vocabulary of {target.vocab_size}"
            )
        return min(request.max_new_tokens, room)

    def completes_stop(self, output: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the text of these output tokens holds a stop string near its end.

        Only as many tokens are decoded as can hold the longest stop string.
        """
        tail = max(len(text.encode()) for text in stop) + 4
        decoded = self.tokenizer.decode(output[-tail:])
        return any(text in decoded for text in stop)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a user's prompt, as a chat turn where the tokenizer has a template.

        Raises:
            ValueError: If the pool has no tokenizer or the prompt is empty.
        """
        if self.tokenizer is None:
            raise ValueError(f"pool {self.name!r} has no tokenizer; give token ids instead of text")
        if not prompt.strip():
            raise ValueError("prompt: must not be empty or blank")
        if self.tokenizer.chat_template is None:
            return tuple(self.tokenizer.encode(prompt))
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def check_k_values(k_values: Sequence[int]) -> tuple[int, ...]:
    """The K values, ascending.

    Raises:
        ValueError: If there is none, or one is not a positive integer.
    """
    values = tuple(sorted(set(k_values)))
    if not values or values[0] < 1 or not all(isinstance(value, int) for value in values):
        raise ValueError(f"k_values: must be integers >= 1 (K = 0 is always there); got {k_values}")
    return values


def tap_target(target: ModelMember, heads: Sequence[HeadMember]) -> None:
    """Has the target keep the features that the heads on it read."""
    target.tap(tuple(sorted({tap for head in heads for tap in head.taps})))
    for head in heads:
        head.find_columns(target.taps)


def check_vocabularies(members: Sequence[ModelMember]) -> None:
    """Refuses members whose usable vocabularies differ.

    Raises:
        ValueError: If two members cut their logits at different sizes.
    """
    sizes = {member.name: member.vocab_size for member in members}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"members: vocabularies differ: {sizes}; all members must share the target's tokenizer"
        )
