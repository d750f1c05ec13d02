"""Admission on real hosts on loopback: invites shown in the hello, and the authority's revocations as they spread."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import pytest
import trio

from shoal.protocol.admission import Admission
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import (
    CLOCK_TOLERANCE_S,
    Credential,
    Revocations,
    claim,
    make_invite,
    make_revocations,
)
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Leave, Term
from shoal.protocol.peering import Announce, Refusal
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.wire import Sealer, canonical
from shoal.swarm import dialling as dialling_module
from shoal.swarm.limits import Reason
from shoal.swarm.links import HELLO_PROTOCOL, Refused
from shoal.swarm.streams import MessageStream
from tests.manifests import manifest_of
from tests.swarm.test_members import Node, assert_linked, identity, running, stranger
from tests.waiting import WAIT_S, until

AUTHORITY, BEARER, THIEF = identity(101), identity(102), identity(103)


def manifest(name: str = "test", admission: str = "invite") -> Manifest:
    return manifest_of([identity(1).peer_id], name=name, authority=AUTHORITY.peer_id, admission=admission)


CLOSED = manifest()
SWARM = CLOSED.swarm_id
LATER = int(time.time()) + 3600


@dataclass
class Guest(Node):
    """A node that shows a credential, or none."""

    manifest: Manifest = CLOSED
    credential: Credential | None = None

    def record(self) -> NodeRecord:
        return msgspec.structs.replace(super().record(), invite=self.credential or msgspec.UNSET)


def bound(seed: int, *, signer: Identity = AUTHORITY, swarm: bytes = SWARM, expires: int = LATER) -> Credential:
    return Credential(invite=make_invite(signer, swarm, holder=identity(seed).peer_id, expires=expires))  # type: ignore[arg-type]


def borne(seed: int, *, expires: int = LATER) -> Credential:
    invite = make_invite(AUTHORITY, SWARM, holder=BEARER.peer_id, bearer=True, expires=expires)
    return claim(invite, BEARER, SWARM, identity(seed).peer_id)


def revoking(*nodes: Node, before: Revocations | None = None) -> Revocations:
    return make_revocations(AUTHORITY, nodes[0].manifest.swarm_id, before, [node.peer for node in nodes])


@pytest.fixture(autouse=True)
def _dial_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.1)


async def test_guests_with_invites_link_with_all_through_any_one_member() -> None:
    founder, second, third = Guest(1), Guest(2, credential=bound(2)), Guest(3, credential=borne(3))
    async with running(founder, second, third):
        await second.join(founder)
        await third.join(second)
        await assert_linked(founder, second, third)


@pytest.mark.parametrize(
    ("credential", "reason"),
    [
        (None, "admission is by invite and you have none"),
        (bound(2, signer=THIEF), "your invite was not signed for this swarm by its authority"),
        (bound(2, swarm=manifest("other").swarm_id), "your invite was not signed for this swarm by its authority"),
        (bound(2, expires=LATER - 3600 - 2 * CLOCK_TOLERANCE_S), "your invite expired on 20"),
        (bound(3), f"your invite is for {identity(3).peer_id} and you are {identity(2).peer_id}"),
        (borne(3), f"your invite was not claimed for {identity(2).peer_id} with its key"),
    ],
    ids=["none", "forged", "foreign", "expired", "of another", "overheard"],
)
async def test_guest_is_refused_at_hello_with_the_reason(credential: Credential | None, reason: str) -> None:
    founder, guest = Guest(1), Guest(2, credential=credential)
    async with running(founder, guest):
        assert reason in await refusal(guest, founder)
        assert founder.linked() == guest.linked() == frozenset()
        assert founder.members.record_of(guest.peer) is None
        assert founder.members.alive() == frozenset()
        assert founder.changes == []


async def test_guest_whose_invite_expired_stays_while_linked_and_comes_back_as_a_member_of_the_last_round() -> None:
    founder, guest = Guest(1), Guest(2, credential=bound(2))
    async with running(founder, guest):
        await guest.join(founder)
        founder.members.admission.clock = lambda: LATER + CLOCK_TOLERANCE_S + 1.0
        guest.members.announce()  # its record comes again, and is taken
        await assert_linked(founder, guest)
        assert founder.members.record_of(guest.peer) is not None
        with pytest.raises(Refused, match="your invite expired on"):
            await guest.join(founder)
        founder.members.admission.members = lambda: (guest.peer,)
        await guest.join(founder)


async def test_guest_does_not_join_a_member_without_an_invite() -> None:
    """An invite binds the one who is asked as well: else anybody at a member's old address could pose as one."""
    guest = Guest(2, credential=bound(2))
    async with running(guest), stranger(9, swarm_id=SWARM) as impostor:
        impostor.welcomes()
        with pytest.raises(RemoteError, match="does not belong to this swarm: admission is by invite"):
            await guest.members.links.join(impostor.host.addresses[0], deadline_s=WAIT_S)
        assert guest.linked() == frozenset()


