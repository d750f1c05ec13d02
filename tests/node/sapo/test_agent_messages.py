"""Between daemon and agent nothing is believed that is out of range."""

from __future__ import annotations

import msgspec
import pytest

from shoal.node.sapo.agent_messages import (
    FAULTS_LIMIT,
    OFFERS_LIMIT,
    PEERS_LIMIT,
    WANTED_LIMIT,
    AgentReport,
    Ask,
    Begin,
    Delivered,
    Done,
    Finished,
    Made,
    Offered,
    Order,
    Pulled,
    Ready,
    Saved,
    Want,
    unpack_agent_report,
    unpack_order,
)
from shoal.node.training.trainer_messages import (
    FRAME_LIMIT_BYTES,
    Failed,
    Framing,
    Message,
    Pause,
    Resume,
    Stop,
    frame_of,
)
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import RolloutsSection, TaskEntry
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import CONFIG_LIMIT_BYTES, GROUP_LIMIT_BYTES, Announcement, Reason, TaskRef

PEER = PeerId("12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB")
LARGE = 2**63 - 1


def offer_of(number: int) -> Offer:
    """As large as an announcement may be."""
    config = bytes(CONFIG_LIMIT_BYTES)
    task = TaskRef(family="f" * 64, version="v" * 32, config=config, seed=LARGE, index=2**32 - 1)
    announcement = Announcement(
        digest=number.to_bytes(32, "big"),
        size_bytes=GROUP_LIMIT_BYTES,
        task=task,
        completions=64,
        reward_mean=0.5,
        reward_variance=0.25,
        policy_version=LARGE,
        round=LARGE,
    )
    return Offer(announcement=announcement, origin=PEER, boot=LARGE, sequence=LARGE, arrived=LARGE)


BEGIN = Begin(
    policy="char-policy",
    options={"width": 16, "alphabet": "01", "warm_up_reward": 0.5},
    seed=LARGE,
    swarm_id=bytes(32),
    me=PEER,
    folder="/data",
    role="train",
    rollouts=RolloutsSection(tasks=[TaskEntry(family="bf", config={"difficulty": 1})]),
    learning_rate=1e-3,
    clip_norm=1.0,
    device="auto",
    threads=1,
)
DONE = Done(
    round=1,
    reward=0.5,
    local=4,
    external=1,
    external_reward=None,
    informative=3,
    generated_tokens=100,
    seconds=0.5,
    origins={PEER: 1},
    rejected={"hint": 2},
    ignored=(PEER,),
    used_bytes=10,
    wasted_bytes=0,
)
FAULT = (PEER, Reason.FORGED)
ORDERS: list[Order] = [
    BEGIN,
    Offered(offers=tuple(map(offer_of, range(OFFERS_LIMIT))), faults=(FAULT,) * FAULTS_LIMIT),
    Pulled(digest=bytes(32), group=bytes(GROUP_LIMIT_BYTES)),
    Delivered(),
    Pause(),
    Resume(),
    Stop(),
]
REPORTS: list[AgentReport] = [
    Ready(round=3, restored=None, reward=0.25),
    Made(group=bytes(GROUP_LIMIT_BYTES), rewards=(0.5,) * 64),
    Ask(wait_s=10.0),
    Want(digests=(bytes(32),) * WANTED_LIMIT, limit_bytes=LARGE),
    DONE,
    Saved(round=3, failure="disk full"),
    Finished(),
    Failed(summary="no", traceback="…"),
]


def frame(message: Message) -> bytes:
    (payload,) = Framing().feed(frame_of(message))
    return payload


def test_messages_as_large_as_they_may_be_arrive() -> None:
    assert [unpack_order(frame(order)) for order in ORDERS] == ORDERS
    assert [unpack_agent_report(frame(report)) for report in REPORTS] == REPORTS
    assert max(len(frame(message)) for message in (*ORDERS, *REPORTS)) < FRAME_LIMIT_BYTES


@pytest.mark.parametrize(
    "order",
    [
        Offered(offers=tuple(map(offer_of, range(OFFERS_LIMIT + 1)))),
        Offered(offers=(), faults=(FAULT,) * (FAULTS_LIMIT + 1)),
        Pulled(digest=bytes(31), group=b"x"),
        Pulled(digest=bytes(32), group=b""),
        Pulled(digest=bytes(32), group=bytes(GROUP_LIMIT_BYTES + 1)),
        msgspec.structs.replace(BEGIN, swarm_id=bytes(31)),
        msgspec.structs.replace(BEGIN, announced=-1),
        msgspec.structs.replace(BEGIN, role="watch"),
        Ask(),
        Finished(),
    ],
)
def test_order_out_of_range_is_refused(order: Message) -> None:
    with pytest.raises(LocalError, match="not an order"):
        unpack_order(frame(order))


@pytest.mark.parametrize(
    "report",
    [
        Made(group=bytes(GROUP_LIMIT_BYTES + 1), rewards=(0.0,)),
        Made(group=b"x", rewards=(1.5,)),
        Made(group=b"x", rewards=(float("nan"),)),
        Made(group=b"x", rewards=(0.5,) * 65),
        Ask(wait_s=float("nan")),
        Ask(wait_s=1e9),
        Want(digests=(), limit_bytes=1),
        Want(digests=(bytes(32),) * (WANTED_LIMIT + 1), limit_bytes=1),
        Want(digests=(bytes(33),), limit_bytes=1),
        msgspec.structs.replace(DONE, reward=2.0),
        msgspec.structs.replace(DONE, external=-1),
        msgspec.structs.replace(DONE, origins={str(number): 1 for number in range(PEERS_LIMIT + 1)}),
        Saved(round=1, failure="x" * 501),
        Failed(summary="x" * 501, traceback=""),
        Failed(summary="", traceback="x" * 20_000),
        Delivered(),
    ],
)
def test_report_out_of_range_is_refused(report: Message) -> None:
    with pytest.raises(LocalError, match="not a report"):
        unpack_agent_report(frame(report))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Done", b"\x81\xa4type\xa6Pickle"])
def test_garbage_is_refused(payload: bytes) -> None:
    for unpack in (unpack_order, unpack_agent_report):
        with pytest.raises(LocalError):
            unpack(payload)
