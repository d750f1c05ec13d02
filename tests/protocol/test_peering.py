"""What two peers say outside a round: every message survives the wire, and nothing else is taken for one."""

from __future__ import annotations

import typing

import msgspec
import pytest

from shoal.collectives.grid import Grid
from shoal.protocol import peering
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.invites import Revocations
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    ChunkResults,
    Evict,
    Held,
    Participant,
    Relay,
    Term,
    Value,
)
from shoal.protocol.peering import (
    CERTIFICATES_IN_ANSWER_LIMIT,
    REASON_LIMIT_CHARS,
    RECORD_LIMIT_BYTES,
    RECORDS_IN_WELCOME_LIMIT,
    Ack,
    Announce,
    ChainPart,
    FetchAnswer,
    FetchRequest,
    FinalsAnswer,
    Full,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
    Hello,
    HelloAnswer,
    LinkMessage,
    ManifestAnswer,
    ManifestReply,
    Nack,
    Ping,
    PingRequest,
    Reach,
    Refusal,
    Suspicion,
    Welcome,
)
from shoal.protocol.wire import MESSAGE_LIMIT_BYTES, canonical, decode
from tests.round_messages import plan_with, unsigned_certificate

PEER = Identity.from_seed(bytes(32)).peer_id
CERTIFICATE = unsigned_certificate(PEER)
VALUE = CERTIFICATE.value
PLAN = plan_with((Participant(PEER, 1, 1, NO_HASH),), Grid(10_000, 4096))

RESULTS = ChunkResults.of(0, {2: bytes(range(32))})
REVISED = msgspec.structs.replace(
    PLAN, attempt=1, origin=PLAN.hash, evicted=(PEER,), standing=(RESULTS,), relays=(Relay(0, 1, 2),)
)

SPOKEN: list[tuple[object, object]] = [
    (Hello, Hello(wire=1, swarm=NO_HASH, software="shoal 0.1.0", record=b"r")),
    (HelloAnswer, Welcome(record=b"r", others=(b"a", b"b"))),
    (HelloAnswer, Refusal(reason="this node is in swarm 0123…, yours is 4567…; use the same swarm.toml")),
    (HelloAnswer, Full(others=(b"a",))),
    (LinkMessage, Ping(nonce=2**62, incarnation=3)),
    (LinkMessage, Ack(nonce=0, incarnation=0)),
    (LinkMessage, Ack(nonce=1, incarnation=2, about=PEER)),
    (LinkMessage, PingRequest(target=PEER, nonce=4)),
    (LinkMessage, Nack(target=PEER, nonce=4)),
    (LinkMessage, Reach(lacks=(PEER,))),
    (LinkMessage, Suspicion(peer=PEER, incarnation=5)),
    (LinkMessage, CERTIFICATE),
    (LinkMessage, PLAN),
    (LinkMessage, REVISED),
    (LinkMessage, Evict(term=Term(), round=1, base=NO_HASH, view=2, attempt=1, lineage=PLAN.hash, evicted=(PEER,))),
    (LinkMessage, Held(term=Term(), round=1, base=NO_HASH, lineage=PLAN.hash, evicted=(PEER,), chunks=(RESULTS,))),
    (LinkMessage, Announce(record=b"r")),
    (LinkMessage, Revocations(version=1, peers=(PEER,), signature=bytes(64))),
    (ManifestReply, ManifestAnswer(manifest=b"m")),
    (ManifestReply, Refusal(reason="this node is in another swarm")),
    (FetchRequest, GetChain(after=7)),
    (FetchRequest, GetHeader(round=8)),
    (FetchRequest, GetFinals(plan=bytes(range(32)))),
    (FetchAnswer, ChainPart(certificates=(CERTIFICATE,), head=9)),
    (FetchAnswer, HeaderAnswer(header=b"h")),
    (FetchAnswer, FinalsAnswer(plan=PLAN)),
    (FetchAnswer, FinalsAnswer(plan=REVISED)),
    (FetchAnswer, Refusal(reason="not held here")),
]


@pytest.mark.parametrize(("of", "message"), SPOKEN)
def test_message_survives_the_wire(of: typing.Any, message: object) -> None:
    data = canonical(message)
    assert decode(data, of) == message
    assert canonical(decode(data, of)) == data


@pytest.mark.parametrize(("of", "message"), SPOKEN)
def test_message_is_taken_for_its_own_kind_only(of: typing.Any, message: object) -> None:
    data = canonical(message)
    kinds: tuple[typing.Any, ...] = (Hello, HelloAnswer, LinkMessage, FetchRequest, FetchAnswer)
    for other in kinds:
        if other is not of and not isinstance(message, other):
            with pytest.raises(RemoteError):
                decode(data, other)


def test_tags_are_distinct() -> None:
    names = [cls for cls in vars(peering).values() if isinstance(cls, type) and issubclass(cls, msgspec.Struct)]
    tags = [cls.__struct_config__.tag for cls in names if cls.__struct_config__.tag is not None]
    assert len(tags) == len(set(tags)) >= 25


TOO_MUCH: list[tuple[object, dict[str, object]]] = [
    (Hello, {"type": "hello", "wire": 1, "swarm": bytes(31), "software": "", "record": b""}),
    (Hello, {"type": "hello", "wire": -1, "swarm": bytes(32), "software": "", "record": b""}),
    (Hello, {"type": "hello", "wire": 1, "swarm": bytes(32), "software": "x" * 65, "record": b""}),
    (Hello, {"type": "hello", "wire": 1, "swarm": bytes(32), "software": "", "record": bytes(RECORD_LIMIT_BYTES + 1)}),
    (Hello, {"type": "hello", "wire": 1, "swarm": bytes(32), "software": "", "record": b"", "more": 1}),
    (HelloAnswer, {"type": "welcome", "record": b"", "others": [b""] * (RECORDS_IN_WELCOME_LIMIT + 1)}),
    (HelloAnswer, {"type": "full", "others": [b""] * (RECORDS_IN_WELCOME_LIMIT + 1)}),
    (HelloAnswer, {"type": "refusal", "reason": "x" * (REASON_LIMIT_CHARS + 1)}),
    (LinkMessage, {"type": "ping", "nonce": 2**63, "incarnation": 0}),
    (LinkMessage, {"type": "ping", "nonce": 1.0, "incarnation": 0}),
    (LinkMessage, {"type": "suspicion", "peer": "x", "incarnation": 0}),
    (LinkMessage, {"type": "nonsense"}),
    (LinkMessage, {}),
    (FetchRequest, {"type": "getfinals", "plan": bytes(33)}),
    (FetchRequest, {"type": "getchain", "after": -1}),
    (FetchAnswer, {"type": "chainpart", "certificates": [CERTIFICATE] * (CERTIFICATES_IN_ANSWER_LIMIT + 1), "head": 0}),
]


@pytest.mark.parametrize(("of", "fields"), TOO_MUCH)
def test_message_out_of_bounds_is_refused(of: typing.Any, fields: dict[str, object]) -> None:
    with pytest.raises(RemoteError):
        decode(canonical(fields), of)


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
