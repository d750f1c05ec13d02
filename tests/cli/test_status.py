"""The commands that ask a running node, against a control server in another thread."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from shoal.cli.main import execute
from shoal.cli.render import SHOWN_LIMIT, losses_told, print_status, status_lines
from shoal.node.checks import checked
from shoal.node.control import ControlServer, Handler
from shoal.node.control_client import (
    BanStatus,
    BytesStatus,
    JsonValue,
    MemberStatus,
    RollbackStatus,
    RolloutStatus,
    SamplesStatus,
    Status,
)
from shoal.node.peer_facts import PeerFacts, summary_of
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity

ADA = Identity.from_seed(bytes(32)).peer_id
STATUS = Status(
    peer_id="12D3A",
    swarm_id="ab12",
    addresses=["/ip4/192.0.2.1/tcp/4001/p2p/12D3A"],
    phase="reduce",
    term="0.0",
    round=7,
    digest="c0ffee",
    members=[
        MemberStatus(peer_id="12D3A", phase="reduce", tokens_per_s=1234.56, reach="self"),
        MemberStatus(peer_id="12D3B", phase="missing", tokens_per_s=None, reach="gone"),
        MemberStatus(peer_id="12D3C", phase="training\x1b[2J", tokens_per_s=1.0, reach="direct"),
    ],
    voters=["12D3A", "12D3B", "12D3C"],
    missing=["12D3B"],
    names={"12D3A": "box", "12D3C": "tom", ADA: "ada"},
    loss=None,
    metric="bits per byte",
    train_loss=0.0123456,
    tokens_per_s=1234.56,
    bytes=BytesStatus(sent=1_500_000, received=999),
)


def with_checks(**changes: Any) -> Status:
    """The status of a node, some of which is changed, as it tells it."""
    return checked(msgspec.structs.replace(STATUS, **changes))


class FakeNode:
    """Answers on a data folder and keeps the ops it was asked for; `refuses` makes it say no.

    document: its status; peers: all that it knows.
    """

    def __init__(self, document: Mapping[str, JsonValue], peers: Sequence[PeerFacts] = ()) -> None:
        self.asked: list[str] = []
        self.refuses = False
        self._documents: dict[str, Mapping[str, JsonValue]] = {
            "status": document,
            "peers": {"peers": msgspec.to_builtins(peers)},
        }

    def handlers(self) -> Mapping[str, Handler]:
        def handler(op: str) -> Handler:
            async def answer() -> Mapping[str, JsonValue]:
                self.asked.append(op)
                if self.refuses:
                    raise ConfigError("already paused")
                return self._documents.get(op, {})

            return answer

        return {op: handler(op) for op in ("status", "peers", "leave", "pause", "resume")}


@contextlib.contextmanager
def running(data_dir: Path, node: FakeNode) -> Iterator[None]:
    up, scope = threading.Event(), trio.CancelScope()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        token.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(data_dir, node.handlers()).run)
                up.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert up.wait(10)
        yield
    finally:
        token[0].run_sync_soon(scope.cancel)
        thread.join(10)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    fake = FakeNode(msgspec.to_builtins(with_checks()))
    with running(tmp_path, fake):
        yield fake


def test_status_json_is_one_document_with_the_documented_keys(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["status", "--data-dir", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    assert set(document) == {
        *("peer_id", "swarm_id", "addresses", "phase", "term", "round", "digest", "members", "missing", "rollbacks"),
        *("voters", "faults"),
        "abstains",
        *("amendments", "settings", "loss", "tokens_per_s", "blocked_fraction", "rollouts", "bytes"),
        *("bans", "dashboard", "dashboard_link", "long_missing", "proven", "reachability", "refused", "alerts"),
        *("revoked", "trains_alone", "unready", "without", "stuck", "cut_off"),
        *("peers", "names", "metric", "train_loss", "train_metric", "turn_in_rounds", "outside", "site", "samples"),
        *("why_paused", "max_upload", "max_download", "fetched"),
        *("step", "steps", "fetched_bytes", "state_bytes", "counts_from", "doing", "checks", "node"),
    }
    assert document["members"][0] == {"peer_id": "12D3A", "phase": "reduce", "tokens_per_s": 1234.56, "reach": "self"}
    assert document["bytes"] == {
        "sent": 1_500_000,
        "received": 999,
        "passed_on": 0,
        "lanes_sent": 0,
        "lanes_received": 0,
    }
    assert document["loss"] is None
    assert err == ""


def test_status_shows_what_the_node_knows(node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["status", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name       box",
        "peer id    12D3A",
        "swarm      ab12",
        "address    /ip4/192.0.2.1/tcp/4001/p2p/12D3A",
        "reached    unknown whether from outside",
        "phase      reduce",
        "help       rounds go on with 2 of 3 voters, without 12D3B; start the missing one again where it ran",
        "round      7 (term 0.0), digest c0ffee",
        "loss       training 0.01235",
        "speed      1,235 tokens/s",
        "bytes      1.5 MB sent, 999 B received",
        "voters     all members",
        "missing    12D3B",
        "member     12D3A reduce 1,235 tokens/s box (this node)",
        "member     12D3B missing – tokens/s",
        "member     12D3C training\\x1b[2J 1 tokens/s tom",
    ]


def crowd_of(count: int) -> list[PeerFacts]:
    """Members, every tenth of them gone, every seventh behind, and a follower for each four."""
    return [
        PeerFacts(
            peer=f"12D3{place:04}",
            phase="training",
            reach="self" if place == 0 else "gone" if place % 10 == 9 else "direct",
            member=place % 5 != 4 or place % 10 == 9,
            round=7 if place % 7 or not place else 2,
            tokens_per_s=1000.0 + place,
            software="shoal 1" if place % 3 else "shoal 2\x1b[2J",
            address="/ip4/192.0.2.1/tcp/4001",
        )
        for place in range(count)
    ]


def status_of(peers: Sequence[PeerFacts]) -> Status:
    """The status of a node that knows these."""
    reaches = {"self": "self", "gone": "gone", "direct": "direct"}
    members = [
        MemberStatus(peer_id=peer.peer, phase="training", tokens_per_s=peer.speed, reach=reaches[peer.reach])
        for peer in peers
        if peer.member
    ]
    missing = [member.peer_id for member in members if member.reach == "gone"]
    return msgspec.structs.replace(STATUS, members=members, missing=missing, peers=summary_of(peers))


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"phase": "train", "step": 40, "steps": 100}, "phase      train, step 40 of 100"),
        ({"phase": "plan", "step": 40, "steps": 100}, "phase      plan"),
        (
            {"phase": "joining", "fetched_bytes": 2_100_000, "state_bytes": 6_800_000},
            "phase      joining, fetching the swarm's state: 2.1 MB of 6.8 MB",
        ),
        ({"counts_from": 9}, "seat       watches round 8, and its work counts from round 9 on"),
        ({"tokens_per_s": None, "blocked_fraction": None}, "speed      not measured yet"),
        ({"tokens_per_s": 1234.0, "blocked_fraction": None}, "speed      1,234 tokens/s"),
    ],
)
def test_status_says_how_far_a_node_is(facts: dict[str, Any], line: str) -> None:
    assert line in status_lines(with_checks(**facts))


def test_status_says_why_a_node_is_paused_and_what_it_moves_at_most() -> None:
    why = "the machine is on its battery (--only-when)"
    lines = status_lines(with_checks(missing=[], phase="paused", why_paused=why, max_upload=5 << 20))
    at = lines.index("phase      paused")
    assert lines[at + 1] == f"help       paused: {why}; it votes and keeps the state, and trains nothing"
    assert lines[lines.index("bytes      1.5 MB sent, 999 B received") + 1] == "caps       5.2 MB/s up at most"
    both = msgspec.structs.replace(STATUS, max_upload=1_000_000, max_download=2_000_000)
    assert "caps       1.0 MB/s up at most, 2.0 MB/s down at most" in status_lines(both)


def test_status_of_a_thousand_nodes_is_a_screen_with_those_in_trouble_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = crowd_of(1000)
    with running(tmp_path, FakeNode(msgspec.to_builtins(status_of(peers)), peers)):
        assert execute(["status", "--data-dir", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert execute(["status", "--data-dir", str(tmp_path), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert len(lines) <= 70
    assert "peers      1,000 known, 900 alive: 900 training; 100 gone; 100 not members, 128 behind" in lines
    assert "software   shoal 1: 600, shoal 2\\x1b[2J: 300" in lines
    assert "together   1.3 Mtokens/s, as they say" in lines
    assert (
        "a node     1.5 ktokens/s in the middle; one in ten below 1.1 ktokens/s, one in ten above 1.9 ktokens/s"
        in lines
    )
    assert lines[-1] == "member     and 876 more; `shoal status --peers` lists all that this node knows"
    members = [line.split()[1] for line in lines if line.startswith("member ")][:-1]
    assert (len(members), members[0]) == (SHOWN_LIMIT, "12D30000")
    assert members[1:] == [f"12D3{place:04}" for place in range(9, 1000, 10)][: SHOWN_LIMIT - 1]
    missing = [line for line in lines if line.startswith("missing ")]
    assert missing[-1] == "missing    and 76 more; `shoal status --json` has them all"
    assert (len(document["members"]), len(document["missing"]), document["peers"]["known"]) == (900, 100, 1000)


def test_status_peers_lists_every_peer_on_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = crowd_of(1000)
    with running(tmp_path, FakeNode(msgspec.to_builtins(status_of(peers)), peers)):
        assert execute(["status", "--data-dir", str(tmp_path), "--peers"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert execute(["status", "--data-dir", str(tmp_path), "--peers", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert len(lines) == len(document["peers"]) == 1000
    assert lines[4] == "12D30004 training no member direct round 7 1004.0 tokens/s shoal 1 /ip4/192.0.2.1/tcp/4001"
    assert lines[9].startswith("12D30009 gone member gone round 7 ")
    assert "\\x1b" in lines[0]
    assert document["peers"][4] == msgspec.to_builtins(peers[4])


def test_status_of_a_node_of_another_version_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, FakeNode({"peer_id": 3})):
        assert execute(["status", "--data-dir", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"shoal: the node on {tmp_path} is of another version than this command (")
    assert err.count("\n") == 1


@pytest.mark.parametrize("op", ["leave", "pause", "resume"])
def test_order_reaches_the_node(node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str) -> None:
    assert execute([op, "--data-dir", str(tmp_path)]) == 0
    assert node.asked == [op]
    assert capsys.readouterr().out.startswith(f"the node on {tmp_path} ")


def test_refusal_is_one_line_and_exit_code_1(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.refuses = True
    assert execute(["pause", "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr() == ("", "shoal: already paused\n")


@pytest.mark.parametrize("command", ["status", "leave", "pause", "resume", "limit"])
def test_command_without_a_node_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert execute([command, "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr() == (
        "",
        f"shoal: no node is running on {tmp_path}; start one with `shoal run MANIFEST --data-dir {tmp_path}`\n",
    )


def test_command_that_names_no_folder_finds_no_node_and_says_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.node.control_client.DEFAULT_DATA_DIR", tmp_path)
    assert execute(["status", "--data-dir", str(tmp_path)]) == 1
    told = (
        f"shoal: no node is running on {tmp_path}; name the folder of one that does with --data-dir, or start one with"
    )
    assert capsys.readouterr().err.startswith(told)


def test_peers_are_called_by_name_wherever_one_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "missing": [ADA],
        "long_missing": [ADA],
        "voters": ["12D3A", ADA],
        "alerts": [f"no tensors come through to {ADA}; say `shoal revoke {ADA}`, or dial /p2p/{ADA}"],
        "bans": [BanStatus(peer_id=ADA, term="0.0", round=5, until=9, evidence="ab")],
        "rollbacks": [RollbackStatus(peer_id="12D3A", round=3, asked=True)],
    }
    print_status(with_checks(**changes))
    lines = capsys.readouterr().out.splitlines()
    for line in (
        f"alert      no tensors come through to ada; say `shoal revoke {ADA}`, or dial /p2p/{ADA}",
        f"missing    ada ({ADA})",
        "voter      box (12D3A, this node)",
        f"voter      ada ({ADA})",
        f"banned     ada ({ADA}) by round 5, until round 9",
        "rollback   box (12D3A, this node) would go back to round 3, its user's order",
    ):
        assert line in lines, lines


@pytest.mark.parametrize(
    ("loss", "metric", "train_loss", "train_metric", "said"),
    [
        (1.23456, "bits per byte", 1234.56, "bits per byte", "held-out 1.235 bits per byte; training 1,235"),
        (0.25, "error rate", 1.25, "", "held-out 0.25 error rate; training 1.25 (own unit)"),
        (None, "", 1.25, "bits per byte", "training 1.25 bits per byte"),
        (None, "", 1.25, "", "training 1.25"),
        (0.00001234567, "held-out loss", None, "", "held-out 1.235e-05"),
        (1.5, "held-out loss", 1.25, "held-out loss", "held-out 1.5; training 1.25"),
        (1.5, "training loss", 1.25, "training loss", "training 1.25"),  # of a loop that has no evaluation
        (None, "", None, "", ""),
    ],
)
def test_a_loss_is_said_to_be_held_out_or_of_training(
    loss: float | None, metric: str, train_loss: float | None, train_metric: str, said: str
) -> None:
    known = msgspec.structs.replace(STATUS, loss=loss, metric=metric, train_loss=train_loss, train_metric=train_metric)
    assert losses_told(known) == said


def test_samples_are_lines_that_no_terminal_takes_for_a_command() -> None:
    hostile = {"The ": "cat\x1b[2J\nsat \u202e\x9b", '"': "[red]"}
    status = msgspec.structs.replace(STATUS, samples=SamplesStatus(round=12, texts=hostile))
    assert [line for line in status_lines(status) if line.startswith("sample")] == [
        'sample     "The " → "cat\\x1b[2J\\nsat \\u202e\\x9b" (round 12)',
        'sample     """ → "[red]" (round 12)',
    ]
    assert not [line for line in status_lines(STATUS) if line.startswith("sample")]


