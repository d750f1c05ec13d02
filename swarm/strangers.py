"""Parting from strangers: who dialled this node and is not admitted, or said a hello over whatever connection there is.

* Whose hello was not admitted STRANGER_DEADLINE_S after it came goes, and so do the oldest of more than STRANGER_LIMIT;
  of those who come first none goes for their number.
* Whose hello was refused goes REFUSED_STAY_S later, when the refusal has been read. Who has said REFUSALS_LIMIT such
  hellos by then goes with its next stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from shoal.protocol.identity import PeerId
from shoal.swarm.host import Host
from shoal.swarm.limits import STRANGER_DEADLINE_S, STRANGER_LIMIT, STRANGERS_LOOK_S, Reason

REFUSED_STAY_S = 1.0
STRANGERS_REST_S = 5.0
"""Between two looks where there was no stranger: one that comes is looked at all the same."""
REFUSALS_LIMIT = 4
"""More than who was given several addresses of this node says at once."""


@dataclass(slots=True)
class _Refused:
    """Over which connection, since when, and how many hellos."""

    connection: object
    at: float
    hellos: int = 0


class Strangers:
    """Those of one host. `run` it, and tell it who was refused."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._refused: dict[PeerId, _Refused] = {}
        host.is_refused = self._is_refused

    def refused(self, peer: PeerId) -> None:
        """A hello of `peer`, which is connected, is being answered with a refusal."""
        connection, known = self._host.connection(peer), self._refused.get(peer)
        if known is None or known.connection is not connection:
            known = self._refused[peer] = _Refused(connection, trio.current_time())
        known.hellos += 1

    def _is_refused(self, peer: PeerId) -> bool:
        known = self._refused.get(peer)
        return known is not None and known.hellos >= REFUSALS_LIMIT

    async def run(self) -> None:
        """Look and part, until cancelled; seldom where there is nobody to part from."""
        changes = self._host.watch()
        while True:
            if not await self._look(trio.current_time()):
                with trio.move_on_after(STRANGERS_REST_S):
                    await changes.receive()
            await trio.sleep(STRANGERS_LOOK_S)

    async def _look(self, now: float) -> bool:
        """Part from whom it is time to part from; True if there is anybody."""
        strangers = self._host.strangers()
        self._refused = {peer: one for peer, one in self._refused.items() if self._stands(peer, one)}
        others = [peer for _, peer in strangers if not self._host.comes_first(peer)]
        reasons = {peer: Reason.SILENT for since, peer in strangers if now - since > STRANGER_DEADLINE_S}
        reasons |= {peer: Reason.REFUSED for peer, one in self._refused.items() if now - one.at >= REFUSED_STAY_S}
        reasons |= dict.fromkeys(others[: max(0, len(others) - STRANGER_LIMIT)], Reason.STRANGERS)
        async with trio.open_nursery() as nursery:  # who reads nothing takes its time to part from
            for peer, reason in reasons.items():
                self._host.refusals.note(reason)
                self._refused.pop(peer, None)
                nursery.start_soon(self._host.close, self._host.connection(peer))
        return bool(strangers or self._refused)

    def _stands(self, peer: PeerId, refused: _Refused) -> bool:
        """True unless the connection over which it was said is gone, or the peer was admitted after all."""
        return refused.connection is self._host.connection(peer) is not None and not self._host.is_admitted(peer)
