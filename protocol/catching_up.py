"""Catching up: when a member looks for entries of the chain and for a state, which state, from whom, and when again.

It opens no socket and reads no clock. What is due is an errand (errands.py), which a driver carries out beside the
rounds. When it is over, what came of it is an input of the member (`StateSought`, `GenesisFetched`) or nothing.

    due              the errand                                     over, it is due again
    in a round       look into one claim to be ahead (claims.py)    as claims come; see there
    not in a round   come to the state at the head                  RETRY_S after it began; at once if it brought one
    a follower       wait at a peer for entries                     when one is over; see followers.py
    another S(0)     fetch it from the first founder                RETRY_S after it was over

    certificates: who has none yet, or not the one that its link names, chooses a chain (chain_choice.py)
                  else those that follow on the head, of one peer after the other; from who has a later rebase on
                  another chain than the one here, that one
    to the head:  ask for certificates ─► the state there ─► and again, as long as rounds went on meanwhile
    the state:    replay, where the finals that lack are fewer bytes than a state
                  else a whole one: one that came in part, or the newest that most of those hold who hold any; and
                  replay the rest
    an image:     a follower that certificates vouch for the policy's image to takes that in place of the state, where
                  what changed in it is fewer bytes than the finals that lack; from then on it has no state, and takes
                  what changed or, where that is not to be had, the whole image

Whoever is told at once that the head moved (`head_moved`, `hurry`) asks nobody for a newer one, unless somebody claims
that there is one. Where rounds are shorter than this takes, a newcomer says at each head that it comes (newcomers.py),
and follows the chain until that one stands still.

What is tried again, and when, is said here, but for what happens within one transfer: who stalls and who takes over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from shoal.protocol.agreement import Broadcast
from shoal.protocol.chain import Chain, Position
from shoal.protocol.chain_choice import ChainChoice
from shoal.protocol.chain_comparison import Difference, difference, fetched_after
from shoal.protocol.claims import Claims
from shoal.protocol.donors import HEDGE_S, DonorScores
from shoal.protocol.errands import (
    AskEntries,
    AskHolders,
    AwaitEntries,
    Clock,
    CountLacking,
    Errand,
    FetchState,
    FindBegun,
    FindEarlier,
    Holders,
    InTurn,
    KeepEarlier,
    LookUp,
    OfHeader,
    ReplaceChain,
    Replay,
    Steps,
    TakeEntries,
    TakeImage,
)
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.followers import AWAITED_LIMIT, Parents
from shoal.protocol.fork_watch import ForkWatch
from shoal.protocol.forks import Checkpoint
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import GenesisFetched, OfState, StateHeld, StateSought
from shoal.protocol.messages import NO_HASH, Entry, Target, Value
from shoal.protocol.newcomers import coming, patience_s
from shoal.protocol.peering import ChainPart
from shoal.protocol.surroundings import Surroundings
from shoal.protocol.wire import COUNTER_LIMIT

RETRY_S: Final = 1.0
"""Between two attempts to come to a state that peers could not give."""
PURSUIT_LIMIT: Final = 64
"""Times that rounds which were certified meanwhile are followed before what was reached is taken."""
PURSUE_AFTER_S: Final = 1.0
"""A catching up that was shorter is not suspected to have missed a round."""
ASKED_LIMIT: Final = 32
"""Peers that are asked what they hold; of more, those that were fastest the last time."""
ANSWER_TIMEOUT_S: Final = 0.5
"""For certificates from others, once a member has answered or new ones came."""
EMPTY_TIMEOUT_S: Final = 2.0
"""The same once somebody who is no member had nothing new."""

logger = logging.getLogger(__name__)


class StateSearch:
    """Search for a state: which is fetched, from whom, and what is replayed instead. `clock` is kept up by its errands.

    replayed_rounds: for how many rounds the finals are fewer bytes than a state; 0 as long as that is not known.
    takes_images: see `Surroundings`.
    """

    def __init__(
        self,
        scores: DonorScores,
        replayed_rounds: Callable[[], int],
        takes_images: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scores = scores
        self._replayed_rounds = replayed_rounds
        self._found_nowhere = NO_HASH
        self._takes_images = takes_images
        self.clock = Clock()

    def nearer(self, state: OfState | None, chain: Chain, peers: Iterable[PeerId]) -> Steps:
        """A state nearer to the one on which `chain` stands, mostly that one itself. `state` is what is here, if any.

        Comes to None if there is no progress.
        """
        asked = tuple(peers)
        if not self._takes_images():
            return (yield from self._state_nearer(state, chain, asked))
        image = yield from self._image(state, chain, asked, cheapest=True)
        if image is None:
            image = yield from self._state_nearer(state, chain, asked)
        return (yield from self._image(state, chain, asked, cheapest=False)) if image is None else image

    def _image(self, state: OfState | None, chain: Chain, peers: tuple[PeerId, ...], *, cheapest: bool) -> Steps:
        """The image of the policy on which `chain` stands; None if there is none to be had, or it is here."""
        value, certified = chain.standing, chain.digest(chain.standing.round)
        if certified == NO_HASH or (state is not None and is_state_of(value, state)):
            return None
        before = chain.digest(value.round - 1 if state is None else state.round) if value.round else NO_HASH
        return (yield TakeImage(value, certified, before, state, peers, cheapest))

    def _state_nearer(self, state: OfState | None, chain: Chain, asked: tuple[PeerId, ...]) -> Steps:
        before = state
        if state is not None and (yield from self._replay_pays(state.round, chain)):
            state = yield Replay(state, chain, asked)
            if state.round == chain.standing.round:
                return state
        whole = yield from self._whole(state, chain, asked)
        if whole is None:
            return None if state is before else state
        return (yield Replay(whole, chain, asked))

    def _replay_pays(self, round: int, chain: Chain) -> Steps:
        """True if the finals that lack on the way from `round` to the head are fewer bytes than the state there."""
        goal, limit = chain.standing.round, self._replayed_rounds()
        if not limit or round >= goal:
            return False
        plans = tuple(chain.value(between).plan for between in range(round + 1, goal + 1))
        return len(plans) <= limit or (yield CountLacking(plans)) <= limit

    def _whole(self, base: OfState | None, chain: Chain, peers: tuple[PeerId, ...]) -> Steps:
        """A state of a later round than `base`, fetched whole; None if there is none to be had."""
        value, found = yield from self._choose(chain, peers, above=-1 if base is None else base.round)
        if not found:
            if value.hash != self._found_nowhere:  # else it was said before
                logger.info("no peer has the state of round %d", value.round)
            self._found_nowhere = value.hash
            return None
        header: OfHeader = next(iter(found.values()))
        holders = frozenset(peer for peer, held in found.items() if held.digest == header.digest)
        return (yield FetchState(value, chain.digest(value.round), header, holders, base, peers))

    def _choose(self, chain: Chain, peers: tuple[PeerId, ...], *, above: int) -> Steps:
        """Choose a state of a round later than `above` to fetch: its value, and the header by who is known to hold it.

        One that came in part already, if it is still held somewhere; else the newest that most of those hold who hold
        any. There are no headers if nobody holds one.
        """
        goal = chain.standing.round
        for round in self._replayable((yield FindBegun()), chain):
            if round > above:
                holders, _ = yield from self._holders(chain, round, peers)
                if holders:
                    return chain.value(round), holders
        newest, others = yield from self._holders(chain, goal, peers)
        older: Mapping[PeerId, OfHeader] = {}
        if goal - 1 > max(0, above):
            older, _ = yield from self._holders(chain, goal - 1, others)
        if len(newest) >= len(older):
            return chain.value(goal), newest
        return chain.value(goal - 1), older

    def _replayable(self, begun: Sequence[tuple[int, bytes]], chain: Chain) -> list[int]:
        """The rounds of states that are here in part, and from which a replay would lead to the head."""
        goal, limit = chain.standing.round, self._replayed_rounds()
        rounds = dict.fromkeys(round for round, _ in begun if 0 < round < goal <= round + limit)
        digests = {digest for _, digest in begun}
        return [round for round in rounds if chain.value(round).digest in digests]

    def _holders(self, chain: Chain, round: int, peers: Sequence[PeerId]) -> Steps:
        """Return who holds the state of `round`, best donors first, and who does not, of those who answer in time.

        What S(0) is, until a rollback certifies it, the founders say, whom the manifest names; of others who hold it
        none is asked.
        """
        value, certified = chain.value(round), chain.digest(round)
        able = peers if certified != NO_HASH else [peer for peer in peers if peer in value.members]
        ranked = self._scores.ranked(able, self.clock.now)[:ASKED_LIMIT]
        held: Holders = yield AskHolders(value, certified, tuple(ranked))
        for peer in () if held.found else ranked:  # others are asked first the next time
            self._scores.lacked(peer, self.clock.now)
        # S(0) is what the first founder drew, should the founders differ.
        order = sorted(held.found, key=lambda peer: (peer != value.planner, ranked.index(peer)))
        return {peer: held.found[peer] for peer in order}, held.others


class CatchingUp:
    """A member's search for entries and states: which errand is due, and what is held of what comes.

    `scores` are of all who are asked; `fork_watch` is told of who has another chain. checkpoint: of the link by which
    this node joins. Times are those of the member, in whose hands it is.
    """

    def __init__(
        self,
        me: PeerId,
        here: Surroundings,
        scores: DonorScores,
        fork_watch: ForkWatch,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._me = me
        self._here = here
        self._scores = scores
        self._fork_watch = fork_watch
        self._claims = Claims(scores)
        self._parents = Parents(me, scores)
        self._search = StateSearch(scores, lambda: here.replayed_rounds, lambda: here.takes_images)
        self._choice = ChainChoice(here, checkpoint, self._search.clock)
        self._coming = self._fetching_genesis = False
        self._fresh = False  # the head was decided or brought here just now: nobody has to be asked for a newer one
        self._retry_at = 0.0
        self._took_s: float | None = None  # to come to the state at a head, the last time

    @property
    def follows(self) -> bool:
        """True if this node takes part in no round: never, or not in the one after its head, since it has no seat."""
        return self._here.is_follower or self._here.chain.is_outside(self._me)

    def upwards(self, linked: Collection[PeerId]) -> list[PeerId]:
        """As many linked peers as it waits at, over which a word comes to the voters: these first, then the parent."""
        voters = self._here.chain.voting.named
        return sorted(self._parents.first(sorted(linked)), key=lambda peer: peer not in voters)[:AWAITED_LIMIT]

    def claimed(self, peer: PeerId, position: Position) -> None:
        """This peer claims that all before `position` is decided."""
        self._claims.heard(peer, position, members=self._here.chain.head.members)

    @property
    def has_claims(self) -> bool:
        """True if somebody claims to be ahead."""
        return bool(self._claims.claimants(self._here.chain.head))

    def hurry(self, now: float) -> None:
        """The head is of just now, and its state is not here: come to it as soon as there is nothing else to do."""
        self._retry_at, self._fresh = now, True

    def head_moved(self, now: float) -> None:
        """The round under way is over, by certificates that came; those who are being asked for more go on with it."""
        if not self._coming:
            self.hurry(now)

    # -- what is due -----------------------------------------------------------------------------------------

    def due(self, now: float, *, in_round: bool) -> Errand | None:
        """Return the errand to begin now, if any. in_round: the member takes part in the round after its head.

        Who follows and has chosen its chain waits at its parents all the time, and looks into claims as well once it
        has the state at its head.
        """
        here = self._here
        follows = self.follows and not self._choice.pending
        parent = self._parents.next(here.linked(), now) if follows else None
        if parent is not None:
            return self._errand(self._wait_at(parent))
        if in_round or (follows and here.current):
            peer = self._claims.next(here.chain.head, now)
            return None if peer is None else self._errand(self._look_into(peer))
        if self._coming or now < self._retry_at:
            return None
        self._coming, self._retry_at = True, now + RETRY_S
        return self._errand(self._come())

    def genesis(self, founder: PeerId, now: float) -> Errand | None:
        """Have S(0) as the first founder has it, unless that is under way; it is tried as often as it is heard of."""
        if self._fetching_genesis or now < self._retry_at:
            return None
        self._fetching_genesis = True
        return self._errand(self._fetch_genesis(founder))

    def earlier(self, target: Target, digest: bytes) -> Errand:
        """Have the state that a rollback to `target` takes on disk. Comes to `StateHeld`.

        digest: what was proposed, NO_HASH if that is not known. Of S(0) there may be another one here.
        """
        return self._errand(self._have_earlier(target, digest))

    def _errand(self, steps: Steps) -> Errand:
        return Errand(steps, self._search.clock)

    # -- what came -------------------------------------------------------------------------------------------

    def over(self, sought: StateSought) -> bool:
        """An attempt is over. Whether what it brought is still wanted: nearer to the head than what is here."""
        self._coming = False
        state, held, chain = sought.state, self._here.held, self._here.chain
        if state is None or self._here.current or not on_branch(chain, state):
            return False
        return held is None or state.round > held.round or not on_branch(chain, held)

    def adopted(self, now: float) -> None:
        """Note that the state it brought is held, so that a newer one is looked for at once."""
        self._retry_at = now

    # -- errands ---------------------------------------------------------------------------------------------

    def _look_into(self, peer: PeerId) -> Steps:
        try:
            new: bool = yield from (self._choose() if self._choice.pending else self._extend_from(peer))
        except (NetworkError, RemoteError) as error:
            _log(peer, error)
            new = False
        self._claims.answered(peer, self._here.chain.head, self._search.clock.now, new=new)

    def _wait_at(self, peer: PeerId) -> Steps:
        try:
            self._parents.brought(peer, new=(yield from self._extend_from(peer, AwaitEntries)))
        except (NetworkError, RemoteError) as error:
            _log(peer, error)
            self._parents.failed(peer, self._search.clock.now)

    # -- the chain -------------------------------------------------------------------------------------------

    def _look_for_entries(self, peers: tuple[PeerId, ...], *, until_one: bool = False) -> Steps:
        """Take newer entries of the chain from these peers, asked in this order, and wait for nobody who is slow.

        until_one: the first that answers is enough. Raises ConfigError where this node has to choose between chains and
        cannot.
        """
        if self._choice.pending:
            try:
                yield from self._choose()
            except RemoteError as error:
                logger.info("the chain that was chosen: %s", error)
            return
        steps = partial(self._ask_one, frozenset(self._here.chain.head.members), until_one)
        yield InTurn(peers, lambda peer: self._errand(steps(peer)), apart_s=HEDGE_S)

    def _ask_one(self, members: Collection[PeerId], until_one: bool, peer: PeerId) -> Steps:
        """Comes to the seconds for which the others are worth waiting for once `peer` has answered."""
        before = self._here.chain.height
        try:
            yield from self._extend_from(peer)
        except (NetworkError, RemoteError) as error:
            _log(peer, error)
            self._scores.disappointed(peer, self._search.clock.now)
            return None
        if until_one:
            return 0.0
        return ANSWER_TIMEOUT_S if peer in members or self._here.chain.height > before else EMPTY_TIMEOUT_S

    def _choose(self) -> Steps:
        """Take the chain that a newcomer may take, if somebody serves one; whether anything was new.

        Raises ConfigError, and RemoteError where the chain here went on otherwise meanwhile.
        """
        entries: Sequence[Entry] = yield from self._choice.choose()
        return bool(entries) and (yield TakeEntries(tuple(entries), trusted=True)) > 0

    def _extend_from(self, peer: PeerId, ask: type[AskEntries | AwaitEntries] = AskEntries) -> Steps:
        """Take newer entries from one peer, those of one answer after the other; whether there were any.

        ask: how the first answer is asked for. Raises NetworkError, RemoteError.
        """
        chain, any_new = self._here.chain, False
        while True:
            part: ChainPart = yield ask(peer, chain.height, chain.head.term.rebases)
            ask = AskEntries
            try:
                new: int = yield TakeEntries(part.certificates)
            except RemoteError:
                self._fork_watch.suspect(peer, self._search.clock.now)
                yield from self._go_over_to(peer)
                raise
            any_new |= new > 0
            if not new or chain.height >= part.head:
                return any_new

    def _go_over_to(self, peer: PeerId) -> Steps:
        """Take the chain of a peer from where it parts from this one, if a later rebase of the authority stands on it.

        Raises RemoteError, NetworkError.
        """
        chain = self._here.chain.snapshot()
        later: ChainPart = yield AskEntries(peer, COUNTER_LIMIT, chain.head.term.rebases)
        if not later.certificates:
            return  # there is no rebase of which this node does not know
        found: Difference = yield from difference(chain.entries, peer)
        theirs: Chain = yield from fetched_after(chain.up_to(found.height), peer, Chain.extend)
        if theirs.head.term.rebases > chain.head.term.rebases:
            logger.warning("the authority went on with another chain than the one here, which %s serves", peer)
            yield ReplaceChain(theirs, found.height)

    # -- states ----------------------------------------------------------------------------------------------

    def _come(self) -> Steps:
        """Bring chain and state up to date, as far as peers can help; what they cannot is due again later."""
        here, state = self._here, None
        first, fresh, self._fresh = self._claims.claimants(here.chain.head), self._fresh, False
        if first or not fresh:
            yield from self._look_for_entries(self._in_order(self._peers(), first))
        if not here.current:
            state = yield from self._pursue()
        if state is not None or here.current:
            yield LookUp(tuple(self._peers()))
        return StateSought(state)

    def _peers(self) -> list[PeerId]:
        """Return the linked peers: those that claim to be ahead first, then the parent."""
        first = self._claims.claimants(self._here.chain.head)
        return sorted(self._parents.first(self._here.linked()), key=lambda peer: peer not in first)

    def _in_order(self, peers: Collection[PeerId], first: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Members before others, those in `first` before these, and who did not answer lately after them."""
        scores, members = self._scores, self._here.chain.head.members
        order = sorted(
            peers,
            key=lambda peer: (scores.resting(peer, self._search.clock.now), peer not in first, peer not in members),
        )
        return tuple(order)

    def _can_be_awaited(self) -> bool:
        """True if this node, no member, was overtaken though it needs far less than a lead would wait for it."""
        if self.follows or self._took_s is None:  # it comes to no round, or was not overtaken
            return False
        chain = self._here.chain
        wait_s = patience_s(len(chain.voters), self._here.rules(chain.head.next_round).settings.grace_s)
        return self._took_s <= wait_s / 2 and self._me not in chain.head.members

    def _pursue(self) -> Steps:
        """The state at the head, from peers; None when none of them can help now.

        Each attempt asks who is linked by then: a newcomer's first links may be gone. Rounds that are certified while a
        state is on its way are followed too. Leads that would wait are told of each head that this node comes: who was
        told before has planned without it. If in the end the way to the head is not to be had, what is returned is
        older, and the next attempt begins from it.
        """
        here, search = self._here, self._search
        state, found, goal = here.held, None, NO_HASH
        for _ in range(PURSUIT_LIMIT):
            began, before, goal = search.clock.now, goal, here.chain.head.hash
            peers = self._peers()
            awaited = self._can_be_awaited()
            if awaited and goal != before:
                yield Broadcast(coming(here.chain.head))
            nearer: OfState | None = yield from search.nearer(state, here.chain.snapshot(), peers)
            if nearer is not None:
                state = found = nearer
                self._took_s = search.clock.now - began
            # Where it is awaited, rounds are short, and states gone that were there a moment ago.
            if awaited or (nearer is not None and search.clock.now - began > PURSUE_AFTER_S):
                order = tuple(sorted(peers, key=lambda peer: peer not in here.donors))
                yield from self._look_for_entries(order, until_one=True)
            if here.chain.head.hash == goal if nearer is None else is_state_of(here.chain.standing, nearer):
                break
        return found if found is None or on_branch(here.chain, found) else None

    def _fetch_genesis(self, founder: PeerId) -> Steps:
        state: OfState | None = yield from self._search.nearer(None, self._here.chain.snapshot(), [founder])
        self._fetching_genesis = False
        self._retry_at = self._search.clock.now + RETRY_S
        return None if state is None else GenesisFetched(state)

    def _have_earlier(self, target: Target, digest: bytes) -> Steps:
        chain, state = self._here.chain, None
        if chain.can_go_back_to(target):
            state = yield FindEarlier(target.round, digest)
        if state is None and chain.can_go_back_to(target):
            before = chain.back_to(chain.value(target.round), initial=digest)
            state = yield from self._fetch_earlier(before, target.round)
        if state is None:
            return StateHeld(target, None)
        return StateHeld(target, (yield KeepEarlier(state)))

    def _fetch_earlier(self, chain: Chain, round: int) -> Steps:
        state: OfState | None = yield from self._search.nearer(None, chain, sorted(self._here.linked()))
        return state if state is not None and state.round == round else None


def _log(peer: PeerId, error: Exception) -> None:
    logger.info("certificates from %s: %s", peer, error)


def check_header(header: OfHeader, value: Value, certified: bytes, peer: PeerId) -> None:
    """Check that the header by which `peer` answers is that of the state of `value`, as it is certified.

    certified: NO_HASH for an S(0) that nothing certifies. Raises NetworkError where it is of that round on another
    branch, as a donor has it that went back further or not yet; RemoteError where it is anything else.
    """
    if header.round == value.round and header.term != value.term:
        raise NetworkError(f"has the state of round {value.round} of another branch")
    anything = value.round == 0 and certified == NO_HASH
    if header.round != value.round or not (anything or header.digest == certified):
        raise RemoteError(f"offers another state for the certified one of round {value.round}", peer=peer)


def is_state_of(value: Value, state: OfState) -> bool:
    """True if a state is the one that `value` led to."""
    return (state.term, state.round) == (value.term, value.round)


def on_branch(chain: Chain, state: OfState) -> bool:
    """True if the state at the head of a chain is this one, or descends from it."""
    if state.round > chain.standing.round:
        return False
    return state.round == 0 or state.term == chain.value(state.round).term
