"""Real engines on disks that lose power: what they let out is on disk, whatever happens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import trio

from shoal.collectives.finals import FinalFormat, Finals
from shoal.node.state import store as store_module
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Message, Ready, Report, Term
from tests.node.box_witness import Bound
from tests.node.ledger import identity
from tests.node.simulated_disk import Disks, Fault, Survival
from tests.node.swarm_in_a_box import Box, Life, disks

__all__ = ["disks"]

OPERATIONS_OF_TWO_ROUNDS = 90
SEEDS_A_TEST = 30


def test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once(
    tmp_path: Path, disks: Disks
) -> None:
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(5)

    box.run(course)
    assert box.counted.sum() == 3 * len(box.values) == 15


def test_one_seed_is_one_course_of_events(tmp_path: Path, disks: Disks) -> None:
    said = []
    for attempt in ("one", "two"):
        box = Box(tmp_path / attempt, disks, seed=5)

        async def course(box: Box) -> None:
            box.start_all()
            await box.until_round(3)

        box.run(course)
        said.append([witness.said for witness in box.witnesses] + [[life.disk.operations] for life in box.lives])
    assert said[0] == said[1]


async def killed_at_random(box: Box) -> None:
    """Up to three times a disk fails or loses power at an operation drawn by lot; what survives is drawn by lot too."""
    rng = random.Random(box.seed)
    box.start_all()
    for _ in range(rng.randint(1, 3)):
        victim = box.node(rng.randrange(len(box.lives)))
        fault = rng.choice((Fault.CUT, Fault.CUT, Fault.CUT, Fault.FULL, Fault.BROKEN))
        victim.disk.faults[victim.disk.operations + rng.randint(1, OPERATIONS_OF_TWO_ROUNDS)] = fault
        await box.until(lambda: victim.over.is_set() or victim.disk.failed)  # noqa: B023
        if not victim.over.is_set():  # a disk's error need not end a node
            await trio.sleep(rng.uniform(0, 0.5))
            victim.cut()
            await victim.over.wait()
        await trio.sleep(rng.uniform(0, 0.5))
        box.start(victim.number, rng.choice((Survival.SYNCED, Survival.SYNCED, Survival.SOME, Survival.ALL)))
    await box.until_round(max(life.round for life in box.living()) + 1)


@pytest.mark.parametrize("first", range(0, 240, SEEDS_A_TEST))
def test_nodes_whose_disks_fail_at_random_let_nothing_out_that_is_not_safe(
    tmp_path: Path, disks: Disks, first: int
) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        Box(tmp_path / str(seed), disks, seed=seed).run(killed_at_random)


# -- what only real engines on real stores show ----------------------------------------------------------------


@pytest.fixture
def always_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement logs are rewritten in every round."""
    monkeypatch.setattr(store_module, "AGREEMENT_LOG_LIMIT_BYTES", 1)


@pytest.mark.parametrize("what", ["write", "sync"])
@pytest.mark.usefixtures("always_rewriting")
def test_promises_of_a_round_are_kept_until_its_certificate_is_on_disk(tmp_path: Path, disks: Disks, what: str) -> None:
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        victim = box.node(1)
        victim.disk.watch = lambda did, name: Fault.CUT if (did, name) == (what, "chain.log") else None
        await victim.over.wait()
        assert victim.ended_by == "cut"
        box.start(1, Survival.SYNCED)
        await box.until_round(4)

    box.run(course)


def test_what_a_node_alone_knows_of_a_round_is_safe_before_the_certificate_is(tmp_path: Path, disks: Disks) -> None:
    box, certified = Box(tmp_path, disks), []

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Certificate):
            value = message.value
            names = (f"{value.term.rebases}.{value.term.rollbacks}-{value.round}.{kind}" for kind in ("work", "trainer"))
            assert all(life.disk.safe("resume", name) is not None for name in names)
            certified.append(value.round)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)

    box.let_out = let_out
    box.run(course)
    assert {1, 2} <= set(certified)


def test_nothing_is_signed_below_a_view_that_was_promised_before_the_contribution_was_made(
    tmp_path: Path, disks: Disks
) -> None:
    """A record that a contribution was announced comes after the promise, and says nothing of views."""
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.adjust_trainer = lambda life: setattr(life.trainer, "pace", 40.0)
        box.start_all()
        await box.until(lambda: all(life.up and life.engine.machine is not None for life in box.lives))
        lead = box.node(box.peers.index(box.node(0).engine.machine.agreement.lead(0)))
        others = [life for life in box.living() if life is not lead]
        lead.cut()
        promised = Bound((Term(), 1), "promise", 1)
        ready = Bound((Term(), 1), "ready")
        await box.until(lambda: all({promised, ready} <= set(life.witness.said) for life in others))
        for life in others:
            life.cut()
            await life.over.wait()
        box.adjust_trainer = lambda life: None
        box.start(lead.number, Survival.SYNCED)
        back = [box.start(life.number, Survival.SYNCED) for life in others]
        await box.until(lambda: all(life.up and life.engine.machine is not None for life in back))
        assert all(life.engine.machine.agreement.view >= 1 for life in back)
        await box.until_round(2)

    box.run(course)


