"""The rows of peers as they are read off a node: real records and a real failure detector, and no network."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.node.control_client import MemberStatus
from shoal.node.parts import SOFTWARE
from shoal.node.peer_facts import PeerFacts, behind_of
from shoal.node.peers import UNKNOWN_PHASE, peer_rows
from shoal.node.status import _member
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.membership import MembershipMachine, State
from shoal.protocol.names import Names, capability_of, claimed_name, short
from shoal.protocol.records import NodeRecord, Phase, RecordBook, seal_record
from shoal.protocol.wire import Sealer, SwarmId
from shoal.swarm.lanes.socket import Moved

SWARM = SwarmId(bytes(32))


class Crowd:
    """What `peer_rows` asks of a node: this one is the first of `names`, and hears what a test has it hear."""

    def __init__(self, *names: str) -> None:
        self.identities = {name: Identity.from_seed(name.encode().ljust(32)) for name in names}
        self.me = self.id(names[0])
        self.book = RecordBook(SWARM)
        self.machine = MembershipMachine(me=self.me, rng=random.Random(1))
        self.linked: set[PeerId] = set()
        self.members: list[PeerId] = []
        self.certifies = True
        self.sharing: object = None

    def id(self, name: str) -> PeerId:
        return self.identities[name].peer_id

    def record(self, name: str, *, phase: Phase = "training", round: int = 3, called: str = "") -> None:
        """A record of this peer comes by gossip."""
        sealer = Sealer(identity=self.identities[name], swarm_id=SWARM, boot=1)
        record = NodeRecord(
            peer=self.id(name),
            boot=1,
            phase=phase,
            round=round,
            tokens_per_s=7.0,
            control_addresses=("/ip4/192.0.2.1",),
            capabilities=(capability_of(called),) if called else (),
        )
        self.book.receive(seal_record(sealer, record), 0.0)

    def claim(self, peer: str) -> str:
        """The name that a peer's record says; this node's is `box`."""
        record = self.book.get(PeerId(peer))
        return "box" if peer == self.me else claimed_name(record.capabilities) if record is not None else ""

    def hear(self, name: str, *, linked: bool) -> None:
        self.machine.peer_seen(self.id(name), 0, 0.0)
        if linked:
            self.linked.add(self.id(name))

    def rows(self, phase: Phase = "training") -> list[PeerFacts]:
        machine = self.machine
        parts: Any = SimpleNamespace(
            identity=self.identities[next(iter(self.identities))],
            members=SimpleNamespace(
                machine=machine,
                book=self.book,
                present=lambda: frozenset(machine.alive()),
                suspected=lambda: frozenset(machine.in_state(State.SUSPECT)),
                links=SimpleNamespace(linked=lambda: frozenset(self.linked)),
            ),
            lanes=SimpleNamespace(moved=lambda peer: Moved(received=5, taken=9) if peer in self.linked else Moved()),
            training_client=SimpleNamespace(tokens_per_s=11.0),
            host=SimpleNamespace(addresses=["/ip4/192.0.2.9"]),
            names=Names(self.claim, limit=8),
        )
        standing = SimpleNamespace(members=self.members, voters=self.members)
        rounds: Any = SimpleNamespace(
            standing=lambda: standing,
            position=(None, 4),
            certifying=object() if self.certifies else None,
            sharing=self.sharing,
        )
        return peer_rows(parts, rounds, phase)


def of(rows: Sequence[PeerFacts], crowd: Crowd, name: str) -> PeerFacts:
    return next(row for row in rows if row.peer == crowd.id(name))


def test_every_peer_has_a_row_that_says_how_it_is_reached() -> None:
    crowd = Crowd("me", "linked", "indirect", "by record", "dead", "lost member", "paused")
    crowd.members = [crowd.id(name) for name in ("me", "linked", "lost member", "paused")]
    for name in ("linked", "indirect", "by record", "dead"):
        crowd.record(name)
    crowd.record("paused", phase="paused", round=2)
    for name in ("linked", "dead", "paused"):
        crowd.hear(name, linked=True)
    crowd.hear("indirect", linked=False)
    crowd.machine.connection_lost(crowd.id("dead"), 1.0, confirmed=True)
    rows = crowd.rows()
    assert [row.peer for row in rows] == [
        *sorted(crowd.members),
        *sorted(crowd.id(name) for name in ("indirect", "by record", "dead")),
    ]
    reaches = {name: of(rows, crowd, name).reach for name in crowd.identities}
    assert reaches == {
        "me": "self",
        "linked": "direct",
        "paused": "direct",
        "indirect": "detour",
        "by record": "unlinked",
        "dead": "gone",
        "lost member": "gone",
    }
    assert of(rows, crowd, "linked") == PeerFacts(
        peer=crowd.id("linked"),
        phase="training",
        reach="direct",
        member=True,
        round=4,
        tokens_per_s=7.0,
        sent=9,
        received=5,
        address="/ip4/192.0.2.1",
    )
    own = of(rows, crowd, "me")
    assert (own.round, own.tokens_per_s, own.software, own.address) == (4, 11.0, SOFTWARE, "/ip4/192.0.2.9")
    assert of(rows, crowd, "lost member").phase == UNKNOWN_PHASE


@pytest.mark.parametrize(("certifies", "told"), [(False, [33, 2]), (True, [4, 4])])
def test_round_of_a_peer_that_shares_rollouts_is_the_newest_that_it_announced(certifies: bool, told: list[int]) -> None:
    crowd = Crowd("me", "a", "b")
    crowd.certifies, crowd.members = certifies, [crowd.id(name) for name in ("me", "a", "b")]
    newest = {crowd.id("a"): 33, crowd.id("b"): 1}
    crowd.sharing = SimpleNamespace(newest_round=newest.__getitem__)
    for name, round in (("a", 0), ("b", 2)):
        crowd.record(name, round=round)
        crowd.hear(name, linked=True)
    assert [of(crowd.rows(), crowd, name).round for name in ("a", "b")] == told


@pytest.mark.parametrize(("certifies", "told"), [(True, [4, 4, 2, 9]), (False, [1, 0, 2, 9])])
def test_nobody_whom_the_newest_certificate_names_is_behind_it(certifies: bool, told: list[int]) -> None:
    crowd = Crowd("me", "named", "no record", "other", "ahead")
    crowd.certifies = certifies
    crowd.members = [crowd.id(name) for name in ("me", "named", "no record", "ahead")]
    for name, round in (("named", 1), ("other", 2), ("ahead", 9)):
        crowd.record(name, round=round)
    for name in ("named", "no record", "other", "ahead"):
        crowd.hear(name, linked=True)
    rows = crowd.rows()
    assert [of(rows, crowd, name).round for name in ("named", "no record", "other", "ahead")] == told
    assert (crowd.id("named") in behind_of(rows)) is not certifies


def test_rows_have_names_and_no_two_the_same() -> None:
    crowd = Crowd("me", "tom", "like me", "old", "liar")
    crowd.record("tom", called="tom")
    crowd.record("like me", called="box")
    crowd.record("old")
    crowd.record("liar", called=".b.")  # no name, though a record has room for it
    rows = crowd.rows()
    assert {name: of(rows, crowd, name).name for name in crowd.identities} == {
        "me": f"box{short(crowd.me)}",
        "tom": "tom",
        "like me": f"box{short(crowd.id('like me'))}",
        "old": "",
        "liar": "",
    }


def test_the_members_of_a_status_are_these_rows() -> None:
    crowd = Crowd("me", "linked", "paused", "lost", "without record")
    crowd.members = [crowd.id(name) for name in crowd.identities]
    for name in ("linked", "lost"):
        crowd.record(name)
    crowd.record("paused", phase="paused")
    for name in ("linked", "paused", "without record"):
        crowd.hear(name, linked=name != "paused")

    def member(name: str, phase: Phase = "training") -> MemberStatus:
        return _member(of(crowd.rows(phase), crowd, name))

    assert member("me") == MemberStatus(peer_id=crowd.me, phase="training", tokens_per_s=11.0, reach="self")
    assert member("me", "paused").tokens_per_s is None
    assert member("linked") == MemberStatus(
        peer_id=crowd.id("linked"), phase="training", tokens_per_s=7.0, reach="direct"
    )
    assert member("paused") == MemberStatus(
        peer_id=crowd.id("paused"), phase="paused", tokens_per_s=None, reach="through others"
    )
    for name in ("lost", "without record"):
        gone = MemberStatus(peer_id=crowd.id(name), phase="missing", tokens_per_s=None, reach="gone")
        assert member(name) == gone
