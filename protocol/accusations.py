"""Accusations that participants make against each other while they reduce, and which of them are believed.

A stall shows at two removes. Directly: a peer owes *me* a contribution, or does not take what I send. Indirectly: an
owner's final is late, but the owner may itself be waiting for somebody. So direct accusations are settled before any
others; and an owner that waits for contributions which may yet come says so by naming itself among the late, before
the others lose patience, and is not blamed. That holds for a while (excuses.py), and at most until the reduction as a
whole is overdue.

Where more than two live, a lone accuser is not believed, at no deadline: the fault may lie between the two, or with the
accuser. Such a pair is given another path first, through a third, and if the accusation is repeated there, the third
says which side it sees at fault; if it sees none, it speaks against the accuser. Two thirds that say the same decide,
or the one where three live. So does a second accuser, and this node's own failure detector, which has asked through
others too. What leads through one third, and what that third says itself, is one voice. One who accuses back may be cut
off from the accused and nothing else: it and one more are not enough yet, nor are fewer than half of all. Such links
are given other paths like any: behind a router one may not reach some of many in time.

A lead goes on to the next relay as soon as one has spoken, so its plan may come before the word on which it was made.
That word counts still if it was on its way (`ON_ITS_WAY_S`), beside another's that was in time. Else each of the honest
would have heard another part of what was said: one alone would leave the view of a lead that lies, and the others, a
quorum with it, stay until its time is over. To leave a view costs nobody its place, and takes less: late words alone,
or, beside a relay that speaks against the lead, somebody who has left already (`speak_against_lead`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import ceil
from typing import TypeVar

import msgspec

from shoal.protocol.excuses import Excuses
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Plan, Relay, Relayed, RelayedWay, Stalled

THIRDS_LIMIT = 3
"""Paths that are tried between two: where the fault is in none of them, each only takes longer to show it."""

Pair = tuple[PeerId, PeerId]
"""Two peers between whom something is wrong, the lower first."""


def pair_of(one: PeerId, other: PeerId) -> Pair:
    """The two as a pair."""
    return (min(one, other), max(one, other))


class RelayChoice:
    """Relays that this node tried in this round, by pair.

    What another lead tried does not count: it may have tried any for no reason, and for no longer than it liked.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._tried: dict[Pair, set[PeerId]] = {}

    def note(self, plan: Plan) -> None:
        """A plan with these relays is followed; of another lead's nothing is noted."""
        for pair, via in plan.relayed.items() if plan.planner == self._me else ():
            self._tried.setdefault(pair, set()).add(via)

    def has_tried(self, pair: Pair) -> bool:
        """True if a third was tried between these."""
        return bool(self._tried.get(pair))

    def around(
        self, plan: Plan, pairs: Collection[Pair], alive: Collection[PeerId]
    ) -> tuple[tuple[Relay, ...], set[Pair]]:
        """The relays of `plan` with new ones for `pairs`; and the pairs for which everybody was tried, or enough.

        Who needs a relay to one of the two itself is none for them.
        """
        peers = [p.peer for p in plan.participants]
        relays, without = dict(plan.relayed), set[Pair]()
        troubled = {peer for pair in pairs for peer in pair}
        for pair in sorted(pairs):
            tried = self._tried.get(pair, set())
            apart = relays.keys() | set(pairs)
            free = [
                p
                for p in plan.remaining
                if p in alive and p not in pair and p not in tried and not any(pair_of(p, end) in apart for end in pair)
            ]
            if not free or len(tried) >= THIRDS_LIMIT:
                without.add(pair)
                continue
            free.sort(key=lambda p: (p in troubled, sum(p == via for via in relays.values()), p))
            relays[pair] = free[0]
        return pack_relays(peers, relays), without


def pack_relays(peers: list[PeerId], relays: Mapping[Pair, PeerId]) -> tuple[Relay, ...]:
    """`relays` (pair to third) by places among `peers`, in order."""
    place = {peer: i for i, peer in enumerate(peers)}
    packed = []
    for (one, other), via in relays.items():
        first, second = sorted((place[one], place[other]))
        packed.append(Relay(first, second, place[via]))
    return tuple(sorted(packed, key=lambda relay: (relay.one, relay.other)))


