"""Frames of libp2p's protocols under a `MessageStream`: every split, every length, and lengths that are none."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import NetworkError
from shoal.swarm.net_stream import VarintFrames
from shoal.swarm.streams import LENGTH_BYTES


class Bytes:
    """A raw stream that gives out what it holds in pieces of `size`, and takes what is written."""

    def __init__(self, data: bytes, size: int = 1 << 20) -> None:
        self.data, self.size, self.written = data, size, b""

    async def read(self, limit_bytes: int) -> bytes:
        taken, self.data = self.data[: self.size], self.data[self.size :]
        return taken

    async def write(self, data: bytes) -> None:
        self.written += data

    async def finish(self) -> None:
        pass

    async def reset(self) -> None:
        pass


async def read_all(stream: VarintFrames) -> bytes:
    found = b""
    while data := await stream.read(1 << 20):
        found += data
    return found


def ours(messages: list[bytes]) -> list[bytes]:
    return [len(message).to_bytes(LENGTH_BYTES, "big") + message for message in messages]


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0, 1, 127, 128, 300, 20_000]), max_size=4), st.integers(1, 400))
def test_what_one_end_writes_the_other_reads_in_pieces_of_any_size(lengths: list[int], size: int) -> None:
    async def main() -> None:
        messages = [bytes([length % 251]) * length for length in lengths]
        out = Bytes(b"")
        for message in ours(messages):
            await VarintFrames(out).write(message)
        assert await read_all(VarintFrames(Bytes(out.written, size))) == b"".join(ours(messages))

    trio.run(main)


async def test_length_is_a_varint() -> None:
    out = Bytes(b"")
    await VarintFrames(out).write(ours([bytes(300)])[0])
    assert out.written[:2] == b"\xac\x02"
    assert len(out.written) == 302


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x01", b"\x80", b"\x05hello\xac"])
async def test_length_that_is_none_or_ends_early_breaks_the_stream(data: bytes) -> None:
    with pytest.raises(NetworkError):
        await read_all(VarintFrames(Bytes(data)))
