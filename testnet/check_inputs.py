"""The independent check of what nodes contributed: what they learnt, and once more what no round had counted.

In test mode a node keeps, per contribution that is not too large (shoal.node.audit), in `rounds/<term>-<round>/`

    input-…    msgpack {root, learnt, values}: named by the first half of the root. learnt: what its trainer handed
               over, values: what was encoded, both little-endian float32, of the round's fragment; both empty where
               others' work is in it (sites), or what waited is averaged (few seats): nothing of that node is compared

Each of a node that no fault struck has to follow, to the bit, from the one before it of the same fragment and from the
certificate that says what of that was counted, per chunk:

    values = learnt + β · residual
    residual = the values less α · learnt   of a chunk that was not counted; nothing where gradients are contributed
             = what encoding lost           of a chunk that was counted; all, of values for which a sparse final has no
                                            place

Values of a node that was struck, or for too many rounds contributed nothing or nothing that was counted, may also be
what it learnt alone; and of one that was struck, follow from an older one, or from one of which it could not know what
was counted. Buffers are contributed as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, chunk_codec, final_chunk_codec
from shoal.collectives.grid import Grid
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from shoal.testnet.check import FILE_LIMIT_BYTES, StoredContribution, StoredFinals, Witness


class StoredInput(msgspec.Struct, frozen=True, kw_only=True):
    """The file `input`."""

    root: bytes
    learnt: bytes
    values: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """What a manifest says of what comes again. fragments: in how many parts parameters travel."""

    error_feedback: float
    mixing: float
    gradients: bool
    staleness_rounds: int
    fragments: int

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The rules of a swarm that certifies its rounds."""
        sync = manifest.sync
        return cls(
            error_feedback=sync.error_feedback,
            mixing=sync.applied_mixing or 0.0,
            gradients=sync.exchanges_gradients,
            staleness_rounds=manifest.round.staleness_rounds,
            fragments=sync.fragments,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCheck:
    """Finding about one contribution. wrong: how many of its values follow from nothing."""

    node: int
    term: str
    round: int
    wrong: int

    @property
    def text(self) -> str:
        """What is wrong, as a line."""
        return (
            f"round {self.round}: node {self.node} contributed {self.wrong} values that are neither what it learnt nor "
            "what no round had counted"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Input:
    """One contribution: what it was made of, and as it was sent; `sent` is None if that is not here any more."""

    term: str
    round: int
    root: bytes
    learnt: F32
    values: F32
    sent: StoredContribution | None


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What became of a contribution: per chunk, whether it was counted. finals: of its round, where they say more."""

    counted: tuple[bool, ...]
    finals: StoredFinals | None = None


def errors_of_inputs(witnesses: Sequence[Witness], last: int, rules: InputRules) -> tuple[str, ...]:
    """What is wrong with what these nodes contributed up to round `last`, a text each. Takes seconds; blocks."""
    errors = []
    for witness in witnesses:
        try:
            errors += [one.text for one in check_inputs(witness, witnesses, last, rules) if one.wrong]
        except (OSError, RemoteError) as error:
            errors.append(f"node {witness.index}: {error}")
    return tuple(errors)


def check_inputs(witness: Witness, witnesses: Sequence[Witness], last: int, rules: InputRules) -> list[InputCheck]:
    """Make again every contribution of a node up to round `last`, by what was counted. Blocks.

    Raises OSError, RemoteError if its files cannot be read.
    """
    found = []
    earlier: dict[int, list[_Input]] = defaultdict(list)
    excluded: dict[int, int] = defaultdict(int)
    newest = 0
    for path in sorted(witness.folder.glob("rounds/*/input-*"), key=lambda path: path.stat().st_mtime_ns):
        made = _read(path)
        if made.round > last:
            break
        if not made.values.size:
            return []
        fragment = made.round % rules.fragments
        before = earlier[fragment]
        outcomes = {one.root: _outcome(one, witness.peer_id, witnesses) for one in before}
        if before:
            since = -(-(made.round - before[-1].round) // rules.fragments)
            excluded[fragment] = 0 if any(outcomes[before[-1].root].counted) else excluded[fragment] + since
        stale = max(made.round - newest, excluded[fragment]) > rules.staleness_rounds
        newest = made.round
        residuals = _residuals(before if witness.struck else before[-1:], outcomes, witness, rules)
        expected = [made.learnt + residual for residual in residuals]
        if not before or stale or witness.struck or made.term != before[-1].term:
            expected.append(made.learnt)
        follows = np.zeros(made.values.size, bool)
        for one in expected:
            follows |= made.values == one
        wrong = int(np.count_nonzero(~follows))
        found.append(InputCheck(node=witness.index, term=made.term, round=made.round, wrong=wrong))
        before.append(made)
        del before[: -rules.staleness_rounds - 1]
    return found


def _read(path: Path) -> _Input:
    term, _, round = path.parent.name.rpartition("-")
    stored = decode(path.read_bytes(), StoredInput, limit_bytes=FILE_LIMIT_BYTES)
    learnt, values = (np.frombuffer(data, "<f4").astype(np.float32) for data in (stored.learnt, stored.values))
    if learnt.size != values.size:
        raise RemoteError(f"{path} holds vectors of different lengths")
    sent = decode((path.parent / "contribution").read_bytes(), StoredContribution, limit_bytes=FILE_LIMIT_BYTES)
    return _Input(
        term=term,
        round=int(round),
        root=stored.root,
        learnt=learnt,
        values=values,
        sent=sent if sent.root == stored.root else None,
    )


def _outcome(made: _Input, peer: PeerId, witnesses: Sequence[Witness]) -> _Outcome:
    """What the certificate of its round says of a contribution, by whoever kept that round: a certified one."""
    nothing = _Outcome((False,) * (0 if made.sent is None else len(made.sent.chunks)))
    sound = [witness for witness in witnesses if (made.term, made.round) not in witness.flipped]
    folders = (witness.folder / "rounds" / f"{made.term}-{made.round}" for witness in sound)
    folder = next((folder for folder in folders if (folder / "applied").exists()), None)
    if folder is None:
        return nothing
    plan = decode((folder / "plan").read_bytes(), Plan)
    finals = decode((folder / "finals").read_bytes(), StoredFinals, limit_bytes=FILE_LIMIT_BYTES)
    place = next((n for n, one in enumerate(plan.participants) if (one.peer, one.root) == (peer, made.root)), None)
    if place is None:
        return nothing
    return _Outcome(tuple(bool(int.from_bytes(bits, "little") >> place & 1) for bits in finals.bitmaps), finals)


def _residuals(
    before: Sequence[_Input], outcomes: dict[bytes, _Outcome], witness: Witness, rules: InputRules
) -> Iterator[F32]:
    """β · residual of each contribution from which the next may follow."""
    for one in before:
        if one.sent is None:
            continue
        outcome = outcomes[one.root]
        yield _residual(one, one.sent, outcome, rules)
        kept = not witness.struck and (witness.folder / "rounds" / f"{one.term}-{one.round}" / "applied").exists()
        if not kept:  # it had no finals, or their file was struck: work counts once at most, so it was counted
            yield _residual(one, one.sent, _Outcome((True,) * len(outcome.counted)), rules)


def _residual(made: _Input, sent: StoredContribution, outcome: _Outcome, rules: InputRules) -> F32:
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
    """What of a chunk that was counted is in the sum, as it was decoded."""
    values = np.empty(grid.length(chunk), np.float32)
    chunk_codec(sent.codec, grid, chunk).decode_into(sent.chunks[chunk], values)
    final = final_chunk_codec(sent.codec, grid, chunk)
    if finals is not None and final.leaves_out:
        summed = np.empty_like(values)
        final.decode_into(finals.chunks[chunk], summed)
        values[summed == 0] = 0
    return values
