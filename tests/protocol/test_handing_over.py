"""Who else has the state of a round, as a machine knows it, and who alone can certify: what a leaver stays for."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Ready, Value, domain_hash
from shoal.protocol.planning import JOINER, OBSERVER, TRAINING, absent_ready
from shoal.protocol.round import RoundMachine
from tests.protocol.lab import PaperIdentity, paper_identities
from tests.protocol.round_node import SETTINGS, deal_evenly
from tests.protocol.test_view_sync import swarm

pytestmark = pytest.mark.usefixtures("paper_signatures")

ANN, BOB, CEM = (identity.peer_id for identity in paper_identities(3))


def head_of(*members: PeerId, planner: PeerId = ANN) -> Value:
    """The value of a round that these reported."""
    _, first = swarm(3)
    known = {"plan": domain_hash("plan", b"1"), "digest": domain_hash("state", b"1"), "base": first.hash}
    return msgspec.structs.replace(first, round=1, members=tuple(sorted(members)), planner=planner, **known)


def machine_on(previous: Value, *alive: PeerId, banned: tuple[PeerId, ...] = ()) -> RoundMachine:
    """Ann's machine, in which these others live."""
    ann: PaperIdentity = paper_identities(1)[0]
    machine = RoundMachine(
        identity=ann,  # type: ignore[arg-type]
        previous=previous,
        state=previous.digest,
        life=bytes(32),
        settings=SETTINGS,
        deal=deal_evenly,
        banned=banned,
    )
    machine.peers_alive(alive, 0.0)
    machine.ready(absent_ready(TRAINING, previous, previous.digest), 0.0)
    return machine


def says(machine: RoundMachine, peer: PeerId, role: str, state: bytes | None = None) -> None:
    """`peer` announces itself in this life, on the state of the round or on another."""
    ready: Ready = absent_ready(role, machine.previous, machine.previous.digest if state is None else state)
    machine.receive(peer, ready, 1.0)


def test_state_is_held_alone_until_another_announces_it() -> None:
    machine = machine_on(head_of(ANN), BOB, CEM)
    assert machine.holds_alone()
    says(machine, BOB, JOINER, NO_HASH)  # on its way
    says(machine, CEM, JOINER, domain_hash("state", b"another"))
    assert machine.holds_alone()
    says(machine, BOB, JOINER)
    assert not machine.holds_alone()
    machine.peers_alive([CEM], 2.0)
    assert machine.holds_alone()


@pytest.mark.parametrize("role", [TRAINING, OBSERVER, JOINER])
def test_state_is_held_by_whoever_announces_it_in_any_role(role: str) -> None:
    machine = machine_on(head_of(ANN), BOB)
    says(machine, BOB, role)
    assert not machine.holds_alone()


def test_member_that_reported_the_state_holds_it_until_it_says_otherwise() -> None:
    machine = machine_on(head_of(ANN, BOB), BOB, CEM)
    assert not machine.holds_alone()
    says(machine, BOB, JOINER, NO_HASH)
    assert machine.holds_alone()


def test_members_that_a_founding_names_reported_nothing() -> None:
    machine = machine_on(msgspec.structs.replace(head_of(ANN, BOB), plan=NO_HASH), BOB)
    assert machine.holds_alone()


def test_nobody_is_waited_for_where_nobody_else_lives_or_may_take_part() -> None:
    assert not machine_on(head_of(ANN)).holds_alone()
    assert not machine_on(head_of(ANN, BOB)).holds_alone()
    assert not machine_on(head_of(ANN), BOB, banned=(BOB,)).holds_alone()


def test_holder_that_promised_to_leave_does_not_stay_with_the_state() -> None:
    machine = machine_on(head_of(ANN, BOB), BOB, CEM)
    machine.agreement.leaves.add(BOB)
    assert machine.holds_alone()


def test_last_living_member_hands_over_to_those_who_have_its_state() -> None:
    machine = machine_on(head_of(ANN), BOB)
    assert not machine.hands_over()  # nobody has it yet
    says(machine, BOB, JOINER)
    assert machine.hands_over()
    machine.peers_alive([], 2.0)
    assert not machine.hands_over()


def test_member_hands_nothing_over_where_another_lives_or_it_can_certify_nothing() -> None:
    among = machine_on(head_of(ANN, BOB), BOB, CEM)
    says(among, CEM, JOINER)
    assert not among.hands_over()
    powerless = machine_on(head_of(ANN, BOB, planner=BOB), CEM)
    says(powerless, CEM, JOINER)
    assert not powerless.hands_over()
    outside = machine_on(head_of(BOB, planner=BOB), CEM)
    says(outside, CEM, JOINER)
    assert not outside.hands_over()
    casting = machine_on(head_of(ANN, BOB), CEM)
    says(casting, CEM, JOINER)
    assert casting.hands_over()
