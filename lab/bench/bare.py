"""The floor: an all-reduce's bytes, sealed, hashed and added up by threads that do nothing else.

    python -m shoal.lab.bench.bare --peers 4 --numel 25000000 --iters 5 --codec int8         prints one JSON line

The same butterfly as ours, in the same frames, with the same cipher, hash, codecs and additions; without plans,
signatures, deadlines, repair, or anything that would survive a fault. So no implementation in Python whose bytes are
encrypted and checked is faster than this on the machine, and what ours takes beyond it is the price of the rest.
`--plain` leaves cipher and hashes out. What is sealed is handed over in memory that both peers see, as between nodes of
one machine; `--sockets` sends it through the sockets, as between machines, and so does `--plain`.

One process per peer, the leader of a session as a node is (the kernel weighs sessions before it weighs processes), and
one connection per pair, on loopback; one thread sends and one receives on each connection. The time of an iteration is
from a barrier to the barrier after it, and begins and ends where ours does: contributions lie there encoded before it,
and the means are encoded when it is over. In fp32 both are the vectors themselves. What it takes to encode a
contribution before and to decode the mean afterwards is told beside it (`code_s`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.collectives.aggregate import Term, chunk_scratch, weighted_mean
from shoal.collectives.codecs import F32, U8, codec
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, HEADER_BYTES
from shoal.swarm.lanes.seal import KEY_BYTES, LANE_ID_BYTES, TAG_BYTES
from shoal.swarm.lanes.shared import SharedIn, SharedOffer, SharedOut
from shoal.swarm.lanes.socket import prepare, receive_exactly
from shoal.testnet.parent_death import tie_to

WARM_UP: Final = 2
CHUNK_VALUES: Final = 262_144
DEADLINE_S: Final = 600.0
STALL_S: Final = 60.0
TOLERANCE: Final = {"fp32": 1e-5, "bf16": 1 / 128, "int8": 1 / 127}
"""Of a mean of values from 0 to 1, by codec. A codec's own error comes in twice: its contributions' and the mean's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Reduction of `numel` fp32 values at each of `peers`. sealed: encrypted, and hashed where it arrives.

    sockets: nothing goes through memory that two peers see.
    """

    peers: int
    numel: int
    iters: int
    sealed: bool = True
    codec: str = "fp32"
    sockets: bool = False

    @property
    def chunks(self) -> list[slice]:
        """Slices of the vector; chunk c belongs to peer c mod `peers`."""
        return [slice(at, min(at + CHUNK_VALUES, self.numel)) for at in range(0, self.numel, CHUNK_VALUES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one iteration. code_s: to encode the contribution before it and to decode the mean after it."""

    reduce_s: float
    code_s: float


class _Pipe:
    """One connection to one peer, with the memory its two threads need. Keys are the benchmark's own: no secret."""

    def __init__(self, connection: socket.socket, exchange: Exchange) -> None:
        prepare(connection, STALL_S)
        self._connection = connection
        self._cipher = AESGCM(bytes(KEY_BYTES)) if exchange.sealed else None
        self._shared = self._share() if exchange.sealed and not exchange.sockets else None
        self._frame_bytes = FRAME_LIMIT_BYTES if self._shared is None else self._shared[0].frame_bytes
        self._out = memoryview(bytearray(HEADER_BYTES + FRAME_LIMIT_BYTES + TAG_BYTES))
        self._in = memoryview(bytearray(FRAME_LIMIT_BYTES + TAG_BYTES))
        self._sent = self._received = 0

    def _share(self) -> tuple[SharedOut, SharedIn]:
        ours = SharedOut(bytes(LANE_ID_BYTES))
        offer = msgspec.msgpack.encode(ours.offer)
        self._connection.sendall(bytes([len(offer)]) + offer)
        size = memoryview(bytearray(1))
        receive_exactly(self._connection, size)
        offered = memoryview(bytearray(size[0]))
        receive_exactly(self._connection, offered)
        theirs = SharedIn(msgspec.msgpack.decode(offered, type=SharedOffer))
        self._connection.sendall(bytes(1))
        receive_exactly(self._connection, size)
        ours.settle()
        return ours, theirs

    def send(self, payload: memoryview) -> None:
        for at in range(0, len(payload), self._frame_bytes):
            piece = payload[at : at + self._frame_bytes]
            if self._cipher is not None:
                self._sent += 1
                slot = self._out if self._shared is None else self._shared[0].take(self._connection, STALL_S)
                sealed = slot[HEADER_BYTES : HEADER_BYTES + len(piece) + TAG_BYTES]
                self._cipher.encrypt_into(self._sent.to_bytes(12, "little"), piece, None, sealed)
                piece = sealed if self._shared is None else slot[:HEADER_BYTES]
            self._connection.sendall(piece)

    def receive(self, region: memoryview) -> None:
        """Fill `region`, and hash it if it was sealed."""
        for at in range(0, len(region), self._frame_bytes):
            piece = region[at : at + self._frame_bytes]
            if self._cipher is None:
                receive_exactly(self._connection, piece)
                continue
            self._received += 1
            sealed = self._in[: len(piece) + TAG_BYTES]
            receive_exactly(self._connection, sealed if self._shared is None else sealed[:HEADER_BYTES])
            if self._shared is not None:
                sealed = self._shared[1].take(len(piece) + TAG_BYTES)
            self._cipher.decrypt_into(self._received.to_bytes(12, "little"), sealed, None, piece)
            if self._shared is not None:
                self._shared[1].free()
        if self._cipher is not None:
            blake3(region).digest()


