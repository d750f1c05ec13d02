"""Rollout groups, what is announced of them, and how both are read from strangers.

A group is G completions of one task by one policy. It is announced in a few hundred bytes, signed by its origin, and
pulled by the BLAKE3 of its encoding by whoever chose it. The announced rewards are hints: the receiver makes the task
again from its `TaskRef` and scores the text itself.

A task is assigned, not chosen: its seed follows from the swarm, the origin, the origin's round and the task's index in
that round (`assigned_seed`). So nobody can offer another's completions as its own: they answer another task.

Whatever the bytes are, the only exception that leaves this module for them is `RolloutError`, with the reason by which
refusals are counted.

Source: "Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing", arXiv 2509.08721.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId, parse_peer_id
from shoal.protocol.wire import (
    COUNTER_LIMIT,
    ENVELOPE_OVERHEAD_LIMIT_BYTES,
    CounterField,
    Envelope,
    HashField,
    Message,
    PeerIdField,
    Sealer,
    SwarmId,
    canonical,
    decode,
    open_envelope,
)

ANNOUNCEMENT_KIND = "rollout-announcement"

CONFIG_LIMIT_BYTES = 1024
COMPLETION_LEAST, COMPLETION_LIMIT = 2, 64
"""Completions in a group."""
COMPLETION_LIMIT_BYTES = 32 << 10
GROUP_LIMIT_BYTES = 1 << 20
CHUNK_LIMIT_BYTES = 256 << 10
ANNOUNCEMENT_LIMIT_BYTES = 2048
SEALED_LIMIT_BYTES = ANNOUNCEMENT_LIMIT_BYTES + ENVELOPE_OVERHEAD_LIMIT_BYTES
BATCH_LIMIT_BYTES = 192 << 10
BATCH_LIMIT_ITEMS = 64
NEWS_LIMIT_BYTES = BATCH_LIMIT_BYTES - 1024
"""Announcements in one answer of news; the rest is what they are wrapped in."""
HELD_LIMIT_ITEMS = 512
VARIANCE_TOLERANCE = 1e-9

TOKEN_LIMIT = 32_768
"""Tokens of one completion."""
POLICY_LIMIT_CHARS = 128
LOG_PROB_TOLERANCE = 1e-3
"""A log-probability may be so far above 0: softmax in the engine's precision rounds."""

TokenCount = Annotated[int, Meta(ge=1, le=TOKEN_LIMIT)]

_TOKEN_BYTES = 4
_SEED_CONTEXT = "shoal rollout task seed v1"
_SAMPLING_CONTEXT = "shoal rollout sampling seed v1"
_DRAWS_CONTEXT = "shoal rollout draws v1"
_DRAW_BYTES, _DRAW_BITS = 8, 53
SAMPLING_SEEDS = 2**31
"""Seeds of sampling are below it, as every engine takes them."""


class Reason(StrEnum):
    """The reasons why rollouts are refused; the keys of every `rejected` table."""

    MALFORMED = "malformed"
    FORGED = "forged"
    REPLAYED = "replayed"
    DUPLICATE = "duplicate"
    COPIED = "copied"
    FOREIGN_TASK = "foreign task"
    UNKNOWN_TASK = "unknown task"
    UNSAFE_FAMILY = "unsafe family"
    STALE = "stale"
    TOO_LARGE = "too large"
    MISLABELLED = "mislabelled"
    HINT = "hint"
    NO_VARIANCE = "no variance"
    QUOTA = "quota"
    STRANGER = "stranger"
    IGNORED = "ignored"
    UNAVAILABLE = "unavailable"
    UNSCORED = "unscored"
    OTHER_POLICY = "other policy"


class RolloutError(RemoteError):
    """Bytes that are no rollout of this swarm, and under which `reason` that is counted. `peer`: None blames nobody."""

    def __init__(self, message: str, *, reason: Reason, peer: PeerId | None = None) -> None:
        super().__init__(message, peer=peer)
        self.peer: PeerId | None = peer
        self.reason = reason


