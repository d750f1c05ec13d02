"""Rows under random losses, deaths, cuts and newcomers: at the end there is one head, one plan, and nobody waits."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal.lab.rows.row_effects import NoWeight, RowDone, SumRow, Tell
from shoal.lab.rows.row_messages import RowReady
from shoal.lab.rows.row_posts import POST_LIMIT_S
from shoal.lab.rows.row_round import CERTIFICATE_DEADLINE_S, LATE_S, RowPhase
from shoal.lab.rows.two_level import row_owners
from shoal.protocol.identity import PeerId
from tests.lab.rows.row_lab import SETTINGS, SUM_S, TOKENS, RowLab, peers

CHUNKS = 64
FOUND_S = (2.0, 6.0)
"""From a peer's silence to the verdict."""
ROUND_LIMIT_S = 20.0
PLAN_LIMIT_S = SETTINGS.train_deadline_s + SETTINGS.grace_s + LATE_S
LONGEST_S = {
    RowPhase.LISTING: PLAN_LIMIT_S,
    RowPhase.TRAINING: PLAN_LIMIT_S,
    RowPhase.READY: PLAN_LIMIT_S,
    RowPhase.OVER: CERTIFICATE_DEADLINE_S,
}
STEP_S = 0.5


class Course:
    """Rounds of one row, as the heads would have them, while things happen to it."""

    def __init__(self, seed: int, count: int, loss: float) -> None:
        self.rng = random.Random(seed)
        self.lab = RowLab(count=count, seed=seed, loss=loss, train_s=(1.0, 6.0))
        self.round = 0
        self.began_at = 0.0
        self.listed = list(self.lab.row)
        """Who is on the row's list by its verdicts, in its order: the certified membership."""
        self.newcomers = 0
        self.begun: dict[PeerId, int] = {}
        """Which round a head may have begun before it was restarted."""
        self.since: dict[PeerId, tuple[tuple[object, ...], float]] = {}

    def go_on(self) -> None:
        """Let half a second pass; whoever believes it is head begins the round that the heads are in."""
        lab = self.lab
        if self.round == 0 or self._is_over() or lab.now - self.began_at > ROUND_LIMIT_S:
            self.round, self.began_at = self.round + 1, lab.now
        for peer, machine in list(lab.machines.items()):
            done = max(machine.round, self.begun.get(peer, 0))
            if machine.heads and done < self.round and peer not in lab.dead | lab.cut:
                if peer == self.listed[0]:
                    machine.came(self.listed)
                lab.begin(self.round, peer)
        lab.run(STEP_S)
        self.look()

    def _is_over(self) -> bool:
        head = self.listed[0]
        for at, peer, effect in reversed(self.lab.told):
            if at < self.began_at:
                return False
            if peer == head and isinstance(effect, RowDone | NoWeight) and effect.round == self.round:
                return True
        return False

    def strike(self) -> None:
        """Something happens to somebody."""
        lab, rng = self.lab, self.rng
        able = [peer for peer in self.listed if peer not in lab.dead | lab.cut]
        victim = able[0] if rng.random() < 0.3 else rng.choice(able)
        chance = rng.random()
        if len(able) > 4 and chance < 0.4:
            lab.dead.add(victim)
            lab.at(lab.now + rng.uniform(*FOUND_S), self._off, victim)
        elif len(able) > 4 and chance < 0.7:
            lab.cut.add(victim)
            if rng.random() < 0.7:
                lab.at(lab.now + rng.uniform(*FOUND_S), self._off, victim)
            lab.at(lab.now + rng.uniform(1.0, 25.0), lab.cut.discard, victim)
        elif chance < 0.85:
            fresh = peers(1, first=500 + self.newcomers)[0]
            self.newcomers += 1
            lab.start(fresh, lab.machines[able[0]].list.roster)
            self.listed.append(fresh)
        else:
            lab.start(victim, lab.machines[victim].list.roster)
            self.begun[victim] = self.round

    def _off(self, peer: PeerId) -> None:
        """The row's verdict, which the first two of those that are left hear, each when it does."""
        if peer in self.listed:
            self.listed.remove(peer)
        for judge in self.listed[:2]:
            self.lab.at(self.lab.now + self.rng.uniform(0.0, 0.6), self._judged, judge)

    def _judged(self, judge: PeerId) -> None:
        machine = self.lab.machines[judge]
        if judge not in self.lab.dead and judge in self.listed:
            self.lab.give_up([peer for peer in machine.list.row if peer not in self.listed], [judge])

    def look(self) -> None:
        """Nobody is in one phase of one round for longer than that may last."""
        for peer, machine in self.lab.machines.items():
            here = (machine.phase, machine.stamp, machine.sum.attempt)
            if peer in self.lab.dead or machine.phase is RowPhase.OUT:
                continue
            if self.since.get(peer, (None, 0.0))[0] != here:
                self.since[peer] = (here, self.lab.now)
            most_s = LONGEST_S.get(machine.phase, SETTINGS.sum_deadline_s + LATE_S)
            waited_s = self.lab.now - self.since[peer][1]
            if machine.phase is not RowPhase.OVER:
                assert waited_s <= most_s + 2 * STEP_S, (peer, machine.phase, waited_s)

    def settle(self) -> None:
        """Nothing more happens, and nothing is lost; until whatever was said before is over, and a round after."""
        lab = self.lab
        lab.run(FOUND_S[1] + 1.0)
        lab.loss = 0.0
        until, heals_at = lab.now + POST_LIMIT_S + 25.0, lab.now
        while lab.now < until:
            lab.cut = {peer for peer in lab.cut if lab.now < heals_at + 25.0}
            self._judged(self.listed[0])
            self._judged(self.listed[1])
            self.go_on()
        lab.trains = lambda peer: 1.0
        self.round, self.began_at = self.round + 1, lab.now
        lab.begin(self.round, self.listed[0])
        lab.run(SETTINGS.grace_s + 2 * SUM_S + 2.0)