class _Vectors(ABC):
    """One peer's contribution and the mean, chunk by chunk as they travel.

    sent, final: the bytes of each chunk of either.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.values = np.random.default_rng(rank).random(exchange.numel, dtype=np.float32)
        self.chunks = exchange.chunks
        self.sent: list[U8] = []
        self.final: list[U8] = []

    @abstractmethod
    def encode(self) -> None:
        """Make `sent` of the values."""

    @abstractmethod
    def reduce(self, number: int, arrived: Mapping[int, U8]) -> None:
        """Write the mean of chunk `number` into `final`; arrived: by rank, this peer's own included."""

    @abstractmethod
    def mean(self) -> F32:
        """Decode all of the mean: (numel,) float32."""


class _Fp32(_Vectors):
    """Vectors that travel as they are."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self._mean = np.zeros(exchange.numel, np.float32)
        self.sent = [self.values[chunk].view(np.uint8) for chunk in self.chunks]
        self.final = [self._mean[chunk].view(np.uint8) for chunk in self.chunks]

    def encode(self) -> None:
        pass

    def reduce(self, number: int, arrived: Mapping[int, U8]) -> None:
        total = self.final[number].view(np.float32)
        terms = [arrived[rank].view(np.float32) for rank in sorted(arrived)]
        np.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            np.add(total, term, out=total)
        np.divide(total, np.float32(len(terms)), out=total)

    def mean(self) -> F32:
        return self._mean


class _Coded(_Vectors):
    """Vectors that travel encoded, and are summed, by the same calls as in a node."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self._how = codec(exchange.codec)
        sizes = [self._how.encoded_bytes(chunk.stop - chunk.start) for chunk in self.chunks]
        self.sent = [np.zeros(size, np.uint8) for size in sizes]
        self.final = [np.zeros(size, np.uint8) for size in sizes]

    def encode(self) -> None:
        for chunk, out in zip(self.chunks, self.sent, strict=True):
            self._how.encode(self.values[chunk], out)

    def reduce(self, number: int, arrived: Mapping[int, U8]) -> None:
        chunk = self.chunks[number]
        mean = chunk_scratch(chunk.stop - chunk.start)
        terms = [Term(place=rank, weight=1, encoded=arrived[rank]) for rank in sorted(arrived)]
        included, _ = weighted_mean(self._how, terms, mean)
        if len(included) < len(terms):
            raise RuntimeError("what a peer of the bare exchange sent does not decode")
        self._how.encode(mean, self.final[number])

    def mean(self) -> F32:
        mean = np.empty_like(self.values)
        for chunk, encoded in zip(self.chunks, self.final, strict=True):
            self._how.decode_into(encoded, mean[chunk])
        return mean


