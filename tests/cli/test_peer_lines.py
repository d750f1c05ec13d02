"""What the terminal says of peers: each thing once, by name, and of many alike a few."""

from __future__ import annotations

import logging

import pytest

from shoal.cli import logs
from shoal.cli.peer_lines import ALIKE_LIMIT, ALIKE_S, PEER_LIMIT, PeerLines
from shoal.cli.render import RunProgress
from shoal.node.outcome import PeerChanged, RoundCertified
from shoal.protocol.identity import Identity
from shoal.protocol.names import short

ME, TOM, ADA = (Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 4))


def said(changes: list[str], *, apart_s: float = 10.0) -> list[str]:
    """The lines of one peer's changes, without its PeerId."""
    lines = PeerLines()
    told = [lines.take(PeerChanged(kind=kind, peer=TOM, name=""), apart_s * n) for n, kind in enumerate(changes)]
    return [line.removeprefix(f"{TOM} ") for each in told for line in each]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (["linked", "lost", "linked"], ["is here"]),  # a link that is made again is no news
        (["linked", "lost", "suspected", "died"], ["is here", "is silent", "is gone"]),
        (["linked", "lost", "died", "linked", "revived"], ["is here", "is gone", "is back"]),
        (["linked", "suspected", "revived"], ["is here", "is silent", "is back"]),
        (["linked", "lost", "left", "died"], ["is here", "has left"]),
        (["linked", "detoured", "revoked", "lost"], ["is here", "was shut out by the swarm's authority"]),
        (["suspected", "died", "left", "lost"], []),  # of whom nothing was said before
    ],
)
def test_each_thing_is_said_once(changes: list[str], lines: list[str]) -> None:
    assert said(changes) == lines


def test_many_that_come_at_once_are_counted() -> None:
    lines = PeerLines()
    told = [line for n in range(40) for line in lines.take(PeerChanged(kind="linked", peer=str(n), name=""), n / 100)]
    assert told == [f"{n} is here" for n in range(ALIKE_LIMIT)]
    assert lines.late(0.5) == []
    assert lines.late(ALIKE_S) == ["34 more: each is here"]
    assert lines.late(ALIKE_S) == []
    assert lines.take(PeerChanged(kind="linked", peer="next", name=""), 2.0) == ["next is here"]


def test_peers_that_are_remembered_are_bounded() -> None:
    lines = PeerLines()
    for n in range(PEER_LIMIT + 3):
        lines.take(PeerChanged(kind="linked", peer=str(n), name=""), float(n))
    assert len(lines._seen) == PEER_LIMIT


def test_terminal_shows_names_and_files_the_peer_ids_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="info", console=None)
    tell = RunProgress(lambda text, share=None, *, of="": None)
    for kind, peer, name in [("self", ME, "box"), ("linked", TOM, "tom"), ("linked", ADA, ""), ("left", TOM, "tom")]:
        tell(PeerChanged(kind=kind, peer=peer, name=name))
    tell(RoundCertified(round=1, members=1, contributors=1, loss=0.123456, seconds=2.0))
    logging.getLogger("shoal.x").warning("%s and %s", ME, TOM)
    whole = [line[9:] for line in capsys.readouterr().err.splitlines()]
    assert whole == [
        f"info this node is box ({ME})",
        f"info {TOM} (tom) is here",
        f"info {ADA} is here",
        f"info {TOM} (tom) has left",
        "info round 1 certified: 1 of 1 contributed, training loss 0.1235, 2.0 s",
        f"warning shoal.x: {ME} (box, this node) and {TOM} (tom)",
    ]
    brief = logs.TextFormatter(brief=True)
    record = logging.LogRecord("shoal.x", logging.INFO, "", 0, f"{ME}: {TOM} passes on for {ADA}", (), None)
    assert brief.format(record)[9:] == f"box (this node): tom passes on for {short(ADA)}"
    logs.configure(log_format="text", level="info", console=None)
    assert brief.format(record)[9:] == f"{short(ME)}: {short(TOM)} passes on for {short(ADA)}"
