"""Options of one run of a node, beside the manifest, and how its user gives them.

Each field of `NodeOptions` is an option of `shoal run`, declared here and nowhere else: to add one, add a field, and
read it where it is needed as `config.<field>`.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final, Literal

import platformdirs

from shoal.node.option import HostPort, Option, Within, check_exists, parse_host_port, parse_rate
from shoal.node.reporting.event_sinks import check_installed
from shoal.node.training.rank_messages import PROCESSES_LIMIT
from shoal.node.when import When, check_whens, parse_when
from shoal.protocol.address import parse_address, parse_listen_address
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT
from shoal.protocol.names import check_name, name_of_host
from shoal.protocol.rollouts import COMPLETION_LEAST, COMPLETION_LIMIT
from shoal.protocol.sites import check_site
from shoal.protocol.terms import RollbackPolicy

DEFAULT_DATA_DIR = platformdirs.user_data_path("shoal", appauthor=False)

NETWORK: Final = "Network"
TRAINING: Final = "Training"
SHARING: Final = "Sharing rollouts"
CHECKPOINTS: Final = "Checkpoints, and going along with others"
WATCHING: Final = "Watching"
PANELS: Final = (NETWORK, TRAINING, SHARING, CHECKPOINTS, WATCHING)
"""The headings of `--help`, in this order; options without one come first."""

ANY_PORT: Final = HostPort("0.0.0.0", 0)
HOLD_PHASES = ("train", "plan", "reduce", "repair", "certify", "transfer")
THREAD_LIMIT = 4096
ACCUMULATE_LIMIT = 4096
ROUND_LIMIT = 2**53
HOLD_LIMIT = 256
CHECKPOINT_LIMIT = 100_000
CHECKPOINTS_KEPT = 2
"""Unless the user says otherwise: the older one is from before a loss spike that the newest already has in it."""

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Test mode: stop at this point of this round until released. `progress` is in 0..1 of the phase."""

    round: int
    phase: str
    progress: float = 0.0

    @staticmethod
    def parse(text: str) -> Hold:
        """A hold written ROUND:PHASE[:PROGRESS]. Raises ConfigError."""
        try:
            round_text, phase, *rest = text.split(":")
            hold = Hold(round=int(round_text), phase=phase, progress=float(rest[0]) if rest else 0.0)
        except (ValueError, IndexError):
            raise ConfigError(f"a hold is written ROUND:PHASE[:PROGRESS], like 3:reduce:0.4, not {text!r}") from None
        if phase not in HOLD_PHASES or not 0 <= hold.progress <= 1:
            raise ConfigError(f"a hold's phase is one of {', '.join(HOLD_PHASES)} and its progress in 0..1: {text!r}")
        return hold


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """Address of the node's page. or_free: at any free port if that one is taken."""

    host: str = "127.0.0.1"
    port: int = 8420
    or_free: bool = True

    def __str__(self) -> str:
        return str(HostPort(self.host, self.port))

    @classmethod
    def parse(cls, text: str, option: str) -> PageAddress | None:
        """The address that a user wrote; None for "off". Where nobody named a port, another does if it is taken."""
        if text == "off":
            return None
        host, port = parse_host_port(text, option)
        return cls(host=host, port=port, or_free=text == str(cls()))


def check_device(device: str, option: str) -> None:
    """Raise ConfigError for what names no device."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"{option}: {device!r} is none of auto, cpu, cuda, cuda:N, mps")


def check_joined(addresses: Sequence[str], option: str) -> None:
    """Raise ConfigError for the first that is no node's address."""
    for address in addresses:
        parse_address(address)


def check_listen(addresses: Sequence[str], option: str) -> None:
    """Raise ConfigError for the first on which no node can listen."""
    for address in addresses:
        parse_listen_address(address)


def check_hivemind(addresses: Sequence[str], option: str) -> None:
    """Raise ConfigError for an address that is no hivemind peer's, or where hivemind is not installed."""
    if addresses:
        from shoal.swarm.rendezvous.hivemind import check_peers

        check_peers(addresses, option)


