"""The check of contributions, on files that a node's own parts wrote: what follows passes, and nothing else does."""

from __future__ import annotations

import os
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
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Participant, Term
from shoal.protocol.wire import canonical
from shoal.testnet.check import Witness
from shoal.testnet.check_inputs import PARTIAL, InputCheck, InputRules, check_inputs, errors_of_inputs
from tests.manifests import manifest_of
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
        return SimpleNamespace(chunks=[SimpleNamespace(encoded=chunk, values_intact=True) for chunk in chunks])

    def wrong(self, *restarts: float) -> list[int]:
        """How many values are wrong, by round. restarts: before which rounds the node was started again."""
        return [one.wrong for one in self.checks(*restarts)]

    def checks(self, *restarts: float) -> list[InputCheck]:
        """The findings, by round; made_at is the round's number in thousands of seconds."""
        for path in self.folder.glob("rounds/*/input-*"):
            at = 1000.0 * int(path.parent.name.rpartition("-")[2])
            os.utime(path, (at, at))
        witness = self.witness(restarts=tuple(1000 * round - 500.0 for round in restarts))
        return check_inputs(witness, [witness], 99, self.rules)

    def witness(self, **given: Any) -> Witness:
        """The node as the check knows it."""
        return Witness(index=3, peer_id=ME, folder=self.folder, **given)


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
    assert not any(one.foreign for one in node.checks())
    assert errors_of_inputs([node.witness()], 99, node.rules) == ()


def change(folder: Path, **changes: Callable[[bytes], bytes]) -> None:
    """Have other things be kept of what a contribution was made of."""
    (path,) = folder.glob("input-*")
    body = msgspec.msgpack.decode(path.read_bytes())
    path.write_bytes(msgspec.msgpack.encode(body | {name: new(body[name]) for name, new in changes.items()}))


def one_bit(data: bytes) -> bytes:
    values = np.frombuffer(data, np.uint32).copy()
    values[5] ^= 1
    return values.tobytes()


def test_one_value_that_follows_from_nothing_is_seen(node: Node) -> None:
    node.go_through((True, False, True))
    change(node.go_through((True, True, True)), learnt=one_bit)
    assert node.wrong() == [0, 1]
    assert errors_of_inputs([node.witness()], 1, node.rules) == ()
    assert errors_of_inputs([node.witness()], 2, node.rules) == (
        "node 3: of its contribution to round 2 1 values do not follow from what it learnt and what was left",
    )


