"""Every event that a node writes into its event log, declared once.

Each class is an event and each of its attributes a field: the list of names and fields, the page of events of the
documents, the writer and the reader (`event_log`) are made of these. A log may be of another version of Shoal, so a
field that an event can do without has a default, which stands for what a line does not say; unknown fields are passed
over, and an event of an unknown name is read as `UnknownEvent`. A number that is not finite is null in a log.

Terms are texts, `rebases.rollbacks`; digests and hashes are hex; peers are PeerIds; seconds have six decimals at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from shoal.protocol.amending import Setting


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake_case):
    """One line of an event log. at: wall clock in seconds, filled in by the writer; no meaning depends on it."""

    at: float = 0.0

    @property
    def name(self) -> str:
        """The event's name in a log."""
        return name_of(type(self))


def name_of(kind: type[Event]) -> str:
    """The name in a log of this kind of event."""
    return str(kind.__struct_config__.tag)


class UnknownEvent(Event, frozen=True, kw_only=True):
    """An event of another version of Shoal, of which no more is read than its name. Nobody writes it."""

    called: str

    @property
    def name(self) -> str:
        """See `Event`."""
        return self.called


# -- the node itself ---------------------------------------------------------------------------------------------------


class Started(Event, frozen=True, kw_only=True):
    """The process began, of the node `peer_id`, which calls itself `called`.

    boot: how often it has started on its data folder.
    """

    peer_id: str = ""
    pid: int = 0
    boot: int = 0
    called: str = ""


class Listening(Event, frozen=True, kw_only=True):
    """The node can be dialled at these addresses, for control and for lanes, `seconds` after it began."""

    addresses: tuple[str, ...]
    lanes: tuple[str, ...] = ()
    seconds: float = 0.0


class Failed(Event, frozen=True, kw_only=True):
    """The node gave up, for this reason."""

    message: str = ""


class Left(Event, frozen=True, kw_only=True):
    """The node ended in order, for this reason."""

    reason: str = ""


class Woke(Event, frozen=True, kw_only=True):
    """The machine slept, or the process was stopped, for so many seconds."""

    seconds: float = 0.0


class Holding(Event, frozen=True, kw_only=True):
    """The node stands still at a point of a round where it was asked to hold, in test mode. progress: in 0..1."""

    round: int
    phase: str
    progress: float = 0.0


class Released(Event, frozen=True, kw_only=True):
    """The node goes on from where it held, in test mode."""

    round: int
    phase: str


# -- its trainer, or its agent -----------------------------------------------------------------------------------------


class TrainerStarted(Event, frozen=True, kw_only=True):
    """The trainer is ready.

    device: `N x cuda` or `N x cpu` for a trainer of N processes. import_s: the seconds that importing torch took.
    """

    device: str = ""
    import_s: float = 0.0


class TrainerRestarted(Event, frozen=True, kw_only=True):
    """The trainer died, of `cause`, and was started again from the certified state."""

    cause: str = ""


class LoopDetached(Event, frozen=True, kw_only=True):
    """The user's own training loop detached, and why."""

    cause: str = ""


class Resumed(Event, frozen=True, kw_only=True):
    """The trainer took over its snapshot of `round`.

    exact: it goes on exactly where the snapshot was taken; otherwise it took its moments only. refused: why it took
    nothing, else empty. tokens: of the work in it that no contribution holds.
    """

    round: int
    exact: bool = False
    refused: str = ""
    tokens: int = 0


class Evaluated(Event, frozen=True, kw_only=True):
    """Held-out loss after a round; round 0 is before the first.

    With `fragments`, after every so many rounds and after the last. loss: None if it is not finite. term: of the state,
    empty where an earlier release wrote it. A metric that begins with `training loss` is what a loop or an agent
    without an evaluation of its own trained at.
    """

    term: str = ""
    round: int
    loss: float | None = None
    metric: str = ""


class Sampled(Event, frozen=True, kw_only=True):
    """Texts of the certified model of `round`, evaluated then: `texts` by the prompt that each goes on from."""

    round: int
    texts: Mapping[str, str] = {}


