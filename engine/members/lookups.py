"""The lookups that are members of every pool; each heads a chain of its own."""

from __future__ import annotations

from specgym.engine.members.ngram import NGramMember
from specgym.engine.members.protocol import LookupMember

LOOKUPS = {"ngram": NGramMember}  # what makes each, by its name in chains


def make_lookups() -> list[LookupMember]:
    """Return a new member of each kind."""
    return [make(name) for name, make in LOOKUPS.items()]
