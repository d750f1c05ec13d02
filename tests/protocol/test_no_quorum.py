"""NoQuorum: told once that there is no quorum, trained on all the while, and a contribution where nobody makes one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from shoal.protocol.identity import PeerId
from shoal.protocol.no_quorum import ALONE_S, DIALLING_S, IDLE_S, Advice, NoQuorum, no_quorum
from shoal.protocol.round import Phase, RoundMachine


@dataclass
class Membership:
    is_prepared: bool = False
    abstains: bool = False


@dataclass
class Round:
    """The part of a round machine that solitude looks at."""

    quorum: bool = True
    busy: bool = True
    phase: Phase = Phase.PLAN
    agreement: Membership = field(default_factory=Membership)

    def has_quorum(self) -> bool:
        return self.quorum

    def nobody_trains(self) -> bool:
        return not self.busy


def test_user_reads_who_is_missing_and_of_nothing_that_takes_a_key_that_most_have_not() -> None:
    members = [PeerId(f"12D3{number}") for number in range(63)]
    help = "if some are gone for good, `shoal status` says what there is"
    assert no_quorum(members[:2], revoked=(), trains=True, cut_off=False) == (
        f"no quorum, training on locally; start these members again: 12D30, 12D31; {help}"
    )
    told = no_quorum(members, revoked=(), trains=False, cut_off=False)
    waiting = "no quorum, waiting, and training nothing until there is one; start these members again: 12D30, 12D31, "
    assert told.startswith(waiting)
    assert told.endswith(f"12D35 and 57 more; {help}")
    assert no_quorum(members, revoked=members[:1], trains=True, cut_off=True) == (
        "no quorum, training on locally: this machine has no network, and the others may be well"
    )


def test_who_was_revoked_is_not_to_be_started_again_but_forgotten() -> None:
    gone, lost = PeerId("12D3gone"), PeerId("12D3lost")
    forget = "revoked, and still counted; to go on without: `shoal rebase --forget 12D3gone` at the node with the "
    only = no_quorum([gone], revoked=[gone], trains=True, cut_off=False)
    assert only == f"no quorum, training on locally; {forget}authority's key"
    both = no_quorum([gone, lost], revoked=[gone], trains=True, cut_off=False)
    assert both.startswith(f"{only}; start these members again: 12D3lost; if some")


def advise(
    alone: NoQuorum,
    round: Round,
    now: float,
    *,
    contributed: bool = False,
    may_train: bool = True,
    resting: bool = True,
    cut_off: bool = False,
) -> Advice:
    machine = cast(RoundMachine, round)
    return alone.advise(machine, now, contributed=contributed, may_train=may_train, resting=resting, cut_off=cut_off)


def test_solitude_says_once_that_there_is_no_quorum_and_again_after_there_was_one() -> None:
    alone, round = NoQuorum(), Round(quorum=False)
    said = [advise(alone, round, now).say_no_quorum for now in (0.0, ALONE_S / 2, ALONE_S, ALONE_S + 1)]
    assert said == [False, False, True, False]
    assert alone.without_quorum
    round.quorum = True
    assert not advise(alone, round, 10.0).say_no_quorum
    assert not alone.without_quorum
    round.quorum = False
    assert [advise(alone, round, now).say_no_quorum for now in (11.0, 11.0 + ALONE_S)] == [False, True]


def test_whom_to_start_is_said_once_the_others_had_time_to_dial_after_links_returned() -> None:
    def said(alone: NoQuorum, now: float, *, cut_off: bool = False) -> bool:
        return advise(alone, Round(quorum=False), now, cut_off=cut_off).say_no_quorum

    back = NoQuorum()
    back.links_return(100.0)
    assert [said(back, now) for now in (100.5, 100.5 + ALONE_S, 109.9, 110.0, 111.0)] == [False] * 3 + [True, False]
    assert back.without_quorum
    flapping = NoQuorum()
    assert not said(flapping, 100.0)
    for now in (105.0, 109.0):
        flapping.links_return(now)
        assert not said(flapping, now)
        assert flapping.without_quorum, "it trains on meanwhile"
    flapping.links_return(109.9)
    assert said(flapping, 100.0 + DIALLING_S), "links that go on coming put it off no further"
    away = NoQuorum()
    away.links_return(100.0)
    assert [said(away, now, cut_off=True) for now in (100.0, 100.0 + ALONE_S)] == [False, True]
    quorate = NoQuorum()
    quorate.links_return(100.0)
    assert not said(quorate, 100.0)
    assert not said(quorate, 105.0)
    assert not advise(quorate, Round(), 106.0).say_no_quorum
    assert [said(quorate, now) for now in (111.0, 111.0 + ALONE_S)] == [False, True]


def test_solitude_trains_on_whenever_the_trainer_rests_and_only_after_a_contribution() -> None:
    alone, round = NoQuorum(), Round(quorum=False)
    advise(alone, round, 0.0)
    assert not advise(alone, round, ALONE_S).train_on
    assert not advise(alone, round, ALONE_S, contributed=True, may_train=False).train_on
    for resting in (True, False, True, True):
        assert advise(alone, round, ALONE_S, contributed=True, resting=resting).train_on is resting
    round.quorum = True
    assert not advise(alone, round, ALONE_S, contributed=True).train_on


def test_solitude_contributes_where_nobody_does_but_never_twice_or_while_others_train() -> None:
    alone, round = NoQuorum(), Round(busy=False)
    alone.begin_round(0.0)
    wanted = [advise(alone, round, now).contribute_after_all for now in (0.0, IDLE_S - 0.1, IDLE_S, IDLE_S + 0.1)]
    assert wanted == [False, False, True, False]
    for other in (Round(busy=True), Round(busy=False, phase=Phase.REDUCE)):
        advise(alone, other, 100.0)
        assert not advise(alone, other, 100.0 + IDLE_S).contribute_after_all
    assert not advise(alone, round, 200.0, contributed=True).contribute_after_all
    assert not advise(alone, round, 200.0, may_train=False).contribute_after_all


@pytest.mark.parametrize("held_up_by", ["is_prepared", "abstains"])
def test_solitude_contributes_to_no_round_that_is_decided_without_it(held_up_by: str) -> None:
    alone, bound = NoQuorum(), Round(busy=False, agreement=Membership(**{held_up_by: True}))
    alone.begin_round(0.0)
    assert not any(advise(alone, bound, now).contribute_after_all for now in (0.0, IDLE_S, 2 * IDLE_S))
    bound.agreement = Membership()
    assert [advise(alone, bound, (2 + late) * IDLE_S).contribute_after_all for late in (0.5, 1)] == [False, True]
