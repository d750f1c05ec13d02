"""`shoal amend` and what `shoal status` shows of amended settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli import amend as amend_module
from shoal.cli.main import WRONG_USAGE, execute
from shoal.cli.render import settings_lines, status_lines, voter_lines
from shoal.cli.watch_model import Picture
from shoal.node.checks import checked
from shoal.node.control_client import AmendStatus, BytesStatus, MemberStatus, Status
from shoal.protocol.identity import PeerId
from shoal.protocol.seats import LinePlace


@pytest.mark.parametrize(
    "arguments",
    [[], ["--withdraw", "--set", "inner.lr=1"], ["--withdraw", "--by-authority"], ["--by-authority"]],
)
def test_amend_says_what_to_write(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["amend", *arguments]) == WRONG_USAGE
    assert "write `shoal amend --set SECTION.KEY=VALUE`" in capsys.readouterr().err


def test_amend_says_who_is_to_vote_and_who_no_longer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        amend_module, "request", lambda folder, op, *arguments, deadline_s: asked.append((op, *arguments))
    )
    written = ["--set", "inner.lr=0.5", "--add-voter", "one", "--add-voter", "two", "--remove-voter", "three"]
    assert execute(["amend", *written, "--by-authority", "--data-dir", str(tmp_path)]) == 0
    settings = ("inner.lr=0.5", "voters.one=true", "voters.two=true", "voters.three=false")
    assert asked == [("amend_by_authority", *settings)]
    assert f"proposes to amend {', '.join(settings)}; it happens" in capsys.readouterr().out
    assert execute(["amend", "--remove-voter", "one", "--withdraw"]) == WRONG_USAGE


def status_with(**known: Any) -> Status:
    """A node's status in round 3, of which nothing is told but what is `known`."""
    said: dict[str, Any] = {
        "peer_id": "a", "swarm_id": "5" * 64, "addresses": [], "phase": "train", "term": "0.0", "round": 3,
        "digest": None, "members": [], "missing": [], "loss": None, "tokens_per_s": None,
        "bytes": BytesStatus(sent=0, received=0),
    }  # fmt: skip
    return Status(**said | known)


def test_status_names_the_voters_where_they_are_not_the_members() -> None:
    members = [MemberStatus(peer_id=peer, phase="training", tokens_per_s=1.0, reach="direct") for peer in ("a", "b")]
    known = status_with(members=members)

    def shown(*voters: str) -> list[str]:
        return voter_lines(msgspec.structs.replace(known, voters=list(voters)))

    assert shown("b", "a") == ["voters     all members"]
    assert shown() == []
    assert shown("a") == ["voter      a (this node)"]
    assert shown("a", "b", "c\x1b[2J") == ["voter      a (this node)", "voter      b", "voter      c\\x1b[2J"]
    many = shown(*(f"{number:02}" for number in range(40)))
    assert (len(many), many[-1]) == (25, "voter      and 16 more; `shoal status --json` has them all")


@pytest.mark.parametrize(
    ("rounds", "told"),
    [(None, ""), (0, "has a seat in this round"), (1, "waits for its seat, about 1 round"),
     (2, "waits for its seat, about 2 rounds")],
)  # fmt: skip
def test_status_and_watch_tell_when_it_is_the_nodes_turn_where_seats_are_few(rounds: int | None, told: str) -> None:
    known = checked(status_with(turn_in_rounds=rounds))
    assert [line for line in status_lines(known) if line.startswith("seat")] == ([f"seat       {told}"] if told else [])
    assert Picture(status=known).headline() == f"round 4 · train{' · ' * bool(told)}{told} · speed not measured yet"


def test_status_tells_the_place_of_who_waits_outside() -> None:
    for place, told in (
        (LinePlace.in_line([PeerId("a"), PeerId("b")], PeerId("b")), "outside, waits for a seat: place 2 of 2"),
        (LinePlace.in_line([PeerId("a")], PeerId("b")), "outside, asks for a seat: 1 are in the line"),
    ):
        assert [line for line in status_lines(checked(status_with(outside=place))) if "seat" in line] == [
            f"seat       {told}"
        ]


def test_status_shows_settings_in_force_and_who_would_amend_what() -> None:
    status = status_with(
        amendments=[
            AmendStatus(peer_id="one", settings={"sync.codec": "bf16", "inner.lr": 0.5}, asked=True),
            AmendStatus(peer_id="two", settings={"sync.codec": "bf16\n", "inner.lr": 0.5}, asked=False),
        ],
        settings={"sync.inner_steps": 60},
    )
    assert settings_lines(status) == [
        "setting    sync.inner_steps = 60, amended",
        'amendment  one would amend sync.codec = "bf16", inner.lr = 0.5, ordered there',
        'amendment  two would amend sync.codec = "bf16\\n", inner.lr = 0.5, as the authority asks',
    ]