class AgentStarted(Event, frozen=True, kw_only=True):
    """Strategy rollouts: the agent is ready, after `round` rounds.

    restored: of which round the file was that it goes on from; refused: why newer ones were not used.
    warm_up_reward: the reward that it ended with, if it was warmed up just before.
    """

    pid: int = 0
    round: int
    restored: int | None = None
    refused: str = ""
    warm_up_reward: float | None = None


class HeldOutReward(Event, frozen=True, kw_only=True):
    """Strategy rollouts: the greedy reward of the policy after `round` rounds, on `tasks` fixed held-out tasks."""

    round: int
    reward: float
    by_family: Mapping[str, float] = {}
    tasks: int = 0
    seconds: float = 0.0


class AgentSaved(Event, frozen=True, kw_only=True):
    """Strategy rollouts: what the agent learnt is on disk, with `round` as the next, unless `failure` says why not."""

    round: int
    failure: str = ""


class AgentDied(Event, frozen=True, kw_only=True):
    """Strategy rollouts: the agent died, of `cause`; another is started."""

    cause: str = ""


class EngineFailed(Event, frozen=True, kw_only=True):
    """Strategy rollouts: the engine that draws this sampler's groups gave nothing, for `reason`; it is asked again."""

    round: int
    reason: str


# -- peers, and how this node is reached -------------------------------------------------------------------------------


class PeerEvent(Event, frozen=True, kw_only=True):
    """A change of a peer."""

    peer: str


class Linked(PeerEvent, frozen=True, kw_only=True, omit_defaults=True):
    """The node has a message link with a peer, which calls itself `called`."""

    called: str = ""


class Lost(PeerEvent, frozen=True, kw_only=True, omit_defaults=True):
    """The link with a peer ended. why: in words, what ended it; empty where that is not known."""

    why: str = ""


class Detoured(PeerEvent, frozen=True, kw_only=True):
    """Nothing comes over the link with a peer: others pass on what the two have to say to each other."""


class Suspected(PeerEvent, frozen=True, kw_only=True):
    """A peer does not answer."""


