"""Finding the swarm: every way at once, under deadlines, and what was found is remembered for the next start.

    --join, the link's addresses, [network] bootstrap    each until a link comes of it, or its peer says no; one that
                                                         has no place left is asked again, less and less often
    peers.json, the address book                         at the start, and again while nobody is linked
    multicast DNS                                        as long as the node runs

Whoever is reached tells of all others it knows (`Welcome`, gossip), and `Members` dials those: one member that lives
suffices to find everyone. A user whose node is linked with nobody is told so after ALONE_S, and every ALONE_PERIOD_S.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from shoal.node.discovery.alone import Alone
from shoal.node.discovery.rendezvous import wants_table
from shoal.node.options import NodeConfig
from shoal.node.outcome import Notice, Progress
from shoal.node.state.store import write_atomically
from shoal.protocol.address import parse_any
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import SwarmSection
from shoal.swarm.address_book import BOOK_LIMIT_BYTES, AddressBook, KnownPeer
from shoal.swarm.host import Host
from shoal.swarm.links import Links, NoPlaceLeft, Refused
from shoal.swarm.members import Change, Members
from shoal.swarm.reaching.own_addresses import AddressChange
from shoal.swarm.transport import NobodyListens

BOOK_NAME = "peers.json"
JOIN_DEADLINE_S = 10.0
JOIN_RETRY_S = 2.0
FULL_RETRY_LIMIT_S = 60.0
"""Between two goes at an address whose node has no place left, JOIN_RETRY_S at first, doubled each time."""
BOOK_DIAL_DEADLINE_S = 5.0
BOOK_DIALS_LIMIT = 64
"""Peers of the book that are dialled at once: who comes first, then the best of the others."""
BOOK_RETRY_S, BOOK_RETRY_LIMIT_S = 5.0, 60.0
"""Between two goes at the book while nobody is linked, doubled each time."""
BOOK_SETTLE_S = 1.0
"""After a change, until the book is written: links come in bunches."""
BOOK_PERIOD_S = 60.0
"""Between two looks at where the linked peers are."""
ALONE_S, ALONE_PERIOD_S = 7.0, 60.0
"""Without any link, until the user is told; and between two times."""

logger = logging.getLogger(__name__)


def peers_of(addresses: Iterable[str]) -> frozenset[PeerId]:
    """The peers that these addresses name; those that are none name nobody."""
    found: set[PeerId] = set()
    for text in addresses:
        with contextlib.suppress(ConfigError):
            found.add(parse_any(text).peer)
    return frozenset(found)


def _key_alone(swarm: SwarmSection) -> frozenset[PeerId]:
    """The authority, where it is no founder: mostly a key that nobody runs a node with."""
    return frozenset((PeerId(swarm.authority),)).difference(swarm.founders)


def read_book(path: Path) -> AddressBook:
    """The book in a file, an empty one if there is none or it is damaged. Blocks, raises nothing."""
    try:
        with path.open("rb") as file:
            return AddressBook.parse(file.read(BOOK_LIMIT_BYTES + 1))
    except FileNotFoundError:
        return AddressBook()
    except (OSError, ValueError) as error:
        logger.warning("the address book %s is ignored: %s", path, error)
        return AddressBook()


class Finding:
    """One node's ways to its swarm. `run` it, and tell it of the members' changes."""

    def __init__(
        self,
        *,
        folder: Path,
        config: NodeConfig,
        host: Host,
        members: Members,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._path = folder / BOOK_NAME
        self._config = config
        self._host = host
        self._members = members
        self._links: Links = members.links
        self._on_progress = on_progress
        self._refusals: dict[str, str] = {}  # by address, or by peer of the book
        self._full: set[str] = set()  # of the addresses, those whose node had no place left
        self._named_tried = False
        self._book_refuses = False  # all that it names, at the last go
        self._worked: dict[PeerId, str] = {}  # of the addresses that the user named
        self._changed = trio.Event()  # the book is not what is on disk
        self._alone = trio.Event()  # the last link was lost
        self._moved = trio.Event()  # this machine is in another network
        self._left: set[PeerId] = set()  # of whom it would look for, those who took their leave
        self._alone_since: float | None = None
        self._failed: dict[str, str] = {}  # by address that the user named
        self.book = read_book(self._path)
        self.book.first = members.admission.first

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look for the swarm until cancelled.

        Raises ConfigError where nobody is linked, and all whom the user and the book name refuse this node.
        """
        named = tuple(dict.fromkeys((*self._config.join, *self._config.manifest.network.bootstrap)))
        first = self._members.admission.first()
        of_book = (text for known in self.book.best() if known.peer in first for text in known.addresses)
        self._members.expect_from((*named, *of_book))
        self._alone_since = None if self._links.linked() else trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_alone)
            nursery.start_soon(self._keep_book)
            nursery.start_soon(self._seek_known)
            if self._config.mdns:
                nursery.start_soon(self._discover)
            nursery.start_soon(self._join_all, named)
            task_status.started()

    def heard(self, change: Change) -> None:
        """Take note of a change of a peer: linked, lost or revoked."""
        if self._members.left_in_order(change):
            self._left = {*self._left, change.peer} & self._members.admission.first()
        elif change.kind == "linked":
            self._left.discard(change.peer)
            self._refusals.pop(change.peer, None)
            self._note(change.peer)
            self._alone_since = None
        elif change.kind == "lost" and not self._links.linked():
            self._alone.set()
            self._alone_since = trio.current_time()
        elif change.kind == "revoked":
            self.book.forget(change.peer)
            self._changed.set()

    def moved(self, change: AddressChange) -> None:
        """Own addresses are others: the local network is another one, and who was not reached there may be here."""
        self._moved.set()
        self._moved = trio.Event()

    # -- nobody is found -----------------------------------------------------------------------------------------

    @property
    def alerts(self) -> list[str]:
        """A line for the user while this node has looked for others for ALONE_S, and is linked with nobody."""
        wanted = self._members.admission.first() - {self._host.peer_id} - _key_alone(self._config.manifest.swarm)
        wanted -= self._left
        seconds = 0.0 if self._alone_since is None else trio.current_time() - self._alone_since
        if seconds < ALONE_S or not wanted or self._links.linked():
            return []
        alone = Alone(
            seconds=seconds,
            wanted=wanted,
            tried=self._failed,
            given=len({*self._config.join, *self._config.manifest.network.bootstrap}),
            in_book=len(self.book.in_order()),
            locally=self._config.mdns,
            publicly=wants_table(self._config) or bool(self._config.hivemind),
            cut_off=self._host.is_cut_off,
        )
        return [alone.line]

    async def _tell_alone(self) -> None:
        told_at = -math.inf
        while True:
            await trio.sleep(ALONE_S)
            now = trio.current_time()
            if now - told_at >= ALONE_PERIOD_S and (alerts := self.alerts):
                told_at = now
                self._on_progress(Notice(text=alerts[0]))

    # -- the addresses that the user named ---------------------------------------------------------------------

    async def _join_all(self, addresses: Iterable[str]) -> None:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(self._join, address)
        self._named_tried = True
        self._check_welcome()

    def _check_welcome(self) -> None:
        welcome = self._links.linked() or self._host.peer_id in self._config.manifest.swarm.founders
        if self._named_tried and self._book_refuses and self._refusals and not welcome:
            self._members.admission.check_own(self._host.peer_id)  # it may know by now that it is revoked: it says that
            raise ConfigError(
                f"no member lets this node in: {next(iter(self._refusals.values()))}; ask who runs the swarm"
            )

    async def _join(self, address: str) -> None:
        """Keep trying one address until a link comes of it, or its peer says no."""
        full = Backoff(JOIN_RETRY_S, FULL_RETRY_LIMIT_S)
        while True:
            try:
                peer = await self._links.join(address, deadline_s=JOIN_DEADLINE_S)
            except NoPlaceLeft as error:
                self._note_full(address, error)
                await trio.sleep(full.next_s())
                if self._links.linked() and not self._members.links_all:
                    return  # others of whom it told this node do as well
                continue
            except NetworkError as error:
                news = self._failed.get(address) != str(error)
                logger.log(logging.INFO if news else logging.DEBUG, "cannot join through %s yet: %s", address, error)
                self._failed[address] = str(error)
                if not isinstance(error, NobodyListens):
                    self._members.probe.shut_out([address])
            except ConfigError as error:
                logger.warning("%s", error)  # a bootstrap list may well name this very node
                return
            except RemoteError as error:
                self._note_refusal(address, error)
                return
            else:
                self._failed.pop(address, None)
                self._worked[peer] = address
                self._note(peer)
                return
            await trio.sleep(JOIN_RETRY_S)

    def _note_full(self, address: str, error: NoPlaceLeft) -> None:
        if address not in self._full:  # once is enough for the user
            self._full.add(address)
            self._on_progress(Notice(text=f"{address}: {error}"))
        else:
            logger.info("%s: %s", address, error)

    def _note_refusal(self, who: str, error: RemoteError) -> None:
        if who not in self._refusals:  # once is enough for the user
            self._on_progress(Notice(text=f"{who}: {error}"))
        if isinstance(error, Refused):
            self._refusals[who] = str(error)

    # -- the address book --------------------------------------------------------------------------------------

    def _note(self, peer: PeerId) -> None:
        """Enter a linked peer with the address that worked, then those that it says it has."""
        worked = (self._worked[peer],) if peer in self._worked else ()
        if self.book.linked(peer, (*worked, *self._members.addresses_of(peer))):
            self._changed.set()

    async def _keep_book(self) -> None:
        """Write the book when it has changed. A disk that cannot be written costs the book, not the node."""
        while True:
            with trio.move_on_after(BOOK_PERIOD_S):
                await self._changed.wait()
                await trio.sleep(BOOK_SETTLE_S)
            for peer in self._links.linked():
                self._note(peer)
            if self._changed.is_set():
                self._changed = trio.Event()
                try:
                    await trio.to_thread.run_sync(write_atomically, self._path, self.book.to_bytes())
                except StorageError as error:
                    logger.warning("the address book is not written: %s", error)

    async def _seek_known(self) -> None:
        """Dial whom the book names, now and whenever nobody is linked."""
        retries = Backoff(BOOK_RETRY_S, BOOK_RETRY_LIMIT_S)
        while True:
            self._alone = trio.Event()
            dialled = self.book.in_order()[: min(BOOK_DIALS_LIMIT, self._members.links_wanted)]
            async with trio.open_nursery() as nursery:
                for known in dialled:
                    nursery.start_soon(self._seek, known)
            self._book_refuses = all(known.peer in self._refusals for known in dialled)
            self._check_welcome()
            if self._links.linked():
                await self._alone.wait()
                retries.reset()
            else:
                with trio.move_on_after(retries.next_s()):
                    await self._moved.wait()

    async def _seek(self, known: KnownPeer) -> None:
        peer = PeerId(known.peer)
        if peer == self._host.peer_id or self._members.admission.reason_not_to_know(peer) is not None:
            return
        try:
            await self._links.meet(peer, known.addresses, deadline_s=BOOK_DIAL_DEADLINE_S)
        except NoPlaceLeft as error:
            logger.info("%s", error)
        except NetworkError as error:
            logger.debug("not where it was: %s", error)
            self._refusals.pop(peer, None)
            self.book.failed(peer)
            self._changed.set()
        except RemoteError as error:
            self._note_refusal(peer, error)
            self.book.failed(peer)
            self._changed.set()

    # -- the local network -------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Announce this node and find others on the local network, and begin anew whenever it is another one."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._discover_here)
                await self._moved.wait()
                nursery.cancel_scope.cancel()

    async def _discover_here(self) -> None:
        from shoal.swarm.rendezvous.mdns import LocalDiscovery  # 7 MB, for who does not say --no-mdns

        discovery = LocalDiscovery(
            peer=self._host.peer_id,
            swarm_id=self._config.manifest.swarm_id.hex(),
            addresses=self._host.addresses,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(discovery.run)
            async for found in discovery.found:
                self._members.found(found.peer, found.addresses)
