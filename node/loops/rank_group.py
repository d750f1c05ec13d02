"""The processes of torch.distributed that train one model as one node: what rank 0 tells the others, and their answers.

Rank 0 alone speaks with the daemon, keeps the accounts, and decides. The others come to it in each call that the loop
makes, and do what it tells them until it says that they may go on:

    ranks 1 …                                    rank 0
    Entered(call, made, tokens)      ─────►      is every rank in the same call, its optimizer as far?
                                     ◄─────      any of Waiting, Build, HandOver, Read, Write, Measure, Report
    what these ask for               ─────►
                                     ◄─────      Proceed, and all go on at the same step; or Raised

All of it goes through a gloo group of its own, beside the user's, which may be NCCL's: nothing waits on a device, and
each wait is bounded. While rank 0 waits for the swarm it says so every second; a rank that hears nothing for
`TIMEOUT_S`, or whose peer has died, ends with an error, and the launcher does with the group what its user told it.

Values travel as they are, messages as frames of `shoal.node.pipe`: nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated, Final, Literal

import torch
from msgspec import Meta
from torch import distributed

from shoal.node.pipe import SUMMARY_LIMIT_CHARS, Framing, Message, frame_of, one_line, unpacker
from shoal.protocol.errors import ConfigError, LocalError, NetworkError

TIMEOUT_S: Final = 600.0
"""For the slowest rank to come to a call, as long as NCCL waits by default; and for rank 0's next order."""
FIRST_BYTES: Final = 256
"""So much of a frame goes ahead, filled up with zeros; of most there is no more."""
LENGTH_BYTES: Final = 4
SHARED_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun where its ranks meet in a store that outlives them."""

Span = tuple[int, int]
Call = Literal["join", "step", "at_anchor"]


class Entered(Message, frozen=True, kw_only=True):
    """A rank is in this call; its optimizer has made so many steps since the last, on so many tokens of its own."""

    call: Call
    made: int
    tokens: int


class Waiting(Message, frozen=True, kw_only=True):
    """Rank 0 waits for the daemon, and lives."""


class Build(Message, frozen=True, kw_only=True):
    """Lay the parameters out on the swarm's grid, and answer with `Holds`."""

    chunk_values: int


class Holds(Message, frozen=True, kw_only=True):
    """A rank has these spans of the flat vector whose layout has this digest."""

    digest: bytes
    spans: tuple[Span, ...]


class HandOver(Message, frozen=True, kw_only=True):
    """Of what a rank has, these spans are for it to hand over: no other rank does."""

    spans: tuple[Span, ...]


class Read(Message, frozen=True, kw_only=True):
    """Send the values of these spans that are yours to hand over, as they are now."""

    spans: tuple[Span, ...]


class Write(Message, frozen=True, kw_only=True):
    """Take the values of these spans that you have. whole: every rank has the same, and they come by a broadcast."""

    spans: tuple[Span, ...]
    whole: bool


class Measure(Message, frozen=True, kw_only=True):
    """Evaluate the model as it is; answer with `Measured`."""


class Measured(Message, frozen=True, kw_only=True):
    """The result of a rank's evaluation."""

    value: float


class Report(Message, frozen=True, kw_only=True):
    """Answer with `Losses` since the newest contribution. ends: there is one now, and the next begin with none."""

    ends: bool


class Losses(Message, frozen=True, kw_only=True):
    """Sum and number of a rank's training losses."""

    total: float
    count: int


class Proceed(Message, frozen=True, kw_only=True):
    """Go on with the loop. This is how the node stands; the fields are those of `own_loop.Swarm`."""

    peer_id: str
    seed: int
    round: int
    members: int
    held_out: float | None
    over: bool
    active: bool


class Raised(Message, frozen=True, kw_only=True):
    """Rank 0 raised an error in this call, and so must all."""

    kind: Literal["configuration", "not finite", "other"]
    summary: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)]


GroupOrder = Waiting | Build | HandOver | Read | Write | Measure | Report | Proceed | Raised
Answer = Entered | Holds | Measured | Losses

