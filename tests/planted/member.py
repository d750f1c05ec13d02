"""Bugs of a member that the simulator sees (`python -m tests.planted --seeds 300 member`).

`MEMBER` are those that no other test is named for. `SEEDS` names, for these and for those of other areas that the
simulator sees too, one seed that does, which is not always the first: with it the check is quick to repeat.
"""

from __future__ import annotations

from tests.planted.bugs import Bug, Edit


def simulated(name: str, *texts: str) -> Bug:
    """A bug that the simulator sees; `texts` as in `bug`."""
    return Bug(name, "", tuple(Edit(was, planted) for was, planted in zip(texts[::2], texts[1::2], strict=True)))


MEMBER: tuple[Bug, ...] = (
    simulated(
        "what the disk binds a member to does not bind its machine",
        "unfinished = machine.restore(here.bound_in(next_position(head)))",
        "unfinished = machine.restore(())",
    ),
    simulated(
        "work is settled by the finals of the wrong place",
        "return finals.included(place) if place is not None and same else None",
        "return finals.included(0) if place is not None and same else None",
    ),
    simulated(
        "tokens of work that was counted come again",
        """
        if any(bits):
            left.tokens, left.rounds_excluded = 0, 0
        """,
        """
        if any(bits):
            left.tokens, left.rounds_excluded = made.tokens, 0
        """,
    ),
    simulated(
        "tokens of work that was left out are lost",
        "left.tokens, left.rounds_excluded = made.tokens, left.rounds_excluded + own_rounds",
        "left.tokens, left.rounds_excluded = 0, left.rounds_excluded + own_rounds",
    ),
    simulated(
        "a residual is taken for what was encoded",
        "np.subtract(here, out, out=out)",
        "np.add(here, out, out=out)",
    ),
    simulated(
        "a certified round is never appended where it was not computed",
        """
        yield Append(certificate)
        yield from self._tell_certificate(certificate)
        """,
        """
        if computed:
            yield Append(certificate)
        yield from self._tell_certificate(certificate)
        """,
    ),
    simulated(
        "a certificate is said before it is on disk",
        """
        yield Append(certificate)
        yield from self._tell_certificate(certificate)
        """,
        """
        yield from self._tell_certificate(certificate)
        yield Append(certificate)
        """,
    ),
    simulated(
        "a member does not look who is alive",
        """
        yield from self._carry_out(machine.peers_alive(here.alive(), self._now, suspected=here.suspected()))
        """,
        "pass",
    ),
    simulated(
        "nothing is closed off to the evicted",
        "self._closed_off = self._facts.held[self.me] = held",
        "self._closed_off = held",
    ),
    simulated(
        "a member votes without a quorum of prepares",
        "prepared = self._certified(self._prepares, view, value)",
        "prepared = self._certified(self._prepares, view, value) or Prepared(view, (), ())",
    ),
    simulated(
        "a lead may propose twice in a view",
        "return self.leading and self.view not in self._proposed and",
        "return self.leading and",
    ),
    simulated(
        "a reduction that stalls is said of nobody",
        """
        if watched.stalled is not None:
            yield from self._carry_out(machine.stalled(*watched.stalled, self._now))
        """,
        """

        """,
    ),
    simulated(
        "a newcomer counts in its first round",
        "return TRAINING if self._me in self._recent_members() else JOINER",
        "return TRAINING",
        "weightless=candidates.keys() - weighty,",
        "weightless=(),",
    ),
    simulated(
        "a paused member trains on",
        "if lost or self._trains_nothing or self.finished or self.leaving:",
        "if lost or self._here.follows or self.finished or self.leaving:",
    ),
    simulated(
        "a member that resumes stays an observer for ever",
        """
        if role == TRAINING and self.machine is machine:
            yield Train()
        """,
        """

        """,
    ),
    simulated(
        "a lead that is silent is waited for",
        "return [] if view is None else [*self.agreement.move_to(view)]",
        "return []",
    ),
    simulated(
        "a lead plans before all who train are done",
        "if most_are_elsewhere or (facts.awaited() and not overdue) or facts.waits_for_newcomers(now):",
        "if half_ready_at is None:",
    ),
    simulated(
        "a lead proposes as soon as a quorum reported",
        "if facts.remaining(plan) - lost <= reported or waited_s >= grace_s:",
        "if True:",
    ),
    simulated(
        "a trainer that begins anew trains although its user has the accelerator",
        "if (self.machine is not None or self.follows_head) and not (self._has_given or self._trains_nothing):",
        "if (self.machine is not None or self.follows_head) and not (self._has_given or self._here.follows):",
    ),
    simulated(
        "a member that fetched its state begins no round",
        "if self.machine is not None or not self._here.current or self._may_not_sign():",
        "if self.machine is not None or not self._here.current or self._may_not_sign() or self._resumed:",
    ),
    simulated(
        "a state that was fetched is not held",
        "return held is None or state.round > held.round or not on_branch(chain, held)",
        "return held is None",
    ),
    simulated(
        "an attempt to come to a state is never repeated",
        """
        self._coming = False
        state, held, chain = sought.state, self._here.held, self._here.chain
        """,
        """
        state, held, chain = sought.state, self._here.held, self._here.chain
        """,
    ),
    simulated(
        "a newcomer never trains",
        "return TRAINING if self._me in self._recent_members() else JOINER",
        "return JOINER",
    ),
    simulated(
        "who observes is waited for",
        "settled = {p for p, r in self._readies.items() if r.role != TRAINING}",
        "settled = {p for p, r in self._readies.items() if r.role == CONTRIBUTOR}",
    ),
    simulated(
        "a member that fell out of its round does not hurry",
        "self._retry_at, self._fresh = now, True",
        "self._retry_at, self._fresh = now + 300.0, True",
    ),
    simulated(
        "the head moved, and the round goes on",
        """
        self.catching_up.head_moved(self._now)
        yield from self._abandon_round()
        """,
        """
        self.catching_up.head_moved(self._now)
        """,
    ),
    simulated(
        "what is certified is not decided here",
        "decided = effect.certificate",
        "decided = None",
    ),
    simulated(
        "of two states the one that fewer hold is fetched",
        "if len(newest) >= len(older):",
        "if len(newest) < len(older):",
    ),
    simulated(
        "a state is fetched for that of another round",
        "return chain.value(goal), newest",
        "return chain.value(goal - 1), newest",
    ),
    simulated(
        "nobody follows who wants to go back",
        "return next((target for target in sorted(ordered, key=_age) if self._agrees(target)), None)",
        "return None",
    ),
    simulated(
        "who has done its rounds stays",
        """
        self._linger_until = None
        self._departure.ask(self._now)
        """,
        """
        self._linger_until = None
        """,
    ),
    simulated(
        "the state to go back to is never sought",
        """
        self._getting = sought[0]
        return self._catching_up.earlier(*sought)
        """,
        """
        self._getting = sought[0]
        return None
        """,
    ),
    simulated(
        "only the lead of the first view plans",
        "(self.view == 0 or self.view in self._freed)",
        "self.view == 0",
    ),
    simulated(
        "who wants to go back says so only where others do",
        "asked = wanted == self._asked",
        "asked = False",
    ),
    simulated(
        "a contribution that is made is announced to nobody",
        """
            self._site.hand_over(delegate, self._now)
            yield HandOver(delegate)
        else:
            yield from self._carry_out(machine.ready(ready, self._now))
        """,
        """
            self._site.hand_over(delegate, self._now)
            yield HandOver(delegate)
        elif ready.role != CONTRIBUTOR:
            yield from self._carry_out(machine.ready(ready, self._now))
        """,
    ),
    simulated(
        "a round begins, and its trainer is told nothing",
        """
        elif role == TRAINING:
            yield Train(beside=machine.trainers())
        """,
        """
        elif role == JOINER:
            yield Train(beside=machine.trainers())
        """,
    ),
    simulated(
        "what a newcomer chose is not taken",
        "return bool(entries) and (yield TakeEntries(tuple(entries), trusted=True)) > 0",
        "return bool(entries)",
    ),
    simulated(
        "entries that somebody has beyond the head are not taken",
        "new: int = yield TakeEntries(part.certificates)",
        "new: int = yield TakeEntries(())",
    ),
)

