"""The floor: an all-reduce's bytes, sealed, hashed and added up by threads that do nothing else.

    python -m shoal.testnet.bench.bare --peers 4 --numel 25000000 --iters 5         prints one JSON line

The same butterfly as ours, in the same frames, with the same cipher, hash and additions; without plans, signatures,
deadlines, repair, or anything that would survive a fault. So no implementation in Python whose bytes are encrypted and
checked is faster than this on the machine, and what ours takes beyond it is the price of the rest. `--plain` leaves
cipher and hashes out.

One process per peer and one connection per pair, on loopback; one thread sends and one receives on each connection. The
time of an iteration is from a barrier to the barrier after it; the vectors are in memory before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES
from shoal.swarm.lanes.seal import KEY_BYTES, TAG_BYTES
from shoal.swarm.lanes.socket import prepare, receive_exactly

WARM_UP: Final = 2
CHUNK_VALUES: Final = 262_144
DEADLINE_S: Final = 600.0
STALL_S: Final = 60.0
TOLERANCE: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What is reduced: `numel` fp32 values at each of `peers`. sealed: encrypted, and hashed where it arrives."""

    peers: int
    numel: int
    iters: int
    sealed: bool = True

    @property
    def chunks(self) -> list[slice]:
        """Of the vector; chunk c belongs to peer c mod `peers`."""
        return [slice(at, min(at + CHUNK_VALUES, self.numel)) for at in range(0, self.numel, CHUNK_VALUES)]


class _Pipe:
    """One connection to one peer, with the memory its two threads need. Keys are the benchmark's own: no secret."""

    def __init__(self, connection: socket.socket, sealed: bool) -> None:
        prepare(connection, STALL_S)
        self._connection = connection
        self._cipher = AESGCM(bytes(KEY_BYTES)) if sealed else None
        self._out = memoryview(bytearray(FRAME_LIMIT_BYTES + TAG_BYTES))
        self._in = memoryview(bytearray(FRAME_LIMIT_BYTES + TAG_BYTES))
        self._sent = self._received = 0

    def send(self, payload: memoryview) -> None:
        for at in range(0, len(payload), FRAME_LIMIT_BYTES):
            piece = payload[at : at + FRAME_LIMIT_BYTES]
            if self._cipher is not None:
                self._sent += 1
                sealed = self._out[: len(piece) + TAG_BYTES]
                self._cipher.encrypt_into(self._sent.to_bytes(12, "little"), piece, None, sealed)
                piece = sealed
            self._connection.sendall(piece)

    def receive(self, region: memoryview) -> None:
        """Fill `region`, and hash it if it was sealed."""
        for at in range(0, len(region), FRAME_LIMIT_BYTES):
            piece = region[at : at + FRAME_LIMIT_BYTES]
            if self._cipher is None:
                receive_exactly(self._connection, piece)
                continue
            self._received += 1
            sealed = self._in[: len(piece) + TAG_BYTES]
            receive_exactly(self._connection, sealed)
            self._cipher.decrypt_into(self._received.to_bytes(12, "little"), sealed, None, piece)
        if self._cipher is not None:
            blake3(region).digest()


