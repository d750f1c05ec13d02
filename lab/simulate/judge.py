"""Rules for every simulated run, judged from outside: the judge sees all that is said and asks no machine's opinion.

    no fork              of a round no two values ever have the votes of a quorum, counted as they are sent
    the reference        a certified digest is that of the state which a plain computation makes of the contributions
    nothing left out     a contribution that does not count everywhere is of one that was evicted at some point of that
                         reduction, or that sent something else than it announced
    no double vote       a member prepares and votes once in a view, votes with a quorum's prepares behind it, and never
                         below a view to which it moved without saying so; who promised to leave signs nothing more
    named voters vote    where voters are named, nobody else votes, and by a value that changes them it is others after
                         it, enough of them, who hold the state
    seats                where they are few, a value says whom it counted, no more than these; and who had announced a
                         contribution whenever a plan was made waits for no more rounds than the members by the seats,
                         and two
    waiting outside      where who has no seat waits outside, only a voter counts, or who enlisted and was not counted
                         since; and who stays, undisturbed, waits for no more rounds than as many as stand in the line
                         by the seats, and two (`simulation`)
    newcomers wait       what a peer gives counts in a plan if it was a member after one of the last rounds, or if
                         nothing counts that such a member gave
    one proposal         a view has one value
    views                a member's view of a round never goes back, restarts included
    no wait too long     nobody stands at one point of a round, connected to a quorum, for `STANDSTILL_S`; a peer that
                         fell silent is given up by everyone who watched it, undisturbed, within the detector's bound
    no false eviction    who lives is given up by nobody later than `simulation.settled_s` after the last fault, where
                         nobody lies and of control messages no more than `LOSS_BORNE_SHARE` are lost
    bounded queues       see `peer.QUEUES`
    written first        what binds a peer, and every certificate, is in its logs before it is said (`disk`)
    work counted once, one contribution    see `residuals`, by value
    transfers            see `donations`, with what may go with a peer that leaves
    a pause, a leave     who pauses does not say that it trains, who says so trains, and who wants to go is gone in time
    quick rounds, everyone counts    see `calm`
    progress             `PROGRESS_S` after the last fault a round has been certified

The first that does not hold raises `Violation`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import UnsetType

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import bitmaps_root
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.reference import reference
from shoal.lab.quorum_rule import outweighs
from shoal.lab.simulate.states import next_state, state_digest
from shoal.protocol.certificate import check_certificate
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    NO_HASH,
    Entry,
    Evict,
    Leave,
    Message,
    Plan,
    Prepare,
    Propose,
    Ready,
    Rebase,
    Target,
    Value,
    ViewChange,
    Vote,
)
from shoal.protocol.planning import CONTRIBUTOR
from shoal.protocol.seats import are_few, longest_wait
from shoal.protocol.voting import FaultModel, Voting

STANDSTILL_S = 120.0
PROGRESS_S = 120.0
LOSS_BORNE_SHARE = 0.05


class Violation(Exception):
    """Something that must never happen has happened. `kind` names the promise, `detail` what broke it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Judge:
    """Knows everything that was said, and the reference of every round."""

    def __init__(
        self,
        genesis: Value,
        state: F32,
        fragments: Fragments,
        *,
        staleness_rounds: int = 0,
        voters: Collection[PeerId] = (),
        lying: bool = False,
        seats: int = MEMBER_LIMIT,
        outside: bool = False,
    ) -> None:
        self._seats = seats
        self._outside = outside
        self.waiting: dict[bytes, dict[PeerId, int]] = {genesis.hash: {}}
        """By value, who enlisted and was not counted since, and for how many rounds."""
        self._ready: dict[bytes, set[PeerId]] = {}
        self._ready_then: dict[bytes, frozenset[PeerId]] = {}
        """By lineage, who had announced a contribution when it began."""
        self._waited = {genesis.hash: dict.fromkeys(genesis.members, 0)}
        """By value, for how many rounds each member has waited for a seat."""
        self.waited_most = 0
        self._most_members = len(genesis.members)
        self.fragments = fragments
        self._lying = lying
        self._voters = {genesis.hash: frozenset(voters)} if voters else {}  # after each value, by its hash
        self._staleness_rounds = staleness_rounds
        self.values = {genesis.hash: genesis}
        self.states = {genesis.hash: state}
        self.updates: dict[bytes, F32] = {}
        """By the hash of a certified value, what its round changed the fragment by, before the outer step."""
        self.certified: dict[bytes, bytes] = {}
        self.changes_of_voters: set[bytes] = set()
        self.forks = 0
        self.wrong_values = 0
        self.liars: set[str] = set()
        self._contributions: dict[bytes, EncodedContribution] = {}
        self._plans: dict[bytes, Plan] = {}
        self._evicted: dict[bytes, set[str]] = {}
        self._bitmaps: dict[bytes, tuple[bytes, ...]] = {}
        self._votes: dict[tuple[bytes, int, bytes], set[PeerId]] = {}
        self._prepares: dict[tuple[bytes, int, bytes], set[PeerId]] = {}
        self._prepared: dict[tuple[bytes, PeerId], dict[int, bytes]] = {}
        self._cast: dict[tuple[bytes, PeerId], dict[int, bytes]] = {}
        self._promised: dict[tuple[bytes, PeerId], dict[int, int]] = {}
        self._left: set[tuple[bytes, PeerId]] = set()
        self._proposed: dict[tuple[bytes, int], bytes] = {}
        self._views: dict[tuple[bytes, PeerId], int] = {}

    # -- what is said ------------------------------------------------------------------------------------------

    def sent(self, sender: PeerId, message: Message) -> None:
        """`sender` let `message` out."""
        if isinstance(message, Prepare):
            self._prepare(sender, message)
        elif isinstance(message, Vote):
            self._vote(sender, message)
        elif isinstance(message, Propose):
            self.values[message.value.hash] = message.value
            known = self._proposed.setdefault((message.base, message.view), message.value.hash)
            if known != message.value.hash:
                raise Violation("one proposal", f"two values in view {message.view} of round {message.round}")
        elif isinstance(message, ViewChange):
            self._change(sender, message)
        elif isinstance(message, Leave):
            self._left.add((message.base, sender))
            signed = (self._prepared, self._cast, self._promised)
            if any(said.get((message.base, sender)) for said in signed):
                raise Violation("no double vote", f"a leave after a signature in round {message.round}")
        elif isinstance(message, Ready):
            ready = self._ready.setdefault(message.base, set())
            (ready.add if message.role == CONTRIBUTOR else ready.discard)(sender)
        elif isinstance(message, Plan):
            self._ready_then.setdefault(message.lineage, frozenset(self._ready.get(message.base, ())))
            self._check_counted(message)
            self._plans[message.hash] = message
            self._evicted.setdefault(message.lineage, set()).update(message.evicted)
        elif isinstance(message, Evict):
            self._evicted.setdefault(message.lineage, set()).update(message.evicted)

    def electorate(self, previous: Value) -> Collection[PeerId]:
        """Those who vote after `previous`."""
        return self.voters_after(previous) or previous.members

    def outweigh(self, previous: Value, supporters: Collection[PeerId], leaves: Collection[PeerId]) -> bool:
        """True if these are a quorum of those who vote after `previous`."""
        return outweighs(previous, supporters, leaves, voters=self.voters_after(previous), lying=self._lying)

    def voters_after(self, value: Value) -> frozenset[PeerId]:
        """Peers that vote after a value, where they are named, in words of its own; nobody where they are not."""
        known = self._voters.get(value.hash)
        if known is not None or not self._voters:
            return known or frozenset()
        voters = frozenset(value.members) if self.is_rebase(value) else self.voters_after(self.values[value.base])
        for change in value.amended.amendment.changes if value.amended else ():
            if change.key.startswith("voters."):
                peer = frozenset({PeerId(change.key.removeprefix("voters."))})
                voters = voters | peer if change.value else voters - peer
        self._voters[value.hash] = voters
        return voters

    def _check_open(self, sender: PeerId, base: bytes) -> None:
        if (base, sender) in self._left:
            raise Violation("no double vote", "a signature of who left the round")

    def recent_members(self, base: bytes, rounds: int) -> set[PeerId]:
        """The members after the value of hash `base` and after each of so many before it, back to the last rebase:
        who is not in its electorate begins anew, whatever it was before."""
        found: set[PeerId] = set()
        value: Value | None = self.values.get(base)
        for _ in range(rounds + 1):
            if value is not None:
                found.update(value.members)
                value = None if self.is_rebase(value) else self.values.get(value.base)
        return found

    def _check_counted(self, plan: Plan) -> None:
        """Only who was a member lately counts in a plan that nobody was told to lie about; others where none does."""
        recent = self.recent_members(plan.base, self._staleness_rounds)
        if self._outside and plan.base in self.values:
            recent = {*self.voters_after(self.values[plan.base]), *self.waiting[plan.base]}
        counted = [p.peer for p in plan.participants if p.weight]
        strangers = [peer for peer in counted if peer not in recent]
        if strangers and (self._outside or strangers != counted) and plan.base in self.values:
            raise Violation("newcomers wait", f"{strangers} count in round {plan.round} without having been members")

    def _prepare(self, sender: PeerId, prepare: Prepare) -> None:
        said = self._prepared.setdefault((prepare.base, sender), {})
        self._check_open(sender, prepare.base)
        if prepare.view not in said and any(
            prepare.view < view for view in self._promised.get((prepare.base, sender), {})
        ):
            raise Violation("no double vote", f"a prepare in view {prepare.view} after a move beyond it")
        if said.setdefault(prepare.view, prepare.value) != prepare.value:
            raise Violation("no double vote", f"two prepares in view {prepare.view} of round {prepare.round}")
        self._prepares.setdefault((prepare.base, prepare.view, prepare.value), set()).add(sender)

    def _vote(self, sender: PeerId, vote: Vote) -> None:
        cast = self._cast.setdefault((vote.base, sender), {})
        self._check_open(sender, vote.base)
        if cast.setdefault(vote.view, vote.value) != vote.value:
            raise Violation("no double vote", f"two values in view {vote.view} of round {vote.round}")
        for view, carried in self._promised.get((vote.base, sender), {}).items():
            if carried < vote.view < view:
                raise Violation("no double vote", f"a vote in view {vote.view} after a move to {view}")
        value, previous = self.values.get(vote.value), self.values.get(vote.base)
        if value is None or previous is None:
            raise Violation("no double vote", "a vote for what nobody proposed")
        preparing = self._prepares.get((vote.base, vote.view, vote.value), set())
        if not self.outweigh(previous, preparing, value.leaves):
            raise Violation("no double vote", "a vote without a prepare certificate")
        named = self.voters_after(previous)
        if named and sender not in named:
            raise Violation("named voters vote", f"a vote in round {vote.round} of who has none")
        voters = self._votes.setdefault((vote.base, vote.view, vote.value), set())
        voters.add(sender)
        if self.outweigh(previous, voters, value.leaves):
            self._certify(value)

    def _change(self, sender: PeerId, change: ViewChange) -> None:
        self._check_open(sender, change.base)
        self.view(sender, change.base, change.view)
        carried = -1 if change.prepared is None else change.prepared.prepared.view
        self._promised.setdefault((change.base, sender), {})[change.view] = carried
        if change.prepared is not None:
            self.values[change.prepared.value.hash] = change.prepared.value
        for view in self._cast.get((change.base, sender), {}):
            if carried < view < change.view:
                raise Violation("no double vote", f"a move to {change.view} that hides the vote in {view}")

    def decided(self, certificate: Entry) -> None:
        """A peer holds this to be the outcome of a round, or that the authority went on from there."""
        previous = self.values[certificate.value.base]
        if isinstance(certificate, Rebase):
            self.values[certificate.value.hash] = certificate.value
            self.states[certificate.value.hash] = self.states[certificate.value.base]
            self.waiting[certificate.value.hash] = self.waiting[certificate.value.base]
            self._wait_on(certificate.value)
            return
        faults = FaultModel.LYING if self._lying else FaultModel.CRASH
        voters = tuple(sorted(self.voters_after(previous)))
        try:
            check_certificate(certificate, previous, voting=Voting(faults, voters))
        except RemoteError as error:
            raise Violation("no fork", f"a certificate that does not hold: {error}") from None
        if not self.outweigh(previous, certificate.signers, certificate.value.leaves):
            raise Violation("no fork", "a certificate by less than a quorum")
        self.values[certificate.value.hash] = certificate.value
        self._certify(certificate.value)

    def _certify(self, value: Value) -> None:
        known = self.certified.get(value.base)
        if known == value.hash:
            return
        if known is not None:
            self.forks += 1
            raise Violation("no fork", f"two values of round {value.round}")
        self.certified[value.base] = value.hash
        self._check_voters(value)
        self._check_value(value)
        self._wait_outside(value)
        self._check_seats(value)

    def _wait_outside(self, value: Value) -> None:
        counted = () if isinstance(value.counted, UnsetType) else value.counted
        new = () if isinstance(value.enlisted, UnsetType) else value.enlisted
        waited = {peer: n + 1 for peer, n in self.waiting[value.base].items() if peer not in counted}
        self.waiting[value.hash] = {one.peer: 0 for one in new} | waited

    def _wait_on(self, value: Value) -> None:
        """No round counted anybody, but some may be members no more."""
        if are_few(self._seats):
            before = self._waited[value.base]
            self._waited[value.hash] = {peer: before.get(peer, 0) for peer in value.members}

    def _check_seats(self, value: Value) -> None:
        """A value counts no more than the seats, says whom, and nobody waits for too long."""
        if value.rollback or not are_few(self._seats):
            self._wait_on(value)
            return
        plan, bitmaps = self.plan_of(value)
        places = [place for place in plan.contributors() if any(bits[place // 8] >> place % 8 & 1 for bits in bitmaps)]
        counted = tuple(sorted(plan.participants[place].peer for place in places))
        if value.counted != counted or len(plan.contributors()) > self._seats:
            raise Violation("seats", f"round {value.round} counts {len(counted)} and says {value.counted}")
        standing = len(self.waiting[value.base]) + len(self.voters_after(value)) if self._outside else 0
        self._most_members = max(self._most_members, len(value.members), standing)
        before, ready = self._waited[value.base], self._ready_then[plan.lineage]
        waited = {p: 0 if p in counted else before.get(p, 0) + (p in ready and p in before) for p in value.members}
        self._waited[value.hash] = waited
        self.waited_most = max(self.waited_most, *waited.values())
        if not self.liars and self.waited_most > self.longest_wait:
            raise Violation("seats", f"somebody waits for {self.waited_most} rounds after round {value.round}")

    @property
    def longest_wait(self) -> int:
        """Rounds for which nobody may wait for longer."""
        return longest_wait(self._most_members, self._seats)

    def _check_voters(self, value: Value) -> None:
        """Enough voters remain after a value that changes them, and those who get a vote hold the state."""
        if not value.amended or not self._voters:
            return
        before, after = self.voters_after(self.values[value.base]), self.voters_after(value)
        if before != after:
            self.changes_of_voters.add(value.hash)
        if before != after and len(after) < (4 if self._lying else 1):
            raise Violation("named voters vote", f"{len(after)} voters are left after round {value.round}")
        if not after - before <= set(value.members):
            raise Violation("named voters vote", f"a vote after round {value.round} of who is no member")

    def view(self, peer: PeerId, base: bytes, view: int) -> None:
        """State of a member in the round after `base`."""
        before = self._views.get((base, peer), 0)
        if view < before:
            raise Violation("views", f"a member went back from view {before} to {view}")
        self._views[base, peer] = view

    # -- values ------------------------------------------------------------------------------------------------

    def contributed(self, contribution: EncodedContribution) -> None:
        """A peer committed to this."""
        self._contributions[contribution.root] = contribution

    def completed(self, finals: Finals) -> None:
        """A peer has all finals of a plan."""
        self._plans[finals.plan.hash] = finals.plan
        bitmaps = self._bitmaps.setdefault(finals.plan.hash, finals.bitmaps)
        if bitmaps != finals.bitmaps:
            raise Violation("the reference", "two sets of contributors for one plan")

    def is_rebase(self, value: Value) -> bool:
        """True if the authority signed it."""
        return value.plan == NO_HASH and not value.rollback and value.base in self.values

    def origin(self, value: Value) -> Value:
        """The value that led to the state on which `value` stands: itself, unless it ended a term."""
        while value.rollback or self.is_rebase(value):
            value = self.values[value.rollback.target.certificate if value.rollback else value.base]
        return value

    def branch(self, head: Value) -> list[Value]:
        """The values that led to the states from which that at `head` descends, the newest first."""
        found = [self.origin(head)]
        while found[-1].base in self.values:
            found.append(self.origin(self.values[found[-1].base]))
        return found

    def plan_of(self, value: Value) -> tuple[Plan, tuple[bytes, ...]]:
        """The plan that led to a certified value, and per chunk who is in it."""
        return self._plans[value.plan], self._bitmaps[value.plan]

    def _check_value(self, value: Value) -> None:
        if value.rollback:
            self._check_rollback(value, value.rollback.target)
            return
        plan, bitmaps = self._plans.get(value.plan), self._bitmaps.get(value.plan)
        if plan is None or bitmaps is None:
            raise Violation("the reference", "a certified value whose finals nobody has")
        self._check_nothing_left_out(plan, bitmaps)
        given = {
            p.peer: self._contributions[p.root].concatenated()
            for p in plan.participants
            if p.weight and p.root in self._contributions
        }
        update = reference(plan, given, bitmaps).update
        state = next_state(self.states[value.base], update, self.fragments.of_round(value.round))
        if state_digest(value.base, state) != value.digest or bitmaps_root(bitmaps) != value.bitmaps:
            self.wrong_values += 1
            raise Violation("the reference", f"round {value.round} was certified with another value")
        self.states[value.hash], self.updates[value.hash] = state, update

    def _check_rollback(self, value: Value, target: Target) -> None:
        """It goes back to what was certified before it."""
        before, state = self.values[value.base], self.states[target.certificate]
        while before.hash != target.certificate:
            if before.base not in self.values:
                raise Violation("the reference", f"round {value.round} goes back to what it does not stand on")
            before = self.values[before.base]
        digest = before.digest if target.round else state_digest(before.base, state)
        if (before.state_round, digest) != (target.round, value.digest):
            self.wrong_values += 1
            raise Violation("the reference", f"round {value.round} goes back to another state")
        self.states[value.hash] = state

    def _check_nothing_left_out(self, plan: Plan, bitmaps: Sequence[bytes]) -> None:
        for place in plan.contributors():
            peer = plan.participants[place].peer
            everywhere = all(int.from_bytes(bits, "little") >> place & 1 for bits in bitmaps)
            gone = self._evicted.get(plan.lineage, set()) | self.liars
            if not everywhere and peer not in gone:
                raise Violation("nothing left out", f"a contribution to round {plan.round} does not count everywhere")