SEEDS: dict[str, int] = {
    "a Prepare counts as a vote": 8,
    "a certificate is said before it is on disk": 8,
    "a certified round is never appended where it was not computed": 8,
    "a contribution that is made is announced to nobody": 8,
    "a lead may propose twice in a view": 33,
    "a lead plans before all who train are done": 8,
    "a lead proposes as soon as a quorum reported": 8,
    "a lead that is silent is waited for": 33,
    "a member does not look who is alive": 8,
    "a member that fell out of its round does not hurry": 8,
    "a member that fetched its state begins no round": 8,
    "a member that resumes stays an observer for ever": 8,
    "a member votes without a quorum of prepares": 8,
    "a newcomer counts in its first round": 12,
    "a newcomer never trains": 8,
    "a paused member trains on": 8,
    "a prepare is sent before it is written": 8,
    "a promise is sent before it is written": 18,
    "a proposal is sent before it is written": 8,
    "a reduction that stalls is said of nobody": 80,
    "a residual is taken for what was encoded": 8,
    "a round begins, and its trainer is told nothing": 8,
    "a state is fetched for that of another round": 8,
    "a state that was fetched is not held": 8,
    "a trainer that begins anew trains although its user has the accelerator": 120,
    "a vote for what was not prepared here": 8,
    "a vote is sent before it is written": 8,
    "an attempt to come to a state is never repeated": 8,
    "entries that somebody has beyond the head are not taken": 50,
    "nobody follows who wants to go back": 62,
    "nothing is closed off to the evicted": 54,
    "of two states the one that fewer hold is fetched": 8,
    "only the lead of the first view plans": 33,
    "residuals on an abandoned state are carried on": 34,
    "the contribution is not settled before the state is applied": 8,
    "the engine sends before it persists": 8,
    "the head moved, and the round goes on": 34,
    "the ready mark not written before Ready": 8,
    "the state to go back to is never sought": 34,
    "tokens of work that was counted come again": 8,
    "tokens of work that was left out are lost": 18,
    "what is certified is not decided here": 8,
    "what a newcomer chose is not taken": 4,
    "what the disk binds a member to does not bind its machine": 6,
    "who has done its rounds stays": 25,
    "who observes is waited for": 12,
    "who wants to go back says so only where others do": 62,
    "work is settled by the finals of the wrong place": 8,
}
"""By the name of a bug, a seed of the simulator that sees it."""
