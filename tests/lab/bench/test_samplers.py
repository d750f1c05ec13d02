"""What samplers give to trainers: what is refused, what follows from two windows, what counts, and one small run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.lab.bench import policy_updates
from shoal.lab.bench.policy_updates import UpdateSizes, measure_updates
from shoal.lab.bench.samplers import Followed, SamplersBench, SamplersResult, SamplersSwarm, Window, to_document
from shoal.lab.shipped import init_tables
from shoal.node.control_client import FetchedStatus
from shoal.node.reporting.events import Certified, Rollouts
from shoal.node.state.checkpoints import LAYOUT
from shoal.protocol.manifest import validate_manifest
from tests.node.checkpoint_lab import LAYOUT as SMALL
from tests.node.ledger import identity


def window(
    reward: float,
    *,
    memory_mb: float | None = None,
    update_bytes: float | None = None,
    fetched: dict[str, FetchedStatus] | None = None,
) -> Window:
    return Window(
        fetched=fetched or {},
        reward=reward,
        rounds=10,
        certified=4,
        taken=3,
        policy_bytes=200,
        update_bytes=update_bytes,
        memory_mb=memory_mb,
    )


def update(changes_bytes: int, rate: float = 1e-6) -> UpdateSizes:
    return UpdateSizes(
        rate=rate, steps=1, changed=0.02, changes_bytes=changes_bytes, finals_bytes=500, whole_bytes=1000
    )


def result(alone: float, beside: float, changes_bytes: int = 50) -> SamplersResult:
    fetched = {"changes": FetchedStatus(times=4, bytes=80)}
    of_sampler = window(beside, memory_mb=120 * 2**20 / 1e6, update_bytes=100.0, fetched=fetched)
    updates = update(900, rate=1e-3), update(changes_bytes)
    return SamplersResult(
        bench=SamplersBench(), means="a quota", updates=updates, alone=window(alone), beside=of_sampler
    )


def test_reward_is_compared_with_that_of_trainers_alone_and_each_number_stands_beside_its_target() -> None:
    found = result(10.0, 15.0)
    assert [row.met for row in found.rows] == [True, True, None, None, True]
    assert [row.measured.median for row in found.rows[2:4] if row.measured is not None] == [0.5, 0.1]
    assert [row.met for row in result(10.0, 14.9, changes_bytes=51).rows] == [False, True, None, None, False]
    assert result(0.0, 1.0).rows[0].met is None
    crowded = SamplersResult(bench=SamplersBench(), means="a quota", alone=window(10.0), beside=window(1.0))
    assert [row.met for row in crowded.rows] == [False, None, None, None, None], (
        "who followed no two rounds tells no update"
    )
    assert to_document(found) | {"reward": 15.0, "reward_trainers_alone": 10.0} == to_document(found)
    assert [to_document(found)[key] for key in ("update_bytes", "policy_bytes", "sampler_extra_bytes")] == [
        100.0,
        200,
        120 * 2**20,
    ]


async def test_what_was_done_in_the_time_counts_and_what_was_done_before_does_not(tmp_path: Path) -> None:
    swarm = SamplersSwarm(SamplersBench(trainers=1, samplers=1), 1, tmp_path)
    trainer, sampler = swarm.nodes
    trainer.folder.mkdir(parents=True, exist_ok=True)
    (trainer.folder / LAYOUT).write_bytes(msgspec.json.encode(SMALL))
    for at, reward in ((1.0, 0.5), (2.0, 0.25), (3.0, 0.5)):
        swarm.journal.add(trainer.index, Rollouts(at=at, round=1, reward=reward, external=2))
        swarm.journal.add(sampler.index, Rollouts(at=at, round=1, reward=1.0))
    for at, number in ((1.0, 1), (2.0, 2), (4.0, 4)):
        swarm.journal.add(trainer.index, Certified(at=at, round=number, digest=""))
    assert swarm.has_begun()
    assert await swarm.followed() == {}, "who does not run says nothing"
    early = {"state": FetchedStatus(times=1, bytes=900), "changes": FetchedStatus(times=1, bytes=10)}
    late = early | {"changes": FetchedStatus(times=3, bytes=40)}
    before = {1: Followed(2, 100, early), 2: Followed(2, 0, {})}
    after = {1: Followed(4, 400, late), 3: Followed(4, 0, late)}
    assert swarm.window(2.0, before, before).update_bytes is None
    assert swarm.window(2.0, before, after) == Window(
        reward=0.75,
        rounds=2,
        certified=2,
        taken=4,
        policy_bytes=2 * SMALL.numel,
        update_bytes=150.0,
        memory_mb=None,
        fetched={"changes": FetchedStatus(times=2, bytes=30)},
    )
    assert swarm.manifest.swarm.founders == [trainer.peer_id]
    assert swarm.manifest.workload.name == "char-policy"
    assert swarm.manifest.rollouts is not None
    assert swarm.manifest.rollouts.images
    assert swarm.manifest.rollouts.replays
    slow = SamplersSwarm(SamplersBench(trainers=1, lr=1e-6, inner_steps=1), 1, tmp_path / "slow").manifest
    assert slow.inner.lr == 1e-6 != swarm.manifest.inner.lr
    assert slow.sync.inner_steps == 1 != swarm.manifest.sync.inner_steps


@pytest.mark.parametrize(
    ("lr", "inner_steps", "fetched", "met"),
    [(1e-6, 1, 10, True), (1e-6, 1, 11, False), (1e-6, 0, 11, None), (1e-5, 1, 11, None)],
)
def test_what_one_small_step_changes_is_to_be_fetched_in_little(
    lr: float, inner_steps: int, fetched: int, met: bool | None
) -> None:
    beside = window(1.0, fetched={"changes": FetchedStatus(times=2, bytes=2 * fetched)})
    bench = SamplersBench(lr=lr, inner_steps=inner_steps)
    found = SamplersResult(bench=bench, means="a quota", alone=window(1.0), beside=beside)
    assert found.rows[3].met is met


def test_smaller_steps_change_fewer_values_and_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_updates, "TAUGHT_STEPS", 4)
    tables = init_tables("updates", [identity(1).peer_id], workload="char-policy")
    tables["workload"]["options"] = {"width": 16, "layers": 1, "heads": 2}
    manifest = validate_manifest(tables, source="the test")
    large, small, none = measure_updates(manifest, [(1e-3, 2), (1e-6, 1), (0.0, 1)])
    assert large.changed > 0.3 > 0.05 > small.changed > none.changed == 0
    assert large.whole_bytes / 2 < large.changes_bytes * 2
    assert 0 < small.changes_bytes < small.whole_bytes / 20
    assert none.changes_bytes == 1, "that nothing changed, of one chunk"
    assert len({(one.finals_bytes, one.whole_bytes) for one in (large, small, none)}) == 1
    assert small.finals_bytes < small.whole_bytes, "the finals are in int8"
