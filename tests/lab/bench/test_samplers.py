"""What samplers give to trainers: what is refused, what follows from two windows, what counts, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab.bench.samplers import SamplersBench, SamplersResult, SamplersSwarm, Window, to_document
from shoal.node.reporting.events import Certified, Rollouts
from shoal.node.state.checkpoints import LAYOUT
from tests.node.checkpoint_lab import LAYOUT as SMALL


def window(reward: float, *, memory_mb: float | None = None, update_bytes: float | None = None) -> Window:
    return Window(
        reward=reward,
        rounds=10,
        certified=4,
        taken=3,
        policy_bytes=200,
        update_bytes=update_bytes,
        memory_mb=memory_mb,
    )


def result(alone: float, beside: float) -> SamplersResult:
    of_sampler = window(beside, memory_mb=120 * 2**20 / 1e6, update_bytes=100.0)
    return SamplersResult(bench=SamplersBench(), means="a quota", alone=window(alone), beside=of_sampler)


@pytest.mark.parametrize(
    ("option", "value"), [("--trainers", "0"), ("--samplers", "0"), ("--minutes", "0"), ("--share", "1.5")]
)
def test_what_cannot_be_measured_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "samplers", option, value]) == 2
    assert option in capsys.readouterr().err


def test_reward_is_compared_with_that_of_trainers_alone_and_each_number_stands_beside_its_target() -> None:
    found = result(10.0, 15.0)
    assert [row.met for row in found.rows] == [True, True, None]
    assert found.rows[2].measured is not None
    assert found.rows[2].measured.median == 0.5
    assert [row.met for row in result(10.0, 14.9).rows] == [False, True, None]
    assert result(0.0, 1.0).rows[0].met is None
    crowded = SamplersResult(bench=SamplersBench(), means="a quota", alone=window(10.0), beside=window(1.0))
    assert [row.met for row in crowded.rows] == [False, None, None], "who followed no two rounds has no update to tell"
    assert to_document(found) | {"reward": 15.0, "reward_trainers_alone": 10.0} == to_document(found)
    assert [to_document(found)[key] for key in ("update_bytes", "policy_bytes", "sampler_extra_bytes")] == [
        100.0,
        200,
        120 * 2**20,
    ]


def test_what_was_done_in_the_time_counts_and_what_was_done_before_does_not(tmp_path: Path) -> None:
    swarm = SamplersSwarm(SamplersBench(trainers=1, samplers=1), 1, tmp_path)
    trainer, sampler = swarm.nodes
    trainer.folder.mkdir(parents=True, exist_ok=True)
    (trainer.folder / LAYOUT).write_bytes(msgspec.json.encode(SMALL))
    for at, reward in ((1.0, 0.5), (2.0, 0.25), (3.0, 0.5)):
        swarm.journal.add(trainer.index, Rollouts(at=at, round=1, reward=reward, external=2))
        swarm.journal.add(sampler.index, Rollouts(at=at, round=1, reward=1.0))
    for at, number, received in ((1.0, 1, 7), (2.0, 2, 100), (4.0, 4, 400)):
        swarm.journal.add(trainer.index, Certified(at=at, round=number, digest=""))
        swarm.journal.add(sampler.index, Certified(at=at, round=number, digest="", lanes_received=received))
    assert swarm.has_begun()
    assert swarm.window(2.0) == Window(
        reward=0.75,
        rounds=2,
        certified=2,
        taken=4,
        policy_bytes=2 * SMALL.numel,
        update_bytes=150.0,
        memory_mb=None,
    )
    assert swarm.manifest.swarm.founders == [trainer.peer_id]
    assert swarm.manifest.workload.name == "char-policy"


@pytest.mark.long
def test_trainers_take_what_samplers_make(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trainers", "1", "--samplers", "1", "--minutes", "0.4", "--share", "0.5", "--json"]
    assert execute(["bench", "samplers", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["alone"]["taken"] == 0
    assert found["beside"]["taken"] > 0
    assert found["reward"] > 0
    assert 0 < found["update_bytes"] <= 2 * found["policy_bytes"]
