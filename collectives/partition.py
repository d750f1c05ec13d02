"""Dealing chunks to owners, so that all links of a reduce finish at the same time.

Of the encoded data D, an owner of the share s uploads D·(1 − s) of contributions and (n − 1)·s·D of finals, and
downloads as much: D·(1 + (n − 2)·s) each way. With b the slower of its two rates it needs T = D·(1 + (n − 2)·s) / b.
The largest T is least when it is the same for all who own anything, s = (T·b/D − 1) / (n − 2), and those too slow
even for their own data (T·b < D) own nothing. T follows from Σ s = 1: water-filling. A cap per owner keeps one
owner's death, or one wrong measurement, from costing most of a round.

All arithmetic is on integers and fractions: the same deal on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import OwnedRange, Plan

EVEN_FACTOR = 2
"""Rates above the fastest divided by this count as equal to it: they are measured on links and machines that others use
too, and who was dealt more also moved more. An equal deal among such costs less than a third of the time."""
NOBODY: Mapping[PeerId, PeerId] = {}
CAP_FAIR_SHARES = 2
"""No owner is dealt more than this many times an equal share."""


def deal(rates: Sequence[tuple[int, int]], chunks: int) -> tuple[OwnedRange, ...]:
    """Ranges that cover all `chunks` once, in order, each owner's contiguous; who gets none is not named.

    rates: (upload, download) bytes/s of each participant, in plan order; zero is unknown and counts as the median.

    Raises LocalError if there is nobody.
    """
    if not rates:
        raise LocalError("no owners to deal to")
    shares = _shares(_known([min(rate) for rate in rates]), len(rates))
    ranges, start = [], 0
    for place, count in enumerate(_apportion(shares, chunks)):
        if count:
            ranges.append(OwnedRange(place, start, start + count))
            start += count
    return tuple(ranges)


def owner_by_chunk(plan: Plan) -> tuple[int, ...]:
    """The place of each chunk's owner. Raises LocalError for a plan that `check_plan` would not have passed."""
    ranges = plan.owners
    bounds = [0, *(owned.stop for owned in ranges)]
    if [owned.start for owned in ranges] != bounds[:-1] or bounds[-1] != plan.chunks:
        raise LocalError("a plan that does not deal every chunk once")
    if any(owned.owner >= len(plan.participants) or owned.stop <= owned.start for owned in ranges):
        raise LocalError("a plan that deals chunks to nobody")
    return tuple(owned.owner for owned in ranges for _ in range(owned.start, owned.stop))


def partners(
    peers: Collection[PeerId], owners: Collection[PeerId], me: PeerId, delegates: Mapping[PeerId, PeerId] = NOBODY
) -> frozenset[PeerId]:
    """Those of `peers` with whom `me` exchanges payloads: with whoever owns chunks, and an owner with everybody.

    delegates: of those who exchange nothing with others than their own.
    """
    if me in delegates:
        return frozenset(peers) & {delegates[me]}
    whole = frozenset(peers if me in owners else owners)
    return whole.difference({me}, (peer for peer in delegates if peer not in owners and delegates[peer] != me))


def owners_in(plan: Plan) -> frozenset[PeerId]:
    """Participants of `plan` that own chunks."""
    return frozenset(plan.participants[owned.owner].peer for owned in plan.owners)


def expected_owners(
    peers: Collection[PeerId], rates: Mapping[PeerId, tuple[int, int]], chunks: int
) -> frozenset[PeerId]:
    """Those of `peers` who are going to own chunks, if these are a plan over so many.

    rates: (upload, download) bytes/s, as far as they are known. Others have a say in the plan: it may be a wrong guess.
    """
    order = sorted(peers)
    ranges = deal([rates.get(peer, (0, 0)) for peer in order], chunks)
    return frozenset(order[owned.owner] for owned in ranges)


