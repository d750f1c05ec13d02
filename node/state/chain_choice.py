"""Which chain a newcomer takes: one that contains its link's checkpoint, and without one only what all serve alike.

    asked        every linked peer, and every place that the user named where one peer is said to be in several
    checked      each chain entry by entry, from what is here on; what does not hold is its server's fault, and left out
    checkpoint   a chain that does not contain it is refused by name; the others are taken as they come
    without one  two chains of which neither is the beginning of the other are both refused, and the node stops

A chain from before a newer rebase is no second chain: that the authority went on elsewhere is its signed word. Nothing
is kept before the choice is made. A node that has certificates takes what follows them; should it see others for one
round later, that is a fork (`fork_watch`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from shoal.node.outcome import Notice, Progress
from shoal.node.state.chain_comparison import AskChain, difference, fetched_after
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.forks import Checkpoint, shown
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Entry
from shoal.protocol.peering import ChainPart

SETTLE_S = 2.0
"""Seconds for which peers that are known and not linked yet are waited for, once."""
HEADS_TIMEOUT_S = 2.0
"""After the first peer said how long its chain is, the others have this long to be counted."""
ASKED_LIMIT = 32
"""Peers whose chains are compared."""
REFUSED_LIMIT_PEERS = 256
"""Peers whose chain was refused, of which the user was told."""

logger = logging.getLogger(__name__)

Ask = Callable[[int, PeerId, int], Awaitable[ChainPart]]
Elsewhere = Callable[[PeerId, Chain], Awaitable[Mapping[str, Chain]]]
"""Fetches what one peer serves at each of several places, by place, each after a chain of its own."""


async def _nowhere_else(peer: PeerId, base: Chain) -> Mapping[str, Chain]:
    await trio.lowlevel.checkpoint()
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceParts:
    """Parts that a choice works with.

    ask: entries after so many, of a peer, for who knows of so many rebases. known: peers that may be linked soon;
    next_linked returns when one more is.
    elsewhere: of the places where the user said that one peer is, if there are several.
    """

    chain: Chain
    ask: Ask
    linked: Callable[[], frozenset[PeerId]]
    tell: Callable[[Progress], None]
    checkpoint: Checkpoint | None = None
    known: Callable[[], frozenset[PeerId]] = frozenset
    next_linked: Callable[[], Awaitable[None]] = trio.sleep_forever
    elsewhere: Elsewhere = _nowhere_else


class ChainChoice:
    """Choice among the chains of others, by a node without certificates or without the one that its link names."""

    def __init__(self, parts: ChoiceParts) -> None:
        """Raises ConfigError if the chain that is here contradicts the link."""
        self._p = parts
        self._told: set[PeerId] = set()
        self._settled = False
        checkpoint, chain = parts.checkpoint, parts.chain
        if checkpoint is not None and chain.height and not chain.allows(checkpoint) and _is_past(chain, checkpoint):
            raise ConfigError(
                f"the chain in this data folder is another than the link's, which has {checkpoint}; ask somebody whom "
                "you trust which one is right, and choose another --data-dir to join by this link"
            )

    @property
    def pending(self) -> bool:
        """True if there is a choice to make."""
        checkpoint = self._p.checkpoint
        return not self._p.chain.height or (checkpoint is not None and not self._p.chain.allows(checkpoint))

    async def choose(self) -> Sequence[Entry]:
        """The entries to take after those that are here; none if no peer has a chain that may be taken now.

        Raises ConfigError, which names who serves what, where peers serve two chains and nothing says which is right.
        Cancellation: nothing was taken.
        """
        if not self._p.linked():
            return ()
        await self._settle()
        served = await self._served()
        taken: tuple[str, Chain] | None = None
        for who, chain in sorted(served.items(), key=lambda one: (-one[1].height, one[0])):
            taken = (who, chain) if taken is None else _newer(taken, (who, chain))
        if taken is None:
            return ()
        entries = taken[1].entries
        return entries[_common_height(self._p.chain.entries, entries) :]

    async def _settle(self) -> None:
        """Give peers that are known, and not linked yet, the time to be."""
        if not self._settled:
            self._settled = True
            with trio.move_on_after(SETTLE_S):
                while not self._p.known() <= self._p.linked():
                    await self._p.next_linked()

    async def _served(self) -> dict[str, Chain]:
        """Fetch the chains that may be taken, by who serves them; without those that are the beginning of another."""
        parts = await self._first_parts()
        order = sorted(parts, key=lambda peer: (-parts[peer].head, peer))
        found: dict[str, Chain] = {}
        longest: Chain | None = None
        for place, peer in enumerate(order):
            await self._fetch(peer, parts[peer], None, found)
            longest = next(iter(found.values()), None)
            if longest is not None:
                async with trio.open_nursery() as nursery:
                    for other in order[place + 1 :]:
                        nursery.start_soon(self._fetch, other, parts[other], longest, found)
                break
        return found

    async def _first_parts(self) -> dict[PeerId, ChainPart]:
        """The first that each linked peer has beyond what is here, and how many it has in all."""
        found: dict[PeerId, ChainPart] = {}
        height = self._p.chain.height

        async def ask(peer: PeerId) -> None:
            try:
                part = await self._p.ask(height, peer, self._p.chain.head.term.rebases)
            except (NetworkError, RemoteError) as error:
                logger.info("certificates from %s: %s", peer, error)
            else:
                if part.certificates:
                    found[peer] = part
                    nursery.cancel_scope.deadline = min(
                        nursery.cancel_scope.deadline, trio.current_time() + HEADS_TIMEOUT_S
                    )

        async with trio.open_nursery() as nursery:
            for peer in sorted(self._p.linked())[:ASKED_LIMIT]:
                nursery.start_soon(ask, peer)
        return found

    async def _fetch(self, peer: PeerId, first: ChainPart, longest: Chain | None, found: dict[str, Chain]) -> None:
        """Add what a peer serves to `found`, unless it is the beginning of `longest`, or may not be taken."""
        ask = self._asking(peer)
        try:
            if longest is None or (await difference(longest.entries, ask)).theirs is not None:
                chain = await fetched_after(self._copy(), ask, self._extend, first=first)
                if chain.head.hash != self._p.chain.head.hash and self._allowed(peer, chain):
                    found[peer] = chain
            if self._p.checkpoint is None and not self._p.chain.height:
                self._add_places(peer, await self._p.elsewhere(peer, self._copy()), found)
        except (NetworkError, RemoteError) as error:
            logger.info("certificates from %s: %s", peer, error)

    def _extend(self, chain: Chain, entry: Entry) -> bool:
        """Append an entry; beneath the checkpoint, to which all must lead in the end, it may be one of 0.1.0."""
        checkpoint = self._p.checkpoint
        beneath = checkpoint is not None and (entry.value.term, entry.value.round) <= checkpoint.position
        return chain.extend(entry, trusted=beneath)

    @staticmethod
    def _add_places(peer: PeerId, places: Mapping[str, Chain], found: dict[str, Chain]) -> None:
        """Name a peer by the places where it is, and by itself only where its link leads to none of them."""
        linked = found.get(peer)
        served = {f"{peer} at {place}": chain for place, chain in places.items() if chain.height}
        if linked is not None and not all(_parted(linked, chain) for chain in served.values()):
            del found[peer]
        found.update(served)

    def _copy(self) -> Chain:
        return self._p.chain.up_to(self._p.chain.height)

    def _asking(self, peer: PeerId) -> AskChain:
        async def ask(after: int, rebases: int) -> ChainPart:
            return await self._p.ask(after, peer, rebases)

        return ask

    def _allowed(self, peer: PeerId, chain: Chain) -> bool:
        checkpoint = self._p.checkpoint
        if checkpoint is None or chain.allows(checkpoint):
            return True
        if _is_past(chain, checkpoint) and peer not in self._told and len(self._told) < REFUSED_LIMIT_PEERS:
            self._told.add(peer)
            text = (
                f"{peer} serves another chain than the link's, without {checkpoint}: not taken; should nobody serve "
                "the right one, ask somebody whom you trust for a fresh link (`shoal link`)"
            )
            logger.warning("%s", text)
            self._p.tell(Notice(text=text))
        return False


def _is_past(chain: Chain, checkpoint: Checkpoint) -> bool:
    """True if a chain is beyond a checkpoint, so that it has it by now or never."""
    return (chain.head.term, chain.head.round) >= checkpoint.position


def _newer(one: tuple[str, Chain], other: tuple[str, Chain]) -> tuple[str, Chain]:
    """Return the one of two chains that goes on from the other. Raises ConfigError if neither does."""
    (_, first), (_, second) = one, other
    if first.head.term.rebases != second.head.term.rebases:
        return max(one, other, key=lambda served: served[1].head.term.rebases)
    common = _common_height(first.entries, second.entries)
    if common == second.height:
        return one
    if common == first.height:
        return other
    round = first.entries[common].value.round
    sides = " and ".join(
        f"{who} serves {shown(chain.entries[common].value.hash)} (up to round {chain.head.round})"
        for who, chain in (one, other)
    )
    raise ConfigError(
        f"there are two chains of this swarm, which part at round {round}: {sides}; neither is taken: ask somebody "
        "whom you trust for a fresh link (`shoal link` at a member) and start again with it, on an empty --data-dir"
    )


def _parted(one: Chain, other: Chain) -> bool:
    return _common_height(one.entries, other.entries) < min(one.height, other.height)


def _common_height(one: Sequence[Entry], other: Sequence[Entry]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:  # what agrees at one height agrees below it
        middle = (low + high + 1) // 2
        if one[middle - 1].value.hash == other[middle - 1].value.hash:
            low = middle
        else:
            high = middle - 1
    return low
