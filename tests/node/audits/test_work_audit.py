"""Weighing others' work: who is drawn, what is fetched and weighed, and on whom it reflects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio

from shoal.collectives.codecs import F32, U8
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.grid import Grid
from shoal.node.audits import work_audit
from shoal.node.audits.useful_work import WorkMeter
from shoal.node.audits.work_audit import WEIGHED_PREFIX, WorkAudit
from shoal.node.audits.work_process import WorkReply, WorkRequest, weigh
from shoal.node.reporting.events import Weighed
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.auditing import drawn_work
from shoal.protocol.certificate import genesis
from shoal.protocol.errors import DiskFull, NetworkError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Plan, Value, domain_hash
from tests.collectives.reduce_lab import make_plan, peer
from tests.manifests import manifest_of
from tests.small_disk import small_disk

OPTIONS = {"inputs": 4, "outputs": 2}
NUMEL = 4 * 2 + 2
ME = PeerId("me")
TRUTH_STEPS = 40


def shifted(share: Assignment) -> F32:
    """base − local after some steps of gradient descent on a share's batches, from zero."""
    workload = RegressionWorkload(**OPTIONS)
    model = workload.build()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(workload.batches(share))
    for _ in range(TRUTH_STEPS):
        optimizer.zero_grad()
        workload.loss(model, next(batches))[0].backward()
        optimizer.step()
    moved = torch.empty(NUMEL)
    FlatParameters(model).gather(moved)
    return -moved.numpy()


def test_drawn_rounds_have_their_share_and_draw_everyone() -> None:
    marks = [domain_hash("ticket", bytes([n % 256, n // 256])) for n in range(4000)]
    drawn = [drawn_work(mark, 5, 0.25) for mark in marks]
    found = [number for number in drawn if number is not None]
    assert 900 < len(found) < 1100
    assert all(150 < found.count(number) < 250 for number in range(5))
    assert all(drawn_work(mark, 5, 0.0) is None and drawn_work(mark, 0, 1.0) is None for mark in marks[:50])
    assert all(drawn_work(mark, 5, 1.0) is not None for mark in marks[:50])


@dataclass
class Bench:
    """A daemon as far as the scales look at it, on a state of zeros, in a round with two contributors."""

    folder: Path
    manifest: Manifest
    contributions: list[F32]
    useless: list[PeerId] = field(default_factory=list)
    events: list[Weighed] = field(default_factory=list)
    hidden: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        encoded = [EncodedContribution.encode(one, Grid(NUMEL, 4), "fp32") for one in self.contributions]
        self.encoded = encoded
        self.plan: Plan = make_plan(encoded, (1, 1))
        self.base: Value = genesis(self.manifest.swarm_id, [p.peer for p in self.plan.participants])
        state = SimpleNamespace(numel=NUMEL, anchor=np.zeros(NUMEL, np.float32))
        self.daemon: Any = SimpleNamespace(
            config=SimpleNamespace(manifest=self.manifest, data=None),
            identity=SimpleNamespace(peer_id=ME),
            cache=SimpleNamespace(state=lambda round: state if round == self.base.state_round else None),
            store=SimpleNamespace(folder=self.folder),
            training_client=SimpleNamespace(assignment=lambda base, peer: self.share(peer)),
            events=SimpleNamespace(write=self.events.append),
        )

    def share(self, peer: PeerId) -> Assignment:
        return Assignment(seed=1, round=1, member=self.plan.number(peer) or 0, members=2)

    async def sound(self, plan: Plan, place: int, chunks: Sequence[int]) -> Mapping[int, U8]:
        await trio.lowlevel.checkpoint()
        return {
            chunk: np.frombuffer(self.encoded[place].payload(chunk), np.uint8)
            for chunk in chunks
            if chunk not in self.hidden
        }

    def audit(self) -> WorkAudit:
        return WorkAudit(self.daemon, self.sound, self.useless.append)


def manifest(work: float = 1.0, **sync: Any) -> Manifest:
    workload = {"name": "regression", "options": OPTIONS}
    sections = {"workload": workload, "sync": {"inner_steps": TRUTH_STEPS} | sync, "audit": {"work": work}}
    return manifest_of([peer(0)], sections, admission="open")


def marked(number: int) -> bytes:
    """A ticket that draws contributor `number` of two."""
    marks = (domain_hash("ticket", bytes([n])) for n in range(64))
    return next(mark for mark in marks if drawn_work(mark, 2, 1.0) == number)


def weigh_all(bench: Bench) -> None:
    audit = bench.audit()

    async def main() -> None:
        for number in range(2):
            drawn = audit.drawn(bench.base, bench.plan, marked(number))
            assert drawn is not None
            assert drawn.peer == bench.plan.participants[number].peer
            await audit.weigh(drawn)

    trio.run(main)


async def weighed_here(wanted: WorkRequest) -> WorkReply | str:
    """What the process of its own does, in this one."""
    await trio.lowlevel.checkpoint()
    return weigh(wanted)


def test_honest_work_helps_and_turned_work_is_held_against_its_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_audit, "_ask", weighed_here)
    shares = [Assignment(seed=1, round=1, member=number, members=2) for number in range(2)]
    honest, turned = shifted(shares[0]), -shifted(shares[1])
    bench = Bench(tmp_path, manifest(), [honest, turned])
    weigh_all(bench)
    assert bench.useless == [bench.plan.participants[1].peer]
    one, other = bench.events
    zero = np.zeros(NUMEL, np.float32)
    for told, share, contribution in zip((one, other), shares, (honest, turned), strict=True):
        meter = WorkMeter(RegressionWorkload(**OPTIONS), torch.device("cpu"))
        known = meter.weigh(zero, contribution, share)
        assert (told.before, told.after) == (known.before, known.after)
        assert told.useful is known.useful
    assert one.after is not None
    assert one.before is not None
    assert one.after < one.before / 2
    assert (other.after or 0.0) > (other.before or 0.0)
    assert list(tmp_path.iterdir()) == []


def test_process_of_its_own_weighs_the_same_and_its_files_are_gone(tmp_path: Path) -> None:
    share = Assignment(seed=1, round=1, member=0, members=2)
    bench = Bench(tmp_path, manifest(), [shifted(share), shifted(share)])
    audit = bench.audit()
    drawn = audit.drawn(bench.base, bench.plan, marked(0))
    assert drawn is not None
    trio.run(audit.weigh, drawn)
    (told,) = bench.events
    meter = WorkMeter(RegressionWorkload(**OPTIONS), torch.device("cpu"))
    known = meter.weigh(np.zeros(NUMEL, np.float32), shifted(share), share)
    assert (told.before, told.after, told.useful) == (known.before, known.after, True)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_takes_no_files_to_weigh_is_a_storage_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "gone", manifest(), [np.ones(NUMEL, np.float32)] * 2)
    with pytest.raises(StorageError, match="gone"):
        weigh_all(bench)
    with small_disk(tmp_path / "disk", 8 << 10) as disk:
        (disk / "filled").write_bytes(bytes(8 << 10))
        with pytest.raises(DiskFull, match="free some space"):
            work_audit._write(disk / "anchor", np.ones(NUMEL, np.float32))


def test_contribution_that_is_not_shown_whole_is_not_weighed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, manifest(), [np.ones(NUMEL, np.float32)] * 2, hidden={2})
    with pytest.raises(NetworkError, match="does not show all"):
        weigh_all(bench)
    assert (bench.useless, bench.events) == ([], [])


@pytest.mark.parametrize(
    ("work", "sync"), [(0.0, {}), (1.0, {"strategy": "ddp"}), (1.0, {"strategy": "streaming", "fragments": 2})]
)
def test_nothing_is_weighed_unless_the_manifest_says_so_and_it_can_be(
    work: float, sync: dict[str, Any], tmp_path: Path
) -> None:
    if sync.get("strategy") == "ddp":
        sync = sync | {"inner_steps": 1}
    bench = Bench(tmp_path, manifest(work, **sync), [np.ones(NUMEL, np.float32)] * 2)
    assert all(bench.audit().drawn(bench.base, bench.plan, marked(number)) is None for number in range(2))


def test_own_work_and_a_state_that_is_gone_are_not_weighed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, manifest(), [np.ones(NUMEL, np.float32)] * 2)
    bench.daemon.identity.peer_id = bench.plan.participants[0].peer
    assert bench.audit().drawn(bench.base, bench.plan, marked(0)) is None
    assert bench.audit().drawn(bench.base, bench.plan, marked(1)) is not None
    bench.daemon.cache.state = lambda round: None
    assert bench.audit().drawn(bench.base, bench.plan, marked(1)) is None


