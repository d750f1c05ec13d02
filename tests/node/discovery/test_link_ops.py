"""What the op `revoke` says of voters that are shut out and still counted."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.node.discovery.credentials import admission_of, kept_revocations, revoke
from shoal.node.discovery.link_ops import holding_up, link_orders
from shoal.node.rounds.authority import KEY_NAME
from shoal.protocol import key_file
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import Revocations, make_revocations
from shoal.protocol.voting import FaultModel
from tests.manifests import manifest_of


@pytest.mark.parametrize(
    ("voters", "here", "revoked", "faults", "counted"),
    [
        ("AB", "A", "B", FaultModel.CRASH, "B"),
        ("AB", "AN", "B", FaultModel.CRASH, "B"),  # a newcomer has no vote
        ("ABC", "AC", "B", FaultModel.CRASH, ""),
        ("ABC", "ABC", "BC", FaultModel.CRASH, "BC"),  # they may not be seen to go yet
        ("ABCD", "ABC", "D", FaultModel.LYING, ""),
        ("ABCD", "AB", "D", FaultModel.LYING, "D"),
        ("ABC", "A", "", FaultModel.CRASH, ""),
    ],
)
def test_revoked_voters_are_named_where_the_others_are_no_majority(
    voters: str, here: str, revoked: str, faults: FaultModel, counted: str
) -> None:
    held_up = holding_up(*([PeerId(peer) for peer in peers] for peers in (revoked, here, voters)), faults)
    assert held_up == list(counted)


async def test_who_takes_part_and_came_with_a_revoked_invite_is_named_beside_it(tmp_path: Path) -> None:
    """A member that was away has no record that says with what another came: the list alone can tell it."""
    founder, voter, newcomer, stray, invite = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 6))
    authority = Identity.load_or_create(tmp_path / KEY_NAME)
    manifest = manifest_of([founder.peer_id], authority=authority.peer_id, admission="invite")
    told: list[Revocations] = []
    parts: Any = SimpleNamespace(
        store=SimpleNamespace(folder=tmp_path),
        config=SimpleNamespace(manifest=manifest),
        identity=founder,
        chain=SimpleNamespace(
            voters=(founder.peer_id, voter.peer_id),
            taking_part=frozenset((founder.peer_id, newcomer.peer_id)),
            voting=SimpleNamespace(faults=FaultModel.CRASH),
        ),
        members=SimpleNamespace(
            came_with={frozenset((invite.peer_id,)): {voter.peer_id, newcomer.peer_id, stray.peer_id}}.__getitem__,
            revoke=told.append,
            alive=frozenset,
            is_revoked=lambda peer: peer in told[-1].peers,
        ),
    )
    reply = await link_orders(parts)["revoke"]([invite.peer_id])
    named = {invite.peer_id, voter.peer_id, newcomer.peer_id}
    assert {*told[0].peers} == named, "of strangers there is no end, and the list has an end"
    assert kept_revocations(tmp_path, manifest) == told[0]
    assert reply == {"version": 1, "revoked": 3, "counted": [voter.peer_id]}


async def test_list_of_a_restored_authority_is_signed_together_with_the_newer_one_that_is_heard(tmp_path: Path) -> None:
    founder, first, second, third = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 5))
    lost, folder = tmp_path / "lost", tmp_path / "restored"
    authority = Identity.load_or_create(lost / KEY_NAME)
    folder.mkdir(mode=0o700)
    shutil.copy(lost / KEY_NAME, folder / KEY_NAME)
    manifest = manifest_of([founder.peer_id], authority=authority.peer_id)
    for one in (first, second):
        heard = revoke(lost, manifest, [one.peer_id])
    assert revoke(folder, manifest, [third.peer_id]).version == 1
    rule = admission_of(folder, manifest, founder.peer_id)
    member = admission_of(tmp_path, manifest, founder.peer_id)
    assert member.take(heard)
    assert rule.take(heard)
    joined = rule.revocations
    assert joined is not None
    assert (joined.version, set(joined.peers)) == (3, {first.peer_id, second.peer_id, third.peer_id})
    assert kept_revocations(folder, manifest) == joined
    assert member.take(joined)
    assert member.is_revoked(third.peer_id, None)


def test_nobody_is_asked_for_a_passphrase_where_lists_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (phrase := tmp_path / "phrase").write_text("a horse and a battery")
    phrase.chmod(0o600)
    monkeypatch.setenv(key_file.PASSPHRASE_VARIABLE, str(phrase))
    founder, first, second = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 4))
    authority = Identity.load_or_create(tmp_path / "node" / KEY_NAME)
    manifest = manifest_of([founder.peer_id], authority=authority.peer_id)
    assert revoke(tmp_path / "node", manifest, [first.peer_id]).version == 1
    rule = admission_of(tmp_path / "node", manifest, founder.peer_id)
    other = make_revocations(authority, manifest.swarm_id, None, [second.peer_id])
    other = make_revocations(authority, manifest.swarm_id, other, [])
    monkeypatch.delenv(key_file.PASSPHRASE_VARIABLE)
    monkeypatch.setattr(key_file, "ask", lambda question: pytest.fail("the rounds would wait for an answer"))
    assert rule.take(other)
    assert rule.revocations == other
