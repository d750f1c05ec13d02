"""One member's part in the rounds of its row, head or not: who is told, who is ready, who counts, who heads it next.

    phase     waits for                            at most                          then
    OVER      the next RowBegin                    `CERTIFICATE_DEADLINE_S`         overdue: asks others for the chain
    LISTING   the list in full                     as for the plan                  overdue, left out
    TRAINING  this node's own contribution         as for the plan                  as READY
    READY     the head's RowPlan                   training's deadline + grace      overdue, left out
    SUMMING   the sum; a RowLoss begins it again   the sum's deadline               overdue; a head has no weight
    OUT       nothing: the row is without it

    head      ── RowBegin ─► its row, a tree             RowPlan ─► all        RowLoss ─► who sums
    member    ── RowBegin ─► those below   RowReady ─► head      sum ═► head      (sum again)      RowDone, the heads

*The tree.* The list, its head first, is a tree of `FAN_OUT`: whoever gets the beginning passes it on to those below as
it came, and past those that are gone, or have not answered `SILENT_TRIES` times. All else is between head and member.

*Losses.* Nothing is said once: see `row_posts`. Words of an earlier round or head are answered with the newest of this
one; words of a round whose beginning was not heard make it ask for that.

*Heads.* The head is the first of the list. If the row's verdict is that it is gone, the next that is not is head. The
turn is the head's number on the list, so no two are head of one turn; of two heads the one of the lower turn stops as
soon as it hears of the other. The row has no weight in the round in which that happens.

Who lies can take a row's head by claiming a turn ahead, and its list by naming another: the fault model is crash, loss
and partition, as everywhere (docs/agreement.md). Whether contributions are what their roots say is for who sums.

Sans-IO: `(message | verdict | tick, now)` in, effects out. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Final

from shoal.lab.rows.row_effects import (
    Begun,
    Deposed,
    LeftOut,
    NoWeight,
    Out,
    Overdue,
    RowDone,
    RowEffect,
    SumRow,
    Tell,
    TookOver,
)
from shoal.lab.rows.row_head import HeadDuty, RowSettings
from shoal.lab.rows.row_list import Roster, RowList, below, in_full, whole
from shoal.lab.rows.row_messages import (
    ROW_LIMIT,
    RowAsk,
    RowBegin,
    RowHead,
    RowHeard,
    RowLoss,
    RowPlan,
    RowReady,
    RowSaid,
    Stamp,
)
from shoal.lab.rows.row_plan import FollowedPlan
from shoal.lab.rows.row_posts import REPEAT_S, Posts, receipt
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Entry, Term, Value

SILENT_TRIES: Final = 2
"""After so many words without an answer those below a member are told past it."""
LATE_S: Final = 10.0
"""Beyond the head's deadline, a member waits for its word."""
CERTIFICATE_DEADLINE_S: Final = 120.0
"""After its part in a round a member waits so long for the next to begin."""


class RowPhase(StrEnum):
    """Phase of a member in its row's round."""

    OVER = "waiting for a round"
    LISTING = "asking for the list"
    TRAINING = "training"
    READY = "ready"
    SUMMING = "summing"
    OUT = "out of the row"


