"""`shoal init`, which founds a swarm, and `shoal id`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

import typer

from shoal.cli.options import AUTHORITY_KEY_NAME, NODE_KEY_NAME, Strategy
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError, did_you_mean
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import (
    STALENESS_MAX,
    InnerSection,
    Manifest,
    OptimizerName,
    RoundSection,
    render_manifest,
    validate_manifest,
)
from shoal.protocol.manifest_rollouts import DEFAULT_POLICY, default_tables
from shoal.protocol.messages import MEMBER_LIMIT
from shoal.protocol.seats import longest_wait
from shoal.protocol.strategies.strategy import Strategy as StrategyRules
from shoal.protocol.strategies.table import DEFAULT_STRATEGY, strategy_named

OUTSIDE_EXPECTED = 1024
"""Peers that wait outside: of so many the work may wait for its seat, by what `init` writes, and not become too old."""

DEFAULT_INNER_STEPS = 100
DEFAULT_AGENT_ROUNDS = 8
"""Inner steps where policies are averaged: each is a round of an agent."""
TRIAL_DEADLINE_S = 20.0
"""For importing and making a class of the founder's own; one that takes longer is not judged here."""
DEFAULT_WORKLOAD = "text"
TEXT_LEARNING_RATES: Final[Mapping[str, float]] = MappingProxyType({"adamw": 0.002, "adamw8bit": 0.002, "muon": 0.004})
"""By inner optimizer: what did best in synchronous training of that workload's default model (docs/results.md)."""
DEFAULT_NAME = "shoal"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """Options of `shoal init`."""

    data_dir: DataDir = DEFAULT_DATA_DIR
    swarm_name: Annotated[str | None, Option("--swarm-name", help="A name for people. [default: shoal]")] = None
    name: Annotated[str | None, Option("--name", help="The same as --swarm-name, as it was called in 0.1.0.")] = None
    workload: Annotated[
        str, Option("--workload", help="What to train: an installed workload, or module:Class.", metavar="NAME")
    ] = DEFAULT_WORKLOAD
    strategy: Strategy = DEFAULT_STRATEGY
    optimizer: Annotated[
        OptimizerName | None, Option("--optimizer", help="Of each node's own steps. [default: adamw]")
    ] = None
    admission: Annotated[
        Literal["open", "allowlist", "invite"] | None,
        Option("--admission", help="Who may join: left out, whoever has the manifest, for people who know each other."),
    ] = None
    founders: Annotated[
        tuple[str, ...],
        Option("--founder", help="Another founder, by its `shoal id`. Repeatable.", metavar="PEER"),
    ] = ()
    voters: Annotated[
        Literal["contributors", "named"] | None,
        Option("--voters", help="Who certifies rounds: who contributes, or the founders; these with --admission open."),
    ] = None
    faults: Annotated[
        Literal["crash", "lying"] | None,
        Option("--faults", help="What voters may do: stop, or, where four or more are named, lie."),
    ] = None
    seats: Annotated[
        int | None,
        Option("--seats", help="How many contribute to a round at most; who trains beside them waits for its seat."),
    ] = None
    waiting: Annotated[
        Literal["inside", "outside"] | None,
        Option("--waiting", help="Where who has no seat waits: linked with all, 64 in all, or outside, however many."),
    ] = None
    sites: Annotated[
        Literal["apart", "together"] | None,
        Option("--sites", help="Whether nodes of one site, which `shoal run --site` names, contribute together."),
    ] = None
    output: Annotated[Path, Option("-o", "--output", help="The manifest to write.", metavar="FILE")] = Path(
        "swarm.toml"
    )
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False


def init(options: InitOptions) -> None:
    """Found a swarm: make this node's keys and write a commented manifest for all its members."""
    from shoal.node.founded import remember
    from shoal.node.state.binding import check_free_for
    from shoal.node.state.store import write_output

    _refuse_to_overwrite(options)
    _check_workload(options.workload)
    fault = _fault_of(options)
    if options.swarm_name is None and options.name is not None:
        typer.echo(
            f"note: the swarm is named {options.name!r} by --name or SHOAL_NAME, which name a node; write --swarm-name "
            "or SHOAL_SWARM_NAME",
            err=True,
        )
    node = Identity.load_or_create(options.data_dir / NODE_KEY_NAME)
    authority = Identity.load_or_create(options.data_dir / AUTHORITY_KEY_NAME)
    manifest = found(options, node, authority)
    check_free_for(options.data_dir, manifest.swarm_id, founders=manifest.swarm.founders)
    voting = _voting_told(options, manifest)
    write_output(options.output, render_manifest(manifest, option_lines=_option_lines(manifest)).encode())
    kept = ":" not in options.workload or remember(manifest, node.peer_id)
    typer.echo(
        f"wrote {options.output}: swarm {manifest.swarm_id.hex()[:16]}…, founded by {node.peer_id}\n"
        f"its authority key is {options.data_dir / AUTHORITY_KEY_NAME}; back it up, it is what rebases the swarm\n"
        f"{voting}"
        f"{_tasks_told(manifest)}"
        f"next: read {options.output}, and change it now: that makes another swarm of it; then "
        f"{_next(options, kept=kept)}, and `shoal link` there says how others join"
    )
    if fault is not None:
        typer.echo(f"note: {fault}; look again with `{_doctor_command(options)}`", err=True)


