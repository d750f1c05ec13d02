"""Watches whether this node's key is in use elsewhere: a data folder that was copied, or restored from an old copy.

Two nodes with one key contradict each other as a liar does, so at most one of them may sign. What shows another one:

    a record that this key signed, further on than this node    (boot, number) above its own; no record of an earlier
                                                                life of this folder can be, since its boot counter is on
                                                                its disk
    a certificate with a vote of this key that is not in the    whatever this folder signs is in its log before it is
    agreement log of this folder                                sent, so another folder did

So of two the one goes on that the swarm heard more of: the one that was started more often, and of two with one count
the one that has said more. The other ends, and does not start again on its folder until its user says that the other
copy is gone (`shoal run --take-over`). Then it counts its starts beyond the other's, and signs nothing before what its
key may have signed elsewhere is over: until a round is certified whose electorate has not this node, or the authority
opened another term. Until then it follows the rounds, and the others go on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec
import trio

from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol.chain import Position
from shoal.protocol.durable import DurableRecord
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Entry, Term, Value
from shoal.protocol.records import NodeRecord
from shoal.protocol.wire import canonical, decode

NAME = "elsewhere"

logger = logging.getLogger(__name__)


class Sighting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Use of this node's key elsewhere, as far as it is known, in the form in which it lies on disk.

    boot: how often it was started there; 0 where only a certificate shows it. term, round: up to where it may have
    signed as far as is known. taken_over: this folder's user said that the other copy is gone.
    """

    boot: int
    term: Term
    round: int
    taken_over: bool = False

    @property
    def position(self) -> Position:
        """Term and round up to which the key may have signed elsewhere, as far as is known."""
        return self.term, self.round


class KeyUse:
    """Watch over whether the key of one data folder is in use elsewhere. `run` ends the node when it is."""

    def __init__(self, folder: Path, me: PeerId, records: Iterable[DurableRecord], *, take_over: bool) -> None:
        """records: all that the agreement log holds.

        Raises ConfigError where this folder may not go on, StorageError.
        """
        self._path = folder / NAME
        self._me = me
        self._signed_to = max(((r.term, r.round) for r in records), default=(Term(), 0))
        self._seen = trio.Event()
        self._boot = 0
        self.sighting = self._load()
        if self.sighting is not None and not self.sighting.taken_over:
            if not take_over:
                raise ConfigError(self._text(self.sighting))
            self._keep(msgspec.structs.replace(self.sighting, taken_over=True))

    def _load(self) -> Sighting | None:
        with disk_errors(self._path.parent):
            if not self._path.exists():
                return None
            data = self._path.read_bytes()
        try:
            return decode(data, Sighting)
        except RemoteError:
            return Sighting(boot=0, term=Term(), round=0)  # that there is one is what counts

    def _keep(self, sighting: Sighting) -> None:
        write_atomically(self._path, canonical(sighting))
        self.sighting = sighting

    @property
    def other_boot(self) -> int:
        """Number of times that the key was started elsewhere, as far as is known."""
        return 0 if self.sighting is None else self.sighting.boot

    def started(self, boot: int) -> None:
        """This node was started so often, this time included."""
        self._boot = boot

    # -- what shows another ----------------------------------------------------------------------------------

    def saw_record(self, record: NodeRecord) -> None:
        """This key signed a record that this node did not, further on than it is. Raises StorageError."""
        term = Term(*record.term)
        self._saw(Sighting(boot=record.boot, term=term, round=record.round + 1))

    def saw_entry(self, entry: Entry, records: Iterable[DurableRecord]) -> None:
        """An entry is about to be part of the chain; records: what this folder is bound to. Raises StorageError."""
        if not isinstance(entry, Certificate) or self._me not in entry.signers:
            return
        value, position = entry.value, (entry.value.term, entry.value.round)
        known = [record for record in records if (record.term, record.round) == position]
        votes = {(record.view, record.value.hash) for record in known if record.kind == "vote" and record.value}
        is_complete = bool(known) or position > self._signed_to  # what was decided before that may be pruned
        if not is_complete or (entry.view, value.hash) in votes:
            return
        if self.sighting is not None and self.sighting.taken_over:  # what is known of, further on than was known
            self.sighting = msgspec.structs.replace(self.sighting, term=value.term, round=value.round)
        else:
            self._saw(Sighting(boot=0, term=value.term, round=value.round))

    def _saw(self, sighting: Sighting) -> None:
        if self._seen.is_set() and sighting.position <= self._require().position:
            return
        self._keep(sighting)
        self._seen.set()

    def _require(self) -> Sighting:
        assert self.sighting is not None
        return self.sighting

    def _text(self, sighting: Sighting) -> str:
        how = (
            f"a node with it was started {sighting.boot} times" + (f", this one {self._boot}" if self._boot else "")
            if sighting.boot
            else f"it signed in round {sighting.round}, of which this folder knows nothing"
        )
        return (
            f"the key in {self._path.parent} is in use elsewhere: {how}; go on with that copy, and remove this one; if "
            "that one is gone for good, start this one with `shoal run --take-over`"
        )

    # -- what follows ----------------------------------------------------------------------------------------

    @property
    def ends(self) -> bool:
        """True if this node is to end, and signs nothing more."""
        return self._seen.is_set()

    def abstains(self, head: Value) -> bool:
        """Return True while a node whose chain has this head may not sign yet in what comes after it.

        Forgets the other use once it is over. Raises StorageError.
        """
        sighting = self.sighting
        if sighting is None or self.ends:
            return self.ends
        passed = self._me not in head.members and (head.term, head.round) >= sighting.position
        if not passed and head.term.rebases <= sighting.term.rebases:
            return True
        logger.warning("what the key of this node signed elsewhere is over: it takes part again")
        with disk_errors(self._path.parent):
            self._path.unlink(missing_ok=True)
        self.sighting, self._signed_to = None, (head.term, head.round)
        return False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Raises ConfigError once another node with this key is seen: it says which copy may go on, and how."""
        task_status.started()
        await self._seen.wait()
        raise ConfigError(self._text(self._require()))


def abstention(sighting: Sighting) -> str:
    """One line for the user of a node that took over its key."""
    return (
        f"this node took over its key, which may have signed elsewhere up to round {sighting.round}: it follows the "
        "rounds and signs again once one is certified without it, or after `shoal rebase --keep-all` at the authority's"
    )