class RowRound:
    """One member of one row, round after round.

    roster: the list as it is known when this member starts, its head first; a newcomer is not on it yet. life: drawn
    when the process starts. upload, download: bytes/s, 0 where unknown.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        roster: Roster,
        life: bytes,
        now: float,
        upload: int = 0,
        download: int = 0,
        settings: RowSettings | None = None,
    ) -> None:
        self.me = me
        self.list = RowList(me, roster)
        self.head, self.turn = roster.row[0], roster.numbers[0]
        self.term = Term()
        self.round = 0
        self.phase = RowPhase.OVER
        self.sum = FollowedPlan(self.head)
        self.next_at = now
        """Nothing is due before."""
        self._settings = settings or RowSettings()
        self._life = life
        self._rates = (upload, download)
        self._base = NO_HASH
        self._word: tuple[PeerId, RowBegin | RowHead] | None = None
        self._made: RowReady | None = None
        self._duty: HeadDuty | None = None
        self._posts = Posts()
        self._passed: set[PeerId] = set()
        self._answered: dict[PeerId, float] = {}
        self._rest(now)
        self._done([])

    @property
    def stamp(self) -> Stamp:
        """Stamp that messages are compared with."""
        return self.turn, self.term, self.round

    @property
    def heads(self) -> bool:
        """True if this node is its row's head, as far as it knows."""
        return self.head == self.me and self.phase is not RowPhase.OUT

    # -- this node ---------------------------------------------------------------------------------------------

    def begin(self, value: Value, entry: Entry | None, now: float) -> list[RowEffect]:
        """The round after `value`, which `entry` certifies, begins; not again after a restart. LocalError: no head."""
        term, round = value.next_term, value.next_round
        if not self.heads or (term, round) <= (self.term, self.round):
            raise LocalError(f"round {round} of a row begins at who does not head it, or has begun it")
        roster, gone, came = self.list.next()
        begin = RowBegin(
            term=term, round=round, base=value.hash, turn=self.turn, list=roster.hash, gone=gone, came=came, entry=entry
        )
        self._follow(begin, self.me)
        effects = [*self._accept(begin, roster, now), *(Tell(peer, begin, self.me) for peer in gone)]
        self._duty = HeadDuty(self._settings, begin, roster.row, now)
        return self._done(effects)

    def trained(self, tokens: int, root: bytes, now: float) -> list[RowEffect]:
        """This node's contribution is fixed. It comes too late for this round where the row closed without it."""
        return self._done(self._announce(tokens, root, now)) if self.phase is RowPhase.TRAINING else []

    def measured(self, upload: int, download: int) -> None:
        """Note the rates at which the last sums moved, bytes/s."""
        self._rates = (upload, download)

    def summed(self, stamp: Stamp, attempt: int, now: float) -> list[RowEffect]:
        """This node has done its part under this plan; the head: it has the row's mean."""
        if self.phase is not RowPhase.SUMMING or (stamp, attempt) != (self.stamp, self.sum.attempt):
            return []
        duty, effects = self._duty, list[RowEffect]()
        if duty is not None:
            duty.over = True
            terms = duty.counted()
            counted = tuple(self.list.row[term.place] for term in terms)
            effects = [RowDone(self.round, counted, sum(term.tokens for term in terms))]
        self._rest(now)
        return self._done(effects)

    def gave_up(self, peers: Iterable[PeerId], now: float) -> list[RowEffect]:
        """The row's verdict: they are gone, until they come again as newcomers."""
        fresh = self.list.give_up(peers)
        if self.phase is RowPhase.OUT or not fresh:
            return []
        effects: list[RowEffect] = []
        for peer in fresh:
            owed = self._posts.owes(peer, RowBegin)
            self._posts.forget(peer)
            effects += self._past(peer, now) if owed else []
        if self.head in self.list.gone:
            effects += self._take_over(now) if next(self.list.living(), None) == self.me else []
        elif self._duty is not None:
            self._duty.gone.update(fresh)
            effects += [*self._close(now), *self._lose(fresh, now)]
        return self._done(effects)

    def stalled(self, peers: Iterable[PeerId], now: float) -> list[RowEffect]:
        """The sum finds that these move nothing: a head goes on without them in this round. They stay on the list."""
        if self._duty is None or self.phase is not RowPhase.SUMMING:
            return []
        return self._done(self._lose([peer for peer in peers if peer != self.me], now))

    def came(self, peers: Iterable[PeerId]) -> None:
        """Newcomers to the row, in the order in which they are certified: on the list when a round begins."""
        self.list.come(peers)

    def tick(self, now: float) -> list[RowEffect]:
        """Time passes."""
        if now < self.next_at:
            return []
        effects: list[RowEffect] = []
        for tell, tries in self._posts.due(now):
            effects.append(tell)
            if isinstance(tell.message, RowBegin) and tries >= SILENT_TRIES:
                effects += self._past(tell.peer, now)
        if self._duty is not None and now >= self._duty.due_at:
            effects += self._close(now) if self._duty.plan is None else self._no_weight("its sum took too long", now)
        if now >= self._deadline:
            effects += self._overdue(now)
        return self._done(effects)

    # -- others ------------------------------------------------------------------------------------------------

    def receive(self, signer: PeerId, message: RowSaid, now: float, *, via: PeerId | None = None) -> list[RowEffect]:
        """A message that `signer` sealed came, from `via` if that passed it on.

        Raises RemoteError for what its signer may not say.
        """
        via = signer if via is None else via
        if signer == self.me or self.phase is RowPhase.OUT:
            return []
        if isinstance(message, RowHeard):
            self._posts.heard(signer, message)
            return self._done([])
        if not self.list.knows(signer):
            return []
        if isinstance(message, RowBegin):
            return self._done(self._hear_begin(signer, message, now, via))
        if isinstance(message, RowHead):
            return self._done(self._hear_head(signer, message, now, via))
        if message.stamp < self.stamp:
            return self._done(self._answer(signer, now))
        if message.stamp > self.stamp:
            return self._done(self._ask(signer, message, now) if isinstance(message, RowPlan | RowLoss) else [])
        return self._done(self._hear(signer, message, now))

    def _hear(self, signer: PeerId, message: RowPlan | RowLoss | RowReady | RowAsk, now: float) -> list[RowEffect]:
        """Handle a message of this very round."""
        if message.base != self._base:
            raise RemoteError(f"round {message.round} of a row on another base", peer=signer)
        if isinstance(message, RowPlan | RowLoss):
            self._check_head(signer, "plans")
            if self.phase is RowPhase.LISTING:
                return []
            heard = self._hear_plan(message, now) if isinstance(message, RowPlan) else self._hear_loss(message, now)
            return [receipt(signer, message, self.me), *heard]
        if not self.heads:
            raise RemoteError("told as head of a row who is none", peer=signer)
        if isinstance(message, RowAsk):
            return self._tell_list(signer)
        return self._hear_ready(signer, message, now)

    # -- a round begins ----------------------------------------------------------------------------------------

    def _hear_begin(self, signer: PeerId, begin: RowBegin, now: float, via: PeerId) -> list[RowEffect]:
        if begin.turn < self.turn:
            return [receipt(via, begin, self.me), *self._answer(signer, now)]
        if begin.turn == self.turn:
            self._check_head(signer, "begins a round")
            if begin.stamp < self.stamp:
                return [receipt(via, begin, self.me)]
        roster = whole(begin, signer) or self.list.after(begin)
        if roster is not None and (roster.row[0], roster.numbers[0]) != (signer, begin.turn):
            raise RemoteError("begins a round of a row of which it is not the first", peer=signer)
        if begin.stamp > self.stamp:
            effects = [*self._left_out(summing=False), *self._deposed_by(begin), receipt(via, begin, self.me)]
            self._follow(begin, signer)
            if roster is not None:
                return effects + self._accept(begin, roster, now)
            self.phase, self._deadline = RowPhase.LISTING, now + self._plan_s
            return effects + self._ask(signer, begin, now)
        known = self._word[1] if self._word is not None else None
        if begin.base != self._base or (isinstance(known, RowBegin) and known.list != begin.list):
            raise RemoteError("two beginnings of one round of a row", peer=signer)
        effects = [receipt(via, begin, self.me)]
        if self.phase is RowPhase.LISTING and roster is not None:
            self._posts.settle(signer, RowAsk)
            effects += self._accept(begin, roster, now)
        return effects

    def _follow(self, message: RowBegin | RowHead, head: PeerId) -> None:
        """Follow a message as the newest from here on."""
        self.turn, self.term, self.round = message.stamp
        self._base, self.head, self._word = message.base, head, (head, message)
        self.sum = FollowedPlan(head)
        self._made = self._duty = None
        self._passed.clear()
        self._posts.clear()

    def _accept(self, begin: RowBegin, roster: Roster, now: float) -> list[RowEffect]:
        """The list is known: pass the beginning on, and train."""
        self.list.become(roster, begin.gone)
        if self.me not in self.list:
            return self._leave_row()
        self.phase, self._deadline = RowPhase.TRAINING, now + self._plan_s
        fresh = self.me in begin.came
        effects: list[RowEffect] = [Begun(begin, trains=not fresh), *self._pass_on(self.list.place(self.me), now)]
        return effects + (self._announce(0, NO_HASH, now) if fresh else [])

    def _pass_on(self, place: int, now: float) -> list[RowEffect]:
        """Pass the beginning on to those below a place of the tree, and past those that are gone."""
        assert self._word is not None
        assert isinstance(self._word[1], RowBegin)
        signer, begin = self._word
        effects: list[RowEffect] = []
        for lower in below(place, len(self.list)):
            peer = self.list.row[lower]
            if peer in self.list.gone:
                effects += self._pass_on(lower, now)
            elif peer != self.me:
                effects.append(self._posts.post(peer, begin, signer, now))
        return effects

    def _past(self, peer: PeerId, now: float) -> list[RowEffect]:
        """Tell those below who does not answer, once."""
        if peer in self._passed or peer not in self.list or not isinstance(self._word and self._word[1], RowBegin):
            return []
        self._passed.add(peer)
        return self._pass_on(self.list.place(peer), now)

    def _announce(self, tokens: int, root: bytes, now: float) -> list[RowEffect]:
        """Tell the head that this node is ready."""
        self.phase = RowPhase.READY
        self._made = ready = RowReady(
            term=self.term,
            round=self.round,
            base=self._base,
            turn=self.turn,
            tokens=tokens,
            upload=self._rates[0],
            download=self._rates[1],
            root=root,
            life=self._life,
        )
        if self._duty is not None:
            self._duty.take(self.me, ready)
            return self._close(now)
        return [] if self.heads else [self._posts.post(self.head, ready, self.me, now)]

    # -- the head's part ---------------------------------------------------------------------------------------

    def _hear_ready(self, signer: PeerId, ready: RowReady, now: float) -> list[RowEffect]:
        if self._duty is None or signer in self.list.gone or signer not in self.list:
            return self._answer(signer, now)
        restarted = self._duty.take(signer, ready)
        effects: list[RowEffect] = [receipt(signer, ready, self.me)]
        return effects + (self._lose([signer], now) if restarted else self._close(now))

    def _close(self, now: float) -> list[RowEffect]:
        """Plan the row, if nobody is waited for any more."""
        duty = self._duty
        if duty is None or duty.over or duty.plan is not None or not duty.may_close(now):
            return []
        plan = duty.close(now)
        if plan is None:
            return self._no_weight("nobody in it counts", now)
        others = (peer for peer in self.list.living() if peer != self.me)
        told: list[RowEffect] = [self._posts.post(peer, plan, self.me, now) for peer in others]
        return told + self._hear_plan(plan, now)

    def _lose(self, peers: Collection[PeerId], now: float) -> list[RowEffect]:
        """Plan again without them."""
        loss = self._duty.lose(peers, now) if self._duty is not None else None
        if self._duty is None or loss is None:
            return []
        if not self._duty.counted():
            return self._no_weight("nobody in it counts any more", now)
        others = (peer for peer in self._duty.planned if peer != self.me and peer not in self.list.gone)
        told: list[RowEffect] = [self._posts.post(peer, loss, self.me, now) for peer in others]
        return told + self._hear_loss(loss, now)

    def _no_weight(self, reason: str, now: float) -> list[RowEffect]:
        effects: list[RowEffect] = [NoWeight(self.round, reason), *self._left_out()]
        if self._duty is not None:
            self._duty.over = True
        self._rest(now)
        return effects

    def _tell_list(self, peer: PeerId) -> list[RowEffect]:
        """The beginning, with the list in full."""
        if self._word is None or not isinstance(self._word[1], RowBegin):
            return []
        return [Tell(peer, in_full(self._word[1], self.list.roster), self.me)]

    # -- the plan ----------------------------------------------------------------------------------------------

    def _hear_plan(self, plan: RowPlan, now: float) -> list[RowEffect]:
        mine = self.list.place(self.me)
        if not self.sum.take(plan, self.list, mine, self._made):
            return []
        self._posts.settle(self.head, RowReady)
        if self._made is None and self.sum.term(mine) is not None:  # what it made in another life is lost
            effects = self._announce(0, NO_HASH, now)
            self._rest(now)
            return effects
        return self._sum(now)

    def _hear_loss(self, loss: RowLoss, now: float) -> list[RowEffect]:
        return self._sum(now) if self.sum.lose(loss, len(self.list)) and self.sum.plan is not None else []

    def _sum(self, now: float) -> list[RowEffect]:
        """Sum by the plan as it is now, if this node is in it."""
        plan, mine = self.sum.plan, self.sum.term(self.list.place(self.me))
        effects = self._left_out(summing=self._duty is None) if mine is None else []
        if plan is None or (self._duty is None and (mine is None or self._made is None)):
            self._rest(now)
            return effects
        self.phase, self._deadline = RowPhase.SUMMING, now + self._settings.sum_deadline_s + LATE_S
        return [*effects, SumRow(plan, self.sum.attempt, self.sum.lost)]

    # -- another head ------------------------------------------------------------------------------------------

    def _take_over(self, now: float) -> list[RowEffect]:
        """All before it on the list are gone: this node is head."""
        turn, gone = self.list.roster.number(self.me), tuple(self.list.gone)
        word = RowHead(term=self.term, round=self.round, base=self._base, turn=turn, gone=gone)
        effects = self._left_out()
        self._follow(word, self.me)
        self._rest(now)
        effects += [Tell(peer, word, self.me) for peer in gone]
        effects += [self._posts.post(peer, word, self.me, now) for peer in self.list.living() if peer != self.me]
        return [*effects, TookOver(turn)]

    def _hear_head(self, signer: PeerId, word: RowHead, now: float, via: PeerId) -> list[RowEffect]:
        if word.turn < self.turn:
            return [receipt(via, word, self.me), *self._answer(signer, now)]
        if word.turn == self.turn:
            self._check_head(signer, "takes a row over")
            return [receipt(via, word, self.me)]
        if signer not in self.list:
            return []
        if word.turn != self.list.roster.number(signer):
            raise RemoteError("takes a row over under another's turn", peer=signer)
        effects = [*self._left_out(), *self._deposed_by(word), receipt(via, word, self.me)]
        self._follow(word, signer)
        self.list.give_up(word.gone)
        self._rest(now)
        return effects + (self._leave_row() if self.me in word.gone else [])

    def _deposed_by(self, message: RowBegin | RowHead) -> list[RowEffect]:
        return [Deposed(message.turn)] if self.heads and message.turn > self.turn else []

    def _left_out(self, *, summing: bool = True) -> list[RowEffect]:
        """The round ends without a sum that this node's contribution is in; `summing`: even if it sums now."""
        early = self.phase in (RowPhase.TRAINING, RowPhase.READY, RowPhase.LISTING)
        return [LeftOut(self.round)] if early or (summing and self.phase is RowPhase.SUMMING) else []

    def _leave_row(self) -> list[RowEffect]:
        self.phase, self._deadline = RowPhase.OUT, math.inf
        self._posts.clear()
        return [Out(self.round)]

    # -- words -------------------------------------------------------------------------------------------------

    def _check_head(self, signer: PeerId, does: str) -> None:
        """Raises RemoteError if it is not the head's to say."""
        if signer != self.head:
            raise RemoteError(f"{does} and is not the head of its row", peer=signer)

    def _answer(self, peer: PeerId, now: float) -> list[RowEffect]:
        """Tell who is behind the newest word, once in a while."""
        if self._word is None or now < self._answered.get(peer, -math.inf) + REPEAT_S:
            return []
        if len(self._answered) >= 2 * ROW_LIMIT:
            self._answered.clear()
        self._answered[peer] = now
        return [Tell(peer, self._word[1], self._word[0])]

    def _ask(self, peer: PeerId, message: RowSaid, now: float) -> list[RowEffect]:
        """Ask for the beginning, and the list, of the round that a message is of."""
        ask = RowAsk(term=message.term, round=message.round, base=message.base, turn=message.turn)
        return [] if self._posts.owes(peer, RowAsk) else [self._posts.post(peer, ask, self.me, now)]

    # -- time --------------------------------------------------------------------------------------------------

    @property
    def _plan_s(self) -> float:
        return self._settings.train_deadline_s + self._settings.grace_s + LATE_S

    def _rest(self, now: float) -> None:
        """Wait for the next round: there is nothing more to do in this one."""
        self.phase, self._deadline = RowPhase.OVER, now + CERTIFICATE_DEADLINE_S

    def _overdue(self, now: float) -> list[RowEffect]:
        what = {RowPhase.LISTING: "list", RowPhase.SUMMING: "sum", RowPhase.OVER: "certificate"}.get(self.phase, "plan")
        effects = [*self._left_out(), Overdue(what)]
        self._rest(now)
        return effects

    def _done(self, effects: list[RowEffect]) -> list[RowEffect]:
        duty = math.inf if self._duty is None else self._duty.due_at
        self.next_at = min(self._posts.next_at, self._deadline, duty)
        return effects