def found(options: InitOptions, node: Identity, authority: Identity) -> Manifest:
    """The manifest of a new swarm that `node` founds, alone or with those that are named. Raises ConfigError."""
    from shoal.node.loops.loop_messages import OWN_LOOP
    from shoal.node.sapo.policies import installed_policies

    strategy = _strategy_of(options)
    implied = "inner_steps" in strategy.defaults({})
    averages = strategy.averages_policies and options.workload in installed_policies()
    shares = strategy.shares_rollouts or averages
    inner_steps = DEFAULT_AGENT_ROUNDS if averages else DEFAULT_INNER_STEPS
    tables: dict[str, dict[str, object]] = {
        "swarm": {
            "name": options.swarm_name or options.name or DEFAULT_NAME,
            "founders": [node.peer_id, *options.founders],
            "authority": authority.peer_id,
            "admission": options.admission or "open",
        },
        "workload": {"name": DEFAULT_POLICY if shares and options.workload == DEFAULT_WORKLOAD else options.workload},
        "sync": {"strategy": options.strategy, **({} if implied else {"inner_steps": inner_steps})},
    }
    if shares:
        for section, keys in default_tables(str(tables["workload"]["name"]), averages=averages).items():
            tables[section] = {**tables.get(section, {}), **keys}
    elif options.workload == DEFAULT_WORKLOAD:
        tables["inner"] = {"lr": TEXT_LEARNING_RATES[options.optimizer or InnerSection().optimizer]}
    if options.optimizer is not None:
        if shares or options.workload == OWN_LOOP:
            whose = "policies" if shares else "loops"
            raise ConfigError(f"--optimizer is for workloads, and {whose} have optimizers of their own; leave it out")
        tables["inner"] = {**tables.get("inner", {}), "optimizer": options.optimizer}
    if options.workload == OWN_LOOP and strategy.exchanges_gradients:
        raise ConfigError(
            f"--strategy {options.strategy}: a loop of one's own steps by itself, and this exchanges gradients; use a "
            "workload, or another strategy"
        )
    strangers_may_vote = options.admission == "open" or options.waiting == "outside"
    voters = options.voters or ("named" if strangers_may_vote and strategy.certifies else None)
    membership = {"voters": voters, "seats": options.seats, "waiting": options.waiting, "sites": options.sites}
    if any(value is not None for value in membership.values()):
        tables["membership"] = {key: value for key, value in membership.items() if value is not None}
    if options.seats:
        wait = longest_wait(OUTSIDE_EXPECTED if options.waiting == "outside" else MEMBER_LIMIT, options.seats)
        tables["round"] = {"staleness_rounds": min(max(RoundSection().staleness_rounds, wait), STALENESS_MAX)}
    if options.faults is not None:
        tables["agreement"] = {"faults": options.faults}
    return validate_manifest(tables, source="the new manifest")


def _strategy_of(options: InitOptions) -> StrategyRules:
    """Return the strategy that is asked for. Raises ConfigError."""
    try:
        return strategy_named(options.strategy)
    except ValueError as error:
        raise ConfigError(f"--strategy: {error}") from None


def _option_lines(manifest: Manifest) -> list[str]:
    """Comments that name the options of an installed workload; none for code, or where what it needs is not here."""
    from shoal.node.loops.loop_messages import OWN_LOOP
    from shoal.node.workloads.default_options import option_lines

    name = manifest.workload.name
    try:
        return [] if ":" in name or name == OWN_LOOP else option_lines(name)
    except ConfigError:
        return []


def _voting_told(options: InitOptions, manifest: Manifest) -> str:
    """Return the line about who certifies rounds, where that is not whoever contributes; else nothing."""
    named = len(manifest.voting.named)
    if not named:
        return ""
    who = "this node alone certifies" if named == 1 else f"the {named} founders certify"
    why = ""
    if options.voters is None and options.admission == "open":
        why = ", since anyone may join: where contributors vote, one machine with many keys is a majority"
    return (
        f"{who} rounds, whoever else contributes{why}; rounds wait while "
        f"{'it is down' if named == 1 else 'too few of them are up'}; --founder PEER names more\n"
    )