PLANS_LIMIT = MEMBER_LIMIT
"""Plans of one round on which one peer may report."""
WORDS_LIMIT = 4
"""Plans of one round about which one peer's accusations, and its claims as a relay, are kept: a plan or two that have
not come here yet, and those before."""
EARLY_WAYS_LIMIT = 2 * MEMBER_LIMIT
"""Ways of a relay of a plan that is not followed here, perhaps not yet: all of them come again."""
ON_ITS_WAY_S = 2.0
"""So long after a plan took the place of another here, what is said of that one is a late word. It counts for less: a
relay that has not heard of the change sees nothing come any more from those that did, and may soon say so."""
CUT_LEAST = 3
"""So many that a peer accuses back speak against it, and half of all others; or two where there are no more."""
RELAYS_NEEDED = 2
"""Relays that have to speak against one peer, where there are so many."""

Word = TypeVar("Word")
Dispute = tuple[PeerId, PeerId]
"""Accuser and accused."""


def make_room(table: dict[bytes, dict[PeerId, Word]], plan: bytes, sender: PeerId, limit: int = PLANS_LIMIT) -> None:
    """Let go of a sender's oldest words in a table keyed by plan, so that it may speak about `plan` too.

    Nobody fills it with plans that do not exist, nor keeps others, by many plans, from speaking about a later one.
    """
    spoken = [one for one, row in table.items() if sender in row and one != plan]
    for one in spoken[: max(0, len(spoken) + 1 - limit)]:
        del table[one][sender]
        if not table[one]:
            del table[one]


