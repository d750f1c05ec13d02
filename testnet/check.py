"""The independent check of a testnet: everything recomputed from what the nodes contributed.

In test mode a node keeps, per round, in `rounds/<rebases>.<rollbacks>-<round>/`

    contribution   msgpack {codec, numel, chunk_values, tokens, root, chunks}: encoded, written before it was announced
    plan           canonical msgpack of the certified Plan
    finals         msgpack {plan, bitmaps, chunks}: per chunk who is in it, and the encoded result
    applied        the update that this node applied, little-endian float32

The check believes none of the results: it takes contributions that match the roots in the plan, reduces them by the
slow reference, and counts every element of every node's applied update that is not the same to the bit. What it cannot
verify (a file that is missing, a contribution that is not the promised one) it reports as an error, never as a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import chunk_hash, merkle_root
from shoal.collectives.grid import Grid
from shoal.collectives.reference import Reference, reference, wrong_values
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode

FILE_LIMIT_BYTES = 4 << 30


class StoredContribution(msgspec.Struct, frozen=True, kw_only=True):
    """The file `contribution`."""

    codec: str
    numel: int
    chunk_values: int
    tokens: int
    root: bytes
    chunks: list[bytes]


class StoredFinals(msgspec.Struct, frozen=True, kw_only=True):
    """The file `finals`."""

    plan: bytes
    bitmaps: list[bytes]
    chunks: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One node and where it kept its rounds. settled: (term, round) of those whose files must all be there.

    flipped: those amid which bits were flipped in its files, in which the finals of that round lay. restarts: when its
    process was started again, wall-clock.
    """

    index: int
    peer_id: PeerId
    folder: Path
    settled: frozenset[tuple[str, int]] = frozenset()
    flipped: frozenset[tuple[str, int]] = frozenset()
    restarts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCheck:
    """Findings of the check in one round. coverage: the share of (chunk, contributor) pairs that were included.

    codec: the plan's, empty if there is none to be read.
    """

    term: str
    round: int
    codec: str = ""
    numel: int = 0
    contributors: int = 0
    coverage: float = 0.0
    updates_compared: int = 0
    wrong_values: int = 0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Findings of the check in all rounds. inputs: what is wrong with what nodes contributed, a text each."""

    rounds: tuple[RoundCheck, ...]
    inputs: tuple[str, ...] = ()

    @property
    def wrong_values(self) -> int:
        """Elements of applied updates that differ from the reference, over all rounds and nodes."""
        return sum(found.wrong_values for found in self.rounds)

    @property
    def errors(self) -> tuple[str, ...]:
        """Rounds that could not be verified or contradict themselves, and contributions that follow from nothing."""
        return tuple(error for found in self.rounds for error in found.errors) + self.inputs

    def of(self, term: str, round: int) -> RoundCheck | None:
        """Return the findings in one round; None if it was not checked."""
        return next((found for found in self.rounds if (found.term, found.round) == (term, round)), None)


def check_swarm(witnesses: Sequence[Witness], rounds: Collection[tuple[str, int]]) -> Check:
    """Recompute these certified (term, round)s from the files of all nodes. Takes seconds; blocks."""
    return Check(rounds=tuple(check_round(witnesses, term, number) for term, number in sorted(rounds)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Account:
    """One node's record of a round: plan, finals, and the (numel,) float32 update it applied.

    flipped: as a witness's.
    """

    node: int
    peer: PeerId
    flipped: bool
    plan: Plan
    finals: StoredFinals
    applied: F32


def check_round(witnesses: Sequence[Witness], term: str, number: int) -> RoundCheck:
    """Recompute one certified round."""
    errors: list[str] = []
    accounts = list(_accounts(witnesses, term, number, errors))
    if not accounts:
        errors.append(f"round {number}: no node kept what it applied")
        return RoundCheck(term=term, round=number, errors=tuple(errors))
    first = accounts[0]
    truth = _truth(first, witnesses, term, number, errors)
    wrong = compared = 0
    for account in accounts:
        if (account.plan, account.finals.bitmaps) != (first.plan, first.finals.bitmaps):
            errors.append(f"round {number}: nodes {first.node} and {account.node} differ on the plan or who is in it")
        elif truth is not None:
            wrong += _differences(account, truth, errors)
            compared += 1
    contributors, coverage = _inclusion(first)
    planned = {first.plan.participants[place].peer for place in first.plan.contributors()}
    if not contributors and any(one.peer in planned for one in accounts):
        errors.append(f"round {number}: nobody's contribution is in it, and not all who contributed are gone")
    return RoundCheck(
        term=term,
        round=number,
        codec=first.plan.codec,
        numel=first.plan.numel,
        contributors=contributors,
        coverage=coverage,
        updates_compared=compared,
        wrong_values=wrong,
        errors=tuple(errors),
    )


def _accounts(witnesses: Sequence[Witness], term: str, number: int, errors: list[str]) -> Iterator[_Account]:
    for witness in witnesses:
        folder = round_folder(witness, term, number)
        if not (folder / "applied").exists():
            if (term, number) in witness.settled:
                errors.append(f"round {number}: node {witness.index} certified it but kept no applied update")
            continue
        try:
            plan = decode((folder / "plan").read_bytes(), Plan)
            finals = decode((folder / "finals").read_bytes(), StoredFinals, limit_bytes=FILE_LIMIT_BYTES)
            applied = _read_values(folder / "applied")
        except (OSError, RemoteError) as error:
            errors.append(f"round {number}: node {witness.index}: {error}")
            continue
        if finals.plan != plan.hash or (plan.round, f"{plan.term.rebases}.{plan.term.rollbacks}") != (number, term):
            errors.append(f"round {number}: node {witness.index} kept a plan or finals of another round")
            continue
        flipped = (term, number) in witness.flipped
        yield _Account(
            node=witness.index, peer=witness.peer_id, flipped=flipped, plan=plan, finals=finals, applied=applied
        )


def _read_values(path: Path) -> F32:
    """The float32 values in a file; a last one that was cut short does not count."""
    data = path.read_bytes()
    return np.frombuffer(data, "<f4", count=len(data) // 4).astype(np.float32, copy=False)


def round_folder(witness: Witness, term: str, number: int) -> Path:
    """Folder of a node in which it kept a round."""
    return witness.folder / "rounds" / f"{term}-{number}"


def _truth(
    account: _Account, witnesses: Sequence[Witness], term: str, number: int, errors: list[str]
) -> Reference | None:
    """Sum the round again, by the reference; None, with the reason in `errors`, if that cannot be done."""
    plan, bitmaps = account.plan, account.finals.bitmaps
    if len({participant.peer for participant in plan.participants}) != len(plan.participants):
        errors.append(f"round {number}: the plan names a participant twice")
        return None
    needed = [i for i in plan.contributors() if any(includes(bitmap, i) for bitmap in bitmaps)]
    contributions: dict[PeerId, bytes] = {}
    for place in needed:
        peer = plan.participants[place].peer
        stored = _contribution(plan, place, witnesses, term)
        if stored is None:
            errors.append(f"round {number}: there is no contribution of {peer} such as the plan names")
            continue
        contributions[peer] = b"".join(stored.chunks)
        if stored.tokens < plan.participants[place].tokens:
            errors.append(f"round {number}: the plan says that {peer} trained on more tokens than it did")
    if not _weighs_tokens(plan):
        errors.append(f"round {number}: the plan's weights are not as its tokens")
    if len(contributions) < len(needed):
        return None
    try:
        return reference(plan, contributions, bitmaps)
    except (LocalError, RemoteError) as error:
        errors.append(f"round {number}: {error}")
        return None


def _contribution(plan: Plan, place: int, witnesses: Sequence[Witness], term: str) -> StoredContribution | None:
    """The contribution that a participant committed to; None if nobody kept it.

    A node that came back within a round may have kept more than one contribution; the plan's root tells which counts.
    """
    participant = plan.participants[place]
    for witness in witnesses:
        if witness.peer_id != participant.peer:
            continue
        for path in sorted(round_folder(witness, term, plan.round).glob("contribution*")):
            try:
                stored = decode(path.read_bytes(), StoredContribution, limit_bytes=FILE_LIMIT_BYTES)
            except (OSError, RemoteError):
                continue
            shape = (stored.codec, stored.numel, stored.chunk_values)
            root = merkle_root([chunk_hash(chunk) for chunk in stored.chunks])
            if shape == (plan.codec, plan.numel, plan.chunk_values) and root == participant.root:
                return stored
    return None


def _weighs_tokens(plan: Plan) -> bool:
    """True if all weights are to each other as the tokens, which the plan may have capped."""
    weighty = [plan.participants[place] for place in plan.contributors()]
    return all(one.weight * weighty[0].tokens == weighty[0].weight * one.tokens for one in weighty)


def _differences(account: _Account, truth: Reference, errors: list[str]) -> int:
    """Count the node's applied values that are wrong; all of them if there are too few or too many.

    What a node keeps is what its file of finals has when the round is certified. It worked out the state before: of a
    chunk in which a bit was flipped since, nothing follows.
    """
    where = f"round {account.plan.round}: node {account.node}"
    applied, flipped = account.applied, list[int]()
    if b"".join(account.finals.chunks) != truth.finals:
        flipped = _chunks_of_other_bits(account, truth) if account.flipped else []
        if not flipped:
            errors.append(f"{where} kept finals that are not what the contributions lead to")
    if applied.shape != truth.update.shape:
        errors.append(f"{where} applied {applied.size} values of {truth.update.size}")
        return int(truth.update.size)
    wrong = wrong_values(applied, truth.update)
    spans = [slice(*Grid.of(account.plan).span(chunk)) for chunk in flipped]
    return wrong - sum(wrong_values(applied[span], truth.update[span]) for span in spans)


def _chunks_of_other_bits(account: _Account, truth: Reference) -> list[int]:
    """The chunks of whose finals a node kept as many bytes as there are, but others; none where it is not as many."""
    ends = list(itertools.accumulate(map(len, account.finals.chunks)))
    if len(ends) != account.plan.chunks or ends[-1] != len(truth.finals):
        return []
    there = (truth.finals[start:end] for start, end in itertools.pairwise((0, *ends)))
    return [n for n, (kept, right) in enumerate(zip(account.finals.chunks, there, strict=True)) if kept != right]


def _inclusion(account: _Account) -> tuple[int, float]:
    """(contributors in at least one chunk, share of the (chunk, contributor) pairs that were included)."""
    bitmaps, places = account.finals.bitmaps, account.plan.contributors()
    counts = [sum(includes(bitmap, place) for bitmap in bitmaps) for place in places]
    pairs = len(places) * len(bitmaps)
    return sum(count > 0 for count in counts), sum(counts) / pairs if pairs else 1.0


def includes(bitmap: bytes, place: int) -> bool:
    """True if a chunk's bitmap names the participant at this place of the plan."""
    return bool(int.from_bytes(bitmap, "little") >> place & 1)
