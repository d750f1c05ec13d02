"""Messages between daemon and trainer, framed as on every pipe (`shoal.node.pipe`).

Tensors never travel here: they lie in files that both see (`shared_tensors`), and a message says that they are ready.

**Progress is counted once.** By the trainer's accounts (`accounts`), a `Contribution` number `n` is what its replica
has learnt since the base, the certified anchor of the last `Apply`, on the fragment that the round reduces; so a later
one *replaces* an earlier one of the same base and must never be added to it. Once the daemon has encoded contribution
`n` for a round it has *taken* it: that work is the daemon's from then on (counted by a certificate, or kept by the
daemon as a residual). Until the round ends it may ask for more local steps only with ``contribute=False``, which leaves
contribution and mark alone. `Apply` then names the newest number taken, ever:

* ``taken == n`` of the newest contribution: its fragment moves to the anchor by the rule of the strategy.
* ``taken`` is older than this base: nothing of the replica was taken, and all of it is kept.
* anything else would lose or double work, and is refused as a bug of the daemon.

``fresh=True`` drops local progress, and what was restored: the replica becomes the anchor exactly. Numbers go on rising
across restarts, so an `Apply` that names a contribution of a process that died is understood as older than this base.

**Training goes on beside the round**, by the steps of overlap: an `Apply` that comes before they are made is carried
out after exactly these. One that comes later is carried out at once, and finds the trainer making the steps for a late
anchor, or waiting after them. Whatever is ordered after an `Apply` waits with it, but for `Ping`, `Pause`, `Resume` and
`Stop`; a pause and a `Hurry` end the overlap.

**A restart loses nothing where a snapshot was written.** `Snapshot` has the trainer copy all that it knows
beside the anchor, and write it to a file while it goes on; it is ordered right after a contribution was taken,
when the trainer has nothing else to do, and mark and replica are the same. A new process that is told to
`Restore` it before its first `Apply` goes on with the same moments, random numbers and batches.

**Amid a round** a snapshot is ordered too, now and then, with what no contribution holds yet. It takes its place on
disk before that is contributed, or not at all: so where it is there, its work is counted nowhere. A process that
restores it adds this to its first anchor, be it a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated

import blake3
import msgspec
from msgspec import Meta

from shoal.node.pipe import Failed, Message, Pause, Resume, Stop, unpacker
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import InnerSection, Manifest
from shoal.protocol.records import Rate
from shoal.protocol.wire import CounterField

PARAMETERS_LIMIT = 100_000  # named parameters of a model
SNAPSHOT_BASE = "base"
"""Metadata of a snapshot's file amid a round: the hash of the value that led to its anchor, in hex."""

SAMPLE_LIMIT = 4
"""Prompts of a workload that are gone on from."""
PROMPT_LIMIT_CHARS = 80
SAMPLE_LIMIT_CHARS = 120
"""Of what a model says after one of them."""

Scalar = bool | int | float | str
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
"""As a trainer tells of them. It may be anybody's loop: what it says goes into signed messages and counts."""


class InnerSettings(InnerSection, frozen=True, kw_only=True):
    """The manifest's [inner], as a trainer takes it; a trial of a workload without a manifest steps by these defaults.

    The learning rate follows the swarm's tokens (`schedule`), so that all nodes share it.
    """

    lr: float = 3e-3

    @classmethod
    def of(cls, manifest: Manifest) -> InnerSettings:
        """Take the settings from a swarm's manifest."""
        return cls(**msgspec.structs.asdict(manifest.inner))


class SyncSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules by which contributions are cut and anchors applied, as at the top of `accounts`. mixing: None for diloco.

    gradients: contributions are gradients at the anchor, by `GradientAccounts`; there is nothing to cut then.
    """

    chunk_values: int = 262_144
    fragments: int = 1
    overlap_steps: int = 0
    late_steps: int = 0
    mixing: float | None = None
    gradients: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> SyncSettings:
        """Take the settings from a swarm's manifest."""
        sync = manifest.sync
        return cls(
            chunk_values=manifest.round.chunk_values,
            fragments=sync.fragments,
            overlap_steps=sync.overlap_steps,
            late_steps=sync.late_steps,
            mixing=sync.applied_mixing,
            gradients=sync.exchanges_gradients,
        )


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of the data: that of member number `member` of `members` in round `round` of seed `seed`.

    A `member` of `members` or more is a peer outside the electorate, numbered so as to differ from others.
    """

    seed: int
    round: int
    member: int
    members: int

    @property
    def stream_seed(self) -> int:
        """A 63-bit seed that no other member or round shares; `members` plays no part in it."""
        place = msgspec.msgpack.encode((self.seed, self.round, self.member))
        return int.from_bytes(blake3.blake3(place).digest()[:8], "little") >> 1


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layout of the flat vector of `numel` float32 values: names and shapes, sorted by name, tied ones once.

    The parameters lie at its front. Those of `names` that are in `buffers`, sorted too, lie at its end; between the two
    there are zeros, so many that the first buffer begins a chunk.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numel: int
    buffers: tuple[str, ...] = ()

    @property
    def digest(self) -> bytes:
        """BLAKE3 over the msgpack of [names, shapes], and of buffers where there are any.

        They are arrays only, so there is one canonical encoding.
        """
        told = (self.names, self.shapes, self.buffers) if self.buffers else (self.names, self.shapes)
        return blake3.blake3(msgspec.msgpack.encode(told)).digest()

    @property
    def buffers_begin(self) -> int:
        """Place of the first buffer in the vector; its end where there is none."""
        among = set(self.buffers)
        return self.numel - sum(
            prod(shape) for name, shape in zip(self.names, self.shapes, strict=True) if name in among
        )

    def buffer_chunks(self, chunk_values: int) -> int:
        """Number of chunks that the buffers take."""
        return -(-(self.numel - self.buffers_begin) // chunk_values)

    def places(self) -> dict[str, slice]:
        """Where each of `names`, in their order, lies in the vector."""
        at, buffers_at, among, places = 0, self.buffers_begin, set(self.buffers), dict[str, slice]()
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = prod(shape)
            if name in among:
                places[name] = slice(buffers_at, buffers_at + size)
                buffers_at += size
            else:
                places[name] = slice(at, at + size)
                at += size
        return places


# Daemon to trainer.


class Start(Message, frozen=True, kw_only=True):
    """Build the workload. `contributions` is the highest number an earlier process gave out.

    accumulate: into how many parts each batch is cut, whose gradients are added up.
    """

    workload: str
    options: Mapping[str, Scalar]
    data: str | None
    seed: int
    inner: InnerSettings
    sync: SyncSettings = SyncSettings()
    device: str
    threads: int
    accumulate: int = 1
    contributions: int


class Attach(Message, frozen=True, kw_only=True):
    """The shared memory now holds two vectors of `numel` values: map it."""

    numel: int


class WriteInitial(Message, frozen=True, kw_only=True):
    """Write the parameters drawn from the seed, S(0), into the contribution vector."""


class Train(Message, frozen=True, kw_only=True):
    """Train on the replica as it is; replaces a running `Train`, whose steps stay.

    With `contribute` a `Contribution` is written when `steps` have been made since the one before, one more at least;
    without it, `Trained` comes after `steps` more. An assignment equal to the last one goes on in the same stream of
    batches. `certified_tokens` is what the swarm has certified so far (for schedules). `order` numbers the daemon's
    orders, so that it can tell which one was carried out. `contributors` made the state on which it trains; 0 where
    this node does not know. `missing` are the members that did not, where they are few.
    """

    round: int
    steps: int
    order: int = 0
    assignment: Assignment
    certified_tokens: int = 0
    contribute: bool = True
    contributors: int = 0
    missing: tuple[PeerId, ...] = ()


class Apply(Message, frozen=True, kw_only=True):
    """Order to stand on θ(round), which is lent with it; ends a running `Train`. See the top of the module."""

    round: int
    taken: int = 0
    fresh: bool = False


class Hurry(Message, frozen=True, kw_only=True):
    """Do not make the steps of overlap that an `Apply` still waits for: the next anchor is here."""


class Snapshot(Message, frozen=True, kw_only=True):
    """Copy the inner state at this step boundary, and write it to the file `path` beside what follows.

    round: the last one whose contribution is in it. base: for one amid a round, the hash of the value that led to the
    anchor; it is not made where a contribution is under way. Answered by `Snapshotted` when it is on disk, or cannot
    be.
    """

    round: int
    path: str
    base: bytes = b""

    @property
    def midway(self) -> bool:
        """True if it is of the midst of a round, and no contribution holds what is in it."""
        return bool(self.base)


class Restore(Message, frozen=True, kw_only=True):
    """Take over the snapshot at `path`, before the first `Apply`; without `exact` its moments only.

    spent: a contribution to the round after was made, and may be counted; what it held is not kept. midway: it is of
    the midst of a round, and the anchor to come may be a later one than it stood on.
    Answered by `Restored`. A file that is not what was written is refused, and training begins without.
    """

    path: str
    round: int
    exact: bool
    spent: bool = False
    midway: bool = False


class Retune(Message, frozen=True, kw_only=True):
    """The swarm amended its settings: these are in force from the next order on. Moments and progress stay."""

    inner: InnerSettings
    sync: SyncSettings


class Evaluate(Message, frozen=True, kw_only=True):
    """Evaluate the base, not the replica, on held-out data."""

    round: int


class Ping(Message, frozen=True, kw_only=True):
    """Answer with `Pong` at the next step boundary."""


Command = (
    Start
    | Attach
    | WriteInitial
    | Train
    | Apply
    | Hurry
    | Snapshot
    | Restore
    | Retune
    | Pause
    | Resume
    | Evaluate
    | Ping
    | Stop
)


# Trainer to daemon.


class Started(Message, frozen=True, kw_only=True):
    """The model is built; importing torch took `import_s` before.

    metric: in words, of the workload's evaluation. loss_metric: of training losses; empty where nobody knows it.
    """

    layout: Layout
    metric: str
    device: str
    import_s: float = 0.0
    loss_metric: str = ""


class Attached(Message, frozen=True, kw_only=True):
    """The shared memory is mapped."""


class Initial(Message, frozen=True, kw_only=True):
    """The contribution vector holds S(0)."""


class Progress(Message, frozen=True, kw_only=True):
    """Step `step` of the running stretch is done, at mean `loss` so far; about one a second."""

    round: CounterField
    step: CounterField
    loss: float
    tokens_per_s: Rate


class Contribution(Message, frozen=True, kw_only=True):
    """The contribution vector begins with base − local of the round's fragment; with local itself, of buffers.

    `tokens` are those of all work in it; `steps`, mean `loss`, `seconds` and `tokens_per_s` are of the inner steps
    since the contribution before. Since then `wall_s` have passed, of which it stood still for `blocked_s`, waiting for
    the anchor: neither evaluating nor paused.
    """

    number: CounterField
    round: CounterField
    tokens: CounterField
    steps: CounterField
    loss: float
    seconds: Seconds
    tokens_per_s: Rate
    order: CounterField = 0
    wall_s: Seconds = 0.0
    blocked_s: Seconds = 0.0


class Trained(Message, frozen=True, kw_only=True):
    """A stretch without a contribution is done; its progress lives in the replica."""

    round: CounterField
    steps: CounterField
    loss: float
    seconds: Seconds
    tokens_per_s: Rate


class Applied(Message, frozen=True, kw_only=True):
    """The replica stands on θ(round); the anchor vector may be written again."""

    round: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Text that a model said after a prompt."""

    prompt: Annotated[str, Meta(max_length=PROMPT_LIMIT_CHARS)]
    text: Annotated[str, Meta(max_length=SAMPLE_LIMIT_CHARS)]


