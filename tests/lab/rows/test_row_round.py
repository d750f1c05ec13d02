"""A row's round by its machines alone: who is told, who counts, what happens when members or the head are lost."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest

from shoal.lab.rows.row_effects import (
    Begun,
    Deposed,
    LeftOut,
    NoWeight,
    Out,
    Overdue,
    SumRow,
    Tell,
    TookOver,
)
from shoal.lab.rows.row_head import ROW_GRACE_S, SUM_DEADLINE_S, TRAIN_DEADLINE_S, RowSettings
from shoal.lab.rows.row_list import FAN_OUT, Roster, below, in_full
from shoal.lab.rows.row_messages import (
    ROW_LIMIT,
    RowAsk,
    RowBegin,
    RowHead,
    RowHeard,
    RowLoss,
    RowPlan,
    RowReady,
    RowTerm,
)
from shoal.lab.rows.row_posts import POST_LIMIT_S, REPEAT_S
from shoal.lab.rows.row_round import CERTIFICATE_DEADLINE_S, LATE_S, SILENT_TRIES, RowPhase
from shoal.lab.rows.two_level import row_owners
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.wire import canonical
from tests.lab.rows.row_lab import CHAIN, DELAY_S, SETTINGS, SUM_S, TOKENS, RowLab, certificate, peers

CHUNKS = 128
SLOW_S = 1000.0


def living(lab: RowLab, *but: PeerId) -> list[PeerId]:
    return [peer for peer in lab.row if peer not in but]


# -- a round that goes well --------------------------------------------------------------------------------------


def test_round_is_told_down_the_tree_trained_planned_and_summed_by_all() -> None:
    lab = RowLab(count=30)
    lab.begin(1)
    lab.run(10)
    done = lab.done(1)
    assert done is not None
    assert (done.counted, done.tokens) == (tuple(lab.row), 30 * TOKENS)
    assert all(lab.machines[peer].phase is RowPhase.OVER for peer in lab.row)
    assert [len(lab.words(RowBegin, to=peer)) for peer in lab.row] == [0, *[1] * 29]
    told = [sum(isinstance(m, RowBegin) for s, _, m in lab.said if s == peer) for peer in lab.row]
    assert told == [len(below(place, 30)) for place in range(30)]
    assert max(told) == FAN_OUT
    assert len(lab.words(RowPlan)) == 29
    assert not lab.effects(Overdue) + lab.effects(LeftOut) + lab.effects(NoWeight)


def test_tree_of_any_list_reaches_every_place_once() -> None:
    for size in range(1, 200):
        assert sorted(lower for place in range(size) for lower in below(place, size)) == list(range(1, size))


def test_entry_of_the_round_before_comes_with_the_beginning() -> None:
    lab = RowLab()
    for round in (1, 2):
        lab.begin(round)
        lab.run(10)
    entries = {effect.begin.entry for effect in lab.effects(Begun) if effect.begin.round == 2}
    assert entries == {certificate(CHAIN[1])}
    assert [lab.done(round) is not None for round in (1, 2)] == [True, True]


def test_row_of_one_is_its_own_sum() -> None:
    lab = RowLab(count=1)
    lab.begin(1)
    lab.run(5)
    done = lab.done(1)
    assert done is not None
    assert done.tokens == TOKENS


# -- what is lost on the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RowBegin, RowReady, RowPlan, RowHeard])
def test_what_is_lost_is_said_again_until_it_is_heard(kind: type) -> None:
    lab = RowLab()
    lost: list[PeerId] = []

    def first_two(sender: PeerId, to: PeerId, message: object) -> bool:
        if isinstance(message, kind) and lab.row[1] in (sender, to) and len(lost) < 2:
            lost.append(to)
            return True
        return False

    lab.drop = first_two
    lab.begin(1)
    lab.run(15)
    done = lab.done(1)
    assert len(lost) == 2
    assert done is not None
    assert done.counted == tuple(lab.row)
    lab.said.clear()
    lab.run(POST_LIMIT_S)
    assert lab.said == []


def test_loss_of_a_plan_again_is_said_again() -> None:
    lab = RowLab()
    lost: list[PeerId] = []
    lab.drop = lambda s, to, m: isinstance(m, RowLoss) and len(lost) < 8 and not lost.append(to)
    lab.begin(1)
    lab.run(2.5)
    lab.dead.add(lab.row[4])
    lab.give_up([lab.row[4]], [lab.row[0]])
    lab.run(10)
    done = lab.done(1)
    assert len(lost) == 8
    assert done is not None
    assert done.counted == tuple(living(lab, lab.row[4]))


def test_receipt_of_something_older_does_not_count_for_what_is_newer() -> None:
    lab = RowLab()
    head, member = lab.row[0], lab.row[3]
    lab.begin(1)
    lab.run(2.5)
    lab.drop = lambda sender, to, message: member in (sender, to)
    for gone in lab.row[4:6]:
        lab.give_up([gone], [head])
    first, second = lab.words(RowLoss, to=member)
    for loss, owes in ((first, True), (second, False)):
        heard = RowHeard(
            term=loss.term, round=1, base=loss.base, turn=0, what="rowloss", attempt=loss.attempt
        )  # fmt: skip
        lab.tell(member, head, heard)
        assert lab.machines[head]._posts.owes(member, RowLoss) is owes


def test_word_to_who_never_answers_is_repeated_ever_less_and_then_no_more() -> None:
    lab = RowLab()
    silent = lab.row[1]
    lab.dead.add(silent)
    lab.begin(1)
    lab.run(2 * POST_LIMIT_S)
    begins = [at for at, _, effect in lab.told if isinstance(effect, Tell) and isinstance(effect.message, RowBegin)]
    assert begins[-1] < POST_LIMIT_S
    assert 5 < len(lab.words(RowBegin, to=silent)) < 15


# -- the tree ----------------------------------------------------------------------------------------------------


def test_those_below_a_peer_that_is_gone_are_told_past_it() -> None:
    lab = RowLab(count=22)
    gone = lab.row[1]
    lab.dead.add(gone)
    lab.begin(1)
    lab.run(0.01)
    lab.give_up([gone], [lab.row[0]])
    lab.run(8 * DELAY_S)
    begun = {peer for _, peer, effect in lab.told if isinstance(effect, Begun)}
    assert begun == set(living(lab, gone))


def test_those_below_one_that_was_gone_before_are_not_asked_to_wait() -> None:
    lab = RowLab(count=22)
    lab.dead.add(lab.row[1])
    lab.give_up([lab.row[1]], [lab.row[0]])
    lab.begin(1)
    lab.run(6 * DELAY_S)
    begun = {peer for _, peer, effect in lab.told if isinstance(effect, Begun)}
    assert begun == set(living(lab, lab.row[1]))
    assert len(lab.words(RowBegin, to=lab.row[1])) == 1  # should it live


def test_those_below_one_that_does_not_answer_are_told_past_it_before_any_verdict() -> None:
    lab = RowLab(count=22)
    silent = lab.row[1]
    lab.dead.add(silent)
    lab.begin(1)
    lab.run(sum(REPEAT_S * 2**n for n in range(SILENT_TRIES)) + 6 * DELAY_S)
    begun = {peer for _, peer, effect in lab.told if isinstance(effect, Begun)}
    assert begun == set(living(lab, silent))


# -- who is ready, and when a row closes -------------------------------------------------------------------------


def test_row_closes_as_soon_as_all_are_ready() -> None:
    lab = RowLab()
    lab.trains = lambda peer: 2.5 if peer == lab.row[3] else 1.0
    lab.begin(1)
    lab.run(20)
    planned = min(at for at, _, effect in lab.told if isinstance(effect, SumRow))
    assert 2.5 < planned < 2.5 + 6 * DELAY_S


@pytest.mark.parametrize("slow", [3, 0], ids=["member", "head"])
def test_row_closes_a_while_after_half_is_ready_and_the_rest_counts_in_the_next(slow: int) -> None:
    lab = RowLab()
    late = lab.row[slow]
    lab.trains = lambda peer: 9.0 if peer == late else 1.0
    lab.begin(1)
    lab.run(12)
    planned = min(at for at, _, effect in lab.told if isinstance(effect, SumRow))
    assert 1.0 + SETTINGS.grace_s < planned < 1.0 + SETTINGS.grace_s + 6 * DELAY_S
    done = lab.done(1)
    assert done is not None
    assert done.counted == tuple(living(lab, late))
    assert lab.effects(LeftOut) == [LeftOut(1)]
    assert lab.effects(LeftOut, of=late) == [LeftOut(1)]
    lab.trains = lambda peer: 1.0
    lab.begin(2)
    lab.run(10)
    second = lab.done(2)
    assert second is not None
    assert second.counted == tuple(lab.row)


def test_grace_begins_only_when_half_of_those_who_train_are_ready() -> None:
    lab = RowLab(count=8)
    lab.trains = lambda peer: 1.0 if peer in lab.row[:3] else 20.0 if peer in lab.row[3:5] else SLOW_S
    lab.begin(1)
    lab.run(20 + SETTINGS.grace_s - 0.1)
    assert lab.effects(SumRow) == []
    lab.run(1)
    assert {one.place for one in lab.effects(SumRow)[0].plan.terms} == {0, 1, 2, 3, 4}


def test_row_closes_at_the_deadline_with_whoever_is_ready() -> None:
    lab = RowLab()
    lab.trains = lambda peer: 1.0 if peer == lab.row[2] else SLOW_S
    lab.begin(1)
    lab.run(SETTINGS.train_deadline_s - 0.1)
    assert lab.effects(SumRow) == []
    lab.run(0.2 + 4 * DELAY_S + SUM_S)
    done = lab.done(1)
    assert done is not None
    assert done.counted == (lab.row[2],)


def test_row_of_which_nobody_is_ready_has_no_weight() -> None:
    lab = RowLab()
    lab.trains = lambda peer: None
    lab.begin(1)
    lab.run(SETTINGS.train_deadline_s + 0.1)
    assert [one.round for one in lab.effects(NoWeight)] == [1]
    assert lab.machines[lab.row[0]].phase is RowPhase.OVER


def test_those_that_are_given_up_are_not_waited_for() -> None:
    lab = RowLab()
    gone = lab.row[2:5]
    lab.dead |= set(gone)
    lab.begin(1)
    lab.run(1.9)
    lab.give_up(gone, [lab.row[0]])
    lab.run(1)
    assert lab.effects(SumRow)
    assert [one.place for one in lab.effects(SumRow)[0].plan.terms] == [0, 1, 5, 6, 7, 8]


def test_newcomer_weighs_nothing_in_its_first_round_but_sums_and_counts_in_the_next() -> None:
    lab = RowLab()
    fresh = peers(1, first=50)[0]
    lab.start(fresh, lab.machines[lab.row[0]].list.roster)
    lab.machines[lab.row[0]].came([fresh])
    lab.begin(1)
    lab.run(10)
    first = lab.done(1)
    assert first is not None
    assert first.counted == tuple(lab.row)
    assert lab.effects(SumRow, of=fresh)[0].plan.terms[-1].tokens == 0
    assert [begun.trains for begun in lab.effects(Begun, of=fresh)] == [False]
    lab.begin(2)
    lab.run(10)
    second = lab.done(2)
    assert second is not None
    assert second.counted == (*lab.row, fresh)


def test_newcomer_that_claims_tokens_in_its_first_round_weighs_nothing() -> None:
    lab = RowLab()
    fresh = peers(1, first=50)[0]
    lab.machines[lab.row[0]].came([fresh])
    lab.begin(1)
    lab.tell(fresh, lab.row[0], ready_of(lab, tokens=TOKENS))
    lab.run(5)
    assert [term.tokens for term in lab.effects(SumRow)[0].plan.terms] == [*[TOKENS] * 9, 0]


# -- losses in the middle ----------------------------------------------------------------------------------------


def test_member_lost_in_the_sum_counts_no_more_and_what_others_own_stands() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(2.5)
    assert lab.effects(SumRow)
    lost = lab.row[4]
    lab.dead.add(lost)
    lab.run(1)
    lab.give_up([lost], [lab.row[0]])
    lab.run(5)
    done = lab.done(1)
    assert done is not None
    assert done.counted == tuple(living(lab, lost))
    assert done.tokens == 8 * TOKENS
    last = lab.effects(SumRow)[-1]
    assert (last.attempt, last.gone) == (1, (4,))
    rates = [(term.upload, term.download) for term in last.plan.terms]
    before, after = row_owners(rates, CHUNKS), row_owners(rates, CHUNKS, gone=last.gone)
    assert all(other == one for one, other in zip(before, after, strict=True) if one != 4)
    assert 4 in before
    assert 4 not in after
    followed = {peer: lab.machines[peer].sum for peer in living(lab, lost)}
    assert {(one.attempt, one.lost) for one in followed.values()} == {(1, (4,))}


def test_who_moves_nothing_is_left_out_of_the_sum_and_stays_on_the_list() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(2.5)
    slow = lab.row[4]
    assert lab.machines[lab.row[3]].stalled([slow], lab.now) == []  # only a head decides
    lab.take(lab.row[0], lab.machines[lab.row[0]].stalled([slow], lab.now))
    lab.run(6)
    done = lab.done(1)
    assert done is not None
    assert done.counted == tuple(living(lab, slow))
    assert lab.effects(LeftOut, of=slow) == [LeftOut(1)]
    lab.begin(2)
    lab.run(10)
    second = lab.done(2)
    assert second is not None
    assert second.counted == tuple(lab.row)


def test_heir_that_hears_of_the_head_first_and_then_of_who_is_between_takes_over() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(1)
    lab.dead |= set(lab.row[:2])
    for gone in lab.row[:2]:
        lab.give_up([gone], [lab.row[2]])
    assert lab.effects(TookOver) == [TookOver(2)]


def test_each_loss_is_another_attempt_that_has_all_the_earlier() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(2.5)
    for lost in (lab.row[4], lab.row[2]):
        lab.dead.add(lost)
        lab.give_up([lost], [lab.row[0]])
    lab.run(6)
    assert {one.gone for one in lab.effects(SumRow) if one.attempt == 2} == {(2, 4)}
    assert {one.lost for one in (lab.machines[peer].sum for peer in living(lab, *lab.dead))} == {(2, 4)}


def test_who_owns_nothing_is_lost_without_another_attempt() -> None:
    lab = RowLab()
    lab.trains = lambda peer: SLOW_S if peer == lab.row[4] else 1.0
    lab.begin(1)
    lab.run(5)
    assert lab.effects(SumRow)
    lab.give_up([lab.row[4]], [lab.row[0]])
    lab.run(5)
    assert lab.words(RowLoss) == []


def test_row_of_which_all_that_count_are_lost_has_no_weight() -> None:
    lab = RowLab(count=3)
    lab.trains = lambda peer: 1.0 if peer == lab.row[2] else SLOW_S
    lab.begin(1)
    lab.run(SETTINGS.train_deadline_s + 1)
    lab.give_up([lab.row[2]], [lab.row[0]])
    assert [one.round for one in lab.effects(NoWeight)] == [1]


def test_plan_again_may_come_before_the_plan() -> None:
    lab = RowLab()
    lab.begin(1)
    first, slow = lab.row[0], lab.row[5]
    lab.drop = lambda sender, to, message: isinstance(message, RowPlan) and to == slow
    lab.run(2.5)
    lab.give_up([lab.row[4]], [first])
    lab.run(0.3)
    assert lab.machines[slow].sum.attempt == 1
    assert lab.effects(SumRow, of=slow) == []
    lab.drop = lambda sender, to, message: False
    lab.run(8)
    assert [one.attempt for one in lab.effects(SumRow, of=slow)] == [1]


def test_earlier_attempt_that_comes_late_changes_nothing() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(2.5)
    for lost in lab.row[4:6]:
        lab.give_up([lost], [lab.row[0]])
    lab.run(0.3)
    early = lab.words(RowLoss, to=lab.row[1])[0]
    sums = len(lab.effects(SumRow, of=lab.row[1]))
    assert [type(effect.message) for effect in lab.tell(lab.row[0], lab.row[1], early)] == [RowHeard]
    assert lab.machines[lab.row[1]].sum.attempt == 2
    assert len(lab.effects(SumRow, of=lab.row[1])) == sums


def test_member_restarted_before_the_plan_counts_with_what_it_makes_then() -> None:
    lab = RowLab()
    again = lab.row[3]
    lab.trains = lambda peer: 3.0 if peer == lab.row[1] else 1.0
    lab.begin(1)
    lab.run(1.5)
    lab.start(again, Roster.dealt(lab.row))
    lab.tell(lab.row[0], again, lab.words(RowBegin, to=again)[0])
    lab.run(10)
    done = lab.done(1)
    assert done is not None
    assert done.counted == tuple(lab.row)
    assert lab.effects(SumRow, of=again)


def test_member_restarted_after_the_plan_has_lost_what_it_made_and_the_row_goes_on_without() -> None:
    lab = RowLab()
    again = lab.row[3]
    lab.drop = lambda sender, to, message: isinstance(message, RowPlan) and to == again
    lab.begin(1)
    lab.run(2.5)
    assert lab.words(RowPlan, to=again)
    lab.start(again, Roster.dealt(lab.row))
    lab.trains = lambda peer: SLOW_S
    lab.drop = lambda sender, to, message: False
    lab.run(8)
    done = lab.done(1)
    assert done is not None
    assert done.counted == tuple(living(lab, again))
    assert lab.words(RowAsk, to=lab.row[0])


# -- the next head -----------------------------------------------------------------------------------------------


def test_next_of_the_list_is_head_when_the_head_is_given_up_and_the_row_has_no_weight() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(1.0)
    head, heir = lab.row[:2]
    lab.dead.add(head)
    lab.give_up([head], [heir])
    lab.run(5)
    assert lab.effects(TookOver) == [TookOver(1)]
    assert {(m.head, m.turn) for p, m in lab.machines.items() if p != head} == {(heir, 1)}
    assert all(lab.effects(LeftOut, of=peer) == [LeftOut(1)] for peer in living(lab, head))
    assert lab.done(1) is None
    lab.begin(2, heir)
    lab.run(10)
    done = lab.done(2)
    assert done is not None
    assert done.counted == tuple(living(lab, head))


def test_heir_of_a_head_and_of_the_next_takes_over_past_both() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(3)
    gone = lab.row[:2]
    lab.dead |= set(gone)
    lab.give_up(gone, [lab.row[2]])
    lab.run(3)
    assert lab.effects(TookOver) == [TookOver(2)]
    assert {m.head for p, m in lab.machines.items() if p not in gone} == {lab.row[2]}


def test_head_that_was_cut_off_stops_when_it_hears_of_the_next() -> None:
    lab = RowLab()
    head, heir = lab.row[:2]
    lab.begin(1)
    lab.run(0.2)
    lab.cut.add(head)
    lab.run(5)
    assert lab.machines[head].heads
    lab.give_up([head], [heir])
    lab.run(2)
    lab.begin(2, heir)
    lab.run(10)
    lab.cut.clear()
    lab.begin(2, head)  # the heads told it, and it does not know that it is none
    lab.run(10)
    assert lab.effects(Deposed, of=head) == [Deposed(1)]
    assert lab.machines[head].phase is RowPhase.OUT
    assert [peer for peer, machine in lab.machines.items() if machine.heads] == [heir]
    done = lab.done(2)
    assert done is not None
    assert done.counted == tuple(living(lab, head))


def test_two_that_take_over_at_once_are_one_in_the_end() -> None:
    lab = RowLab()
    lab.begin(1)
    lab.run(3)
    head, first, second = lab.row[:3]
    lab.cut.add(first)
    lab.dead.add(head)
    lab.give_up([head, first], [second])
    lab.give_up([head], [first])
    lab.run(1)
    assert [peer for peer, machine in lab.machines.items() if machine.heads and peer != head] == [first, second]
    lab.cut.clear()
    lab.run(5)
    assert [peer for peer, machine in lab.machines.items() if machine.heads and peer != head] == [second]
    assert lab.effects(Deposed, of=first) == [Deposed(2)]


def test_plan_of_a_head_that_is_none_any_more_is_answered_with_the_next() -> None:
    lab = RowLab()
    head, heir, other = lab.row[:3]
    lab.begin(1)
    lab.run(5)
    plan = lab.words(RowPlan, to=other)[0]
    lab.give_up([head], [heir])
    lab.run(1)
    answer = lab.tell(head, other, plan)
    assert [(tell.peer, type(tell.message), tell.signer) for tell in answer] == [(head, RowHead, heir)]
    assert lab.tell(head, other, plan) == []  # once in a while
    lab.run(REPEAT_S)
    assert len(lab.tell(head, other, plan)) == 1


def test_member_that_was_off_the_list_and_lives_is_out() -> None:
    lab = RowLab()
    gone = lab.row[3]
    lab.begin(1)
    lab.run(5)
    lab.give_up([gone], [lab.row[0]])
    lab.begin(2)
    lab.run(1)
    assert lab.effects(Out, of=gone) == [Out(2)]
    assert lab.machines[gone].phase is RowPhase.OUT


# -- lists -------------------------------------------------------------------------------------------------------


def test_list_changes_by_who_is_gone_and_who_came_and_all_have_the_same() -> None:
    lab = RowLab()
    fresh = peers(2, first=50)
    head = lab.row[0]
    for peer in fresh:
        lab.start(peer, lab.machines[head].list.roster)
    lab.dead.add(lab.row[4])
    lab.give_up([lab.row[4]], [head])
    lab.machines[head].came(fresh)
    lab.begin(1)
    lab.run(1)
    expected = (*living(lab, lab.row[4]), *fresh)
    assert {lab.machines[peer].list.row for peer in expected} == {expected}
    assert lab.machines[head].list.roster.numbers == (0, 1, 2, 3, 5, 6, 7, 8, 9, 10)
    assert lab.words(RowAsk) == []


def test_member_that_missed_a_round_asks_for_the_list() -> None:
    lab = RowLab()
    missed, head = lab.row[8], lab.row[0]
    lab.cut.add(missed)
    lab.machines[head].came(peers(1, first=50))
    lab.begin(1)
    lab.run(8)
    lab.cut.clear()
    lab.drop = lambda sender, to, message: isinstance(message, RowBegin) and message.round == 1
    lab.begin(2)
    lab.run(0.2)
    assert lab.words(RowAsk, to=head)
    lab.run(1)
    assert lab.machines[missed].list.row == (*lab.row, *peers(1, first=50))
    assert lab.machines[missed].phase is not RowPhase.LISTING


def test_numbers_of_those_who_are_gone_are_not_given_again() -> None:
    one = Roster.dealt(peers(3))
    two = one.changed([one.row[2]], peers(1, first=9))
    assert (two.row, two.numbers, two.next_number) == ((*one.row[:2], *peers(1, first=9)), (0, 1, 3), 4)
    assert two.hash != Roster.dealt(two.row).hash


@pytest.mark.parametrize(
    ("row", "numbers", "following"),
    [
        ((), (), 0),
        (peers(2), (0,), 2),
        (peers(2), (1, 0), 2),
        (peers(2), (0, 1), 1),
        ([*peers(1), *peers(1)], (0, 1), 2),
    ],
    ids=["nobody", "numbers", "order", "next", "twice"],
)
def test_list_that_cannot_be_is_refused(row: list[PeerId], numbers: tuple[int, ...], following: int) -> None:
    with pytest.raises(LocalError):
        Roster(tuple(row), numbers, following)


# -- who may say what --------------------------------------------------------------------------------------------


def ready_of(lab: RowLab, *, tokens: int = TOKENS, root: int = 7, life: int = 9, turn: int = 0) -> RowReady:
    value = CHAIN[lab.machines[lab.row[0]].round - 1]
    return RowReady(
        term=value.next_term,
        round=value.next_round,
        base=value.hash,
        turn=turn,
        tokens=tokens,
        upload=10,
        download=10,
        root=bytes([root]) * 32,
        life=bytes([life]) * 32,
    )


def plan_of(
    lab: RowLab, places: Collection[int], *, base: bytes = CHAIN[0].hash, listed: bytes | None = None
) -> RowPlan:
    terms = tuple(RowTerm(place, TOKENS, 10, 10) for place in places)
    listed = lab.machines[lab.row[0]].list.roster.hash if listed is None else listed
    return RowPlan(term=CHAIN[0].term, round=1, base=base, turn=0, list=listed, terms=terms, roots=bytes(32))


def loss_of(attempt: int, gone: tuple[int, ...]) -> RowLoss:
    return RowLoss(term=CHAIN[0].term, round=1, base=CHAIN[0].hash, turn=0, attempt=attempt, gone=gone)


def trained() -> RowLab:
    """All are ready but one, for whom the row waits."""
    lab = RowLab()
    lab.trains = lambda peer: SLOW_S if peer == lab.row[8] else 1.0
    lab.begin(1)
    lab.run(1.5)
    return lab


def test_only_the_head_plans_begins_and_goes_on_without_somebody() -> None:
    lab = trained()
    other, me = lab.row[2], lab.row[3]
    begin = lab.words(RowBegin, to=me)[0]
    for word in (plan_of(lab, range(8)), loss_of(1, (3,)), begin):
        with pytest.raises(RemoteError, match="not the head") as refused:
            lab.tell(other, me, word)
        assert refused.value.peer == other
    assert lab.machines[me].phase is RowPhase.READY


def test_only_who_is_next_by_its_number_takes_over() -> None:
    lab = trained()
    word = RowHead(term=CHAIN[0].term, round=1, base=CHAIN[0].hash, turn=2, gone=())
    with pytest.raises(RemoteError, match="another's turn"):
        lab.tell(lab.row[4], lab.row[3], word)
    lab.tell(lab.row[2], lab.row[3], word)
    assert lab.machines[lab.row[3]].head == lab.row[2]
    with pytest.raises(RemoteError, match="not the head"):
        lab.tell(lab.row[4], lab.row[3], word)


def test_list_that_its_sender_is_not_first_of_is_refused_and_changes_nothing() -> None:
    lab = trained()
    me, liar = lab.row[3], lab.row[2]
    roster = Roster.dealt(lab.row)
    value = CHAIN[1]
    begin = RowBegin(term=value.next_term, round=2, base=value.hash, turn=2, list=roster.hash)
    begin = in_full(begin, roster)
    with pytest.raises(RemoteError, match="not the first"):
        lab.tell(liar, me, begin)
    with pytest.raises(RemoteError, match="another list"):
        lab.tell(lab.row[0], me, msgspec.structs.replace(begin, turn=0, list=bytes(32)))
    assert (lab.machines[me].round, lab.machines[me].head) == (1, lab.row[0])


def test_who_is_no_head_is_told_nothing_as_head() -> None:
    lab = trained()
    with pytest.raises(RemoteError, match="head of a row"):
        lab.tell(lab.row[2], lab.row[3], ready_of(lab))


def test_second_contribution_or_plan_or_beginning_is_refused() -> None:
    lab = trained()
    head, me = lab.row[0], lab.row[3]
    lab.tell(lab.row[8], head, ready_of(lab))
    lab.tell(lab.row[8], head, ready_of(lab))
    with pytest.raises(RemoteError, match="two contributions"):
        lab.tell(lab.row[8], head, ready_of(lab, root=8))
    lab.run(0.5)
    assert lab.effects(SumRow, of=me)
    with pytest.raises(RemoteError, match="two plans"):
        lab.tell(head, me, plan_of(lab, range(7)))
    begin = lab.words(RowBegin, to=me)[0]
    with pytest.raises(RemoteError, match="two beginnings"):
        lab.tell(head, me, RowBegin(term=begin.term, round=1, base=begin.base, turn=0, list=bytes(32)))


def test_plan_for_another_list_base_or_weight_is_refused() -> None:
    lab = trained()
    head, me = lab.row[0], lab.row[3]
    for wrong, why in (
        (plan_of(lab, range(8), listed=bytes(32)), "another list"),
        (plan_of(lab, range(10)), "another list"),
        (plan_of(lab, range(8), base=bytes(32)), "another base"),
    ):
        with pytest.raises(RemoteError, match=why):
            lab.tell(head, me, wrong)
    heavy = RowPlan(
        term=CHAIN[0].term, round=1, base=CHAIN[0].hash, turn=0, list=lab.machines[me].list.roster.hash,
        terms=(RowTerm(3, TOKENS + 1, 10, 10),), roots=bytes(32),
    )  # fmt: skip
    with pytest.raises(RemoteError, match="weighs"):
        lab.tell(head, me, heavy)


def test_attempt_that_brings_somebody_back_or_says_two_things_is_refused() -> None:
    lab = trained()
    head, me = lab.row[0], lab.row[3]
    lab.tell(head, me, loss_of(2, (4, 5)))
    for wrong in (loss_of(3, (4,)), loss_of(3, (4, 5)), loss_of(2, (4, 6)), loss_of(3, (4, 5, 900))):
        with pytest.raises(RemoteError, match="plan again"):
            lab.tell(head, me, wrong)
    assert lab.machines[me].sum.lost == (4, 5)


def test_messages_with_fields_that_do_not_fit_are_none() -> None:
    with pytest.raises(ValueError, match="out of order"):
        RowPlan(term=CHAIN[0].term, round=1, base=bytes(32), turn=0, list=bytes(32), roots=bytes(32),
                terms=(RowTerm(2, 1, 1, 1), RowTerm(1, 1, 1, 1)))  # fmt: skip
    with pytest.raises(ValueError, match="out of order"):
        loss_of(1, (2, 2))
    with pytest.raises(ValueError, match="another round"):
        RowBegin(term=CHAIN[0].term, round=1, base=CHAIN[0].hash, turn=0, list=bytes(32), entry=certificate(CHAIN[1]))


def test_strangers_and_what_is_stale_move_nothing() -> None:
    lab = RowLab()
    for round in (1, 2):
        lab.begin(round)
        lab.run(10)
    head, me = lab.row[0], lab.row[3]
    old = [message for message in (*lab.words(RowPlan, to=me), *lab.words(RowBegin, to=me)) if message.round == 1]
    before = (lab.machines[me].stamp, lab.machines[me].phase)
    for word in old:
        lab.tell(head, me, word)
    stranger = peers(1, first=99)[0]
    for word in (*old, plan_of(lab, range(3)), ready_of(lab)):
        assert lab.tell(stranger, me, word) == []
    assert (lab.machines[me].stamp, lab.machines[me].phase) == before


def test_round_begins_at_its_head_alone_and_once() -> None:
    lab = RowLab()
    with pytest.raises(LocalError):
        lab.begin(1, lab.row[1])
    lab.begin(1)
    with pytest.raises(LocalError):
        lab.begin(1)


# -- nothing waits for ever --------------------------------------------------------------------------------------


def test_every_wait_has_an_end() -> None:
    """Of a member that hears nothing any more, phase by phase; and of a head whose sum does not end."""
    lab = RowLab()
    lab.run(CERTIFICATE_DEADLINE_S + 0.1)
    assert {effect.what for effect in lab.effects(Overdue)} == {"certificate"}
    assert len(lab.effects(Overdue)) == 9
    for upto, what, wait_s in (
        (1.5, "plan", SETTINGS.train_deadline_s + SETTINGS.grace_s + LATE_S),
        (2.5, "sum", 2.5 + SETTINGS.sum_deadline_s + LATE_S),
    ):
        lab = RowLab(train_s=(1.6, 2.0))
        lab.begin(1)
        lab.run(upto)
        lab.cut |= set(lab.row)
        lab.run(wait_s - upto + 1)
        others = living(lab, lab.row[0])
        assert {(peer, effect.what) for _, peer, effect in lab.told if isinstance(effect, Overdue)} == {
            (peer, what) for peer in others
        }
        assert {lab.machines[peer].phase for peer in others} == {RowPhase.OVER}
        lab.run(SETTINGS.sum_deadline_s)
        assert [one.round for one in lab.effects(NoWeight, of=lab.row[0])] == [1]
        assert lab.machines[lab.row[0]].phase is RowPhase.OVER


def test_member_that_is_never_told_the_list_gives_the_round_up() -> None:
    lab = RowLab()
    me, head, value = lab.row[3], lab.row[0], CHAIN[4]
    lab.drop = lambda sender, to, message: isinstance(message, RowAsk)
    begin = RowBegin(term=value.next_term, round=5, base=value.hash, turn=0, list=bytes(32))
    lab.tell(head, me, begin)
    assert lab.machines[me].phase is RowPhase.LISTING
    lab.run(SETTINGS.train_deadline_s + SETTINGS.grace_s + LATE_S + 0.1)
    assert lab.effects(Overdue, of=me) == [Overdue("list")]


def test_deadlines_of_a_real_row_are_what_the_protocol_says() -> None:
    settings = RowSettings()
    assert (settings.grace_s, settings.train_deadline_s, settings.sum_deadline_s) == (
        ROW_GRACE_S,
        TRAIN_DEADLINE_S,
        SUM_DEADLINE_S,
    )


# -- what it costs -----------------------------------------------------------------------------------------------


def test_words_about_a_row_are_short_and_what_is_kept_of_others_is_bounded() -> None:
    lab = RowLab(count=66)
    lab.begin(1)
    lab.run(10)
    sizes = {type(message).__name__: len(canonical(message)) for _, _, message in lab.said}
    assert sizes["RowPlan"] < 1200
    assert max(size for name, size in sizes.items() if name != "RowPlan") < 300
    machine = lab.machines[lab.row[0]]
    crowd = peers(3 * ROW_LIMIT, first=1000)
    machine.came(crowd)
    lab.begin(2)
    old = lab.words(RowPlan)[0]
    for peer in crowd[ROW_LIMIT : 3 * ROW_LIMIT]:
        machine.list.become(machine.list.roster, [peer])
        machine.receive(peer, old, lab.now)
    machine.came(crowd)
    assert len(machine.list) == ROW_LIMIT
    assert len(machine.list._came) <= ROW_LIMIT
    assert len(machine.list._former) == ROW_LIMIT
    assert ROW_LIMIT < len(machine._answered) <= 2 * ROW_LIMIT
    assert len(machine._posts) <= FAN_OUT
