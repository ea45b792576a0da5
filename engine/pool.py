"""A pool of named members and the chains they may form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specgym.engine.drafters import drafter_folder, load_drafter
from specgym.engine.eagle_member import EagleMember
from specgym.engine.hub import fetch_head
from specgym.engine.kernels import packing_works
from specgym.engine.members import ModelMember, NGramMember
from specgym.engine.recipes import RECIPES, split_recipe
from specgym.engine.sources import SMOLLM2, load_source
from specgym.engine.types import Plan
from specgym.engine.upcycling import Upcycling, parse_upcycling
from specgym.engine.vocabulary import check_tokenizers, count_tokens, make_member

if TYPE_CHECKING:
    from specgym.engine.decoding import DecodeRequest

Member = ModelMember | NGramMember | EagleMember
DEFAULT_K_VALUES = (1, 2, 3, 4, 6)
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
WINDOW_ROUNDING = 8


class ModelPool:
    """Members that share one tokenizer, the target among them, and the legal chains.

    Args:
        members: The members, cheapest first; one of them is the target.
        target: Name of the target.
        chains: Legal chains, target last; None takes every drafter before the target, and every
            drafter before a larger model before the target.
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
        self.members = {member.name: member for member in members}
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
        if not isinstance(self.members.get(target), ModelMember):
            raise ValueError(
                f"members: one must be the target model {target!r}; got {list(self.members)}"
            )
        wanted_chains = self.default_chains() if chains is None else chains
        self.chains = tuple(self.check_chain(chain) for chain in wanted_chains)
        check_vocabularies([m for m in members if isinstance(m, ModelMember)])
        tap_target(self.model(target), [m for m in members if isinstance(m, EagleMember)])
        longest = max((len(chain) - 1 for chain in self.chains), default=1)
        wanted = max(self.k_values) + max(longest, 1)
        self.window = -(-wanted // WINDOW_ROUNDING) * WINDOW_ROUNDING

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelPool:
        """The pool itself: it keeps nothing of a request, and packed weights cannot be copied."""
        return self

    def default_chains(self) -> list[tuple[str, ...]]:
        """Each drafter before the target; then each drafter, a later model, and the target."""
        drafters = [name for name in self.members if name != self.target]
        staged = [
            (first, middle, self.target)
            for first, middle in itertools.combinations(drafters, 2)
            if self.members[middle].can_verify
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
        blind = [name for name in chain[1:] if not self.members[name].can_verify]
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
        if plan.max_tokens > self.window:
            raise ValueError(
                f"plan {plan.name!r}: drafts and verifiers need {plan.max_tokens} rows, the "
                f"pool's window has {self.window}; build the pool with a larger K in k_values"
            )

    def model(self, name: str) -> ModelMember:
        """The neural member with this name."""
        member = self.members[name]
        assert isinstance(member, ModelMember)
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


def tap_target(target: ModelMember, heads: Sequence[EagleMember]) -> None:
    """Has the target keep the features that the heads on it read."""
    target.taps = tuple(sorted({tap for head in heads for tap in head.taps}))
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
        if name in sources or name == "ngram" or not name.isidentifier():
            raise ValueError(
                f"pool: member name {name!r} must be a word, used once, and not 'ngram' "
                f"(prompt lookup is always in the pool)"
            )
        sources[name] = source
    if "target" not in sources:
        raise ValueError(f"pool: {spec!r} names no target; add target=PATH")
    return sources


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device computes it fast, else float32."""
    fast = torch.device(device).type != "cpu" or packing_works(torch.bfloat16)
    return torch.bfloat16 if fast else torch.float32


def load_pool(
    spec: str = "smollm2",
    *,
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    chains: Sequence[tuple[str, ...]] | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
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
        dtype: Type of the weights; None takes bfloat16 where it is fast.

    Raises:
        ValueError: If the spec cannot be read, a folder holds no model, or tokenizers differ.
        OSError: If weights cannot be had.
    """
    sources = parse_pool(spec)
    recipe = parse_upcycling(sources["target"])
    if recipe is not None and any(DENSE_MEMBER in chain for chain in chains or ()):
        sources = {DENSE_MEMBER: recipe.base, **sources}
    sources = {name: fetch_head(source) for name, source in sources.items()}
    dtype = dtype or default_dtype(device)
    folders = {name: drafter_folder(source) for name, source in sources.items()}
    loaded = {
        name: load_source(source, dtype=dtype, device=device)
        for name, source in sources.items()
        if folders[name] is None
    }
    target = loaded["target"]
    for name, drafter in loaded.items():
        if drafter.tokenizer is not None and target.tokenizer is not None:
            check_tokenizers(name, drafter.tokenizer, target.tokenizer)
    num_tokens = None
    if target.tokenizer is not None:
        num_rows = target.model.config.get_text_config().vocab_size
        num_tokens = count_tokens(target.tokenizer, num_rows)
    members: list[Member] = [NGramMember()]
    for name, folder in folders.items():  # before the target's own weights are packed
        if folder is not None:
            members.append(load_drafter(name, folder, target, num_tokens))
    # The target comes last whatever the order it was given in.
    for name in sorted(loaded, key=lambda each: each == "target"):
        each = loaded[name]
        members.append(make_member(name, each.model, num_tokens, each.tokenizer, target.tokenizer))
    if chains is None and (found := split_recipe(spec)) is not None:
        chains = found[0].chains
    if chains is None and spec.partition(":")[0] in BUILT_IN_POOLS:
        chains = BUILT_IN_CHAINS
    return ModelPool(
        members,
        chains=chains,
        k_values=k_values,
        tokenizer=target.tokenizer,
        eos_ids=eos_ids_of(target.model, target.tokenizer),
        name=spec if recipe is None else f"{spec} ({recipe.label})",
        fingerprints={name: each.fingerprint for name, each in loaded.items()},
    )


def eos_ids_of(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end a text: the generation config's, else the tokenizer's, else none."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]