async def test_record_is_kept_and_passed_on_only_of_who_may_be_here() -> None:
    founder, guest = Guest(1), Guest(2, credential=bound(2))
    async with running(founder, guest):
        await guest.join(founder)
        await assert_linked(founder, guest)
        for seed, credential in ((7, None), (8, bound(2)), (9, borne(9, expires=0))):
            who = identity(seed)
            stated = NodeRecord(peer=who.peer_id, boot=1, invite=credential or msgspec.UNSET)
            guest.members.links.send(founder.peer, Announce(record=seal_record(Sealer(who, SWARM, 1), stated)))
        await until(lambda: founder.members.record_of(identity(9).peer_id))  # it joined in time, somewhere
        for seed in (7, 8):
            assert founder.members.record_of(identity(seed).peer_id) is None


async def refusal(guest: Node, member: Node) -> str:
    """What `member` says to a guest that tries again by itself as well, so that one attempt can spoil the other."""
    while True:
        try:
            await guest.join(member)
        except Refused as error:
            return str(error)
        except NetworkError:
            await trio.sleep(0.02)
        assert guest.peer not in member.linked()


# -- revocations ---------------------------------------------------------------------------------------------


async def test_hello_is_refused_from_the_moment_that_its_peer_or_its_invite_is_revoked() -> None:
    founder, bound_guest, bearer = Guest(1), Guest(2, credential=bound(2)), Guest(3, credential=borne(3))

    def answer(guest: Guest) -> str:
        """The reason to refuse its hello; "" if it is welcome."""
        answer, _ = founder.members.welcome(guest.peer, guest.members.hello())
        return answer.reason if isinstance(answer, Refusal) else ""

    assert answer(bound_guest) == answer(bearer) == ""
    listed = revoking(bound_guest)
    founder.members.revoke(listed)
    assert answer(bound_guest).startswith(f"the swarm's authority has revoked {bound_guest.peer}")
    assert not founder.members.admits(bound_guest.peer)
    assert answer(bearer) == ""
    founder.members.revoke(make_revocations(AUTHORITY, SWARM, listed, [BEARER.peer_id]))
    assert "has revoked" in answer(bearer)
    assert "has revoked" in answer(bound_guest)
    assert founder.host.refusals.counts() == {Reason.ADMISSION.value: 3}


@pytest.mark.parametrize("admission", ["open", "invite"])
async def test_revoked_member_is_parted_from_by_all_and_refused_from_then_on(admission: str) -> None:
    rule = manifest(admission=admission)
    founder, second, third = (
        Guest(n, manifest=rule, credential=None if n == 1 or admission == "open" else bound(n)) for n in (1, 2, 3)
    )
    kept: list[Revocations] = []
    second.members.admission.keep = kept.append
    async with running(founder, second, third):
        await second.join(founder)
        await third.join(founder)
        await assert_linked(founder, second, third)
        listed = revoking(third)
        founder.members.revoke(listed)
        await until(lambda: third.peer not in second.linked())
        assert kept == [listed]
        for node, other in ((founder, second), (second, founder)):
            assert node.says("revoked", third)
            assert node.linked() == {other.peer}
            await until(lambda node=node, other=other: node.members.alive() == {other.peer})  # type: ignore[misc]
            assert node.members.record_of(third.peer) is None
            assert not node.members.admits(third.peer)
            assert f"the swarm's authority has revoked {third.peer}" in await refusal(third, node)
        await until(lambda: third.says("revoked", third))
        with pytest.raises(ConfigError, match=f"has revoked {third.peer}; .*`shoal id --rotate`"):
            third.members.admission.check_own(third.peer)
        second.members.admission.check_own(second.peer)
        assert founder.members.addresses_of(third.peer) == ()
        for node in (founder, second):
            await until(lambda node=node: third.peer not in node.host.connected())  # type: ignore[misc]
        await assert_linked(founder, second)


