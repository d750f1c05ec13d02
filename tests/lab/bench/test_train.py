"""Training compared: the baseline against gradients computed directly, the one-process swarm against real nodes.

One run of real nodes serves the command's figures and the digests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio

from shoal.cli.init import InitOptions, found
from shoal.collectives.codecs import F32
from shoal.collectives.schedule import learning_rate
from shoal.lab.bench import train as bench_train
from shoal.lab.bench import train_swarm as bench_train_swarm
from shoal.lab.bench.train import RESULT, TrainResult, disturbed_row, load_result, merged, to_json
from shoal.lab.bench.train_command import (
    CASE,
    TABLE,
    TrainOptions,
    TrainTableOptions,
    rows_together,
    run,
)
from shoal.lab.bench.train_local import LocalSwarm, train_locally
from shoal.lab.bench.train_spec import NOBODY, Point, TrainBench
from shoal.lab.bench.train_swarm import SeedRun, read_run
from shoal.lab.bench.train_sync import JoinedWorkload, SynchronousTraining, train_synchronously
from shoal.lab.case import CaseOptions, LongCaseOptions, Numbers, tell_nothing
from shoal.lab.targets import missed
from shoal.node.state.contributions import Contributions, Made
from shoal.node.training.adamw import AdamW
from shoal.node.training.trainer_messages import Assignment, InnerSettings
from shoal.node.workload import load_workload
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import OptimizerName, load_manifest
from shoal.protocol.strategies.table import STRATEGIES
from shoal.testnet.reports.report import (
    BytesReport,
    FaultReport,
    LossReport,
    NodeReport,
    Report,
    RoundReport,
    allreduce_bytes,
    ok,
)
from shoal.testnet.swarm import run_testnet
from tests.node.forks import FORKED
from tests.waiting import until

KEYS = {
    "strategy", "nodes", "tokens", "val_loss", "sync_val_loss", "wire_bytes", "sync_wire_bytes", "blocked_fraction",
    "token_efficiency", "settings",
}  # fmt: skip
TINY = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 4}
STEP_TOKENS = 64
STEPS = 5
STALE = {"round": {"staleness_rounds": 66}}
ONE_SEAT = {"membership": {"seats": 1}, **STALE}
ROUND_TOKENS = 2 * STEPS * STEP_TOKENS


pytestmark = pytest.mark.usefixtures("one_torch_thread")


measure = partial(bench_train.measure, in_process=True, threads=1)


def tiny(**changes: Any) -> TrainBench:
    fields: dict[str, Any] = {"nodes": 2, "tokens": 3 * ROUND_TOKENS, "inner_steps": STEPS, "options": TINY}
    return TrainBench(**(fields | changes))


# -- synchronous data parallel -------------------------------------------------------------------------------


def directly(workload: TextWorkload, inner: InnerSettings, *, members: int, rounds: int, steps: int) -> torch.nn.Module:
    """The same training written down plainly: the gradient of the mean loss of all members' batches, concatenated."""
    torch.manual_seed(7)
    model = workload.build()
    optimizer = AdamW(model.parameters(), betas=inner.betas, weight_decay=inner.weight_decay)
    tokens = 0
    for number in range(1, rounds + 1):
        shares = [workload.batches(Assignment(seed=7, round=number, member=m, members=members)) for m in range(members)]
        for _ in range(steps):
            loss, count = workload.loss(model, torch.cat([next(share) for share in shares]))
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
            tokens += count
            optimizer.step(learning_rate(inner, tokens))
    return model


def test_synchronous_training_averages_the_gradients_of_all_members_batches() -> None:
    workload, inner = TextWorkload(**TINY), InnerSettings(lr=0.01, warmup_tokens=1000)  # type: ignore[arg-type]
    training = SynchronousTraining(workload, seed=7, inner=inner, members=3)
    training.train_round(STEPS)
    training.train_round(STEPS)
    expected = directly(workload, inner, members=3, rounds=2, steps=STEPS)
    assert training.tokens == 2 * STEPS * 3 * STEP_TOKENS
    for (name, mine), (_, theirs) in zip(training.model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5, msg=name)  # sums in another order; a step is 1e-2
    torch.manual_seed(7)
    moved = [
        (a - b).detach().abs().max() for a, b in zip(expected.parameters(), workload.build().parameters(), strict=True)
    ]
    assert min(float(distance) for distance in moved) > 1e-3  # so that 1e-6 says something


class Uneven:
    """Least squares, in which member m draws m + 1 samples a step."""

    metric = "mean squared error"

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(assignment.stream_seed)
        while True:
            yield torch.randn(assignment.member + 1, 3, generator=generator)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean(), len(batch)

    def evaluate(self, model: torch.nn.Module) -> float:
        return float(self.loss(model, torch.eye(3))[0])


