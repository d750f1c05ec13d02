"""Forks: two certificates for one position of the chain, and what a node makes of one.

A position is decided once: two quorums of one electorate have a member in common, and no member that follows the rules
signs for both. So two certificates with different values for one (term, round) on one base prove that whoever signed
both lied, or has its key in two places, and which of the two is the swarm's no rule can say. A node that has seen both
signs nothing more, keeps them, names who signed both, and goes on once the authority opened another term by a rebase.
Entries of different terms are no fork: rollbacks and rebases are there to abandon what was certified.

A *checkpoint* names one certificate. Who joins by a link that has one takes only a chain that contains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Term, Value

SHOWN_HASH_CHARS = 12
FORKS_LIMIT: Final = 64
"""That are kept, and told of; the first one stops this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One certificate of a chain: its term, its round, and the hash of its value."""

    term: Term
    round: int
    value: bytes

    @classmethod
    def of(cls, value: Value) -> Checkpoint:
        """The checkpoint at a decided value."""
        return cls(term=value.term, round=value.round, value=value.hash)

    @property
    def position(self) -> tuple[Term, int]:
        """Position in the chain: (term, round)."""
        return self.term, self.round

    def __str__(self) -> str:
        return f"round {self.round} of term {self.term}, {shown(self.value)}"


class Fork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two certificates that follow one value, as they lie on disk; the one with the lower hash first."""

    one: Certificate
    other: Certificate

    @classmethod
    def of(cls, mine: Certificate, theirs: Certificate) -> Fork:
        """The fork that two certificates for one position are. Raises ValueError if they are none."""
        if not same_position(mine.value, theirs.value) or mine.value.hash == theirs.value.hash:
            raise ValueError("certificates of two positions, or of one value")
        first, second = sorted((mine, theirs), key=lambda certificate: certificate.value.hash)
        return cls(one=first, other=second)

    @property
    def term(self) -> Term:
        """The term in which it happened."""
        return self.one.value.term

    @property
    def round(self) -> int:
        """The round that was decided twice."""
        return self.one.value.round

    @property
    def signers(self) -> tuple[PeerId, ...]:
        """Peers that signed both branches, sorted: they lied, or their key is in two places."""
        one, other = set(self.one.signers), set(self.other.signers)
        left = (one & set(self.other.value.leaves)) | (other & set(self.one.value.leaves))  # and signed all the same
        return tuple(sorted(one & other | left))

    def binds(self, head: Value) -> bool:
        """True if a chain with this head has not been rebased since the fork: nothing more may be signed then."""
        return head.term.rebases <= self.term.rebases

    def __str__(self) -> str:
        """One line for the user: what happened, who did it, and what helps."""
        by = ", ".join(self.signers) or "nobody"
        sides = " and ".join(f"{shown(c.value.hash)} by {', '.join(c.signers)}" for c in (self.one, self.other))
        return (
            f"round {self.round} of term {self.term} was certified twice, {sides}; {by} signed both: a lie, or a key "
            "in two places; this node signs nothing more until the authority decides: `shoal rebase` at its node, "
            "`--forget PEER` for who lied or `--keep-all`"
        )


def binding(forks: Iterable[Fork], head: Value) -> Fork | None:
    """The fork that keeps a node with this head from signing anything more, if one of these does."""
    return next((fork for fork in forks if fork.binds(head)), None)


def same_position(one: Value, other: Value) -> bool:
    """True if two values decide the same position: one term, one round, after one value."""
    return (one.term, one.round, one.base) == (other.term, other.round, other.base)


def shown(value_hash: bytes) -> str:
    """Start of a hash, as it is shown to a user."""
    return value_hash.hex()[:SHOWN_HASH_CHARS]
