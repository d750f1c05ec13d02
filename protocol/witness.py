"""The witness: remembers what was said in the last rounds, and makes evidence of what contradicts it. Sans-IO.

What it remembers carries its signer's signature, so that nobody hides a contradiction behind a word that proves
nothing. It is bounded: of the last rounds, what was said by those who may speak, a few words each. Nobody's words take
the room of another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from shoal.protocol.certificate import verify_leave, verify_step
from shoal.protocol.commitments import Commitment, commitment_of
from shoal.protocol.errors import RemoteError
from shoal.protocol.evidence import (
    STEPS,
    BrokenLeave,
    CopiedCommitment,
    DoubleCommitment,
    DoubleResult,
    DoubleVote,
    Evidence,
    HiddenPrepare,
    UnsoundContribution,
)
from shoal.protocol.facts import READIES_LIMIT
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    ChunkStatement,
    Leave,
    Message,
    Moved,
    Plan,
    Prepare,
    Propose,
    Ready,
    Value,
    ViewChange,
    Vote,
)
from shoal.protocol.planning import RoundSettings, check_norms
from shoal.protocol.view_change import moved, verify_move
from shoal.protocol.voting import CONTRIBUTORS, Voting, lead

ROUNDS_KEPT = 3
LIVES_LIMIT = 4
"""Of one peer in one round, whose commitments are remembered."""
VIEWS_LIMIT = 64
"""Of one round, in which votes are remembered."""
VALUES_LIMIT = 16
"""Of one round, that one member brings; all others together bring as many."""
PLANS_LIMIT = 4
"""Of one round and one lead, that begin a reduction."""

_Votes = dict[tuple[str, PeerId, int], dict[bytes, bytes]]


@dataclass(slots=True, kw_only=True, eq=False)
class _Round:
    """Statements that were heard in the round after `base`, by kind."""

    base: Value
    settings: RoundSettings
    voting: Voting
    commitments: dict[PeerId, dict[bytes, Commitment]] = field(default_factory=dict)
    squares: dict[bytes, tuple[float, ...]] = field(default_factory=dict)  # by what is committed to
    votes: _Votes = field(default_factory=dict)  # by step, voter and view: two values at most, with their signatures
    moves: dict[tuple[PeerId, int], Moved] = field(default_factory=dict)  # by mover and view
    leaves: dict[PeerId, bytes] = field(default_factory=dict)  # who promised to sign nothing, and its signature
    values: dict[bytes, Value] = field(default_factory=dict)
    brought: Counter[PeerId | None] = field(default_factory=Counter)  # how many of the values by whom
    plans: dict[bytes, Plan] = field(default_factory=dict)


class Witness:
    """Memory of what one node heard, round by round."""

    def __init__(self) -> None:
        self._rounds: dict[bytes, _Round] = {}

    def begin(self, base: Value, settings: RoundSettings, *, voting: Voting = CONTRIBUTORS) -> None:
        """The round after `base` begins; the oldest is forgotten."""
        self._rounds.setdefault(base.hash, _Round(base=base, settings=settings, voting=voting))
        while len(self._rounds) > ROUNDS_KEPT:
            del self._rounds[next(iter(self._rounds))]

    # -- what is heard ---------------------------------------------------------------------------------------

    def hear(self, sender: PeerId, message: Message) -> list[Evidence]:
        """Take a message of a round, signed by `sender`; returns what it proves together with what was said before."""
        base = message.value.base if isinstance(message, Certificate) else getattr(message, "base", b"")
        about = self._rounds.get(base)
        if about is None:
            return []
        if isinstance(message, Ready):
            return self._hear_ready(about, sender, message)
        if isinstance(message, Plan):
            self._keep_plan(about, sender, message)
        elif isinstance(message, Certificate):
            self._keep_value(about, sender, message.value)
            pairs = zip(message.signers, message.signatures, strict=False)
            return [e for p, s in pairs for e in self._hear_step(about, "vote", p, message.view, message.value.hash, s)]
        elif isinstance(message, Propose):
            value_hash, signature = message.value.hash, message.signature
            found = self._keep_value(about, sender, message.value)
            return [*found, *self._hear_step(about, "propose", sender, message.view, value_hash, signature)]
        elif isinstance(message, ViewChange):
            found = [] if message.prepared is None else self._keep_value(about, sender, message.prepared.value)
            return [*found, *self._hear_move(about, message.view, moved(sender, message))]
        elif isinstance(message, Prepare):
            return self._hear_step(about, "prepare", sender, message.view, message.value, message.signature)
        elif isinstance(message, Vote):
            return self._hear_step(about, "vote", sender, message.view, message.value, message.signature)
        elif isinstance(message, Leave):
            return self._hear_leave(about, sender, message.signature)
        return []

    def _hear_ready(self, about: _Round, sender: PeerId, ready: Ready) -> list[Evidence]:
        commitment = commitment_of(sender, ready, about.settings)
        if commitment is None:
            return []
        return self._hear_commitment(about, commitment, ready.squares)

    def _hear_commitment(
        self, about: _Round, commitment: Commitment, squares: tuple[float, ...] | None = None
    ) -> list[Evidence]:
        known = about.commitments.get(commitment.peer, {})
        before = known.get(commitment.life)
        if before is not None:
            found = DoubleCommitment.of(about.base, before, commitment)
            return [] if found is None else [found]
        room = len(known) < LIVES_LIMIT and (known or len(about.commitments) < READIES_LIMIT)
        fits = squares is not None and len(squares) <= about.settings.chunks  # others are in no plan, and take room
        if fits and room and commitment.valid():
            about.commitments.setdefault(commitment.peer, {})[commitment.life] = commitment
            about.squares[commitment.squares] = squares or ()
        return []

    def _hear_step(
        self, about: _Round, step: str, voter: PeerId, view: int, value_hash: bytes, signature: bytes
    ) -> list[Evidence]:
        if voter not in about.voting.electorate(about.base) or not 0 <= view < VIEWS_LIMIT:
            return []
        said = about.votes.get((step, voter, view), {})
        unknown = [other for other in said if other not in about.values]
        full = len(said) > 1 and not (unknown and value_hash in about.values)
        if value_hash in said or full or not verify_step(STEPS[step], voter, view, value_hash, signature):
            return []
        if len(said) > 1:  # what is of no value that is known here hides nothing
            del said[unknown[0]]
        said[value_hash] = signature
        about.votes[step, voter, view] = said
        found = [*self._contradiction(about, step, voter, view), *self._hidden(about, voter)]
        return [*found, *self._broken_leave(about, voter)]

    def _hear_leave(self, about: _Round, peer: PeerId, signature: bytes) -> list[Evidence]:
        known = peer in about.leaves or peer not in about.voting.electorate(about.base)
        if known or not verify_leave(peer, about.base.hash, signature):
            return []
        about.leaves[peer] = signature
        return self._broken_leave(about, peer)

    def _broken_leave(self, about: _Round, peer: PeerId) -> list[Evidence]:
        """Evidence that a peer signed all the same after it promised to leave: at most one."""
        leave = about.leaves.get(peer)
        if leave is None:
            return []
        moves = sorted((view, move) for (mover, view), move in about.moves.items() if mover == peer)
        if moves:
            view, move = moves[0]
            return [BrokenLeave(base=about.base, peer=peer, leave=leave, view=view, move=move)]
        for (step, voter, view), said in sorted(about.votes.items()):
            known = sorted(value_hash for value_hash in said if value_hash in about.values)
            if voter == peer and known:
                value, one = about.values[known[0]], said[known[0]]
                found = BrokenLeave(base=about.base, peer=peer, leave=leave, view=view, step=step, value=value)
                return [msgspec.structs.replace(found, signature=one)]
        return []

    def _hear_move(self, about: _Round, view: int, move: Moved) -> list[Evidence]:
        if move.peer not in about.voting.electorate(about.base) or not 0 <= view < VIEWS_LIMIT:
            return []
        known = about.moves.get((move.peer, view))
        if known is not None and known.prepared <= move.prepared:  # of several the one that hides most
            return []
        if not verify_move(about.base.hash, view, move):
            return []
        about.moves[move.peer, view] = move
        return [*self._hidden(about, move.peer), *self._broken_leave(about, move.peer)]

    def _hidden(self, about: _Round, peer: PeerId) -> list[Evidence]:
        """Evidence that a member voted for a value, and told nothing of it when it moved on: at most one."""
        moves = sorted((view, move) for (mover, view), move in about.moves.items() if mover == peer)
        cast = sorted(
            (view, said) for (step, voter, view), said in about.votes.items() if (step, voter) == ("vote", peer)
        )
        for view, said in cast:
            known = sorted(value_hash for value_hash in said if value_hash in about.values)
            hiding = [(later, move) for later, move in moves if move.prepared < view < later]
            if known and hiding:
                (later, move), value = hiding[0], about.values[known[0]]
                vote = said[known[0]]
                return [HiddenPrepare(base=about.base, view=view, value=value, vote=vote, later=later, move=move)]
        return []

    def _contradiction(self, about: _Round, step: str, voter: PeerId, view: int) -> list[Evidence]:
        said = sorted(about.votes[step, voter, view].items())
        if len(said) < 2 or any(value_hash not in about.values for value_hash, _ in said):
            return []
        (first, one), (second, other) = said
        values = about.values[first], about.values[second]
        return [DoubleVote(base=about.base, peer=voter, view=view, values=values, signatures=(one, other), step=step)]

    def _keep_value(self, about: _Round, sender: PeerId, value: Value) -> list[Evidence]:
        bringer = sender if sender in about.voting.electorate(about.base) else None
        if value.hash in about.values or about.brought[bringer] >= VALUES_LIMIT:
            return []
        about.brought[bringer] += 1
        about.values[value.hash] = value
        two = [key for key, said in about.votes.items() if len(said) > 1 and value.hash in said]
        voters = sorted(
            {voter for (step, voter, _), said in about.votes.items() if step == "vote" and value.hash in said}
        )
        found = [evidence for key in two for evidence in self._contradiction(about, *key)]
        signatures = () if isinstance(value.leave_signatures, msgspec.UnsetType) else value.leave_signatures
        for peer, signature in zip(value.leaves, signatures, strict=False):
            found += self._hear_leave(about, peer, signature)
        for voter in sorted({voter for (_, voter, _), said in about.votes.items() if value.hash in said}):
            found += self._broken_leave(about, voter)
        return [*found, *(evidence for voter in voters for evidence in self._hidden(about, voter))]

    def _keep_plan(self, about: _Round, sender: PeerId, plan: Plan) -> None:
        """Keep what the lead of its view planned, if it is what a reduction begins with: revisions name its hash."""
        begins = plan.origin == NO_HASH and not plan.standing
        if begins and plan.planner == sender == lead(about.base, plan.view, voting=about.voting):
            before = sum(one.planner == sender for one in about.plans.values())
            if before < PLANS_LIMIT:
                about.plans[plan.hash] = plan

    # -- what is asked ---------------------------------------------------------------------------------------

    def origin(self, plan: Plan) -> Plan | None:
        """The plan that began the reduction of which `plan` is a revision, if it was heard."""
        about = self._rounds.get(plan.base)
        return plan if plan.lineage == plan.hash else None if about is None else about.plans.get(plan.lineage)

    def base(self, base: bytes) -> Value | None:
        """The value on which a round of the last ones stands, by its hash."""
        about = self._rounds.get(base)
        return None if about is None else about.base

    def commitment(self, base: bytes, peer: PeerId, root: bytes) -> Commitment | None:
        """Commitment that `peer` signed about the contribution with this root, if one was heard."""
        about = self._rounds.get(base)
        known = {} if about is None else about.commitments.get(peer, {})
        return next((one for one in known.values() if one.root == root), None)

    def commitments(self, base: bytes) -> list[Commitment]:
        """All that was committed to in a round, as far as it was heard."""
        about = self._rounds.get(base)
        by_peer = () if about is None else about.commitments.values()
        return [one for known in by_peer for one in known.values()]

    def disputes(self, plan: Plan) -> bool:
        """True if a plan clips somebody otherwise than what was heard of the norms leads to."""
        about = self._rounds.get(plan.base)
        if about is None:
            return False
        heard = {p.peer: about.commitments.get(p.peer, {}).get(p.life) for p in plan.participants}
        known = {peer: about.squares[one.squares] for peer, one in heard.items() if one is not None}
        try:
            check_norms(plan, plan.planner, known)
        except RemoteError:
            return True
        return False

    def hear_commitments(self, base: bytes, others: Iterable[Commitment]) -> list[Evidence]:
        """Take commitments that another node heard in a round; return what they prove with those heard here."""
        about = self._rounds.get(base)
        return [] if about is None else [e for one in others for e in self._hear_commitment(about, one)]

    def alike(self, base: bytes) -> dict[bytes, list[Commitment]]:
        """The roots to which several peers committed in a round, with their commitments."""
        about = self._rounds.get(base)
        by_root: dict[bytes, list[Commitment]] = {}
        for known in () if about is None else about.commitments.values():
            for commitment in known.values():
                by_root.setdefault(commitment.root, []).append(commitment)
        return {root: some for root, some in by_root.items() if len({one.peer for one in some}) > 1}

    # -- what is seen ----------------------------------------------------------------------------------------

    def unsound(self, commitment: Commitment, chunk: int) -> UnsoundContribution | None:
        """A charge that the payload of `chunk` is not what was signed; the payload is to be attached."""
        about = self._rounds.get(commitment.base)
        if about is None:
            return None
        squares = about.squares.get(commitment.squares, ())
        return UnsoundContribution(base=about.base, commitment=commitment, chunk=chunk, squares=squares)

    def squares(self, commitment: Commitment) -> tuple[float, ...]:
        """The sums of squares that were committed to."""
        about = self._rounds.get(commitment.base)
        return () if about is None else about.squares.get(commitment.squares, ())

    def copied(self, commitment: Commitment, top: bytes) -> CopiedCommitment | None:
        """A charge that who committed did not know the `top` under its root."""
        about = self._rounds.get(commitment.base)
        return None if about is None else CopiedCommitment(base=about.base, commitment=commitment, top=top)

    def compare(
        self, plan: Plan, mine: Iterable[ChunkStatement], others: Iterable[ChunkStatement]
    ) -> list[DoubleResult]:
        """Return evidence against owners of chunks on which two sets of statements about one reduction differ."""
        about, origin = self._rounds.get(plan.base), self.origin(plan)
        if about is None or origin is None:
            return []
        known = {(one.owner, one.chunk): one for one in mine if one.plan == origin.hash}
        found = []
        for other in others:
            one = known.get((other.owner, other.chunk))
            if one is None or other.plan != origin.hash or (one.result, one.bitmap) == (other.result, other.bitmap):
                continue
            first, second = sorted((one, other), key=lambda statement: (statement.result, statement.bitmap))
            found.append(DoubleResult(base=about.base, plan=origin, statements=(first, second)))
        return found
