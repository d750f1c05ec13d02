"""Scope of an exploration: how large, by whom, about which values; and the quorum rule in words of its own."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from shoal.lab.signed import certified, report_of, signed_report
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.amending import InForce, make_amend_consent, make_amendment, with_amendment
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import validate_manifest
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    Message,
    Prepare,
    Propose,
    Report,
    Target,
    Value,
    ViewChange,
    Vote,
    domain_hash,
)
from shoal.protocol.terms import make_consent, make_rollback
from shoal.protocol.voting import CONTRIBUTORS, VOTERS, FaultModel, Voting, lead_order

MEMBERS_LIMIT, VIEWS_LIMIT, PLANS_LIMIT, CRASHES_LIMIT, ROLLBACKS_LIMIT = 64, 16, 26, 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Bounds on the schedules. Members are numbered in the order in which they lead: member v leads view v.

    `views` are 0 to views − 1; `plans` is how many values a lead may choose from where it is free; `planner` is which
    member planned the round before, and so weighs more. `rollbacks` is to how many rounds a free lead may propose to go
    back instead; the round is then the first after another rollback, and each member has on disk what it said in the
    abandoned round of the same number. With `liars`, so many members from number `liar` on say anything at any time
    (`liar.py`); schedules are walked whole with one of them only. `faults` is the fault model, and so the quorum. With
    `strangers` the members are named voters, and so many others contribute without a vote; they are numbered after
    them, and may be among the liars. `changing`: the
    value before gave the last of the members its vote and took that of the first stranger, and each value of an even
    plan takes all votes but the last member's; in `lying` it gives that of member 0 to the first stranger. Since no
    member begins a round without the certificate of the one before, of which there is one, these are two changes one
    after the other, without two rounds at once. `reduced` leaves out schedules that differ from others in nothing that
    matters, `exchanged` those that differ in the names of members only; see `agreement.py`.
    Raises ConfigError for what is out of range.
    """

    members: int
    views: int
    crashes: int = 0
    leaves: int = 0
    plans: int = 1
    planner: int = 0
    rollbacks: int = 0
    liars: int = 0
    liar: int = 0
    faults: FaultModel = FaultModel.CRASH
    strangers: int = 0
    changing: bool = False
    reduced: bool = True
    exchanged: bool = True

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("members", self.members, 2 if self.changing else 1, MEMBERS_LIMIT),
            ("views", self.views, 1, VIEWS_LIMIT),
            ("crashes", self.crashes, 0, CRASHES_LIMIT),
            ("strangers", self.strangers, int(self.changing), MEMBERS_LIMIT - self.members),
            ("leaves", self.leaves, 0, 0 if self.strangers else self.members),
            ("plans", self.plans, 1, PLANS_LIMIT),
            ("planner", self.planner, 0, self.members - 1),
            ("rollbacks", self.rollbacks, 0, 0 if self.changing else ROLLBACKS_LIMIT),
            ("liars", self.liars, 0, 0 if self.changing else self.everyone - 1),
            ("liar", self.liar, 0, self.everyone - max(1, self.liars)),
        ):
            if not low <= value <= high:
                raise ConfigError(f"--{name} {value}: must be from {low} to {high}")

    @property
    def everyone(self) -> int:
        """Number of all who take part: who votes, then who does not."""
        return self.members + self.strangers

    @property
    def lying(self) -> range:
        """Numbers of the members that lie."""
        return range(self.liar, self.liar + self.liars)

    @property
    def may_fork(self) -> bool:
        """True if the liar alone may have two values certified, and is convicted by it."""
        return self.faults is FaultModel.CRASH and self.liar < self.members

    @property
    def first_alike(self) -> int:
        """Number of the first of the members that nothing tells apart; the number of members, if there are no two such.

        They lead no view, are not the planner, and nobody names them in a value.
        """
        first = max(self.views, self.planner + 1)
        told_apart = self.leaves or self.liars or self.strangers
        alike = self.reduced and self.exchanged and not told_apart and first <= self.members - 2
        return first if alike else self.everyone


