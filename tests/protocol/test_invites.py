"""Invites and revocations: who may come with which; nothing forged, foreign, expired or borrowed is accepted."""

from __future__ import annotations

import random

import msgspec
import pytest

from shoal.protocol.admission import Admission
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import (
    CLOCK_TOLERANCE_S,
    REVOKED_LIMIT,
    Credential,
    Revocations,
    claim,
    make_invite,
    make_revocations,
    reason_expired,
    reason_not_valid,
    when,
)
from shoal.protocol.manifest import Manifest
from shoal.protocol.records import NodeRecord, open_record, seal_record
from shoal.protocol.wire import MESSAGE_LIMIT_BYTES, Sealer, canonical, decode
from tests.manifests import manifest_of

NOW = 1_800_000_000
WEEK_S = 7 * 86_400
EXPIRES = NOW + WEEK_S

AUTHORITY, FOUNDER, GUEST, THIEF, BEARER = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 6))


def manifest(name: str = "test", admission: str = "invite") -> Manifest:
    return manifest_of([FOUNDER.peer_id], name=name, authority=AUTHORITY.peer_id, admission=admission)


MANIFEST = manifest()
SWARM = MANIFEST.swarm_id
OTHER_SWARM = manifest("other").swarm_id

BOUND = Credential(invite=make_invite(AUTHORITY, SWARM, holder=GUEST.peer_id, expires=EXPIRES))
BEARER_INVITE = make_invite(AUTHORITY, SWARM, holder=BEARER.peer_id, bearer=True, expires=EXPIRES)
BORNE = claim(BEARER_INVITE, BEARER, SWARM, GUEST.peer_id)


def admission(now: float = NOW, **changes: object) -> Admission:
    return Admission(manifest=MANIFEST, clock=lambda: now, **changes)  # type: ignore[arg-type]


def record(who: Identity, credential: Credential | None) -> NodeRecord:
    """As it comes out of the sender's own sealed envelope."""
    stated = NodeRecord(peer=who.peer_id, boot=1, invite=credential or msgspec.UNSET)
    return open_record(seal_record(Sealer(who, SWARM, 1), stated), SWARM, 0.0).record


def reason(who: Identity, credential: Credential | None, now: float = NOW) -> str | None:
    return admission(now).reason_not_to_join(record(who, credential))


@pytest.mark.parametrize("credential", [BOUND, BORNE])
def test_guest_with_an_invite_is_let_in(credential: Credential) -> None:
    assert reason(GUEST, credential) is None


def test_founder_and_authority_need_no_invite_and_others_do() -> None:
    assert reason(FOUNDER, None) is reason(AUTHORITY, None) is None
    assert reason(GUEST, None) == "admission is by invite and you have none; ask for a link made with `shoal invite`"


def test_invite_for_one_node_is_refused_to_another() -> None:
    assert reason(THIEF, BOUND) == (
        f"your invite is for {GUEST.peer_id} and you are {THIEF.peer_id}; ask for one of your own"
    )


def test_holder_of_an_invite_for_itself_cannot_pass_it_on() -> None:
    with pytest.raises(ValueError, match="a claim to an invite that is for one node"):
        claim(BOUND.invite, GUEST, SWARM, THIEF.peer_id)
    as_bearers = msgspec.structs.replace(BOUND.invite, bearer=True)
    passed_on = claim(as_bearers, GUEST, SWARM, THIEF.peer_id)
    assert "your invite was not signed for this swarm" in str(reason(THIEF, passed_on))


def test_credential_of_a_bearer_that_was_overheard_is_worth_nothing() -> None:
    assert f"your invite was not claimed for {THIEF.peer_id} with its key" in str(reason(THIEF, BORNE))
    assert "was not claimed" in str(reason(THIEF, Credential(invite=BEARER_INVITE)))
    assert "was not claimed" in str(reason(THIEF, claim(BEARER_INVITE, THIEF, SWARM, THIEF.peer_id)))


@pytest.mark.parametrize("bearer", [False, True])
def test_invite_of_another_swarm_or_another_signer_is_refused(bearer: bool) -> None:
    holder = BEARER if bearer else GUEST
    for signer, swarm in ((AUTHORITY, OTHER_SWARM), (THIEF, SWARM), (FOUNDER, SWARM)):
        invite = make_invite(signer, swarm, holder=holder.peer_id, bearer=bearer, expires=EXPIRES)
        shown = claim(invite, BEARER, SWARM, GUEST.peer_id) if bearer else Credential(invite=invite)
        assert reason(GUEST, shown) == (
            "your invite was not signed for this swarm by its authority; ask for a link made with `shoal invite`"
        )


def test_claim_for_another_swarm_is_refused() -> None:
    assert "was not claimed" in str(reason(GUEST, claim(BEARER_INVITE, BEARER, OTHER_SWARM, GUEST.peer_id)))