class _Peer:
    """One peer's vectors and threads."""

    def __init__(self, exchange: Exchange, rank: int, pipes: dict[int, _Pipe]) -> None:
        self._exchange = exchange
        self._rank = rank
        self._pipes = pipes
        self._chunks = exchange.chunks
        self._values = np.random.default_rng(rank).random(exchange.numel, dtype=np.float32)
        self._mean = np.zeros(exchange.numel, np.float32)
        mine = [chunk for number, chunk in enumerate(self._chunks) if self._owner(number) == rank]
        self._arrived = {peer: [np.zeros(c.stop - c.start, np.float32) for c in mine] for peer in pipes}

    def _owner(self, chunk: int) -> int:
        return chunk % self._exchange.peers

    def reduce(self) -> None:
        """One all-reduce; returns when all of the mean is here."""
        lock, waiting = threading.Lock(), [len(self._pipes)] * len(self._chunks)
        finals: dict[int, queue.SimpleQueue[memoryview]] = {peer: queue.SimpleQueue() for peer in self._pipes}

        def send(peer: int) -> None:
            for number, chunk in enumerate(self._chunks):
                if self._owner(number) == peer:
                    self._pipes[peer].send(_bytes(self._values[chunk]))
            for number in range(len(self._chunks)):
                if self._owner(number) == self._rank:
                    self._pipes[peer].send(finals[peer].get())

        def receive(peer: int) -> None:
            own = (number for number in range(len(self._chunks)) if self._owner(number) == self._rank)
            for place, number in enumerate(own):
                self._pipes[peer].receive(_bytes(self._arrived[peer][place]))
                with lock:
                    waiting[number] -= 1
                    complete = waiting[number] == 0
                if complete:
                    final = self._sum(number, place)
                    for outbox in finals.values():
                        outbox.put(final)
            for number, chunk in enumerate(self._chunks):
                if self._owner(number) == peer:
                    self._pipes[peer].receive(_bytes(self._mean[chunk]))

        threads = [threading.Thread(target=work, args=(peer,)) for peer in self._pipes for work in (send, receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _sum(self, number: int, place: int) -> memoryview:
        total, own = self._mean[self._chunks[number]], self._values[self._chunks[number]]
        terms = {self._rank: own, **{peer: arrived[place] for peer, arrived in self._arrived.items()}}
        np.add(terms[0], terms[1], out=total)
        for peer in range(2, self._exchange.peers):
            np.add(total, terms[peer], out=total)
        np.divide(total, np.float32(self._exchange.peers), out=total)
        if self._exchange.sealed:
            blake3(_bytes(total)).digest()
        return _bytes(total)

    def check(self) -> bool:
        """Whether the mean is what it must be."""
        everyone = [np.random.default_rng(r).random(self._exchange.numel, dtype=np.float32) for r in self._ranks()]
        return bool(np.allclose(self._mean, np.mean(everyone, axis=0), atol=TOLERANCE, rtol=0))

    def _ranks(self) -> range:
        return range(self._exchange.peers)


def _bytes(values: np.ndarray[Any, np.dtype[np.float32]]) -> memoryview:
    return values.data.cast("B")


def _connected(exchange: Exchange, rank: int, listener: socket.socket, ports: Sequence[int]) -> dict[int, _Pipe]:
    """A connection to each other peer: every pair's higher rank dials, and says who it is."""
    pipes: dict[int, _Pipe] = {}
    for other in range(rank):
        connection = socket.create_connection(("127.0.0.1", ports[other]), STALL_S)
        connection.sendall(bytes([rank]))
        pipes[other] = _Pipe(connection, exchange.sealed)
    listener.settimeout(STALL_S)
    while len(pipes) < exchange.peers - 1:
        connection, _ = listener.accept()
        who = memoryview(bytearray(1))
        receive_exactly(connection, who)
        pipes[who[0]] = _Pipe(connection, exchange.sealed)
    return pipes


def _be_peer(exchange: Exchange, rank: int, listeners: list[socket.socket], barrier: Barrier, results: Any) -> None:
    ports = [listener.getsockname()[1] for listener in listeners]
    peer = _Peer(exchange, rank, _connected(exchange, rank, listeners[rank], ports))
    times = []
    for _ in range(WARM_UP + exchange.iters):
        barrier.wait(DEADLINE_S)
        began = time.perf_counter()
        peer.reduce()
        barrier.wait(DEADLINE_S)
        times.append(time.perf_counter() - began)
    results.put((rank, peer.check(), times[WARM_UP:]))


def measure(exchange: Exchange) -> list[float]:
    """Seconds of each iteration. Blocks. Raises RuntimeError if a peer fails or a mean is wrong."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(exchange.peers), context.SimpleQueue()
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(exchange.peers)]
        processes = [
            context.Process(target=_be_peer, args=(exchange, rank, listeners, barrier, results), daemon=True)
            for rank in range(exchange.peers)
        ]
        ends_at = time.monotonic() + DEADLINE_S
        for process in processes:
            process.start()
            stack.callback(process.kill)
        for process in processes:
            process.join(max(0.0, ends_at - time.monotonic()))
            if process.exitcode != 0:
                raise RuntimeError("a peer of the bare exchange failed")
    found: list[tuple[int, bool, list[float]]] = [results.get() for _ in processes]
    if not all(right for _, right, _ in found):
        raise RuntimeError("the bare exchange's mean is wrong")
    return next(times for rank, _, times in found if rank == 0)


def main(arguments: list[str]) -> int:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser()
    for option in ("--peers", "--numel", "--iters"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args(arguments)
    exchange = Exchange(peers=options.peers, numel=options.numel, iters=options.iters, sealed=not options.plain)
    times = measure(exchange)
    print(json.dumps({"peers": exchange.peers, "median_s": statistics.median(times), "times_s": times}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