def electorate(members: int, planner: int, rollbacks: int = 0, strangers: int = 0) -> tuple[list[Identity], Value]:
    """Members in the order in which they lead a round, and the value before it, whose planner is number `planner`.

    That is C(0), or, so that there are `rollbacks` rounds to go back to, another rollback of the same electorate. With
    `strangers`, who follow in the list, all contributed to that value, and the members alone are its voters.
    """
    everyone = [Identity.from_seed(bytes([n]) * 32) for n in range(members + strangers)]
    identities, others = {i.peer_id: i for i in everyone[:members]}, everyone[members:]
    contributed = tuple(sorted(one.peer_id for one in everyone))
    voting = Voting(named=tuple(sorted(identities))) if strangers else CONTRIBUTORS
    for salt in itertools.count():
        swarm = domain_hash("explored swarm", salt.to_bytes(4, "little"))
        for first in sorted(identities):
            previous = genesis(swarm, [first, *(peer for peer in identities if peer != first)])
            previous = msgspec.structs.replace(previous, members=contributed)
            if rollbacks:
                previous = _rolled_back(previous, list(identities.values()), rollbacks, voting)
            order = lead_order(previous, voting=voting)
            if order[planner] == first:
                return [*(identities[peer] for peer in order), *others], previous
    raise AssertionError("counting does not end")


def changing_electorate(scope: Scope) -> tuple[list[Identity], Chain]:
    """As `electorate`, and the chain up to the value before, which changed the voters to the members."""
    everyone = [Identity.from_seed(bytes([n]) * 32) for n in range(scope.everyone)]
    now, others = {i.peer_id: i for i in everyone[: scope.members]}, everyone[scope.members :]
    added, removed = everyone[scope.members - 1], others[0]
    before = [*everyone[: scope.members - 1], removed]
    voting = Voting(scope.faults, tuple(sorted(now)))
    for salt in itertools.count():
        chain = _founded(before, scope.faults, salt)
        for first in (one.peer_id for one in everyone[: scope.members - 1]):
            value = Values(chain.head, [], before).fresh(first, 0, ())
            order = lead_order(value, voting=voting)
            if order[scope.planner] != first:
                continue
            value = msgspec.structs.replace(value, members=tuple(sorted(one.peer_id for one in everyone)))
            new = sorted((one for one in everyone if one not in before), key=lambda one: one.peer_id)
            reports = tuple(signed_report(one, report_of(value)).signature for one in new)
            value = msgspec.structs.replace(value, report_signatures=reports)
            value = with_changed_voters(value, chain.head, before, chain.in_force, [added.peer_id], [removed.peer_id])
            chain.extend(certified(value, *before))
            return [*(now[peer] for peer in order), *others], chain
    raise AssertionError("counting does not end")


def _founded(voters: Sequence[Identity], faults: FaultModel, salt: int) -> Chain:
    founders = [one.peer_id for one in voters]
    tables: dict[str, object] = {
        "swarm": {"name": f"explored {salt}", "founders": founders},
        "workload": {"name": "regression"},
        "sync": {"inner_steps": 1},
        "membership": {"voters": "named"},
        "agreement": {"faults": faults.value},
    }
    manifest = validate_manifest(tables, source="the exploration")
    return Chain(genesis(manifest.swarm_id, founders), manifest=manifest)


def with_changed_voters(
    value: Value,
    previous: Value,
    voters: Sequence[Identity],
    in_force: InForce | None,
    added: Sequence[PeerId],
    removed: Sequence[PeerId],
) -> Value:
    """`value`, which follows `previous`, with the consents of all voters to votes for some and none for others."""
    assert in_force is not None
    wanted: dict[str, object] = {f"{VOTERS}.{peer}": True for peer in added}
    amendment = make_amendment(in_force, wanted | {f"{VOTERS}.{peer}": False for peer in removed})
    consents = [(one.peer_id, make_amend_consent(one, previous, amendment, asked=True)) for one in voters]
    return with_amendment(value, consents)


def _rolled_back(origin: Value, identities: list[Identity], rounds: int, voting: Voting) -> Value:
    head = msgspec.structs.replace(origin, round=rounds + 2, base=domain_hash("explored rounds"))
    target = explored_target(rounds)
    consents = {one.peer_id: make_consent(one, head, target, asked=True) for one in identities}
    digest = explored_digest(rounds)
    return make_rollback(head, head.planner, target, consents, digest=digest, voting=voting)


def explored_target(round: int) -> Target:
    """A round to go back to."""
    return Target(round, domain_hash("explored certificate", bytes([round])))


def explored_digest(round: int) -> bytes:
    """Digest of the state of a round to go back to."""
    return domain_hash("explored state", bytes([round]))