class Accusations:
    """All that was said in one round, by plan and speaker; the newest word of each stands.

    What is said of the plan that is followed here is kept only of who has a say under it. Of another plan, which may be
    about to come, or there may be none, anybody's word is kept who is heard, but little of it.
    """

    def __init__(self) -> None:
        self._said: dict[bytes, dict[PeerId, Stalled]] = {}
        self._relayed: dict[bytes, dict[PeerId, Relayed]] = {}
        self._against: dict[PeerId, frozenset[PeerId]] = {}
        """By peer, the relays that spoke against it when the plan was left that they spoke about."""
        self._late: dict[PeerId, frozenset[PeerId]] = {}
        """The same of those whose word came just after that."""
        self._excuses = Excuses()
        self._left: dict[bytes, tuple[Plan, float]] = {}
        """Plans that were followed here until a moment ago, each with when another took its place."""

    def take(self, sender: PeerId, message: Stalled, followed: Plan | None = None) -> None:
        """`sender` accuses. followed: the plan that this node follows."""
        if followed is not None and followed.hash == message.plan and sender not in followed.remaining:
            return
        make_room(self._said, message.plan, sender, WORDS_LIMIT)
        self._said.setdefault(message.plan, {})[sender] = message

    def take_relayed(self, sender: PeerId, message: Relayed, followed: Plan | None = None) -> None:
        """`sender` says what it passed on: of the plan that is followed, between those whose relay it is."""
        ways = message.ways[:EARLY_WAYS_LIMIT]
        if followed is not None and followed.hash == message.plan:
            if sender not in followed.relayed.values():
                return
            ways = tuple(_of_relay(sender, message.ways, followed))
        make_room(self._relayed, message.plan, sender, WORDS_LIMIT)
        self._relayed.setdefault(message.plan, {})[sender] = msgspec.structs.replace(message, ways=ways)

    def leave(self, plan: Plan, alive: Collection[PeerId], now: float) -> None:
        """Another plan takes the place of `plan`: keep what relays say by now."""
        self._against = self._spoken(plan, alive)
        recent = [(one, left) for one, left in self._left.items() if now - left[1] <= ON_ITS_WAY_S]
        self._left = {**dict(recent[-PLANS_LIMIT:]), plan.hash: (plan, now)}

    def note_late(self, plan: bytes, alive: Collection[PeerId], now: float) -> None:
        """Something that was said of this plan was taken: keep what it says against whom, if it was just left here."""
        left, at = self._left.get(plan, (None, now))
        if left is not None and now - at <= ON_ITS_WAY_S:
            _add(self._late, self._speaking(left, alive))

    def look(self, plan: Plan, alive: Collection[PeerId], now: float, *, ran_s: float) -> None:
        """Note for how long owners say that they wait. ran_s: how long the reduction of `plan` has been going on."""
        missed = self._missed(plan, alive)
        held_up = missed if missed and self._is_any_direct(plan, alive) else ()
        self._excuses.look(plan, now, excused=self._excused(plan, alive) & missed, held_up=held_up, ran_s=ran_s)

    def _missed(self, plan: Plan, alive: Collection[PeerId]) -> set[PeerId]:
        """Owners whose finals enough of those miss that wait for nobody, whatever is said directly."""
        said, living = self._heard(plan, alive), _living(plan, alive)
        late = _without_direct(said)
        waiting = _waiting(late)
        missing = {peer: some - waiting for peer, some in _accusers(late).items() if peer in living}
        few = len(living) <= 2
        return {peer for peer, some in missing.items() if some and (few or _are_two(plan, peer, some, late, living))}

    def _is_any_direct(self, plan: Plan, alive: Collection[PeerId]) -> bool:
        return any(message.peers for message in self._heard(plan, alive).values())

    def _excused(self, plan: Plan, alive: Collection[PeerId]) -> frozenset[PeerId]:
        """Those that say they wait, where nothing is said directly."""
        return frozenset() if self._is_any_direct(plan, alive) else _waiting(self._heard(plan, alive))

    def _out_of_excuses(self, plan: Plan, alive: Collection[PeerId]) -> set[PeerId]:
        """Those excused no more; none where they are half of the living, or more: then the others are quick."""
        over = {peer for peer in self._excused(plan, alive) if self._excuses.over(peer)}
        over &= self._missed(plan, alive) if over else over
        return over if 2 * len(over) < len(_living(plan, alive)) else set()

    # -- who is believed ---------------------------------------------------------------------------------------

    def believed(
        self, plan: Plan, alive: Collection[PeerId], suspected: Collection[PeerId] = (), *, overdue: bool = False
    ) -> set[PeerId]:
        """Those that enough living participants of `plan` speak against; the word of one of them does not count.

        One accuser is enough where it is the only other one, and against those that this node's own detector suspects.
        overdue: the reduction has had its time, and nobody is excused for waiting.
        """
        said = self._heard(plan, alive)
        if not said:
            return set()
        living = _living(plan, alive)
        due = self._out_of_excuses(plan, alive) | set(suspected)
        accusers = _unexcused(said, living, due, overdue=overdue)
        if len(living) <= 2:
            return set(accusers)
        spoken, needed = self.relays_against(plan, alive), _relays_needed(living)
        late = self._of_parties(plan, alive, self._late)

        def enough(peer: PeerId, gone: set[PeerId]) -> bool:
            some = accusers.get(peer, set()) - gone
            relays = spoken.get(peer, frozenset()) - gone
            if relays:
                relays |= late.get(peer, frozenset()) - gone
            two = bool(some) if peer in suspected else _are_two(plan, peer, some, said, living)
            return two or len(relays) >= needed

        found, left = set[PeerId](), living.intersection((*accusers, *spoken))
        at_odds = _at_odds(accusers)
        while left := {peer for peer in left if enough(peer, found)}:  # by fewer words, no more are enough
            next_one = max(sorted(left), key=lambda peer: len(at_odds.get(peer, ())))
            found.add(next_one)
            left.remove(next_one)
        return found

    def may_answer(self, plan: Plan, peer: PeerId, alive: Collection[PeerId]) -> bool:
        """True if two accuse this peer, but not half of all, and it has said nothing itself: that may be on its way."""
        said = self._heard(plan, alive)
        others = _living(plan, alive) - {peer}
        accusers = _accusers(said).get(peer, set()) & others
        return peer not in said and len(accusers) > 1 and 2 * len(accusers) < len(others)

    def speak_against_lead(
        self, plan: Plan, alive: Collection[PeerId], suspected: Collection[PeerId], ahead: Collection[PeerId]
    ) -> bool:
        """True if enough speak against the lead that made `plan` for a member to leave its view.

        As in `believed`; and enough that miss its finals, be it accused directly or not, if that is not settled in its
        time. A relay's late word counts like any other, and who is ahead, in a later view, as the second
        voice beside another relay's: beside a lone accuser, who may have no way to the lead, one liar would be enough.
        """
        lead, said = plan.planner, self._heard(plan, alive)
        if not said:
            return False
        relays = self.relays_against(plan, alive).get(lead, frozenset())
        relays |= self._of_parties(plan, alive, self._late).get(lead, frozenset())
        living = _living(plan, alive)
        if self._excuses.unsettled(lead) and self._is_any_direct(plan, alive) and lead in self._missed(plan, alive):
            return True
        joined = any(relay != other for relay in relays for other in living.intersection(ahead) - {lead})
        return joined or len(relays) >= _relays_needed(living) or lead in self.believed(plan, alive, suspected)

    def disputes(self, plan: Plan, alive: Collection[PeerId]) -> set[Dispute]:
        """Pairs of living peers, accuser first, by direct accusations; by late finals if there is no direct one.

        None where two live, and none while there is somebody whom `believed` names: one thing after the other.
        """
        living = _living(plan, alive)
        if len(living) < 3 or self.believed(plan, alive):
            return set()
        return set(self._disputes(plan, living, self._heard(plan, alive)))

    def _disputes(self, plan: Plan, living: Collection[PeerId], said: Mapping[PeerId, Stalled]) -> Iterator[Dispute]:
        direct, waiting = any(m.peers for m in said.values()), _waiting(said)
        for accuser, message in said.items():
            for peer in message.peers if direct else frozenset(message.late) - waiting:
                if peer in living and peer != accuser:
                    yield accuser, peer

    def losers(
        self, plan: Plan, later: Plan, alive: Collection[PeerId], suspected: Collection[PeerId], *, me: PeerId
    ) -> set[PeerId]:
        """Return the peers that `later` evicts because they lost a dispute under `plan`.

        A lead's ruling counts where it was no party to the dispute, or is this node; else enough relays must say the
        same. A peer that two accuse, or that this node's detector suspects, is cut off or hangs, and lost no dispute.
        """
        said, living = self._heard(plan, alive), _living(plan, alive)
        gone = living.intersection(later.evicted)
        against, found = self.relays_against(plan, alive), set[PeerId]()
        for dispute in self._disputes(plan, living, said):
            for one, other in (dispute, dispute[::-1]):
                judged = other not in gone and (later.planner != other or other == me)
                if one in gone and (judged or len(against.get(one, ())) >= _relays_needed(living)):
                    found.add(one)
        accusers = _accusers(said)
        two = {p for p in found if _are_two(plan, p, accusers.get(p, set()), said, living, cut_share=0.0)}
        return found - two - set(suspected)

    # -- what relays say ---------------------------------------------------------------------------------------

    def spoken_of(self, plan: Plan, dispute: Dispute, alive: Collection[PeerId]) -> bool:
        """True if the relay of this pair has come to a conclusion about it."""
        return self._blamed(plan, dispute, alive) is not None

    def asked(self, plan: Plan, alive: Collection[PeerId], relay: PeerId) -> set[frozenset[int]]:
        """The pairs, by their places in `plan`, about which it is for `relay` to speak."""
        relays = plan.relayed
        places = {p.peer: place for place, p in enumerate(plan.participants)}
        pairs = {pair_of(*dispute) for dispute in self.disputes(plan, alive)} if relays else ()
        return {frozenset((places[one], places[other])) for one, other in pairs if relays.get((one, other)) == relay}

    def relays_against(self, plan: Plan, alive: Collection[PeerId]) -> dict[PeerId, frozenset[PeerId]]:
        """By peer that accuses another or is accused, the relays that speak against it, or did so under earlier plans
        of this round, and take part still."""
        return self._of_parties(plan, alive, self._spoken(plan, alive))

    def _of_parties(
        self, plan: Plan, alive: Collection[PeerId], spoken: Mapping[PeerId, frozenset[PeerId]]
    ) -> dict[PeerId, frozenset[PeerId]]:
        """Relays that live, by whom they spoke against: of those alone that accuse somebody now, or are accused."""
        if not spoken:
            return {}
        living = _living(plan, alive)
        disputes = self._disputes(plan, living, self._heard(plan, alive))
        parties = {peer for dispute in disputes for peer in dispute}
        return {peer: spoken[peer] & living for peer in parties.intersection(spoken)}

    def _spoken(self, plan: Plan, alive: Collection[PeerId]) -> dict[PeerId, frozenset[PeerId]]:
        found = dict(self._against)
        _add(found, self._speaking(plan, alive))
        return found

    def _speaking(self, plan: Plan, alive: Collection[PeerId]) -> Iterator[tuple[PeerId, PeerId]]:
        """Yield whom a relay of this plan speaks against, and the relay."""
        relays = plan.relayed
        if not relays:
            return
        for dispute in self._disputes(plan, _living(plan, alive), self._heard(plan, alive)):
            relay = relays.get(pair_of(*dispute))
            blamed = None if relay is None else self._blamed(plan, dispute, alive)
            if relay is not None and blamed is not None:
                yield blamed, relay

    def loser(self, plan: Plan, dispute: Dispute, alive: Collection[PeerId]) -> PeerId:
        """Return which of a pair is evicted when there is no path left to try.

        It is the accused if others accuse it too, of the same, or if more relays speak against it than against the
        accuser; else the accuser, whom nobody supports. That an owner's finals are late says nothing of who owes whom a
        contribution.
        """
        accuser, accused = dispute
        if len(_voices(plan, accused, _accusers(self._heard(plan, alive)).get(accused, set()))) > 1:
            return accused
        spoken = self.relays_against(plan, alive)
        one, other = len(spoken.get(accuser, ())), len(spoken.get(accused, ()))
        return accused if other > one else accuser

    def _blamed(self, plan: Plan, dispute: Dispute, alive: Collection[PeerId]) -> PeerId | None:
        """Return which of the two their relay speaks against; None while it has said nothing that tells.

        A relay to which neither comes through is none; and if both miss what it says it passed, it is not to be
        believed itself.
        """
        accuser, accused = dispute
        said = self._heard(plan, alive)
        relay = plan.relayed.get(pair_of(accuser, accused))
        claims = self._claims(plan, relay, alive)
        to_accuser, to_accused = claims.get((accused, accuser)), claims.get((accuser, accused))
        named = _at_fault(to_accuser, accused, accuser) | _at_fault(to_accused, accuser, accused)
        if len(named) == 1:
            return named.pop()
        if named or to_accuser is None or to_accused is None:
            return None
        late_only = accused not in said[accuser].peers
        mutual = accused in said and accuser in (*said[accused].peers, *said[accused].late)
        return None if mutual or (late_only and not to_accuser.finals) else accuser

    def _claims(
        self, plan: Plan, relay: PeerId | None, alive: Collection[PeerId]
    ) -> Mapping[tuple[PeerId, PeerId], RelayedWay]:
        message = None if relay is None else self._relayed.get(plan.hash, {}).get(relay)
        if message is None or relay not in alive or relay not in plan.remaining:
            return {}
        peers = [p.peer for p in plan.participants]
        known = [way for way in message.ways if max(way.sender, way.receiver) < len(peers)]
        return {(peers[way.sender], peers[way.receiver]): way for way in known}

    def _heard(self, plan: Plan, alive: Collection[PeerId]) -> dict[PeerId, Stalled]:
        if plan.hash not in self._said:
            return {}
        remaining = frozenset(plan.remaining)
        said = ((a, m) for a, m in self._said[plan.hash].items() if a in alive and a in remaining)
        return {accuser: _of_others(message, accuser, remaining) for accuser, message in said}