class _Peer:
    """One peer's vectors and threads."""

    def __init__(self, exchange: Exchange, rank: int, pipes: dict[int, _Pipe]) -> None:
        self._exchange = exchange
        self._rank = rank
        self._pipes = pipes
        self._vectors: _Vectors = (_Fp32 if exchange.codec == "fp32" else _Coded)(exchange, rank)
        self._mine = self._owned_by(rank)
        sizes = [self._vectors.sent[number].size for number in self._mine]
        self._arrived = {peer: [np.zeros(size, np.uint8) for size in sizes] for peer in pipes}

    def _owned_by(self, peer: int) -> range:
        return range(peer, len(self._vectors.chunks), self._exchange.peers)

    def encode(self) -> None:
        """Make ready what is sent: before the time that counts, as in a node."""
        self._vectors.encode()

    def reduce(self) -> None:
        """Do one all-reduce; returns when all of the mean is here."""
        lock, waiting = threading.Lock(), [len(self._pipes)] * len(self._vectors.chunks)
        finals: dict[int, queue.SimpleQueue[U8]] = {peer: queue.SimpleQueue() for peer in self._pipes}
        vectors = self._vectors

        def send(peer: int) -> None:
            for number in self._owned_by(peer):
                self._pipes[peer].send(vectors.sent[number].data)
            for _ in self._mine:
                self._pipes[peer].send(finals[peer].get().data)

        def receive(peer: int) -> None:
            for place, number in enumerate(self._mine):
                self._pipes[peer].receive(self._arrived[peer][place].data)
                with lock:
                    waiting[number] -= 1
                    complete = waiting[number] == 0
                if complete:
                    final = self._sum(number, place)
                    for outbox in finals.values():
                        outbox.put(final)
            for number in self._owned_by(peer):
                self._pipes[peer].receive(vectors.final[number].data)

        threads = [threading.Thread(target=work, args=(peer,)) for peer in self._pipes for work in (send, receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _sum(self, number: int, place: int) -> U8:
        arrived = {peer: chunks[place] for peer, chunks in self._arrived.items()}
        self._vectors.reduce(number, {self._rank: self._vectors.sent[number], **arrived})
        final = self._vectors.final[number]
        if self._exchange.sealed:
            blake3(final.data).digest()
        return final

    def mean(self) -> F32:
        """Decode the mean."""
        return self._vectors.mean()

    def check(self) -> bool:
        """True if the mean is correct, within the codec's tolerance."""
        everyone = [
            np.random.default_rng(rank).random(self._exchange.numel, dtype=np.float32)
            for rank in range(self._exchange.peers)
        ]
        tolerance = TOLERANCE[self._exchange.codec]
        return bool(np.allclose(self.mean(), np.mean(everyone, axis=0), atol=tolerance, rtol=0))


def _connected(exchange: Exchange, rank: int, listener: socket.socket, ports: Sequence[int]) -> dict[int, _Pipe]:
    """A connection to each other peer: every pair's higher rank dials, and says who it is."""
    pipes: dict[int, _Pipe] = {}
    for other in range(rank):
        connection = socket.create_connection(("127.0.0.1", ports[other]), STALL_S)
        connection.sendall(bytes([rank]))
        pipes[other] = _Pipe(connection, exchange)
    listener.settimeout(STALL_S)
    while len(pipes) < exchange.peers - 1:
        connection, _ = listener.accept()
        who = memoryview(bytearray(1))
        receive_exactly(connection, who)
        pipes[who[0]] = _Pipe(connection, exchange)
    return pipes


def _be_peer(exchange: Exchange, rank: int, listeners: list[socket.socket], barrier: Barrier, results: Any) -> None:
    os.setsid()
    if sys.platform == "linux":
        tie_to(os.getppid())
    ports = [listener.getsockname()[1] for listener in listeners]
    peer = _Peer(exchange, rank, _connected(exchange, rank, listeners[rank], ports))
    times: list[Times] = []
    for _ in range(WARM_UP + exchange.iters):
        marks = []
        for work in (peer.encode, peer.reduce, peer.mean):
            barrier.wait(DEADLINE_S)
            marks.append(time.perf_counter())
            work()
        barrier.wait(DEADLINE_S)
        marks.append(time.perf_counter())
        encode_s, reduce_s, decode_s = (late - early for early, late in pairwise(marks))
        times.append(Times(reduce_s=reduce_s, code_s=encode_s + decode_s))
    results.put((rank, peer.check(), times[WARM_UP:]))


def measure(exchange: Exchange) -> list[Times]:
    """Measure each iteration's times. Blocks. Raises RuntimeError if a peer fails or a mean is wrong."""
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
    found: list[tuple[int, bool, list[Times]]] = [results.get() for _ in processes]
    if not all(right for _, right, _ in found):
        raise RuntimeError("the bare exchange's mean is wrong")
    return next(times for rank, _, times in found if rank == 0)


def main(arguments: list[str]) -> int:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser()
    for option in ("--peers", "--numel", "--iters"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--codec", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--sockets", action="store_true")
    options = parser.parse_args(arguments)
    exchange = Exchange(
        peers=options.peers,
        numel=options.numel,
        iters=options.iters,
        sealed=not options.plain,
        codec=options.codec,
        sockets=options.sockets,
    )
    times = measure(exchange)
    found = {
        "peers": exchange.peers,
        "codec": exchange.codec,
        "median_s": statistics.median(one.reduce_s for one in times),
        "times_s": [one.reduce_s for one in times],
        "code_s": statistics.median(one.code_s for one in times),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