def abandoned_log(previous: Value) -> tuple[DurableRecord, ...]:
    """Records that a member has on disk of the round that a rollback abandoned: they bind nobody any more."""
    if not previous.rollback:
        return ()
    value = msgspec.structs.replace(
        previous, round=previous.next_round, base=domain_hash("abandoned"), rollback=msgspec.UNSET
    )
    return tuple(
        DurableRecord(kind=kind, term=previous.term, round=previous.next_round, value=value)
        for kind in ("propose", "vote")
    )


class Values:
    """The values that are proposed after `previous`, and what they and messages are called.

    `A0` is the outcome of plan A as member 0 proposes it, `A0-2` if it counts the leave of member 2; `R1/0` is a
    rollback to round 1. identities: of all voters, who consent to rollbacks and amendments; nobody proposes one without
    them. in_force: with it, values of even plans change the voters as `Scope` says.
    """

    def __init__(
        self,
        previous: Value,
        peers: list[PeerId],
        identities: Sequence[Identity] = (),
        voting: Voting = CONTRIBUTORS,
        in_force: InForce | None = None,
    ) -> None:
        self.previous = previous
        self._voting = voting
        self._in_force = in_force
        self._amended: dict[tuple[PeerId, int], Value] = {}
        self.by_hash: dict[bytes, Value] = {}
        self.names: dict[bytes, str] = {}
        self._peers = peers
        self._identities = identities

    def back(self, planner: PeerId, round: int, leaves: Collection[PeerId]) -> Value:
        """Return the value that `planner` proposes in order to go back to a round."""
        target = explored_target(round)
        consents = {one.peer_id: make_consent(one, self.previous, target, asked=True) for one in self._identities}
        value = make_rollback(
            self.previous,
            planner,
            target,
            consents,
            digest=explored_digest(round),
            leaves=leaves,
            voting=self._voting,
        )
        self.by_hash[value.hash] = value
        return value

    def fresh(self, planner: PeerId, plan: int, leaves: Collection[PeerId]) -> Value:
        """Return the value that `planner` proposes as the outcome of plan number `plan`."""
        plan_hash = domain_hash("explored plan", bytes([plan]))
        value = Value(
            swarm=self.previous.swarm,
            term=self.previous.next_term,
            round=self.previous.next_round,
            base=self.previous.hash,
            plan=plan_hash,
            planner=planner,
            members=tuple(sorted(set(self.previous.members) - set(leaves))),
            leaves=tuple(sorted(leaves)),
            bitmaps=NO_HASH,
            tokens=plan,
            digest=domain_hash("explored digest", plan_hash),
        )
        if self._in_force is not None and plan % 2 == 0:
            voters, lying = len(self._identities), self._voting.faults is FaultModel.LYING
            added, removed = (
                (self._peers[voters : voters + 1], self._peers[:1]) if lying else ([], self._peers[: voters - 1])
            )
            known = self._amended.get((planner, plan))
            value = known or with_changed_voters(value, self.previous, self._identities, self._in_force, added, removed)
            self._amended[planner, plan] = value
        self.by_hash[value.hash] = value
        return value

    def report(self, value: Value) -> Report:
        """Return the Report that every member computes from the finals of the plan of `value`."""
        digest = domain_hash("explored digest", value.plan)
        return msgspec.structs.replace(report_of(value), digest=digest, bitmaps=NO_HASH)

    def name(self, value_hash: bytes) -> str:
        """Name of a value, for people."""
        value = self.by_hash.get(value_hash)
        if value_hash in self.names:
            return self.names[value_hash]
        if value is None:
            return f"what nobody proposed ({value_hash.hex()[:8]})"
        gone = [str(self._peers.index(PeerId(peer))) for peer in value.leaves]
        what = f"R{value.rollback.target.round}/" if value.rollback else chr(ord("A") + value.tokens)
        return "-".join([f"{what}{self._peers.index(PeerId(value.planner))}", *gone])

    def told(self, message: Message) -> str:
        """Describe a message, for people."""
        if isinstance(message, Propose):
            return f"propose {self.name(message.value.hash)} in view {message.view}"
        if isinstance(message, Prepare):
            return f"prepare {self.name(message.value)} in view {message.view}"
        if isinstance(message, Vote):
            return f"vote for {self.name(message.value)} in view {message.view}"
        if isinstance(message, ViewChange):
            one = message.prepared
            carried = "nothing" if one is None else f"{self.name(one.value.hash)}, prepared in view {one.prepared.view}"
            return f"move to view {message.view} with {carried}"
        return f"show a certificate of {self.name(message.value.hash)}" if isinstance(message, Certificate) else "leave"
