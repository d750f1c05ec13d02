"""The chain: certificates and rebases from the founders on, each checked against what it stands on.

    C(1) ─ C(2) ─ C(3) ─ C(4) ─ rollback to C(2) ─ C'(3) ─ C'(4) ─ …          one list, each entry on the one before it
           S(2) stands, then S(3), S(4), then S(2) again, S'(3), S'(4)          the branch: C(1), C(2), C'(3), C'(4)

A rollback ends a term and leaves what came before it in the list: its quorum is judged by the certificate before it. A
rebase takes the place of whatever the list has after C(k). The *branch* has, for each round, the certificate that led
to the state on which the chain stands. S(0) has none: the first rollback to it certifies its digest.

The entries alone say, with the manifest, which settings were in force in every round of the branch (amending.py), and
who votes after each of them (voting.py).
"""

from __future__ import annotations

import copy
import logging
from sys import intern

import msgspec
from msgspec.structs import force_setattr

from shoal.protocol.amending import History, InForce, check_amended
from shoal.protocol.bans import FOR_EVER, Register, Sentence, check_bans
from shoal.protocol.certificate import check_certificate
from shoal.protocol.enlisting import VALID_VALUES, OutsideLine, check_enlisted, enlisted_in
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.forks import Checkpoint, Fork, same_position
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    ENLISTED_LIMIT,
    MEMBER_LIMIT,
    NO_HASH,
    Certificate,
    Entry,
    Rebase,
    Target,
    Term,
    Value,
)
from shoal.protocol.peering import CERTIFICATES_IN_ANSWER_LIMIT, ChainPart
from shoal.protocol.seats import Line, check_counted
from shoal.protocol.terms import check_rebase, is_consented, is_signed
from shoal.protocol.voting import CONTRIBUTORS, Voting

logger = logging.getLogger(__name__)

ENLISTED_IN_ANSWER_LIMIT = 16 * ENLISTED_LIMIT
"""Enlistments in the entries of one answer: with more it would be longer than a message may be (wire.py)."""

Position = tuple[Term, int]
"""(term, round): which decision something belongs to; later ones are greater."""


def _share_names(entry: Entry, before: Value) -> None:
    """Have an entry name peers by the same strings as all entries: 64 voters would be 8 kB more with each."""
    value = entry.value
    same = value.members == before.members
    force_setattr(value, "members", before.members if same else tuple(map(intern, value.members)))
    force_setattr(value, "planner", intern(value.planner))
    if not isinstance(value.counted, msgspec.UnsetType):
        force_setattr(value, "counted", tuple(map(intern, value.counted)))
    if isinstance(entry, Certificate):
        force_setattr(entry, "signers", tuple(map(intern, entry.signers)))


def next_position(value: Value) -> Position:
    """Of the round that comes after `value`."""
    return value.next_term, value.next_round


