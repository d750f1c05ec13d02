"""Effects: what a round machine asks of the member around it, and what a member asks of its node.

What a round machine asks of the disk, and of the network, is in agreement.py. A member asks for one thing after the
other, each of which is done, whatever it takes, before the next; what comes of it is told to the member.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shoal.protocol.agreement import Broadcast, Decided, Mismatch, NeedFinals, NeedState, Persist
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.durable import DurableRecord
from shoal.protocol.errands import Errand
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import OfPlan, OfState, Order
from shoal.protocol.messages import Amendment, Certificate, Entry, Held, Message, Plan, RelayedWay, Value
from shoal.protocol.planning import RoundSettings


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Close any reduction under way and start this one."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class CloseOff:
    """Take nothing more from `evicted` in this reduction, if it is under way; then call `closed_off`."""

    lineage: bytes
    evicted: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Repair:
    """Go on with the reduction under way by this revised plan; if it is not under way, start it.

    `held` is what others said they hold, as far as this node heard: they need no copy of it.
    """

    plan: Plan
    held: tuple[tuple[PeerId, Held], ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """The lead planned without this node: stop reducing, wait for the certificate, then catch up."""

    plan: Plan


Effect = (
    Persist
    | Broadcast
    | NeedFinals
    | NeedState
    | NeedEvidence
    | Mismatch
    | Decided
    | StartReduce
    | CloseOff
    | Repair
    | Evicted
)
"""Of a round machine."""


@dataclass(frozen=True, slots=True)
class Write:
    """Have these on disk, all at once, before anything else is done."""

    records: tuple[DurableRecord, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Say this to one peer."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Examine:
    """Look at what a peer said for what it may show: a lie, or another chain. It is taken after that."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class BeginRound:
    """The round after `base` begins: what was kept for the last one is dropped.

    Comes to the evidence that is here and that no ban covers: who is accused, by its digest.
    """

    base: Value
    settings: RoundSettings


@dataclass(frozen=True, slots=True)
class TakePart:
    """The round after `base` has begun, and this node takes part in it as `role`."""

    base: Value
    role: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Comes to the Ready of the contribution that is here, of before a restart or made for a round that went on."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Leave the processor to nodes of this machine that are still ending the round before. `announced`: who is not."""

    announced: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class StandOnHead:
    """Give the trainer the state at the head."""


@dataclass(frozen=True, slots=True)
class Train:
    """Have the trainer make this round's inner steps; or, not to `contribute`, others meanwhile.

    at_once: where the steps of a round follow speeds, those that are made are all. beside: who is expected to
    contribute to the round too, so that there is time to come together with them.
    """

    contribute: bool = True
    at_once: bool = False
    beside: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class PauseTrainer:
    """Stop the trainer, or let it go on."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Contribute:
    """Encode what was trained, commit to it, and have it on disk.

    Comes to the Ready to be announced: of a contribution, or, where none can be made, of an observer; None if this is
    Comes to the Ready to be announced: of a contribution, or, where none can be made, of an observer; None if this is
    not what was waited for. alone: nobody else can have heard what this node announced. delegate: it is to be handed
    over to this member of the site, and not on disk before that one refused; without, it has in it what others of the
    site handed over.
    """

    work: object
    alone: bool = False
    delegate: PeerId | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Begin to hand over what was made to the delegate of the site; what comes of it is told by `HandedOver`."""

    delegate: PeerId


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Take back what was offered the delegate, unless that has it in its contribution: `HandedOver` says so."""


@dataclass(frozen=True, slots=True)
class PassOn:
    """The delegate has what was made: nothing of it is to count again here."""


@dataclass(frozen=True, slots=True)
class KeepOwn:
    """The delegate has not taken it: have it on disk. Comes to the Ready that announces it."""


@dataclass(frozen=True, slots=True)
class FindWork:
    """Look for what this node had learnt and made before a restart; the state at the head is here.

    countable: what was made for an earlier round, or was passed on, and is newest on disk, cannot have been counted
    since.
    Comes to whether a contribution to the round after the head is here again.
    """

    countable: bool


@dataclass(frozen=True, slots=True)
class ResumeWork:
    """Take up what was found."""


@dataclass(frozen=True, slots=True)
class SettleWork:
    """Count this node's contribution as the chain says, by finals that are here."""


@dataclass(frozen=True, slots=True)
class FinishWork:
    """Wait until what this node made for a decided round is on disk, should it be on its way there."""

    value: Value