_unpack_order: Callable[[bytes], GroupOrder] = unpacker(GroupOrder, "an order of rank 0's")
_unpack_answer: Callable[[bytes], Answer] = unpacker(Answer, "a rank's answer")


def world_size() -> int:
    """The number of processes that train together with this one. Raises ConfigError where they have not met yet."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"torchrun started {launched} processes of this loop, and they have not met; before join, call "
            "`torch.distributed.init_process_group()`, and wrap the model by DDP or fully_shard"
        )
    return 1


def restarted() -> bool:
    """True if torchrun started this process again after it, or another rank, had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def starts_again() -> bool:
    """True if torchrun will start this process again when it fails."""
    counted, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return counted < most


class RankGroup:
    """One rank's end of the group."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the other ranks. Blocks until all are here. Raises NetworkError."""
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        with self._errors(None):
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Leave it; a rank that still waits for this one hears of it at once."""
        with suppress(Exception):  # the whole of torch.distributed may be gone, by its user or with another rank
            distributed.destroy_process_group(self._group)

    def send(self, rank: int, message: Message) -> None:
        """Send one rank a message. Raises NetworkError."""
        frame = frame_of(message)
        self.send_values(rank, _bytes(frame[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0")))
        if len(frame) > FIRST_BYTES:
            self.send_values(rank, _bytes(frame[FIRST_BYTES:]))

    def order(self) -> GroupOrder:
        """Wait for the next order of rank 0's. Raises NetworkError, LocalError."""
        return _unpack_order(self._receive(0))

    def answer_of(self, rank: int) -> Answer:
        """Wait for what another rank answers. Raises NetworkError, LocalError."""
        return _unpack_answer(self._receive(rank))

    def _receive(self, rank: int) -> bytes:
        framing = Framing()
        first = self.receive_values(rank, torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")).numpy().tobytes()
        length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES])
        for frame in framing.feed(first[:length]):
            return frame
        room = torch.empty(length - FIRST_BYTES, dtype=torch.uint8, device="cpu")
        rest = self.receive_values(rank, room).numpy().tobytes()
        return next(framing.feed(rest))

    def send_values(self, rank: int, values: torch.Tensor) -> None:
        """Send values of host memory to a rank that expects as many. Raises NetworkError."""
        if values.numel():
            with self._errors(rank):
                distributed.send(values, dst=rank, group=self._group)

    def receive_values(self, rank: int, out: torch.Tensor) -> torch.Tensor:
        """Receive values into `out`, and return it. Raises NetworkError."""
        if out.numel():
            with self._errors(rank):
                distributed.recv(out, src=rank, group=self._group)
        return out

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Send rank 0's values to all others, which receive them in `values`, and return it. Raises NetworkError."""
        if values.numel():
            with self._errors(None):
                distributed.broadcast(values, src=0, group=self._group)
        return values

    @contextmanager
    def _errors(self, rank: int | None) -> Iterator[None]:
        """Report what a peer's death or a timeout raises as one line."""
        try:
            yield
        except RuntimeError as error:
            who = "another" if rank is None else f"rank {rank}"
            why = one_line(error).partition(": ")[2]
            if rank is None and restarted() and os.environ.get(SHARED_STORE) == "True":
                why = f"{why} (start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: it kept addresses of before)"
            raise NetworkError(f"{who} of this node's {self.size} processes is gone, or late: {why}") from None


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Alone:
    """One process is the whole node: nobody is to be told, nothing to be added up."""

    size = 1

    @contextmanager
    def call(self, name: Call, proceed: Callable[[], Proceed], *, made: int = 0, tokens: int = 0) -> Iterator[int]:
        """Do the work of a call of the loop's; yields the tokens of the step."""
        yield tokens

    def tell(self, order: GroupOrder) -> None:
        """Tell nobody."""

    def mean(self, value: float) -> float:
        """The value."""
        return value

    def losses(self, total: float, count: int, *, ends: bool) -> tuple[float, int]:
        """The same."""
        return total, count

    def close(self) -> None:
        """There is nobody to leave."""