class Died(PeerEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A peer is gone. left: it had taken its leave; written only where that is so."""

    left: bool = False


class Revived(PeerEvent, frozen=True, kw_only=True):
    """A peer that was suspected, or held for dead, is there."""


class Revoked(PeerEvent, frozen=True, kw_only=True):
    """The swarm's authority has taken a peer's admission back."""


class Parted(PeerEvent, frozen=True, kw_only=True):
    """No lane leads to a linked member: neither can be dialled, and no member that relays is left."""


class Reachability(Event, frozen=True, kw_only=True):
    """A new way in which this node is reached: `public`, `relayed` or `unknown`, and the addresses for control."""

    reachability: str
    addresses: tuple[str, ...] = ()


class AddressesChanged(Event, frozen=True, kw_only=True):
    """Addresses of this machine are gone, and others have come."""

    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()


class PortsMapped(Event, frozen=True, kw_only=True):
    """The router passes these of its ports on to this machine."""

    ports: tuple[str, ...] = ()


class Stranded(Event, frozen=True, kw_only=True):
    """Nobody reaches this node, and no member that does relays. The ports are those that would have to be open."""

    control_port: int = 0
    lane_port: int = 0


# -- rounds ------------------------------------------------------------------------------------------------------------


class RoundStarted(Event, frozen=True, kw_only=True):
    """The node begins a round of so many members. role: `training`, `joiner` or `observer`."""

    term: str = "0.0"
    round: int
    members: int = 0
    role: str = ""


class Contributed(Event, frozen=True, kw_only=True):
    """The node made its contribution to a round, to be announced, or handed over to the delegate of its site.

    tokens: of all its own work in it; loss (the mean, None if not finite), steps and seconds: of the inner steps since
    the contribution before. wall_s, blocked_s: since that one, and how long of it the trainer stood still for an
    anchor.
    """

    round: int
    tokens: int = 0
    loss: float | None = None
    steps: int = 0
    seconds: float = 0.0
    wall_s: float = 0.0
    blocked_s: float = 0.0


class Planned(Event, frozen=True, kw_only=True):
    """The node accepted a plan. participants, contributors: how many; evicted: whom it goes on without."""

    round: int
    view: int = 0
    attempt: int = 0
    participants: int = 0
    contributors: int = 0
    evicted: tuple[str, ...] = ()
    planner: str = ""


class Reduced(Event, frozen=True, kw_only=True):
    """All results of a plan are here, `seconds` after the first plan of the round, and lead to the state `digest`."""

    round: int
    plan: str = ""
    digest: str = ""
    seconds: float = 0.0


class Signed(Event, frozen=True, kw_only=True):
    """A record that binds the node in the agreement on a round is on disk, and may be sent."""

    term: str = "0.0"
    round: int
    view: int


class Prepared(Signed, frozen=True, kw_only=True):
    """The node prepares a value in a view of a round."""


class Voted(Signed, frozen=True, kw_only=True):
    """The node votes in a view of a round."""


class Proposed(Signed, frozen=True, kw_only=True):
    """The node proposes a value in a view of a round."""


class ViewChanged(Signed, frozen=True, kw_only=True):
    """The node goes on to a later view of a round, and says nothing more in those before."""


class RoundEnded(Event, frozen=True, kw_only=True):
    """A round is over: certified, or of a strategy that certifies none. What its event does not tell is empty or 0."""

    round: int
    tokens: int = 0

    @property
    def term(self) -> str:
        """The term; the first where rounds are not certified."""
        return "0.0"

    @property
    def digest(self) -> str:
        """The certified state's digest."""
        return ""

    @property
    def value(self) -> str:
        """The certified value's hash."""
        return ""

    @property
    def members(self) -> tuple[str, ...]:
        """PeerIds of the round's participants."""
        return ()

    @property
    def contributors(self) -> int:
        """Number of contributions in the result."""
        return 0

    @property
    def coverage(self) -> float:
        """The share of these that was included."""
        return 0.0

    @property
    def reduce_s(self) -> float:
        """Seconds from the plan to its results."""
        return 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole round."""
        return 0.0

    @property
    def lanes_sent(self) -> int:
        """Bytes sent over lanes since the process began."""
        return 0

    @property
    def control_sent(self) -> int:
        """Bytes sent over control since the process began."""
        return 0


class Certified(RoundEnded, frozen=True, kw_only=True):
    """A round has its certificate, and its state is applied here.

    coverage: the share of (chunk, contributor) pairs that were included. counted: what this node announced for the
    round, if anything, is in it. total_s: until the state was applied; kept_s: how long test mode then took to keep
    what is recomputed. Bytes count since the process started.
    """

    term: str = "0.0"
    digest: str
    value: str = ""
    view: int = 0
    members: tuple[str, ...] = ()
    contributors: int = 0
    counted: bool = True
    coverage: float = 0.0
    reduce_s: float = 0.0
    total_s: float = 0.0
    kept_s: float = 0.0
    lanes_sent: int = 0
    lanes_received: int = 0
    control_sent: int = 0
    control_received: int = 0


class Stepped(RoundEnded, frozen=True, kw_only=True):
    """Strategy gossip: the outer step of a round is made.

    members: who is in sight; partner: with whom it was made, None if alone, and `why`. Bytes count since the process
    started.
    """

    members: tuple[str, ...] = ()
    partner: str | None = None
    why: str = ""
    reduce_s: float = 0.0
    total_s: float = 0.0
    lanes_sent: int = 0
    lanes_received: int = 0
    control_sent: int = 0
    control_received: int = 0


class TaskRewards(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one task family in a round: a node's own and those of others, how many and their mean reward."""

    own: int = 0
    reward: float | None = None
    external: int = 0
    external_reward: float | None = None


class Rollouts(RoundEnded, frozen=True, kw_only=True):
    """Strategy rollouts: the agent is through a round of its own, which took `seconds`.

    own, external: groups of its own, and of others; origins: how many external ones of whom. reward: the mean over the
    completions that it generated, None for a judge; external_reward: that of the external groups; informative: groups
    whose rewards vary. tokens: those that it generated; bytes: of groups pulled in this round; used_bytes: of all that
    were taken since the agent began. rejected: refusals in this round by reason; ignored: whose offers are not looked
    at for the time being. made: groups that it announced in this round; pulled: groups of others that came; tasks: the
    rewards by task family. control_sent counts since the process started. taking_s: of `seconds`, for how many others'
    groups were waited for.

    entropy: nats a token of its own completions; length: their tokens, mean; distinct: share of them that are unlike
    others of their group. gradient_norm: before it was cut; clipped: share of tokens whose ratio was.
    """

    reward: float | None = None
    own: int = 0
    external: int = 0
    external_reward: float | None = None
    origins: Mapping[str, int] = {}
    informative: int = 0
    made: int = 0
    pulled: int = 0
    tasks: Mapping[str, TaskRewards] = {}
    bytes: int = 0
    control_sent: int = 0
    used_bytes: int = 0
    rejected: Mapping[str, int] = {}
    ignored: tuple[str, ...] = ()
    seconds: float = 0.0
    taking_s: float = 0.0
    entropy: float | None = None
    length: float | None = None
    distinct: float | None = None
    gradient_norm: float | None = None
    clipped: float | None = None


class CaughtUp(Event, frozen=True, kw_only=True):
    """The node reached the state after `round` without having computed it."""

    round: int


# -- decisions of the members, and what is watched over ----------------------------------------------------------------


class Decision(Event, frozen=True, kw_only=True):
    """The members decided something else than another state, in the round `term`, `round` that has this value."""

    term: str = "0.0"
    round: int
    digest: str = ""
    value: str = ""
    members: tuple[str, ...] = ()


class RolledBack(Decision, frozen=True, kw_only=True):
    """A round decided to go back to the state of round `to`, whose digest this is.

    Written by every node that learns of it, also from a fetched chain.
    """

    to: int


class Rebased(Decision, frozen=True, kw_only=True):
    """The swarm's authority opened another term on the state of round `to`, with these members.

    Written by every node that learns of it, also from a fetched chain.
    """

    to: int


class Amended(Decision, frozen=True, kw_only=True):
    """A round decided that other settings, by `section.key`, are in force from the next one on.

    Written by every node that learns of it, also from a fetched chain.
    """

    settings: Mapping[str, Setting] = {}


class Banned(Decision, frozen=True, kw_only=True):
    """A round decided to go on without `peers`, who are proven to have lied. evidence: the digests of the proofs.

    Written by every node that learns of it, also from a fetched chain.
    """

    peers: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


class Forked(Event, frozen=True, kw_only=True):
    """Two certificates for one position were seen: their values, and who signed both. The node signs nothing more."""

    term: str = "0.0"
    round: int
    values: tuple[str, ...] = ()
    signers: tuple[str, ...] = ()


class Evidence(Event, frozen=True, kw_only=True):
    """Proof that a peer lied in `round` was verified here. kind: how it lied; digest: the proof's."""

    peer: str = ""
    kind: str = ""
    round: int
    digest: str = ""


class Audited(Event, frozen=True, kw_only=True):
    """Sums of a round were recomputed: of so many chunks, which is as many as could be."""

    round: int
    chunks: int = 0


class Weighed(Event, frozen=True, kw_only=True):
    """The loss before and after a peer's contribution, and whether the work was useful, with `[audit] work`."""

    peer: str
    round: int
    before: float | None = None
    after: float | None = None
    useful: bool = False


# -- all of them -------------------------------------------------------------------------------------------------------


def _declared(kind: type[Event]) -> Iterator[type[Event]]:
    for derived in kind.__subclasses__():
        if derived.__subclasses__():
            yield from _declared(derived)
        elif derived is not UnknownEvent:
            yield derived


EVENTS: Final[Mapping[str, type[Event]]] = {name_of(kind): kind for kind in _declared(Event)}
"""Every event by its name in a log, in the order in which they are declared."""

_OF_PEERS: Final[tuple[type[PeerEvent], ...]] = (Linked, Lost, Detoured, Suspected, Died, Revived, Revoked)
_PEER_CHANGES: Final = {name_of(kind): kind for kind in _OF_PEERS}


def peer_event(change: str, peer: str, *, left: bool = False, why: str = "", called: str = "") -> PeerEvent:
    """The event of a change that `swarm.members` tells.

    left: whether a peer that died had taken its leave. why: what ended a link that is lost. called: by itself.
    """
    kind = _PEER_CHANGES[change]
    if kind is Died:
        return Died(peer=peer, left=left)
    if kind is Linked:
        return Linked(peer=peer, called=called)
    return Lost(peer=peer, why=why) if kind is Lost else kind(peer=peer)
