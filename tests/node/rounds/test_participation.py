"""A node's part in a round, and what becomes of its own work when a term ends: dropped or kept as its base is."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trio

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.state import HeldState
from shoal.node.audit import AuditTrail
from shoal.node.rounds.participation import Participation
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.state.resumption import Found, ResumeFiles
from shoal.node.training.trainer_messages import Contribution
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.effects import Train
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.messages import MEMBER_LIMIT, NO_HASH, Term, Value
from shoal.protocol.planning import OBSERVER
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, GRID, Ledger, vector
from tests.node.rounds.site_lab import no_site


def contribution_to(round: int) -> Contribution:
    """Notice of the trainer's that it is there."""
    return Contribution(
        number=round, round=round, tokens=100, steps=1, loss=0.0, seconds=0.0, tokens_per_s=0.0, order=0
    )


class Part:
    """A founder's part in the rounds that a ledger certifies; the trainer's orders are noted."""

    def __init__(
        self,
        rounds: int,
        *,
        error_feedback: float = 1.0,
        balances: bool = False,
        seats: int = MEMBER_LIMIT,
        audit: AuditTrail | None = None,
        codec: str = "fp32",
    ) -> None:
        self.ledger = Ledger(codec=codec)
        self.ledger.certify(rounds)
        self.stood: list[tuple[int, bool]] = []
        self.trained: list[tuple[bool, bool]] = []
        self.brought_up: list[tuple[frozenset[PeerId], int]] = []
        self.values = vector(5)
        me = self.ledger.founders[0]
        sync = SyncSection(inner_steps=1, codec=codec, error_feedback=error_feedback)
        sections = {"sync": sync, "round": SimpleNamespace(staleness_rounds=3, weight_cap=4.0)}
        manifest = SimpleNamespace(**sections, seats=seats, swarm=SimpleNamespace(founders=list(self.ledger.peers)))
        self.state_store = SimpleNamespace(
            chain=self.ledger.chain,
            head=self.ledger.chain.head,
            state=self.ledger.state,
            finals=self._finals,
            digest=NO_HASH,
        )
        parts = SimpleNamespace(
            config=SimpleNamespace(manifest=manifest),
            identity=me,
            state_store=self.state_store,
            training_client=SimpleNamespace(
                stand_on=self._stand_on,
                is_current=lambda event: True,
                pseudo_gradient=lambda numel: self.values,
                give_back_contribution=trio.lowlevel.checkpoint,
                train=self._train,
                balances=balances,
                paused=False,
            ),
            reduce=SimpleNamespace(prepare=lambda: None, bring_up_lanes=lambda *about: self.brought_up.append(about)),
            store=SimpleNamespace(folder=Path(tempfile.gettempdir())),
            resumption=SimpleNamespace(restore_trainer=self._restore, stands_on=lambda value: None),
            site=no_site(),
            audit=audit or AuditTrail(Path(), enabled=False),
        )
        self.part = Participation(parts, Fragments(GRID), RoundObserver)  # type: ignore[arg-type]

    async def _stand_on(self, state: HeldState, anchor: F32, *, taken: int, fresh: bool = False) -> None:
        self.stood.append((state.round, fresh))
        await trio.lowlevel.checkpoint()

    async def _restore(self, found: Found, *, spent: bool) -> None:
        await trio.lowlevel.checkpoint()

    async def _finals(self, round: int, peers: list[str]) -> object:
        await trio.lowlevel.checkpoint()
        return self.ledger.finals[round]

    def stand(self) -> None:
        self.state_store.state = self.ledger.state
        trio.run(self.part.stand_on_head)

    def make(self) -> None:
        """A contribution to the round under way."""
        head = self.ledger.chain.head
        self.part._contributions.make(head.next_round, 1, 100, vector(5), base=head.hash)

    def resume(self) -> None:
        """A restart found what was made, and what the trainer knew."""
        files = ResumeFiles(position=(Term(), 0), trainer=Path(), work=Path())
        self.part._found = Found(files=files, exact=True, work=None)
        trio.run(self.part.resume_work)

    def settle(self) -> None:
        trio.run(self.part.settle)

    async def _train(self, *about: object, contribute: bool, at_once: bool) -> None:
        self.trained.append((contribute, at_once))
        await trio.lowlevel.checkpoint()

    @property
    def residual(self) -> bool:
        """Whether something is left over for the next contribution."""
        contributions = self.part._contributions
        found, nothing = np.zeros((2, GRID.numel), np.float32)
        contributions._write_input(found, nothing, 1, contributions._left[0], GRID, None)
        return bool(found.any())


