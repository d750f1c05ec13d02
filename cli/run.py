"""`shoal run`: one node, from the command line to its end."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli import logs
from shoal.cli.arenas import share_arenas
from shoal.cli.imports import importing
from shoal.cli.joining import follow_link, read_link
from shoal.cli.open_files import allow_files
from shoal.cli.options import (
    DEFAULT_DATA_DIR,
    NODE_KEY_NAME,
    AllowWorkload,
    Data,
    DataDir,
    Device,
    Listen,
    option,
    parse_host_port,
    parse_rate,
)
from shoal.cli.relay import check_hivemind_peers
from shoal.cli.render import RunProgress, progress_display
from shoal.cli.rollouts import RolloutOptions, check_rollout_options
from shoal.node.config import Hold, NodeConfig, PageAddress
from shoal.node.founded import founded_here
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.outcome import Outcome, Progress
from shoal.node.reporting.event_sinks import check_installed
from shoal.node.training.rank_messages import PROCESSES_LIMIT
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.manifest_workload import check_workload_allowed
from shoal.protocol.swarm_link import is_link

FROM_STDIN = "-"
LISTEN_ANYWHERE = "/ip4/0.0.0.0/tcp/0"
DEFAULT_PAGE = f"{PageAddress().host}:{PageAddress().port}"
THREAD_LIMIT = 4096
ACCUMULATE_LIMIT = 4096
ROUND_LIMIT = 2**53
HOLD_LIMIT = 256
CHECKPOINT_LIMIT = 100_000

EXIT_CODES = {Outcome.DONE: 0, Outcome.LEFT: 0, Outcome.FAILED: 1, Outcome.INTERRUPTED: 130}
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(RolloutOptions):
    """What the user asked `shoal run` for, as written."""

    manifest: Annotated[
        Path,
        typer.Argument(
            help="A manifest, which `shoal init` writes, or a link, from `shoal link`; -: a link on standard input.",
            metavar="MANIFEST",
        ),
    ]
    data_dir: DataDir = DEFAULT_DATA_DIR
    join: Annotated[
        list[str], option("--join", help="A member's address, as its `shoal status` shows it. Repeatable.")
    ] = field(default_factory=list)
    listen: Listen = field(default_factory=lambda: [LISTEN_ANYWHERE])
    lane_listen: Annotated[str, option("--lane-listen", help="Where to listen for bulk data.", metavar="HOST:PORT")] = (
        "0.0.0.0:0"
    )
    device: Device = "auto"
    threads: Annotated[int, option("--threads", help="CPU threads of the trainer; 0: its own choice.")] = 0
    accumulate: Annotated[
        int,
        option(
            "--accumulate", help="Cut each batch into so many parts, for a device with little memory.", metavar="PARTS"
        ),
    ] = 1
    processes: Annotated[
        int,
        option(
            "--processes",
            help="Train with so many processes, one for each CUDA device, that hold the model together.",
            metavar="COUNT",
        ),
    ] = 1
    data: Data = None
    rounds: Annotated[int | None, option("--rounds", help="Stop after so many certified rounds.")] = None
    checkpoint_every: Annotated[
        int, option("--checkpoint-every", help="Rounds from one checkpoint to the next; 0: none.", metavar="ROUNDS")
    ] = 10
    checkpoint_keep: Annotated[
        int, option("--checkpoint-keep", help="How many checkpoints stay, the newest ones.", metavar="COUNT")
    ] = 3
    dashboard: Annotated[
        str,
        option(
            "--dashboard",
            help="Where this node's page is served; port 0 for any. Beyond this machine it asks for a token.",
            metavar="HOST:PORT|off",
        ),
    ] = DEFAULT_PAGE
    max_upload: Annotated[str | None, option("--max-upload", help="Such as 5MiB/s, or 80Mbit.", metavar="RATE")] = None
    max_download: Annotated[str | None, option("--max-download", help="Such as 5MiB/s, or 80Mbit.", metavar="RATE")] = (
        None
    )
    shared_memory: Annotated[
        bool,
        option("--shared-memory/--no-shared-memory", help="Hand nodes on this machine what they get in memory."),
    ] = True
    mdns: Annotated[bool, option("--mdns/--no-mdns", help="Find members on the local network.")] = True
    relay: Annotated[
        bool, option("--relay/--no-relay", help="Pass on, for members behind routers, what they encrypt.")
    ] = True
    port_mapping: Annotated[
        bool, option("--port-mapping/--no-port-mapping", help="Ask the router for ports (UPnP) if nobody reaches this.")
    ] = True
    rendezvous: Annotated[
        Literal["auto", "on", "off"],
        option(
            "--rendezvous",
            help="Meet members by SwarmId in a Kademlia table of strangers; auto: where an address beyond this "
            "machine is named.",
        ),
    ] = "auto"
    hivemind: Annotated[
        list[str],
        option(
            "--hivemind", help="A peer of a hivemind DHT in which to meet members as well. Repeatable.", metavar="ADDR"
        ),
    ] = field(default_factory=list)
    allow_workload: AllowWorkload = field(default_factory=list)
    loop_patience: Annotated[
        float,
        option(
            "--loop-patience",
            help="With the workload own-loop: leave after so many seconds in which no loop is attached; 0: never.",
            metavar="SECONDS",
        ),
    ] = 0.0
    rollback: Annotated[
        Literal["never", "spike", "always"],
        option(
            "--rollback",
            help="When to agree to going back: never, spike (of its own loss) or always.",
        ),
    ] = "spike"
    authority_amendments: Annotated[
        bool,
        option(
            "--authority-amendments/--no-authority-amendments",
            help="Agree to amended settings that the swarm's authority signed.",
        ),
    ] = True
    forget_promises: Annotated[
        bool,
        option(
            "--forget-promises",
            help="After a log was damaged, sign again though promises may be lost; for who is needed to go on. Once.",
        ),
    ] = False
    take_over: Annotated[
        bool,
        option(
            "--take-over",
            help="Go on although this node's key was in use elsewhere: the other copy of its data folder is gone.",
        ),
    ] = False
    tensorboard: Annotated[
        Path | None,
        option("--tensorboard", help="Write event files for TensorBoard into this folder.", metavar="FOLDER"),
    ] = None
    wandb: Annotated[
        str | None, option("--wandb", help="Log to this project of Weights & Biases.", metavar="PROJECT")
    ] = None
    test_mode: Annotated[bool, option("--test-mode", help="Keep each round's records; obey holds.", hidden=True)] = (
        False
    )
    hold: Annotated[list[str], option("--hold", help="ROUND:PHASE[:PROGRESS] to stop at.", hidden=True)] = field(
        default_factory=list
    )


def run(options: RunOptions) -> None:
    """Be a node of a swarm, until interrupted, told to leave, or done.

    MANIFEST is a file that `shoal init` wrote, or the link that `shoal link` prints at a member: in quotes, it is all
    that a newcomer needs. Others on this machine see what commands are given: a link that lets in whoever has it goes
    to `shoal run - < FILE`. Members are found through the link or --join, on the local network, and in the address
    book of earlier runs.

    Ctrl-C leaves the swarm and ends with exit code 130; `shoal leave` from another terminal ends with 0. A node that is
    killed goes on where it was with the same --data-dir. `shoal doctor MANIFEST` says whether this machine can do it.
    """
    logs.configure(log_format=options.log_format, level=options.log_level, console=None)  # a link may take its time
    config = config_of(options)
    with progress_display(log_format=options.log_format, log_level=options.log_level) as show_now:
        if options.log_format == "json":
            logs.context.peer = Identity.load_or_create(options.data_dir / NODE_KEY_NAME).peer_id
        progress = RunProgress(show_now)
        outcome = run_to_end(config, progress)
        progress.end(outcome)
    raise typer.Exit(EXIT_CODES[outcome])


def run_to_end(config: NodeConfig, on_progress: Callable[[Progress], None]) -> Outcome:
    """Run the node. Raises ShoalError, or an ExceptionGroup of what its tasks raised."""
    with importing():
        import trio

        from shoal.node.node import run_node

    share_arenas()
    allow_files()
    gc.freeze()  # modules stay: a collection in the midst of a reduction need not look at all that is in them
    return trio.run(partial(run_node, config, on_progress=on_progress))


def config_of(options: RunOptions) -> NodeConfig:
    """The checked configuration of one run. Raises ConfigError for the first option that cannot be used."""
    from shoal.node.sapo.policies import installed_policies
    from shoal.node.workload import installed_workloads

    _check(options)
    check_installed(tensorboard=options.tensorboard is not None, wandb=options.wandb is not None)
    manifest, join = _swarm_of(options, entry_points=(*installed_workloads(), *installed_policies(), OWN_LOOP))
    check_rollout_options(options, manifest)
    if manifest.workload.name == OWN_LOOP:
        _check_own_loop(manifest, options)
    if manifest.rollouts is not None:
        _check_agent(options)
    return NodeConfig(
        manifest=manifest,
        data_dir=options.data_dir,
        join=join,
        listen=tuple(options.listen),
        lane_listen=parse_host_port(options.lane_listen, "--lane-listen"),
        device=options.device,
        threads=options.threads,
        accumulate=options.accumulate,
        processes=options.processes,
        data=options.data,
        rounds=options.rounds,
        checkpoint_every=options.checkpoint_every,
        checkpoint_keep=options.checkpoint_keep,
        loop_patience_s=options.loop_patience or None,
        take_over=options.take_over,
        rollouts=options.rollouts,
        local_groups=options.local_groups,
        external_groups=options.external_groups,
        group_size=options.group_size,
        rollback=options.rollback,
        authority_amendments=options.authority_amendments,
        forget_promises=options.forget_promises,
        max_upload=_rate(options.max_upload, "--max-upload"),
        max_download=_rate(options.max_download, "--max-download"),
        shared_memory=options.shared_memory,
        mdns=options.mdns,
        rendezvous=options.rendezvous,
        hivemind=tuple(options.hivemind),
        relay=options.relay,
        port_mapping=options.port_mapping,
        dashboard=_page(options.dashboard),
        tensorboard=options.tensorboard,
        wandb=options.wandb,
        test_mode=options.test_mode,
        holds=tuple(Hold.parse(text) for text in options.hold),
    )


def _check_processes(options: RunOptions) -> None:
    if not 1 <= options.processes <= PROCESSES_LIMIT:
        raise ConfigError(f"--processes: {options.processes} is not in 1..{PROCESSES_LIMIT}; 1 starts one trainer")
    if options.processes == 1:
        return
    if sys.platform != "linux":
        raise ConfigError(f"--processes {options.processes}: several processes need Linux; leave it out")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"--processes {options.processes}: each has a device of its own; "
            f"give --device cuda, cpu or auto, not {options.device}"
        )


def _swarm_of(options: RunOptions, *, entry_points: tuple[str, ...]) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest, from its file or by a link, and the addresses to join."""
    text, allowed = str(options.manifest), options.allow_workload
    if text == FROM_STDIN:
        text = read_link(sys.stdin)
    if is_link(text):
        return follow_link(
            text, data_dir=options.data_dir, join=options.join, entry_points=entry_points, allowed=allowed
        )
    manifest = load_manifest(options.manifest)
    check_workload_allowed(
        manifest.workload,
        entry_points=entry_points,
        allowed=allowed,
        founded=partial(founded_here, manifest, options.data_dir),
    )
    return manifest, tuple(options.join)


