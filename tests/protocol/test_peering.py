"""What two peers say outside a round is harmless where it is shown, and within the size of a message."""

from __future__ import annotations

import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    Value,
)
from shoal.protocol.peering import (
    CERTIFICATES_IN_ANSWER_LIMIT,
    RECORDS_IN_WELCOME_LIMIT,
    ChainPart,
    FetchAnswer,
    Hello,
    HelloAnswer,
    Welcome,
)
from shoal.protocol.wire import MESSAGE_LIMIT_BYTES, canonical, decode
from tests.round_messages import unsigned_certificate

PEER = Identity.from_seed(bytes(32)).peer_id
CERTIFICATE = unsigned_certificate(PEER)
VALUE = CERTIFICATE.value


@pytest.mark.parametrize("text", ["\x1b[2J", "one\ntwo", "\r", "\0", "\x7f", "\x9b31m"])
def test_reason_cannot_steer_the_terminal_that_shows_it(text: str) -> None:
    with pytest.raises(RemoteError):
        decode(canonical({"type": "refusal", "reason": text}), HelloAnswer)  # type: ignore[arg-type]
    with pytest.raises(RemoteError):
        decode(canonical(Hello(wire=1, swarm=NO_HASH, software=text, record=b"")), Hello)


def test_largest_answers_fit_the_limits_of_a_message() -> None:
    welcome = Welcome(record=bytes(9500), others=(bytes(9500),) * RECORDS_IN_WELCOME_LIMIT)
    assert len(canonical(welcome)) < MESSAGE_LIMIT_BYTES
    many = Value(
        **{
            **{name: getattr(VALUE, name) for name in VALUE.__struct_fields__},
            "members": (PEER,) * 64,
            "leaves": (PEER,) * 64,
        }
    )
    large = Certificate(value=many, view=1, signers=(PEER,) * 64, signatures=(bytes(64),) * 64)
    part = ChainPart(certificates=(large,) * CERTIFICATES_IN_ANSWER_LIMIT, head=1)
    assert len(canonical(part)) < MESSAGE_LIMIT_BYTES
    assert decode(canonical(part), FetchAnswer) == part  # type: ignore[arg-type]
