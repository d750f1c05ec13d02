"""Client of the control socket: a command finds a running node and asks it one thing.

The socket lies in the node's data folder, `control.sock`. A path of a Unix-domain socket has room for about 100
bytes; where the folder's own path is longer, the socket lies in a private folder elsewhere and the file
`control.path` in the data folder says where.

A request is one line of JSON, {"op": "status"}, for some ops with {"arguments": ["…"]}; the reply is one line,
{"ok": true, …} or {"ok": false, "error": "…"}.
Nothing here needs an event loop, so that `shoal status` starts at once.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from shoal.node.options import DEFAULT_DATA_DIR
from shoal.node.peer_facts import PeerFacts, PeerSummary
from shoal.node.reporting.events import TaskRewards
from shoal.protocol.errors import ConfigError, NetworkError, ShoalError
from shoal.protocol.seats import LinePlace

SOCKET_NAME = "control.sock"
POINTER_NAME = "control.path"
SOCKET_PATH_LIMIT_BYTES = 100
REQUEST_LIMIT_BYTES = 4096
REPLY_LIMIT_BYTES = 8 << 20
REQUEST_DEADLINE_S = 10.0
_RECEIVE_BYTES = 65_536

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


class NodeNotRunning(ConfigError):
    """Failure to reach a node: no process answers for this data folder."""


class ControlRefused(ShoalError):
    """Refusal of the node, which understood; the text is its reason."""


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member as the asked node sees it.

    reach: "self", "direct", "through others", "silent" or "gone"; "" from a node that does not say.
    """

    peer_id: str
    phase: str
    tokens_per_s: float | None
    reach: str = ""


class BytesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes since this node started, lanes and control. passed_on: between others, as their relay.

    lanes_sent, lanes_received: of those sent and received, what went over lanes.
    """

    sent: int
    received: int
    passed_on: int = 0
    lanes_sent: int = 0
    lanes_received: int = 0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of this node, and its use of the machine, trainer included: memory, and cores over some seconds.

    certifies: whether voters certify each round. start: the command that starts this node again. disk_free_bytes: where
    the data folder is. peer_errors, own_errors: requests of others that failed here, by whose fault that was.
    """

    swarm_name: str = ""
    strategy: str = ""
    certifies: bool = True
    workload: str = ""
    software: str = ""
    device: str = ""
    start: str = ""
    uptime_s: float = 0.0
    cores: float = 0.0
    memory_bytes: int = 0
    disk_free_bytes: int | None = None
    peer_errors: int = 0
    own_errors: int = 0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One matter that a node's user should know of. remedy: what helps; empty where nothing has to be done.

    PeerIds in the texts stand alone, for names to be put in their place; what is to be typed is between backquotes.
    above: it is told in the first place, as all that is bad is.
    """

    name: str
    state: Literal["ok", "warn", "bad"]
    detail: str
    remedy: str = ""
    above: bool = False

    @property
    def text(self) -> str:
        """Both in one line."""
        return f"{self.detail}; {self.remedy}" if self.remedy else self.detail


class RollbackStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A member that would go back to `round`; `asked`: by its user's order, not by its policy."""

    peer_id: str
    round: int
    asked: bool


class AmendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A member that would amend `settings`, by section.key; `asked`: by its user's order, not the authority's."""

    peer_id: str
    settings: dict[str, bool | int | float | str]
    asked: bool


class BanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that takes no part: banned by the certificate of `round`, on the evidence of that digest, in hex.

    until: the last round for which it holds; None has no end.
    """

    peer_id: str
    term: str
    round: int
    until: int | None
    evidence: str


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A group that went through the node lately. reward: the mean, as its origin claims it unless `own`.

    round: of its origin's; policy: the version of the policy that wrote it, as its origin counts; came: in which of
    this node's rounds; age: how many of them ago.
    """

    digest: str = ""
    peer_id: str
    own: bool = False
    came: int = 0
    family: str
    round: int
    policy: int
    age: int
    completions: int
    reward: float


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a node that shares rollouts, since it started, and its newest groups, oldest first.

    reward: the mean of its newest own completions, in 0..1; None before there are any. made: groups of its own that
    were announced; wanted: those of them that somebody pulled, counted where it makes them for others alone; waits:
    whether it makes none now, since others take fewer. pulled: groups of others that came; taken: those of them that
    were judged and trained on. rejected: offers and groups that were refused, by reason. tasks: of each task family,
    the newest round that had any of it. held_out_reward: the newest greedy reward on held-out tasks, with the round and
    how many they were. round: of its agent's. teaching: how far the warm-up is, in words; empty when there is none.
    """

    role: str
    round: int = 0
    reward: float | None = None
    held_out_reward: float | None = None
    held_out_round: int = 0
    held_out_tasks: int = 0
    teaching: str = ""
    made: int = 0
    wanted: int = 0
    waits: bool = False
    pulled: int = 0
    taken: int = 0
    pulled_bytes: int = 0
    generated_tokens: int = 0
    rejected: dict[str, int] = {}
    tasks: dict[str, TaskRewards] = {}
    groups: list[GroupStatus] = []


class SamplesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of the certified model of `round`: `texts` by the prompt that each goes on from."""

    round: int
    texts: dict[str, str]


class FetchedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How often a state, finals, an image or changes of one were fetched since the start, and their bytes in all."""

    times: int
    bytes: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """State of a running node: the reply to the op `status`, and what its page and its metrics are made of.

    checks: what its user should know, and what helps: what nobody who shows a node works out again. doing: its phase
    and how far it is, in words. node: what runs here. missing: PeerIds of voters not heard of.
    voters: the PeerIds of all who vote on the round under way. faults: the fault model by which they do.
    long_missing: those of them of whom nothing was heard for an hour; revoked: whom the authority shut out, who count
    all the same: nobody else may be gone for good. trains_alone: its trainer goes on where there is no quorum.
    unready: for whose contributions it waits, having made its own. without: the members whose work the newest round
    has not. stuck: its trainer has made no step for minutes. cut_off: its machine has no network.
    reachability: "public", "relayed" or "unknown". proven: addresses, of control and lanes, at which others reached it.
    abstains: why it signs nothing in this round, and what helps; None if it may sign.
    turn_in_rounds: in how many rounds it has a seat, 0 for this one; None where seats are for all, or it is no member.
    outside: its place in the line where it waits outside for a seat, else None.
    site: linked peers of its site, with which it contributes; None where it is of none.
    alerts: what keeps this node from signing, or from finding anybody, and what helps, in a line each. peers: of all
    that it knows; None from a node that does not say.
    loss: the newest evaluation, of which metric says in words what it is; train_loss: of this node's own training, of
    which train_metric says it, empty where the workload does not.
    step, steps: of the inner steps under way; fetched_bytes, state_bytes: of a state that is being fetched;
    counts_from: the round from which its work counts; each None where there is none.
    why_paused: why it trains nothing, empty while it does. max_upload, max_download: its caps now, in bytes/s, or None.
    names: of all peers that the node knows, by PeerId, as they are to be shown; none of one that says no name.
    settings: those in force that are not the manifest's, by section.key. dashboard: the URL of the node's page, if any;
    dashboard_link: the same with its token, to whom the page obeys.
    """

    peer_id: str
    swarm_id: str
    addresses: list[str]
    reachability: str = "unknown"
    proven: list[str] = []
    phase: str
    doing: str = ""
    why_paused: str = ""
    step: int | None = None
    steps: int | None = None
    fetched_bytes: int | None = None
    state_bytes: int | None = None
    counts_from: int | None = None
    term: str
    round: int
    digest: str | None
    abstains: str | None = None
    turn_in_rounds: int | None = None
    outside: LinePlace | None = None
    site: list[str] | None = None
    members: list[MemberStatus]
    peers: PeerSummary | None = None
    voters: list[str] = []
    faults: Literal["crash", "lying"] = "crash"
    missing: list[str]
    long_missing: list[str] = []
    revoked: list[str] = []
    trains_alone: bool = False
    unready: list[str] = []
    without: list[str] = []
    stuck: bool = False
    cut_off: bool = False
    names: dict[str, str] = {}
    rollbacks: list[RollbackStatus] = []
    amendments: list[AmendStatus] = []
    settings: dict[str, bool | int | float | str] = {}
    bans: list[BanStatus] = []
    alerts: list[str] = []
    checks: list[Check] = []
    loss: float | None
    metric: str = ""
    train_loss: float | None = None
    train_metric: str = ""
    tokens_per_s: float | None
    bytes: BytesStatus
    node: NodeFacts = NodeFacts()
    max_upload: int | None = None
    max_download: int | None = None
    blocked_fraction: float | None = None
    refused: dict[str, int] = {}
    rollouts: RolloutStatus | None = None
    fetched: dict[str, FetchedStatus] = {}
    samples: SamplesStatus | None = None
    dashboard: str | None = None
    dashboard_link: str | None = None

    @property
    def paused(self) -> bool:
        """True if it trains nothing, also where the round under way began before."""
        return self.phase == "paused" or bool(self.why_paused)


