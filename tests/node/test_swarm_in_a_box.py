"""Real engines on disks that lose power: courses of events of which each shows one thing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from shoal.collectives.finals import FinalFormat, Finals
from shoal.node.outcome import Notice, RoundCertified, TakesPart
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.state import store as store_module
from shoal.node.training.trainer_messages import Command, Restore, WriteInitial
from shoal.protocol.chain import Chain
from shoal.protocol.effects import Effect
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Amend, GoBack, Reduced, SetPaused
from shoal.protocol.messages import Certificate, Consent, Message, Ready, Report, Term, Value
from shoal.protocol.planning import CONTRIBUTOR, RoundSettings
from shoal.protocol.round import RoundMachine
from tests.node.box_life import Life
from tests.node.box_witness import Bound
from tests.node.box_witness import Witness as BoxWitness
from tests.node.ledger import identity
from tests.node.simulated_disk import Disks, Fault, Survival
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]


def test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once(
    tmp_path: Path, disks: Disks
) -> None:
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(5)

    box.run(course)
    assert box.counted.sum() == 3 * len(box.values) == 15


def test_founders_that_drew_other_parameters_take_the_first_founders(
    tmp_path: Path, disks: Disks, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(tmp_path, disks)

    def drawing_otherwise(life: Life) -> None:
        life.trainer.bias = np.float32(life.number * 1e-6)

    async def course(box: Box) -> None:
        box.adjust_trainer = drawing_otherwise
        box.start_all()
        await box.until_round(2)

    box.run(course)
    assert all(len(value.members) == 3 for value in box.values.values())
    assert caplog.text.count("differ from the first founder's; using theirs") == 2


@pytest.mark.parametrize("cut_off", [True, False])
def test_who_has_no_quorum_blames_nobody_where_its_own_machine_has_no_network(
    tmp_path: Path, disks: Disks, cut_off: bool
) -> None:
    def warnings(life: Life) -> list[str]:
        return [told.text for told in life.told if isinstance(told, Notice) and told.text.startswith("no quorum")]

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        alone = box.node(0)
        alone.cut_off = cut_off
        for number in (1, 2):
            box.node(number).cut()
            await box.node(number).over.wait()
        await box.until(lambda: alone.engine.phase == "no quorum" and warnings(alone))
        (said,) = warnings(alone)
        assert ("this machine has no network" in said, "start these members again" in said) == (cut_off, not cut_off)
        for number in (1, 2):
            box.start(number, Survival.SYNCED)
        await box.until_round(alone.round + 1)

    Box(tmp_path, disks).run(course)


def test_who_is_paused_tells_no_loss_of_rounds_that_it_adds_nothing_to(tmp_path: Path, disks: Disks) -> None:
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        life = box.node(0)
        life.engine.put(SetPaused(True))
        await box.until_round(life.round + 4)
        told = [event for event in life.told if isinstance(event, RoundCertified)]
        added = [str(life.peer) not in event.missing for event in told]
        assert [event.loss is not None for event in told] == added
        assert (added[0], added[-1]) == (True, False)

    box.run(course)


def test_a_trainer_that_hangs_keeps_its_node_from_no_round(tmp_path: Path, disks: Disks) -> None:
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        box.node(2).trainer.hangs = True
        await box.until_round(box.node(2).round + 6, within_s=400.0)

    box.run(course)
    voted = [
        number for number in range(3) if box.peers[number] in max(box.values.values(), key=lambda v: v.round).members
    ]
    assert voted == [0, 1, 2]


def test_a_trainer_that_writes_no_initial_parameters_is_waited_for_and_ends_no_node(
    tmp_path: Path, disks: Disks, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of all founders, so that nobody has a state: each daemon has another begun, and orders them anew."""
    box = Box(tmp_path, disks)

    def deaf_at_first(life: Life) -> None:
        send, asked = life.trainer.send, list[Command]()

        async def send_later(command: Command) -> None:
            if isinstance(command, WriteInitial) and len(asked) < 2:
                asked.append(command)
            else:
                await send(command)

        life.trainer.send = send_later  # type: ignore[method-assign]

    async def course(box: Box) -> None:
        box.adjust_trainer = deaf_at_first
        box.start_all()
        await box.until_round(2, within_s=600.0)

    box.run(course)
    assert len(box.values[max(box.values)].members) == 3
    assert caplog.text.count("no state to begin on yet: the trainer wrote no initial parameters within") == 3 * 2


def test_nobody_is_missing_while_a_round_begins(tmp_path: Path, disks: Disks) -> None:
    """The machine of the new round has not heard yet who is here; who asks for the status then is told all the same."""
    box = Box(tmp_path, disks)
    seen: list[tuple[PeerId, ...]] = []

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        engine = box.node(0).engine
        began = engine.observer.began

        def watched(base: Value, settings: RoundSettings) -> None:
            assert engine.machine is not None
            assert engine.machine.missing(), "it has not heard"
            seen.append(engine.member.missing())
            began(base, settings)

        engine.observer.began = watched  # type: ignore[method-assign]
        await box.until_round(5)

    box.run(course)
    assert len(seen) >= 3
    assert not any(seen)


