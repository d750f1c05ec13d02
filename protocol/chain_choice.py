"""Which chain a newcomer takes: one that contains its link's checkpoint, and without one only what all serve alike.

    asked        every linked peer, and every place that the user named where one peer is said to be in several
    first        the longest that is claimed; who serves it slowly is put off, and the next goes on from what came of it
    then         all others at once, each from where its chain parts from that one: nobody is left out for being slow
    checked      each chain entry by entry, from what is here on; what does not hold is its server's fault, and left out
    checkpoint   a chain that does not contain it is refused by name; the others are taken as they come
    without one  two chains of which neither is the beginning of the other are both refused, and the node stops

A chain from before a newer rebase is no second chain: that the authority went on elsewhere is its signed word. Nothing
is kept before the choice is made. A node that has certificates takes what follows them; should it see others for one
round later, that is a fork (fork_watch.py).

Choosing is part of an errand (errands.py); what is chosen is for who made the errand to take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from shoal.protocol.chain import Chain
from shoal.protocol.chain_comparison import Difference, after, difference, extended
from shoal.protocol.errands import AskEntries, AwaitLinks, Clock, Errand, InTurn, LookElsewhere, Steps, Warn
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.forks import Checkpoint, shown
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Entry
from shoal.protocol.peering import ChainPart
from shoal.protocol.surroundings import Surroundings

SETTLE_S: Final = 2.0
"""Seconds for which peers that are known and not linked yet are waited for, once."""
HEADS_TIMEOUT_S: Final = 2.0
"""After the first peer said how long its chain is, the others have this long to be counted."""
QUICK_S: Final = 10.0
PER_ENTRY_S: Final = 0.05
"""Seconds, and for each entry, after which who serves a chain is put off as long as others may serve it."""
ASKED_LIMIT: Final = 32
"""Peers whose chains are compared."""
REFUSED_LIMIT_PEERS: Final = 256
"""Peers whose chain was refused, of which the user was told."""

logger = logging.getLogger(__name__)


def check_link(chain: Chain, checkpoint: Checkpoint | None) -> None:
    """Raises ConfigError if the chain that is here contradicts the link, which has a checkpoint."""
    if checkpoint is not None and chain.height and not chain.allows(checkpoint) and _is_past(chain, checkpoint):
        raise ConfigError(
            f"the chain in this data folder is another than the link's, which has {checkpoint}; ask somebody whom "
            "you trust which one is right, and choose another --data-dir to join by this link"
        )


class ChainChoice:
    """Choice among the chains of others, by a node without certificates or without the one that its link names."""

    def __init__(self, here: Surroundings, checkpoint: Checkpoint | None, clock: Clock) -> None:
        self._here = here
        self._checkpoint = checkpoint
        self._clock = clock
        self._told: set[PeerId] = set()
        self._settled = False

    @property
    def pending(self) -> bool:
        """True if there is a choice to make."""
        chain, checkpoint = self._here.chain, self._checkpoint
        return not chain.height or (checkpoint is not None and not chain.allows(checkpoint))

    def choose(self) -> Steps:
        """Choose the entries to take after those that are here; none if no peer has a chain that may be taken now.

        Raises ConfigError, which names who serves what, where peers serve two chains and nothing says which is right.
        """
        if not self._here.linked():
            return ()
        if not self._settled:
            self._settled = True
            yield AwaitLinks(SETTLE_S)
        served: dict[str, Chain] = yield from self._served()
        taken: tuple[str, Chain] | None = None
        for who, chain in sorted(served.items(), key=lambda one: (-one[1].height, one[0])):
            taken = (who, chain) if taken is None else _newer(taken, (who, chain))
        if taken is None:
            return ()
        entries = taken[1].entries
        return entries[_common_height(self._here.chain.entries, entries) :]

    def _served(self) -> Steps:
        """Fetch the chains that may be taken, by who serves them; without those that are the beginning of another."""
        parts: dict[PeerId, ChainPart] = yield from self._first_parts()
        order = sorted(parts, key=lambda peer: (-parts[peer].head, peer))
        found: dict[str, Chain] = {}
        longest, slow = self._copy(), list[PeerId]()
        while order and not found:
            peer = order.pop(0)
            begun: Chain | None = yield from self._fetch(
                longest, found, peer, first=parts[peer], hurries=bool(order or slow)
            )
            if begun is not None:
                longest = begun
                slow.append(peer)
        longest = next(iter(found.values()), longest)
        yield self._of_each((*slow, *order), partial(self._fetch, longest, found))
        return found

    def _of_each(self, peers: Iterable[PeerId], steps: Callable[[PeerId], Steps]) -> InTurn:
        """All at once."""
        return InTurn(tuple(peers), lambda peer: Errand(steps(peer), self._clock), apart_s=0.0)

    def _first_parts(self) -> Steps:
        """The first that each linked peer has beyond what is here, and how many it has in all."""
        found: dict[PeerId, ChainPart] = {}
        chain = self._here.chain
        height, rebases = chain.height, chain.head.term.rebases

        def ask(peer: PeerId) -> Steps:
            try:
                part: ChainPart = yield AskEntries(peer, height, rebases)
            except (NetworkError, RemoteError) as error:
                _log(peer, error)
                return None
            if part.certificates:
                found[peer] = part
            return HEADS_TIMEOUT_S if part.certificates else None

        yield self._of_each(sorted(self._here.linked())[:ASKED_LIMIT], ask)
        return found

    def _fetch(
        self,
        longest: Chain,
        found: dict[str, Chain],
        peer: PeerId,
        *,
        first: ChainPart | None = None,
        hurries: bool = False,
    ) -> Steps:
        """Add what a peer serves to `found`, unless it is the beginning of `longest`, or may not be taken.

        first: what the peer has said already of what follows the chain here. hurries: others may serve it. Comes to
        what there is of its chain where it is put off, or else to None.
        """
        try:
            chain: Chain | None = self._copy()
            if longest.height > self._here.chain.height:
                parts: Difference = yield from difference(longest.entries, peer)
                chain = None if parts.theirs is None else longest.up_to(parts.height)
                if parts.theirs is not None:  # it has to hold, or there is no chain that parts there
                    first = ChainPart(certificates=(parts.theirs,), head=parts.head)
            if chain is not None:
                if not (yield from self._fetch_rest(chain, peer, first, hurries=hurries)):
                    return chain
                if chain.head.hash != self._here.chain.head.hash and (yield from self._allowed(peer, chain)):
                    found[peer] = chain
            if self._checkpoint is None and not self._here.chain.height:
                self._add_places(peer, (yield LookElsewhere(peer, self._copy())), found)
        except (NetworkError, RemoteError) as error:
            _log(peer, error)
        return None

    def _fetch_rest(self, chain: Chain, peer: PeerId, first: ChainPart | None, *, hurries: bool) -> Steps:
        """Go on with a chain by what a peer has after it. Comes to False where it is put off. Raises as asking does."""
        began, height = self._clock.now, chain.height
        part: ChainPart = first if first is not None else (yield after(chain, peer))
        while extended(chain, part, self._extend):
            part = yield after(chain, peer)
            if hurries and self._clock.now - began > QUICK_S + PER_ENTRY_S * (chain.height - height):
                logger.info("%s serves its chain slowly: others are asked first", peer)
                return False
        return True

    def _extend(self, chain: Chain, entry: Entry) -> bool:
        """Append an entry; beneath the checkpoint, to which all must lead in the end, it may be one of 0.1.0."""
        checkpoint = self._checkpoint
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
        return self._here.chain.up_to(self._here.chain.height)

    def _allowed(self, peer: PeerId, chain: Chain) -> Steps:
        """True if a chain may be taken, as far as the link goes."""
        checkpoint = self._checkpoint
        if checkpoint is None or chain.allows(checkpoint):
            return True
        if _is_past(chain, checkpoint) and peer not in self._told and len(self._told) < REFUSED_LIMIT_PEERS:
            self._told.add(peer)
            text = (
                f"{peer} serves another chain than the link's, without {checkpoint}: not taken; should nobody serve "
                "the right one, ask somebody whom you trust for a fresh link (`shoal link`)"
            )
            yield Warn(text)
        return False


def _log(peer: PeerId, error: Exception) -> None:
    logger.info("certificates from %s: %s", peer, error)


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
