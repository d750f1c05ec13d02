"""The verdict of `shoal bench hostile`: whether anything in a swarm was taken over, by the values on its nodes' disks.

That nodes go on says nothing about it. So every certificate of every honest node's `chain.log` is checked again, from
genesis on and none of them trusted; the chains are compared; and what they name is compared with who there really was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.node.state.store import read_records
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Entry, Rebase, Value
from shoal.protocol.wire import SwarmId, decode

CHAIN_NAME = "chain.log"


def problems_of(
    manifest: Manifest,
    honest: Mapping[PeerId, Path],
    liar: PeerId | None = None,
    *,
    struck: Collection[PeerId] = (),
    last: float = math.inf,
) -> tuple[str, ...]:
    """Signs that somebody took something over, a line each; none if nobody did.

    honest: the folders of the honest nodes, which may still append to their chains. liar: the member that was struck
    with, which may be banned, left out or said to have left. struck: honest nodes that may have left or be no members,
    since something else was done to them or they came late. last: the last round that is looked at. Blocks while it
    reads.
    """
    unharmed = honest.keys() - set(struck)
    found: list[str] = []
    decided: dict[tuple[str, int], Value] = {}
    for peer, folder in honest.items():
        chain = _Reading(manifest, unharmed, {*honest, *struck}, liar)
        chain.read(read_records(folder / CHAIN_NAME)[0], last)
        found += (f"{folder.name}: {problem}" for problem in chain.problems)
        for value in chain.values:
            position = str(value.term), value.round
            other = decided.setdefault(position, value)
            if other.hash != value.hash:
                found.append(f"{folder.name}: two values for round {position[1]} of term {position[0]}")
        missing = sorted(unharmed - set(chain.head.members))
        if missing:
            found.append(f"{folder.name}: after its last certificate {', '.join(missing)} are no members")
        if not chain.values:
            found.append(f"{folder.name}: {peer} certified nothing")
    return tuple(dict.fromkeys(found))


class _Reading:
    """One chain, as far as it holds."""

    def __init__(
        self, manifest: Manifest, unharmed: Collection[PeerId], honest: Collection[PeerId], liar: PeerId | None
    ) -> None:
        founders = manifest.swarm.founders
        self._chain = Chain(genesis(SwarmId(manifest.swarm_id), founders), manifest.swarm.authority, manifest=manifest)
        self._unharmed, self._honest = set(unharmed), set(honest)
        self._known = {*honest, *([] if liar is None else [liar])}
        self.problems: list[str] = []
        self.values: list[Value] = []

    @property
    def head(self) -> Value:
        """The last value that holds."""
        return self._chain.head

    def read(self, records: Sequence[bytes], last: float) -> None:
        """Take all entries up to round `last`, or up to the first that does not hold."""
        for record in records:
            entry: Entry = decode(record, Entry)  # type: ignore[arg-type]
            if entry.value.round > last:
                return
            if isinstance(entry, Rebase):
                self.problems.append(f"a rebase to term {entry.value.term}, which nobody ordered")
            try:
                self._chain.extend(entry)
            except RemoteError as error:
                self.problems.append(f"what does not hold was believed: {error}")
                return
            self.values.append(entry.value)
            self._look_at(entry.value)

    def _look_at(self, value: Value) -> None:
        """Check that a value names as members, leaves and bans only peers it may, and does not go back."""
        names: dict[str, set[Any]] = {
            "strangers are members": set(value.members) - self._known,
            "left who did not": set(value.leaves) & self._unharmed,
            "banned who did nothing": {ban.peer for ban in _given(value.bans)} & self._honest,
        }
        for what, who in names.items():
            if who:
                self.problems.append(f"by the certificate of round {value.round} {what}: {', '.join(sorted(who))}")
        if value.rollback:
            self.problems.append(f"round {value.round} went back, which nobody ordered")


def _given(bans: Sequence[Any] | msgspec.UnsetType) -> Sequence[Any]:
    return () if isinstance(bans, msgspec.UnsetType) else bans
