"""The authority's word: one rebase per term, signed with the right key, without those who are gone and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.rounds.authority import Authority
from shoal.node.state.store import frame_batch
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Term
from shoal.protocol.terms import check_rebase
from tests.node.ledger import Ledger

LEDGER = Ledger()
LEDGER.certify(3)
HEAD = LEDGER.chain.head
ME, OTHER, THIRD = LEDGER.founders
VOTERS = HEAD.members
REST = {OTHER.peer_id, THIRD.peer_id}


def authority_of(folder: Path) -> tuple[Authority, Identity]:
    key = Identity.load_or_create(folder / "authority.key")
    return Authority(folder, authority=key.peer_id, node=ME), key


def refused(authority: Authority, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        authority.rebase(*arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rebase_is_signed_once_per_term_and_given_out_again(tmp_path: Path) -> None:
    authority, key = authority_of(tmp_path)
    rebase = authority.rebase(HEAD, VOTERS, REST, {ME.peer_id})
    check_rebase(rebase, HEAD, key.peer_id)
    assert (rebase.value.term, rebase.value.members) == (Term(1, 0), (ME.peer_id,))
    again, _ = authority_of(tmp_path)  # after a restart, say
    assert again.rebase(HEAD, VOTERS, REST, ()) == rebase
    text = refused(again, HEAD, VOTERS, {OTHER.peer_id}, ())
    assert "was signed here before" in text
    assert ME.peer_id in text
    assert "there can be no other" in text
    assert "was signed here before" in refused(again, LEDGER.chain.value(2), VOTERS, REST, ())
    following = again.rebase(rebase.value, rebase.value.members, (), ())
    assert following.value.term == Term(2, 0)


def test_damaged_log_says_what_to_do_and_no_second_rebase_is_signed(tmp_path: Path) -> None:
    authority, _ = authority_of(tmp_path)
    rebase, path = authority.rebase(HEAD, VOTERS, REST, ()), tmp_path / "rebases.log"
    whole = path.read_bytes()
    authority.rebase(rebase.value, rebase.value.members, (), ())
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    assert authority.rebase(HEAD, VOTERS, REST, ()) == rebase, "it holds, whatever comes behind it"
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for damaged in (path.read_bytes(), frame_batch(0, [b"no rebase"])):
        path.write_bytes(damaged)
        text = refused(authority, HEAD, VOTERS, {OTHER.peer_id}, ())
        assert f"{path} is damaged" in text
        assert text.endswith("; put a copy of it back, or remove it if no rebase to term 1.0 was signed here")
        assert path.read_bytes() == damaged


def test_node_key_serves_where_the_manifest_names_no_other(tmp_path: Path) -> None:
    rebase = Authority(tmp_path, authority=ME.peer_id, node=ME).rebase(HEAD, VOTERS, REST, ())
    check_rebase(rebase, HEAD, ME.peer_id)


def test_without_the_key_there_is_no_rebase(tmp_path: Path) -> None:
    text = refused(Authority(tmp_path, authority=OTHER.peer_id, node=ME), HEAD, VOTERS, REST, ())
    assert OTHER.peer_id in text
    assert "do it at the founder's node" in text
    assert not (tmp_path / "authority.key").exists()
    authority_of(tmp_path)  # a key, but not that of this swarm
    text = refused(Authority(tmp_path, authority=OTHER.peer_id, node=ME), HEAD, VOTERS, REST, ())
    assert "is not it" in text


def test_only_members_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    authority, _ = authority_of(tmp_path)
    stranger = Identity.generate().peer_id
    assert f"{stranger} has no vote in round 4" in refused(authority, HEAD, VOTERS, {stranger}, ())
    assert "cannot forget itself" in refused(authority, HEAD, VOTERS, {ME.peer_id}, ())
    assert f"{OTHER.peer_id} is here" in refused(authority, HEAD, VOTERS, REST, {OTHER.peer_id})
    assert not (tmp_path / "rebases.log").exists()
