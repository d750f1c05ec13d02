"""The accounts of a replica: what it owes the swarm, what the swarm has taken of it, and how it takes the swarm's word.

Three host vectors, each ``(numel,) float32`` (a mark only its fragment's values):

    base b    the certified anchor it stands on, itself where the host trains, else a copy that a device reads fast
    local l   the live parameters: b and all progress that no certificate has counted, as far as is known here
    mark c    l as it was when the newest contribution was written

A contribution of round e is b − l on the round's fragment. When the anchor a after it is here, on that fragment

    diloco      l ← a + (l − c)             what was learnt since the mark is kept
    streaming   l ← α·l + (1 − α)·a         mixing: α = 0 drops the overlapped steps there, α = 1 ignores the swarm
    not taken   l ← a + (l − b)             nothing of it was contributed, so all of it is kept

and every other chunk stays as it is, to the bit, unless its anchor changed too (rounds missed): then as not taken.

Buffers, which lie behind the parameters, are values and no progress. A contribution of any fragment has theirs as they
are, and those of each anchor take the place of the node's own: what two batches' running variances differ by may be
more than a third has.

Only what an anchor touches is copied between the model's device and the host, and what is contributed travels to the
host beside the steps of overlap.
Nothing here knows of batches, of workloads or of which optimizer moves the parameters. With the strategy ddp, which
exchanges gradients, the accounts are `GradientAccounts`.

Tokens are counted by fragment: a token was trained on by all of them, and each contributes its share of it once, in
whole numbers. So a weight follows the work that is in the fragment, also after a missed round.

Source: DiLoCo, arXiv 2311.08105, algorithm 1; Streaming DiLoCo, arXiv 2501.18512, algorithm 2 (fragments, τ, α).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragment, Fragments, runs_of
from shoal.collectives.grid import Grid
from shoal.node.training.flat_parameters import HostCopy, blocks_of
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import Layout, SyncSettings
from shoal.protocol.errors import LocalError

THREADED_VALUES = 1 << 22
"""So many values and more are compared in several threads."""


class Flat(Protocol):
    """A model's parameters as one host vector, ``(numel,) float32``: `FlatParameters`, or what behaves like it.

    What it is changed by is ``(values,) float32`` on a device: that of the model, or where it is in parts the host.
    """

    layout: Layout
    block_values: int
    """Number of values that may be updated at a time: more is too much for the device, or a waste of copies."""

    def new_vector(self) -> torch.Tensor:
        """A vector of zeros."""

    @property
    def on_host(self) -> bool:
        """True if host vectors need not be copied to be computed with."""

    def new_base(self) -> torch.Tensor:
        """A vector of zeros that stays and is often copied to the device."""

    def set_aside(self) -> torch.Tensor:
        """A copy of all parameters, ``(numel,) float32``, where it is made soonest."""

    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the parameters into `out`, and return it."""

    def scatter(self, vector: torch.Tensor) -> None:
        """Copy `vector` into the parameters."""

    def copy_out(self, spans: Sequence[slice]) -> HostCopy:
        """Begin to copy the values there, as they are now and one span after another, to the host."""

    def update(self, spans: Sequence[slice], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the values there by what `change` makes of a copy of them on the device."""

    def to_device(self, vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
        """The values of a host vector there, on the device; not to be changed, as they may be a part of `vector`."""


class GradientFlat(Flat, Protocol):
    """The same, of which gradients can be had."""

    def gather_gradients(self, out: torch.Tensor) -> None:
        """Copy the gradients into `out`, ``(numel,) float32``, and the buffers; zeros for what has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """A contribution that was written: its number, and the tokens of the work in it."""

    number: int
    tokens: int


class Outgoing(Protocol):
    """A contribution that is settled and not written yet: its values may be on their way to the host."""

    @property
    def here(self) -> bool:
        """True if `write` waits for no device."""

    def write(self, out: Vector) -> Contributed:
        """Write it to the front of `out`, before the next `apply`. Raises FloatingPointError if it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedAccounts:
    """Accounts as they are kept for a restart.

    kept: progress that no contribution holds, l − c, or None for none; local: l itself, where mixing needs it to the
    bit. tokens: per fragment, of what is kept. marked: tokens taken off at the mark, None where there is none.
    """

    kept: torch.Tensor | None = None
    local: torch.Tensor | None = None
    round: int = 0
    steps: int = 0
    tokens: tuple[int, ...]
    marked: int | None = None


_NOT_RESTORED: tuple[int | None, int] = None, 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mark:
    """The fragment as it was when contribution `number` was settled. tokens: those in it, times the fragments.

    local: ``(fragment.numel,) float32``; None where it was restored, which only mixing does without.
    """

    number: int
    fragment: Fragment
    tokens: int
    local: HostCopy | None


class _FromReplica:
    """base − local of a fragment, as it was at the mark; of buffers local itself.

    A buffer that is no longer finite is as the anchor has it: a running mean keeps what one bad row made of it, though
    the step was dropped, and the anchor to come sets it right.
    """

    def __init__(self, base: Vector, fragment: Fragment, local: HostCopy, contributed: Contributed) -> None:
        self._base, self._fragment, self._local, self._contributed = base, fragment, local, contributed

    @property
    def here(self) -> bool:
        return self._local.here

    def write(self, out: Vector) -> Contributed:
        local, parameters = self._local.wait().numpy(), len(self._fragment.parameter_chunks)
        for number, (there, here) in enumerate(self._fragment.spans()):
            if number < parameters:
                np.subtract(self._base[there], local[here], out=out[here])
            else:
                np.copyto(out[here], np.where(np.isfinite(local[here]), local[here], self._base[there]))
        if not np.isfinite(out[: self._fragment.numel]).all():
            raise FloatingPointError(
                "the replica's parameters are no longer finite: a loss was not, or the learning rate is too high"
            )
        return self._contributed


class _Standing:
    """Common part of both accounts: the anchor that a replica stands on, whatever it contributes."""

    def __init__(self, flat: Flat, contributions: int) -> None:
        self._flat = flat
        self._base: torch.Tensor | None = None
        self._copied = False  # whether the base is a copy of its anchor
        self._issued = contributions

    @property
    def base(self) -> torch.Tensor | None:
        """The anchor that it stands on, ``(numel,) float32``, not to be changed; None before the first `apply`."""
        return self._base

    def local(self) -> torch.Tensor:
        """A host copy of the parameters, ``(numel,) float32``."""
        return self._flat.gather(self._flat.new_vector())

    def _rebase(self, anchor: Vector) -> torch.Tensor:
        """Have all of `anchor` as the base, and return it."""
        if self._flat.on_host:
            self._base, self._copied = _tensor(anchor), False
        else:
            if self._base is None or not self._copied:
                self._base, self._copied = self._flat.new_base(), True
            np.copyto(self._base.numpy(), anchor)
        return self._base

    def write_initial(self, out: Vector) -> None:
        """Write the parameters drawn from the seed, S(0), into `out`, ``(numel,) float32``.

        Raises LocalError after the first `apply`: they are gone then.
        """
        if self._base is not None:
            raise LocalError("the initial parameters are asked for after an anchor was applied")
        self._flat.gather(torch.from_numpy(out))


class Accounts(_Standing):
    """Accounts of what a replica has contributed and has yet to contribute.

    Lifetime: construct; `write_initial` for genesis; `restore` what an earlier process knew; `apply` the first anchor;
    then `count` every step, `contribute` after enough of them, `apply` the anchor that came of it, and so on. Between
    the last two come `overlap_steps`, and where the anchor is late then at most `late_steps` more.
    """

    def __init__(self, flat: Flat, *, sync: SyncSettings | None = None, contributions: int = 0) -> None:
        sync = sync or SyncSettings()
        super().__init__(flat, contributions)
        self._mixing = sync.mixing
        self.overlap_steps, self.late_steps = sync.overlap_steps, sync.late_steps
        buffers = flat.layout.buffer_chunks(sync.chunk_values)
        self._fragments = Fragments(Grid(flat.layout.numel, sync.chunk_values), sync.fragments, buffers)
        self._mark: _Mark | None = None
        self._tokens = [0] * sync.fragments  # of the work in local − base, by fragment
        self._settled = contributions  # numbers up to this one belong to earlier bases
        self._restored: SavedAccounts | None = None
        self._spent: Fragment | None = None  # where nothing of what was restored is to be kept
        self._restored_at = _NOT_RESTORED
        """Round of what was restored, and its steps, until those are of another round."""
        self.steps = 0
        """Inner steps since the newest contribution was written; if rounds went by while this node was away, those of
        the round under way alone."""

    def retune(self, sync: SyncSettings) -> None:
        """Overlap and mix by these from here on; how parameters are cut cannot be amended."""
        self._mixing, self.overlap_steps, self.late_steps = sync.mixing, sync.overlap_steps, sync.late_steps

    @property
    def tokens(self) -> int:
        """Tokens of all the work that no certificate has counted, as far as is known here."""
        return sum(self._tokens) // self._fragments.count

    @property
    def waiting(self) -> bool:
        """True if a contribution was written and the anchor after it is not here yet."""
        return self._mark is not None

    @property
    def amid_round(self) -> bool:
        """True if there is work since the anchor, and no contribution to the round after it yet."""
        return self._base is not None and self._mark is None and any(self._tokens)

    @property
    def overlap_left(self) -> int:
        """Number of steps to be made before the anchor after the newest contribution is applied."""
        return max(0, self.overlap_steps - self.steps) if self.waiting else 0

    @property
    def goes_on(self) -> bool:
        """True if another step may be made while the anchor after the newest contribution is not here."""
        return self.waiting and self.steps < self.overlap_steps + self.late_steps

    def count(self, tokens: int) -> None:
        """A step was made, on so many tokens; one that changed nothing counts as a step on none."""
        self.steps += 1
        self._tokens = [counted + tokens for counted in self._tokens]

    def mark(self, round: int) -> Outgoing:
        """Settle what is contributed of the fragment of `round`: base − local, as they are now, to be written next.

        It replaces one that was settled since the last `apply`. Raises LocalError before an `apply`.
        """
        if self._base is None:
            raise LocalError("a contribution was ordered before any anchor was applied")
        fragment = self._fragments.of_round(round)
        local = self._flat.copy_out(fragment.runs())
        counted, parts = self._tokens[fragment.number], self._fragments.count
        tokens = max(1, counted // parts) if counted else 0
        self._issued += 1
        self._mark = _Mark(
            number=self._issued,
            fragment=fragment,
            tokens=min(counted, tokens * parts),
            local=local,
        )
        self.steps, self._restored_at = 0, _NOT_RESTORED
        return _FromReplica(self._base.numpy(), fragment, local, Contributed(number=self._issued, tokens=tokens))

    def contribute(self, out: Vector, round: int) -> Contributed:
        """`mark`, and write it to the front of `out`, ``(≥ fragment.numel,)``, at once.

        Raises FloatingPointError if the parameters are no longer finite.
        """
        return self.mark(round).write(out)

    def apply(self, anchor: Vector, *, round: int | None = None, taken: int = 0, fresh: bool = False) -> None:
        """Stand on a new anchor, ``(numel,) float32``, by the rules at the top of the module.

        It is to stay as it is until the next one is applied: the base may be the anchor itself.
        `round`, `taken` and `fresh` are those of the message `Apply`: a fresh one is stood on exactly, and what was
        restored is dropped too. Raises LocalError, with nothing changed, if `taken` names neither the mark nor a number
        older than this base.
        """
        if fresh:
            self._forget()
            self._flat.scatter(self._rebase(anchor))
            self._settled = max(self._issued, taken)
        elif self._base is None:
            self._apply_first(anchor, round)
            self._settled = max(self._settled, taken)
        else:
            self._apply(anchor, self._base, self._taken(taken))
            self._settled = max(self._settled, taken)
        came_back, had = self._restored_at
        if came_back is not None and round is not None and round > came_back:
            # Rounds went by while it was away, or until it knew of them: the work is kept, the place in them is not.
            # Who made most steps since, and is late for the round, is slow, and goes on where it is.
            if self.steps <= 2 * had:
                self.steps = 0
            self._restored_at = _NOT_RESTORED

    def _forget(self) -> None:
        """Drop all progress, what was restored too."""
        self._restored = self._spent = self._mark = None
        self._restored_at = _NOT_RESTORED
        self._tokens, self.steps = [0] * self._fragments.count, 0

    def _apply_first(self, anchor: Vector, round: int | None) -> None:
        """Stand on the first anchor, with what was restored where it belongs to it."""
        saved = self._restored
        if saved is not None and saved.local is not None and round is not None and round > saved.round:
            self._forget()  # it stood on an anchor that is gone: on this one it would take back what others learnt
        saved, self._restored = self._restored, None
        local = base = self._rebase(anchor)
        if saved is not None and saved.local is not None:
            local = saved.local
        elif saved is not None and saved.kept is not None:
            if round is not None and round > saved.round:
                saved.kept[self._fragments.buffers_begin :] = 0
            local = saved.kept.add_(base)
        if self._spent is not None:
            local = local.clone()
            self._spent.scatter(self._spent.gather(anchor, np.empty(self._spent.numel, np.float32)), local.numpy())
        self._flat.scatter(local)
        if saved is not None and self._mark is not None and (round is None or round >= saved.round):
            self._apply(anchor, base, self._mark)

    def _apply(self, anchor: Vector, base: torch.Tensor, mark: _Mark | None) -> None:
        """Move `base` and the replica to `anchor`; `mark` is that of a contribution that was taken."""
        if not self._flat.on_host and not self._copied:  # the model has moved to a device
            base = self._rebase(base.numpy())
        if mark is not None:
            self._take(anchor, base, mark)
            self._tokens[mark.fragment.number] -= mark.tokens
        taken = mark.fragment.parameter_chunks if mark is not None else ()
        grid = self._fragments.grid
        parameters = range(grid.chunks - self._fragments.buffers)
        others = [slice(*grid.span(chunk)) for chunk in parameters if chunk not in taken]
        if spans := runs_of(changed(base.numpy(), anchor, others)):
            self._carry_over(anchor, base, spans)
        if self._fragments.buffers:
            own = slice(self._fragments.buffers_begin, grid.numel)
            buffers = self._advance(anchor, base, (own,))
            self._flat.update((own,), lambda _: self._flat.to_device(buffers, (own,)))
        if self._flat.on_host:
            self._rebase(anchor)
        self._mark = None

    def _advance(self, anchor: Vector, base: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
        """Return a vector that has the anchor's values there: itself on the host, else the base, which has them now."""
        if self._flat.on_host:
            return _tensor(anchor)
        for span in spans:
            np.copyto(base.numpy()[span], anchor[span])
        return base

    def _take(self, anchor: Vector, base: torch.Tensor, mark: _Mark) -> None:
        """Move the mark's fragment to `anchor`, which has the contribution in it."""
        mixing = self._mixing
        local = mark.local.wait() if mixing is None and mark.local is not None else None
        at = 0
        for spans in blocks_of(mark.fragment.parameter_runs(), self._flat.block_values):
            end = at + sum(span.stop - span.start for span in spans)
            new = self._flat.to_device(self._advance(anchor, base, spans), spans)
            if mixing is not None:
                self._flat.update(spans, lambda values: values.mul_(mixing).add_(new * (1 - mixing)))  # noqa: B023  called at once
            else:
                assert local is not None
                marked = self._flat.to_device(local, (slice(at, end),))
                self._flat.update(spans, lambda values: values.sub_(marked).add_(new))  # noqa: B023  called at once
            at = end

    def _carry_over(self, anchor: Vector, base: torch.Tensor, spans: Sequence[slice]) -> None:
        """Move all progress there to `anchor`."""

        def moved(values: torch.Tensor, block: Sequence[slice]) -> torch.Tensor:
            values.sub_(self._flat.to_device(base, block))
            return values.add_(self._flat.to_device(self._advance(anchor, base, block), block))

        for block in blocks_of(spans, self._flat.block_values):
            self._flat.update(block, partial(moved, block=block))

    def _taken(self, taken: int) -> _Mark | None:
        """The mark, if it is of the contribution that was taken."""
        if self._mark is not None and taken == self._mark.number:
            return self._mark
        if taken <= self._settled:
            return None
        raise LocalError(f"contribution {taken} was taken, but a later one or an anchor has replaced it")

    def saved(self, round: int, *, midway: bool = False) -> SavedAccounts:
        """Return what is to be kept for a restart, as it stands. round: the last one whose contribution is in it.

        midway: it may be taken up on a later anchor; to be asked for `amid_round`. Raises LocalError before an `apply`.
        """
        if self._base is None:
            raise LocalError("a snapshot was ordered before any anchor was applied")
        mark, tokens = self._mark, list(self._tokens)
        if midway:
            return SavedAccounts(kept=self._progress(self._base), round=round, steps=self.steps, tokens=tuple(tokens))
        if self._mixing is not None:
            marked = None if mark is None else mark.tokens
            local = self._flat.set_aside()
            return SavedAccounts(local=local, round=round, steps=self.steps, tokens=tuple(tokens), marked=marked)
        if mark is not None:
            tokens[mark.fragment.number] -= mark.tokens
        kept: torch.Tensor | None = None
        if any(tokens):  # seldom, and only then the trainer waits for vectors of the model's size
            since = self._base.clone()
            if mark is not None and mark.local is not None:
                mark.fragment.scatter(mark.local.wait().numpy(), since.numpy())
            kept = self.local().sub_(since)
            if mark is not None:  # the anchor to come has other buffers
                kept[self._fragments.buffers_begin :] = 0
        return SavedAccounts(kept=kept, round=round, steps=self.steps, tokens=tuple(tokens))

    def _progress(self, base: torch.Tensor) -> torch.Tensor:
        """The replica less `base`, ``(numel,) float32``, on its device; on the host where that has no room for it."""
        progress = self._flat.set_aside()
        for block in blocks_of([slice(0, progress.numel())], self._flat.block_values):
            progress[block[0]].sub_(self._flat.to_device(base, block).to(progress.device))
        return progress

    def restore(self, saved: SavedAccounts, *, spent: bool = False) -> None:
        """Take over what an earlier process kept, before the first `apply` of the anchor that it stood before.

        spent: a contribution to the round after was made, and may have been counted: what it held is not kept.
        Raises LocalError after an `apply`, or if it is of other fragments.
        """
        if self._base is not None:
            raise LocalError("a snapshot is to be restored after an anchor was applied")
        if len(saved.tokens) != self._fragments.count:
            raise LocalError(f"a snapshot of {len(saved.tokens)} fragments for {self._fragments.count}")
        self._restored, self._tokens, self.steps = saved, list(saved.tokens), saved.steps
        self._restored_at = saved.round, saved.steps
        if spent:
            self._spent = self._fragments.of_round(saved.round + 1)
            self._tokens[self._spent.number] = 0
        if saved.marked is not None:
            # The number is the last that was given out: with it, or with one of an earlier daemon, it is taken.
            fragment = self._fragments.of_round(saved.round)
            self._mark = _Mark(number=self._issued, fragment=fragment, tokens=saved.marked, local=None)


def _tensor(anchor: Vector) -> torch.Tensor:
    """The anchor as a tensor; torch has none whose memory cannot be written."""
    return torch.from_numpy(anchor if anchor.flags.writeable else anchor.copy())


def changed(before: F32, after: F32, spans: Sequence[slice]) -> list[slice]:
    """Return the spans in which two host vectors differ by bits; in as many threads as torch has, where that pays."""

    def differs(span: slice) -> bool:
        bits = np.int32 if (span.stop - span.start) % 2 else np.int64  # compared by words, three times as fast
        return not np.array_equal(before[span].view(bits), after[span].view(bits))

    def among(part: Sequence[slice]) -> list[slice]:
        return [span for span in part if differs(span)]

    threads = torch.get_num_threads()
    if threads == 1 or sum(span.stop - span.start for span in spans) < THREADED_VALUES:
        return among(spans)
    share = -(-len(spans) // threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="compare") as pool:
        parts = pool.map(among, (spans[at : at + share] for at in range(0, len(spans), share)))
        return [span for part in parts for span in part]


# --- gradients ---


@dataclass(frozen=True, slots=True)
class _FromGradients:
    """The gradient that the parameters have."""

    accounts: GradientAccounts
    here: bool = True

    def write(self, out: Vector) -> Contributed:
        return self.accounts.contribute(out, 0)


class GradientAccounts(_Standing):
    """Accounts of a replica that contributes gradients: it stands on the anchor exactly, and owes nothing.

    A contribution is the gradient of the mean loss of one batch at the anchor, not clipped: clipping is of the swarm's
    mean, in the certified step (`collectives.adamw`). Buffers are in it as they are. A gradient belongs to the anchor
    at which it was computed, so what no round has taken is dropped when the next anchor comes. What `Accounts` has to
    keep of progress, marks and overlap does not exist here; else it is used as that is.
    """

    amid_round = False
    overlap_left = 0
    goes_on = False
    """There are no steps but the one that a round waits for."""

    def __init__(self, flat: GradientFlat, *, contributions: int = 0) -> None:
        super().__init__(flat, contributions)
        self._gradients = flat
        self.waiting = False
        """True if a gradient was written and the anchor after it is not here yet."""
        self.tokens = 0
        """Of the batch whose gradient the parameters have."""
        self.steps = 0

    def retune(self, sync: SyncSettings) -> None:
        """There is no overlap and no mixing to be amended."""

    def count(self, tokens: int) -> None:
        """The parameters have the gradient of a batch of so many tokens; of none if it is not to be used."""
        self.tokens = tokens

    def mark(self, round: int) -> Outgoing:
        """Return what `contribute` writes: there is no step beside it, and so nothing to be settled before."""
        return _FromGradients(self)

    def contribute(self, out: Vector, round: int) -> Contributed:
        """Write the gradient to the front of `out`, ``(≥ numel,)``; zeros for what the loss does not depend on.

        Raises LocalError before an `apply`.
        """
        if self._base is None:
            raise LocalError("a contribution was ordered before any anchor was applied")
        written = out[: self._flat.layout.numel]
        if self.tokens:
            self._gradients.gather_gradients(torch.from_numpy(written))
        else:
            written.fill(0.0)
        self._issued += 1
        self.waiting = True
        return Contributed(number=self._issued, tokens=self.tokens)

    def apply(self, anchor: Vector, *, round: int | None = None, taken: int = 0, fresh: bool = False) -> None:
        """Stand on a new anchor, ``(numel,) float32``. A gradient at the one before is dropped, taken or not."""
        self._flat.scatter(self._rebase(anchor))
        self.tokens, self.waiting = 0, False

    def saved(self, round: int, *, midway: bool = False) -> SavedAccounts:
        """Return what is to be kept for a restart: nothing. Raises LocalError before an `apply`."""
        if self._base is None:
            raise LocalError("a snapshot was ordered before any anchor was applied")
        return SavedAccounts(round=round, tokens=(0,))

    def restore(self, saved: SavedAccounts, *, spent: bool = False) -> None:
        """There is nothing to take over. Raises LocalError after an `apply`."""
        if self._base is not None:
            raise LocalError("a snapshot is to be restored after an anchor was applied")