def _refuse_to_overwrite(options: InitOptions) -> None:
    if options.output.is_dir():
        raise ConfigError(f"{options.output} is a folder; give the name of a file with -o")
    if options.output.exists() and not options.force:
        raise ConfigError(f"{options.output} exists; choose another name with -o, or replace it with --force")
    if not options.output.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {options.output.parent}; make it first, or choose another -o")


def _check_workload(name: str) -> None:
    """Refuse a name that no workload and no policy installed here has; code of the user's own is looked at later."""
    from shoal.node.loops.loop_messages import OWN_LOOP
    from shoal.node.sapo.policies import installed_policies
    from shoal.node.workload import installed_workloads

    known = sorted({*installed_workloads(), *installed_policies(), OWN_LOOP})
    if ":" in name or name in known:
        return
    hint = did_you_mean(name, known, f"; installed are {', '.join(known)}")
    raise ConfigError(f"--workload: {name!r} is not installed here{hint}")


def _fault_of(options: InitOptions) -> str | None:
    """Return what is wrong with code of the founder's own, as far as a trial tells soon; None for an installed name.

    Raises ConfigError where importing it raises, on whatever machine.
    """
    from shoal.node.doctor import run_trial
    from shoal.node.doctor_trial import TrialRequest
    from shoal.node.workload import missing_module

    name = options.workload
    if ":" not in name:
        return None
    if (missing := missing_module(name)) is not None:
        return f"there is no module {missing!r} here; `shoal run` wants it where it starts, or installed"
    is_policy = _strategy_of(options).shares_rollouts
    trial = TrialRequest(device="cpu", workload=name, is_policy=is_policy, is_made_only=True)
    report = run_trial(trial, deadline_s=TRIAL_DEADLINE_S)
    if report.is_broken and report.error is not None:
        raise ConfigError(report.error)
    return report.error if report.torch else None  # else it was not tried: torch takes long, or is not here


def _tasks_told(manifest: Manifest) -> str:
    """Line for a founder whose tasks cannot be made with what is installed; else empty."""
    from shoal.node.sapo.gym_families import OFFERED

    tasks = () if manifest.rollouts is None else manifest.rollouts.tasks
    lacking = any(task.family in OFFERED for task in tasks) and find_spec("reasoning_gym") is None
    return "its tasks are reasoning-gym's, which is not installed: pip install 'shoal[rl]'\n" if lacking else ""


def _next(options: InitOptions, *, kept: bool) -> str:
    """Return the rest of the line of what comes next. kept: see `_next_command`."""
    from shoal.node.loops.loop_messages import OWN_LOOP, join_call

    command = f"`{_next_command(options, kept=kept)}`"
    if options.workload != OWN_LOOP:
        return command
    call = join_call(str(options.output), options.data_dir)
    return f"start your training loop with {call}, which starts the node as well; {command} starts it alone"


def _next_command(options: InitOptions, *, kept: bool) -> str:
    """Return the command to type next. kept: whether this node remembers that its user allows that workload."""
    words = ["shoal", "run", str(options.output)]
    if options.data_dir != DEFAULT_DATA_DIR:
        words += ["--data-dir", str(options.data_dir)]
    if not kept:
        words += ["--allow-workload", options.workload]
    return shlex.join(words)


def _doctor_command(options: InitOptions) -> str:
    """Return the command that tries the workload of the manifest just written."""
    words = ["shoal", "doctor", str(options.output), "--allow-workload", options.workload]
    if options.data_dir != DEFAULT_DATA_DIR:
        words += ["--data-dir", str(options.data_dir)]
    return shlex.join(words)


Protect = Annotated[bool, Option("--protect", help="Encrypt the keys of this folder with the passphrase given.")]
Rotate = Annotated[bool, Option("--rotate", help="Take a new key; to the swarm this is another node then.")]


def show_id(data_dir: DataDir = DEFAULT_DATA_DIR, protect: Protect = False, rotate: Rotate = False) -> None:
    """Print this node's PeerId; its key is made if there is none yet."""
    if protect or rotate:
        from shoal.node import keys

        if rotate:
            rotated = keys.rotate(data_dir)
            typer.echo(
                f"{rotated.before} is {rotated.after} from now on; the old key is {rotated.kept}. To the swarm this is "
                "a new node: where admission is by allowlist or by an invite for one node, have it admitted",
                err=True,
            )
        if protect:
            for path in keys.protect(data_dir):
                typer.echo(f"encrypted {path}", err=True)
    typer.echo(Identity.load_or_create(data_dir / NODE_KEY_NAME).peer_id)