def test_synchronous_gradients_weigh_by_tokens() -> None:
    workload = Uneven()
    model, share = workload.build(), Assignment(seed=1, round=1, member=0, members=3)
    batch = next(JoinedWorkload(workload, 3).batches(share))
    assert [len(part) for part in batch] == [1, 2, 3]
    whole, count = workload.loss(model, torch.cat(batch))
    joined, tokens = JoinedWorkload(workload, 3).loss(model, batch)
    assert tokens == count == 6
    expected = torch.autograd.grad(whole, list(model.parameters()))
    for mine, theirs in zip(torch.autograd.grad(joined, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_synchronous_curve_counts_tokens_and_the_bytes_of_an_allreduce_at_every_step() -> None:
    bench = tiny()
    manifest = bench.manifest(1, [Identity.generate().peer_id])
    points = train_synchronously(manifest, members=2, rounds=2)
    numel = sum(value.numel() for value in TextWorkload(**TINY).build().parameters())  # type: ignore[arg-type]
    assert [point.round for point in points] == [0, 1, 2]
    assert [point.tokens for point in points] == [0, ROUND_TOKENS, 2 * ROUND_TOKENS]
    # A ring: each of n nodes sends (n − 1)/n of 4 bytes a value to scatter, and as much again to gather.
    assert points[2].wire_bytes == 2 * STEPS * 2 * (2 * 0.5 * 4 * numel)
    assert allreduce_bytes(nodes=4, steps=1, numel=100) == 4 * (2 * 3 / 4 * 100 * 4)
    assert points[0].val_loss == pytest.approx(8.0, abs=1e-4)  # bits per byte of an untrained model
    assert points[2].val_loss < points[0].val_loss


@pytest.mark.parametrize("nodes", [2, 4])
def test_synchronous_training_takes_the_same_windows_with_more_nodes_of_smaller_batches(nodes: int) -> None:
    options = TINY | {"batch": 8 // nodes}
    workload = TextWorkload(**options)  # type: ignore[arg-type]
    share = Assignment(seed=3, round=2, member=0, members=nodes)
    alone = TextWorkload(**TINY | {"batch": 8}).batches(msgspec.structs.replace(share, members=1))  # type: ignore[arg-type]
    joined = JoinedWorkload(workload, nodes).batches(share)
    for _ in range(STEPS):
        windows = {bytes(window.tolist()) for window in next(alone)}
        assert {bytes(window.tolist()) for part in next(joined) for window in part} == windows


# -- the swarm in one process --------------------------------------------------------------------------------


def test_local_swarm_counts_payloads_only() -> None:
    bench = tiny(tokens=ROUND_TOKENS, codec="fp32")
    numel = sum(value.numel() for value in TextWorkload(**TINY).build().parameters())  # type: ignore[arg-type]
    sent = train_locally(bench, 1)[-1].wire_bytes
    # Of 2 nodes each chunk is contributed by the one that does not own it, and comes back as a final.
    assert 2 * 4 * numel <= sent < 2 * 4 * numel + 200


def test_local_swarm_replaces_nodes_and_goes_on_until_all_tokens_are_certified() -> None:
    bench = tiny(nodes=4, inner_steps=1, tokens=12 * 4 * STEP_TOKENS, churn=0.25)
    assert [bench.replacements(number) for number in (1, 5, 6, 11)] == [(), (), [(0, 4)], [(1, 5)]]
    points = train_locally(bench, 1)
    gained = [b.tokens - a.tokens for a, b in pairwise(points)]
    full = 4 * STEP_TOKENS
    assert gained == [full] * 5 + [full * 3 // 4] + [full] * 4 + [full * 3 // 4] + [full] * 2
    assert points[-1].tokens >= bench.tokens > points[-2].tokens
    faults = [(fault.kind, fault.node, fault.round) for fault in bench.scenario(1).faults if fault.round <= 12]
    assert faults == [("kill", 0, 6), ("kill", 1, 11), ("join", 4, 6), ("join", 5, 11)]


def test_who_is_there_in_every_third_round_only_counts_in_those_and_follows_the_others() -> None:
    bench = tiny(nodes=4, tokens=7 * 4 * STEPS * STEP_TOKENS, part_time=0.25)
    points = train_locally(bench, 1)
    full = 4 * STEPS * STEP_TOKENS
    gained = [b.tokens - a.tokens for a, b in pairwise(points)]
    assert gained == [full, full * 3 // 4, full * 3 // 4] * 2 + [full, full * 3 // 4, full * 3 // 4]
    assert [list(bench.away(number)) for number in range(1, 8)] == [[], [3], [3], [], [3], [3], []]
    away = train_locally(dataclasses.replace(bench, part_time=0.0), 1)
    assert away[1] == points[1]
    assert away[2].val_loss != points[2].val_loss
    faults = [(fault.kind, fault.node, fault.round) for fault in bench.scenario(1).faults if fault.round <= 7]
    assert faults == [("pause", 3, 2), ("resume", 3, 4), ("pause", 3, 5), ("resume", 3, 7)]
    assert bench.rounds == 12  # 7 ÷ 5/6 are 9, and a quarter more


def test_a_node_that_is_away_misses_whole_rounds_of_all_fragments() -> None:
    bench = tiny(strategy="streaming", inner_steps=4, tokens=24 * 2 * STEP_TOKENS, part_time=0.5)
    assert bench.manifest(1, [NOBODY]).sync.fragments == 4
    faults = [(fault.kind, fault.node, fault.round) for fault in bench.scenario(1).faults if fault.round <= 18]
    assert faults == [("pause", 1, 5), ("resume", 1, 13), ("pause", 1, 17)]
    assert [list(bench.away(number)) for number in (1, 4, 5, 12, 13)] == [[], [], [1], [1], []]


@pytest.mark.parametrize("strategy", ["diloco", "gossip"])
def test_nodes_with_text_of_their_own_train_on_it_and_are_evaluated_alike(strategy: str) -> None:
    bench = tiny(strategy=strategy, tokens=2 * ROUND_TOKENS)
    skewed = dataclasses.replace(bench, skew=0.3)
    alike, first, again, other = (
        train_locally(one, seed) for one, seed in ((bench, 1), (skewed, 1), (skewed, 1), (skewed, 2))
    )
    assert first == again
    assert first[0] == alike[0]  # the same model on the same held-out text
    assert first[2].val_loss != alike[2].val_loss
    assert first[2].val_loss != other[2].val_loss
    assert first[2].val_loss < first[0].val_loss


def mean_of(learnt: list[tuple[F32, F32]]) -> F32:
    """Of what was learnt in rounds of as many tokens, one after the other, each with the anchor that it was learnt on.

    Each value of what is there weighs by the share with which it goes beyond where the anchor has come since.
    """
    mean, stood = learnt[0]
    for rounds, (values, anchor) in enumerate(learnt[1:], start=1):
        moved = stood - anchor
        beyond = 1 - np.divide(moved, mean, out=np.zeros_like(mean), where=mean * moved > 0)
        weight = rounds * np.maximum(beyond, 0)
        mean, stood = (values + weight * mean) / (1 + weight), anchor
    return mean


def test_with_fewer_seats_than_nodes_each_contributes_in_its_turn_what_it_learnt_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt, made = defaultdict[str, list[tuple[F32, F32]]](list), dict[str, Made]()
    make = Contributions.make

    def noted(
        self: Contributions, round: int, number: int, tokens: int, values: F32, *, base: bytes, anchor: F32
    ) -> Made:
        learnt[self._sender].append((values, anchor.copy()))
        made[self._sender] = make(self, round, number, tokens, values, base=base, anchor=anchor)
        return made[self._sender]

    monkeypatch.setattr(Contributions, "make", noted)
    bench = tiny(nodes=3, keys=ONE_SEAT)
    identities = [Identity.from_seed(bytes([number]) * 32) for number in range(3)]
    swarm = LocalSwarm(bench.manifest(1, [one.peer_id for one in identities]), identities)
    counted, tokens = [], [0]
    for _ in range(6):
        swarm.run_round()
        (peer,) = swarm.head.counted
        if peer not in counted:
            mean = mean_of(learnt[peer])
            np.testing.assert_allclose(made[peer].values, mean, rtol=0, atol=1e-6, err_msg="by tokens, and no sum")
            assert len(learnt[peer]) == 1 or not np.allclose(mean, np.mean([one for one, _ in learnt[peer]], axis=0))
        counted.append(peer)
        tokens.append(swarm.tokens)
    assert len(set(counted[:3])) == 3
    assert counted[3:] == counted[:3]
    assert [after - before for before, after in pairwise(tokens)] == [
        STEPS * STEP_TOKENS * rounds for rounds in (1, 2, 3, 3, 3, 3)
    ]


def test_who_waits_outside_is_not_trained_in_one_process() -> None:
    bench = tiny(keys={"membership": {"voters": "named", "seats": 2, "waiting": "outside"}, **STALE})
    with pytest.raises(ConfigError, match="--in-process"):
        train_locally(bench, 1)


# -- real nodes ----------------------------------------------------------------------------------------------


def test_train_gives_every_figure_and_real_nodes_certify_what_the_local_swarm_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_train_swarm, "run_testnet", partial(run_testnet, runtime=FORKED))
    options = [f"{key}={value}" for key, value in TINY.items()]
    asked = TrainOptions(
        nodes=2, tokens=3 * ROUND_TOKENS, inner_steps=STEPS, options=options, settings=["sync.balance=false"],
        out=tmp_path, threads=1,
    )  # fmt: skip
    CASE(asked, LongCaseOptions(as_json=True))
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() >= KEYS
    assert (printed["strategy"], printed["nodes"], printed["tokens"]) == ("diloco", 2, 3 * ROUND_TOKENS)
    assert printed["rate_ratio"] > 0

    folder = tmp_path / "seed-1"
    report = json.loads((folder / "report.json").read_text())
    identities = [Identity.load_or_create(folder / "nodes" / str(index) / "node.key") for index in range(2)]
    swarm = LocalSwarm(load_manifest(folder / "swarm.toml"), identities)
    for number in range(1, 4):
        swarm.run_round()
        assert swarm.header is not None
        assert {node["digests"][str(number)] for node in report["nodes"]} == {swarm.header.digest.hex()}
        assert printed["seeds"][0]["curve"][number]["val_loss"] == swarm.evaluate()
    evaluated = [point["val_loss"] for point in printed["seeds"][0]["curve"]]
    assert evaluated[-1] == swarm.evaluate()
    assert printed["val_loss"] == pytest.approx(fmean(evaluated[1:]), abs=1e-12)
    assert swarm.wire_bytes < printed["wire_bytes"]  # frames and control come on top
    assert not any(run["in_process"] for run in printed["seeds"])
    assert printed["commands"] == [asked.command]

    sync = printed["seeds"][0]["sync_curve"]
    assert [point["tokens"] for point in sync] == [number * ROUND_TOKENS for number in range(5)]  # 5 % more: one more
    assert printed["sync_wire_bytes"] == report["bytes"]["fp32_allreduce_every_step"]
    assert printed["token_efficiency"] == printed["efficiency"]["median"]
    assert load_result(tmp_path / RESULT).seeds[0].seed == 1


STEADY = {"balance": False}
ONE_STEP = {"inner_steps": 1}
STREAMED = {"round": {"chunk_values": 4096}, "sync": {"fragments": 2, "overlap_steps": 1, "late_steps": 0, **STEADY}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "codec", "keys"),
    [
        ("streaming", "int8", STREAMED),
        ("sparse", None, {"sync": STEADY}),
        ("ddp", "int8", {"sync": ONE_STEP}),
    ],
)
def test_real_nodes_certify_what_the_local_swarm_computes_under_every_strategy(
    strategy: str, codec: str | None, keys: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    bench = tiny(strategy=strategy, codec=codec, keys=keys, inner_steps=4, options=TINY | {"width": 32}, tokens=1)
    bench = dataclasses.replace(bench, tokens=3 * bench.round_tokens)
    report = trio.run(partial(run_testnet, bench.scenario(1), tmp_path, runtime=FORKED))
    assert ok(report)
    identities = [Identity.load_or_create(tmp_path / "nodes" / str(index) / "node.key") for index in range(2)]
    swarm = LocalSwarm(load_manifest(tmp_path / "swarm.toml"), identities)
    for number in range(1, bench.rounds + 1):
        swarm.run_round()
        assert swarm.header is not None
        assert {node.digests[str(number)] for node in report.nodes} == {swarm.header.digest.hex()}
    assert swarm.state.tokens >= bench.tokens  # though each fragment of a stream had to have its first round


def test_nodes_without_records_train_on_a_text_of_ones_own_and_are_compared(
    tmp_path: Path,
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text("a shoal of fish swims as one. " * 300)
    options = TINY | {"width": 32}
    bench = tiny(strategy="streaming", keys=STREAMED, inner_steps=4, options=options, text=text, unrecorded=True)
    found = bench_train.measure(bench, (1,), tmp_path / "out", threads=1)
    (run,) = found.seeds
    assert (found.sound, run.in_process, found.settings.text) == (True, False, "text")
    assert run.ended_with(bench.tokens)
    assert run.curve[0] == run.sync_curve[0]
    assert run.curve[0].val_loss == pytest.approx(8.0, abs=1e-3)
    assert max(run.curve[-1].val_loss, run.sync_curve[-1].val_loss) < 6.5, "it is an easy text"
    assert not list((tmp_path / "out").glob("seed-1/nodes/*/rounds"))
    assert bench_train.measure(bench, (1,), tmp_path / "out", threads=1).seeds == (run,)
    with pytest.raises(ConfigError, match="--text"):
        measure(tiny(), (1,), tmp_path, baseline=found)


def log_of(folder: Path, index: int, lives: Sequence[Sequence[dict[str, Any]]]) -> None:
    path = folder / "nodes" / str(index) / "events.jsonl"
    path.parent.mkdir(parents=True)
    events = [event for life in lives for event in ({"at": 0.0, "event": "started"}, *life)]
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"at": 1, "eve')


def certified(round: int, at: float, lanes: int, control: int) -> dict[str, Any]:
    numbers = {"round": round, "digest": "d", "tokens": ROUND_TOKENS, "lanes_sent": lanes, "control_sent": control}
    return {"at": at, "event": "certified", **numbers}


def contributed(seconds: float) -> dict[str, Any]:
    return {"at": 0.0, "event": "contributed", "round": 1, "tokens": STEPS * STEP_TOKENS, "seconds": seconds}


def report_of(bench: TrainBench, losses: Sequence[float | None]) -> Report:
    rounds = range(1, len(losses) + 1)
    return Report(
        scenario=bench.scenario(1),
        wall_s=1.0,
        rounds_certified=len(losses),
        forks=0,
        wrong_values=0,
        digests_equal=True,
        nodes=tuple(
            NodeReport(index=i, peer_id="", outcome="running", rounds=0, certified=0, contributed=0, digests={})
            for i in range(2)
        ),
        loss=LossReport(metric="bits per byte", first=8.0, last=losses[-1], by_round=tuple(losses)),
        faults=(),
        rounds=tuple(
            RoundReport(
                round=number, members=2, contributors=2, coverage=1.0, tokens=ROUND_TOKENS, reduce_s=0.0, total_s=0.0
            )
            for number in rounds
        ),
        bytes=BytesReport(lanes_sent=0, control_sent=0, fp32_allreduce_every_step=0),
    )


def test_read_run_adds_up_bytes_over_lives_and_ends_with_the_tokens_wanted(tmp_path: Path) -> None:
    log_of(tmp_path, 0, [[contributed(1.0), certified(1, 10.0, 100, 10), certified(2, 12.0, 200, 20)]])
    log_of(tmp_path, 1, [[contributed(2.0), certified(1, 10.5, 7, 0)], [contributed(2.0), certified(3, 14.0, 5, 1)]])
    bench = tiny(tokens=2 * ROUND_TOKENS)
    run = read_run(bench, 1, report_of(bench, [6.0, 5.0, 4.0]), tmp_path)
    assert [(p.round, p.tokens, p.wire_bytes, p.val_loss) for p in run.curve] == [
        (0, 0, 0, 8.0),
        (1, ROUND_TOKENS, 117, 6.0),
        (2, 2 * ROUND_TOKENS, 227, 5.0),
    ]
    assert run.tokens_per_s == 2 * ROUND_TOKENS / 4.0
    # The sum of the nodes' speeds is STEPS * STEP_TOKENS * (1 + 1/2).
    assert run.rate_ratio == pytest.approx(2 * 2 / 4 / 1.5)
    churned = read_run(dataclasses.replace(bench, churn=0.25), 1, report_of(bench, [6.0, 5.0, 4.0]), tmp_path)
    assert (churned.curve, churned.rate_ratio) == (run.curve, None)


def stepped(round: int, at: float, lanes: int) -> dict[str, Any]:
    return certified(round, at, lanes, 0) | {"event": "stepped", "tokens": STEPS * STEP_TOKENS}


def test_where_nothing_is_certified_steps_are_what_speed_and_bytes_are_read_off(tmp_path: Path) -> None:
    bench = tiny(tokens=2 * ROUND_TOKENS, strategy="gossip")
    log_of(tmp_path, 0, [[stepped(1, 10.0, 100), stepped(2, 13.0, 200)]])
    log_of(tmp_path, 1, [[stepped(1, 11.0, 7), stepped(2, 12.0, 9)]])
    run = read_run(bench, 1, report_of(bench, [6.0, 5.0]), tmp_path)
    assert [(p.tokens, p.wire_bytes) for p in run.curve] == [(0, 0), (ROUND_TOKENS, 107), (2 * ROUND_TOKENS, 209)]
    assert run.tokens_per_s == ROUND_TOKENS / 2.0


def test_read_run_ends_with_the_first_round_after_the_tokens_whose_loss_is_known(tmp_path: Path) -> None:
    log_of(tmp_path, 0, [[certified(number, 10.0 + number, number, 0) for number in range(1, 5)]])
    run = read_run(tiny(tokens=2 * ROUND_TOKENS), 1, report_of(tiny(tokens=1), [6.0, None, 4.0, 3.0]), tmp_path)
    assert [(p.round, p.tokens, p.val_loss) for p in run.curve] == [
        (0, 0, 8.0),
        (1, ROUND_TOKENS, 6.0),
        (3, 3 * ROUND_TOKENS, 4.0),
    ]


def test_read_run_does_not_take_an_earlier_loss_for_the_last_one(tmp_path: Path) -> None:
    bench = tiny(tokens=2 * ROUND_TOKENS)
    with pytest.raises(NetworkError, match="nobody evaluated the state after round 2"):
        read_run(bench, 1, report_of(bench, [6.0, None]), tmp_path)
    log_of(tmp_path, 0, [[certified(1, 10.0, 1, 1)]])
    short = read_run(bench, 1, report_of(bench, [6.0]), tmp_path)
    assert (short.sound, short.rate_ratio) == (False, None)  # one round of two: too short


LATE_FAULT = FaultReport(kind="kill", node=0, round=3, phase=None, at_s=None, delay_s=None)
"""Of a round that a run of two did not need."""
CRASHED = NodeReport(
    index=1, peer_id="", outcome="crashed", rounds=0, certified=0, contributed=0, digests={}, crashes=1
)


@pytest.mark.parametrize(
    "change",
    [
        {"forks": 1},
        {"unverified": ("round 2",)},
        {"alarms": ("node 0 logged an error",)},
        {"trouble": "not finished after 9 s"},
        {"nodes": (CRASHED,)},
        {"unaffected_absent": (1,)},
        {"faults": (msgspec.structs.replace(LATE_FAULT, round=2),)},
    ],
)
def test_run_with_which_a_testnet_would_not_pass_is_not_sound(tmp_path: Path, change: dict[str, Any]) -> None:
    bench = tiny(tokens=2 * ROUND_TOKENS)
    log_of(tmp_path, 0, [[certified(1, 10.0, 1, 1), certified(2, 12.0, 1, 1)]])
    whole = msgspec.structs.replace(report_of(bench, [6.0, 5.0]), faults=(LATE_FAULT,))
    assert read_run(bench, 1, whole, tmp_path).sound
    assert not read_run(bench, 1, msgspec.structs.replace(whole, **change), tmp_path).sound


WATCH_DEADLINE_S = 120.0
BURN = "import time, sys\nwhile True:\n    sum(range(20_000))\n"


def test_slow_node_has_its_trainer_stopped_again_and_again_and_let_go_on_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    trainer = [sys.executable, "-c", BURN, bench_train_swarm.TRAINER]
    script.write_text(f"import subprocess\nsubprocess.run({trainer!r})\n")
    node = subprocess.Popen([sys.executable, str(script), str(tmp_path)], start_new_session=True)

    async def watch() -> None:
        with trio.fail_after(WATCH_DEADLINE_S):
            await until(lambda: bench_train_swarm._trainer_of(tmp_path) is not None)
            found = bench_train_swarm._trainer_of(tmp_path)
            assert found is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench_train_swarm._slow_down, tmp_path, 4.0)
                for _ in range(3):
                    await until(lambda: found.status() == "stopped")
                    await until(lambda: found.status() != "stopped")
                await until(lambda: found.status() == "stopped")
                nursery.cancel_scope.cancel()
            assert found.status() != "stopped"  # it is let go on

    try:
        trio.run(watch)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


@pytest.mark.virtual_time
async def test_slow_node_has_its_trainer_running_for_the_wanted_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned: list[tuple[str, float]] = []
    process = SimpleNamespace(
        suspend=lambda: turned.append(("stop", trio.current_time())),
        resume=lambda: turned.append(("go", trio.current_time())),
    )

    async def find(search: Callable[[Path], object], folder: Path) -> object:
        await trio.lowlevel.checkpoint()
        return process

    monkeypatch.setattr(trio.to_thread, "run_sync", find)
    with trio.move_on_after(10 * bench_train_swarm.SLOW_PERIOD_S - 0.01):
        await bench_train_swarm._slow_down(tmp_path, 4.0)
    assert [kind for kind, _ in turned] == ["stop", "go"] * 10 + ["go"]
    spans = [later - sooner for (_, sooner), (_, later) in pairwise(turned[:20])]
    period_s = bench_train_swarm.SLOW_PERIOD_S
    assert spans == pytest.approx([0.75 * period_s, 0.25 * period_s] * 9 + [0.75 * period_s])


# -- what is kept ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return measure(tiny(tokens=2 * ROUND_TOKENS), (1, 2, 3), tmp_path_factory.mktemp("train"))


class Interruption(KeyboardInterrupt):
    """Stands for a signal."""


def interrupt_after(points: int) -> Callable[[Sequence[Point]], None]:
    def tell(curve: Sequence[Point]) -> None:
        if len(curve) == points:
            raise Interruption

    return tell


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_resumed_synchronous_curve_is_the_uninterrupted_one_to_the_bit(optimizer: str, tmp_path: Path) -> None:
    inner = {"optimizer": optimizer, "warmup_tokens": 8 * ROUND_TOKENS}
    bench, path = tiny(keys={"inner": inner}, options=TINY | {"width": 64}), tmp_path / "checkpoint"
    manifest = bench.manifest(1, [NOBODY])
    whole = train_synchronously(manifest, members=2, rounds=4)
    for points in (2, 4):
        with pytest.raises(Interruption):
            train_synchronously(manifest, members=2, rounds=4, tell=interrupt_after(points), checkpoint=path)
    told: list[int] = []
    resumed = train_synchronously(
        manifest, members=2, rounds=4, tell=lambda curve: told.append(len(curve)), checkpoint=path
    )
    assert (resumed, told) == (whole, [5])  # one round was left
    assert train_synchronously(manifest, members=2, rounds=3, checkpoint=path) == whole
    assert whole[-1].val_loss < whole[3].val_loss  # and is no matter of chance


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damage, "it is cut short"),
        (lambda path: path.write_bytes(b""), "it is cut short"),
        (lambda path: torch.set_num_threads(2), "of other settings, or another number of threads"),
    ],
)
def test_checkpoint_that_cannot_be_gone_on_from_is_told_and_replaced(
    change: Callable[[Path], object], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, path = tiny().manifest(1, [NOBODY]), tmp_path / "checkpoint"
    train_synchronously(manifest, members=2, rounds=1, checkpoint=path)
    change(path)
    told: list[int] = []
    train_synchronously(manifest, members=2, rounds=1, tell=lambda curve: told.append(len(curve)), checkpoint=path)
    assert told == [1, 2]
    (line,) = caplog.messages
    assert why in line
    assert line.endswith(": synchronous training begins anew")


@pytest.fixture
def interrupted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """The folder of a run of two seeds that ended amid the second's synchronous curve."""
    caplog.set_level("INFO", "shoal.progress")

    def show(text: str, share: float | None = None, *, of: str = "") -> None:
        if text.startswith("synchronous, seed 2: round 2 of 3"):
            raise Interruption

    with pytest.raises(Interruption):
        measure(tiny(tokens=2 * ROUND_TOKENS), (1, 2), tmp_path, show=show, command="this one")
    return tmp_path


def test_interrupted_run_leaves_what_it_has_and_is_gone_on_from(
    interrupted: Path, result: TrainResult, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = load_result(interrupted / RESULT)
    assert left.commands == ("this one",)
    assert left.seeds[0] == result.seeds[0]
    assert left.seeds[1] == msgspec.structs.replace(result.seeds[1], sync_curve=result.seeds[1].sync_curve[:3])
    monkeypatch.setattr(bench_train, "train_locally", None)  # of both seeds it is there
    caplog.clear()
    again = measure(tiny(tokens=2 * ROUND_TOKENS), (1, 2), interrupted)
    assert again.seeds == result.seeds[:2]
    assert [line for line in caplog.messages if line.startswith("synchronous")] == [
        line for line in caplog.messages if line.startswith("synchronous, seed 2: round 3 of 3")
    ]
    assert (interrupted / RESULT).read_bytes() == to_json(again)


def test_run_of_other_settings_or_length_is_not_gone_on_from(
    interrupted: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.clear()
    longer = measure(tiny(), (1,), interrupted)
    assert longer.seeds[0].ended_with(3 * ROUND_TOKENS)
    assert "of seed 1 is another run than is asked for, and is replaced" in caplog.text
    caplog.clear()
    other = measure(tiny(keys={"round": {"chunk_values": 4096}}), (1,), interrupted)
    assert f"{interrupted / RESULT} is of other settings: it is written anew" in caplog.messages
    assert other.seeds[0].ended_with(3 * ROUND_TOKENS)
    assert other.seeds[0].sync_curve == longer.seeds[0].sync_curve  # which is the same, and was not made again
    assert not [line for line in caplog.messages if line.startswith("synchronous")]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    threaded = measure(tiny(keys={"round": {"chunk_values": 4096}}), (1,), interrupted, threads=None).seeds[0]
    assert (threaded.sync_threads, other.seeds[0].sync_threads, torch.get_num_threads()) == (2, 1, 1)
    assert "choose another --out to keep it: synchronous training begins anew" in caplog.text
    assert threaded.sync_curve[-1].val_loss == pytest.approx(other.seeds[0].sync_curve[-1].val_loss, abs=1e-4)


def test_each_evaluation_of_the_curve_is_a_line_with_its_round_its_end_and_what_is_known(
    interrupted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = [record.getMessage() for record in caplog.get_records("setup")]
    lines = [line for line in told if line.startswith("synchronous, seed 1")]
    assert [line.partition(",")[2][:16] for line in lines] == [f" seed 1: round {number}" for number in range(4)]
    assert f"round 2 of 3, {2 * ROUND_TOKENS:,} tokens, loss " in lines[2]
    assert ["to end at" in line for line in lines] == [False, True, True, True]
    ((_, _, known),) = [line.partition("token efficiency of diloco ") for line in lines[3:]]
    assert known == f"{load_result(interrupted / RESULT).seeds[0].ending.efficiency:.3f} so far"


def test_end_is_told_by_the_time_of_the_rounds_made_since_it_went_on() -> None:
    assert bench_train._end([(100.0, 7)], rounds=10) == ""
    end = datetime.datetime.fromtimestamp(100.0 + 120.0 + 180.0)
    assert bench_train._end([(100.0, 6), (220.0, 8)], rounds=10) == f", to end at {end:%H:%M}"


# -- results -------------------------------------------------------------------------------------------------


def test_measure_gives_medians_and_ratios_over_seeds(result: TrainResult) -> None:
    losses, ratios = [], []
    for one in result.seeds:
        assert [point.round for point in one.curve] == [0, 1, 2]  # too short for five: all but the untrained model
        losses.append(fmean(point.val_loss for point in one.curve[1:]))
        ratios.append(losses[-1] / fmean(point.val_loss for point in one.sync_curve[1:3]))
    assert result.val_loss == pytest.approx(sorted(losses)[1], abs=1e-12)
    spread = (result.loss_ratio.least, result.loss_ratio.median, result.loss_ratio.most)
    assert spread == pytest.approx(tuple(sorted(ratios)), abs=1e-12)
    assert result.efficiency.median == statistics.median(run.ending.efficiency for run in result.seeds)
    assert result.byte_ratio.median == result.sync_wire_bytes / result.wire_bytes
    assert (result.rate_ratio, result.tokens_per_s, result.sound) == (None, None, True)


def test_synchronous_training_alone_is_a_baseline_for_any_number_of_nodes(tmp_path: Path) -> None:
    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
    whole = measure(tiny(nodes=1, options=TINY | {"batch": 8}, synchronous=True), (1,), tmp_path / "alone")
    (run,) = whole.seeds
    assert (whole.strategy, whole.settings.device, whole.rows) == ("synchronous", "cpu", (bench_train.UNSOUND.row(0),))
    assert run.curve == run.sync_curve
    assert [point.round for point in run.curve] == [0, 1, 2, 3, 4]
    again = measure(tiny(nodes=1, options=TINY | {"batch": 8}, synchronous=True), (1,), tmp_path / "alone")
    assert again.seeds == whole.seeds, "from its checkpoint"
    beside = measure(tiny(), (1,), tmp_path / "beside", baseline=load_result(tmp_path / "alone" / bench_train.RESULT))
    assert not (tmp_path / "beside" / "sync-1.safetensors").exists()
    assert [point.val_loss for point in beside.seeds[0].sync_curve] == [point.val_loss for point in run.curve]


def test_baseline_is_taken_over_only_if_it_is_of_the_same_run(result: TrainResult, tmp_path: Path) -> None:
    marked = msgspec.structs.replace(
        result,
        seeds=tuple(
            msgspec.structs.replace(run, sync_curve=tuple(map(_worse, run.sync_curve))) for run in result.seeds
        ),
    )
    path = tmp_path / "train.json"
    path.write_bytes(to_json(marked))
    marked = load_result(path)
    bench = tiny(tokens=2 * ROUND_TOKENS, codec="fp32")
    again = measure(bench, (2,), tmp_path, baseline=marked)
    assert again.sync_val_loss == 9.0
    assert again.sync_wire_bytes == result.sync_wire_bytes
    alone = measure(
        tiny(nodes=1, tokens=2 * ROUND_TOKENS, inner_steps=2, options=TINY | {"batch": 8}), (2,), tmp_path,
        baseline=marked,
    )  # fmt: skip
    assert alone.sync_val_loss == 9.0  # the same global batch, dealt to fewer nodes in shorter rounds
    assert (alone.sync_wire_bytes, alone.seeds[0].sync_round_steps) == (0, STEPS)
    longer = measure(tiny(tokens=4 * ROUND_TOKENS), (2,), tmp_path, baseline=marked)
    assert longer.sync_val_loss < 9.0  # of four rounds, and the baseline has three
    with pytest.raises(ConfigError, match="another global batch"):
        measure(tiny(nodes=4), (2,), tmp_path, baseline=marked)
    with pytest.raises(ConfigError, match="inner settings; leave it out"):
        measure(tiny(keys={"inner": {"lr": 0.5}}), (2,), tmp_path, baseline=marked)


def _worse(point: Point) -> Point:
    return msgspec.structs.replace(point, val_loss=9.0)


def test_table_puts_seeds_together(result: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{run.seed}.json" for run in result.seeds]
    for one, path in zip(result.seeds, paths, strict=True):
        path.write_bytes(to_json(msgspec.structs.replace(result, seeds=(one,))))
    TABLE(TrainTableOptions(results=[paths[2], *paths[:2]]), CaseOptions(as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert len(found.pop("rows")) >= len(result.rows)
    assert found == json.loads(to_json(result))


def test_bytes_have_a_target_where_real_nodes_sent_them(result: TrainResult) -> None:
    real = msgspec.structs.replace(
        result,
        byte_ratio=msgspec.structs.replace(result.byte_ratio, least=5, median=14.9, most=15.1),
        seeds=tuple(msgspec.structs.replace(run, in_process=False) for run in result.seeds),
    )
    assert real.byte_row is not None
    assert (real.byte_row.target, real.byte_row.met) == (15, False)
    assert result.byte_row is None  # payloads alone


def test_results_of_several_seeds_are_one_and_those_of_other_settings_another(result: TrainResult) -> None:
    parts = [msgspec.structs.replace(result, seeds=(run,)) for run in result.seeds]
    other = msgspec.structs.replace(parts[0], settings=msgspec.structs.replace(result.settings, churn=0.25))
    assert merged([parts[1], other, parts[2], parts[0]]) == [result, other]
    with pytest.raises(ConfigError, match="a seed in common"):
        merged([parts[0], parts[1], parts[0]])
    longer = msgspec.structs.replace(parts[0], tokens=2 * parts[0].tokens)
    assert merged([parts[0], longer]) == [parts[0], longer]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes is 1 to"),
        ({"tokens": 0}, "--tokens"),
        ({"churn": 0.5}, "--churn is a share below 0.5"),
        ({"slow": 0.5}, "--slow says"),
        ({"churn": 0.25, "slow": 2.0}, "one at a time"),
        ({"skew": 0.3, "part_time": 0.25}, "one at a time"),
        ({"part_time": 1.0}, "--part-time is a share"),
        ({"part_time": 0.9}, "leaves somebody who is there"),
        ({"part_time": 0.5, "strategy": "gossip"}, "not measured with gossip"),
        ({"synchronous": True, "slow": 2.0}, "--synchronous has no nodes"),
        ({"part_time": 0.5, "nodes": 16, "tokens": 10**6}, "come and go"),
        ({"skew": 0.0}, "--alpha is 0.01 to 100"),
        ({"skew": 0.3, "text": Path("text")}, "leave --text out"),
        ({"unrecorded": True, "churn": 0.25}, "--unrecorded is for certified rounds"),
        ({"unrecorded": True, "strategy": "gossip"}, "--unrecorded is for certified rounds"),
        ({"nodes": 3, "options": {}}, "give --option batch=N"),
        ({"strategy": "magic"}, "strategy"),
        ({"options": {"size": 3}}, "no option 'size'"),
        ({"keys": {"sync": {"outer_lr": -1.0}}}, "outer_lr"),
        ({"nodes": 60, "tokens": 10**6, "churn": 0.25}, "give fewer --tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


# -- what is measured is what a user gets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [*((name, None) for name in STRATEGIES if name != "rollouts"), ("diloco", "muon"), ("streaming", "adamw8bit")],
)
def test_settings_are_those_that_init_writes(strategy: str, optimizer: OptimizerName | None) -> None:
    shipped = found(InitOptions(strategy=strategy, optimizer=optimizer), Identity.generate(), Identity.generate())
    bench = TrainOptions(strategy=strategy, optimizer=optimizer).bench
    mine = bench.manifest(0, [NOBODY])
    for section in ("sync", "inner", "round", "membership", "agreement"):
        assert getattr(mine, section) == getattr(shipped, section), section
    theirs = load_workload(shipped.workload.name, shipped.workload.options, None)
    assert load_workload(mine.workload.name, mine.workload.options, None) == theirs
    assert bench.nodes == 4
    assert bench.tokens >= 10 * bench.parameters
    assert bench.full_rounds >= 60


@pytest.mark.parametrize(("nodes", "batch"), [(1, 32), (4, 8), (8, 4), (16, 2)])
def test_every_number_of_nodes_reads_as_much_at_a_step(nodes: int, batch: int) -> None:
    bench = TrainBench(nodes=nodes)
    assert bench.workload_options == {"batch": batch}
    assert bench.step_tokens == 32 * 128


def test_the_command_of_a_result_says_its_options_and_no_paths() -> None:
    asked = TrainOptions(
        strategy="streaming", seeds=Numbers((1, 2)), data="skewed", alpha=0.5, in_process=True,
        settings=["inner.lr=0.002"], baseline=Path("other.json"), out=Path("there"),
    )  # fmt: skip
    assert asked.command == (
        "shoal bench train --strategy streaming --nodes 4 --data skewed --alpha 0.5 --seeds 1,2 --set inner.lr=0.002 "
        "--in-process"
    )
    assert TrainOptions().command == "shoal bench train --strategy diloco --nodes 4"


def curve_of(losses: Sequence[float], step: int = 1_000_000) -> tuple[Point, ...]:
    return tuple(Point(round=e, tokens=e * step, wire_bytes=e * 100, val_loss=loss) for e, loss in enumerate(losses))


SYNC_CURVE = curve_of([8.0, 6.0, 4.0, 3.0, 2.0, 1.0])


def run_of(seed: int, *losses: float, in_process: bool = False) -> SeedRun:
    return SeedRun(seed=seed, in_process=in_process, curve=curve_of(losses), sync_curve=SYNC_CURVE, sync_round_steps=5)


def row_of(result: TrainResult, *runs: SeedRun, **settings: Any) -> TrainResult:
    """One row of results, each of one run."""
    settings = {"inner_steps": 100, **settings}
    changed = msgspec.structs.replace(result.settings, **settings)
    alone = [msgspec.structs.replace(result, settings=changed, seeds=(run,), tokens=5) for run in runs]
    (row,) = merged(alone)
    return row


def test_seeds_in_one_process_count_where_they_agree_with_real_nodes(result: TrainResult) -> None:
    real, twin = run_of(1, 8.0, 2.0), run_of(1, 8.0, 2.009, in_process=True)
    other = run_of(2, 8.0, 3.0, in_process=True)
    row = row_of(result, real, twin, other)
    assert [(run.seed, run.in_process) for run in row.counted] == [(1, False), (2, True)]
    assert (row.loss_ratio.least, row.loss_ratio.most) == (2 / 6, 3 / 6)
    assert row.byte_ratio.least == row.byte_ratio.most == 1.0  # of real nodes alone
    far = row_of(result, real, run_of(1, 8.0, 2.011, in_process=True), other)
    assert [(run.seed, run.in_process) for run in far.counted] == [(1, False)]
    unknown = row_of(result, real, other)
    assert unknown.counted == (real,)


@pytest.mark.parametrize(("points", "known"), [(0, False), (1, False), (2, False), (3, True), (6, True)])
def test_efficiency_is_known_once_the_synchronous_curve_has_passed_the_loss(
    result: TrainResult, points: int, known: bool
) -> None:
    whole = run_of(1, 8.0, 8.0, 4.0, 4.0, 4.0, 1.0)  # 4.2 in the mean of five, and the curve has 6, then 4
    run = msgspec.structs.replace(whole, sync_curve=SYNC_CURVE[:points])
    row = row_of(result, run, msgspec.structs.replace(run, seed=2))
    assert (row.sync_tokens is not None, row.efficiency_row is not None) == (known, known)
    expected = whole.ending.efficiency if known else max(0, points - 1) * 1e6 / whole.ending.tokens  # at least
    assert row.efficiency.median == expected
    assert (row.sync_val_loss, row.loss_ratio is None) == ((3.2, False) if points == 6 else (None, True))
    assert row.byte_ratio.median == (whole.byte_ratio if points > 1 else 0)  # each step costs the same
    assert (row.byte_row is None) == (points <= 1)


def test_a_disturbed_row_is_held_against_the_undisturbed_one(result: TrainResult) -> None:
    good = row_of(result, run_of(1, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 2.0))
    assert good.efficiency_row is not None
    worse = row_of(result, run_of(1, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 4.0), skew=0.3)
    assert (worse.efficiency_row, worse.byte_row) == (None, None)
    assert disturbed_row(good, [good, worse]) is None
    assert disturbed_row(worse, [worse]) is None
    row = disturbed_row(worse, [worse, good])
    assert row is not None
    assert row.measured is not None
    assert row.measured.median == pytest.approx(worse.efficiency.median / good.efficiency.median)
    assert rows_together([good, worse]) == [*good.rows, *worse.rows, row]
    slower = msgspec.structs.replace(worse, efficiency=msgspec.structs.replace(good.efficiency, median=0.8399))
    undisturbed = msgspec.structs.replace(good, efficiency=msgspec.structs.replace(good.efficiency, median=1.0))
    (missed_row,) = missed(rows_together([undisturbed, slower])[-1:])
    assert missed_row.name == "token efficiency of a disturbed row"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": Numbers((1, 1))}, "different numbers"),
        ({"settings": ["lr=3"]}, "not like sync.outer_lr"),
        ({"options": ["width"]}, "must be KEY=VALUE"),
        ({"baseline": Path("nowhere.json")}, "there is no nowhere.json"),
        ({"in_process": True, "slow": 2.0}, "leave --in-process out"),
        ({"in_process": True, "unrecorded": True}, "leave --in-process out"),
        ({"alpha": 0.5}, "with --data skewed only"),
        ({"optimizer": "muon", "settings": ["inner.optimizer=adamw"]}, "say the same"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(TrainOptions(**options), tell_nothing)
