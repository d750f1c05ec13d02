"""The independent check of what nodes contributed: what they learnt, and once more what no round had counted.

In test mode a node keeps, per contribution that is not too large (shoal.node.audit), in `rounds/<term>-<round>/`

    input-…    msgpack {root, base, learnt, values}: named by the first half of the root. learnt: what its trainer
               handed over, values: what was encoded, both little-endian float32, of the round's fragment; base: the
               hash of the value that the round follows, by which it was encoded

Encoded again, the values have to be what the node committed to. And they have to follow, to the bit, from the
contribution before of the same fragment and from the certificate that says what of that was counted, per chunk:

    values = learnt + β · residual
    residual = the values less α · learnt   of a chunk that was not counted; nothing where gradients are contributed
             = what encoding lost           of a chunk that was counted; all, of values for which a sparse final has no
                                            place

Buffers are contributed as they are. A node may have begun anew, with what it learnt alone, where

* it has contributed nothing, or nothing that was counted, for more rounds than the manifest says,
* what the one before stood on was abandoned, and the term is another,
* it was started again since: then it may also have gone on from an older contribution, if its folder was put back.

A node that came by a state without the finals that led to it, or in whose file of finals bits were flipped, cannot know
what had no place, or was not counted: work counts once at most, so it takes it for counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, chunk_codec, final_chunk_codec
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.node.audit import INPUT_LIMIT_VALUES
from shoal.protocol.errors import ShoalError
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Plan
from shoal.protocol.seats import are_few
from shoal.protocol.wire import decode
from shoal.testnet.check import (
    FILE_LIMIT_BYTES,
    StoredContribution,
    StoredFinals,
    Witness,
    includes,
    round_folder,
)

PARTIAL = ".partial"


class StoredInput(msgspec.Struct, frozen=True, kw_only=True):
    """A file `input-…`."""

    root: bytes
    base: bytes
    learnt: bytes
    values: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """Rules of a manifest for what comes again. fragments: in how many parts parameters travel."""

    error_feedback: float
    mixing: float
    gradients: bool
    staleness_rounds: int
    fragments: int

    @classmethod
    def of(cls, manifest: Manifest) -> Self | None:
        """The rules of a swarm that certifies; None where others' work goes along, or seats are few."""
        sync = manifest.sync
        if manifest.sites_together or are_few(manifest.seats):
            return None
        return cls(
            error_feedback=sync.error_feedback,
            mixing=sync.applied_mixing or 0.0,
            gradients=sync.exchanges_gradients,
            staleness_rounds=manifest.round.staleness_rounds,
            fragments=sync.fragments,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCheck:
    """Finding about one contribution. wrong: how many of its values follow from nothing. foreign: it was not encoded of
    these values.
    """

    node: int
    term: str
    round: int
    wrong: int
    foreign: bool = False

    @property
    def error(self) -> str | None:
        """A line that says what is wrong; None where nothing is."""
        of = f"node {self.node}: of its contribution to round {self.round}"
        if self.foreign:
            return f"{of} the values are not those that it sent"
        return f"{of} {self.wrong} values do not follow from what it learnt and what was left" if self.wrong else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Input:
    """One contribution: when it was made and of what. sent: as others got it, None if that is not here."""

    term: str
    round: int
    made_at: float
    root: bytes
    base: bytes
    learnt: F32
    values: F32
    sent: StoredContribution | None


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Outcome of a contribution: per chunk, whether it was counted. finals: of its round, where they say more."""

    counted: tuple[bool, ...]
    finals: StoredFinals | None = None


def errors_of_inputs(witnesses: Sequence[Witness], last: int, rules: InputRules, *, first: int = 1) -> tuple[str, ...]:
    """Lines that say what is wrong with what these nodes contributed to the rounds `first` to `last`. Blocks.

    Of rounds before `first` some may be gone: what no contribution before leads to is not compared then.
    """
    errors: list[str] = []
    for witness in witnesses:
        try:
            errors += filter(None, (one.error for one in check_inputs(witness, witnesses, last, rules, first=first)))
            errors += _without_inputs(witness, range(first, last + 1))
        except (OSError, ShoalError) as error:
            errors.append(f"node {witness.index}: of its contributions: {error}")
    return tuple(errors)


def check_inputs(
    witness: Witness, witnesses: Sequence[Witness], last: int, rules: InputRules, *, first: int = 1
) -> list[InputCheck]:
    """Make again every contribution of a node to these rounds, by what was counted. Blocks.

    Raises OSError, ShoalError if its files cannot be read.
    """
    history = _History(witness, witnesses, rules, begins=first == 1)
    paths = (path for path in witness.folder.glob("rounds/*/input-*") if path.suffix != PARTIAL)
    made = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    found = [history.check(_read(path)) for path in made if _position(path)[1] <= last]
    return [one for one in found if one.round >= first]


def _position(path: Path) -> tuple[str, int]:
    term, _, round = path.parent.name.rpartition("-")
    return term, int(round)


def _read(path: Path) -> _Input:
    term, round = _position(path)
    stored = decode(path.read_bytes(), StoredInput, limit_bytes=FILE_LIMIT_BYTES)
    learnt, values = (np.frombuffer(data, "<f4").astype(np.float32) for data in (stored.learnt, stored.values))
    contribution, sent = path.with_name(f"contribution-{stored.root.hex()[:16]}"), None
    if contribution.exists():  # else it ended before it announced anything
        sent = decode(contribution.read_bytes(), StoredContribution, limit_bytes=FILE_LIMIT_BYTES)
    return _Input(
        term=term,
        round=round,
        made_at=path.stat().st_mtime,
        root=stored.root,
        base=stored.base,
        learnt=learnt,
        values=values,
        sent=sent if sent is not None and sent.root == stored.root else None,
    )


def _without_inputs(witness: Witness, rounds: range) -> Iterator[str]:
    """Contributions of which it was not kept what they were made of."""
    for path in witness.folder.glob("rounds/*/contribution-*"):
        if path.suffix == PARTIAL:
            continue
        sent = decode(path.read_bytes(), StoredContribution, limit_bytes=FILE_LIMIT_BYTES)
        kept = path.with_name(f"input-{sent.root.hex()[:16]}").exists()
        if not kept and sent.numel <= INPUT_LIMIT_VALUES and _position(path)[1] in rounds:
            yield f"node {witness.index}: of its contribution to round {_position(path)[1]} nothing says what is in it"


@dataclass(slots=True)
class _History:
    """One node's contributions, in the order in which they were made.

    begins: the first of all is here; else what the first of a fragment follows from is not known. earlier: by fragment.
    excluded: for how many of its rounds nothing of a fragment was counted. anew: the fragments that may begin anew as
    the node was away for too long. newest: the round of the last one.
    """

    witness: Witness
    witnesses: Sequence[Witness]
    rules: InputRules
    begins: bool
    earlier: dict[int, list[_Input]] = field(default_factory=lambda: defaultdict(list))
    excluded: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    anew: set[int] = field(default_factory=set)
    newest: int = 0

    def check(self, made: _Input) -> InputCheck:
        """Compare the next one."""
        fragment = made.round % self.rules.fragments
        before = self.earlier[fragment]
        if made.round - self.newest > self.rules.staleness_rounds:
            self.anew |= set(range(self.rules.fragments))
        ways = self._differ(made, before, self._may_begin_anew(made, fragment))
        wrong = min(ways, default=made.values.size) if before or self.begins else 0
        self.anew.discard(fragment)
        self.newest = made.round
        before.append(made)
        sent, foreign = made.sent, False
        if sent is not None:
            dither = Dither(made.base, "contribution", self.witness.peer_id)
            grid = Grid(sent.numel, sent.chunk_values)
            foreign = EncodedContribution.encode(made.values, grid, sent.codec, dither=dither).root != made.root
        return InputCheck(node=self.witness.index, term=made.term, round=made.round, wrong=wrong, foreign=foreign)

    def _may_begin_anew(self, made: _Input, fragment: int) -> bool:
        before = self.earlier[fragment]
        if not before or made.term != before[-1].term:
            self.excluded[fragment] = 0
            return True
        since = -(-(made.round - before[-1].round) // self.rules.fragments)
        self.excluded[fragment] = 0 if any(self._outcome(before[-1]).counted) else self.excluded[fragment] + since
        stale = self.excluded[fragment] > self.rules.staleness_rounds
        return stale or fragment in self.anew or self._started_again(before[-1], made)

    def _started_again(self, before: _Input, made: _Input) -> bool:
        """True if the node's process was started between the two, or where that cannot be told by their times."""
        return any(before.made_at - 1 < began < made.made_at + 1 for began in self.witness.restarts)

    def _differ(self, made: _Input, before: Sequence[_Input], may_begin_anew: bool) -> Iterator[int]:
        """How many values differ, by each way in which they may follow."""
        if may_begin_anew:
            yield int(np.count_nonzero(made.values != made.learnt))
        again = bool(before) and self._started_again(before[-1], made)
        for one in reversed(before if again else before[-1:]):
            if one.sent is not None:
                yield self._differ_from(made, one, one.sent)

    def _differ_from(self, made: _Input, before: _Input, sent: StoredContribution) -> int:
        """How many values do not follow from the contribution before; by the better of what it may know, per chunk."""
        outcome, grid = self._outcome(before), Grid(sent.numel, sent.chunk_values)
        outcomes = [outcome]
        if self.witness.flipped or not (round_folder(self.witness, before.term, before.round) / "applied").exists():
            outcomes.append(_Outcome((True,) * len(outcome.counted)))
        expected = [made.learnt + _residual(before, sent, one, self.rules) for one in outcomes]
        spans = (slice(*grid.span(chunk)) for chunk in range(grid.chunks))
        return sum(min(int(np.count_nonzero(made.values[at] != one[at])) for one in expected) for at in spans)

    def _outcome(self, made: _Input) -> _Outcome:
        """Outcome of a contribution by the certificate of its round, as anyone kept it; nothing counted without one."""
        nothing = _Outcome((False,) * (0 if made.sent is None else len(made.sent.chunks)))
        sound = (witness for witness in self.witnesses if (made.term, made.round) not in witness.flipped)
        folders = (round_folder(witness, made.term, made.round) for witness in sound)
        folder = next((folder for folder in folders if (folder / "applied").exists()), None)
        if folder is None:
            return nothing
        plan = decode((folder / "plan").read_bytes(), Plan)
        finals = decode((folder / "finals").read_bytes(), StoredFinals, limit_bytes=FILE_LIMIT_BYTES)
        mine = (self.witness.peer_id, made.root)
        place = next((n for n, one in enumerate(plan.participants) if (one.peer, one.root) == mine), None)
        if place is None:
            return nothing
        return _Outcome(tuple(includes(bits, place) for bits in finals.bitmaps), finals)


def _residual(made: _Input, sent: StoredContribution, outcome: _Outcome, rules: InputRules) -> F32:
    """β · residual of a contribution, ``(numel,)``."""
    grid = Grid(sent.numel, sent.chunk_values)
    residual = np.zeros(grid.numel, np.float32)
    for chunk, counted in enumerate(outcome.counted):
        codec, at = chunk_codec(sent.codec, grid, chunk), slice(*grid.span(chunk))
        if codec.plain:
            continue
        if counted:
            residual[at] = made.values[at] - _applied(sent, grid, chunk, outcome.finals)
        elif not rules.gradients:
            residual[at] = made.values[at] - made.learnt[at] * np.float32(rules.mixing)
    return residual if rules.error_feedback == 1 else residual * np.float32(rules.error_feedback)


def _applied(sent: StoredContribution, grid: Grid, chunk: int, finals: StoredFinals | None) -> F32:
    """Values of a chunk that was counted, as the sum has them."""
    values = np.empty(grid.length(chunk), np.float32)
    chunk_codec(sent.codec, grid, chunk).decode_into(sent.chunks[chunk], values)
    final = final_chunk_codec(sent.codec, grid, chunk)
    if finals is not None and final.leaves_out:
        summed = np.empty_like(values)
        final.decode_into(finals.chunks[chunk], summed)
        values[summed == 0] = 0
    return values