def test_what_waited_for_a_seat_weighs_by_what_the_round_has_left_of_it() -> None:
    here, anchors = Part(1, seats=2), list[F32]()
    for round in (2, 3):
        here.values = vector(round)
        here.stand()
        anchors.append(here.ledger.state.anchor)
        made = here.part._make(contribution_to(round), [])
        here.ledger.certify()
        here.settle()
    assert made.tokens == 200
    moved = anchors[0] - anchors[1]
    same = vector(2) * moved > 0
    weight = np.where(same, np.maximum(1 - moved / vector(2), 0), 1)
    assert 0.2 < same.mean() < 0.8
    expected = (vector(3) + weight * vector(2)) / (1 + weight)
    np.testing.assert_allclose(made.values, expected, rtol=0, atol=1e-6)


def test_what_a_contribution_is_made_of_is_kept_in_test_mode(tmp_path: Path) -> None:
    here = Part(1, audit=AuditTrail(tmp_path, enabled=True))
    for round in (2, 3):
        here.values = vector(round)
        here.stand()
        made = here.part._make(contribution_to(round), [])
        here.ledger.certify()
        here.settle()
        (path,) = (tmp_path / f"0.0-{round}").iterdir()
        assert path.name == f"input-{made.encoded.root.hex()[:16]}"
        kept = msgspec.msgpack.decode(path.read_bytes())
        assert (kept["root"], kept["base"]) == (made.encoded.root, here.state_store.head.hash)
        assert (kept["learnt"], kept["values"]) == (vector(round).tobytes(), made.values.tobytes())
    assert kept["values"] == (vector(3) + vector(2)).tobytes(), "no round counted this node's of the second"


@pytest.mark.parametrize(("missed", "dropped"), [(2, False), (3, True)])
@pytest.mark.parametrize("is_paused", [False, True], ids=["asleep", "paused"])
def test_what_was_learnt_before_too_many_rounds_without_this_node_is_dropped(
    missed: int, dropped: bool, is_paused: bool
) -> None:
    """A sleeper stands on the newest state at once when it wakes; who is paused stands on each, and learns nothing."""
    here = Part(3)
    here.stand()
    here.make()
    here.ledger.certify()
    here.settle()
    here.stand()
    assert here.residual, "its contribution was not counted, and comes again"
    client = here.part._training_client
    client.paused = is_paused
    for _ in range(missed):
        here.ledger.certify()
        if is_paused:
            here.stand()
    client.paused = False
    here.ledger.certify()
    here.stand()
    here.ledger.certify()
    here.stand()
    fresh = [is_fresh for _, is_fresh in here.stood]
    assert (any(fresh), here.residual) == (dropped, not dropped)
    assert fresh.count(True) == dropped, "what is learnt since stays"
    assert not fresh[-1]


def test_what_encoding_left_of_a_contribution_made_just_after_a_long_pause_is_kept() -> None:
    """It went on with the last round in which that was not too late, and was counted in it."""
    here = Part(3, codec="int8")
    here.stand()
    client = here.part._training_client
    client.paused = True
    for _ in range(3):
        here.ledger.certify()
        here.stand()
    client.paused = False
    round = here.ledger.chain.head.next_round
    here.part._make(contribution_to(round), [])
    here.part._contributions.settle(round, (True,) * GRID.chunks)
    assert here.residual
    here.ledger.certify()
    here.stand()
    assert [fresh for _, fresh in here.stood] == [False] * 5
    assert here.residual


def test_lanes_to_those_who_contribute_too_are_brought_up_while_all_train() -> None:
    here = Part(1)
    here.stand()
    beside = frozenset(here.ledger.peers[1:])
    trio.run(here.part.train, Train(beside=beside))
    trio.run(here.part.train, Train(contribute=False))
    assert here.brought_up == [(beside, GRID.chunks)]


@pytest.mark.parametrize("balances", [False, True])
def test_fewer_steps_than_the_manifest_has_are_ordered_only_where_they_follow_speeds(balances: bool) -> None:
    here = Part(3, balances=balances)
    trio.run(here.part.train, Train())
    trio.run(here.part.train, Train(at_once=True))
    assert here.trained == [(True, False), (True, True)][: 1 + balances]


def test_work_of_the_round_under_way_is_settled_by_its_certificate_only() -> None:
    here = Part(3)
    here.make()
    here.settle()
    assert here.part.made is not None
    here.ledger.certify()  # its plan does not know this contribution
    here.settle()
    assert here.part.made is None
    assert here.residual
    assert here.part._contributions._left[0].tokens == 100