def check_sums(lab: RowLab) -> None:
    """Each attempt had one plan at all (the lab saw to it), of which every chunk has one owner that is not gone."""
    for (_, attempt), (plan, gone, _begun) in lab.sums.items():
        assert bool(gone) == bool(attempt)
        rates = [(term.upload, term.download) for term in plan.terms]
        lost = [at for at, term in enumerate(plan.terms) if term.place in gone]
        if len(lost) < len(rates):
            owners = row_owners(rates, CHUNKS, gone=lost)
            assert len(owners) == CHUNKS
            assert not set(owners) & set(lost)


def check_counted(lab: RowLab) -> None:
    """Who is counted has said that it is ready, once, and with as many tokens."""
    ready = {(peer, m.round): m.tokens for peer, _, m in lab.said if isinstance(m, RowReady) and m.tokens}
    for _, head, effect in lab.told:
        if isinstance(effect, RowDone):
            assert max(Counter(effect.counted).values()) == 1
            assert all((peer, effect.round) in ready for peer in effect.counted if peer != head)
            assert effect.tokens == TOKENS * len(effect.counted)


@pytest.mark.parametrize("seed", range(60))
def test_row_ends_with_one_head_and_one_plan_whatever_happened_to_it(seed: int) -> None:
    rng = random.Random(f"row {seed}")
    course = Course(seed, rng.randrange(5, 24), rng.choice((0.0, 0.02, 0.1, 0.3)))
    lab = course.lab
    for _ in range(rng.randrange(1, 9)):
        for _ in range(rng.randrange(1, 16)):
            course.go_on()
        course.strike()
    course.settle()
    check_sums(lab)
    check_counted(lab)
    able = [peer for peer in course.listed if peer not in lab.dead]
    heads = [peer for peer, machine in lab.machines.items() if machine.heads and peer not in lab.dead]
    assert heads == [course.listed[0]]
    head = lab.machines[heads[0]]
    here = [peer for peer in able if lab.machines[peer].phase is not RowPhase.OUT]
    assert {lab.machines[peer].stamp for peer in here} == {head.stamp}
    assert {lab.machines[peer].list.row for peer in here} == {tuple(here)}
    assert {lab.machines[peer].phase for peer in here} == {RowPhase.OVER}
    done = lab.done(course.round)
    assert done is not None
    assert set(done.counted) == set(here)
    plans = [e for _, peer, e in lab.told if isinstance(e, SumRow) and e.plan.round == course.round and peer in here]
    assert len({(effect.plan, effect.gone) for effect in plans}) == 1
    tells = [e for at, peer, e in lab.told if isinstance(e, Tell) and at > lab.now - 1.0 and peer in here]
    assert len(tells) == 0
