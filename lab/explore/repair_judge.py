"""Invariants of every step of a round with repairs, in words of their own: nothing here asks the machines.

Each function returns what is wrong, or None. `Past` is what a member did in all its lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.collectives.finals import Finals
from shoal.collectives.reference import reference, wrong_values
from shoal.lab.explore.repair_scope import ScopeSetup
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Held, Plan, Report, domain_hash

Signed = frozenset[tuple[bytes, int, bytes, bytes]]
"""(lineage, chunk, bitmap, result) of every final that a member signed."""

Closed = frozenset[tuple[bytes, PeerId]]
"""(lineage, evicted): from whom a member takes nothing more in which reduction, since it last started."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One posted payload; `plan_order` is the (view, attempt) of the revision under which it was sent."""

    sender: int
    to: int
    final: bool
    chunk: int
    plan_order: tuple[int, int]
    lineage: bytes
    payload: bytes


def owners_of(plan: Plan) -> list[int]:
    """The place of each chunk's owner."""
    return [owned.owner for owned in plan.owners for _ in range(owned.start, owned.stop)]


def standing_of(plan: Plan) -> dict[int, tuple[int, bytes]]:
    """Chunks that stand, each with the place that has its final, and its hash."""
    return {chunk: (part.place, result) for part in plan.standing for chunk, result in part.by_chunk().items()}


def wrong_finals(setup: ScopeSetup, finals: Finals) -> str | None:
    """A complete set must be what a plain computation gives for its bitmaps, and what the plan says of each chunk."""
    plan = finals.plan
    given: dict[PeerId, bytes] = {}
    for participant in plan.participants:
        if participant.weight:
            if participant.root not in setup.by_root:
                return "a plan with a contribution that nobody made"
            given[participant.peer] = setup.by_root[participant.root].concatenated()
    heavy = {place for place, participant in enumerate(plan.participants) if participant.weight}
    for bits in finals.bitmaps:
        named = {place for place in range(8 * len(bits)) if bits[place // 8] >> place % 8 & 1}
        if not named <= heavy:
            return "a final that counts who is not in the plan"
    want = reference(plan, given, finals.bitmaps)
    if finals.concatenated() != want.finals or wrong_values(finals.decoded(), want.update):
        return "finals that are not the mean of what they count"
    standing = standing_of(plan)
    for chunk, owner in enumerate(owners_of(plan)):
        final = finals.chunks[chunk]
        if final.owner != plan.participants[owner].peer:
            return "a final of who does not own its chunk"
        if chunk in standing and final.result != standing[chunk][1]:
            return "another final than the one that stands"
        if chunk not in standing and final.owner in plan.evicted:
            return "a final of the evicted that does not stand"
    return None


def wrong_signature(signed: Signed, lineage: bytes, chunk: int, bits: bytes, result: bytes) -> str | None:
    """An owner signs one result per chunk of a lineage, whatever happens to it."""
    for row in signed:
        if row[:2] == (lineage, chunk) and row[2:] != (bits, result):
            return "two results signed for one chunk"
    return None


def wrong_contribution(setup: ScopeSetup, parcel: Parcel) -> str | None:
    """A contribution is sent as it was announced, whenever and to whomever it is sent."""
    if parcel.payload != bytes(setup.contributions[parcel.sender].payload(parcel.chunk)):
        return "a contribution that was changed"
    return None


def wrong_held(held: Held, finals: Mapping[int, tuple[int, bytes]]) -> str | None:
    """Check that a Held has all its sender's finals of the evicted; `finals` are (place of signer, hash) by chunk."""
    said = {(chunk, part.place, result) for part in held.chunks for chunk, result in part.by_chunk().items()}
    if said != {(chunk, place, result) for chunk, (place, result) in finals.items()}:
        return "held finals that were not said"
    return None


def wrong_report(held: Iterable[Held], finals: Finals) -> str | None:
    """Check that no member that closed off without an evicted owner's final completes a plan with that final."""
    plan, standing = finals.plan, standing_of(finals.plan)
    for word in held:
        if word.lineage != plan.lineage:
            continue
        said = {(c, r) for part in word.chunks for c, r in part.by_chunk().items()}
        for chunk, final in enumerate(finals.chunks):
            if final.owner in word.evicted and chunk not in standing and (chunk, final.result) not in said:
                return "a final of the evicted that came after closing off"
    return None


def wrong_revision(before: Plan | None, plan: Plan, helds: Mapping[PeerId, Collection[Held]]) -> str | None:
    """A revised plan follows a word of each who remains, and what they hold of the evicted stands.

    `helds` is all that was ever said, by sender; of two answers to one question the lead may have heard either.
    """
    if plan.origin == NO_HASH:
        return None
    if before is None or before.lineage != plan.lineage:
        return "a revision of a plan that its lead does not follow"
    if [*before.participants] != [*plan.participants]:
        return "a revision with other participants"
    if (before.owners, before.standing, set(before.evicted)) == (plan.owners, plan.standing, set(plan.evicted)):
        return None  # another path or a longer deadline, and nothing is closed off
    answers = {
        peer: [h for h in helds.get(peer, ()) if h.lineage == plan.lineage and set(h.evicted) == set(plan.evicted)]
        for peer in plan.remaining
    }
    if not all(answers.values()):
        return "revised without the word of one who remains"
    standing, owners = standing_of(plan), owners_of(plan)
    for chunk, owner in enumerate(owners_of(before)):
        gone = before.participants[owner].peer in plan.evicted
        if not gone:
            if chunk in standing or owners[chunk] != owner:
                return "a chunk taken from an owner who remains"
            continue
        said = {peer: [_results(h).get(chunk, set()) for h in words] for peer, words in answers.items()}
        if chunk in standing:
            place, result = standing[chunk]
            if not any(result in results for results in said[plan.participants[place].peer]):
                return "a final that stands and that its source does not hold"
        elif any(all(rows) for rows in said.values()):
            return "a final that someone holds was dropped"
        elif plan.participants[owners[chunk]].peer in plan.evicted:
            return "a chunk dealt to the evicted"
    return None


def _results(held: Held) -> dict[int, set[bytes]]:
    """Hashes that a Held names, by chunk."""
    named: dict[int, set[bytes]] = {}
    for part in held.chunks:
        for chunk, result in part.by_chunk().items():
            named.setdefault(chunk, set()).add(result)
    return named


def report_of(finals: Finals) -> Report:
    """Return a Report whose digest, in place of the next state's, hashes all that the finals decode to and count."""
    plan = finals.plan
    return Report(
        term=plan.term,
        round=plan.round,
        base=plan.base,
        plan=plan.hash,
        digest=domain_hash("explored digest", plan.base, finals.concatenated(), finals.tokens.to_bytes(8, "little")),
        bitmaps=finals.bitmaps_root,
        tokens=finals.tokens,
    )