class Chain:
    """The entries from genesis to the newest. authority: whose word rebases; nobody's if left out.

    manifest: who votes, and what may be amended; without it contributors vote, and nothing may be.
    """

    def __init__(
        self, genesis_value: Value, authority: PeerId | None = None, *, manifest: Manifest | None = None
    ) -> None:
        self._genesis = genesis_value
        force_setattr(genesis_value, "members", tuple(map(intern, genesis_value.members)))
        self._authority = authority
        self._manifest = manifest
        self._begin()

    def _begin(self) -> None:
        self._entries: list[Entry] = []
        self._branch: list[Value] = [self._genesis]
        # How many entries there are up to a value, by its hash; up to a decision, by its position; up to a rebase.
        self._heights: dict[bytes, int] = {self._genesis.hash: 0}
        self._decisions: dict[Position, int] = {}
        self._rebases: dict[int, int] = {}
        self._initial = NO_HASH
        self._members_ever = set(self._genesis.members)
        self._settings = None if self._manifest is None else History(self._manifest, self._genesis)
        self._votings = [CONTRIBUTORS if self._manifest is None else self._manifest.voting]  # by the entries up to then
        outside = self._manifest is not None and self._manifest.waits_outside
        self._line: Line = OutsideLine(self._genesis.members, self.seats) if outside else Line(self._genesis.members)
        self.bans = Register(FOR_EVER if self._manifest is None else self._manifest.audits.ban_rounds)

    @property
    def head(self) -> Value:
        """The newest decided value: what the round under way follows."""
        return self._entries[-1].value if self._entries else self._genesis

    @property
    def height(self) -> int:
        """Number of entries; the round of the head as long as no term has ended."""
        return len(self._entries)

    @property
    def standing(self) -> Value:
        """The value that led to the state on which the head stands: the head itself, unless it ended a term."""
        return self._branch[-1]

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Checkpoint at the head, which a newcomer's chain has to contain; None before anything is certified."""
        return Checkpoint.of(self.head) if self._entries else None

    def allows(self, checkpoint: Checkpoint) -> bool:
        """True if this chain contains a checkpoint, or the authority went on from before it with a later rebase."""
        return checkpoint.value in self._heights or self.head.term.rebases > checkpoint.term.rebases

    # -- growing ---------------------------------------------------------------------------------------------

    def extend(self, entry: Entry, *, trusted: bool = False) -> bool:
        """Append an entry; a rebase first drops what it abandons. Returns False for a rebase that is known.

        trusted: it is from this node's own disk, or beneath the checkpoint of a link: it may be one of 0.1.0.

        Raises RemoteError if it does not follow or does not hold, and then the chain is as it was.
        """
        if isinstance(entry, Rebase):
            return self._rebase(entry)
        check_certificate(entry, self.head, trusted=trusted, voting=self.voting)
        rollback = entry.value.rollback
        if rollback and not self.leads_back(entry.value):
            raise RemoteError(f"the rollback of round {entry.value.round} goes back to what was not certified")
        if not is_consented(entry.value, self.head, voting=self.voting):
            raise RemoteError(f"the rollback of round {entry.value.round} has no consents of a quorum")
        check_amended(entry.value, self.head, self.in_force, voting=self.voting)
        check_bans(entry.value, self.banned)
        check_counted(entry.value, self.seats)
        check_enlisted(entry.value, self.may_enlist)
        self._append(entry)
        return True

    def replace(self, other: Chain) -> None:
        """Become a copy of `other`, a chain of the same swarm that the authority went on with."""
        if other.head.term.rebases <= self.head.term.rebases:
            raise LocalError("a chain is replaced only by one that a later rebase opened")
        entries = other.entries
        self._begin()
        for entry in entries:
            self._append(entry)

    def fork_with(self, certificate: Certificate) -> Fork | None:
        """The fork that `certificate` and an entry of this chain are; None where it is no other decision.

        What follows a value that is not here is None as well: compare the chains first. Raises RemoteError if the
        certificate does not hold.
        """
        mine = self.after_base(certificate.value.base)
        if not isinstance(mine, Certificate) or mine.value.hash == certificate.value.hash:
            return None
        if not same_position(mine.value, certificate.value):
            return None
        previous = self._at(self._heights[mine.value.base])
        check_certificate(certificate, previous, voting=self._voting_after(previous))
        return Fork.of(mine, certificate)

    def can_go_back_to(self, target: Target) -> bool:
        """True if a rollback can go back there: to a state before the newest, on the branch."""
        return target.round < self.standing.round and self.value(target.round).hash == target.certificate

    def leads_back(self, value: Value) -> bool:
        """True if a rollback goes back to what was certified on the branch."""
        assert value.rollback
        round, certificate = value.rollback.target.round, value.rollback.target.certificate
        if round >= len(self._branch):
            return False
        digest = self.digest(round)
        first_to_initial = round == 0 and digest == NO_HASH
        return self._branch[round].hash == certificate and (first_to_initial or digest == value.digest)

    def _rebase(self, rebase: Rebase) -> bool:
        known = self.rebase_of(rebase.value.term.rebases)
        if known is not None:
            if known.value.hash != rebase.value.hash and self._authority and is_signed(rebase, self._authority):
                logger.error(
                    "the authority signed two rebases to term %s, %s and %s: the first one seen here stands",
                    rebase.value.term,
                    known.value.hash.hex(),
                    rebase.value.hash.hex(),
                )
            return False
        height = self._heights.get(rebase.value.base)
        if height is None:
            raise RemoteError(f"a rebase to term {rebase.value.term} on a certificate that is not known here")
        if self._authority is None:
            raise RemoteError("a rebase of a swarm without an authority")
        check_rebase(rebase, self._at(height), self._authority)
        kept = self._entries[:height]
        self._begin()
        for entry in (*kept, rebase):
            self._append(entry)
        return True

    def _append(self, entry: Entry) -> None:
        value = entry.value
        _share_names(entry, self.head)
        self._entries.append(entry)
        self._heights[value.hash] = self.height
        self._members_ever.update(value.members)
        if isinstance(entry, Rebase):
            self._rebases[value.term.rebases] = self.height
        else:
            self._decisions[value.term, value.round] = self.height
            if not value.rollback:
                self._branch.append(value)
            elif value.state_round == 0:
                self._initial = value.digest
        del self._branch[value.next_round :]
        before = self.voting
        self._votings.append(before.rebased(value) if isinstance(entry, Rebase) else before.after(value))
        if self._settings is not None:
            ends_term = isinstance(entry, Rebase) or bool(value.rollback)
            self._settings.follow(value, ends_term=ends_term, voting=self.voting)
        self.bans.follow(value, pardons=isinstance(entry, Rebase))
        signed = {one.peer: self._heights.get(one.since, 0) for one in enlisted_in(value)}
        self._line.follow(value, self.height, self.voting.named, signed)

    # -- seats -------------------------------------------------------------------------------------------------

    @property
    def seats(self) -> int:
        """Number of contributions that a round may count."""
        return MEMBER_LIMIT if self._manifest is None else self._manifest.seats

    @property
    def line(self) -> tuple[PeerId, ...]:
        """The members in the order in which they come to the seats of the round after the head."""
        return self._line.after(self.head)

    @property
    def admitted(self) -> frozenset[PeerId] | None:
        """Those who take part in the round after the head; None where nobody waits outside, and all may."""
        line = self._line
        return line.admitted if isinstance(line, OutsideLine) else None

    @property
    def taking_part(self) -> frozenset[PeerId]:
        """Those of whom it is known that they are to take part in the round after the head."""
        return frozenset(self.voting.everyone(self.head)) if self.admitted is None else self.admitted

    def is_outside(self, peer: PeerId) -> bool:
        """True if a peer has to wait outside the round after the head."""
        return isinstance(self._line, OutsideLine) and not self._line.admits(peer)

    def may_enlist(self, peer: PeerId, since: bytes) -> bool:
        """True if the value after the head may take a peer into the line that signed so on the value of this hash."""
        height = self._heights.get(since)
        if height is None or not isinstance(self._line, OutsideLine) or peer in self.banned:
            return False
        return self.height - height < VALID_VALUES and self._line.may_enlist(peer, height)

    # -- settings --------------------------------------------------------------------------------------------

    @property
    def voting(self) -> Voting:
        """Voting in the round that comes after the head."""
        return self._votings[-1]

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Voters of the round that comes after the head."""
        return self.voting.electorate(self.head)

    def _voting_after(self, value: Value) -> Voting:
        """Voting in the round after `value`, which is in the chain."""
        return self._votings[self._heights[value.hash]]

    @property
    def in_force(self) -> InForce | None:
        """The settings of the round that comes after the head; None where nothing may be amended."""
        return None if self._settings is None else self._settings.of(self.head.next_round)

    def amended(self, round: int) -> Manifest | None:
        """The settings in force in a round of the branch, or in the one after it; None if they are the manifest's."""
        manifest = None if self._settings is None else self._settings.of(round).manifest
        return None if manifest is self._manifest else manifest

    @property
    def banned(self) -> dict[PeerId, Sentence]:
        """Peers that can take no part in the round after the head, nor be members after it, each with its ban."""
        return self.bans.banned(self.head.next_round)

    # -- questions -------------------------------------------------------------------------------------------

    def __contains__(self, value: Value) -> bool:
        return value.hash in self._heights

    def snapshot(self) -> Chain:
        """The chain as it is now, which stays so while this one goes on."""
        same = copy.copy(self)
        same._entries, same._branch, same._votings = list(self._entries), list(self._branch), list(self._votings)
        same._heights, same._decisions, same._rebases = dict(self._heights), dict(self._decisions), dict(self._rebases)
        same._settings = None if self._settings is None else self._settings.snapshot()
        same.bans, same._line = self.bans.snapshot(), copy.copy(self._line)
        return same

    def _at(self, height: int) -> Value:
        return self._entries[height - 1].value if height else self._genesis

    def on_branch(self, value: Value) -> bool:
        """True if the state that `value` led to is one that the head's descends from."""
        return value.round < len(self._branch) and self._branch[value.round].hash == value.hash

    def value(self, round: int) -> Value:
        """The value that led to the state of `round` (0 is genesis). Raises IndexError past the state at the head."""
        return self._branch[round]

    def digest(self, round: int) -> bytes:
        """The certified digest of the state of `round`; NO_HASH for S(0) as long as no rollback led to it.

        Raises IndexError past the state at the head.
        """
        return self._branch[round].digest if round else self._initial

    def back_to(self, value: Value, *, initial: bytes = NO_HASH) -> Chain:
        """The chain as it was when `value`, which is in it, was its head. initial: the digest of S(0), if known."""
        before = Chain(self._genesis, self._authority, manifest=self._manifest)
        for entry in self._entries[: self._heights[value.hash]]:
            before._append(entry)
        before._initial = self._initial if initial == NO_HASH else initial
        return before

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, in order."""
        return tuple(self._entries)

    def up_to(self, height: int) -> Chain:
        """A chain of its own, of the first `height` entries."""
        return self.back_to(self._at(height))

    def knows(self, base: bytes) -> bool:
        """True if the value of that hash is in the chain."""
        return base in self._heights

    def after_base(self, base: bytes) -> Entry | None:
        """The entry that stands on the value of hash `base`, None if there is none."""
        height = self._heights.get(base, self.height)
        return self._entries[height] if height < self.height else None

    def decided(self, position: Position) -> Entry | None:
        """Entry that a peer still at `position` has to hear first: its decision, or the rebase that abandoned it."""
        height = self._decisions.get(position)
        return self.rebase_of(position[0].rebases + 1) if height is None else self._entries[height - 1]

    def rebase_of(self, rebases: int) -> Rebase | None:
        """The rebase that opened the terms with that many rebases."""
        height = self._rebases.get(rebases)
        entry = None if height is None else self._entries[height - 1]
        return entry if isinstance(entry, Rebase) else None

    def after(self, height: int, limit: int, rebases: int | None = None) -> tuple[Entry, ...]:
        """At most `limit` entries after the first `height`; from the first rebase on of which somebody with that many
        does not know, if that comes earlier."""
        first = None if rebases is None else self.rebase_of(rebases + 1)
        if first is not None:
            height = min(height, self._heights[first.value.hash] - 1)
        return tuple(self._entries[height : height + limit])

    def part(self, after: int, rebases: int | None = None) -> ChainPart:
        """The answer to who has `after` entries: what `after` gives, as far as one message holds it."""
        entries: list[Entry] = []
        enlisted = 0
        for entry in self.after(after, CERTIFICATES_IN_ANSWER_LIMIT, rebases):
            enlisted += len(enlisted_in(entry.value))
            if entries and enlisted > ENLISTED_IN_ANSWER_LIMIT:
                break
            entries.append(entry)
        return ChainPart(certificates=tuple(entries), head=self.height)

    def was_member(self, peer: PeerId) -> bool:
        """True if a peer was a member after any of the decisions."""
        return peer in self._members_ever

    def recent_members(self, rounds: int) -> frozenset[PeerId]:
        """Everyone who was a member after one of the last `rounds` decisions, the head's members included; whom a
        rebase left out, or who is banned, is not."""
        values: list[Value] = []
        for height in range(self.height, max(-1, self.height - rounds - 1), -1):
            values.append(self._at(height))
            if height and isinstance(self._entries[height - 1], Rebase):
                break
        return frozenset(peer for value in values for peer in value.members).difference(self.banned)
