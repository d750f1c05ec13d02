"""Cards: what a node gave, by the chain and by its own word, and every lie in one that the chain can show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.cli.card import to_lines
from shoal.cli.main import execute
from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.card import DOMAIN, Card, make_card, problems_of, read_card
from shoal.node.dashboard.model import Model
from shoal.node.keys import NODE_KEY_NAME
from shoal.node.reporting.event_log import read_log
from shoal.node.reporting.events import Certified, Contributed, Event
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.key_file import publish
from tests.node.checkpoint_lab import manifest_of, new_ledger
from tests.node.ledger import identity


def logged(event: Event) -> bytes:
    return msgspec.json.encode({"event": event.name, **msgspec.to_builtins(event)}) + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the first founder has after two rounds: chain, key, and a log of what it contributed."""
    place = new_ledger().checkpoint(tmp_path, 2)
    publish(place / NODE_KEY_NAME, Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))
    told = [
        Contributed(at=1000.0, round=1, tokens=100),
        Certified(at=1001.0, round=1, digest="d1"),
        Contributed(at=1002.0, round=2, tokens=30),
        Contributed(at=1003.0, round=2, tokens=50),
        Certified(at=1004.0, round=2, digest="d2"),
        Contributed(at=1005.0, round=3, tokens=1000),
        Certified(at=1006.0, round=3, digest="d3", counted=False),  # it was late, and is listed after it
        Contributed(at=1007.0, round=4, tokens=1000),
    ]
    (place / "events.jsonl").write_bytes(b"".join(map(logged, told)) + b"not an event\n")
    return place


def test_card_says_what_the_chain_shows_and_what_the_log_has_and_holds(folder: Path) -> None:
    card = make_card(folder)
    chain = new_ledger().chain
    assert (card.swarm, card.peer) == (manifest_of().swarm_id.hex(), identity(1).peer_id)
    assert (card.rounds, card.first, card.last, card.certificate) == (2, 1, 2, chain.value(2).hash.hex())
    assert (card.gave_rounds, card.tokens, card.since) == (2, 150, 1000.0), "two of four rounds counted what it made"
    assert problems_of(card, folder) == []


def test_card_and_page_say_the_same_of_what_was_given(folder: Path) -> None:
    (folder / "events.jsonl").write_bytes(
        b"".join(
            map(
                logged,
                [
                    Certified(at=1.0, round=1, digest="d1"),  # it came amid the round
                    Contributed(at=2.0, round=2, tokens=70),
                    Certified(at=3.0, round=2, digest="d2", counted=False),
                    Contributed(at=4.0, round=3, tokens=140),  # what was late with it
                    Certified(at=5.0, round=3, digest="d3"),
                ],
            )
        )
    )
    model = Model()
    for event in read_log(folder / "events.jsonl"):
        model.hear(event)
    model.see(SyntheticSwarm(peers=2, now=10.0, rounds=0).look(), 10.0, 10.0)
    page, card = model.snapshot()["node"], make_card(folder)
    assert (card.gave_rounds, card.tokens) == (page["gave_rounds"], page["gave_tokens"]) == (1, 140)


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        ({"rounds": 3}, "the certificates list it after 2 rounds, not 3 from 1 on"),
        ({"first": 2}, "the certificates list it after 2 rounds, not 2 from 2 on"),
        ({"last": 1}, "round 1 has another certificate"),
        ({"last": -1}, "round -1 has another certificate"),
        ({"certificate": "00" * 32}, "round 2 has another certificate"),
        ({"swarm": "00" * 32}, "it is of another swarm"),
    ],
)
def test_a_lie_that_is_signed_is_shown_by_the_chain(folder: Path, lie: dict[str, object], found: str) -> None:
    card = msgspec.structs.replace(make_card(folder), **lie)
    signed = msgspec.structs.replace(card, signature=identity(1).sign(DOMAIN, card.preimage).hex())
    assert problems_of(signed, folder) == [found]