def parse_engine(text: str, option: str) -> HostPort:
    """Host and port of an engine's URL. Raises ConfigError."""
    found = re.fullmatch(r"http://(?P<place>[^/?#@]+)(/|/v1/?)?", text)
    if found is None:
        raise ConfigError(f"{option}: {text!r} is no engine's address; write http://127.0.0.1:8000")
    place = found["place"]
    return parse_host_port(place if re.search(r":\d+\Z", place) else f"{place}:80", option)


def parse_hold(text: str, option: str) -> Hold:
    """One hold. Raises ConfigError."""
    return Hold.parse(text)


def check_holds(holds: Sequence[Hold], option: str) -> None:
    """Raise ConfigError where there are too many."""
    if len(holds) > HOLD_LIMIT:
        raise ConfigError(f"{option}: at most {HOLD_LIMIT}")


def check_tensorboard(folder: Path, option: str) -> None:
    """Raise ConfigError where TensorBoard is not installed."""
    check_installed(tensorboard=True, wandb=False)


def check_wandb(project: str, option: str) -> None:
    """Raise ConfigError where the library of Weights & Biases is not installed."""
    check_installed(tensorboard=False, wandb=True)


DataDir = Annotated[Path, Option("--data-dir", help="Where this node keeps its key and its state.", metavar="FOLDER")]
Listen = Annotated[
    tuple[str, ...],
    Option(
        "--listen",
        help="Where to listen, like /ip4/0.0.0.0/tcp/4001. Repeatable.",
        panel=NETWORK,
        check=check_listen,
    ),
]
CheckpointKeep = Annotated[
    int,
    Option(
        "--checkpoint-keep",
        help="How many checkpoints stay, the newest ones.",
        metavar="COUNT",
        panel=CHECKPOINTS,
        check=Within(1, CHECKPOINT_LIMIT),
    ),
]
Device = Annotated[
    str, Option("--device", help="auto, cpu, cuda, cuda:1 … or mps.", panel=TRAINING, check=check_device)
]
Data = Annotated[
    str | None,
    Option(
        "--data",
        help="A file or folder to train on, for workloads that read one.",
        metavar="PATH",
        panel=TRAINING,
        check=check_exists,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of one run of a node, checked by `check_options`."""

    data_dir: DataDir = DEFAULT_DATA_DIR
    name: Annotated[
        str | None,
        Option(
            "--name",
            help="What people see this node called, in place of the machine's own name. Every peer is told; it stays "
            "with the data folder until another is given.",
            check=check_name,
        ),
    ] = None
    site: Annotated[
        str | None,
        Option(
            "--site",
            help="Where this node is: nodes of one site, behind one uplink, contribute together where the manifest "
            "has sites together. Who knows the name may say it too.",
            check=check_site,
            panel=NETWORK,
        ),
    ] = None
    join: Annotated[
        tuple[str, ...],
        Option(
            "--join",
            help="A member's address, as its `shoal status` shows it. Repeatable.",
            panel=NETWORK,
            check=check_joined,
        ),
    ] = ()
    listen: Listen = ("/ip4/0.0.0.0/tcp/0",)
    lane_listen: Annotated[
        HostPort,
        Option(
            "--lane-listen",
            help="Where to listen for bulk data.",
            metavar="HOST:PORT",
            panel=NETWORK,
            parse=parse_host_port,
        ),
    ] = ANY_PORT
    device: Device = "auto"
    threads: Annotated[
        int,
        Option(
            "--threads",
            help="CPU threads of the trainer; 0: its own choice.",
            panel=TRAINING,
            check=Within(0, THREAD_LIMIT, "0 lets the trainer choose"),
        ),
    ] = 0
    accumulate: Annotated[
        int,
        Option(
            "--accumulate",
            help="Cut each batch into so many parts, for a device with little memory.",
            metavar="PARTS",
            panel=TRAINING,
            check=Within(1, ACCUMULATE_LIMIT, "1 cuts nothing"),
        ),
    ] = 1
    processes: Annotated[
        int,
        Option(
            "--processes",
            help="Train with so many processes, one for each CUDA device, that hold the model together.",
            metavar="COUNT",
            panel=TRAINING,
            check=Within(1, PROCESSES_LIMIT, "1 starts one trainer"),
        ),
    ] = 1
    only_when: Annotated[
        tuple[When, ...],
        Option(
            "--only-when",
            help="Train only then, and else be paused as by `shoal pause`: mains (not on battery), idle (for two "
            "minutes other programs used less than a quarter of the processors, and nobody typed in a terminal), or a "
            "time of day such as 22:00-07:30. Repeatable: all kinds must hold, of times of day one.",
            metavar="idle|mains|HH:MM-HH:MM",
            panel=TRAINING,
            parse=parse_when,
            check=check_whens,
        ),
    ] = ()
    data: Data = None
    """Never taken from the manifest."""
    rounds: Annotated[
        int | None,
        Option(
            "--rounds",
            help="Stop at the swarm's round of this number, whoever made the ones before; where rollouts are shared, "
            "at this node's own.",
            panel=TRAINING,
            check=Within(1, ROUND_LIMIT, "leave --rounds out to go on for ever", what="number of rounds"),
        ),
    ] = None
    checkpoint_every: Annotated[
        int,
        Option(
            "--checkpoint-every",
            help="Rounds from one checkpoint to the next; 0: none.",
            metavar="ROUNDS",
            panel=CHECKPOINTS,
            check=Within(0, ROUND_LIMIT, "0 makes none", what="number of rounds"),
        ),
    ] = 10
    checkpoint_keep: CheckpointKeep = CHECKPOINTS_KEPT
    dashboard: Annotated[
        PageAddress | None,
        Option(
            "--dashboard",
            help="Where this node's page is served; port 0 for any. Beyond this machine it asks for a token.",
            metavar="HOST:PORT|off",
            panel=WATCHING,
            parse=PageAddress.parse,
        ),
    ] = PageAddress()
    max_upload: Annotated[
        int | None,
        Option("--max-upload", help="Such as 5MiB/s, or 80Mbit.", metavar="RATE", panel=NETWORK, parse=parse_rate),
    ] = None
    """In bytes/s, as the next one."""
    max_download: Annotated[
        int | None,
        Option("--max-download", help="Such as 5MiB/s, or 80Mbit.", metavar="RATE", panel=NETWORK, parse=parse_rate),
    ] = None
    shared_memory: Annotated[
        bool,
        Option(
            "--shared-memory/--no-shared-memory",
            help="Hand nodes on this machine what they get in memory.",
            panel=NETWORK,
        ),
    ] = True
    mdns: Annotated[bool, Option("--mdns/--no-mdns", help="Find members on the local network.", panel=NETWORK)] = True
    relay: Annotated[
        bool,
        Option("--relay/--no-relay", help="Pass on, for members behind routers, what they encrypt.", panel=NETWORK),
    ] = True
    """Once others reach this node from outside."""
    port_mapping: Annotated[
        bool,
        Option(
            "--port-mapping/--no-port-mapping",
            help="Ask the router for ports (UPnP) if nobody reaches this.",
            panel=NETWORK,
        ),
    ] = True
    rendezvous: Annotated[
        Literal["auto", "on", "off"],
        Option(
            "--rendezvous",
            help="Meet members by SwarmId in a Kademlia table of strangers; auto: where an address beyond this "
            "machine is named.",
            panel=NETWORK,
        ),
    ] = "auto"
    hivemind: Annotated[
        tuple[str, ...],
        Option(
            "--hivemind",
            help="A peer of a hivemind DHT in which to meet members as well. Repeatable.",
            metavar="ADDR",
            panel=NETWORK,
            check=check_hivemind,
        ),
    ] = ()
    loop_patience_s: Annotated[
        float,
        Option(
            "--loop-patience",
            help="With the workload own-loop: leave after so many seconds in which no loop is attached; 0: never.",
            metavar="SECONDS",
            panel=TRAINING,
            check=Within(0, sys.float_info.max, "0 is for ever", what="number of seconds"),
        ),
    ] = 0.0
    rollback: Annotated[
        RollbackPolicy,
        Option(
            "--rollback",
            help="When to agree to going back: never, spike (of its own loss) or always.",
            panel=CHECKPOINTS,
        ),
    ] = "spike"
    authority_amendments: Annotated[
        bool,
        Option(
            "--authority-amendments/--no-authority-amendments",
            help="Agree to amended settings that the swarm's authority signed.",
            panel=CHECKPOINTS,
        ),
    ] = True
    forget_promises: Annotated[
        bool,
        Option(
            "--forget-promises",
            help="After a log was damaged, sign again though promises may be lost; for who is needed to go on. Once.",
            panel=CHECKPOINTS,
        ),
    ] = False
    take_over: Annotated[
        bool,
        Option(
            "--take-over",
            help="Go on although this node's key was in use elsewhere: the other copy of its data folder is gone.",
        ),
    ] = False
    tensorboard: Annotated[
        Path | None,
        Option(
            "--tensorboard",
            help="Write event files for TensorBoard into this folder.",
            metavar="FOLDER",
            panel=WATCHING,
            check=check_tensorboard,
        ),
    ] = None
    wandb: Annotated[
        str | None,
        Option(
            "--wandb",
            help="Log to this project of Weights & Biases.",
            metavar="PROJECT",
            panel=WATCHING,
            check=check_wandb,
        ),
    ] = None
    test_mode: Annotated[bool, Option("--test-mode", help="Keep each round's records; obey holds.", hidden=True)] = (
        False
    )
    holds: Annotated[
        tuple[Hold, ...],
        Option(
            "--hold",
            help="ROUND:PHASE[:PROGRESS] to stop at.",
            hidden=True,
            parse=parse_hold,
            check=check_holds,
        ),
    ] = ()
    rollouts: Annotated[
        Literal["train", "sample", "judge"],
        Option(
            "--rollouts",
            help="Where rollouts are shared: train, sample (generate for others only) or judge (score others' only).",
            panel=SHARING,
        ),
    ] = "train"
    engine: Annotated[
        HostPort | None,
        Option(
            "--engine",
            help="With --rollouts sample: have this server of OpenAI's completions draw them, and hold no policy here.",
            metavar="URL",
            panel=SHARING,
            parse=parse_engine,
        ),
    ] = None
    evaluate_rounds: Annotated[
        int,
        Option(
            "--evaluate-rounds",
            help="Where rollouts are shared: after how many rounds to answer 200 held-out tasks, in 5 % of the time at "
            "most; 0: never.",
            panel=SHARING,
            check=Within(0, ROUND_LIMIT),
        ),
    ] = 20
    local_groups: Annotated[
        int | None,
        Option(
            "--local-groups",
            help="With strategy rollouts: own groups a round, if not the manifest's.",
            panel=SHARING,
            check=Within(1, GROUPS_LIMIT),
        ),
    ] = None
    external_groups: Annotated[
        int | None,
        Option(
            "--external-groups",
            help="With strategy rollouts: others' groups a round, if not the manifest's.",
            panel=SHARING,
            check=Within(0, GROUPS_LIMIT),
        ),
    ] = None
    group_size: Annotated[
        int | None,
        Option(
            "--group-size",
            help="With strategy rollouts: completions of one task, if not the manifest's.",
            panel=SHARING,
            check=Within(COMPLETION_LEAST, COMPLETION_LIMIT),
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(NodeOptions):
    """One node's local settings, and the manifest of its swarm. join: those that a link names, too."""

    manifest: Manifest

    @property
    def node_name(self) -> str:
        """The name that this node claims: the user's choice, or the machine's."""
        return self.name or name_of_host(socket.gethostname())

    @classmethod
    def of(cls, options: NodeOptions, manifest: Manifest, *, join: tuple[str, ...]) -> NodeConfig:
        """The configuration of a run with these options."""
        given = {one.name: getattr(options, one.name) for one in fields(NodeOptions)}
        return cls(manifest=manifest, **{**given, "join": join})
