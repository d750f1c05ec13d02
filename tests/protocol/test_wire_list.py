"""What nodes of one wire version say to each other stays as it is: the committed list has every struct and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.protocol.audit_messages import Charge
from shoal.protocol.peering import GetManifest
from shoal.protocol.wire import WIRE_VERSION, Message
from tests.protocol import wire_list
from tests.protocol.wire_list import broken, collect, describe, main, parse, path_of, render


def test_wire_is_as_the_list_of_its_version_says() -> None:
    path = path_of(WIRE_VERSION)
    before, now = parse(path.read_text(encoding="utf-8")), collect()
    assert broken(before, now) == [], (
        f"nodes of wire version {WIRE_VERSION} would not understand this: a field, a type or a union has changed. Say "
        "it in a new message under a new protocol name, or raise WIRE_VERSION; see docs/wire.md, Versions"
    )
    assert now == before, "there is more on the wire than the list says: run `python -m tests.protocol.wire_list`"
    assert render(now) == path.read_text(encoding="utf-8")


def test_list_has_what_peers_say_and_not_what_one_machine_keeps() -> None:
    now = collect()
    assert {"Envelope", "Hello", "NodeRecord", "LayoutPart", "LaneOffer", "StateHeader", "lane frame"} <= now.keys()
    assert {"/shoal/hello/1", "/shoal/lane/1", "/shoal/fetch/1", "one of Full, Refusal, Welcome"} <= now.keys()
    assert not {"DurableRecord", "Manifest", "KnownPeer", "Put", "Assignment", "Message", "RowBegin"} & now.keys()
    assert "FINAL 2" in now["lane frame"]


def test_fields_are_told_with_their_types_bounds_and_defaults() -> None:
    class Said(Message, tag="said"):
        peers: tuple[str, ...] = ()
        share: float | None = None

    assert describe(Said) == "map with type said (peers: [str] = (); share: float | none = None)"
    said = "map with type getmanifest (swarm: bytes<min_length 32, max_length 32>)"
    assert describe(GetManifest) == said
    assert describe(Charge).startswith("array (digest: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Ping", "map with type ping (nonce: int; more: int = 0)"),
        ("Ping", None),
        ("/shoal/hello/1", None),
    ],
    ids=["field", "message", "protocol"],
)
def test_change_of_what_there_was_is_found_and_an_addition_is_none(name: str, text: str | None) -> None:
    before = collect()
    after = {key: value for key, value in before.items() if key != name} | ({} if text is None else {name: text})
    assert broken(before, after) == [name]
    assert broken(before, {**before, "New": "map ()", "/shoal/new/1": "a protocol"}) == []


def test_list_of_a_version_grows_but_is_not_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wire.txt"
    monkeypatch.setattr(wire_list, "path_of", lambda version: path)
    assert main() == 0
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[2:]), encoding="utf-8")  # as if the first had been added since
    assert main() == 0
    assert path.read_text(encoding="utf-8") == whole
    path.write_text(whole.replace("nonce", "number"), encoding="utf-8")
    assert main() == 1
    assert "Ping, PingRequest, SharedOffer; raise WIRE_VERSION" in capsys.readouterr().out
    assert "number" in path.read_text(encoding="utf-8")
