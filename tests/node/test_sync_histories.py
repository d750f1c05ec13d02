"""Histories of DiLoCo and Streaming DiLoCo, with overlap, against a simulation of a few lines that shares no code.

Accounts, contributions, plans, finals and states are the real ones; three nodes move towards targets of their own. On
the way one joins, one misses a round wholly and one in a single chunk, one is too slow for a round, one is killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.state import CertifiedState, frozen, header_of
from shoal.node.state.contributions import Contributions
from shoal.node.training.accounts import Accounts
from shoal.node.training.trainer_messages import SyncSettings
from shoal.protocol.messages import Participant, Term
from tests.node.ledger import identity
from tests.node.one_vector import OneVector
from tests.round_messages import plan_with

F64 = npt.NDArray[np.float64]

NUMEL, CHUNK = 23, 4
"""Six chunks, the last one short: in four fragments of 8, 7, 4 and 4 values."""
ROUND_STEPS = 5
ROUNDS = 11
TOKENS = 12
LR, MOMENTUM = 0.7, 0.9
JOINS = {2: 4}
EXCLUDED = {(6, 1): {0, 1, 2, 3, 4, 5}, (5, 0): {5}}
"""By round and node, the chunks of the whole grid that its contribution is not in."""
SLOW = {(7, 2)}
"""A node that is certified without before it has contributed."""
KILLED = {(9, 0)}
"""A node whose trainer dies at the beginning of a round, with no snapshot."""


def target(node: int, step: int) -> F32:
    return np.random.default_rng((node, step)).standard_normal(NUMEL).astype(np.float32)


START: F32 = np.random.default_rng(7).standard_normal(NUMEL).astype(np.float32)


@dataclass
class History:
    """After each round: anchor, momentum, and per node what it has."""

    anchors: list[F64] = field(default_factory=list)
    momenta: list[F64] = field(default_factory=list)
    locals: list[dict[int, F64]] = field(default_factory=list)
    weights: list[dict[int, int]] = field(default_factory=list)


# --- the simulation ---


@dataclass
class Simulated:
    """What one node has. since: steps in each fragment since it was last contributed; carried: tokens excluded."""

    local: F64
    since: list[int]
    residual: F64
    carried: list[int]
    steps: int = 0
    pending: int = 0


def simulate(count: int, tau: int, alpha: float | None) -> History:
    history = History()
    chunks = range(6)
    where = [
        np.concatenate([np.arange(4 * c, min(4 * c + 4, NUMEL)) for c in chunks if c % count == p])
        for p in range(count)
    ]
    theta, momentum = START.astype(np.float64), np.zeros(NUMEL)
    nodes: dict[int, Simulated] = {}

    def train(number: int, steps: int) -> None:
        node = nodes[number]
        for _ in range(steps):
            node.local += 0.1 * (target(number, node.steps) - node.local)
            node.steps += 1
        node.since = [steps + before for before in node.since]
        node.pending += steps

    for e in range(1, ROUNDS + 1):
        p = e % count
        i = where[p]
        for number in range(3):
            if JOINS.get(number, 1) == e:
                nodes[number] = Simulated(theta.copy(), [0] * count, np.zeros(NUMEL), [0] * count)
            if (e, number) in KILLED:
                node = nodes[number]
                node.local, node.since, node.pending = theta.copy(), [0] * count, 0
        total, weight = np.zeros(NUMEL), np.zeros(NUMEL)
        given: dict[int, tuple[F64, F64, F64]] = {}
        weights = {}
        for number, node in nodes.items():
            if (e, number) in SLOW:
                train(number, 3)
                continue
            train(number, max(1, ROUND_STEPS - node.pending))
            delta = theta - node.local
            given[number] = (delta, delta + node.residual, node.local.copy())
            weights[number] = node.since[p] * TOKENS // count + node.carried[p]
            node.since[p], node.pending = 0, 0
            included = _included(e, number)
            total += weights[number] * included * given[number][1]
            weight += weights[number] * included
            train(number, tau)
        update = np.divide(total, weight, out=np.zeros(NUMEL), where=weight > 0)
        before = theta.copy()
        momentum[i] = MOMENTUM * momentum[i] + update[i]
        theta[i] -= LR * (update[i] + MOMENTUM * momentum[i])
        for number, node in nodes.items():
            if number not in given:
                node.local[i] += theta[i] - before[i]
                continue
            delta, put_in, mark = given[number]
            if alpha is None:
                node.local[i] = theta[i] + node.local[i] - mark[i]
            else:
                node.local[i] = alpha * node.local[i] + (1 - alpha) * theta[i]
            included = _included(e, number)
            node.residual[i] = np.where(included, 0, put_in - (alpha or 0) * delta)[i]
            node.carried[p] = 0 if included[i].any() else weights[number]
        history.anchors.append(theta.copy())
        history.momenta.append(momentum.copy())
        history.locals.append({number: node.local.copy() for number, node in nodes.items()})
        history.weights.append(weights)
    return history


def _included(round: int, number: int) -> npt.NDArray[np.bool_]:
    """Per value, whether the contribution counts: a joiner's first does not."""
    chunks = EXCLUDED.get((round, number), set())
    if JOINS.get(number) == round:
        chunks = set(range(6))
    return np.array([value // CHUNK not in chunks for value in range(NUMEL)])


# --- the real parts ---


class Node:
    """One node: its trainer's accounts, and its daemon's."""

    def __init__(self, number: int, sync: SyncSettings, fragments: Fragments, anchor: F32) -> None:
        self.number, self._sync = number, sync
        self.contributions = Contributions(
            fragments, "fp32", 3, sender=identity(number + 1).peer_id, mixing=sync.mixing
        )
        self.step = 0
        self.start_trainer(anchor, contributions=0)

    def start_trainer(self, anchor: F32, *, contributions: int) -> None:
        self.model = OneVector(NUMEL)
        self.accounts = Accounts(self.model.flat(), sync=self._sync, contributions=contributions)
        self.accounts.apply(anchor, fresh=True)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            goal = torch.from_numpy(target(self.number, self.step))
            self.model.values += 0.1 * (goal - self.model.values)
            self.accounts.count(TOKENS)
            self.step += 1


def run(count: int, tau: int, alpha: float | None) -> History:
    history = History()
    grid = Grid(NUMEL, CHUNK)
    fragments = Fragments(grid, count)
    sync = SyncSettings(chunk_values=CHUNK, fragments=count, overlap_steps=tau, mixing=alpha)
    outer = OuterSettings(lr=LR, momentum=MOMENTUM, fragments=count)
    zero = frozen(np.zeros(NUMEL, np.float32))
    state = CertifiedState(
        term=Term(), round=0, tokens=0, layout_hash=bytes(32), anchor=frozen(START.copy()), momentum=zero
    )
    nodes: dict[int, Node] = {}
    out = np.zeros(NUMEL, np.float32)
    for e in range(1, ROUNDS + 1):
        base, fragment = e.to_bytes(32, "little"), fragments.of_round(e)
        for number in range(3):
            if JOINS.get(number, 1) == e:
                nodes[number] = Node(number, sync, fragments, state.anchor)
            if (e, number) in KILLED:
                nodes[number].start_trainer(state.anchor, contributions=nodes[number].contributions.taken)
        contributed = []
        for node in nodes.values():
            if (e, node.number) in SLOW:
                node.train(3)
                continue
            node.train(max(1, ROUND_STEPS - node.accounts.steps))
            written = node.accounts.contribute(out, e)
            node.contributions.make(e, written.number, written.tokens, out[: fragment.numel].copy(), base=base)
            contributed.append(node)
            node.train(node.accounts.overlap_left)
        finals = reduce(contributed, e, base, fragment.grid, fragment.chunks)
        state, header = advance(state, finals, outer)
        assert header == header_of(state, grid)
        history.weights.append({node.number: _tokens(node) for node in contributed})
        for node in nodes.values():
            if node in contributed:
                node.contributions.settle(e, finals.included(contributed.index(node)))
            node.accounts.apply(state.anchor, round=e, taken=node.contributions.taken)
        history.anchors.append(state.anchor.astype(np.float64))
        history.momenta.append(state.momentum.astype(np.float64))
        history.locals.append({number: node.model.values.numpy().astype(np.float64) for number, node in nodes.items()})
    return history


def _tokens(node: Node) -> int:
    made = node.contributions.made
    assert made is not None
    return made.tokens


def reduce(contributed: Sequence[Node], round: int, base: bytes, grid: Grid, chunks: Sequence[int]) -> Finals:
    """The finals of the round, the mean of each chunk in plan order."""
    made = [node.contributions.made for node in contributed]
    participants = [
        Participant(identity(node.number + 1).peer_id, one.tokens, one.tokens, one.encoded.root)
        for node, one in zip(contributed, made, strict=True)
        if one is not None
    ]
    plan = plan_with(participants, grid, round=round, base=base, codec="fp32")
    final_format, finals = FinalFormat(plan), []
    for place, chunk in enumerate(chunks):
        here = slice(*grid.span(place))
        total, weight, included = np.zeros(grid.length(place), np.float32), 0, []
        for number, node in enumerate(contributed):
            one = made[number]
            assert one is not None
            if _included(round, node.number)[CHUNK * chunk]:
                total += np.float32(one.tokens) * one.encoded.decoded()[here]
                weight += one.tokens
                included.append(number)
        owner = contributed[final_format.owners[place]].number
        finals.append(final_format.sign(identity(owner + 1), place, total / np.float32(max(1, weight)), included))
    return Finals(plan=plan, chunks=tuple(finals))


def assert_same(got: History, want: History) -> None:
    for e in range(ROUNDS):
        assert got.weights[e] == want.weights[e], f"weights of round {e + 1}"
        np.testing.assert_allclose(got.anchors[e], want.anchors[e], rtol=0, atol=2e-5, err_msg=f"anchor {e + 1}")
        np.testing.assert_allclose(got.momenta[e], want.momenta[e], rtol=0, atol=2e-5, err_msg=f"momentum {e + 1}")
        for number, local in want.locals[e].items():
            what = f"local of node {number} after round {e + 1}"
            np.testing.assert_allclose(got.locals[e][number], local, rtol=0, atol=2e-5, err_msg=what)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tau", [0, 1, 5])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_streaming_history_is_that_of_the_equations(count: int, tau: int, alpha: float) -> None:
    assert_same(run(count, tau, alpha), simulate(count, tau, alpha))


@pytest.mark.parametrize("tau", [0, 1, 5])
def test_diloco_history_with_overlap_is_that_of_the_equations(tau: int) -> None:
    assert_same(run(1, tau, None), simulate(1, tau, None))


def test_histories_tell_the_strategies_apart() -> None:
    """Every setting leads elsewhere, so that none of the histories above agrees by chance."""
    settings = [(n, tau, alpha) for n in (1, 4) for tau in (0, 1, 5) for alpha in (0.0, 0.5, 1.0)]
    ends = [simulate(*one).anchors[-1] for one in [*settings, (1, 1, None), (1, 5, None)]]
    # Without overlap and mixing, streaming in one fragment is DiLoCo; nothing else is alike.
    np.testing.assert_allclose(simulate(1, 0, None).anchors[-1], ends[0], atol=1e-12)
    different = {tuple(np.round(end, 4)) for end in ends}
    assert len(different) == len(ends)
