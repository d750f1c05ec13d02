"""Agreement with one rule broken in each: what the checks of agreement must be able to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from shoal.protocol import agreement as agreement_module
from shoal.protocol.agreement import Agreement, AgreementEffect, DurableRecord, Persist, Standing
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Message, Prepare, PreparedValue, Propose, Report, Value, ViewChange
from shoal.protocol.voting import CONTRIBUTORS, Voting, voter_changes


def made_by(bug: type[Agreement], identity: Identity, previous: Value, voting: Voting = CONTRIBUTORS) -> Agreement:
    """A member with that bug."""
    return bug(identity=identity, previous=previous, voting=voting)


class Gullible(Agreement):
    """Believes every lead of a later view: looks at no view changes behind a proposal."""

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        with unchecked_proposals():
            return super().receive(sender, message)


@contextmanager
def unchecked_proposals() -> Iterator[None]:
    """Nothing is asked of what stands behind a proposal."""
    checked = agreement_module.check_proposed
    agreement_module.check_proposed = lambda *_, **__: True
    try:
        yield
    finally:
        agreement_module.check_proposed = checked


class ForgetfulLead(Gullible):
    """Plans anew although a member of its quorum has a prepare certificate; nobody looks."""

    def _try_lead(self) -> list[AgreementEffect]:
        with _carrying(self, lambda prepared: None):
            return super()._try_lead()


class ForgetfulLeadSeen(Agreement):
    """The same among members who look."""

    def _try_lead(self) -> list[AgreementEffect]:
        with _carrying(self, lambda prepared: None):
            return super()._try_lead()


@contextmanager
def _carrying(machine: Agreement, instead: Callable[[PreparedValue | None], PreparedValue | None]) -> Iterator[None]:
    """What view changes carry is replaced while the lead looks at them."""
    stored = machine._changes
    machine._changes = {
        view: {p: msgspec.structs.replace(c, prepared=instead(c.prepared)) for p, c in row.items()}
        for view, row in stored.items()
    }
    try:
        yield
    finally:
        machine._changes = stored


class LowestVoteLead(Gullible):
    """Carries the certificate of the lowest view forward; nobody looks."""

    def _try_lead(self) -> list[AgreementEffect]:
        carried = [c.prepared for c in self._changes.get(self.view, {}).values() if c.prepared is not None]
        lowest = min(carried, key=lambda one: one.prepared.view, default=None)
        with _carrying(self, lambda prepared: lowest):
            return super()._try_lead()


class HastyLead(Gullible):
    """Leads as soon as one other has moved to its view; nobody looks."""

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        return len(set(peers)) >= 2 or super().is_quorum(peers)


class VainLead(Gullible):
    """Puts its own name on what it carries forward."""

    def _propose(self, value: Value, *proofs: Any) -> list[AgreementEffect]:
        return super()._propose(msgspec.structs.replace(value, planner=self._me), *proofs)


class WaveringLead(Agreement):
    """Proposes a second value in a view where the first displeases it."""

    @property
    def free_to_plan(self) -> bool:
        return self.leading and (self.view == 0 or self.view in self._freed)


class LeavesAnyway(Agreement):
    """Leaves although it voted."""

    def leave(self) -> list[AgreementEffect]:
        self._signed = False
        return super().leave()


class VotesAfterLeaving(Agreement):
    """Prepares although it left."""

    def _try_prepare(self) -> list[AgreementEffect]:
        standing = self.standing
        if standing is Standing.LEFT:
            self.standing = Standing.OPEN
        try:
            return super()._try_prepare()
        finally:
            if self.standing is Standing.OPEN:
                self.standing = standing

    def _try_vote(self, view: int, value_hash: bytes) -> list[AgreementEffect]:
        standing = self.standing
        if standing is Standing.LEFT:
            self.standing = Standing.OPEN
        try:
            return super()._try_vote(view, value_hash)
        finally:
            if self.standing is Standing.OPEN:
                self.standing = standing


class CountsPrepares(Agreement):
    """Takes a Prepare for a vote."""

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        effects = super().receive(sender, message)
        if not isinstance(message, Prepare) or self.standing is Standing.DECIDED:
            return effects
        self._votes.setdefault((message.view, message.value), {})[sender] = message.signature
        return effects or self._tally(message.view, message.value)


class BreaksPromises(Agreement):
    """Prepares in views below the one it promised."""

    def _try_prepare(self) -> list[AgreementEffect]:
        promised, self.view = self.view, 0
        try:
            return super()._try_prepare()
        finally:
            self.view = max(self.view, promised)

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        if not isinstance(message, Propose):
            return super().receive(sender, message)
        promised, self.view = self.view, 0
        try:
            return super().receive(sender, message)
        finally:
            self.view = max(self.view, promised)

    def _try_vote(self, view: int, value_hash: bytes) -> list[AgreementEffect]:
        promised, self.view = self.view, view
        try:
            return super()._try_vote(view, value_hash)
        finally:
            self.view = max(self.view, promised)


class SpeaksFirst(Agreement):
    """Sends before it writes."""

    def propose(self, value: Value) -> list[AgreementEffect]:
        return _spoken_first(super().propose(value))

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        return _spoken_first(super().receive(sender, message))

    def computed(
        self, report: Report, participants: Iterable[PeerId] = (), counted: Iterable[PeerId] = ()
    ) -> list[AgreementEffect]:
        return _spoken_first(super().computed(report, participants, counted))

    def move_to(self, view: int) -> list[AgreementEffect]:
        return _spoken_first(super().move_to(view))


def _spoken_first(effects: list[AgreementEffect]) -> list[AgreementEffect]:
    return sorted(effects, key=lambda effect: isinstance(effect, Persist))


class Forgets(Agreement):
    """Does not find one kind of record again."""

    kind = ""

    def restore(self, records: Iterable[DurableRecord]) -> None:
        super().restore(record for record in records if record.kind != self.kind)


class ForgetsVotes(Forgets):
    """Votes are not written."""

    kind = "vote"


class ForgetsPrepares(Forgets):
    """Prepares are not written."""

    kind = "prepare"


class ForgetsPromises(Forgets):
    """Moves to a view are not written."""

    kind = "promise"


class ForgetsProposals(Forgets):
    """Proposals are not written."""

    kind = "propose"


class ForgetsLeaving(Forgets):
    """Leaves are not written."""

    kind = "leave"


def half_is_enough(
    previous: Value, supporters: Iterable[PeerId], leaves: Iterable[PeerId] = (), *, voting: object = None
) -> bool:
    """A quorum rule in which any half will do, whether the last planner is in it or not."""
    electorate = set(previous.members) - set(leaves)
    return 2 * len(electorate.intersection(supporters)) >= len(electorate)


class CountsContributors(Agreement):
    """Votes, and counts votes, as a contributor, though the voters are named."""

    def __init__(self, *, previous: Value, voting: Voting, **rest: Any) -> None:
        super().__init__(previous=previous, voting=voting, **rest)
        self.electorate = self.everyone
        self.votes = self._me in self.everyone

    def _certified(self, *asked: Any) -> Any:
        named, self.voting = self.voting, Voting(self.voting.faults)
        try:
            return super()._certified(*asked)
        finally:
            self.voting = named


class ChangesVotersTooEarly(Agreement):
    """Counts in a round by the voters that its value makes of those who have a vote in it."""

    def _certified(self, steps: Any, view: int, value: Value) -> Any:
        before, self.voting = self.voting, self.voting.after(value)
        try:
            return super()._certified(steps, view, value)
        finally:
            self.voting = before


class CountsFormerVoters(Agreement):
    """Votes, and counts votes, as before the last value, which changed the voters."""

    def __init__(self, *, previous: Value, voting: Voting, **rest: Any) -> None:
        changes = voter_changes(previous.amended.amendment) if previous.amended else {}
        former = voting.changed({peer: not votes for peer, votes in changes.items()}) if changes else voting
        super().__init__(previous=previous, voting=former, **rest)


class FollowsAnybody(Agreement):
    """Takes whoever proposes for the lead of the view."""

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        order, electorate = self._order, self.electorate
        if isinstance(message, Propose):
            self._order, self.electorate = (sender,), electorate | {sender}
        try:
            return super().receive(sender, message)
        finally:
            self._order, self.electorate = order, electorate


class HidesVotes(Agreement):
    """Moves on without telling what it voted for."""

    def _view_change(self, view: int) -> ViewChange:
        highest, self._highest = self._highest, None
        try:
            return super()._view_change(view)
        finally:
            self._highest = highest


class Suspicious(Agreement):
    """Blames whoever proposes in a view after the first."""

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        if isinstance(message, Propose) and message.view:
            raise RemoteError("moved too far", peer=sender)
        return super().receive(sender, message)


class TardyLead(Agreement):
    """Proposes in view 0 once it heard what was proposed in view 1: lower views do not come first."""

    @property
    def free_to_plan(self) -> bool:
        return super().free_to_plan and (self.view != 0 or 1 in self._proposals)

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        if isinstance(message, Propose) and message.view > self.view:
            self._proposals[message.view] = message
            return []
        return super().receive(sender, message)


class GoesBackAnyway(ForgetfulLead):
    """Proposes to go back although a member of its quorum voted for a result."""

    def propose(self, value: Value) -> list[AgreementEffect]:
        return super().propose(value) if value.rollback or not self.view else []


class StaysAnyway(ForgetfulLead):
    """Proposes a result although a member of its quorum voted to go back."""

    def propose(self, value: Value) -> list[AgreementEffect]:
        return [] if value.rollback and self.view else super().propose(value)


class RemembersAbandoned(Agreement):
    """Takes up what it said in a round that was abandoned, because the round has the same number."""

    def restore(self, records: Iterable[DurableRecord]) -> None:
        term = self.previous.next_term
        super().restore(msgspec.structs.replace(record, term=term) for record in records)


class GrowsBack(Agreement):
    """Goes back to the electorate of the old round too."""

    def _propose(self, value: Value, *proofs: Any) -> list[AgreementEffect]:
        if value.rollback:
            value = msgspec.structs.replace(value, members=value.members[:-1])
        return super()._propose(value, *proofs)
