"""Names of nodes: what is one, that no two shown are the same, and where a text has them in place of PeerIds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.names import (
    NAME_LIMIT_CHARS,
    Names,
    by_name,
    called,
    capability_of,
    check_name,
    claimed_name,
    name_of_host,
    short,
)
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.wire import Sealer, SwarmId

IDENTITIES = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 6)]
A, B, C, D, E = (identity.peer_id for identity in IDENTITIES)


@pytest.mark.parametrize("name", ["a", "box-12", "0.lab_x", "n" * NAME_LIMIT_CHARS])
def test_name_is_taken_and_fits_a_record(name: str) -> None:
    check_name(name, "--name")
    assert claimed_name(("relay", capability_of(name))) == name
    record = NodeRecord(peer=A, boot=1, capabilities=(capability_of(name),))
    seal_record(Sealer(IDENTITIES[0], SwarmId(bytes(32)), 1), record)  # raises where a record has no room for it


@pytest.mark.parametrize(
    "name",
    [
        *("", "-box", ".box", "Box", "two words", "n" * (NAME_LIMIT_CHARS + 1)),
        *("<b>x", "a&amp;b", 'a"b', "a'b", "a`b", "a\n", "a\x1b[2J", "a\u202eb", "a\u200bb"),
        *("zwölf", "\u0430", "\u0663", "a…b"),
    ],
)
def test_what_could_trick_a_reader_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--name: .* is no name; write up to 27 of a-z, 0-9"):
        check_name(name, "--name")
    assert claimed_name((capability_of(name), "relay")) == ""


def test_first_name_that_is_one_counts() -> None:
    assert claimed_name(("name.", "name.-", "name.one", "name.two")) == "one"
    assert claimed_name(()) == ""


@given(st.text())
def test_every_machine_has_a_name(host: str) -> None:
    check_name(name_of_host(host), "--name")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("lab-7.example.org", "lab-7"),
        ("Adas-MacBook.local", "adas-macbook"),
        ("ip_10_0_0_7", "ip_10_0_0_7"),
        ("größe 2", "gr-e-2"),
        ("", "node"),
        ("x" * 80, "x" * 27),
    ],
)
def test_machine_gives_its_node_a_name(host: str, name: str) -> None:
    assert name_of_host(host) == name


def test_no_two_peers_are_shown_by_the_same_name() -> None:
    claims = {A: "box", B: "box", C: "tom"}
    names = Names(lambda peer: claims.get(peer, ""), limit=8)
    assert names.of(A) == "box"
    assert names.of(B) == f"box{short(B)}"
    assert names.of(A) == f"box{short(A)}"
    assert names.of(D) == ""
    assert names.of_all([A, B, C, D]) == {A: f"box{short(A)}", B: f"box{short(B)}", C: "tom"}
    assert names.of_all([A, C]) == {A: "box", C: "tom"}  # the other is not there any more
    claims[A] = "tom"
    assert names.of(A) == f"tom{short(A)}"
    claims[B] = claims.pop(A)
    assert names.of(A) == ""
    assert names.of_all([B, D]) == {B: "tom"}


def test_names_of_peers_asked_for_long_ago_are_forgotten() -> None:
    names = Names(lambda peer: "box", limit=2)
    for peer in (A, B, C, D):
        names.of(peer)
    assert names._holders == {"box": 2}
    assert list(names._claims) == [C, D]


def test_texts_have_names_where_a_peer_id_stands_alone() -> None:
    names = {A: "box", B: "tom"}
    text = f"{A}: lost {B}, then {C}; /ip4/1.2.3.4/tcp/1/p2p/{A}; `shoal rebase --forget {B}` by x{A}"
    assert by_name(text, names, own=A) == (
        f"box (this node): lost tom, then {short(C)}; /ip4/1.2.3.4/tcp/1/p2p/{A}; `shoal rebase --forget {B}` by x{A}"
    )
    assert by_name(f"{A}, {B} and {C}", names, own=A, whole=True) == f"{A} (box, this node), {B} (tom) and {C}"
    assert by_name("nothing of the kind", names) == "nothing of the kind"
    assert called(E, names) == short(E) == f"…{E[-6:]}"
