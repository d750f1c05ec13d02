"""The process in which hivemind runs: this module under `python -m`, started by `shoal.swarm.rendezvous.hivemind`.

It starts hivemind's Go daemon, joins a hivemind DHT, and carries out the orders that come in on standard input, until
that ends; then the daemon is stopped and the process is gone. It is the one place that imports hivemind, and it runs
on asyncio because hivemind does.

hivemind decodes what the DHT holds as msgpack with extension types; nothing of it is unpickled. Here only the type that
makes a dictionary of entries is left registered, and its entries are not decoded by hivemind at all: one that cannot be
would spoil the look-up for the others. Those that are not byte strings of VALUE_LIMIT_BYTES are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Annotated, Any

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.wire import decode
from shoal.swarm.rendezvous.hivemind_messages import (
    LENGTH_BYTES,
    REASON_LIMIT_CHARS,
    VALUE_LIMIT_BYTES,
    VALUES_LIMIT,
    Failed,
    Found,
    Get,
    Order,
    Put,
    Ready,
    Report,
    Start,
    Stored,
    frame,
    length_of,
    read_order,
)

ORDERS_AT_ONCE_LIMIT = 16
DAEMON_START_DEADLINE_S = 30.0
SHUTDOWN_DEADLINE_S = 10.0
DICTIONARY_TYPE = 0x50
"""hivemind's msgpack extension type of `DictionaryDHTValue`."""

ENTRY_OVERHEAD_BYTES = 8

_Entry = Annotated[bytes, msgspec.Meta(max_length=VALUE_LIMIT_BYTES)]


class _Pipes:
    """Orders in, reports out. Reports leave by a descriptor of their own: what hivemind prints goes to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._orders), sys.stdin)

    async def read(self) -> Order | None:
        """The next order, None at the end of input."""
        try:
            head = await self._orders.readexactly(LENGTH_BYTES)
            return read_order(await self._orders.readexactly(length_of(head)))
        except asyncio.IncompleteReadError:
            return None

    def write(self, report: Report) -> None:
        """Blocks where the node does not read: then there is nothing else to do."""
        data = memoryview(frame(report))
        while data:
            data = data[self._out.write(data) :]


class _Undecoded:
    """In place of hivemind's serializer where a look-up decodes what it found."""

    @staticmethod
    def loads(data: bytes) -> bytes:
        return data


def _without_decoding(search: Any) -> Any:
    """hivemind's class of a search, but that it leaves the entries found as they are."""

    class Search(search):  # type: ignore[misc]
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **{**fields, "serializer": _Undecoded})

    return Search


class _Node:
    """A node of hivemind's DHT."""

    def __init__(self, dht: Any) -> None:
        self._dht = dht

    @classmethod
    async def create(cls, order: Start) -> _Node:
        from hivemind.dht import node  # type: ignore[import-untyped]
        from hivemind.utils import MSGPackSerializer  # type: ignore[import-untyped]

        node._SearchState = _without_decoding(node._SearchState)
        codes = MSGPackSerializer._ext_type_codes
        MSGPackSerializer._ext_type_codes = {DICTIONARY_TYPE: codes[DICTIONARY_TYPE]}
        if order.serves:
            reach: dict[str, object] = {
                "host_maddrs": list(order.listen),
                "announce_maddrs": list(order.announce) or None,
                "force_reachability": "public",  # else the daemon does not relay
                "dht_mode": "server",
            }
        else:
            reach = {"no_listen": True, "host_maddrs": None, "dht_mode": "client"}
        return cls(
            await node.DHTNode.create(
                initial_peers=list(order.initial) or None,
                client_mode=not order.serves,
                identity_path=order.identity,
                check_if_identity_free=False,
                nat_port_map=False,
                auto_nat=order.serves,
                use_relay=True,
                startup_timeout=DAEMON_START_DEADLINE_S,
                **reach,
            )
        )

    async def addresses(self) -> tuple[str, ...]:
        try:
            return tuple(map(str, await self._dht.p2p.get_visible_maddrs(latest=True)))
        except ValueError:  # it listens nowhere
            return ()

    async def obey(self, order: Put | Get) -> Report:
        from hivemind.utils import get_dht_time

        if isinstance(order, Get):
            found = await self._dht.get_many(list(order.keys), sufficient_expiration_time=float("inf"))
            return Found(id=order.id, values=_entries(found.values()))
        count = len(order.keys)
        stored = await self._dht.store_many(
            list(order.keys),
            [order.value] * count,
            [get_dht_time() + order.valid_s] * count,
            subkeys=[order.name] * count,
        )
        return Stored(id=order.id, keys=sum(map(bool, stored.values())))

    async def close(self) -> None:
        await asyncio.wait_for(self._dht.shutdown(), SHUTDOWN_DEADLINE_S)


def _entries(found: Any) -> tuple[bytes, ...]:
    """The entries of the dictionaries found, each once: those that are bytes of a length that can be passed on."""
    values: dict[bytes, None] = {}
    for item in found:
        if item is None or not isinstance(item.value, dict):
            continue
        for entry in item.value.values():
            with contextlib.suppress(RemoteError):
                values[decode(entry.value, _Entry, limit_bytes=VALUE_LIMIT_BYTES + ENTRY_OVERHEAD_BYTES)] = None
    return tuple(values)[:VALUES_LIMIT]


async def _serve(pipes: _Pipes) -> None:
    await pipes.open()
    start = await pipes.read()
    if not isinstance(start, Start):
        return
    try:
        node = await _Node.create(start)
    except Exception as error:  # the boundary: whatever hivemind, its daemon or the peers did
        pipes.write(Failed(id=0, reason=_reason(error)))
        return
    pipes.write(Ready(addresses=await node.addresses()))
    slots = asyncio.Semaphore(ORDERS_AT_ONCE_LIMIT)
    tasks: set[asyncio.Task[None]] = set()

    async def obey(order: Put | Get) -> None:
        try:
            report: Report = await node.obey(order)
        except Exception as error:  # the boundary, as above
            report = Failed(id=order.id, reason=_reason(error))
        finally:
            slots.release()
        pipes.write(report)

    try:
        while (order := await pipes.read()) is not None and not isinstance(order, Start):
            await slots.acquire()
            task = asyncio.create_task(obey(order))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await node.close()


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:REASON_LIMIT_CHARS]


if __name__ == "__main__":
    asyncio.run(_serve(_Pipes()))
