"""The check of contributions, on files that a node's own parts wrote: what follows passes, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32, final_chunk_codec
from shoal.collectives.commitment import bitmap
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.audit import INPUT_LIMIT_VALUES, AuditTrail
from shoal.node.state.contributions import Contributions, Made
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Participant, Term
from shoal.protocol.wire import canonical
from shoal.testnet.check import Witness
from shoal.testnet.check_inputs import InputRules, check_inputs, errors_of_inputs
from tests.round_messages import plan_with

GRID = Grid(10_000, 4096)
ME, OTHER = (Identity.from_seed(bytes([seed]) * 32).peer_id for seed in (1, 2))
DILOCO = InputRules(error_feedback=1.0, mixing=0.0, gradients=False, staleness_rounds=2, fragments=1)
STRATEGIES = {
    "diloco-int8": (DILOCO, "int8"),
    "diloco-fp32": (DILOCO, "fp32"),
    "streaming": (replace(DILOCO, mixing=0.5, fragments=2), "int4"),
    "sparse": (replace(DILOCO, error_feedback=0.95), "topk64-96"),
    "ddp": (replace(DILOCO, gradients=True), "int8"),
}
MANY: list[Sequence[bool] | None] = [
    *((True, True, True), (True, False, True), None, (False, False, True), (True, True, True), (False, True, False)),
    *(None, None, None, None, (True, True, True), (True, True, True)),
]
"""What is counted of each round's contribution; None where the plan has none of this node's. Four are more than may."""


@dataclass
class Node:
    """One node's rounds, made by its own parts and kept as in test mode; and, of each, what is certified."""

    folder: Path
    rules: InputRules
    codec: str
    round: int = 0
    parts: Contributions = field(init=False)

    def __post_init__(self) -> None:
        self.trail = AuditTrail(self.folder / "rounds", enabled=True)
        self.begin()

    def begin(self) -> None:
        """Begin anew, as who lost its folder."""
        self.parts = Contributions(
            Fragments(GRID, self.rules.fragments),
            self.codec,
            self.rules.staleness_rounds,
            sender=ME,
            error_feedback=self.rules.error_feedback,
            mixing=self.rules.mixing or None,
            gradients=self.rules.gradients,
        )

    def go_through(self, bits: Sequence[bool] | None, believed: Sequence[bool] | str | None = "as certified") -> Path:
        """One round, of which these chunks are certified; the folder. believed: what the node takes for certified."""
        self.round += 1
        fragment = self.parts.fragment(self.round)
        learnt = np.random.default_rng(self.round).standard_normal(fragment.numel).astype(np.float32)
        made = self.parts.make(self.round, self.round, 10, learnt, base=self.round.to_bytes(32, "little"))
        self.trail.contribution(Term(), made)
        self.trail.made_of(Term(), made, learnt)
        certified = None if bits is None else tuple(bits[chunk] for chunk in fragment.chunks)
        finals = self.certify(made, certified)
        taken = certified if isinstance(believed, str) else believed
        self.parts.settle(self.round, taken, finals)
        return self.folder / "rounds" / f"0.0-{self.round}"

    def certify(self, made: Made, certified: Sequence[bool] | None) -> Any:
        """Keep the round as all do, and return its finals: with another's values, those of a sparse one are fewer."""
        grid = made.encoded.grid
        root = bytes(32) if certified is None else made.encoded.root
        participants = [Participant(peer=ME, weight=1, tokens=1, root=root), Participant(OTHER, 1, 1, bytes(32))]
        plan = plan_with(participants, grid, round=self.round, codec=self.codec)
        chunks = []
        for chunk in range(grid.chunks):
            encoder = final_chunk_codec(self.codec, grid, chunk)
            sum_of_both = made.encoded.decoded()[slice(*grid.span(chunk))] + _other(self.round, grid.length(chunk))
            chunks.append(encoder.encode(sum_of_both) if encoder.leaves_out else np.zeros(1, np.uint8))
        bits = [bitmap([0, 1] if counted else [1], 2) for counted in certified or [False] * grid.chunks]
        folder = self.folder / "rounds" / f"0.0-{self.round}"
        body = {"plan": plan.hash, "bitmaps": bits, "chunks": [chunk.tobytes() for chunk in chunks]}
        (folder / "plan").write_bytes(canonical(plan))
        (folder / "finals").write_bytes(msgspec.msgpack.encode(body))
        (folder / "applied").write_bytes(b"")
        return SimpleNamespace(chunks=[SimpleNamespace(encoded=chunk, intact=True) for chunk in chunks])

    def wrong(self, *, struck: bool = False) -> list[int]:
        """How many values are wrong, by round."""
        witness = Witness(index=0, peer_id=ME, folder=self.folder, struck=struck)
        return [one.wrong for one in check_inputs(witness, [witness], 99, self.rules)]


def _other(round: int, numel: int) -> F32:
    """The few large values of another, which leave room in a sparse final for some of this node's and not for all."""
    values = np.zeros(numel, np.float32)
    values[np.random.default_rng([round, numel]).permutation(numel)[:64]] = 4
    return values