def test_what_was_not_encoded_of_the_values_is_seen(node: Node) -> None:
    def more(data: bytes) -> bytes:
        return (np.frombuffer(data, np.float32) + np.float32(1)).tobytes()

    change(node.go_through((True, True, True)), learnt=more, values=more)
    assert [(one.wrong, one.foreign) for one in node.checks()] == [(0, True)]
    assert errors_of_inputs([node.witness()], 9, node.rules) == (
        "node 3: of its contribution to round 1 the values are not those that it sent",
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
    assert all(wrong > 50 for wrong in node.wrong(1 + rules.fragments)[rules.fragments :])


def test_who_begins_anew_without_a_restart_has_lost_something(node: Node) -> None:
    for _ in range(2):
        node.go_through((False, False, False))
    node.begin()
    node.go_through((True, True, True))
    loses_nothing = node.rules.gradients  # of which nothing comes again
    assert (node.wrong()[2] == 0) == loses_nothing
    assert (node.wrong(2)[2] == 0) == (loses_nothing or node.rules.fragments == 2), "its last restart was before that"
    assert node.wrong(3) == [0, 0, 0]


def test_who_was_put_back_goes_on_from_an_older_contribution_and_nobody_else(tmp_path: Path) -> None:
    node = Node(tmp_path, *STRATEGIES["diloco-int8"])
    node.go_through((False, True, True))
    saved = node.parts._left[0].settled
    for _ in range(4):
        node.go_through((False, True, True))
    node.begin()
    node.parts._left[0].settled = saved
    node.go_through((True, True, True))
    assert node.wrong()[5] > 1000
    assert node.wrong(6) == [0] * 6


def test_who_was_put_back_and_contributes_to_a_round_again_leaves_what_was_counted_of_it(tmp_path: Path) -> None:
    """So it does before it has heard how far the others are; nobody counts that one."""
    node = Node(tmp_path, *STRATEGIES["diloco-int8"])
    first = node.go_through((True, False, True))
    node.go_through((True, True, True))
    of_both = [tmp_path / "rounds" / f"0.0-{round}" for round in (1, 2)]
    for at, folder in zip((1000.0, 2000.0), of_both, strict=True):
        (path,) = folder.glob("input-*")
        os.utime(path, (at, at))
    node.begin()
    again = node.parts.make(1, 1, 10, np.ones(GRID.numel, np.float32), base=bytes(32))
    node.trail.contribution(Term(), again)
    node.trail.made_of(Term(), again, np.ones(GRID.numel, np.float32))
    path = first / f"input-{again.encoded.root.hex()[:16]}"
    os.utime(path, (3000.0, 3000.0))
    witness = node.witness(restarts=(2500.0,))
    assert errors_of_inputs([witness], 2, node.rules) == ()
    assert len(check_inputs(witness, [witness], 2, node.rules)) == 3


def test_who_came_by_a_state_without_its_finals_takes_its_work_for_counted(tmp_path: Path) -> None:
    node = Node(tmp_path / "a", *STRATEGIES["diloco-int8"])
    folder = node.go_through((False, False, False), believed=(True, True, True))
    node.go_through((True, True, True))
    assert node.wrong()[1] > 1000
    other = tmp_path / "b" / "rounds" / folder.name
    other.mkdir(parents=True)
    for name in ("plan", "finals", "applied"):
        (folder / name).rename(other / name)
    both = [node.witness(), Witness(index=4, peer_id=OTHER, folder=tmp_path / "b")]
    assert [one.wrong for one in check_inputs(both[0], both, 99, node.rules)] == [0, 0]


@pytest.mark.parametrize(
    ("name", "missed"), [("diloco-int8", 1), ("diloco-int8", 2), ("streaming", 1), ("streaming", 3)]
)
def test_who_contributes_nothing_for_too_many_rounds_begins_anew_and_nobody_before(
    tmp_path: Path, name: str, missed: int
) -> None:
    """With all fragments: each of them, when its turn comes."""
    node = Node(tmp_path, *STRATEGIES[name])
    for _ in range(2):
        node.go_through((True, False, True))
    node.begin()
    node.round += missed
    for _ in range(node.rules.fragments):
        node.go_through((True, True, True))
    begins_anew = missed >= node.rules.staleness_rounds
    assert [wrong == 0 for wrong in node.wrong()[2:]] == [begins_anew] * node.rules.fragments


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


def test_what_a_node_left_unfinished_when_it_ended_is_no_error_and_what_it_kept_nothing_of_is(tmp_path: Path) -> None:
    node = Node(tmp_path, *STRATEGIES["diloco-int8"])
    folder = node.go_through((True, True, True))
    learnt = np.ones(GRID.numel, np.float32)
    made = node.parts.make(2, 2, 10, learnt, base=bytes(32))
    node.trail.made_of(Term(), made, learnt)
    (folder / f"input-{bytes(8).hex()}.partial").write_bytes(b"half")
    node.parts.settle(2, None)
    assert errors_of_inputs([node.witness()], 9, node.rules) == ()
    (kept,) = (path for path in folder.glob("input-*") if path.suffix != PARTIAL)
    kept.unlink()
    assert errors_of_inputs([node.witness()], 9, node.rules)[-1:] == (
        "node 3: of its contribution to round 1 nothing says what is in it",
    )
    assert errors_of_inputs([node.witness()], 0, node.rules) == ()


def test_of_large_contributions_nothing_is_kept(tmp_path: Path) -> None:
    node = Node(tmp_path, *STRATEGIES["diloco-int8"])
    made = node.parts.make(1, 1, 10, np.ones(GRID.numel, np.float32), base=bytes(32))
    node.trail.made_of(Term(), made, np.zeros(INPUT_LIMIT_VALUES + 1, np.float32))
    assert not (tmp_path / "rounds").exists()


def test_rules_are_the_manifests_and_there_are_none_where_others_work_goes_along() -> None:
    streaming = {"strategy": "streaming", "fragments": 4, "inner_steps": 20, "mixing": 0.25}
    rules = InputRules.of(manifest_of([ME], {"sync": streaming, "round": {"staleness_rounds": 5}}))
    assert rules == InputRules(error_feedback=1.0, mixing=0.25, gradients=False, staleness_rounds=5, fragments=4)
    ddp = InputRules.of(manifest_of([ME], {"sync": {"strategy": "ddp", "inner_steps": 1}}))
    assert ddp is not None
    assert (ddp.gradients, ddp.fragments) == (True, 1)
    sites = {"membership": {"sites": "together"}}
    assert InputRules.of(manifest_of([ME], sites)) is None
