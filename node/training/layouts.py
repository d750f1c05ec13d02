"""Comparison of two nodes' models: names and shapes of all parameters, as soon as the nodes are linked.

    GetLayout(after)  ─────►  LayoutPart(digest, total, names, shapes of up to PART_LIMIT_PARAMETERS from `after` on)

Equal digests end it. Otherwise both lists, which are sorted by name, are read side by side up to the first parameter in
which they differ, and users are told its name. A peer's word alone ends nobody: a node stops where the header of the
state that it is about to fetch, which a certificate or the first founder vouches for, is of another layout. That is
before the first chunk comes and before it takes part in any round; the error then names the parameter. Under `gossip`,
which has no common state, the first founder's word alone is enough, and nobody exchanges with a peer of another model:
there each is compared with all, else with ENOUGH. Whose model is another finds that out from any of these.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Annotated

import msgspec
import trio

from shoal.node.outcome import Notice, Progress
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Count
from shoal.protocol.wire import Message, canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.streams import MessageStream

LAYOUT_PROTOCOL = "/shoal/layout/1"
LAYOUT_DEADLINE_S = 10.0
LAYOUT_ANSWER_LIMIT_BYTES = 1 << 20
PART_LIMIT_PARAMETERS = 1024
NAME_LIMIT_CHARS = 256
"""Of a name so much is compared, and shown."""
DIMENSION_LIMIT = 16
DIFFERENCE_LIMIT = 64
"""Other layouts that are remembered."""
ENOUGH = 8
"""Peers whose models are compared with this node's, and as many at once, where a difference is told to the user alone.
"""
RETRY_S, RETRY_LIMIT_S = 2.0, 60.0
"""A peer that has built no model yet, or does not answer, is asked again after so long, which doubles up to the limit,
or when it asks itself."""

_Name = Annotated[str, msgspec.Meta(max_length=NAME_LIMIT_CHARS)]
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=DIMENSION_LIMIT)]

logger = logging.getLogger(__name__)


class GetLayout(Message, frozen=True, kw_only=True):
    """Asks for the parameters after the first `after`."""

    after: Count


class LayoutPart(Message, frozen=True, kw_only=True):
    """Part of a list of `total` parameters; `digest` is that of all, empty where no model is built yet."""

    digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    total: Count
    names: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=PART_LIMIT_PARAMETERS)] = ()
    shapes: Annotated[tuple[_Shape, ...], msgspec.Meta(max_length=PART_LIMIT_PARAMETERS)] = ()


Parameter = tuple[str, tuple[int, ...]]
"""Name and shape."""


def part_of(layout: Layout | None, after: int) -> LayoutPart:
    """Return the answer to `GetLayout(after)`."""
    if layout is None:
        return LayoutPart(digest=b"", total=0)
    end = after + PART_LIMIT_PARAMETERS
    return LayoutPart(
        digest=layout.digest,
        total=len(layout.names),
        names=tuple(name[:NAME_LIMIT_CHARS] for name in layout.names[after:end]),
        shapes=layout.shapes[after:end],
    )


def describe_difference(there: Parameter | None, here: Parameter | None, where: str) -> str:
    """One clause on the first parameter in which two sorted lists differ; None is the end of a list."""
    if there is not None and (here is None or there[0] < here[0]):
        return f"parameter {there[0]!r} of shape {there[1]} is {where} and not here"
    if here is not None and (there is None or here[0] < there[0]):
        return f"parameter {here[0]!r} of shape {here[1]} is here and not {where}"
    assert there is not None
    assert here is not None
    return f"parameter {here[0]!r} has shape {there[1]} {where} and {here[1]} here"


def first_difference(there: Layout, here: Layout, where: str) -> str | None:
    """The same for two whole layouts; None if they are equal."""
    ours, theirs = list(zip(here.names, here.shapes, strict=True)), list(zip(there.names, there.shapes, strict=True))
    for number in range(max(len(ours), len(theirs))):
        mine, other = _at(ours, number), _at(theirs, number)
        if mine != other:
            return describe_difference(other, mine, where)
    return None


def _at(parameters: list[Parameter], number: int) -> Parameter | None:
    return parameters[number] if number < len(parameters) else None


class Layouts:
    """This node's layout beside those of its peers. Use from trio's thread.

    linked: the peers that were admitted. with_all: whether all of them are compared, and not ENOUGH.
    """

    def __init__(
        self,
        *,
        host: Host,
        linked: Callable[[], frozenset[PeerId]],
        on_progress: Callable[[Progress], None],
        with_all: bool = True,
    ) -> None:
        self._enough = math.inf if with_all else ENOUGH
        self._at_once = trio.CapacityLimiter(self._enough)
        self._host = host
        self._linked = linked
        self._on_progress = on_progress
        self._own: Layout | None = None
        self._known = trio.Event()
        self._checked: dict[PeerId, str] = {}  # how its model differs, empty where it does not
        self._differences: dict[bytes, str] = {}  # by the digest of the other layout
        self._watched: dict[PeerId, trio.Event] = {}  # set when it asks: then its model is built

    def know(self, layout: Layout) -> None:
        """The model is built here."""
        self._own = layout
        self._known.set()

    def forget(self, peer: PeerId) -> None:
        """The link with it was lost: it may come back as another."""
        self._checked.pop(peer, None)
        if (watched := self._watched.get(peer)) is not None:
            watched.set()

    def accept(self, digest: bytes) -> None:
        """A state of the layout with this digest is the swarm's.

        Raises ConfigError, naming the parameter as far as a peer told, if the model built here is another.
        """
        if self._own is not None and digest != self._own.digest:
            raise _other_model(
                self._differences.get(digest, "its parameters differ from those of the model built here")
            )

    def accept_model_of(self, peer: PeerId) -> None:
        """Raises ConfigError, naming the parameter, if the model of this peer is known to be another."""
        if self._checked.get(peer):
            raise _other_model(self._checked[peer])

    def alike(self, peers: frozenset[PeerId]) -> frozenset[PeerId]:
        """Peers, out of these, whose model is known to be the one built here."""
        return frozenset(peer for peer in peers if self._checked.get(peer) == "")

    async def watch(self, peer: PeerId) -> None:
        """Compare with a peer once both have built their models, for as long as it is linked."""
        await self._known.wait()
        retries = Backoff(RETRY_S, RETRY_LIMIT_S)
        try:
            while not await self._check_watched(peer, retries.next_s()) and peer in self._linked():
                pass
        finally:
            self._watched.pop(peer, None)

    async def _check_watched(self, peer: PeerId, retry_s: float) -> bool:
        """Compare as `check` does; if there was nothing to compare, return when there may be, or the link was lost."""
        asks = self._watched[peer] = trio.Event()
        async with self._at_once:
            if len(self._checked) >= self._enough or await self.check(peer):
                return True
        with trio.move_on_after(retry_s):
            await asks.wait()
        return False

    async def check(self, peer: PeerId) -> bool:
        """Compare with a peer unless that was done; whether there was something to compare. Raises nothing."""
        if peer in self._checked or self._own is None:
            return peer in self._checked
        try:
            found = await self._compare(peer, self._own)
        except (NetworkError, RemoteError) as error:
            logger.info("cannot compare models with %s: %s", peer, error)
            return False
        if found is None:
            return False
        digest, difference = found
        if difference and len(self._differences) < DIFFERENCE_LIMIT:
            self._differences[digest] = difference
            self._on_progress(Notice(text=f"a peer trains another model: {difference}"))
        self._checked[peer] = difference
        return True

    async def _compare(self, peer: PeerId, own: Layout) -> tuple[bytes, str] | None:
        """The peer's digest and the first difference, empty for none; None if the peer has no model yet.

        Raises NetworkError, RemoteError.
        """
        ours = list(zip((name[:NAME_LIMIT_CHARS] for name in own.names), own.shapes, strict=True))
        after = 0
        while True:
            request = canonical(GetLayout(after=after))
            reply = await self._host.request(
                peer, LAYOUT_PROTOCOL, request, deadline_s=LAYOUT_DEADLINE_S, limit_bytes=LAYOUT_ANSWER_LIMIT_BYTES
            )
            part = decode(reply, LayoutPart, peer=peer)
            if not part.digest:
                return None
            if part.digest == own.digest:
                return part.digest, ""
            if len(part.names) != len(part.shapes) or after + len(part.names) > part.total:
                raise RemoteError("a layout whose names and shapes do not fit", peer=peer)
            theirs = list(zip(part.names, part.shapes, strict=True))
            for number in range(after, after + PART_LIMIT_PARAMETERS):
                mine, other = _at(ours, number), _at(theirs, number - after)
                if mine != other:
                    return part.digest, describe_difference(other, mine, f"at {peer}")
                if mine is None:
                    return part.digest, "its names are longer than what is compared"
            after += PART_LIMIT_PARAMETERS

    async def serve(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError when it is malformed, or its sender was not admitted."""
        if stream.peer not in self._linked():
            raise RemoteError("wants something without having been admitted", peer=stream.peer)
        data = await stream.receive(deadline_s=LAYOUT_DEADLINE_S)
        asked = decode(data, GetLayout, peer=stream.peer)
        await stream.send(canonical(part_of(self._own, asked.after)), deadline_s=LAYOUT_DEADLINE_S)
        await stream.aclose()
        if (watched := self._watched.get(stream.peer)) is not None:
            watched.set()


def _other_model(difference: str) -> ConfigError:
    return ConfigError(f"the swarm trains another model: {difference}; build the same model on every node")