def _of_others(message: Stalled, accuser: PeerId, remaining: Collection[PeerId]) -> Stalled:
    """Leave of a direct accusation those who are in the plan: a word about anybody else would settle nothing, and hold
    up all that comes after."""
    peers = tuple(peer for peer in message.peers if peer in remaining and peer != accuser)
    return message if peers == message.peers else msgspec.structs.replace(message, peers=peers)


def _living(plan: Plan, alive: Collection[PeerId]) -> set[PeerId]:
    return {peer for peer in plan.remaining if peer in alive}


def _add(table: dict[PeerId, frozenset[PeerId]], spoken: Iterable[tuple[PeerId, PeerId]]) -> None:
    """Add to a table of relays by whom they speak against."""
    for blamed, relay in spoken:
        table[blamed] = table.get(blamed, frozenset()) | {relay}


def _unexcused(
    said: Mapping[PeerId, Stalled], living: Collection[PeerId], due: Collection[PeerId], *, overdue: bool = False
) -> dict[PeerId, set[PeerId]]:
    """By living peer, its accusers, but of those that wait for others themselves, as in `Accusations.believed`.

    due: who is excused for that no more.
    """
    direct = any(message.peers for message in said.values())
    excused = frozenset() if direct or overdue else _waiting(said) - frozenset(due)
    return {peer: some for peer, some in _accusers(said).items() if peer in living and peer not in excused}