def test_invite_is_honoured_until_the_tolerance_beyond_its_expiry() -> None:
    last = EXPIRES + CLOCK_TOLERANCE_S
    assert reason(GUEST, BOUND, last) is None
    assert reason(GUEST, BOUND, last + 1) == f"your invite expired on {when(EXPIRES)}; ask for another"
    assert when(EXPIRES) == "2027-01-22 08:00 UTC"
    assert reason_expired(BEARER_INVITE, last + 1) is not None


def test_member_of_the_last_round_comes_back_with_an_invite_that_has_expired() -> None:
    late = EXPIRES + 10 * WEEK_S
    standing = admission(late, members=lambda: [GUEST.peer_id])
    assert standing.reason_not_to_join(record(GUEST, BOUND)) is None
    assert "expired" in str(admission(late).reason_not_to_join(record(GUEST, BOUND)))
    assert admission(late).reason_not_admitted(record(GUEST, BOUND)) is None  # its record goes on being passed on
    assert "is for" in str(standing.reason_not_to_join(record(THIEF, BOUND)))


def test_expiry_cannot_be_put_off_and_a_bearers_cannot_be_made_of_ones_own() -> None:
    for changes in ({"expires": EXPIRES + 1}, {"bearer": True}, {"holder": THIEF.peer_id}):
        changed = Credential(invite=msgspec.structs.replace(BOUND.invite, **changes))
        for who in (GUEST, THIEF):
            assert "not signed for this swarm" in str(reason(who, changed))


def damaged(rng: random.Random) -> bytes:
    """A credential with some bytes changed, cut or added."""
    data = bytearray(canonical(rng.choice([BOUND, BORNE])))
    for _ in range(rng.randint(1, 3)):
        at, many = rng.randrange(len(data)), rng.randint(1, 8)
        how = rng.choice(["change", "cut", "insert"])
        if how == "change":
            data[at] ^= rng.randint(1, 255)
        else:
            data[at : at + many * (how == "cut")] = rng.randbytes(many * (how == "insert"))
    return bytes(data)


def test_none_of_a_thousand_damaged_credentials_is_accepted() -> None:
    rng = random.Random(1)
    for data in {damaged(rng) for _ in range(1000)} - {canonical(BOUND), canonical(BORNE)}:
        try:
            credential = decode(data, Credential)
        except RemoteError:
            continue
        assert reason_not_valid(credential, peer=GUEST.peer_id, swarm=SWARM, authority=AUTHORITY.peer_id) is not None


def test_record_without_an_invite_is_as_it_was_on_the_wire() -> None:
    assert b"invite" not in canonical(NodeRecord(peer=GUEST.peer_id, boot=1))
    assert record(GUEST, None).credential is None
    assert record(GUEST, BORNE).credential == BORNE


# -- revocations ---------------------------------------------------------------------------------------------


def revoked(*peers: PeerId, before: Revocations | None = None) -> Revocations:
    return make_revocations(AUTHORITY, SWARM, before, peers)


def test_revoked_peer_is_refused_whatever_admits_it() -> None:
    for how in ("open", "allowlist", "invite"):
        rule = Admission(manifest=manifest(admission=how))
        listed = make_revocations(AUTHORITY, rule.manifest.swarm_id, None, [FOUNDER.peer_id, GUEST.peer_id])
        assert rule.take(listed)
        for who in (FOUNDER, GUEST):
            stated = NodeRecord(peer=who.peer_id, boot=1, invite=BOUND)
            expected = f"the swarm's authority has revoked {who.peer_id}"
            assert rule.reason_not_to_join(stated) == rule.reason_not_admitted(stated) == expected
            assert rule.reason_not_to_know(who.peer_id) == expected


@pytest.mark.parametrize(("how", "guest"), [("open", True), ("allowlist", False), ("invite", False)])
def test_who_may_become_a_member_is_who_may_be_in(how: str, guest: bool) -> None:
    """By invite nobody may whose record, with the invite, is not known here."""
    rule = Admission(manifest=manifest(admission=how))
    for who in (FOUNDER, AUTHORITY):
        assert rule.may_join(who.peer_id, None)
    for stated in (None, NodeRecord(peer=GUEST.peer_id, boot=1)):
        assert rule.may_join(GUEST.peer_id, stated) is guest
    assert rule.take(make_revocations(AUTHORITY, rule.manifest.swarm_id, None, [FOUNDER.peer_id, GUEST.peer_id]))
    assert not rule.may_join(FOUNDER.peer_id, None)
    assert not rule.may_join(GUEST.peer_id, None)
    if how == "invite":
        rule = admission()
        assert rule.may_join(GUEST.peer_id, record(GUEST, BORNE))
        assert not rule.may_join(THIEF.peer_id, NodeRecord(peer=THIEF.peer_id, boot=1, invite=BOUND))


