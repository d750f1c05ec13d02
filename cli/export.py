"""`shoal export`: the parameters of a checkpoint as plain safetensors, for any other program."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AllowWorkload
from shoal.cli.text import in_one_line
from shoal.cli.verify import CheckpointDir, ExpectedManifest, check_same_swarm, check_state, expected_manifest
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.manifest_workload import check_workload_allowed

NOTHING = "nothing is exported"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `shoal export`."""

    checkpoint: CheckpointDir
    out: Annotated[Path, Option("--out", help="The folder to write model.safetensors into.", metavar="DIR")]
    manifest: ExpectedManifest = None
    data: Annotated[str | None, Option("--data", help="What the workload reads.", metavar="PATH")] = None
    allow_workload: AllowWorkload = field(default_factory=list)
    force: Annotated[bool, Option("--force", help="Replace an existing model.safetensors.")] = False


def export(options: ExportOptions) -> None:
    """Check a checkpoint, and write its parameters under their names to model.safetensors."""
    from shoal.node.state.checkpoint_export import export_model

    expected, toml = expected_manifest(options.manifest), options.checkpoint / "swarm.toml"
    if toml.exists() and load_manifest(toml).strategy.shares_rollouts:
        _export_policy(load_manifest(toml), expected, options)
        return
    own, round, digest = check_state(options.checkpoint, expected, nothing=NOTHING)
    model = export_model(options.checkpoint, options.out, digest=digest, force=options.force)
    typer.echo(f"wrote {model}: round {round}, digest {digest[:16]}…")
    try:
        beside = _export_own_format(own, model, options)
    except ConfigError as error:
        name = in_one_line(own.workload.name)
        raise ConfigError(f"the format of {name!r} is not beside it: {error}; export again with --force then") from None
    if beside:
        typer.echo(f"wrote the format of {in_one_line(own.workload.name)!r} beside it")


def _export_policy(own: Manifest, expected: Manifest | None, options: ExportOptions) -> None:
    """The node's own policy, which nobody certified."""
    from shoal.node.sapo.policy_export import export_policy
    from shoal.node.state.checkpoint_check import BadCheckpoint
    from shoal.node.state.tensor_files import DamagedFile

    check_same_swarm(own, expected, options.checkpoint, nothing=NOTHING)
    try:
        model, round, has_format = export_policy(
            options.checkpoint, own, options.out, data=options.data, force=options.force
        )
    except DamagedFile as error:
        raise BadCheckpoint(f"{NOTHING}: {error}") from None
    typer.echo(f"wrote {model}: this node's policy after {round} rounds")
    if has_format:
        typer.echo(f"wrote the format of policy {in_one_line(own.workload.name)!r} beside it")


def _export_own_format(manifest: Manifest, model: Path, options: ExportOptions) -> bool:
    """Have the workload write its own format; False if it has none, or its code is not the user's wish here."""
    from shoal.node.state.checkpoint_export import export_by_workload
    from shoal.node.workload import installed_workloads, load_workload

    if manifest.rollouts is not None:
        from shoal.node.sapo.policy_export import export_averaged

        return export_averaged(model, manifest, data=options.data)
    try:
        check_workload_allowed(manifest.workload, entry_points=installed_workloads(), allowed=options.allow_workload)
    except ConfigError:
        return False
    workload = load_workload(manifest.workload.name, manifest.workload.options, options.data)
    return export_by_workload(workload, manifest, model)