def test_state_that_the_cache_let_go_is_weighed_from_if_it_was_the_newest_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, manifest(), [np.ones(NUMEL, np.float32)] * 2)
    audit, round = bench.audit(), bench.plan.round
    state = SimpleNamespace(numel=NUMEL, anchor=np.ones(NUMEL, np.float32), round=round, term=bench.base.term)
    bench.daemon.cache.state = {round: state}.get
    assert audit.drawn(bench.base, bench.plan, marked(1)) is None
    bench.daemon.cache.state = lambda round: None
    next_base, next_plan = (msgspec.structs.replace(one, round=one.round + 1) for one in (bench.base, bench.plan))
    assert next_base.state_round == round
    found = audit.drawn(next_base, next_plan, marked(1))
    assert found is not None
    assert found.anchor is state.anchor
    assert audit.drawn(next_base, next_plan, marked(1)) is None  # nothing is held for longer


def test_workload_that_is_not_installed_is_named_by_the_process_that_would_weigh() -> None:
    wanted = WorkRequest(
        chunk_values=4096,
        workload="nowhere",
        options={},
        data=None,
        seed=0,
        assignment=Assignment(seed=1, round=1, member=0, members=1),
        anchor="",
        contribution="",
    )
    told = trio.run(work_audit._ask, wanted)
    assert isinstance(told, str)
    assert "unknown workload 'nowhere'" in told


def test_what_a_node_did_not_live_to_weigh_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f"{WEIGHED_PREFIX}a"
    left.mkdir()
    (left / "anchor").touch()
    Bench(tmp_path, manifest(), [np.ones(NUMEL, np.float32)] * 2).audit()
    assert not left.exists()
