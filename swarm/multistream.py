"""Agreeing on a protocol, as multistream does it, without taking more than that needs from whoever asks.

libp2p's own communicator reads as many bytes as a message's length claims, and hears as many names as are said.

Source: multistream-select 1.0, https://github.com/multiformats/multistream-select
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from libp2p.exceptions import ParseError
    from libp2p.host import basic_host
    from libp2p.io.abc import ReadWriteCloser
    from libp2p.io.exceptions import IOException
    from libp2p.protocol_muxer import generic_selector
    from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.utils.varint import read_varint_prefixed_bytes_limited

NAME_LIMIT_BYTES = 1024
"""Of one message: the name of a protocol, or what answers it."""
NAMES_LIMIT = 16
"""Messages of the far end until both have agreed."""


class Communicator(MultiselectCommunicator):  # type: ignore[misc]
    """Reads NAMES_LIMIT messages of NAME_LIMIT_BYTES each at most; more is an error before it is read."""

    def __init__(self, read_writer: ReadWriteCloser) -> None:
        super().__init__(read_writer)
        self._left = NAMES_LIMIT

    async def read(self) -> str:
        """The next message. Raises MultiselectCommunicatorError for what is none, or over the limits."""
        if self._left == 0:
            raise MultiselectCommunicatorError(f"{NAMES_LIMIT} messages and no protocol agreed on")
        self._left -= 1
        try:
            message: bytes = await read_varint_prefixed_bytes_limited(self.read_writer, NAME_LIMIT_BYTES)
            if not message.endswith(b"\n"):
                raise ParseError("a message that no line ends")
            return message[:-1].decode()
        except (ParseError, IOException, ValueError) as error:
            raise MultiselectCommunicatorError(f"no message of multistream: {error}") from error


# Looked up there by name, for streams and for connections.
basic_host.MultiselectCommunicator = Communicator
generic_selector.MultiselectCommunicator = Communicator
