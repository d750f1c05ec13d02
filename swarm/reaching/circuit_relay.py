"""A relay of libp2p's circuit v2: it passes on what two nodes encrypt for each other, within bounds.

A reservation is its connection's own: nobody reserves for another, and it ends with the connection. Whom this node
relays for is its owner's to say (`admits`); who calls them is not, since a newcomer has to reach its first member. What
one caller, one callee, and all together may have at once is bounded, and so is each circuit in bytes and time. Half of
that is for callers that come first (`shoal.protocol.places`), and their reservations take the place of others'.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm.muxer import FOREIGN_ERRORS
from shoal.swarm.reaching.circuits import (
    HOP_PROTOCOL,
    MESSAGE_DEADLINE_S,
    OK,
    STOP_PROTOCOL,
    CircuitReservation,
    HopMessage,
    Limit,
    StopMessage,
    circuit_peer,
    peer_in,
    read_message,
    reset,
    write_message,
)

RESOURCE_LIMIT_EXCEEDED, PERMISSION_DENIED = 201, 202
CONNECTION_FAILED, NO_RESERVATION, MALFORMED_MESSAGE = 203, 204, 400
RESERVATION_LIMIT = 128
RESERVATION_S = 3600.0
CIRCUIT_LIMIT = 256
PEER_CIRCUIT_LIMIT = 32
"""Circuits that one node calls, or takes."""
CIRCUIT_LIMIT_BYTES = 1 << 30
"""Both directions together."""
CIRCUIT_LIMIT_S = 6 * 3600.0
PASS_BYTES = 64 << 10
STATUS_LINGER_S = 0.5
"""From a refusal until its stream is reset, so that it arrives."""

logger = logging.getLogger("shoal.libp2p")


class CircuitRelay:
    """Relays over one `Network` while `admits` is set; it says for whom."""

    def __init__(self, network: Any, libp2p_host: Any) -> None:
        self.admits: Callable[[PeerId], bool] | None = None
        self.comes_first: Callable[[PeerId], bool] = lambda peer: True
        self.bytes_passed = 0
        self._network = network
        self._reservations: dict[PeerId, float] = {}  # until when
        self._callers: Counter[PeerId] = Counter()
        self._called: Counter[PeerId] = Counter()
        libp2p_host.set_stream_handler(HOP_PROTOCOL, self._serve)

    @property
    def reservations(self) -> frozenset[PeerId]:
        """Peers that this node relays to now."""
        now = trio.current_time()
        self._reservations = {
            peer: until for peer, until in self._reservations.items() if until > now and self._network.is_direct(peer)
        }
        return frozenset(self._reservations)

    @property
    def circuits(self) -> int:
        """Circuits that are open."""
        return self._callers.total()

    async def _serve(self, stream: Any) -> None:
        peer = PeerId(str(stream.muxed_conn.peer_id))
        try:
            asked = await read_message(stream, HopMessage)
            # Over a circuit nothing is relayed again: chains would multiply what one message costs.
            if self.admits is None or not self._network.is_direct(peer):
                await self._refuse(stream, PERMISSION_DENIED)
            elif asked.type == HopMessage.RESERVE:
                await self._reserve(stream, peer)
            elif asked.type == HopMessage.CONNECT:
                await self._connect(stream, peer, asked)
            else:
                await self._refuse(stream, MALFORMED_MESSAGE)
        except (NetworkError, *FOREIGN_ERRORS) as error:
            logger.debug("relaying for %s: %s", peer, error)
        finally:
            await reset(stream)

    async def _refuse(self, stream: Any, status: int) -> None:
        await write_message(stream, HopMessage(type=HopMessage.STATUS, status=status))
        await trio.sleep(STATUS_LINGER_S)

    async def _reserve(self, stream: Any, peer: PeerId) -> None:
        reserved = self.reservations
        if self.admits is None or not self.admits(peer):
            await self._refuse(stream, PERMISSION_DENIED)
            return
        if peer not in reserved and len(reserved) >= RESERVATION_LIMIT and not self._make_room(peer):
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED)
            return
        self._reservations[peer] = trio.current_time() + RESERVATION_S
        until = int(time.time() + RESERVATION_S)  # the protocol has it in Unix time; nothing here uses it
        reservation = CircuitReservation(expire=until)
        answer = HopMessage(type=HopMessage.STATUS, status=OK, reservation=reservation, limit=self._limit())
        await write_message(stream, answer)
        await trio.sleep(STATUS_LINGER_S)

    def _make_room(self, peer: PeerId) -> bool:
        """Have a reservation for `peer`, if it comes first, in the place of the oldest of one that does not."""
        others = [one for one in self._reservations if not self.comes_first(one)]
        if not self.comes_first(peer) or not others:
            return False
        del self._reservations[min(others, key=lambda one: (self._reservations[one], one))]
        return True

    async def _connect(self, stream: Any, caller: PeerId, asked: Any) -> None:
        callee = peer_in(asked)
        if callee is None or callee == caller:
            await self._refuse(stream, MALFORMED_MESSAGE)
            return
        if callee not in self.reservations:
            await self._refuse(stream, NO_RESERVATION)
            return
        share = 1 if self.comes_first(caller) else 2
        of_ends = max(self._callers[caller], self._called[callee])
        if of_ends >= PEER_CIRCUIT_LIMIT // share or self.circuits >= CIRCUIT_LIMIT // share:
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED)
            return
        self._callers[caller] += 1
        self._called[callee] += 1
        try:
            await self._join(stream, caller, callee)
        finally:
            self._callers -= Counter({caller: 1})
            self._called -= Counter({callee: 1})

    async def _join(self, stream: Any, caller: PeerId, callee: PeerId) -> None:
        try:
            opened = await self._network.open_stream(callee, STOP_PROTOCOL, deadline_s=MESSAGE_DEADLINE_S)
        except NetworkError:
            await self._refuse(stream, CONNECTION_FAILED)
            return
        far = opened.raw
        try:
            if not await self._announce(far, caller):
                await self._refuse(stream, CONNECTION_FAILED)
                return
            await write_message(stream, HopMessage(type=HopMessage.STATUS, status=OK, limit=self._limit()))
            left = [CIRCUIT_LIMIT_BYTES]
            with trio.move_on_after(CIRCUIT_LIMIT_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass, stream, far, left, nursery.cancel_scope)
                    nursery.start_soon(self._pass, far, stream, left, nursery.cancel_scope)
        finally:
            await reset(far)

    def _limit(self) -> Any:
        return Limit(duration=int(CIRCUIT_LIMIT_S), data=CIRCUIT_LIMIT_BYTES)

    async def _announce(self, far: Any, caller: PeerId) -> bool:
        """Tell the callee who calls; whether it takes the call."""
        limit = self._limit()
        try:
            await write_message(far, StopMessage(type=StopMessage.CONNECT, peer=circuit_peer(caller), limit=limit))
            answer = await read_message(far, StopMessage)
        except NetworkError:
            return False
        return bool(answer.type == StopMessage.STATUS and answer.status == OK)

    async def _pass(self, source: Any, sink: Any, left: list[int], scope: trio.CancelScope) -> None:
        """Pass on one direction until either end, or what the circuit may carry, is over."""
        try:
            while left[0] > 0 and (data := await source.read(PASS_BYTES)):
                left[0] -= len(data)
                self.bytes_passed += len(data)
                await sink.write(data)
        except FOREIGN_ERRORS as error:
            logger.debug("a circuit ended: %s", type(error).__name__)
        scope.cancel()