async def test_nothing_is_heard_from_who_is_revoked_while_it_is_sent_the_list() -> None:
    founder, guest = Guest(1), Guest(2, credential=bound(2))
    async with running(founder, guest):
        await guest.join(founder)
        await assert_linked(founder, guest)
        heard: list[object] = []
        founder.members.message = lambda peer, message: heard.append(message)  # type: ignore[method-assign]
        founder.members.revoke(revoking(guest))
        assert guest.peer in founder.host.connected()
        guest.members.links.send(founder.peer, Leave(term=Term(), round=9, base=bytes(32), signature=bytes(64)))
        await until(lambda: guest.peer not in founder.host.connected())
        assert guest.says("revoked", guest), "it read the list before its connection was closed"
        assert heard == []


@pytest.mark.parametrize("admission", ["open", "invite"])
async def test_founder_that_was_revoked_while_it_was_away_is_told_by_the_first_member_that_it_dials(
    admission: str,
) -> None:
    rule = manifest_of([identity(n).peer_id for n in (1, 2)], authority=AUTHORITY.peer_id, admission=admission)
    member, founder = Guest(1, manifest=rule), Guest(2, manifest=rule)
    listed = revoking(founder)
    member.members.revoke(listed)
    kept: list[Revocations] = []
    founder.members.admission.keep = kept.append
    async with running(member, founder):
        assert f"the swarm's authority has revoked {founder.peer}" in await refusal(founder, member)
        assert kept == [listed]
        await until(lambda: founder.says("revoked", founder))
        with pytest.raises(ConfigError, match=f"has revoked {founder.peer}; .*`shoal id --rotate`"):
            founder.members.admission.check_own(founder.peer)
        assert member.changes == [], "nobody was linked with it, and nobody hears of it anew"


async def test_who_is_refused_for_something_else_is_sent_no_list() -> None:
    founder, guest = Guest(1), Guest(2)
    founder.members.revoke(revoking(Guest(3)))
    async with running(founder, guest):
        assert "admission is by invite and you have none" in await refusal(guest, founder)
        assert guest.members.admission.revocations is None


@pytest.mark.parametrize("forger", [identity(9), THIEF], ids=["who sends it", "a stranger"])
async def test_list_behind_a_refusal_is_believed_of_the_authority_alone(forger: Identity) -> None:
    guest = Guest(2, credential=bound(2))
    forged = make_revocations(forger, SWARM, None, [guest.peer])

    async def refuse(stream: MessageStream) -> None:
        await stream.receive(deadline_s=WAIT_S)
        for said in (Refusal(reason="you are revoked"), forged):
            await stream.send(canonical(said), deadline_s=WAIT_S)
        await stream.aclose()

    async with running(guest), stranger(9, swarm_id=SWARM) as impostor:
        impostor.host.serve(HELLO_PROTOCOL, refuse)
        with pytest.raises(RemoteError, match="a list of revocations that the swarm's authority did not sign") as told:
            await guest.members.links.join(impostor.host.addresses[0], deadline_s=WAIT_S)
        assert told.value.peer == impostor.peer
        assert guest.members.admission.revocations is None
        assert guest.changes == []
        guest.members.admission.check_own(guest.peer)


async def test_member_that_comes_with_a_revoked_invite_is_known_as_revoked_to_who_never_heard_of_it() -> None:
    founder, voter, stray = Guest(1), Guest(2, credential=borne(2)), Guest(3, credential=borne(3))
    founder.members.admission.members = lambda: (voter.peer,)
    founder.members.revoke(make_revocations(AUTHORITY, SWARM, None, [BEARER.peer_id]))
    assert not founder.members.is_revoked(voter.peer)
    async with running(founder, voter, stray):
        for guest in (voter, stray):
            assert "has revoked the invite that you came with" in await refusal(guest, founder)
            await until(lambda guest=guest: guest.says("revoked", guest))  # type: ignore[misc]
        assert founder.members.is_revoked(voter.peer)
        assert not founder.members.is_revoked(stray.peer), "anybody could have any number of such strangers noted"


