"""The account of a partition: on files made by hand, that whatever is wrong is seen; and once with real nodes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shoal.collectives.commitment import bitmap, chunk_hash, merkle_root
from shoal.lab.bench.partition import (
    APART_ROUND,
    CHUNK_VALUES,
    NUMEL,
    PartitionBench,
    PartitionResult,
    measure,
    partition_scenario,
    run,
    to_document,
    to_lines,
)
from shoal.lab.bench.tally_workload import NOTES, QUANTUM, WORKLOAD_NAME, steps_made
from shoal.lab.case import tell_nothing
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workload import load_workload
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import NO_HASH, OwnedRange, Participant, Plan, Round, Term
from shoal.protocol.wire import canonical
from shoal.testnet.reports.report import BytesReport, LossReport, NodeReport, Report
from tests.testnet.links_lab import needs_namespaces

PEERS = [Identity.from_seed(bytes([i + 1]) * 32).peer_id for i in range(4)]
CHUNKS = -(-NUMEL // CHUNK_VALUES)
ROUND_S, SECONDS = 2.0, 5.0
APART_AT = 1000.0 + (APART_ROUND - 1) * ROUND_S
HEAL_AT = APART_AT + SECONDS
LAST = 9


@dataclass
class Remains:
    """What four nodes leave of nine rounds of ten steps: node 0 and 1 certify the fourth to the sixth by themselves.

    The other two contribute to the fourth in vain, make ten steps more, and have all of it in the seventh. Tests change
    what is in `steps`, how many each contribution holds, or what is noted and logged.
    """

    folder: Path
    steps: dict[tuple[int, int], float] = field(default_factory=dict)
    left_out: set[tuple[int, int, int]] = field(default_factory=set)
    made: dict[int, list[float]] = field(default_factory=dict)
    certified: dict[tuple[int, int], float] = field(default_factory=dict)
    announced: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in range(4):
            self.made[node] = []
            for number in range(1, LAST + 1):
                alone = node > 1 and number in (5, 6)
                end = 1000.0 + number * ROUND_S
                if not (alone and number == 6):
                    self.made[node] += [end - ROUND_S + 0.1 * step for step in range(1, 11)]
                if not alone:
                    self.announced[node, number] = end - 0.5
                    self.steps[node, number] = 30 if node > 1 and number == 7 else 10
                if node < 2 or number not in (4, 5, 6):
                    self.certified[node, number] = end

    def write(self) -> None:
        for node in range(4):
            root = self.folder / "nodes" / str(node)
            root.mkdir(parents=True)
            noted = sorted(self.made[node])
            (root / NOTES).write_bytes(b"".join(struct.pack("<d", at) for at in noted))
            told = [
                {"event": "contributed", "at": at, "round": r} for (n, r), at in self.announced.items() if n == node
            ]
            told += [self._certified(node, r, at) for (n, r), at in self.certified.items() if n == node]
            if node > 1:
                told.append({"event": "caught_up", "at": HEAL_AT + 1.5, "round": 6})
            told.sort(key=lambda event: event["at"])
            (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
        for number in range(1, LAST + 1):
            self._write_round(number)

    def _certified(self, node: int, number: int, at: float) -> dict[str, object]:
        count = 2 if number in (4, 5, 6) else 4
        event = {"event": "certified", "at": at, "term": "0.0", "round": number, "digest": "d", "value": "v"}
        return event | {"members": PEERS[:count], "contributors": count}

    def _write_round(self, number: int) -> None:
        there = [node for node in range(4) if (node, number) in self.certified]
        chunks = {node: self._chunks(node, number) for node in range(4) if (node, number) in self.steps}
        roots = {node: merkle_root([chunk_hash(chunk) for chunk in of_node]) for node, of_node in chunks.items()}
        plan = Plan(
            term=Term(),
            round=Round(number),
            base=NO_HASH,
            view=0,
            attempt=0,
            planner=PEERS[1],
            participants=tuple(Participant(PEERS[node], 10, 10, roots[node]) for node in there),
            owners=(OwnedRange(0, 0, CHUNKS),),
            codec="fp32",
            numel=NUMEL,
            chunk_values=CHUNK_VALUES,
        )
        bitmaps = [
            bitmap([at for at, node in enumerate(there) if (node, number, chunk) not in self.left_out], len(there))
            for chunk in range(CHUNKS)
        ]
        for node in range(4):
            folder = self.folder / "nodes" / str(node) / "rounds" / f"0.0-{number}"
            folder.mkdir(parents=True)
            if node in chunks:
                stored = {"codec": "fp32", "numel": NUMEL, "chunk_values": CHUNK_VALUES, "tokens": 10}
                stored |= {"root": roots[node], "chunks": chunks[node]}
                (folder / "contribution").write_bytes(msgspec.msgpack.encode(stored))
            if node in there:
                (folder / "plan").write_bytes(canonical(plan))
                body = {"plan": plan.hash, "bitmaps": bitmaps, "chunks": []}
                (folder / "finals").write_bytes(msgspec.msgpack.encode(body))
                (folder / "applied").touch()

    def _chunks(self, node: int, number: int) -> list[bytes]:
        values = np.full(NUMEL, self.steps[node, number] * QUANTUM, np.float32)
        values[0] = 0.0
        return [values[at : at + CHUNK_VALUES].tobytes() for at in range(0, NUMEL, CHUNK_VALUES)]

    def measured(self) -> PartitionResult:
        self.write()
        scenario = msgspec.structs.replace(partition_scenario(SECONDS, 1), rounds=LAST)
        report = Report(
            scenario=scenario,
            wall_s=30.0,
            rounds_certified=LAST,
            forks=0,
            wrong_values=0,
            digests_equal=True,
            nodes=tuple(
                NodeReport(
                    index=i, peer_id=peer, outcome="running", rounds=LAST, certified=LAST, contributed=LAST, digests={}
                )
                for i, peer in enumerate(PEERS)
            ),
            loss=LossReport(metric="", first=None, last=None, by_round=()),
            faults=(),
            rounds=(),
            bytes=BytesReport(lanes_sent=0, control_sent=0, fp32_allreduce_every_step=0),
        )
        return measure(report, self.folder, APART_AT)


def test_a_partition_that_loses_nothing_holds(tmp_path: Path) -> None:
    result = Remains(tmp_path).measured()
    assert result.problems == ()
    assert (result.majority, result.previous_lead, result.rounds_of_majority, result.rounds_of_others) == (
        (0, 1),
        1,
        2,
        0,
    )
    assert (result.steps_made, result.steps_lost, result.steps_counted_twice) == (90 + 90 + 80 + 80, 0, 0)
    assert result.steps_of_others == 2 * 20
    assert (result.one_chain_s, result.full_speed_s) == (1.5, 3.0)
    assert (result.round_before_s, result.round_after_s) == (ROUND_S, ROUND_S)
    assert [node.counted for node in result.nodes] == [(90, 90), (90, 90), (80, 80), (80, 80)]
    assert result.holds
    assert to_document(result)["holds"] is True
    assert to_lines(result)[-1] == "all is as it should be"


def test_a_step_that_no_contribution_holds_is_lost(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.steps[2, 7] = 20  # the ten of the round that was in vain do not come again
    result = remains.measured()
    assert (result.steps_lost, result.steps_counted_twice, result.holds) == (10, 0, False)
    assert to_lines(result)[-1].startswith("FAILED")


def test_a_step_that_comes_again_though_it_was_counted_is_counted_twice(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.steps[3, 8] = 20
    result = remains.measured()
    assert (result.steps_lost, result.steps_counted_twice, result.holds) == (0, 10, False)


def test_what_is_left_out_of_one_chunk_is_lost_there(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.left_out.add((0, 5, 7))
    result = remains.measured()
    assert (result.nodes[0].counted, result.steps_lost, result.holds) == ((80, 90), 10, False)


def test_values_that_are_no_whole_number_of_steps_are_told(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.steps[1, 2] = 10.5
    result = remains.measured()
    assert "round 2: node 1 contributed values that are no whole number of steps" in result.problems
    assert not result.holds


def test_two_halves_that_certify_do_not_hold(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.certified[2, 4] = APART_AT + 1.0
    result = remains.measured()
    assert (result.rounds_of_others, result.holds) == (1, False)


def test_work_is_to_go_on_in_the_other_half(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    for node in (2, 3):
        remains.made[node] = [at for at in remains.made[node] if not APART_AT <= at <= HEAL_AT]
    result = remains.measured()
    assert (result.steps_of_others, result.holds) == (0, False)


def test_it_must_be_whole_within_ten_seconds(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    for node in range(4):
        for number in (7, 8, 9):
            remains.certified[node, number] += 8.0
    result = remains.measured()
    assert (result.full_speed_s, result.holds) == (11.0, False)


def test_that_no_half_goes_on_does_not_hold(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    for node in (0, 1):
        for number in (4, 5):
            remains.certified[node, number] = HEAL_AT + 0.1 * number
    result = remains.measured()
    assert (result.majority, result.rounds_of_majority, result.holds) == ((), 0, False)


def test_a_half_that_never_comes_back_is_told(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    for number in (7, 8, 9):
        del remains.certified[3, number]
    result = remains.measured()
    assert (result.full_speed_s, result.holds) == (None, False)
    assert "a round of all four never" in to_lines(result)[2]


def test_every_step_takes_a_quantum_off_and_is_noted(tmp_path: Path) -> None:
    workload = load_workload(WORKLOAD_NAME, {"numel": 10, "step_s": 0.0}, str(tmp_path))
    model = workload.build()
    batches = workload.batches(Assignment(seed=1, round=1, member=0, members=1))
    for _ in range(3):
        loss, tokens = workload.loss(model, next(batches))
        assert (float(loss.detach()), tokens) == (0.0, 1)
    assert torch.equal(model.get_parameter("vector"), torch.full((9,), -3 * QUANTUM))
    assert len(steps_made(tmp_path)) == 3
    assert steps_made(tmp_path / "none") == []
    with pytest.raises(ConfigError, match="give it a folder with --data"):
        load_workload(WORKLOAD_NAME, {}, None)


@pytest.mark.long
@needs_namespaces
def test_real_halves_come_together_and_every_step_is_counted_once(tmp_path: Path) -> None:
    result = run(PartitionBench(seconds=15.0, seed=3, out=tmp_path), tell_nothing)
    assert result.problems == ()
    assert (result.rounds_of_others, result.steps_lost, result.steps_counted_twice) == (0, 0, 0)
    assert (result.forks, result.wrong_values, result.digests_equal) == (0, 0, True)
    assert result.one_chain_s is not None
    assert result.full_speed_s is not None
    assert min(node.rounds_counted for node in result.nodes) > APART_ROUND
    # A slow machine may take all that time to find out that there are two halves.
    assert result.previous_lead in result.majority or result.rounds_of_majority == 0
