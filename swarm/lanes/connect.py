"""The TCP connection of a lane that this node dials."""

from __future__ import annotations

import trio

from shoal.swarm.lanes.seal import parse_address

CONNECT_DEADLINE_S = 5.0
CONNECT_STAGGER_S = 0.25


async def connect(addresses: list[str]) -> tuple[str, trio.SocketStream] | None:
    """The first address that takes a TCP connection, tried at most CONNECT_STAGGER_S apart; or None.

    Cancellation: no connection is left open.
    """
    winner: list[tuple[str, trio.SocketStream]] = []

    async def attempt(address: str, failed: trio.Event, scope: trio.CancelScope) -> None:
        host, port = parse_address(address)
        try:
            stream = await trio.open_tcp_stream(host, port)
        except (OSError, UnicodeError):  # a name that no resolver takes is the peer's choice too
            failed.set()
            return
        winner.append((address, stream))
        scope.cancel()

    try:
        with trio.move_on_after(CONNECT_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed, nursery.cancel_scope)
                    with trio.move_on_after(CONNECT_STAGGER_S):
                        await failed.wait()
    except BaseException:
        for _, stream in winner:
            stream.socket.close()
        raise
    for _, stream in winner[1:]:
        stream.socket.close()
    return winner[0] if winner else None