def test_a_contribution_that_its_sender_did_not_sign_reaches_no_machine(
    tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, heard, receive = Box(tmp_path, disks), list[Message](), RoundMachine.receive
    told: dict[bytes, Ready] = {}

    def noted(machine: RoundMachine, sender: PeerId, message: Message, now: float) -> list[Effect]:
        heard.append(message)
        return receive(machine, sender, message, now)

    def let_out(life: Life, message: Message) -> None:
        """Whoever announces a contribution is said to have announced another one first, in another life."""
        if life.number == 1 and isinstance(message, Ready) and message.role == CONTRIBUTOR:
            told[message.life] = message
            forged = msgspec.structs.replace(message, life=bytes(32), signature=bytes(64))
            box.node(0).engine.hear(life.peer, forged)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(3)

    monkeypatch.setattr(RoundMachine, "receive", noted)
    box.let_out = let_out
    box.run(course)
    lives = {message.life for message in heard if isinstance(message, Ready)}
    assert told.keys() <= lives
    assert bytes(32) not in lives


def test_what_is_proven_already_is_known_to_the_machine_of_every_round(tmp_path: Path, disks: Disks) -> None:
    """So whoever lied is banned by the next round that begins, though its evidence came before."""
    box, liar = Box(tmp_path, disks), 2

    class Knowing(RoundObserver):
        def proven(self, chain: Chain) -> dict[bytes, PeerId]:
            return {} if box.peers[liar] in chain.banned else {b"e" * 32: box.peers[liar]}

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(1)
        for number in (0, 1):
            box.node(number).engine.observer = Knowing()
        await box.until(lambda: all(box.peers[liar] in box.node(number).chain.banned for number in (0, 1)), 30.0)

    box.run(course)


def test_node_that_meets_votes_of_its_key_of_which_it_has_no_record_signs_nothing_more(
    tmp_path: Path, disks: Disks
) -> None:
    box = Box(tmp_path, disks, seed=1)  # in which a quorum counted its vote before it was cut

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(3)
        node = box.node(2)
        node.cut()
        await node.over.wait()
        box.lives[2], box.witnesses[2] = None, BoxWitness("node 2, elsewhere", tmp_path / "elsewhere")
        copy = box.start(2)  # with the key, and nothing else
        await box.until(lambda: copy.up and copy.standstill.key_use.ends, 30.0)

    box.run(course)


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


@pytest.mark.parametrize("snapshot_s", [0.0, 0.2])
def test_what_a_node_alone_knows_of_a_round_is_safe_before_the_certificate_is(
    tmp_path: Path, disks: Disks, snapshot_s: float
) -> None:
    box, certified = Box(tmp_path, disks), []
    box.adjust_trainer = lambda life: setattr(life.trainer, "snapshot_s", snapshot_s)

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Certificate):
            round = message.value.round
            assert all(life.disk.safe("resume", f"0.0-{round}.{kind}") is not None for kind in ("work", "trainer"))
            certified.append(round)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)

    box.let_out = let_out
    box.run(course)
    assert {1, 2} <= set(certified)


def test_a_rollback_is_consented_to_by_those_who_have_its_state_on_disk(tmp_path: Path, disks: Disks) -> None:
    """Its folder too, which is made for it; and all come back to that state, whoever loses power meanwhile."""
    box, consents = Box(tmp_path, disks), set[int]()

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Consent):
            consents.add(life.number)
            if life.number == 2:
                life.cut()

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(3)
        box.let_out = let_out
        node = box.node(0)
        with pytest.raises(ConfigError, match="--to 99"):
            await node.engine.obey(GoBack(99))
        with pytest.raises(ConfigError, match="signed with the key of"):
            await box.node(1).engine.obey(Amend(("round.grace_s=1.5",), by_authority=True))
        await node.engine.obey(GoBack(2))
        await box.node(2).over.wait()
        box.let_out = lambda life, message: None
        box.start(2, Survival.SYNCED)
        await box.until(lambda: all(life.up and life.chain.head.term.rollbacks == 1 for life in box.lives))
        await box.until(lambda: all(life.round >= 4 and life.state_round >= 4 for life in box.lives))

    box.run(course)
    assert consents >= {0, 2}


def test_what_may_have_been_counted_since_the_work_on_disk_is_not_contributed_again(
    tmp_path: Path, disks: Disks
) -> None:
    """Excluded from round 2, a node's work goes with that of round 3, of which nothing is written; then its power goes.

    Round 3 is certified with it. What the disk still has of round 2 must not come again.
    """
    box, late = Box(tmp_path, disks, grace_s=1.0), 2
    restored: list[tuple[int, bool]] = []

    def note_orders(life: Life) -> None:
        send = life.trainer.send

        async def noted(command: Command) -> None:
            if isinstance(command, Restore):
                restored.append((life.number, command.spent))
            await send(command)

        life.trainer.send = noted  # type: ignore[method-assign]

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
        await box.until_round(9)
        assert any(in_plan(box, round, node.peer) for round in range(4, 10)), "what it contributes then is seen"

    box.adjust_trainer = note_orders
    box.run(course)
    assert restored == [(late, True)], "its trainer is told that what it knows may have been counted"