@pytest.fixture(params=STRATEGIES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    rules, codec = STRATEGIES[request.param]
    return Node(tmp_path, rules, codec)


def test_contributions_of_a_node_follow_from_what_it_learnt_and_what_was_counted(node: Node) -> None:
    for bits in MANY:
        node.go_through(bits)
    assert node.wrong() == [0] * len(MANY)
    assert node.wrong(struck=True) == [0] * len(MANY)


def change(folder: Path, value: Callable[[F32], F32]) -> None:
    """Have the values of a contribution be others than it was made of."""
    (path,) = folder.glob("input-*")
    body = msgspec.msgpack.decode(path.read_bytes())
    body["values"] = value(np.frombuffer(body["values"], np.float32).copy()).tobytes()
    path.write_bytes(msgspec.msgpack.encode(body))


def test_one_value_that_follows_from_nothing_is_seen(node: Node) -> None:
    node.go_through((True, False, True))
    folder = node.go_through((True, True, True))

    def one_bit(values: F32) -> F32:
        values.view(np.uint32)[5] ^= 1
        return values

    change(folder, one_bit)
    assert node.wrong() == [0, 1]
    assert node.wrong(struck=True) == [0, 1]
    witness = Witness(index=3, peer_id=ME, folder=node.folder)
    assert errors_of_inputs([witness], 1, node.rules) == ()
    assert errors_of_inputs([witness], 2, node.rules) == (
        "round 2: node 3 contributed 1 values that are neither what it learnt nor what no round had counted",
    )


@pytest.mark.parametrize("name", ["diloco-int8", "sparse", "streaming"])
@pytest.mark.parametrize("certified", [True, False])
def test_what_is_counted_twice_or_never_is_seen(tmp_path: Path, name: str, certified: bool) -> None:
    """The node believes the opposite of what the certificate says."""
    rules, codec = STRATEGIES[name]
    node = Node(tmp_path, rules, codec)
    for _ in range(rules.fragments):
        chunks = node.parts.fragment(node.round + 1).grid.chunks
        node.go_through((certified,) * 3, believed=(not certified,) * chunks)
    for _ in range(rules.fragments):
        node.go_through((True, True, True))
    assert all(wrong > 50 for wrong in node.wrong()[rules.fragments :])
    if certified:
        assert all(wrong > 50 for wrong in node.wrong(struck=True)[rules.fragments :])


def test_who_begins_anew_without_having_been_struck_has_lost_something(node: Node) -> None:
    node.go_through((False, False, False))
    node.go_through((False, False, False))
    node.begin()
    node.round = 2
    node.go_through((True, True, True))
    loses_nothing = node.rules.gradients  # of which nothing comes again
    assert (node.wrong()[2] == 0) == loses_nothing
    assert node.wrong(struck=True) == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "missed"), [("diloco-int8", 1), ("diloco-int8", 2), ("streaming", 1), ("streaming", 3)]
)
def test_who_contributes_nothing_for_too_many_rounds_begins_anew_and_nobody_before(
    tmp_path: Path, name: str, missed: int
) -> None:
    node = Node(tmp_path, *STRATEGIES[name])
    for _ in range(2):
        node.go_through((True, False, True))
    node.begin()
    node.round += missed
    node.go_through((True, True, True))
    assert (node.wrong()[2] == 0) == (missed >= node.rules.staleness_rounds)


def test_values_for_which_a_sparse_final_has_no_place_come_again(tmp_path: Path) -> None:
    rules, codec = STRATEGIES["sparse"]
    node = Node(tmp_path, rules, codec)
    folder = node.go_through((True, True, True))
    node.go_through((True, True, True))
    assert node.wrong() == [0, 0]
    body = msgspec.msgpack.decode((folder / "finals").read_bytes())
    places = (_other(1, GRID.length(n)) for n in range(GRID.chunks))
    body["chunks"] = [final_chunk_codec(codec, GRID, n).encode(values).tobytes() for n, values in enumerate(places)]
    (folder / "finals").write_bytes(msgspec.msgpack.encode(body))
    assert node.wrong()[1] > 10


def test_of_what_is_not_a_node_s_own_alone_and_of_large_ones_nothing_is_compared(tmp_path: Path) -> None:
    node = Node(tmp_path, *STRATEGIES["diloco-int8"])
    folder = node.go_through((True, True, True))
    made = node.parts.make(2, 2, 10, np.ones(GRID.numel, np.float32), base=bytes(32))
    node.trail.contribution(Term(), made)
    node.trail.made_of(Term(), replace(made, handed=(PeerId(OTHER),)), np.ones(GRID.numel, np.float32))
    assert node.wrong() == []
    node.trail.made_of(Term(), made, np.zeros(INPUT_LIMIT_VALUES + 1, np.float32))
    assert len(list(folder.parent.glob("*/input-*"))) == 2