@dataclass(frozen=True, slots=True)
class WatchReduction:
    """Look at the reduction under way; `complete_at` have all its finals. Comes to what there is to say (`Watched`).

    overdue: it has had its time: nobody is waited for any more, however steadily it comes.
    """

    complete_at: tuple[PeerId, ...]
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """Stalled peers, and those whose finals are late, if that is news; report of ways, as a relay of a plan."""

    stalled: tuple[frozenset[PeerId], frozenset[PeerId]] | None
    relayed: tuple[bytes, tuple[RelayedWay, ...]]


@dataclass(frozen=True, slots=True)
class StopReduction:
    """Close the reduction under way, if any."""


@dataclass(frozen=True, slots=True)
class FetchFinals:
    """Have the finals of a value's plan from its members, unless a reduction of this node's is about to bring them.

    Comes again and again while they are needed.
    """

    value: Value


@dataclass(frozen=True, slots=True)
class WorkOut:
    """Work out the state that finals lead to, and have these on disk. Comes to the Report of it."""

    finals: OfPlan
    seconds: float


@dataclass(frozen=True, slots=True)
class Append:
    """Extend the chain, in memory and on disk; comes to False for a rebase that is known.

    Raises RemoteError where it does not follow.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class Certified:
    """The round under way here is decided, the chain has it, and the others are told."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Apply:
    """Hold the state that was certified, which was worked out here, and serve it."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The state at the head came from elsewhere, and this node takes part from here."""

    base: Value


@dataclass(frozen=True, slots=True)
class Seek:
    """Begin this errand, beside the rounds."""

    errand: Errand


@dataclass(frozen=True, slots=True)
class Adopt:
    """Hold a state that was fetched, serve it, and have it on disk."""

    state: OfState


@dataclass(frozen=True, slots=True)
class DrawGenesis:
    """Draw S(0) from the seed, and hold it; should it be certified by another digest than NO_HASH, only if it is it."""

    certified: bytes


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """Have an order of the user's on disk, in place of the one of its kind from before."""

    order: Order


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Have no order of this kind on disk any more."""

    kind: type[Order]


@dataclass(frozen=True, slots=True)
class SignAmendment:
    """Sign it with the authority's key. Comes to the signature; raises ConfigError where the key is not here."""

    amendment: Amendment


@dataclass(frozen=True, slots=True)
class SignRebase:
    """Sign the rebase after the head without these members with the authority's key. Comes to it; durably the only one.

    Raises ConfigError where that makes no sense, or the key is not here.
    """

    forget: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class FindEarlierRounds:
    """Comes to the rounds before the newest whose state is on disk, or as finals there lead to it, in order."""


@dataclass(frozen=True, slots=True)
class ForgetEarlier:
    """Remove what was kept in order to go back to it (`KeepEarlier`), but the states of these rounds."""

    besides: frozenset[int]


@dataclass(frozen=True, slots=True)
class Blame:
    """Fault in what a peer said, which was not taken."""

    peer: PeerId
    text: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Let the user know; `alarming`: something is wrong."""

    text: str
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class KeepFork:
    """Have a fork on disk, among `Surroundings.forks` from now on, and tell the user."""

    fork: Fork


@dataclass(frozen=True, slots=True)
class Goodbye:
    """This node takes part in nothing more."""


MemberEffect = (
    Write
    | Broadcast
    | Send
    | Examine
    | BeginRound
    | TakePart
    | Announce
    | GiveWay
    | StandOnHead
    | Train
    | PauseTrainer
    | Contribute
    | HandOver
    | TakeBack
    | PassOn
    | KeepOwn
    | FindWork
    | ResumeWork
    | SettleWork
    | FinishWork
    | StartReduce
    | Repair
    | CloseOff
    | Evicted
    | WatchReduction
    | StopReduction
    | FetchFinals
    | WorkOut
    | Append
    | Certified
    | Apply
    | Rejoin
    | Seek
    | Adopt
    | DrawGenesis
    | KeepOrder
    | DropOrder
    | SignAmendment
    | SignRebase
    | FindEarlierRounds
    | ForgetEarlier
    | NeedEvidence
    | Mismatch
    | Blame
    | Tell
    | KeepFork
    | Goodbye
)
"""All that a driver of members does. One that it does not know is an error."""

Steps = Generator[MemberEffect, Any, None]
"""Effects, one after the other; each comes to what was done."""


def batched(effects: Iterable[Effect]) -> Iterator[Effect | tuple[DurableRecord, ...]]:
    """The same effects in order; records that are to be durable one right after the other come together."""
    for durable, group in groupby(effects, key=lambda effect: isinstance(effect, Persist)):
        if durable:
            yield tuple(effect.record for effect in group if isinstance(effect, Persist))
        else:
            yield from group