@pytest.mark.parametrize("signature", ["", "zz", "00" * 64])
def test_what_the_node_did_not_sign_is_not_its_card(folder: Path, signature: str) -> None:
    card = make_card(folder)
    for changed in (
        msgspec.structs.replace(card, signature=signature),
        msgspec.structs.replace(card, tokens=card.tokens + 1),
        msgspec.structs.replace(card, peer=identity(2).peer_id),
    ):
        assert problems_of(changed, folder)[0] == f"the signature is not that of {changed.peer}"


def test_who_was_listed_in_no_round_has_no_card(folder: Path) -> None:
    (folder / NODE_KEY_NAME).unlink()
    Identity.load_or_create(folder / NODE_KEY_NAME)
    with pytest.raises(ConfigError, match=r"no certified round in .* lists this node; wait for one"):
        make_card(folder)


def test_a_chain_that_ends_earlier_says_nothing(folder: Path, tmp_path: Path) -> None:
    earlier = new_ledger().checkpoint(tmp_path / "earlier", 1)
    (earlier / "chain").write_bytes((earlier / "chain").read_bytes()[:0])
    card = make_card(folder)
    with pytest.raises(ConfigError, match="ends before round 2, of which the card is"):
        problems_of(card, earlier)


def test_damaged_chain_is_no_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = folder / "chain"
    chain.write_bytes(chain.read_bytes()[:-9])
    assert execute(["card", "--data-dir", str(folder)]) == 1
    assert f"{chain} is damaged or cut short after 1 entries; use another" in capsys.readouterr().err


def test_command_writes_shows_and_checks(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    where = ["--data-dir", str(folder)]
    assert execute(["card", "-o", str(file), *where]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[2] == "listed     after 2 certified rounds from 1 on, up to 2"
    assert told[3].startswith("own word   gave 150 tokens in 2 rounds, since 19")
    assert read_card(file) == make_card(folder)
    assert execute(["card", "--check", str(file), *where]) == 0
    assert capsys.readouterr().out.endswith("signed by that node, and its rounds are as the certificates have them\n")
    file.write_bytes(file.read_bytes().replace(b'"tokens":150', b'"tokens":151'))
    assert execute(["card", "--check", str(file), *where]) == 1
    told_of = capsys.readouterr()
    assert told_of.err == f"shoal: this card does not hold: the signature is not that of {identity(1).peer_id}\n"
    file.write_text("{}")
    assert execute(["card", "--check", str(file), *where]) == 2
    assert capsys.readouterr().err.endswith("; `shoal card -o FILE` writes one\n")


def test_a_node_that_was_listed_and_gave_nothing_says_so(folder: Path) -> None:
    lines = to_lines(msgspec.structs.replace(make_card(folder), gave_rounds=0, tokens=0, since=None))
    assert lines[2:] == [
        "listed     after 2 certified rounds from 1 on, up to 2",
        "own word   gave nothing yet: it was paused, or came too late to count",
    ]


def test_card_of_a_strange_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"more": 1}', type=Card)


@pytest.mark.parametrize(
    "lie",
    [
        {"peer": "12D3KooW\nchecked    signed by that node, and its rounds are as the certificates have them\x1b[8m"},
        {"peer": "12D3KooW\x1b]0;owned\x07"},
        {"swarm": "\x1b[2J" + "0" * 60},
        {"certificate": "\n" * 64},
        {"signature": "\x1b[8m"},
        {"since": 1e300},
        {"since": -1e300},
        {"rounds": -1},
    ],
    ids=str,
)
def test_what_is_no_card_is_refused_in_a_line_and_none_of_it_reaches_the_terminal(
    folder: Path, tmp_path: Path, lie: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "card"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(make_card(folder)) | lie))
    assert execute(["card", "--check", str(path), "--data-dir", str(folder)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "is no card" in told.err
    assert all(character.isprintable() for character in told.err.removesuffix("\n"))
