"""`shoal run`: one node, from the command line to its end."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import logs
from shoal.cli.arenas import share_arenas
from shoal.cli.imports import importing
from shoal.cli.joining import FROM_STDIN, follow_link, given_link
from shoal.cli.open_files import allow_files
from shoal.cli.options import NODE_KEY_NAME, AllowWorkload, ProgressOptions
from shoal.cli.render import RunProgress, progress_display
from shoal.node.control_client import start_command
from shoal.node.founded import founded_here
from shoal.node.loops.loop_messages import OWN_LOOP, join_call
from shoal.node.option import check_options, given_options
from shoal.node.options import SHARING, NodeConfig, NodeOptions
from shoal.node.outcome import Outcome, Progress
from shoal.node.state.binding import check_free_for
from shoal.protocol.errors import ConfigError, did_you_mean
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.manifest_workload import check_workload_allowed
from shoal.protocol.swarm_link import link_in

MANIFEST_NAME = "swarm.toml"

log = logging.getLogger(logs.FOR_USER)

EXIT_CODES = {Outcome.DONE: 0, Outcome.LEFT: 0, Outcome.FAILED: 1, Outcome.INTERRUPTED: 130}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(NodeOptions, ProgressOptions):
    """Options of `shoal run`: the swarm, and beside that what the node knows too."""

    manifest: Annotated[
        Path,
        typer.Argument(
            help="A manifest, which `shoal init` writes, or a link, from `shoal link`; -: a link on standard input.",
            metavar="MANIFEST",
        ),
    ]
    allow_workload: AllowWorkload = field(default_factory=list)


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
        show_now("starting")
        if (
            config.manifest.workload.name == OWN_LOOP and not config.loop_patience_s
        ):  # a loop that starts a node gives it
            log.info("%s", waiting_line(options))
        outcome = run_to_end(config, progress)
        progress.end(outcome, start_command(options.data_dir))
    raise typer.Exit(EXIT_CODES[outcome])


def waiting_line(options: RunOptions) -> str:
    """Return the line for the user of a node that a training loop has to attach to."""
    text = str(options.manifest)
    by_link = text == FROM_STDIN or link_in(text) is not None
    swarm = str(options.data_dir / MANIFEST_NAME) if by_link else text
    return f"this node waits for a training loop: {join_call(swarm, options.data_dir)} attaches one"


def run_to_end(config: NodeConfig, on_progress: Callable[[Progress], None]) -> Outcome:
    """Run the node. Raises ShoalError, or an ExceptionGroup of what its tasks raised."""
    with importing():
        import trio

        from shoal.node.training.early_trainer import early_trainer

    async def live() -> Outcome:
        async with early_trainer(config) as early:  # it imports as long as this does
            with importing():
                from shoal.node.node import run_node

                gc.freeze()  # modules stay: no collection looks at all that is in them, nor one as it goes on again
            return await run_node(config, on_progress=on_progress, early=early)

    share_arenas()
    allow_files()
    return trio.run(live)


def config_of(options: RunOptions) -> NodeConfig:
    """The checked configuration of one run. Raises ConfigError for the first option that cannot be used."""
    from shoal.node.sapo.policies import installed_policies
    from shoal.node.workload import installed_workloads

    check_options(options)
    _check_processes(options)
    if options.holds and not options.test_mode:
        raise ConfigError("--hold works with --test-mode only; it is for tests")
    manifest, join = _swarm_of(options, entry_points=(*installed_workloads(), *installed_policies(), OWN_LOOP))
    if options.site is not None and not manifest.sites_together:
        raise ConfigError(
            "--site: in this swarm every node contributes for itself; leave it out, or found a swarm with "
            "`shoal init --sites together`"
        )
    if manifest.rollouts is None:
        _check_shares_nothing(manifest, options)
    else:
        _check_agent(manifest, options)
    if manifest.workload.name == OWN_LOOP:
        _check_own_loop(manifest, options)
    elif options.loop_patience_s:
        raise ConfigError(
            f"--loop-patience: this swarm's workload is {manifest.workload.name!r}, which every node trains by itself; "
            f"leave it out, or for a loop of your own found a swarm with `shoal init --workload {OWN_LOOP}`"
        )
    return NodeConfig.of(options, manifest, join=join)


def _check_processes(options: RunOptions) -> None:
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
    allowed = options.allow_workload
    if (link := given_link(str(options.manifest))) is not None:
        return follow_link(
            link,
            data_dir=options.data_dir,
            join=options.join,
            entry_points=entry_points,
            allowed=allowed,
            locally=options.mdns,
        )
    manifest = load_manifest(options.manifest)
    check_free_for(options.data_dir, manifest.swarm_id, founders=manifest.swarm.founders)
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


def _check_shares_nothing(manifest: Manifest, options: RunOptions) -> None:
    for given in given_options(options):
        if given.panel == SHARING:
            raise ConfigError(f"{given.name}: this swarm's strategy is {manifest.sync.strategy}; leave it out")


def _check_agent(manifest: Manifest, options: RunOptions) -> None:
    from shoal.node.sapo.policies import installed_policies

    if options.engine is not None and options.rollouts != "sample":
        raise ConfigError("--engine: only a sampler can do without a policy; add --rollouts sample, or leave it out")
    if options.engine is not None and manifest.rollouts is not None and manifest.rollouts.replays:
        raise ConfigError(
            "--engine: this swarm goes through samplers' tokens again (replays = true in [rollouts]), and an engine "
            "draws by chance; without it the node samples from the certified policy itself"
        )
    policies = installed_policies()
    if manifest.workload.name not in policies:
        raise ConfigError(
            f"with a section [rollouts] [workload] names a policy, and {manifest.workload.name!r} is none"
            f"{did_you_mean(manifest.workload.name, policies)}; installed are {', '.join(policies)}"
        )
    if options.accumulate != 1:
        raise ConfigError("--accumulate: an agent that shares rollouts trains on groups, not on batches; leave it out")
    if options.processes != 1:
        raise ConfigError("--processes: an agent that shares rollouts is one process; leave it out")