@pytest.mark.parametrize("admission", ["open", "invite"])
def test_who_is_revoked_is_told_what_lets_it_in_again(admission: str) -> None:
    peer, invited = identity(2).peer_id, admission == "invite"

    def told(*revoked: PeerId) -> str:
        listed = make_revocations(AUTHORITY, SWARM, None, revoked)
        rule = Admission(manifest=manifest(admission=admission), credential=borne(2), revocations=listed)
        with pytest.raises(ConfigError) as caught:
            rule.check_own(peer)
        return str(caught.value).partition("; ")[2]

    rotated = "ask who runs the swarm: if that was a mistake, `shoal id --rotate` makes this another node"
    anew = ", which has to be invited anew" if invited else ""
    assert told(BEARER.peer_id) == "ask who runs the swarm for a new link"
    assert told(peer, BEARER.peer_id) == f"{rotated}{anew}", "a new link alone would not let it in"


async def test_who_came_with_an_invite_is_known_by_its_record() -> None:
    founder, voter, other = Guest(1), Guest(2, credential=borne(2)), Guest(3, credential=bound(3))
    async with running(founder, voter, other):
        await voter.join(founder)
        await other.join(founder)
        await assert_linked(founder, voter, other)
        assert founder.members.came_with({BEARER.peer_id}) == {voter.peer}
        assert founder.members.came_with({founder.peer}) == frozenset()


async def test_newcomer_hears_of_a_revocation_from_a_member_that_was_told() -> None:
    founder, second, third = Guest(1), Guest(2, credential=bound(2)), Guest(3, credential=bound(3))
    outcast = Guest(4, credential=bound(4))
    async with running(founder, second, third, outcast):
        await second.join(founder)
        founder.members.revoke(revoking(outcast))
        await until(lambda: second.members.admission.revocations is not None)
        founder.kill()
        await third.join(second)
        await until(lambda: third.members.admission.revocations is not None)
        assert "has revoked" in await refusal(outcast, third)


async def test_revoked_invite_parts_with_all_who_came_with_it() -> None:
    founder, *peer_limits = Guest(1), Guest(2, credential=borne(2)), Guest(3, credential=borne(3))
    other = Guest(4, credential=bound(4))
    async with running(founder, *peer_limits, other):
        for guest in (*peer_limits, other):
            await guest.join(founder)
        await assert_linked(founder, *peer_limits, other)
        founder.members.revoke(make_revocations(AUTHORITY, SWARM, None, [BEARER.peer_id]))
        for node in (founder, other):
            expected = {founder.peer, other.peer} - {node.peer}
            await until(lambda node=node, expected=expected: node.linked() == expected)  # type: ignore[misc]
        assert "has revoked the invite that you came with" in await refusal(peer_limits[0], founder)


async def test_forged_list_costs_its_sender_the_link_and_revokes_nobody() -> None:
    founder, second, third = Guest(1), Guest(2, credential=bound(2)), Guest(3, credential=bound(3))
    async with running(founder, second, third):
        await second.join(founder)
        await third.join(founder)
        await assert_linked(founder, second, third)
        forged = make_revocations(identity(2), SWARM, None, [third.peer])
        second.members.links.send(founder.peer, forged)
        await until(lambda: founder.says("lost", second))
        assert founder.members.admission.revocations is None
        assert not founder.says("revoked", third)
        assert third.peer in founder.linked()


async def test_list_is_passed_on_once() -> None:
    founder, second = Guest(1), Guest(2, credential=bound(2))
    async with running(founder, second):
        await second.join(founder)
        await assert_linked(founder, second)
        listed = revoking(Guest(5))
        founder.members.revoke(listed)
        await until(lambda: second.members.admission.revocations == listed)
        said: list[object] = []
        second.members.links.broadcast = said.append  # type: ignore[method-assign]
        for _ in range(3):
            founder.members.links.send(second.peer, listed)
        last = Leave(term=Term(), round=99, base=bytes(32), signature=bytes(64))
        founder.members.links.send(second.peer, last)
        await until(lambda: (founder.peer, last) in second.heard)
        assert [word for word in said if isinstance(word, Revocations)] == []
