"""A machine that moves: what this node does when its addresses are others than before.

    addresses looked at anew ──► proofs of old ones dropped, the router's mapping too      `Reaching`
                             ──► lanes and links from old ones ended, made again at once   `LanePool`, `Members`
                             ──► a new record told to all; local network, meeting points   `Finding`, `Rendezvous`

What does not lead from an address that is gone stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import trio

from shoal.node.discovery.alone import NO_NETWORK
from shoal.node.outcome import Notice
from shoal.node.parts import Parts
from shoal.node.reporting import events
from shoal.swarm.host import Host
from shoal.swarm.reaching.own_addresses import AddressChange, OwnAddresses, own_addresses, usable_hosts

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1"})


class Moving:
    """Watches this machine's addresses. A service of the node. told: who is to know of a change beside, in order."""

    def __init__(
        self,
        parts: Parts,
        told: Sequence[Callable[[AddressChange], None]],
        *,
        watch: Callable[[], AbstractContextManager[OwnAddresses]] = own_addresses,
    ) -> None:
        self._parts, self._told, self._watch = parts, told, watch

    def connect_anew(self) -> None:
        """Make all connections anew, as if every address of this machine had gone and come back."""
        here = usable_hosts() | LOOPBACK_HOSTS
        self._carry_out(AddressChange(gone=here, come=here))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        with self._watch() as own:
            task_status.started()
            while True:
                self._moved(await own.next_change())

    def _moved(self, change: AddressChange) -> None:
        parts, gone, come = self._parts, tuple(sorted(change.gone)), tuple(sorted(change.come))
        parts.host.renew_addresses()
        parts.lanes.renew_addresses()
        if gone or come:
            parts.events.write(events.AddressesChanged(gone=gone, come=come))
            parts.on_progress(Notice(text=_text(parts.host, gone, come)))
        self._carry_out(change)

    def _carry_out(self, change: AddressChange) -> None:
        parts = self._parts
        for tell in self._told:
            tell(change)
        parts.lanes.end_from(change.gone)
        parts.host.dial_anew()
        parts.members.moved(change.gone)


def _text(host: Host, gone: Sequence[str], come: Sequence[str]) -> str:
    return moved_text(gone, come, listens=bool(host.addresses), cut_off=host.is_cut_off)


def moved_text(gone: Sequence[str], come: Sequence[str], *, listens: bool, cut_off: bool) -> str:
    """Text for the user of a machine whose addresses are others.

    listens: this node can be dialled at one of them. cut_off: there is none left but the machine's own.
    """
    lost = f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
    new = f"{', '.join(come)} {'is' if len(come) == 1 else 'are'} new" if come else ""
    text = f"this machine's addresses changed: {', '.join(filter(None, (lost, new)))}"
    if cut_off:
        return f"{text}; {NO_NETWORK}"
    if not listens:
        return f"{text}; nobody can dial this node: start it with --listen /ip4/0.0.0.0/tcp/0 for all addresses"
    return f"{text}; links are made anew and the others are told" if gone else f"{text}; the others are told"
