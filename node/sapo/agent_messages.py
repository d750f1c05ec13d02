"""What a node's daemon and its agent process say to each other, on a socket pair with the trainer's framing.

The daemon has the network and no model, the agent the model, the tasks and the scorers, and no keys. What the daemon
passes on has come from peers: announcements, whose signatures it has checked, and groups, whose hashes it has; what
they are worth the agent finds out.

    daemon                                          agent
    Begin ────────────────────────────────────────►      builds or restores its policy
          ◄──────────────────────────────────────── Ready
          ◄──────────────────────────────────────── Made    a group of its own, to be announced
          ◄──────────────────────────────────────── Ask     what do others offer?
    Offered ──────────────────────────────────────►
          ◄──────────────────────────────────────── Want    these groups
    Pulled … Pulled, Delivered ───────────────────►      those that came, one by one
          ◄──────────────────────────────────────── Done    the round; Ask again, and so on
    Pause, Resume, Stop at any time

The agent asks one thing at a time and waits for the answer. A frame holds at most one group and is bounded
(`FRAME_LIMIT_BYTES`), and every field is converted strictly, so that a confused end shows up as a clear error.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from shoal.node.training.trainer_messages import (
    SUMMARY_LIMIT_CHARS,
    TRACEBACK_LIMIT_CHARS,
    Failed,
    Message,
    Pause,
    Resume,
    Scalar,
    Stop,
)
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT, RolloutsSection
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import COMPLETION_LIMIT, GROUP_LIMIT_BYTES, Reason
from shoal.protocol.wire import HASH_BYTES

OFFERS_LIMIT = 1024
"""Offers that the agent chooses from; of more, a uniform sample."""
FAULTS_LIMIT = 1024
WANTED_LIMIT = 4 * GROUPS_LIMIT
PEERS_LIMIT = 4096
WAIT_LIMIT_S = 60.0

Role = Literal["train", "sample", "judge"]
"""train: generate, share, and train. sample: generate and share only. judge: take others' groups, and score them."""

Digest = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Reward = Annotated[float, Meta(ge=0, le=1)]
GroupBytes = Annotated[bytes, Meta(min_length=1, max_length=GROUP_LIMIT_BYTES)]
Counts = Annotated[dict[str, Count], Meta(max_length=PEERS_LIMIT)]


# --- from the daemon ---


class Begin(Message, frozen=True, kw_only=True):
    """Be the agent of this node. It goes on from its newest file in `folder`, or else begins.

    rollouts: the swarm's section, in which local, external and group_size may be this node's own. announced: rounds
    below this one have been announced and are not made again. rounds: how many to make, None for no end. averages: the
    node's data folder, where the agent is to attach as the training loop of a node that averages policies.
    """

    policy: str
    options: dict[str, Scalar]
    seed: int
    swarm_id: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    me: PeerId
    folder: str
    role: Role
    rollouts: RolloutsSection
    learning_rate: float
    clip_norm: float
    device: str
    data: str | None = None
    threads: int
    announced: Count = 0
    rounds: int | None = None
    averages: str | None = None


class Offered(Message, frozen=True, kw_only=True):
    """The answer to `Ask`: what may be wanted, and who broke which rule of the exchange since the last answer."""

    offers: Annotated[tuple[Offer, ...], Meta(max_length=OFFERS_LIMIT)]
    faults: Annotated[tuple[tuple[PeerId, Reason], ...], Meta(max_length=FAULTS_LIMIT)] = ()


class Pulled(Message, frozen=True, kw_only=True):
    """One of the groups that were wanted; its hash is checked."""

    digest: Digest
    group: GroupBytes


class Delivered(Message, frozen=True, kw_only=True):
    """The end of the answer to `Want`: what has not come does not come."""


Order = Begin | Offered | Pulled | Delivered | Pause | Resume | Stop


# --- from the agent ---


class Ready(Message, frozen=True, kw_only=True):
    """The policy is built. round: the next one; restored: of which round the file was that it goes on from.

    refused: why newer files were not used, a clause each. reward: after a warm-up, the reward that it ended with.
    """

    round: Count
    restored: Count | None = None
    refused: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)] = ""
    reward: Reward | None = None


class Made(Message, frozen=True, kw_only=True):
    """A group of this node's own, in the encoding that travels, and what its completions are worth."""

    group: GroupBytes
    rewards: Annotated[tuple[Reward, ...], Meta(max_length=COMPLETION_LIMIT)]


class Ask(Message, frozen=True, kw_only=True):
    """What do others offer? wait_s: how long to wait for something to be there."""

    wait_s: Annotated[float, Meta(ge=0, le=WAIT_LIMIT_S)] = 0.0


class Want(Message, frozen=True, kw_only=True):
    """Pull these groups, at most so many bytes."""

    digests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=WANTED_LIMIT)]
    limit_bytes: Count


class Done(Message, frozen=True, kw_only=True):
    """A round is done.

    reward: mean over the completions that it generated itself, None for a judge. local, external: groups; origins: how
    many external ones of whom; external_reward: their mean reward. informative: groups trained on whose rewards vary.
    rejected: refusals in this round by reason; ignored: whose offers are not to be looked at for the time being.
    used_bytes, wasted_bytes: of all groups pulled since this agent began, those that were taken, and the others.
    """

    round: Count
    reward: Reward | None
    local: Count
    external: Count
    external_reward: Reward | None
    informative: Count
    generated_tokens: Count
    seconds: float
    origins: Counts
    rejected: Counts
    ignored: Annotated[tuple[PeerId, ...], Meta(max_length=PEERS_LIMIT)]
    used_bytes: Count
    wasted_bytes: Count


class Saved(Message, frozen=True, kw_only=True):
    """Policy and optimizer are on disk, with `round` as the next round, unless `failure` says why not."""

    round: Count
    failure: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)] = ""


class Finished(Message, frozen=True, kw_only=True):
    """All rounds that were to be made are made, and saved."""


AgentReport = Ready | Made | Ask | Want | Done | Saved | Finished | Failed

_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_REPORTS: msgspec.msgpack.Decoder[AgentReport] = msgspec.msgpack.Decoder(AgentReport)

T = TypeVar("T")


def unpack_order(frame: bytes) -> Order:
    """Decode what the daemon sent. Raises LocalError if it is no order."""
    return _decode(_ORDERS, frame, "an order")


def unpack_agent_report(frame: bytes) -> AgentReport:
    """Decode what the agent sent. Raises LocalError if it is no report of an agent, or a `Failed` out of range."""
    report = _decode(_REPORTS, frame, "a report")
    if isinstance(report, Failed) and (
        len(report.summary) > SUMMARY_LIMIT_CHARS or len(report.traceback) > TRACEBACK_LIMIT_CHARS
    ):
        raise LocalError("not a report: a failure longer than any is")
    return report


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes, what: str) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"not {what} between daemon and agent: {error}") from error