def _without_direct(said: Mapping[PeerId, Stalled]) -> dict[PeerId, Stalled]:
    return {peer: msgspec.structs.replace(message, peers=()) for peer, message in said.items()}


def _accusers(said: Mapping[PeerId, Stalled]) -> dict[PeerId, set[PeerId]]:
    """By peer, those that accuse it directly or, if nobody accuses anybody directly, of late finals."""
    direct, found = any(message.peers for message in said.values()), dict[PeerId, set[PeerId]]()
    for accuser, message in said.items():
        for accused in message.peers if direct else message.late:
            if accused != accuser:
                found.setdefault(accused, set()).add(accuser)
    return found


def _of_relay(sender: PeerId, ways: Collection[RelayedWay], plan: Plan) -> Iterator[RelayedWay]:
    """The ways between two whose relay `sender` is under `plan`, each once: the last that is said of it stands."""
    peers, newest = [p.peer for p in plan.participants], {(way.sender, way.receiver): way for way in ways}
    for (one, other), way in newest.items():
        if max(one, other) < len(peers) and plan.relayed.get(pair_of(peers[one], peers[other])) == sender:
            yield way


def _relays_needed(living: Collection[PeerId]) -> int:
    """Number of relays that must agree: one where three live, for then each pair has only one."""
    return 1 if len(living) == 3 else RELAYS_NEEDED


