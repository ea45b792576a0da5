"""Recording: what every plan would do at every position of a request, and no decode per plan.

The target's own path is known from plain decoding. At each position every drafter drafts, every
middle verifier scores the drafts, and that is all: what a plan would get follows by comparing
paths. In exact mode all of these are functions of the text alone, so the table is what the live
engine will do.

Legend: N positions, D drafters, C speculative chains, V levels, W tokens proposed, L layers, E
experts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from specgym.engine.decoding import commit, finish_reason, start
from specgym.engine.drafting import draft
from specgym.engine.expert_paths import Branch, visited_experts
from specgym.engine.member_runs import Meter, best_tokens, score
from specgym.engine.pool import ModelPool
from specgym.engine.timing import Clock
from specgym.engine.types import DecodeRequest, Plan, Proposal, common_prefix
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.traces import Trace
from specgym.envs.text_features import token_classes
from specgym.envs.workloads import Request


@dataclasses.dataclass
class Level:
    """What one level of a chain says at a position: its path, and the logits behind it."""

    path: tuple[int, ...]
    logits_NV: torch.Tensor | None


@dataclasses.dataclass
class Sight:
    """What drafters and middle verifiers say at one position; the target is not asked.

    Attributes:
        drafts: Each drafter's proposal.
        entropy: Each drafter's entropy in nats.
        levels: Per speculative chain, the drafter and the middle verifiers.
    """

    drafts: list[Proposal]
    entropy: list[float]
    levels: list[list[Level]]


class Recorder:
    """Records requests on one pool.

    Args:
        pool: The members, chains and K values; plans draft at most the largest K.
        exact: Exact mode, in which the table is what the live engine does, bit for bit.
        clock: The engine's; what it says is not recorded.
    """

    def __init__(self, pool: ModelPool, exact: bool, clock: Clock):
        self.pool, self.exact, self.clock = pool, exact, clock
        self.layout = Layout.of(pool)
        self.max_k = max(pool.k_values)
        self.classes = token_classes(pool.tokenizer, pool.model(pool.target).vocab_size)

    def record(self, request: Request, decode_request: DecodeRequest, split: str) -> Trace:
        """The request's trace.

        Args:
            request: Its name and category.
            decode_request: What is decoded, greedily.
            split: What the trace says of itself.

        Raises:
            ValueError: If the request samples: then the output is not one path.
        """
        if not decode_request.sampling.is_greedy:
            raise ValueError(
                f"sampling: only greedy decoding has a table of what plans get; got temperature "
                f"{decode_request.sampling.temperature}"
            )
        walk = Walk(self, decode_request)
        walk.run()
        output = walk.output
        text = np.array([*decode_request.prompt, *output])
        return Trace(
            request_id=request.id,
            category=request.category,
            split=split,
            finish_reason=walk.finish_reason,
            max_new_tokens=walk.state.budgets[0],
            prompt=np.array(decode_request.prompt, dtype=np.int32),
            output=np.array(output, dtype=np.int32),
            classes=self.classes[text],
            **walk.tables(),
        )


class Walk:
    """One request on its way: plain decoding, with a look to all sides at every position.

    The walk goes past the request's own end by as many tokens as a plan may run ahead, since a
    verification that ends a text may have accepted more. It keeps to the budget, which plans keep
    to as well.
    """

    def __init__(self, recorder: Recorder, request: DecodeRequest):
        self.recorder, self.request = recorder, request
        self.pool, self.layout = recorder.pool, recorder.layout
        self.meter = Meter(recorder.clock)
        endless = dataclasses.replace(request, eos_ids=frozenset(), stop=())
        self.state = start(self.pool, [endless], recorder.clock, exact=recorder.exact)
        self.sights: list[Sight] = []
        self.target_logits: list[torch.Tensor] = []
        self.end: int | None = None
        self.finish_reason = ""

    @property
    def output(self) -> list[int]:
        """The request's output tokens."""
        return self.state.output()[: self.end]

    def run(self) -> None:
        """Walks to the end."""
        while not self.state.is_finished:
            if self.end is None:
                self.sights.append(self.look())
            elif self.state.num_generated(0) >= self.end + self.layout.max_proposed:
                break
            self.step()
            reason = finish_reason(
                self.pool, self.request, self.state.tokens[0], self.state.budgets[0]
            )
            if self.end is None and reason:
                self.end, self.finish_reason = self.state.num_generated(0), reason

    def step(self) -> None:
        """One token of plain decoding."""
        target = self.pool.target
        logits_BTV, firsts = score(self.state, target, [Proposal()], self.meter)
        row_V = logits_BTV[0, firsts[0]]
        token = best_tokens(row_V[None], target, self.state.memories[target])[0]
        self.target_logits.append(row_V.clone())
        commit(self.state, [Proposal((token,))])

    def look(self) -> Sight:
        """What the others say here; memories are left as they were."""
        drafts, entropy = [], []
        for name in self.layout.drafters:
            proposal, nats = self.draft(name)
            drafts.append(proposal)
            entropy.append(nats)
        levels = []
        for chain in self.layout.speculative_chains:
            proposal = drafts[self.layout.drafters.index(chain[0])]
            levels.append(self.climb(chain[1:-1], proposal))
        return Sight(drafts, entropy, levels)

    def has_room(self, name: str, num_tokens: int) -> bool:
        """Whether a member could take part in a plan here at all."""
        state = self.state
        longest = len(state.tokens[0]) + num_tokens
        return longest <= self.pool.members[name].context_limit

    def draft(self, name: str) -> tuple[Proposal, float]:
        """A drafter's proposal and its entropy."""
        state = self.state
        k = min(self.recorder.max_k, state.num_remaining(0) - 1)  # as many as a plan may here
        if k < 1 or not self.has_room(name, k):
            return Proposal(), 0.0
        plan = Plan((name, self.pool.target), k)
        [proposal], entropy = draft(state, plan, self.meter, keep_logits=True)
        self.forget(name)
        return proposal, entropy

    def climb(self, verifiers: Sequence[str], proposal: Proposal) -> list[Level]:
        """The drafter and what each middle verifier says to the level below."""
        levels = [Level(proposal.tokens, proposal.logits_NV)]
        for name in verifiers:
            below = levels[-1]
            if not below.path or not self.has_room(name, len(below.path)):
                levels.append(Level((), None))
                continue
            logits_BTV, firsts = score(self.state, name, [Proposal(below.path)], self.meter)
            rows_NV = logits_BTV[0, firsts[0] : firsts[0] + len(below.path) + 1]
            best = best_tokens(rows_NV, name, self.state.memories[name])
            self.forget(name)
            stop = common_prefix(below.path, best) + 1
            levels.append(Level(tuple(best[:stop]), rows_NV[:stop].clone()))
        return levels

    def forget(self, name: str) -> None:
        """Roll a member's cache back to the committed text without its last token."""
        memory = self.state.memories.get(name)
        if memory is not None:
            memory.keep([min(memory.num_valid(0), len(self.state.tokens[0]) - 1)])

    def tables(self) -> dict[str, np.ndarray]:
        """The arrays of the trace that come from the walk."""
        layout, count = self.layout, len(self.sights)
        shape = (count, len(layout.speculative_chains), layout.max_verifiers)
        onward = self.state.output()
        tables: dict[str, np.ndarray] = {
            "num_proposed": np.zeros((count, len(layout.drafters)), np.uint8),
            "draft_matches": np.zeros((count, len(layout.drafters)), np.uint8),
            "matches": np.zeros(shape, np.uint8),
            "entropy": np.array([s.entropy for s in self.sights], np.float32),
            "divergence": np.zeros((*shape, layout.max_proposed), np.float16),
            "experts": self.experts(),
        }
        for position, sight in enumerate(self.sights):
            path = onward[position : position + layout.max_proposed]
            for index, proposal in enumerate(sight.drafts):
                tables["num_proposed"][position, index] = len(proposal.tokens)
                matched = common_prefix(proposal.tokens, path)
                tables["draft_matches"][position, index] = matched
            laws = self.target_logits[position : position + layout.max_proposed]
            for index, levels in enumerate(sight.levels):
                heard = [*levels, Level(tuple(path), torch.stack(laws))]
                for level, (below, above) in enumerate(itertools.pairwise(heard)):
                    matched = common_prefix(below.path, above.path)
                    tables["matches"][position, index, level] = matched
                    rows = distances(below, above, matched)
                    tables["divergence"][position, index, level, : len(rows)] = rows
        return tables

    def experts(self) -> np.ndarray:
        """Mean unique experts of the target's verifications, float16 [N, C, W + 1]."""
        layout, count = self.layout, len(self.sights)
        shape = (count, len(layout.speculative_chains), layout.max_proposed + 1)
        unique = np.zeros(shape, np.float16)
        target = self.pool.model(self.pool.target)
        if target.experts is None:
            return unique
        num_prompt, onward = len(self.request.prompt), self.state.output()
        proposals: dict[tuple[int, int], Branch] = {}
        for position, sight in enumerate(self.sights):
            for index, levels in enumerate(sight.levels):
                path = levels[-1].path
                matched = common_prefix(path, onward[position:])
                leaf = num_prompt + position + matched
                proposals[position, index] = Branch(leaf, path[matched:])
        branches = tuple({branch: None for branch in proposals.values() if branch.tokens})
        visited, off = visited_experts(target, self.state.tokens[0], branches)
        visited_off = dict(zip(branches, off, strict=True))
        for (position, index), branch in proposals.items():
            first = num_prompt + position - 1
            rows = visited[first : branch.start]
            if branch.tokens:
                rows = np.concatenate([rows, visited_off[branch]])
            counts = np.logical_or.accumulate(rows, axis=0).sum(axis=2).mean(axis=1)
            unique[position, index, : len(counts)] = counts
            unique[position, index, len(counts) :] = counts[-1]
        return unique


def distances(below: Level, above: Level, matched: int) -> np.ndarray:
    """D_TV between two levels' laws up to the first rejection, float [rows], at temperature 1."""
    rows = min(matched + 1, len(below.path), len(above.path))
    if not rows or above.logits_NV is None:
        return np.zeros(0)
    p_NV = above.logits_NV[:rows].float().softmax(dim=-1)
    if below.logits_NV is None:
        tokens = torch.tensor(below.path[:rows], device=p_NV.device)
        return (1.0 - p_NV.gather(1, tokens[:, None])[:, 0]).cpu().numpy()
    q_NV = below.logits_NV[:rows].float().softmax(dim=-1)
    return ((p_NV - q_NV).abs().sum(dim=-1) / 2).clamp_max(1.0).cpu().numpy()
