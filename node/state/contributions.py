"""Contribution of a node to a round: what it has learnt and no certificate has counted yet; it is counted once.

    input(e)    = pseudo-gradient of round e + β · residual
    residual'   = input − decoded                  where the certificate of e includes the chunk (quantisation error)
                = input                            there, of values for which a sparse final has no place
                = input − α · pseudo-gradient      where it does not include the chunk

Each fragment has a residual of its own: a round of one concerns no other. α is how much of its own values a node keeps
when it applies the anchor (`accounts`): that much of an uncounted contribution stays in the replica, and comes again;
it is 0 for every strategy but streaming.
Where seats are few (protocol/seats.py) members contribute once in several rounds what they learnt in all of them. The
input is then the mean by tokens of the pseudo-gradient and of a residual that no round has counted: a sum would move
the anchor by as many rounds' progress as one has to wait. Source: normalised averaging, arXiv 2007.07481. In it each
value of the residual weighs as much as is left of it to do,

    share left = 1 − clip(m / r, 0, 1)      r = residual, m = anchor(e') − anchor(e), made for e' and given to e

and all of it where r is 0: little is moved a second time where the anchor has come the same way since, and what only
this member has learnt stays whole (`lab/notes/training.md` has what it is worth). What encoding lost of a counted round
is part of the next input, and of a mean with it: while its member waits it fades. Steps that a slow member has in its
replica, amid a round, stay the steps that they are.
β is the manifest's error_feedback: 1, or under a sparse codec the 0.95 of SparseLoCo (arXiv 2508.15706, algorithm 1).
The pseudo-gradient is θ − θᵢ of arXiv 2311.08105. A residual that was excluded as a whole for more than the staleness
limit of rounds belongs to an anchor long gone, and is dropped.

The residual is worked out with the input that it goes into, chunk by chunk in the cache: when a round is over nobody
waits for it, and memory is passed over once and not twice.

What a restart needs to make it again the same, and to count it once, is a file of tensors:

    values        (numel,) float32: the input, as it was encoded
    residual.<p>  the residual of fragment p, of each that the round is not of and that has one
    retained      (numel,) float32: α · pseudo-gradient, where α is not 0
    anchor        (numel,) float32: on which it was learnt, where seats are few
    metadata      term and round, the hash of the certificate's value that the round follows, weight, root, ages

With the finals of the round the residual follows from it, so nothing has to be written after the round is certified.
The encoding is a function of values, codec and that hash: made again it has the same root.

Buffers are values and no progress: a contribution has them as they are, and nothing of them comes again.

With the strategy ddp the input is a gradient and not progress: two of them do not add up. So nothing of an excluded one
comes again, residual' = 0 there; what encoding lost of an included one is carried on as above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, U8, VALUE_LIMIT, chunk_codec, final_chunk_codec
from shoal.collectives.contribution import EncodedContribution, residual_of_chunk
from shoal.collectives.dither import Dither
from shoal.collectives.finals import Finals
from shoal.collectives.fragments import Fragment, Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.memory import VectorPool, own_memory
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile, write_tensors
from shoal.protocol.chain import Chain
from shoal.protocol.commitments import seal_of
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    WEIGHT_LIMIT,
    Certificate,
    Count,
    Hash,
    Peer,
    Ready,
    Rebase,
    Term,
    Value,
)
from shoal.protocol.planning import CONTRIBUTOR, split_codec, with_buffers

_METADATA = "work"
_RETAINED = "retained"
_ANCHOR = "anchor"
_FORMAT = "shoal work 1"


class Carried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of the residual of a fragment that the round is not of."""

    fragment: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Count
    rounds_excluded: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class WorkAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a contribution. base: the value that its round follows; root: what was announced.

    handed: whose contributions are in it, of this node's site. passed_on: it is in that of the site's delegate.
    """

    format: str = _FORMAT
    term: Term
    round: Count
    base: Hash
    root: Hash
    tokens: Count
    rounds_excluded: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    carried: tuple[Carried, ...] = ()
    handed: tuple[Peer, ...] | msgspec.UnsetType = msgspec.UNSET
    passed_on: bool | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, eq=False)
class SavedWork:
    """A contribution as it is, or was, on disk. residuals: by fragment, of all that the account says are carried.

    retained: what of `values` stays in the trainer's replica, ``(numel,)``; None for nothing. anchor: on which it was
    learnt, where seats are few. vectors: whose memory `values` is.
    """

    account: WorkAccount
    values: F32
    residuals: Mapping[int, F32] = field(default_factory=dict)
    retained: F32 | None = None
    vectors: VectorPool | None = None
    anchor: F32 | None = None

    def prepare(self) -> None:
        """Have memory for the next one's values, in place of the file that this one's are now. Blocks."""
        if self.vectors is not None:
            self.vectors.prepare(self.values.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """One round's contribution: what went in, what is sent, and its weight. `base` is the hash of C(e-1)'s value.

    retained: α · pseudo-gradient, which the replica keeps; None for nothing. handed: whose work is in it besides.
    anchor: on which it was learnt, where seats are few.
    """

    round: int
    base: bytes
    number: int
    tokens: int
    values: F32
    encoded: EncodedContribution
    retained: F32 | None = None
    handed: tuple[PeerId, ...] = ()
    anchor: F32 | None = None

    def ready(
        self, head: Value, state: bytes, *, sender: PeerId, upload: int, download: int, reaches: Iterable[PeerId]
    ) -> Ready:
        """The announcement of it by `sender` for the round after `head`; caps in bytes/s, 0 where there are none."""
        return Ready(
            term=head.next_term,
            round=self.round,
            base=head.hash,
            role=CONTRIBUTOR,
            state=state,
            root=self.encoded.root,
            seal=seal_of(self.encoded.top, sender),
            squares=self.encoded.squares,
            tokens=self.tokens,
            upload=upload,
            download=download,
            reaches=tuple(sorted(reaches))[:MEMBER_LIMIT],
        )


@dataclass(frozen=True, slots=True, eq=False)
class HandedWork:
    """A contribution that another of the site handed over (protocol/sites.py).

    tokens: as far as they count. chunks: encoded, each of them the one that it committed to.
    """

    peer: PeerId
    tokens: int
    grid: Grid
    codec: str
    chunks: tuple[U8, ...]

    def add_to(self, out: F32, share: float) -> None:
        """Add so much of it to `out`, ``(numel,) float32``. Raises Undecodable."""
        scratch = np.empty(min(self.grid.chunk_values, self.grid.numel), np.float32)
        for chunk, encoded in enumerate(self.chunks):
            at = slice(*self.grid.span(chunk))
            part = scratch[: self.grid.length(chunk)]
            chunk_codec(self.codec, self.grid, chunk).decode_into(encoded, part)
            np.multiply(part, np.float32(share), out=part)
            np.add(out[at], part, out=out[at])

    def check(self) -> None:
        """Raise Undecodable unless all of it decodes."""
        scratch = np.empty(min(self.grid.chunk_values, self.grid.numel), np.float32)
        for chunk, encoded in enumerate(self.chunks):
            codec = chunk_codec(self.codec, self.grid, chunk)
            codec.decode_into(encoded, scratch[: self.grid.length(chunk)])


@dataclass(slots=True, eq=False)
class _Left:
    """Rest of a fragment's rounds: the residual, ``(numel,) float32`` or None for none, its tokens, its age.

    settled: what the residual has still to be worked out of, with the chunks that were counted, and the finals where
    they are here. anchor: on which it was learnt, where seats are few.
    """

    residual: F32 | None = None
    tokens: int = 0
    rounds_excluded: int = 0  # the fragment's own
    settled: tuple[Made, Sequence[bool], Finals | None] | None = None
    anchor: F32 | None = None


class Contributions:
    """The contribution of the round under way, and the residuals behind it.

    fragments: of all parameters, a round being of one. mixing: α, or None where applying an anchor keeps nothing.
    gradients: what is contributed are gradients, of which nothing comes again that was excluded. few_seats: what no
    round counted is averaged with what comes then, as far as others have not done it since, and not added to it; then
    there is one fragment, and neither gradients nor mixing. allocate: gives memory for what stays from one round to the
    next; it may raise StorageError, and then so does what makes or settles.
    """

    def __init__(
        self,
        fragments: Fragments,
        codec: str,
        staleness_rounds: int,
        *,
        sender: PeerId,
        error_feedback: float = 1.0,
        mixing: float | None = None,
        gradients: bool = False,
        allocate: Callable[[int], memoryview] = own_memory,
        vectors: VectorPool | None = None,
        few_seats: bool = False,
    ) -> None:
        self._few_seats = few_seats
        self._gradients = gradients
        self._allocate = allocate
        self._vectors = vectors or VectorPool(1)
        self._fragments = fragments
        self._codec = with_buffers(codec, fragments.buffers)
        self._sender = sender
        self._staleness_rounds = staleness_rounds
        self._error_feedback = np.float32(error_feedback)
        self._mixing = np.float32(mixing or 0.0)
        self._left = [_Left() for _ in fragments]
        self._stood_on: Value | None = None
        self.made: Made | None = None
        self.taken = 0
        """Number of the newest contribution that was ever taken from the trainer."""

    def retune(self, codec: str, staleness_rounds: int, *, mixing: float | None) -> None:
        """Go on under amended settings: what is made from here on is encoded by this codec."""
        self._codec = with_buffers(codec, self._fragments.buffers)
        self._staleness_rounds, self._mixing = staleness_rounds, np.float32(mixing or 0.0)

    def fragment(self, round: int) -> Fragment:
        """Return the fragment that a contribution to this round is of."""
        return self._fragments.of_round(round)

    def make(
        self,
        round: int,
        number: int,
        tokens: int,
        pseudo_gradient: F32,
        *,
        base: bytes,
        handed: Sequence[HandedWork] = (),
        anchor: F32 | None = None,
    ) -> Made:
        """Encode this round's contribution, once; `base` is the hash of the previous certificate's value.

        pseudo_gradient: of the round's fragment, ``(fragment.numel,) float32``, with the values of the buffers where
        those lie; it is read, and not kept. handed: what others of the site made of the same fragment; the contribution
        is then the mean of all, by their tokens. anchor: of all values, on which it was learnt, read and not kept;
        where seats are few and there is none, what waited weighs whole. Raises LocalError if it is not finite.
        """
        fragment = self.fragment(round)
        if handed:
            pseudo_gradient, tokens = _together(pseudo_gradient, tokens, handed)
        left = self._left[fragment.number]
        stands = self._few_seats and anchor is not None
        # They begin with a page, as their file wants it, where they are to lie together.
        values, *more = self._vectors.take_together(fragment.numel, 1 + stands)
        stood = fragment.gather(anchor, more[0]) if stands and anchor is not None else None
        self._write_input(values, pseudo_gradient, tokens, left, fragment.grid, stood)
        self.made = Made(
            round=round,
            base=base,
            number=number,
            tokens=min(tokens + left.tokens, WEIGHT_LIMIT),
            values=values,
            encoded=self._encode(values, fragment, base),
            retained=self._retained(pseudo_gradient),
            handed=tuple(work.peer for work in handed),
            anchor=stood,
        )
        left.residual = left.settled = left.anchor = None  # it is in the values now
        self.taken = number
        return self.made

    def _retained(self, pseudo_gradient: F32) -> F32 | None:
        if not self._mixing:
            return None
        return np.multiply(pseudo_gradient, self._mixing, out=self._vectors.take(pseudo_gradient.size))

    def _write_input(
        self, values: F32, pseudo_gradient: F32, tokens: int, left: _Left, grid: Grid, anchor: F32 | None
    ) -> None:
        """Compute the input of a round into `values`, (numel,) float32, by the equation at the top of this module."""
        if left.residual is None and left.settled is None:
            np.copyto(values, pseudo_gradient)
            return
        averages = self._few_seats and left.tokens > 0
        averaged = grid.chunks - self._fragments.buffers if averages else 0
        for chunk in range(grid.chunks):
            at = slice(*grid.span(chunk))
            part = values[at]
            self._write_residual(left, chunk, at, part)
            if chunk < averaged:
                weight: F32 | np.float32 = np.float32(left.tokens / max(tokens, 1))
                if anchor is not None and left.anchor is not None:
                    weight = weight * _share_left(part, left.anchor[at] - anchor[at])
                np.subtract(part, pseudo_gradient[at], out=part)
                np.multiply(part, weight / (1 + weight), out=part)
            elif self._error_feedback != 1:
                np.multiply(part, self._error_feedback, out=part)
            np.add(pseudo_gradient[at], part, out=part)

    def _write_residual(self, left: _Left, chunk: int, at: slice, out: F32) -> None:
        """The residual of a chunk, which lies `at` those values of its fragment, by the equation."""
        if left.settled is None:
            assert left.residual is not None
            np.copyto(out, left.residual[at])
            return
        made, included, finals = left.settled
        # Of a final that its disk has changed since, nothing is known, and what it decodes to may be no values at all.
        final = finals.chunks[chunk].encoded if finals is not None and finals.chunks[chunk].values_intact else None
        residual_of_chunk(made.values, made.encoded, chunk, included[chunk], out, final=final)
        if not included[chunk] and self._gradients:
            out.fill(0)
        elif not included[chunk] and made.retained is not None and not made.encoded.chunk_codec(chunk).plain:
            np.subtract(out, made.retained[at], out=out)

    def _work_out(self, left: _Left, grid: Grid) -> None:
        """Work out the residual now."""
        residual = self._vectors.take(grid.numel)
        for chunk in range(grid.chunks):
            at = slice(*grid.span(chunk))
            self._write_residual(left, chunk, at, residual[at])
        left.residual, left.settled = residual, None

    def _encode(self, values: F32, fragment: Fragment, base: bytes) -> EncodedContribution:
        dither = Dither(base, "contribution", self._sender)
        return EncodedContribution.encode(
            values, fragment.grid, self._codec, dither=dither, threads=2, allocate=self._allocate
        )

    def saved(self, made: Made, term: Term, *, passed_on: bool = False) -> SavedWork:
        """Return what of a contribution a restart needs on disk to make it again and have it counted once.

        passed_on: it is in another's.
        """
        own = self.fragment(made.round).number
        others = {n: left for n, left in enumerate(self._left) if n != own and left.residual is not None}
        account = WorkAccount(
            term=term,
            round=made.round,
            base=made.base,
            root=made.encoded.root,
            tokens=made.tokens,
            rounds_excluded=self._left[own].rounds_excluded,
            carried=tuple(
                Carried(fragment=n, tokens=left.tokens, rounds_excluded=left.rounds_excluded)
                for n, left in others.items()
            ),
            handed=made.handed or msgspec.UNSET,
            passed_on=passed_on or msgspec.UNSET,
        )
        residuals = {n: left.residual for n, left in others.items() if left.residual is not None}
        return SavedWork(account, made.values, residuals, made.retained, self._vectors, made.anchor)

    def make_again(self, work: SavedWork) -> bool:
        """Take up what was made before a restart, to be settled as if it had been made just now.

        Returns False, with nothing changed, if it is of another model or codec: it would not be what was announced.
        """
        account, values = work.account, work.values
        fragment = self.fragment(account.round)
        if values.size != fragment.numel or not self._fit(work.residuals):
            return False
        encoded = self._encode(values, fragment, account.base)
        if encoded.root != account.root:
            return False
        # The number is the trainer's, and the one that made this is gone: it counts as older than any.
        self.made = Made(
            round=account.round,
            base=account.base,
            number=0,
            tokens=account.tokens,
            values=values,
            encoded=encoded,
            retained=work.retained,
            handed=() if isinstance(account.handed, msgspec.UnsetType) else tuple(map(PeerId, account.handed)),
            anchor=work.anchor if self._few_seats else None,
        )
        self._left[fragment.number].rounds_excluded = account.rounds_excluded
        for one in account.carried:
            self._left[one.fragment] = _Left(work.residuals[one.fragment], one.tokens, one.rounds_excluded)
        return True

    def _fit(self, residuals: Mapping[int, F32]) -> bool:
        sizes = [fragment.numel for fragment in self._fragments]
        return all(n < len(sizes) and values.size == sizes[n] for n, values in residuals.items())

    def is_over(self, chain: Chain) -> bool:
        """True if the round of the contribution that was made is over, so that it can be settled."""
        return self.made is not None and self.made.base != chain.head.hash

    def awaits_finals(self, chain: Chain) -> bool:
        """True if the round of what was made is certified, and its finals say what of it was counted."""
        entry = None if self.made is None else chain.after_base(self.made.base)
        return isinstance(entry, Certificate) and chain.on_branch(entry.value)

    def is_abandoned(self, chain: Chain) -> bool:
        """True if the state on which what was made stands is none of the chain's any more."""
        if self.made is None or not self.is_over(chain) or self.awaits_finals(chain):
            return False
        return not isinstance(chain.after_base(self.made.base), Rebase)

    def settle_by(self, chain: Chain, finals: Finals | None) -> None:
        """Count what was made as the chain says, by the finals of its round; who was not counted is in its value.

        Nothing happens while its round is under way. It is kept whole where a rebase ended its round undecided, and
        dropped where the state on which it stands was abandoned.
        """
        made = self.made
        if made is None or not self.is_over(chain):
            return
        if self.is_abandoned(chain):
            self.drop()
        elif self.awaits_finals(chain):
            rounds = max(1, chain.standing.round - made.round + 1)
            included = None if self._is_left_out(made, chain) else self._included(made, finals)
            self.settle(made.round, included, finals, rounds=rounds)
        else:
            self.settle(made.round, None)

    def _is_left_out(self, made: Made, chain: Chain) -> bool:
        """True if the round's value names whom it counted, and not this node: no finals are needed to say so."""
        entry = chain.after_base(made.base)
        named = () if entry is None or isinstance(entry.value.counted, msgspec.UnsetType) else entry.value.counted
        return bool(named) and self._sender not in named

    def _included(self, made: Made, finals: Finals | None) -> Sequence[bool] | None:
        if finals is None:
            # Nobody can say whether it was counted; once is the limit, so it was.
            return (True,) * made.encoded.grid.chunks
        place = finals.plan.number(self._sender)
        # A plan may name what this node announced before a restart; what it made since is not in it.
        same = place is not None and finals.plan.participants[place].root == made.encoded.root
        return finals.included(place) if place is not None and same else None

    def settle(
        self, round: int, included: Sequence[bool] | None, finals: Finals | None = None, *, rounds: int = 1
    ) -> None:
        """The round is certified; `included` says per chunk whether this node's contribution is in it.

        finals: of the round, where they are here: what they have no place for counts as not included. rounds: how many
        have been certified since what it stands on, this one included.

        Raises LocalError if it says so of another number of chunks.
        """
        made, self.made = self.made, None
        if made is None or made.round != round:
            return
        if included is not None and len(included) != made.encoded.grid.chunks:
            raise LocalError(f"{len(included)} verdicts on a contribution of {made.encoded.grid.chunks} chunks")
        fragment = self.fragment(round)
        left = self._left[fragment.number]
        bits = included if included is not None else [False] * made.encoded.grid.chunks
        if any(bits):
            left.tokens, left.rounds_excluded = 0, 0
        else:
            own_rounds = -(-rounds // self._fragments.count)
            left.tokens, left.rounds_excluded = made.tokens, left.rounds_excluded + own_rounds
        left.residual = left.settled = None
        left.anchor = None if any(bits) else made.anchor
        if any(bits) and made.anchor is not None:
            made = replace(made, anchor=None)  # of no more use
        if self._gradients and not any(bits):
            left.tokens, left.rounds_excluded = 0, 0
        elif left.rounds_excluded > self._staleness_rounds:
            self._left[fragment.number] = _Left()
        elif not (all(bits) and _is_exact(made.encoded)):
            # Only where a final leaves values out does the residual depend on it.
            leaves_out = final_chunk_codec(made.encoded.codec, made.encoded.grid, 0).leaves_out
            left.settled = made, tuple(bits), finals if leaves_out else None
            if self._fragments.count > 1:  # it is on disk with every round of another fragment
                self._work_out(left, fragment.grid)

    def stand_on(self, chain: Chain) -> bool:
        """Go on from the state at the head of a chain; what is here, or is found on disk next, was learnt on it.

        Returns True if the state before was abandoned: contribution and residuals are dropped with it.
        """
        abandoned = self._stood_on is not None and not chain.on_branch(self._stood_on)
        if abandoned:
            self.drop()
        self._stood_on = chain.standing
        return abandoned

    def pass_on(self) -> None:
        """Another has what was made, in its own contribution: but for what encoding lost, nothing of it comes again."""
        if self.made is not None:
            self.settle(self.made.round, (True,) * self.made.encoded.grid.chunks)

    def drop(self) -> None:
        """Drop the contribution under way and the residuals: the state that they stand on was abandoned."""
        self.made = None
        self._left = [_Left() for _ in self._fragments]


def _together(own: F32, tokens: int, handed: Sequence[HandedWork]) -> tuple[F32, int]:
    """The mean of one's own and what was handed over, by tokens, in memory of its own; and the tokens of all."""
    total = tokens + sum(work.tokens for work in handed)
    mean = np.multiply(own, np.float32(tokens / total))
    for work in handed:
        work.add_to(mean, work.tokens / total)
    return mean, total


def _share_left(step: F32, moved: F32) -> F32:
    """Of each value of a step, ``(n,)``, the share that is left to do where the anchor has `moved` so since."""
    left = step - np.clip(moved, np.minimum(step, 0), np.maximum(step, 0))
    return np.divide(left, step, out=np.ones_like(step), where=step != 0)


def _is_exact(encoded: EncodedContribution) -> bool:
    """True if the codec has lost nothing: it writes fp32 as it is, and no value was so large that it was cut."""
    return split_codec(encoded.codec)[0] == "fp32" and max(encoded.squares) < float(VALUE_LIMIT) ** 2


# --- the file ---


def write_work(path: Path, work: SavedWork) -> None:
    """Write it durably; a crash leaves it whole or not there. Raises StorageError."""
    metadata = {_METADATA: msgspec.json.encode(work.account).decode()}
    vectors = {"values": work.values} | {f"residual.{fragment}": values for fragment, values in work.residuals.items()}
    if work.retained is not None:
        vectors[_RETAINED] = work.retained
    if work.anchor is not None:
        vectors[_ANCHOR] = work.anchor
    write_tensors(path, [TensorBytes.of(name, values) for name, values in vectors.items()], metadata)


def read_account(file: TensorFile) -> WorkAccount:
    """Its numbers, not yet checked against the file's hash. Raises DamagedFile."""
    try:
        account = msgspec.json.decode(file.metadata[_METADATA], type=WorkAccount)
    except (KeyError, msgspec.MsgspecError) as error:
        raise DamagedFile(f"{file.path} holds no contribution ({error}); remove it") from None
    if account.format != _FORMAT:
        raise DamagedFile(f"{file.path} is of format {account.format!r}, not {_FORMAT!r}; remove it")
    return account


def read_work(path: Path) -> SavedWork:
    """Read it, every byte checked. Raises DamagedFile, StorageError, FileNotFoundError."""
    file = TensorFile(path)
    file.check_whole()
    account = read_account(file)
    residuals = {one.fragment: _vector(file, f"residual.{one.fragment}") for one in account.carried}
    values = _vector(file, "values")
    retained, anchor = (_vector(file, name) if name in file.names else None for name in (_RETAINED, _ANCHOR))
    if any(one is not None and one.size != values.size for one in (retained, anchor)):
        raise DamagedFile(f"{file.path} holds no contribution; remove it")
    return SavedWork(account, values, residuals, retained, anchor=anchor)


def _vector(file: TensorFile, name: str) -> F32:
    values = file.array(name)
    if values.dtype != np.float32 or values.ndim != 1:
        raise DamagedFile(f"{file.path} holds no contribution; remove it")
    return values.astype(np.float32)