def _waiting(said: Mapping[PeerId, Stalled]) -> frozenset[PeerId]:
    """Those whose finals are late because they wait for contributions that may yet come."""
    return frozenset(peer for peer, message in said.items() if peer in message.late)


def _at_fault(way: RelayedWay | None, sender: PeerId, receiver: PeerId) -> set[PeerId]:
    """End that a relay blames by its report of one way, if any: who takes too little, else who sends too little."""
    if way is None or (way.came and way.taken):
        return set()
    return {sender} if way.taken else {receiver}


def _at_odds(accusers: Mapping[PeerId, Collection[PeerId]]) -> dict[PeerId, set[PeerId]]:
    """By peer, those that it accuses and those that accuse it."""
    found = {peer: set(some) for peer, some in accusers.items()}
    for peer, some in accusers.items():
        for accuser in some:
            found.setdefault(accuser, set()).add(peer)
    return found


def _voices(plan: Plan, accused: PeerId, accusers: Collection[PeerId]) -> set[PeerId]:
    """Independent voices among `accusers`: a relay counts in place of those who reach the accused through it."""
    relays = plan.relayed
    if not relays:
        return set(accusers) - {accused}
    return {relays.get(pair_of(accuser, accused), accuser) for accuser in accusers if accuser != accused}


def _are_two(
    plan: Plan,
    accused: PeerId,
    accusers: set[PeerId],
    said: Mapping[PeerId, Stalled],
    living: Collection[PeerId],
    cut_share: float = 0.5,
) -> bool:
    """True if these are two voices, and not one liar and one broken link.

    cut_share: of all others, so many are enough whom it accuses back.
    """
    word = said.get(accused)
    cut = accusers.intersection(() if word is None else (*word.peers, *word.late))
    others = {peer for peer in plan.remaining if peer in living} - {accused}
    needed = 2 if cut >= others else max(CUT_LEAST, ceil(cut_share * len(others)))
    return len(_voices(plan, accused, accusers - cut)) >= 2 or len(_voices(plan, accused, cut)) >= needed