def test_work_that_was_not_counted_comes_again_as_far_as_the_manifest_says() -> None:
    here = Part(3, error_feedback=0.5)
    here.make()
    here.ledger.certify()
    here.settle()
    here.make()
    assert here.part.made is not None
    assert np.array_equal(here.part.made.values, vector(5) + np.float32(0.5) * vector(5))


def test_values_that_are_not_finite_are_announced_by_nobody_and_spoil_no_later_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Part(3)
    here.values = vector(5) * np.float32(np.nan)
    event = Contribution(
        number=1, round=4, tokens=100, steps=1, loss=1.0, seconds=1.0, tokens_per_s=100.0, blocked_s=0.0
    )
    ready = trio.run(partial(here.part.contribute, event, alone=False, delegate=None))
    assert ready is not None
    assert (ready.round, ready.role, ready.root, ready.tokens) == (4, OBSERVER, NO_HASH, 0)
    assert "round 4: this node contributes nothing: NaN or infinity among the values to encode" in caplog.text
    here.ledger.certify()
    here.settle()
    here.make()
    assert here.part.made is not None
    assert np.array_equal(here.part.made.values, vector(5))


@pytest.mark.parametrize("later", [0, 1])
def test_work_on_a_state_that_was_abandoned_is_dropped(later: int) -> None:
    here = Part(5)
    here.stand()
    here.make()
    here.ledger.go_back(3)
    if later:
        here.ledger.certify(later)
    here.settle()
    here.stand()
    assert here.part.made is None
    assert not here.residual
    assert here.part._contributions._left[0].tokens == 0
    assert here.stood == [(5, False), (3 + later, True)]


def test_residual_of_before_goes_with_the_state_too() -> None:
    here = Part(4)
    here.stand()
    here.make()
    here.ledger.certify()
    here.settle()
    here.stand()
    assert here.residual
    here.ledger.go_back(3)
    here.settle()
    here.stand()
    assert not here.residual
    assert here.stood == [(4, False), (5, False), (3, True)]


def test_what_was_taken_up_goes_with_the_state_where_a_vote_of_before_goes_back() -> None:
    """The trainer has no state of this life's yet, and must not take what it learnt along to an earlier one."""
    here = Part(4)
    here.make()
    here.resume()
    here.ledger.go_back(3)
    here.settle()
    here.stand()
    assert here.part.made is None
    assert not here.residual
    assert here.stood == [(3, True)]


def test_work_is_kept_whole_where_a_rebase_ended_its_round_undecided() -> None:
    here = Part(4)
    here.stand()
    here.make()
    here.ledger.chain.extend(make_rebase(AUTHORITY, here.ledger.chain.head, here.ledger.peers[:1]))
    here.settle()
    here.stand()
    assert here.part.made is None
    assert here.residual
    assert here.part._contributions._left[0].tokens == 100
    assert here.stood == [(4, False), (4, False)]


def test_work_that_certified_rounds_counted_is_dropped_when_a_rebase_abandons_them() -> None:
    here = Part(4)
    here.stand()
    here.make()
    fourth = here.ledger.chain.head
    third = here.ledger.chain.value(3)
    here.ledger.chain.extend(make_rebase(AUTHORITY, third, here.ledger.peers[:1]))
    assert not here.ledger.chain.on_branch(fourth)
    del here.ledger.states[4:]
    here.settle()
    here.stand()
    assert here.part.made is None
    assert not here.residual
    assert here.stood == [(4, False), (3, True)]


def test_another_term_trains_on_other_data() -> None:
    training_client = TrainingClient(SimpleNamespace(), seed=7, inner_steps=1)  # type: ignore[arg-type]
    ledger = Ledger()
    ledger.certify(4)
    before: Value = ledger.chain.value(2)
    ledger.go_back(2)
    after = ledger.chain.head
    assert (before.next_round, after.next_round, after.next_term) == (3, 3, Term(0, 1))
    seeds = {training_client.assignment(value, peer).stream_seed for value in (before, after) for peer in ledger.peers}
    assert len(seeds) == 2 * len(ledger.peers)
    assert training_client.assignment(before, ledger.peers[0]).seed == 7


@pytest.mark.parametrize(("missed", "kept"), [(0, True), (2, True), (3, False), (40, False)])
def test_work_is_kept_for_as_many_rounds_as_the_limit_says_though_nothing_else_was_made(
    missed: int, kept: bool
) -> None:
    """A node that was away made one contribution, and the rounds that passed meanwhile are what makes it stale."""
    here = Part(3)
    here.make()
    here.ledger.certify(1 + missed)
    here.settle()
    assert here.part.made is None
    assert here.residual is kept
    assert here.part._contributions._left[0].tokens == (100 if kept else 0)
