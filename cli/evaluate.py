"""`shoal evaluate`: the held-out loss of a state that the swarm certified."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AllowWorkload, AsJson
from shoal.cli.text import in_one_line, number
from shoal.cli.verify import ExpectedManifest, check_state, expected_manifest
from shoal.node.options import DEFAULT_DATA_DIR, Data, DataDir, Device
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import load_manifest
from shoal.protocol.manifest_workload import check_workload_allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Options of `shoal evaluate`."""

    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A folder of a node's checkpoints/; without, the newest state of --data-dir.", metavar="CHECKPOINT_DIR"
        ),
    ] = None
    data_dir: DataDir = DEFAULT_DATA_DIR
    manifest: ExpectedManifest = None
    data: Data = None
    device: Device = "auto"
    allow_workload: AllowWorkload = field(default_factory=list)
    as_json: AsJson = False


def evaluate(options: EvaluateOptions) -> None:
    """Check a state against its certificates, and measure its loss on the workload's held-out data."""
    from shoal.node.state.checkpoint_export import evaluate_by_workload
    from shoal.node.workload import installed_workloads, load_workload

    folder = options.data_dir if options.checkpoint is None else options.checkpoint
    toml = folder / "swarm.toml"
    if toml.exists() and load_manifest(toml).rollouts is not None:
        raise ConfigError(
            f"{folder} is of a swarm that shares rollouts, whose policies have rewards and no held-out loss; "
            "`shoal status` and `shoal watch` show those, and `shoal export` writes the policy"
        )
    own, round, digest = check_state(folder, expected_manifest(options.manifest), nothing="nothing is evaluated")
    check_workload_allowed(own.workload, entry_points=installed_workloads(), allowed=options.allow_workload)
    workload = load_workload(own.workload.name, own.workload.options, options.data)
    loss = evaluate_by_workload(workload, own, folder, device=options.device)
    if options.as_json:
        typer.echo(json.dumps({"round": round, "digest": digest, "metric": workload.metric, "loss": loss}))
    else:
        typer.echo(f"{number(loss)} {in_one_line(workload.metric)}: round {round}, digest {digest[:16]}…")