class Evaluating(Message, frozen=True, kw_only=True):
    """The base is being evaluated from now on: until `Evaluated`, no step is to be expected."""

    round: int


class Evaluated(Message, frozen=True, kw_only=True):
    """The workload's metric of the base; lower is better. samples: of the base too, where any were taken.

    data: a hash of the data that it was measured on, empty where the workload does not tell.
    """

    round: int
    value: float
    data: Annotated[bytes, Meta(max_length=32)] = b""
    samples: Annotated[tuple[Sample, ...], Meta(max_length=SAMPLE_LIMIT)] = ()


class Snapshotted(Message, frozen=True, kw_only=True):
    """The snapshot of `round` is in the file `path`, unless `failure` says why not.

    copy_s: what the trainer did not train for; write_s: how long the disk took beside it.
    """

    round: int
    path: str
    copy_s: float
    write_s: float
    size_bytes: int
    failure: str = ""
    midway: bool = False


class Restored(Message, frozen=True, kw_only=True):
    """The snapshot of `round` was taken over, unless `refused` says why not.

    tokens: of the work in it that no contribution holds.
    """

    round: int
    path: str
    exact: bool
    refused: str = ""
    tokens: int = 0


class Pong(Message, frozen=True, kw_only=True):
    """The trainer is alive and between two steps."""


Report = (
    Started
    | Attached
    | Initial
    | Progress
    | Contribution
    | Trained
    | Applied
    | Evaluating
    | Evaluated
    | Snapshotted
    | Restored
    | Pong
    | Failed
)


unpack_command: Callable[[bytes], Command] = unpacker(Command, "a command")
unpack_report: Callable[[bytes], Report] = unpacker(Report, "a report")
