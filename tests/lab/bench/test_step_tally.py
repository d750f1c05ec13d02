"""The account of steps, of whom a partition kept from a round: on files made by hand, whatever is wrong is seen."""

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
from shoal.collectives.grid import Grid
from shoal.lab.bench.step_tally import NodeTally, read_node, tally
from shoal.lab.bench.tally_workload import NOTES, QUANTUM, WORKLOAD_NAME, steps_made
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workload import load_workload
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import OwnedRange, Participant
from shoal.protocol.wire import canonical
from tests.round_messages import plan_with

PEERS = [Identity.from_seed(bytes([i + 1]) * 32).peer_id for i in range(4)]
NUMEL, CHUNK_VALUES, APART_ROUND = 50_000, 4096, 4
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
        plan = plan_with(
            (Participant(PEERS[node], 10, 10, roots[node]) for node in there),
            Grid(NUMEL, CHUNK_VALUES),
            round=number,
            planner=PEERS[1],
            owners=(OwnedRange(0, 0, CHUNKS),),
            codec="fp32",
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

    def tallied(self) -> tuple[list[NodeTally], list[str]]:
        self.write()
        folders = [self.folder / "nodes" / str(node) for node in range(4)]
        logs = [read_node(node, PEERS[node], folder) for node, folder in enumerate(folders)]
        problems: list[str] = []
        return [tally(log, logs, LAST, (APART_AT, HEAL_AT), problems) for log in logs], problems


def test_steps_of_who_was_apart_are_counted_once_and_those_made_alone_are_told(tmp_path: Path) -> None:
    found, problems = Remains(tmp_path).tallied()
    assert problems == []
    assert [(one.made, one.counted) for one in found] == [(90, (90, 90))] * 2 + [(80, (80, 80))] * 2
    assert [(one.lost, one.twice) for one in found] == [(0, 0)] * 4
    assert [one.alone for one in found[2:]] == [20, 20]
    assert [one.rounds_counted for one in found] == [9, 9, 6, 6]


def test_a_step_that_no_contribution_holds_is_lost(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.steps[2, 7] = 20  # the ten of the round that was in vain do not come again
    found, _ = remains.tallied()
    assert [(one.lost, one.twice) for one in found] == [(0, 0), (0, 0), (10, 0), (0, 0)]


def test_a_step_that_comes_again_though_it_was_counted_is_counted_twice(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.steps[3, 8] = 20
    found, _ = remains.tallied()
    assert [(one.lost, one.twice) for one in found] == [(0, 0), (0, 0), (0, 0), (0, 10)]


def test_what_is_left_out_of_one_chunk_is_lost_there(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.left_out.add((0, 5, 7))
    found, _ = remains.tallied()
    assert (found[0].counted, found[0].lost) == ((80, 90), 10)


def test_values_that_are_no_whole_number_of_steps_are_told(tmp_path: Path) -> None:
    remains = Remains(tmp_path)
    remains.steps[1, 2] = 10.5
    assert "round 2: node 1 contributed values that are no whole number of steps" in remains.tallied()[1]


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
