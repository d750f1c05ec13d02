"""`shoal rollback` and `shoal rebase`: what they ask of the node, and one line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.cli import rebase as rebase_module
from shoal.cli import rollback as rollback_module
from shoal.cli.main import execute
from shoal.cli.render import rollback_lines
from shoal.node.control_client import ControlRefused, RollbackStatus
from tests.cli.test_status import STATUS


class Asked:
    """Stands for the control socket: notes what is asked, and answers."""

    def __init__(self, reply: dict[str, object] | Exception) -> None:
        self.requests: list[tuple[str, ...]] = []
        self._reply = reply

    def __call__(self, data_dir: Path, op: str, *arguments: str, deadline_s: float) -> dict[str, object]:
        self.requests.append((op, *arguments))
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    control = Asked({"term": "1.0", "round": 7, "members": ["12D3A"]})
    for module in (rollback_module, rebase_module):
        monkeypatch.setattr(module, "request", control)
    return control


def test_orders_reach_the_node(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["rollback", "--to", "3"]) == 0
    assert "proposes to go back to round 3" in capsys.readouterr().out
    assert execute(["rollback", "--withdraw"]) == 0
    assert execute(["rebase", "--forget", "12D3B", "--forget", "12D3C"]) == 0
    assert "goes on from round 7 in term 1.0 with 1 member: 12D3A" in capsys.readouterr().out
    assert execute(["rebase", "--forget", "12D3B", "12D3C", "--data-dir", "node"]) == 0
    assert asked.requests == [("rollback", "3"), ("rollback",), *[("rebase", "12D3B", "12D3C")] * 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollback"], "shoal rollback --to ROUND"),
        (["rollback", "--to", "3", "--withdraw"], "shoal rollback --to ROUND"),
        (["rollback", "--to=-1"], "must be 0, the initial state, or a round"),
        (["rollback", "--to", "three"], "--help"),
        (["rebase"], "shoal rebase --forget PEER"),
        (["rebase", "12D3B"], "shoal rebase --forget PEER"),
        (["rebase", "--forget", "--data-dir", "node"], "shoal rebase --forget PEER"),
        (["rebase", "--forget", "12D3B", "--keep-all"], "shoal rebase --forget PEER"),
    ],
)
def test_wrong_usage_is_one_line_and_asks_nothing(
    asked: Asked, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert execute(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert asked.requests == []


def test_what_the_node_refuses_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rollback_module, "request", Asked(ControlRefused("--to 9: this node does not have it")))
    assert execute(["rollback", "--to", "9"]) == 1
    assert capsys.readouterr().err == "shoal: --to 9: this node does not have it\n"


def test_status_shows_who_would_go_back_and_why() -> None:
    wishes = [
        RollbackStatus(peer_id="12D3A", round=4, asked=True),
        RollbackStatus(peer_id="12D3B", round=4, asked=False),
    ]
    assert rollback_lines(msgspec.structs.replace(STATUS, rollbacks=wishes)) == [
        "rollback   box (12D3A, this node) would go back to round 4, its user's order",
        "rollback   12D3B would go back to round 4, its policy",
    ]
    assert rollback_lines(STATUS) == []