def test_what_may_have_been_counted_since_the_work_on_disk_is_not_contributed_again(
    tmp_path: Path, disks: Disks
) -> None:
    """Excluded from round 2, a node's work goes with that of round 3, of which nothing is written; then its power goes.

    Round 3 is certified with it. What the disk still has of round 2 must not come again.
    """
    box, late = Box(tmp_path, disks, grace_s=1.0), 2

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Report) and (life.number, message.round) == (late, 3):
            life.cut()

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(1)
        node = box.node(late)
        node.trainer.snapshot_s = 0.5  # so long that the next rounds' are not written
        box.net.slow = {(node.peer, other): 3.0 for other in box.peers}
        await box.until_round(2)
        box.net.hasten()
        assert not in_plan(box, 2, node.peer), "its contribution was to come too late"
        box.let_out = let_out
        await node.over.wait()
        await box.until_round(3, 0, 1)
        assert in_plan(box, 3, node.peer)
        assert [files.position[1] for files in node.resumption.on_disk()][:1] == [2]
        box.start(late, Survival.SYNCED)
        await box.until_round(7)

    box.run(course)


def in_plan(box: Box, round: int, peer: PeerId) -> bool:
    """Whether a certified plan has a contribution of `peer`."""
    plan = box.finals[box.values[Term(), round].plan].plan
    return any(one.peer == peer and one.weight for one in plan.participants)


def test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next(
    tmp_path: Path, disks: Disks
) -> None:
    box = Box(tmp_path, disks, nodes=4, founders=3)

    async def course(box: Box) -> None:
        for number in range(3):
            box.start(number)
        await box.until_round(2, 0, 1, 2)
        box.start(3)
        await box.until(lambda: 3 in box.contributors(box.node(0).round), within_s=60)
        await box.until_round(box.node(0).round + 1)

    box.run(course)
    came = min(number for (_, number), value in box.values.items() if box.peers[3] in value.members)
    assert not in_plan(box, came, box.peers[3])
    assert in_plan(box, came + 1, box.peers[3])


@pytest.mark.parametrize("seed", range(3))
def test_member_signs_nothing_whose_bitmaps_are_not_those_that_it_has_and_counts_its_work_once(
    tmp_path: Path, disks: Disks, seed: int
) -> None:
    """An owner of a chunk signs two bitmaps for it: to one node, that this node's contribution was left out."""
    box, deceived = Box(tmp_path, disks, seed=seed), 1

    def alter(life: Life, finals: Finals) -> Finals:
        if life.number != deceived or finals.plan.round != 2:
            return finals
        return without(finals, life.peer, chunk=0)

    async def course(box: Box) -> None:
        box.alter_finals = alter
        box.start_all()
        await box.until_round(5)

    box.run(course)
    signed = {(bound.kind, bound.position[1]) for bound in box.witnesses[deceived].said}
    assert not signed & {("vote", 2), ("prepare", 2), ("propose", 2)}
    assert {("vote", 1), ("vote", 4)} <= signed


def without(finals: Finals, peer: PeerId, *, chunk: int) -> Finals:
    """The same results, but in one chunk `peer` was left out, as that chunk's owner says."""
    form, place = FinalFormat(finals.plan), finals.plan.number(peer)
    owner = finals.plan.participants[form.owners[chunk]].peer
    key = next(identity(n + 1) for n in range(8) if identity(n + 1).peer_id == owner)
    mean = np.frombuffer(finals.chunks[chunk].encoded.tobytes(), "<f4")
    others = [n for n, _ in enumerate(finals.plan.participants) if n != place]
    changed = form.sign(key, chunk, mean.copy(), others)
    assert changed.encoded.tobytes() == finals.chunks[chunk].encoded.tobytes()
    return Finals(plan=finals.plan, chunks=(*finals.chunks[:chunk], changed, *finals.chunks[chunk + 1 :]))


def test_finals_of_an_earlier_round_that_come_late_change_nothing(tmp_path: Path, disks: Disks) -> None:
    box = Box(tmp_path, disks)
    told: list[tuple[int, int]] = []

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Report):
            told.append((message.round, box.finals[message.plan].plan.round))
        if isinstance(message, Ready) and message.round == 3:
            life.engine.reduced(box.finals[life.chain.value(2).plan], 0.1)

    async def course(box: Box) -> None:
        box.let_out = let_out
        box.start_all()
        await box.until_round(5)

    box.run(course)
    assert all(about == of for about, of in told)
    assert all(sum(1 for event, told in life.events if event == "reduced") == len(box.values) for life in box.lives)