class PeerList(msgspec.Struct, frozen=True, kw_only=True):
    """All peers that a running node knows, members first, itself among them: the reply to the op `peers`."""

    peers: list[PeerFacts]


def socket_path(data_dir: Path) -> Path:
    """Path of the socket at which the node of this data folder listens, or last did, or would.

    A path elsewhere is believed while its folder is of whose node wrote it down, and nobody else can write there: the
    folder of one that died is gone some day, and anybody may make another of that name.
    """
    own, pointer = data_dir.absolute() / SOCKET_NAME, data_dir / POINTER_NAME
    try:
        path = Path(os.fsdecode(pointer.read_bytes()))
        folder, writer = path.parent.lstat(), pointer.stat().st_uid
    except (OSError, ValueError):
        return own
    is_its_own = stat.S_ISDIR(folder.st_mode) and folder.st_uid == writer and not folder.st_mode & 0o022
    return path if is_its_own else own


def request(data_dir: Path, op: str, *arguments: str, deadline_s: float = REQUEST_DEADLINE_S) -> dict[str, JsonValue]:
    """Ask the node that runs on `data_dir`; returns its reply without `ok`. Blocks for at most `deadline_s`.

    Raises NodeNotRunning (a ConfigError), ControlRefused with the node's reason, NetworkError if it does not answer
    in time or not as it should.
    """
    ends_at = time.monotonic() + deadline_s
    path = socket_path(data_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _allow_until(connection, ends_at)
            _connect(connection, path, data_dir)
            asked = {"op": op, "arguments": arguments} if arguments else {"op": op}
            connection.sendall(msgspec.json.encode(asked) + b"\n")
            line = _receive_line(connection, ends_at)
        except TimeoutError:
            raise NetworkError(
                f"the node on {data_dir} gave no answer to {op!r} in {deadline_s:g} s; look at its log"
            ) from None
        except OSError as error:
            raise NetworkError(
                f"the node on {data_dir} broke off: {error.strerror or error}; look at its log"
            ) from None
    return _parse_reply(line, data_dir)


def _connect(connection: socket.socket, path: Path, data_dir: Path) -> None:
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT_BYTES:  # no node can have bound it
        raise _not_running(data_dir)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise _not_running(data_dir) from None
    except PermissionError:
        raise ConfigError(f"the node on {data_dir} belongs to another user; run this command as that user") from None


def start_command(data_dir: Path) -> str:
    """The command that starts a node on this data folder, with the manifest that lies in it, if it has run there."""
    own = data_dir / "swarm.toml"
    there = os.path.isfile(own)  # false too for what no file can be called
    return shlex.join(["shoal", "run", str(own) if there else "MANIFEST", "--data-dir", str(data_dir)])


def _not_running(data_dir: Path) -> NodeNotRunning:
    other = "name the folder of one that does with --data-dir, or " if data_dir == DEFAULT_DATA_DIR else ""
    return NodeNotRunning(f"no node is running on {data_dir}; {other}start one with `{start_command(data_dir)}`")


def _allow_until(connection: socket.socket, ends_at: float) -> None:
    remaining_s = ends_at - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    connection.settimeout(remaining_s)


def _receive_line(connection: socket.socket, ends_at: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        _allow_until(connection, ends_at)
        part = connection.recv(_RECEIVE_BYTES)
        if not part:
            raise ConnectionResetError("the connection ended within its answer")
        received += part
        if len(received) > REPLY_LIMIT_BYTES:
            raise NetworkError(f"an answer of more than {REPLY_LIMIT_BYTES} bytes; see what listens on that socket")
    return bytes(received)


def _parse_reply(line: bytes, data_dir: Path) -> dict[str, JsonValue]:
    try:
        reply = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NetworkError(
            f"what answers for {data_dir} is no node of this version; restart it with this one"
        ) from None
    match reply.pop("ok", None), reply.get("error"):
        case True, _:
            return reply  # type: ignore[return-value]  # decoded JSON holds JsonValues and nothing else
        case False, str(error):
            raise ControlRefused(error)
    raise NetworkError(f"what answers for {data_dir} is no node of this version; restart it with this one")