def _check_own_loop(manifest: Manifest, options: RunOptions) -> None:
    if manifest.workload.options:
        raise ConfigError(f"[workload.options] in {options.manifest}: the workload {OWN_LOOP} has none; remove them")
    if options.accumulate != 1:
        raise ConfigError(f"--accumulate: with the workload {OWN_LOOP} batches are its user's; leave it out")
    if options.processes != 1:
        raise ConfigError(f"--processes: with the workload {OWN_LOOP} processes are its user's; leave it out")
    if options.data is not None:
        raise ConfigError(f"--data: the workload {OWN_LOOP} reads no data, its user's loop does; leave --data out")


def _check_agent(options: RunOptions) -> None:
    if options.accumulate != 1:
        raise ConfigError("--accumulate: an agent that shares rollouts trains on groups, not on batches; leave it out")
    if options.processes != 1:
        raise ConfigError("--processes: an agent that shares rollouts is one process; leave it out")


def _rate(text: str | None, option: str) -> int | None:
    return None if text is None else parse_rate(text, option)


def _page(text: str) -> PageAddress | None:
    """Where the page is served; None for off. Where nobody named a port, another does if it is taken."""
    if text == "off":
        return None
    host, port = parse_host_port(text, "--dashboard")
    return PageAddress(host=host, port=port, or_free=text == DEFAULT_PAGE)


