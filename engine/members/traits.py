"""What the rest of the program has to know about a member, as plain values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MemberTraits:
    """How a member behaves in a chain; stored with every recording.

    Attributes:
        has_kv: It keeps keys and values of the text in a cache, so it is prefilled and has to
            catch up. Without a cache it proposes from the text alone, and runs no forwards.
        has_law: Its proposals are drawn from a law. Without one they are certain.
        can_verify: It can judge the proposals of another member.
        first_position: Leading tokens of a text that have no position of their own in its cache.
        keeps_drafts: Its cache keeps what it drafted where the target agrees. Otherwise the draft
            is dropped and the tokens are fed again once they are committed.
        reads_target: It reads the target's features, which the target then has to keep.
        max_ngram: The longest n-gram that it looks up, which features of the text go by as well;
            0 for all members but prompt lookup.
    """

    has_kv: bool
    has_law: bool
    can_verify: bool
    first_position: int = 0
    keeps_drafts: bool = True
    reads_target: bool = False
    max_ngram: int = 0


MODEL = MemberTraits(has_kv=True, has_law=True, can_verify=True)
HEAD = MemberTraits(
    has_kv=True,
    has_law=True,
    can_verify=False,
    first_position=1,
    keeps_drafts=False,
    reads_target=True,
)
LOOKUP = MemberTraits(has_kv=False, has_law=False, can_verify=False)