class TaskRef(Message, frozen=True, kw_only=True):
    """The reference that it takes to make a task again. `config`: canonical msgpack, read by the family alone."""

    family: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9_.-]+\Z")]
    version: Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_.+-]+\Z")]
    config: Annotated[bytes, Meta(max_length=CONFIG_LIMIT_BYTES)]
    seed: CounterField
    index: Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Drawn(Message, frozen=True, kw_only=True):
    """The tokens of one completion, uint32, and their log-probabilities, float32, all little-endian, as it was drawn.

    tokens: of none, or of each log-probability. versions: by run of tokens, the version of the policy that drew them
    and how many they are; left out where all are of the group's `policy_version`.
    """

    log_probs: Annotated[bytes, Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES * TOKEN_LIMIT)]
    tokens: Annotated[bytes, Meta(max_length=_TOKEN_BYTES * TOKEN_LIMIT)] = b""
    versions: (
        Annotated[tuple[tuple[CounterField, TokenCount], ...], Meta(min_length=1, max_length=TOKEN_LIMIT)]
        | msgspec.UnsetType
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        if len(self.log_probs) % _TOKEN_BYTES or len(self.tokens) not in (0, len(self.log_probs)):
            raise ValueError("log-probabilities and tokens of different numbers")
        if not all(is_log_prob(value) for value in self.values()):
            raise ValueError("a log-probability that is not finite, or above 0")
        if self.versions is not msgspec.UNSET and _TOKEN_BYTES * sum(n for _, n in self.versions) != len(
            self.log_probs
        ):
            raise ValueError("versions of another number of tokens")

    @staticmethod
    def of(log_probs: Sequence[float], tokens: Sequence[int], versions: Sequence[tuple[int, int]] = ()) -> Drawn:
        """Pack them. tokens: of each log-probability, or none, below 2^32. versions: none if they go without saying."""
        return Drawn(
            log_probs=struct.pack(f"<{len(log_probs)}f", *log_probs),
            tokens=struct.pack(f"<{len(tokens)}I", *tokens),
            versions=tuple(versions) or msgspec.UNSET,
        )

    def values(self) -> tuple[float, ...]:
        """The log-probabilities."""
        return struct.unpack(f"<{len(self.log_probs) // _TOKEN_BYTES}f", self.log_probs)

    def ids(self) -> tuple[int, ...]:
        """The tokens, if there are any."""
        return struct.unpack(f"<{len(self.tokens) // _TOKEN_BYTES}I", self.tokens)


class Sampling(Message, frozen=True, kw_only=True):
    """How a group was drawn: the policy by its own name, or its engine's, and each completion's tokens.

    drawn: none where an engine gives no log-probabilities; a learner then has its own alone.
    """

    policy: Annotated[str, Meta(min_length=1, max_length=POLICY_LIMIT_CHARS)]
    drawn: Annotated[tuple[Drawn, ...], Meta(max_length=COMPLETION_LIMIT)] = ()


class RolloutGroup(Message, frozen=True, kw_only=True):
    """Completions of one task by `origin`'s policy, in `origin`'s round.

    sampling: left out but where the swarm's [rollouts] say `labels`.
    """

    origin: PeerIdField
    round: CounterField
    policy_version: CounterField
    task: TaskRef
    completions: Annotated[tuple[str, ...], Meta(min_length=COMPLETION_LEAST, max_length=COMPLETION_LIMIT)]
    sampling: Sampling | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        parse_peer_id(self.origin)
        if self.sampling is not msgspec.UNSET and len(self.sampling.drawn) not in (0, len(self.completions)):
            raise ValueError("tokens of another number of completions")
        if any(len(text.encode()) > COMPLETION_LIMIT_BYTES for text in self.completions):
            raise ValueError(f"a completion of more than {COMPLETION_LIMIT_BYTES} bytes")


class _GroupOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a RolloutGroup that says whose it is."""

    origin: str


class Announcement(Message, frozen=True, kw_only=True):
    """The description of a group, for those who choose. Mean and (population) variance of its rewards are claims."""

    digest: HashField
    size_bytes: Annotated[int, Meta(ge=1, le=GROUP_LIMIT_BYTES)]
    task: TaskRef
    completions: Annotated[int, Meta(ge=COMPLETION_LEAST, le=COMPLETION_LIMIT)]
    reward_mean: Annotated[float, Meta(ge=0, le=1)]
    reward_variance: Annotated[float, Meta(ge=0, le=1)]
    policy_version: CounterField
    round: CounterField

    def __post_init__(self) -> None:
        if self.reward_variance > self.reward_mean * (1 - self.reward_mean) + VARIANCE_TOLERANCE:
            raise ValueError("a variance that rewards between 0 and 1 with this mean cannot have")


class AnnouncementBatch(Message, frozen=True, kw_only=True):
    """One gossip message: sealed announcements of its sender, and digests of others' groups that it serves too."""

    announcements: Annotated[
        tuple[Annotated[bytes, Meta(max_length=SEALED_LIMIT_BYTES)], ...], Meta(max_length=BATCH_LIMIT_ITEMS)
    ] = ()
    held: Annotated[tuple[HashField, ...], Meta(max_length=HELD_LIMIT_ITEMS)] = ()


class CatchUpRequest(Message, frozen=True, kw_only=True):
    """Asks an origin for its announcements beyond `newest`, and for those before it that did not arrive.

    `boot` 0 and `newest` 0: none arrived so far. The answer is an `AnnouncementBatch`.
    """

    boot: CounterField = 0
    newest: CounterField = 0
    missing: Annotated[tuple[CounterField, ...], Meta(max_length=BATCH_LIMIT_ITEMS)] = ()


class NewsRequest(Message, frozen=True, kw_only=True):
    """Asks a neighbour for the announcements, of whomever, that came to it after its number `after` in its life `boot`.

    `boot` 0: for the last ones. The answer is `News`.
    """

    boot: CounterField = 0
    after: CounterField = 0


class News(Message, frozen=True, kw_only=True):
    """Sealed announcements as they came to a node in its life `boot`, up to its number `last`."""

    boot: CounterField
    last: CounterField
    announcements: Annotated[
        tuple[Annotated[bytes, Meta(max_length=SEALED_LIMIT_BYTES)], ...], Meta(max_length=BATCH_LIMIT_ITEMS)
    ] = ()


class GroupRequest(Message, frozen=True, kw_only=True):
    """Asks for the bytes of a group from `offset` on."""

    digest: HashField
    offset: Annotated[int, Meta(ge=0, lt=GROUP_LIMIT_BYTES)]


class GroupChunk(Message, frozen=True, kw_only=True):
    """The answer. `absent`: this node does not hold the group; `busy`: it served this peer enough for the moment."""

    status: Literal["chunk", "absent", "busy"]
    data: Annotated[bytes, Meta(max_length=CHUNK_LIMIT_BYTES)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedAnnouncement:
    """An announcement with its origin and its place in the origin's order."""

    announcement: Announcement
    origin: PeerId
    boot: int
    sequence: int


def assigned_seed(swarm_id: SwarmId, origin: PeerId, round_number: int, index: int) -> int:
    """The seed (63 bits) of the task that `origin` has at `index` of its round."""
    return seed_of(canonical([swarm_id, origin, round_number, index]), context=_SEED_CONTEXT)


def seed_of(name: bytes, *, context: str) -> int:
    """A seed (63 bits) that follows from `name`; that of another context is another."""
    return int.from_bytes(blake3(name, derive_key_context=context).digest()[:8], "big") & COUNTER_LIMIT


def sampling_seed(swarm_id: SwarmId, origin: PeerId, round_number: int, index: int) -> int:
    """The seed, below SAMPLING_SEEDS, with which an engine draws the first completion of a group; others follow it."""
    name = canonical([swarm_id, origin, round_number, index])
    return int.from_bytes(blake3(name, derive_key_context=_SAMPLING_CONTEXT).digest()[:4], "big") % SAMPLING_SEEDS


def assigned_draws(
    swarm_id: SwarmId, origin: PeerId, round_number: int, index: int, completion: int
) -> Callable[[int], float]:
    """The numbers in [0, 1) by which the tokens of a completion are drawn, by their place in it.

    They are assigned as the task is, so who knows the policy can tell which token had to be drawn. The number at place
    p is the high 53 bits of the p-th 8 bytes (little-endian) of

        BLAKE3-derive-key("shoal rollout draws v1", canonical([swarm, origin, round, index, completion]))

    divided by 2^53.
    """
    name = canonical([swarm_id, origin, round_number, index, completion])
    stream = blake3(name, derive_key_context=_DRAWS_CONTEXT)

    def at(place: int) -> float:
        bits = int.from_bytes(stream.digest(_DRAW_BYTES, seek=_DRAW_BYTES * place), "little")
        return math.ldexp(bits >> 8 * _DRAW_BYTES - _DRAW_BITS, -_DRAW_BITS)

    return at


def is_log_prob(value: float) -> bool:
    """Return whether `value` can be the logarithm of a probability."""
    return math.isfinite(value) and value <= LOG_PROB_TOLERANCE


def is_own_task(swarm_id: SwarmId, origin: PeerId, round_number: int, task: TaskRef) -> bool:
    """Return whether the task is one that `origin` was assigned in its round."""
    return task.seed == assigned_seed(swarm_id, origin, round_number, task.index)


def digest_of(data: bytes) -> bytes:
    """The name of an encoded group: 32 bytes of BLAKE3."""
    return blake3(data).digest()


# --- groups ---


def encode_group(group: RolloutGroup) -> bytes:
    """The one encoding of a group. Raises LocalError if it is out of range."""
    data = canonical(_in_range(group, RolloutGroup))
    if len(data) > GROUP_LIMIT_BYTES:
        raise LocalError(f"our own group has {len(data)} bytes; the limit is {GROUP_LIMIT_BYTES}")
    return data


def decode_group(data: bytes, *, peer: PeerId | None = None) -> RolloutGroup:
    """The group in `data`, delivered by `peer`. Raises RolloutError, also for another encoding than the one."""
    group = _decode(data, RolloutGroup, GROUP_LIMIT_BYTES, peer)
    if canonical(group) != data:
        raise RolloutError("a group in another encoding than the one", reason=Reason.MALFORMED, peer=peer)
    return group


def announce_group(group: RolloutGroup, data: bytes, rewards: tuple[float, ...]) -> Announcement:
    """The announcement of a group that `data` encodes, with the rewards (G,) that this node gave its completions.

    Raises LocalError if rewards are missing or outside of [0, 1].
    """
    if len(rewards) != len(group.completions) or not all(0 <= reward <= 1 for reward in rewards):
        raise LocalError(f"{len(rewards)} rewards for {len(group.completions)} completions, or some outside of 0 to 1")
    mean, variance = reward_moments(rewards)
    return Announcement(
        digest=digest_of(data),
        size_bytes=len(data),
        task=group.task,
        completions=len(group.completions),
        reward_mean=mean,
        reward_variance=variance,
        policy_version=group.policy_version,
        round=group.round,
    )


def reward_moments(rewards: tuple[float, ...]) -> tuple[float, float]:
    """Mean and population variance of rewards (G,) in [0, 1]; the variance of equal rewards is exactly 0."""
    if min(rewards) == max(rewards):
        return float(rewards[0]), 0.0
    mean = sum(rewards) / len(rewards)
    return mean, sum((reward - mean) ** 2 for reward in rewards) / len(rewards)


# --- announcements ---


def seal_announcement(sealer: Sealer, announcement: Announcement) -> bytes:
    """The announcement, signed and numbered. Raises LocalError if it is out of range."""
    return sealer.seal(ANNOUNCEMENT_KIND, canonical(_in_range(announcement, Announcement)))


def peek_announcement(data: bytes, *, peer: PeerId | None = None) -> Envelope:
    """The envelope in `data`, nothing of which is proven: for cheap checks ahead of the signature's.

    Raises RolloutError.
    """
    envelope = _decode(data, Envelope, SEALED_LIMIT_BYTES, peer)
    if envelope.kind != ANNOUNCEMENT_KIND:
        raise RolloutError(f"a {envelope.kind} for an announcement", reason=Reason.MALFORMED, peer=peer)
    return envelope


def open_announcement(data: bytes, swarm_id: SwarmId, *, peer: PeerId | None = None) -> SignedAnnouncement:
    """The announcement in `data`, if its origin signed it for this swarm and was assigned its task.

    Raises RolloutError, blaming `peer` who delivered it.
    """
    peek_announcement(data, peer=peer)
    try:
        envelope = open_envelope(data, swarm_id)
    except RemoteError as error:
        raise RolloutError(str(error), reason=Reason.FORGED, peer=peer) from None
    announcement = _decode(envelope.payload, Announcement, ANNOUNCEMENT_LIMIT_BYTES, peer)
    if not is_own_task(swarm_id, envelope.sender, announcement.round, announcement.task):
        raise RolloutError("a task that its origin was not assigned", reason=Reason.FOREIGN_TASK, peer=peer)
    return SignedAnnouncement(
        announcement=announcement, origin=envelope.sender, boot=envelope.boot, sequence=envelope.seq
    )


def maker_of(data: bytes) -> str | None:
    """Return whom an encoded group names as its origin, None if nobody. Nothing else of it is looked at."""
    try:
        return decode(data, _GroupOrigin, limit_bytes=GROUP_LIMIT_BYTES).origin
    except RemoteError:
        return None


def check_as_announced(group: RolloutGroup, announcement: Announcement, origin: PeerId) -> None:
    """Raises RolloutError unless the group is what `origin` announced, but for the rewards."""
    same = (
        group.origin == origin
        and group.round == announcement.round
        and group.policy_version == announcement.policy_version
        and group.task == announcement.task
        and len(group.completions) == announcement.completions
    )
    if not same:
        raise RolloutError("another group than announced", reason=Reason.MISLABELLED, peer=origin)


# --- what travels around them ---


def encode_batch(batch: AnnouncementBatch) -> bytes:
    """One gossip message. Raises LocalError over the limits."""
    data = canonical(_in_range(batch, AnnouncementBatch))
    if len(data) > BATCH_LIMIT_BYTES:
        raise LocalError(f"a batch of {len(data)} bytes; the limit is {BATCH_LIMIT_BYTES}")
    return data


T = TypeVar("T")

_LIMITS_BYTES: Mapping[type, int] = {
    AnnouncementBatch: BATCH_LIMIT_BYTES,
    CatchUpRequest: 64 + 9 * BATCH_LIMIT_ITEMS,
    NewsRequest: 64,
    News: BATCH_LIMIT_BYTES,
    GroupRequest: 128,
    GroupChunk: CHUNK_LIMIT_BYTES + 128,
}


def decode_message(data: bytes, of: type[T], *, peer: PeerId | None = None) -> T:
    """Read what a peer sent around groups and announcements; these are still sealed. Raises RolloutError."""
    return _decode(data, of, _LIMITS_BYTES[of], peer)


def _decode(data: bytes, of: type[T], limit_bytes: int, peer: PeerId | None) -> T:
    if len(data) > limit_bytes:
        text = f"{of.__name__} of {len(data)} bytes; the limit is {limit_bytes}"
        raise RolloutError(text, reason=Reason.TOO_LARGE, peer=peer)
    try:
        return decode(data, of, limit_bytes=limit_bytes)
    except RemoteError as error:
        raise RolloutError(str(error), reason=Reason.MALFORMED, peer=peer) from None


def _in_range(value: T, of: type[T]) -> T:
    """`value`, checked as a receiver will. Raises LocalError."""
    try:
        return msgspec.convert(msgspec.to_builtins(value, builtin_types=(bytes,)), of)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise LocalError(f"our own {of.__name__} is out of range: {error}") from error
