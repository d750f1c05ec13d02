"""`shoal evaluate`: how good a state is that the swarm certified, by its workload or by lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.options import AllowWorkload, AsJson
from shoal.cli.text import figure, in_one_line, number
from shoal.cli.verify import ExpectedManifest, check_state, expected_manifest
from shoal.node.option import Option, check_exists
from shoal.node.options import DEFAULT_DATA_DIR, Data, DataDir, Device
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.manifest_workload import check_workload_allowed

if TYPE_CHECKING:
    from shoal.node.workload import Workload
    from shoal.node.workloads.harness import Scores


def parse_task(text: str, option: str) -> Path:
    """Path of a task file. Raises ConfigError where there is none."""
    check_exists(text, option)
    return Path(text)


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
    tasks: Annotated[
        tuple[Path, ...],
        Option(
            "--task",
            help="A task file of lm-evaluation-harness, measured in place of the held-out loss. Repeatable.",
            metavar="FILE",
            parse=parse_task,
        ),
    ] = ()
    allow_workload: AllowWorkload = field(default_factory=list)
    as_json: AsJson = False


def evaluate(options: EvaluateOptions) -> None:
    """Check a state against its certificates, and measure its loss on the workload's held-out data.

    With --task a language model is measured by lm-evaluation-harness, with a task file of one's own.
    """
    from shoal.node.founded import founded_here
    from shoal.node.loops.loop_messages import OWN_LOOP
    from shoal.node.state.checkpoint_export import evaluate_by_workload
    from shoal.node.workload import ExportingWorkload, installed_workloads, load_workload
    from shoal.node.workloads.harness import check_harness

    folder = options.data_dir if options.checkpoint is None else options.checkpoint
    toml = folder / "swarm.toml"
    if toml.exists() and load_manifest(toml).rollouts is not None:
        raise ConfigError(
            f"{folder} is of a swarm that shares rollouts, whose policies have rewards and no held-out loss; "
            "`shoal status` and `shoal watch` show those, and `shoal export` writes the policy"
        )
    own, round, digest = check_state(folder, expected_manifest(options.manifest), nothing="nothing is evaluated")
    if own.workload.name == OWN_LOOP:
        raise ConfigError(
            f"{folder} is of a swarm of its users' own loops, which measure their held-out loss themselves; "
            "`shoal status` shows it, and `shoal export` writes the model"
        )
    places = (folder, folder.resolve().parent.parent, options.data_dir)  # the second is of a node's checkpoint
    check_workload_allowed(
        own.workload,
        entry_points=installed_workloads(),
        allowed=options.allow_workload,
        founded=lambda: any(founded_here(own, place) for place in places),
    )
    workload = load_workload(own.workload.name, own.workload.options, options.data)
    if options.tasks:
        if not isinstance(workload, ExportingWorkload):
            raise _no_language_model(own)
        check_harness()
        _show_scores(_scores(workload, own, folder, digest, options), round, digest, as_json=options.as_json)
        return
    loss = evaluate_by_workload(workload, own, folder, device=options.device)
    if options.as_json:
        told = {"round": round, "digest": digest, "metric": workload.metric, "loss": loss, "data": options.data}
        typer.echo(msgspec.json.encode(told))  # in which a loss that is no number is null
    else:
        held_out = "the workload's default data, as no --data is given" if options.data is None else options.data
        typer.echo(
            f"{figure(loss)} {in_one_line(workload.metric)}: round {round}, digest {digest[:16]}…, "
            f"on what is held out of {in_one_line(held_out)}"
        )


def _scores(workload: Workload, own: Manifest, folder: Path, digest: str, options: EvaluateOptions) -> Scores:
    """Figures of the harness for a state that was checked, in the format that its workload writes."""
    from shoal.node.state.checkpoint_export import export_by_workload, export_model
    from shoal.node.training.devices import pick_device
    from shoal.node.workloads.causal_lm_model import EXPORT_FOLDER
    from shoal.node.workloads.harness import evaluate_by_harness

    with TemporaryDirectory(prefix="shoal-evaluate-") as out:
        model = export_model(folder, Path(out), digest=digest)
        export_by_workload(workload, own, model)
        saved = Path(out) / EXPORT_FOLDER
        if not (saved / "config.json").exists():
            raise _no_language_model(own)
        return evaluate_by_harness(saved, options.tasks, device=str(pick_device(options.device)))


def _no_language_model(own: Manifest) -> ConfigError:
    return ConfigError(
        f"--task: workload {in_one_line(own.workload.name)!r} writes no model of transformers, as 'causal-lm' does; "
        "leave --task out for its held-out loss"
    )


def _show_scores(scores: Scores, round: int, digest: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode({"round": round, "digest": digest, "tasks": scores}))
        return
    for task, metrics in scores.items():
        told = ", ".join(f"{in_one_line(metric)} {number(value)}" for metric, value in metrics.items())
        typer.echo(f"{in_one_line(task)}: {told}")
    typer.echo(f"round {round}, digest {digest[:16]}…")