class Leader(Alone):
    """Rank 0 of a group: has the others do what it does. All of it raises NetworkError where one is gone or late."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.size = group.size
        self.others = range(1, group.size)
        self._asked: set[int] = set()  # ranks that wait until their answer is taken, and hear nothing before

    @contextmanager
    def call(self, name: Call, proceed: Callable[[], Proceed], *, made: int = 0, tokens: int = 0) -> Iterator[int]:
        """Do the work of a call of the loop's, with all ranks in it; yields the tokens of all their parts of the step.

        proceed: makes the order that ends it. Raises ConfigError where the ranks are not at one.
        """
        waiting: list[int] = []
        try:
            for rank in self.others:
                entered = self.group.answer_of(rank)
                waiting.append(rank)
                tokens += _checked(entered, rank, name, made).tokens
            yield tokens
        except BaseException as error:
            for rank in waiting:  # the rest are elsewhere, and see this process end
                with suppress(NetworkError):
                    if rank in self._asked:
                        self.answer_of(rank)
                    self.group.send(rank, _raised(error))
            raise
        self.tell(proceed())

    def tell(self, order: GroupOrder) -> None:
        """Tell all other ranks the same."""
        for rank in self.others:
            self.group.send(rank, order)
            if isinstance(order, Build | Measure | Report):
                self._asked.add(rank)

    def answer_of(self, rank: int) -> Answer:
        """Wait for what another rank answers. Raises NetworkError, LocalError."""
        self._asked.discard(rank)
        return self.group.answer_of(rank)

    def mean(self, value: float) -> float:
        """The mean of what this rank measured and what the others, told to `Measure`, did."""
        for rank in self.others:
            measured = self.answer_of(rank)
            if not isinstance(measured, Measured):
                raise LocalError(f"rank {rank} answered {type(measured).__name__} in place of Measured")
            value += measured.value
        return value / self.size

    def losses(self, total: float, count: int, *, ends: bool) -> tuple[float, int]:
        """Sum and number of all ranks' training losses since the newest contribution, which (`ends`) is written now."""
        self.tell(Report(ends=ends))
        for rank in self.others:
            losses = self.answer_of(rank)
            if not isinstance(losses, Losses):
                raise LocalError(f"rank {rank} answered {type(losses).__name__} in place of Losses")
            total, count = total + losses.total, count + losses.count
        return total, count

    def close(self) -> None:
        """Leave the group."""
        self.group.close()


def _checked(entered: Answer, rank: int, name: Call, made: int) -> Entered:
    """A rank's first message in a call. Raises ConfigError if it is in another, or its optimizer made other steps."""
    if not isinstance(entered, Entered) or entered.call != name:
        where = entered.call if isinstance(entered, Entered) else type(entered).__name__
        raise ConfigError(f"rank {rank} is in {where!r} and rank 0 in {name!r}; make the same calls in all ranks")
    if entered.made != made:
        raise ConfigError(
            f"the optimizer of rank {rank} made {entered.made} steps and that of rank 0 {made}; make "
            "the same steps in all ranks"
        )
    return entered


def _raised(error: BaseException) -> Raised:
    summary = (str(error) or type(error).__name__)[:SUMMARY_LIMIT_CHARS]
    if isinstance(error, ConfigError):
        return Raised(kind="configuration", summary=summary)
    if isinstance(error, FloatingPointError):
        return Raised(kind="not finite", summary=summary)
    return Raised(kind="other", summary=f"rank 0 ended: {one_line(error)}"[:SUMMARY_LIMIT_CHARS])


def raise_as(raised: Raised) -> None:
    """Raise in this rank what rank 0 raised. Raises ConfigError, FloatingPointError, NetworkError."""
    match raised.kind:
        case "configuration":
            raise ConfigError(raised.summary)
        case "not finite":
            raise FloatingPointError(raised.summary)
        case _:
            raise NetworkError(raised.summary)