def _check(options: RunOptions) -> None:
    from shoal.swarm.address import parse_address, parse_listen_address

    for address in options.join:
        parse_address(address)
    for address in options.listen:
        parse_listen_address(address)
    if options.hivemind:
        check_hivemind_peers(options.hivemind, "--hivemind")
    if not _DEVICE.fullmatch(options.device):
        raise ConfigError(f"--device: {options.device!r} is none of auto, cpu, cuda, cuda:N, mps")
    if not 0 <= options.threads <= THREAD_LIMIT:
        raise ConfigError(f"--threads: {options.threads} is not in 0..{THREAD_LIMIT}; 0 lets the trainer choose")
    if not 1 <= options.accumulate <= ACCUMULATE_LIMIT:
        raise ConfigError(f"--accumulate: {options.accumulate} is not in 1..{ACCUMULATE_LIMIT}; 1 cuts nothing")
    _check_processes(options)
    if options.rounds is not None and not 1 <= options.rounds <= ROUND_LIMIT:
        raise ConfigError(f"--rounds: {options.rounds} is no number of rounds; leave --rounds out to go on for ever")
    if not 0 <= options.checkpoint_every <= ROUND_LIMIT:
        raise ConfigError(f"--checkpoint-every: {options.checkpoint_every} is no number of rounds; 0 makes none")
    if not 0 <= options.loop_patience < float("inf"):
        raise ConfigError(f"--loop-patience: {options.loop_patience} is no number of seconds; 0 is for ever")
    if not 1 <= options.checkpoint_keep <= CHECKPOINT_LIMIT:
        raise ConfigError(f"--checkpoint-keep: {options.checkpoint_keep} is not in 1..{CHECKPOINT_LIMIT}")
    if options.data is not None and not Path(options.data).exists():
        raise ConfigError(f"--data: there is no {options.data}; check the path")
    if options.hold and not options.test_mode:
        raise ConfigError("--hold works with --test-mode only; it is for tests")
    if len(options.hold) > HOLD_LIMIT:
        raise ConfigError(f"--hold: at most {HOLD_LIMIT}")