def dials_first(me: PeerId, peer: PeerId, owners: Collection[PeerId]) -> bool:
    """True if of two that both want a lane `me` is to make it: who owns no chunk, for an owner is dialled by many.

    Of two owners, or of none, it is one or the other, by their names, and so for each about as often as not.
    """
    if (me in owners) != (peer in owners):
        return peer in owners
    return (me < peer) == ((ord(me[-1]) + ord(peer[-1])) % 2 == 0)


def dialling_order(partners: Collection[PeerId], everybody: Collection[PeerId], me: PeerId) -> list[PeerId]:
    """`partners`, in the order in which `me`, one of `everybody`, makes lanes to them ahead.

    Around the ring of their names, of which each begins at its own place: so nobody is everyone's first, where a few
    own all chunks; and where all are partners each begins with who comes after it, so that of two one is mostly first.
    """
    ring, place = sorted(partners), sorted(everybody).index(me)
    start = -(-place * len(ring) // len(everybody))
    return ring[start:] + ring[:start]


def sending_order(owners: Sequence[int], me: int, participants: int) -> Iterator[int]:
    """The chunks that participant `me` has to send to others: one of each owner in turn, from the owner after it on.

    So all links are busy at once and no owner is everyone's first, while the contributors of one owner send its chunks
    in the same order, so that it can reduce the first early.
    """
    by_turn: dict[int, list[int]] = {}
    for chunk, owner in enumerate(owners):
        if owner != me:
            by_turn.setdefault((owner - me) % participants, []).append(chunk)
    for chunks in zip_longest(*(by_turn[turn] for turn in sorted(by_turn))):
        yield from (chunk for chunk in chunks if chunk is not None)


def _known(rates: list[int]) -> list[int]:
    """`rates` with the lower median of the known ones in place of unknown ones, evened out; all 1 if none is known."""
    known = sorted(rate for rate in rates if rate > 0) or [1]
    median, fastest = known[(len(known) - 1) // 2], known[-1]
    filled = [rate if rate > 0 else median for rate in rates]
    return [fastest if rate * EVEN_FACTOR > fastest else rate for rate in filled]


def _shares(rates: list[int], participants: int) -> list[Fraction]:
    """The share of each owner; they sum to one."""
    cap = min(Fraction(CAP_FAIR_SHARES, len(rates)), Fraction(1))
    if participants <= 2:  # every share costs the same
        return [Fraction(1, len(rates))] * len(rates)
    level = _water_level(rates, participants - 2, cap)
    share = {rate: _share_at(level, rate, participants - 2, cap) for rate in set(rates)}
    return [share[rate] for rate in rates]


def _share_at(level: Fraction, rate: int, slope: int, cap: Fraction) -> Fraction:
    return min(max((level * rate - 1) / slope, Fraction(0)), cap)


def _water_level(rates: list[int], slope: int, cap: Fraction) -> Fraction:
    """The T/D at which the shares sum to one.

    Their sum grows piecewise linearly in T, bending where an owner gets its first chunk or reaches its cap; so find
    the first bend where it is one or more, and go back along the line that ends there.
    """
    owners = Counter(rates)
    bends = sorted({Fraction(1, rate) for rate in owners} | {(1 + cap * slope) / rate for rate in owners})
    below, sum_below = Fraction(0), Fraction(0)
    for bend in bends:
        total = sum((count * _share_at(bend, rate, slope, cap) for rate, count in owners.items()), Fraction(0))
        if total >= 1:
            return below + (bend - below) * (1 - sum_below) / (total - sum_below)
        below, sum_below = bend, total
    raise LocalError("the caps leave chunks that nobody may own")


def _apportion(shares: list[Fraction], chunks: int) -> list[int]:
    """Whole chunks by the largest remainder, ties to the earlier place."""
    counts = [int(share * chunks) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i] * chunks, i))
    for i in by_remainder[: chunks - sum(counts)]:
        counts[i] += 1
    return counts
