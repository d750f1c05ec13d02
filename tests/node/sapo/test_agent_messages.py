"""Between daemon and agent nothing is believed that is out of range."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shoal.node.pipe import FRAME_LIMIT_BYTES, Failed, Framing, Message, Pause, Resume, Stop, frame_of
from shoal.node.sapo.agent_messages import (
    AgentReport,
    Asked,
    Begin,
    Delivered,
    Finished,
    Judged,
    Made,
    Order,
    Pulled,
    Ready,
    RoundReport,
    Saved,
    Take,
    unpack_agent_report,
    unpack_order,
)
from shoal.node.sapo.selection import Verdict
from shoal.node.sapo.tasks import CHOICE_LIMIT, QUESTION_LIMIT_CHARS, WEIGHT_LIMIT, TaskKind
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT, RolloutsSection, TaskEntry
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
    return Offer(announcement=announcement, origin=PEER, boot=LARGE, sequence=LARGE, arrived=LARGE, order=LARGE)


def with_digest(digest: bytes) -> Offer:
    offer = offer_of(0)
    return replace(offer, announcement=msgspec.structs.replace(offer.announcement, digest=digest))


ANNOUNCED = offer_of(1).announcement
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
DONE = RoundReport(
    round=1,
    reward=0.5,
    local=4,
    external=1,
    informative=3,
    generated_tokens=100,
    unencodable=2,
    seconds=0.5,
)
KIND = TaskKind(family="f" * 64, version="v" * 32, config=bytes(CONFIG_LIMIT_BYTES), weight=WEIGHT_LIMIT)
READY = Ready(round=3, restored=None, reward=0.25, tasks=(KIND,) * CHOICE_LIMIT, scorable=("f" * 64,) * CHOICE_LIMIT)
REFUSED = Verdict(refused=Reason.HINT)
ORDERS: list[Order] = [
    BEGIN,
    Pulled(offer=offer_of(0), group=bytes(GROUP_LIMIT_BYTES)),
    Delivered(),
    Pause(),
    Resume(),
    Stop(),
]
REPORTS: list[AgentReport] = [
    READY,
    Made(announcement=ANNOUNCED, group=bytes(GROUP_LIMIT_BYTES), rewards=(0.5,) * 64),
    Asked(digest=bytes(32), question="\U0001f41f" * QUESTION_LIMIT_CHARS),
    Take(count=GROUPS_LIMIT, wait_s=10.0),
    Judged(verdicts=(REFUSED, *[Verdict(rewards=(0.5,) * 64)] * (GROUPS_LIMIT - 1))),
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
        Pulled(offer=with_digest(bytes(31)), group=b"x"),
        Pulled(offer=offer_of(0), group=b""),
        Pulled(offer=offer_of(0), group=bytes(GROUP_LIMIT_BYTES + 1)),
        msgspec.structs.replace(BEGIN, swarm_id=bytes(31)),
        msgspec.structs.replace(BEGIN, announced=-1),
        msgspec.structs.replace(BEGIN, role="watch"),
        Take(count=1),
        Finished(),
    ],
)
def test_order_out_of_range_is_refused(order: Message) -> None:
    with pytest.raises(LocalError, match="not an order"):
        unpack_order(frame(order))


@pytest.mark.parametrize(
    "report",
    [
        Made(announcement=ANNOUNCED, group=bytes(GROUP_LIMIT_BYTES + 1), rewards=(0.0,)),
        Made(announcement=ANNOUNCED, group=b"x", rewards=(1.5,)),
        Made(announcement=ANNOUNCED, group=b"x", rewards=(float("nan"),)),
        Made(announcement=ANNOUNCED, group=b"x", rewards=(0.5,) * 65),
        Made(announcement=with_digest(bytes(33)).announcement, group=b"x", rewards=(0.5,)),
        msgspec.structs.replace(READY, tasks=()),
        msgspec.structs.replace(READY, tasks=(KIND,) * (CHOICE_LIMIT + 1)),
        msgspec.structs.replace(READY, tasks=(msgspec.structs.replace(KIND, weight=0),)),
        msgspec.structs.replace(READY, tasks=(msgspec.structs.replace(KIND, config=bytes(CONFIG_LIMIT_BYTES + 1)),)),
        msgspec.structs.replace(READY, scorable=("f",) * (CHOICE_LIMIT + 1)),
        Take(count=1, wait_s=float("nan")),
        Take(count=1, wait_s=1e9),
        Take(count=0),
        Take(count=GROUPS_LIMIT + 1),
        Judged(verdicts=()),
        Judged(verdicts=(REFUSED,) * (GROUPS_LIMIT + 1)),
        Judged(verdicts=(Verdict(rewards=(0.5,) * 65),)),
        Judged(verdicts=(Verdict(rewards=(1.5,)),)),
        msgspec.structs.replace(DONE, reward=2.0),
        msgspec.structs.replace(DONE, external=-1),
        msgspec.structs.replace(DONE, unencodable=-1),
        Saved(round=1, failure="x" * 501),
        Failed(summary="x" * 501, traceback=""),
        Failed(summary="", traceback="x" * 20_000),
        Delivered(),
    ],
)
def test_report_out_of_range_is_refused(report: Message) -> None:
    with pytest.raises(LocalError, match="not a report"):
        unpack_agent_report(frame(report))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xabRoundReport", b"\x81\xa4type\xa6Pickle"])
def test_garbage_is_refused(payload: bytes) -> None:
    for unpack in (unpack_order, unpack_agent_report):
        with pytest.raises(LocalError):
            unpack(payload)