def test_nobody_missing_is_no_line() -> None:
    lines = status_lines(with_checks(digest=None, missing=[]))
    assert not [line for line in lines if line.startswith(("missing", "help", "alert"))]
    assert lines[6] == "round      7 (term 0.0), digest –"


def test_status_names_who_is_gone_and_who_is_behind_and_says_how_it_is_reached() -> None:
    peers = [
        PeerFacts(peer="12D3A", phase="training", reach="self", member=True, round=9, tokens_per_s=1.0),
        PeerFacts(peer="12D3C", phase="training", reach="direct", member=True, round=9, tokens_per_s=1.0),
        PeerFacts(peer="12D3D", phase="training", reach="direct", member=True, round=4, tokens_per_s=1.0),
        PeerFacts(peer=ADA, phase="training", reach="gone", member=False, round=3, tokens_per_s=1.0),
    ]
    lines = status_lines(with_checks(peers=summary_of(peers), reachability="relayed"))
    assert "behind     12D3D (5 rounds)" in lines
    assert f"gone       ada ({ADA})" in lines
    assert "reached    relayed: through members that others reach" in lines
    assert "reached    public: from outside" in status_lines(with_checks(reachability="public"))


def test_an_agent_says_what_it_wrote_and_no_speed() -> None:
    rollouts = RolloutStatus(role="train", generated_tokens=52_327)
    assert "speed      52,327 tokens generated" in status_lines(with_checks(tokens_per_s=None, rollouts=rollouts))


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(b"control"),
    "emptied": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(bytes(range(256))),
    "a folder": Path.mkdir,
    "to nowhere": lambda path: path.symlink_to("/nonexistent/nowhere"),
    "to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("command", ["status", "status --peers", "link", "leave", "limit"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["control.sock", "control.path", "swarm.toml"])
def test_a_folder_whose_files_are_damaged_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str, command: str
) -> None:
    """These are all that a command reads that asks a running node."""
    DAMAGES[damage](tmp_path / name)
    assert execute([*command.split(), "--data-dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith((f"shoal: no node is running on {tmp_path}; ", f"shoal: the node on {tmp_path} broke off: "))


def test_a_data_dir_that_no_folder_can_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path / ("y" * 300), tmp_path.joinpath(*["x" * 49] * 6)):
        assert execute(["status", "--data-dir", str(folder)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"shoal: no node is running on {folder}; start one with `shoal run ")