def test_revoked_invite_shuts_out_all_who_came_with_it_and_nobody_else() -> None:
    rule = admission(members=lambda: [one.peer_id for one in (GUEST, BEARER, THIEF)])
    assert rule.take(revoked(BEARER.peer_id))
    other = claim(BEARER_INVITE, BEARER, SWARM, THIEF.peer_id)
    for who, shown in ((GUEST, BORNE), (THIEF, other)):
        assert "has revoked the invite that you came with" in str(rule.reason_not_to_join(record(who, shown)))
        assert rule.is_revoked(who.peer_id, record(who, shown))
    assert rule.reason_not_to_join(record(GUEST, BOUND)) is None
    assert rule.take(revoked(GUEST.peer_id, before=rule.revocations))
    assert "has revoked the invite that you came with" in str(rule.reason_not_admitted(record(GUEST, BORNE)))
    assert f"has revoked {GUEST.peer_id}" in str(rule.reason_not_admitted(record(GUEST, BOUND)))


def test_list_is_taken_in_order_of_version_only_if_the_authority_signed_it_for_this_swarm() -> None:
    kept: list[Revocations] = []
    rule = admission(keep=kept.append)
    first = revoked(GUEST.peer_id)
    second = revoked(THIEF.peer_id, before=first)
    assert (first.version, second.version) == (1, 2)
    assert set(second.peers) == {GUEST.peer_id, THIEF.peer_id}
    assert rule.take(second)
    assert not rule.take(second)
    assert not rule.take(first)
    foreign = make_revocations(AUTHORITY, OTHER_SWARM, second, [FOUNDER.peer_id])
    forged = make_revocations(GUEST, SWARM, second, [FOUNDER.peer_id])
    emptied = msgspec.structs.replace(second, version=3, peers=())
    for bad in (foreign, forged, emptied):
        with pytest.raises(RemoteError, match="did not sign"):
            rule.take(bad, peer=THIEF.peer_id)
    assert rule.revocations == second
    assert kept == [second]


@pytest.mark.parametrize("others", [1, 2, 3])
def test_authority_whose_folder_was_restored_joins_its_list_with_the_one_that_the_others_have(others: int) -> None:
    kept: list[Revocations] = []

    def join(mine: Revocations, theirs: Revocations) -> Revocations:
        newer, older = (mine, theirs) if mine.is_newer_than(theirs) else (theirs, mine)
        return revoked(*older.peers, before=newer)

    theirs: Revocations | None = None
    for who in (GUEST, BEARER, FOUNDER)[:others]:
        theirs = revoked(who.peer_id, before=theirs)
    assert theirs is not None
    mine = revoked(THIEF.peer_id, before=revoked(GUEST.peer_id))
    rule, member = admission(keep=kept.append, join=join), admission()
    assert member.take(theirs)
    assert rule.take(mine)
    assert rule.take(theirs) == (others > 1)
    assert rule.revocations is not None
    assert set(rule.revocations.peers) == {*mine.peers, *theirs.peers}
    assert kept[-1] == rule.revocations
    assert member.take(rule.revocations)
    assert not rule.take(theirs), "and once"
    assert not rule.take(rule.revocations)


def test_two_lists_of_one_version_end_as_the_same_one_everywhere() -> None:
    lists = [revoked(GUEST.peer_id), revoked(THIEF.peer_id)]
    ends = []
    for order in (lists, lists[::-1]):
        rule = admission()
        for one in order:
            rule.take(one)
        ends.append(rule.revocations)
    assert ends[0] == ends[1]


def test_list_is_bounded_and_fits_a_message() -> None:
    peers = [Identity.from_seed(n.to_bytes(32, "big")).peer_id for n in range(1, REVOKED_LIMIT + 2)]
    full = revoked(*peers[:REVOKED_LIMIT])
    assert len(canonical(full)) < 56_000 < MESSAGE_LIMIT_BYTES
    assert decode(canonical(full), Revocations) == full
    with pytest.raises(ConfigError, match=f"a swarm can revoke {REVOKED_LIMIT} peers"):
        revoked(peers[-1], before=full)


@pytest.mark.parametrize("peers", [(THIEF.peer_id, THIEF.peer_id), tuple(sorted([GUEST.peer_id, THIEF.peer_id]))[::-1]])
def test_list_out_of_order_is_no_list(peers: tuple[PeerId, ...]) -> None:
    good = canonical(revoked(*set(peers)))
    bad = msgspec.msgpack.decode(good) | {"peers": list(peers)}
    with pytest.raises(RemoteError, match="not in order, or named twice"):
        decode(canonical(bad), Revocations)