def in_plan(box: Box, round: int, peer: PeerId) -> bool:
    """Whether a certified plan has a contribution of `peer`."""
    plan = box.finals[box.values[Term(), round].plan].plan
    return any(one.peer == peer and one.weight for one in plan.participants)


def test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next(
    tmp_path: Path, disks: Disks
) -> None:
    box, joiner = Box(tmp_path, disks, nodes=4, founders=3), 3
    contributed: list[int] = []

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Ready) and life.number == joiner and message.tokens:
            contributed.append(message.round)

    async def course(box: Box) -> None:
        for number in range(3):
            box.start(number)
        await box.until_round(2, 0, 1, 2)
        box.let_out = let_out
        box.start(joiner)
        await box.until(lambda: joiner in box.contributors(box.node(0).round), within_s=60)
        await box.until_round(box.node(0).round + 1)

    box.run(course)
    came = min(number for (_, number), value in box.values.items() if box.peers[joiner] in value.members)
    assert not in_plan(box, came, box.peers[joiner])
    assert in_plan(box, came + 1, box.peers[joiner])
    assert contributed[0] == came + 1
    told = [one for one in box.node(joiner).told if isinstance(one, TakesPart)]
    assert [one.counts_from for one in told if one.round in (came, came + 1)] == [came + 1, came + 1], told


def test_who_starts_again_says_from_which_round_its_work_counts_once_it_knows_how_far_the_others_are(
    tmp_path: Path, disks: Disks
) -> None:
    box, late = Box(tmp_path, disks, nodes=4), 3
    meanwhile = 0

    async def course(box: Box) -> None:
        nonlocal meanwhile
        box.start_all()
        await box.until_round(2)
        box.node(late).cut()
        await box.node(late).over.wait()
        await box.until_round(7, 0, 1, 2)
        meanwhile = box.node(0).round
        box.start(late, Survival.SYNCED)
        await box.until(lambda: late in box.contributors(box.node(0).round), within_s=60)

    box.run(course)
    told = [one for one in box.node(late).told if isinstance(one, TakesPart)]
    assert told
    assert min(one.counts_from for one in told) > meanwhile, told


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
    final_format, place = FinalFormat(finals.plan), finals.plan.number(peer)
    owner = finals.plan.participants[final_format.owners[chunk]].peer
    key = next(identity(n + 1) for n in range(8) if identity(n + 1).peer_id == owner)
    mean = np.frombuffer(finals.chunks[chunk].encoded.tobytes(), "<f4")
    others = [n for n, _ in enumerate(finals.plan.participants) if n != place]
    changed = final_format.sign(key, chunk, mean.copy(), others)
    assert changed.encoded.tobytes() == finals.chunks[chunk].encoded.tobytes()
    return Finals(plan=finals.plan, chunks=(*finals.chunks[:chunk], changed, *finals.chunks[chunk + 1 :]))


def test_finals_of_an_earlier_round_that_come_late_change_nothing(tmp_path: Path, disks: Disks) -> None:
    box = Box(tmp_path, disks)
    told: list[tuple[int, int]] = []

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Report):
            told.append((message.round, box.finals[message.plan].plan.round))
        if isinstance(message, Ready) and message.round == 3:
            life.engine.put(Reduced(box.finals[life.chain.value(2).plan], 0.1))

    async def course(box: Box) -> None:
        box.let_out = let_out
        box.start_all()
        await box.until_round(5)

    box.run(course)
    assert all(about == of for about, of in told)
    assert all(sum(event.name == "reduced" for event in life.events) == len(box.values) for life in box.lives)


def test_a_contribution_that_is_announced_again_after_a_restart_is_marked_first(tmp_path: Path, disks: Disks) -> None:
    """Its file is written beside the engine: it may be there, and the mark in the log not."""
    box = Box(tmp_path, disks)

    def slow(life: Life) -> None:
        life.trainer.pace = 1.0 if life.number == 1 else 20.0  # no round is over while it restarts

    box.adjust_trainer = slow

    async def course(box: Box) -> None:
        again = trio.Event()
        box.start_all()
        await box.until_round(2)
        victim = box.node(1)

        def watch(did: str, name: str) -> Fault | None:
            round = victim.chain.head.next_round
            files = [f"0.0-{round}.work", f"0.0-{round}.trainer"]
            there = all(victim.disk.safe("resume", file) is not None for file in files)
            mark = Bound((Term(0, 0), round), "ready")
            return Fault.CUT if there and victim.witness.safe(victim.disk).lacks(mark) else None

        def let_out(life: Life, message: Message) -> None:
            of_the_round = (
                isinstance(message, Ready) and message.tokens and message.round == victim.chain.head.next_round
            )
            if of_the_round and life.peer == victim.peer and life is not victim:
                again.set()

        box.let_out = let_out
        victim.disk.watch = watch
        await victim.over.wait()
        assert victim.ended_by == "cut"
        box.start(1, Survival.SYNCED)
        await again.wait()
        await box.until_round(victim.chain.head.round + 3)

    box.run(course)
