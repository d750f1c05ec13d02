"""What a node does when its machine's addresses are others: in which order, and what its user is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from shoal.node.discovery.moving import Moving, moved_text
from shoal.node.outcome import Notice
from shoal.node.reporting.events import AddressesChanged
from shoal.swarm.reaching.own_addresses import AddressChange, Heard, OwnAddresses

OLD, NEW = "192.168.1.5", "10.8.0.7"


class Node:
    """Parts of a node, and all that was done with them, in order."""

    def __init__(self) -> None:
        self.hosts, self.is_cut_off = frozenset({OLD}), False
        self.done: list[object] = []
        self.told = trio.Event()
        self._say, self._heard = trio.open_memory_channel[Heard](1)
        self.parts: Any = self
        self.host = self.lanes = self.members = self.events = self

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.hosts)

    def renew_addresses(self) -> None:
        self.done.append("renewed")

    def write(self, event: AddressesChanged) -> None:
        self.done.append((event.gone, event.come))

    def on_progress(self, progress: Notice) -> None:
        self.done.append(progress.text)

    def reaching_moved(self, change: AddressChange) -> None:
        self.done.append(("proofs of", set(change.gone)))

    def end_from(self, hosts: frozenset[str]) -> None:
        self.done.append(("lanes from", set(hosts)))

    def dial_anew(self) -> None:
        self.done.append("dials")

    def moved(self, gone: frozenset[str]) -> None:
        self.done.append(("links from", set(gone)))
        self.told.set()

    async def next(self) -> Heard:
        return await self._heard.receive()

    @contextlib.contextmanager
    def watch(self) -> Iterator[OwnAddresses]:
        yield OwnAddresses(self, lambda: self.hosts)

    async def become(self, *hosts: str, rerouted: bool = False) -> list[object]:
        self.hosts, self.done, self.told = frozenset(hosts), [], trio.Event()
        await self._say.send(Heard(rerouted=rerouted))
        await self.told.wait()
        return self.done


@pytest.mark.virtual_time(limit_s=60)
async def test_proofs_are_dropped_before_links_are_made_anew_and_the_user_is_told() -> None:
    node = Node()
    async with trio.open_nursery() as nursery:
        await nursery.start(Moving(node.parts, [node.reaching_moved], watch=node.watch).run)
        left = [("proofs of", {OLD}), ("lanes from", {OLD}), "dials", ("links from", {OLD})]
        said = moved_text((OLD,), (NEW,), listens=True, cut_off=False)
        assert await node.become(NEW) == ["renewed", "renewed", ((OLD,), (NEW,)), said, *left]
        nobodys: list[object] = [("proofs of", set()), ("lanes from", set()), "dials", ("links from", set())]
        assert await node.become(NEW, rerouted=True) == ["renewed", "renewed", *nobodys], "nothing to be told"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("gone", "come", "listens", "cut_off", "text"),
    [
        ((OLD,), (NEW,), True, False, f"{OLD} is gone, {NEW} is new; links are made anew and the others are told"),
        ((), (NEW, OLD), True, False, f"{NEW}, {OLD} are new; the others are told"),
        ((OLD,), (), False, False, f"{OLD} is gone; nobody can dial this node: start it with --listen /ip4/0.0.0.0/"),
        ((OLD,), (), True, True, f"{OLD} is gone; this machine has no network; once it has one, this node links again"),
    ],
)
def test_user_reads_what_changed(
    gone: tuple[str, ...], come: tuple[str, ...], listens: bool, cut_off: bool, text: str
) -> None:
    told = moved_text(gone, come, listens=listens, cut_off=cut_off)
    assert told.startswith(f"this machine's addresses changed: {text}")
