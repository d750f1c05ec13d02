"""`shoal run` with the workload own-loop: what it takes and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.cli.run import RunOptions, config_of
from shoal.node.loops.external_trainer import ExternalTrainer, trainer_of
from shoal.node.outcome import Outcome
from shoal.node.training.trainer import Trainer
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest
from tests.node.lab import manifest_of

NODE = Identity.from_seed(bytes(32))


def written(folder: Path, workload: str, options: dict[str, str | int | float | bool] | None = None) -> Path:
    path = folder / "swarm.toml"
    path.write_text(render_manifest(manifest_of([NODE.peer_id], workload, options)))
    return path


@pytest.mark.parametrize(("workload", "external", "timeout_s"), [("own-loop", True, 5), ("regression", False, 0)])
def test_the_manifest_says_whose_trainer_it_is(tmp_path: Path, workload: str, external: bool, timeout_s: int) -> None:
    config = config_of(RunOptions(manifest=written(tmp_path, workload), data_dir=tmp_path, loop_patience_s=timeout_s))
    assert config.loop_patience_s == timeout_s
    manifest = config.manifest
    chain = Chain(genesis(manifest.swarm_id, manifest.swarm.founders), manifest.swarm.authority)
    trainer = trainer_of(config, NODE, chain, abandoned=lambda: None)
    assert type(trainer) is (ExternalTrainer if external else Trainer)


def test_node_without_a_loop_says_what_attaches_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.cli.run.run_to_end", lambda config, on_progress: Outcome.LEFT)
    told = []
    for workload, patience in (("own-loop", ()), ("own-loop", ("--loop-patience", "5")), ("regression", ())):
        caplog.clear()
        path, folder = written(tmp_path, workload), tmp_path / "node"
        with caplog.at_level("INFO", "shoal.progress"):
            assert execute(["run", str(path), "--data-dir", str(folder), *patience]) == 0
        told.append([text for text in caplog.messages if "waits for" in text])
    call = f"join(model, optimizer, '{tmp_path}/swarm.toml', data_dir='{tmp_path}/node')"
    assert told == [[f"this node waits for a training loop: {call} attaches one"], [], []]


def test_what_an_own_loop_has_no_use_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[workload.options\] in .*swarm.toml: the workload own-loop has none"):
        config_of(RunOptions(manifest=written(tmp_path, "own-loop", {"batch": 3}), data_dir=tmp_path))
    with pytest.raises(ConfigError, match="--data: the workload own-loop reads no data"):
        config_of(RunOptions(manifest=written(tmp_path, "own-loop"), data_dir=tmp_path, data=str(tmp_path)))
    with pytest.raises(
        ConfigError, match=r"--loop-patience: this swarm's workload is 'regression'.*--workload own-loop"
    ):
        config_of(RunOptions(manifest=written(tmp_path, "regression"), data_dir=tmp_path, loop_patience_s=5))
    with pytest.raises(ConfigError, match="--loop-patience"):
        config_of(RunOptions(manifest=written(tmp_path, "own-loop"), data_dir=tmp_path, loop_patience_s=-1))
