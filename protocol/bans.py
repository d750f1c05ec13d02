"""Bans: who is proven to have lied takes no further part, once a round has decided so.

    evidence, verified here ──► this node plans the accused no more, and as lead names it in the value
    value of round e, with bans ──► no member of rounds e + 1 … e + ban_rounds, at any node; for ever, if that is 0

A ban rides on a result, as an amendment does (amending.py): it names the accused and the digest of the evidence. Nobody
votes for it who does not hold that evidence and has not verified it; who lacks it fetches it. So no electorate changes
but by a certificate, and agreement is what it is without bans: in round e itself the accused still counts.

A proof serves once. What somebody did before a ban was decided is covered by that ban, so that evidence which is kept
cannot begin another when it is over. A rebase names its electorate: whom the authority names there is pardoned.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Ban, Term, Value

FOR_EVER = 0


@dataclass(frozen=True, slots=True)
class NeedEvidence:
    """A value was proposed with bans on evidence that is not here: fetch it, verify it, call `proven`."""

    value: Value


def named(value: Value) -> tuple[Ban, ...]:
    """Those that `value` bans."""
    return () if isinstance(value.bans, msgspec.UnsetType) else value.bans


def may_ban(value: Value, banned: Collection[PeerId]) -> bool:
    """Check that the bans of `value` have their one form, and no member of it is banned, by it or before."""
    bans = named(value)
    peers = [ban.peer for ban in bans]
    return (
        peers == sorted(set(peers))
        and not (bans and value.rollback)
        and not set(peers).intersection(banned)
        and (bool(value.rollback) or not set(value.members) & {*peers, *banned})
    )


def check_bans(value: Value, banned: Collection[PeerId]) -> None:
    """Raises RemoteError if `value` has bans that its round cannot have decided, or a member that is banned."""
    if not may_ban(value, banned):
        raise RemoteError(f"the value of round {value.round} has bans that cannot be, or a banned member")


def unproven(value: Value, proven: Mapping[bytes, PeerId]) -> tuple[Ban, ...]:
    """The bans of `value` whose evidence is not among `proven`, the accused by the digest of verified evidence."""
    return tuple(ban for ban in named(value) if proven.get(ban.evidence) != ban.peer)


def with_bans(
    value: Value, proven: Mapping[bytes, PeerId], banned: Collection[PeerId], among: Sequence[PeerId]
) -> Value:
    """`value`, a result, with a ban of everyone that is proven to have lied and not banned yet.

    among: who can be banned, the first of them where they are more than a value may name: keys that take no part are
    cheap, and so is proof against them.
    """
    evidence: dict[PeerId, bytes] = {}
    for digest, peer in sorted(proven.items(), reverse=True):
        if peer not in banned and peer in among:
            evidence[peer] = digest
    if not evidence:
        return value
    first = sorted(evidence, key=among.index)[:MEMBER_LIMIT]
    evidence = {peer: evidence[peer] for peer in first}
    return msgspec.structs.replace(
        value,
        members=tuple(peer for peer in value.members if peer not in evidence),
        bans=tuple(Ban(peer, digest) for peer, digest in sorted(evidence.items())),
    )


Moment = tuple[Term, int]
"""(term, round), as a chain's Position."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A ban that was decided: when, on which evidence, and the last round for which it holds; FOR_EVER has no end."""

    decided: Moment
    evidence: bytes
    until: int

    def holds(self, round: int) -> bool:
        """True if it keeps its peer out of `round`."""
        return self.until == FOR_EVER or round <= self.until


class Register:
    """All bans of a chain, by peer, the newest of each. rounds: for how many a ban holds; FOR_EVER is 0."""

    def __init__(self, rounds: int = FOR_EVER) -> None:
        self._rounds = rounds
        self._sentences: dict[PeerId, Sentence] = {}

    def snapshot(self) -> Register:
        """The bans as they are now."""
        same = copy.copy(self)
        same._sentences = dict(self._sentences)
        return same

    def follow(self, value: Value, *, pardons: bool) -> None:
        """`value` is appended to the chain. pardons: it is the authority's, and names an electorate."""
        if pardons:
            for peer in value.members:
                self._sentences.pop(peer, None)
        until = value.round + self._rounds if self._rounds else FOR_EVER
        for ban in named(value):
            self._sentences[ban.peer] = Sentence((value.term, value.round), ban.evidence, until)

    def banned(self, round: int) -> dict[PeerId, Sentence]:
        """Peers that may take no part in `round`, each with its ban."""
        return {peer: one for peer, one in self._sentences.items() if one.holds(round)}

    def covers(self, peer: PeerId, done: Moment) -> bool:
        """True if what `peer` did in that round is no ground for another ban."""
        sentence = self._sentences.get(peer)
        return sentence is not None and done <= sentence.decided
