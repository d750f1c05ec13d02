"""Pairs that everybody proposes alone, and the negotiation, over messages that take their time or are lost."""

from __future__ import annotations

from collections import Counter
from itertools import count, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.gossip_messages import Decline, GossipMessage, Offer, Taken, Withdraw
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.pairing import (
    CANDIDATE_LIMIT,
    LED_ALONE_ROUNDS,
    ROUND_LIMIT,
    Alone,
    Effect,
    Fetch,
    PairingMachine,
    Phase,
    Say,
    candidates,
    pairs,
)
from shoal.protocol.wire import HASH_BYTES, canonical, decode

SWARM = bytes(range(32))
NAMES = [PeerId(f"peer{i:02}") for i in range(40)]
SHAPE = ("bf16", 4096, 4096)
TIMEOUT_S = 2.0

FUZZ = settings(derandomize=True)

members = st.sets(st.sampled_from(NAMES), min_size=1, max_size=20)


def offer(round: int, shape: tuple[str, int, int] = SHAPE, mark: int = 0) -> Offer:
    codec, numel, chunk_values = shape
    chunks = -(-numel // chunk_values)
    return Offer(
        round=round, codec=codec, numel=numel, chunk_values=chunk_values, hashes=bytes([mark]) * (HASH_BYTES * chunks)
    )


# --- the proposal ---


@FUZZ
@given(members=members, round=st.integers(0, 2**40))
def test_all_but_at_most_one_are_in_exactly_one_pair(members: set[PeerId], round: int) -> None:
    proposed = pairs(SWARM, round, members)
    everyone = [peer for pair in proposed for peer in pair]
    assert len(everyone) == len(set(everyone)) == len(members) // 2 * 2
    assert set(everyone) <= members


@FUZZ
@given(members=members, round=st.integers(0, 2**40))
def test_who_sees_the_same_members_proposes_the_same_pair(members: set[PeerId], round: int) -> None:
    first = {me: candidates(SWARM, round, me, members - {me}) for me in members}
    proposed = pairs(SWARM, round, list(members)[::-1])
    for one, other in proposed:
        assert (first[one][0], first[other][0]) == (other, one)
    for me, found in first.items():
        assert me not in found
        assert len(found) == len(set(found)) <= CANDIDATE_LIMIT


def test_over_rounds_every_pair_is_as_likely_as_any_other() -> None:
    rounds, peers = 3000, NAMES[:6]
    drawn = Counter(tuple(sorted(pair)) for round in range(rounds) for pair in pairs(SWARM, round, peers))
    assert len(drawn) == 15
    expected = rounds / 5  # each has five others
    assert sum((times - expected) ** 2 / expected for times in drawn.values()) < 40  # 9 degrees of freedom, 5 sigma


def test_another_swarm_or_round_draws_others() -> None:
    proposals = [pairs(swarm, round, NAMES) for swarm in (SWARM, bytes(32)) for round in (1, 2)]
    assert all(one != other for one, other in pairwise(proposals))


# --- the negotiation, in memory ---


class Swarm:
    """Machines joined by messages that take `delay_s` each; a fetch takes `fetch_s` and then the next round begins.

    train_s: by peer, how long its inner steps take. done: by peer, the round that it comes with. mute: who hears and
    says nothing. apart: who does not see whom.
    """

    def __init__(
        self,
        peers: list[PeerId],
        *,
        train_s: dict[PeerId, float] | None = None,
        done: dict[PeerId, int] | None = None,
    ) -> None:
        rounds = dict.fromkeys(peers, 0) | (done or {})
        self.machines = {
            peer: PairingMachine(me=peer, swarm=SWARM, shape=SHAPE, timeout_s=TIMEOUT_S, round=round)
            for peer, round in rounds.items()
        }
        self.train_s = train_s or {}
        self.delay_s, self.fetch_s = 0.01, 0.1
        self.mute: set[PeerId] = set()
        self.apart: set[tuple[PeerId, PeerId]] = set()
        self.now = 0.0
        self.steps: dict[PeerId, list[tuple[int, PeerId | None, float]]] = {peer: [] for peer in peers}
        self._order = count()
        self._agenda: list[tuple[float, int, PeerId, str, object]] = []
        for peer in peers:
            self._begin(peer)

    def alive(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.machines if other != peer and (peer, other) not in self.apart]

    def run(self, until_s: float) -> None:
        while self._agenda and min(self._agenda)[0] <= until_s:
            event = min(self._agenda)
            self._agenda.remove(event)
            self.now, _, peer, kind, what = event
            if peer not in self.mute:
                self._do(peer, kind, what)

    def _at(self, after_s: float, peer: PeerId, kind: str, what: object = None) -> None:
        self._agenda.append((self.now + after_s, next(self._order), peer, kind, what))

    def _begin(self, peer: PeerId) -> None:
        machine = self.machines[peer]
        machine.begin(machine.next_round)
        self._at(self.train_s.get(peer, 1.0), peer, "made")

    def _do(self, peer: PeerId, kind: str, what: object) -> None:
        machine = self.machines[peer]
        if kind == "made":
            self._carry_out(peer, machine.made(offer(machine.catch_up()), self.alive(peer), self.now))
        elif kind == "heard":
            sender, message = what  # type: ignore[misc]
            self._carry_out(peer, machine.receive(sender, message, self.now))
        elif kind == "fetched" and machine.phase is Phase.PAIRED and machine.partner == what:
            machine.fetched(what)  # type: ignore[arg-type]
            self._step(peer, what)  # type: ignore[arg-type]
        elif kind == "tick":
            self._carry_out(peer, machine.tick(self.alive(peer), self.now))

    def _carry_out(self, peer: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                if peer not in self.mute:
                    self._at(self.delay_s, effect.peer, "heard", (peer, effect.message))
                self._at(TIMEOUT_S, peer, "tick")
            elif isinstance(effect, Fetch):
                self._at(self.fetch_s, peer, "fetched", effect.peer)
            else:
                self._step(peer, None)

    def _step(self, peer: PeerId, partner: PeerId | None) -> None:
        assert self.machines[peer].phase is Phase.OVER
        self.steps[peer].append((self.machines[peer].round, partner, self.now))
        self._begin(peer)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_where_all_see_the_same_all_but_the_odd_one_are_paired_and_both_know_it(size: int) -> None:
    swarm = Swarm(NAMES[:size])
    swarm.run(until_s=40)
    for round in range(1, 20):
        partners = {peer: {r: p for r, p, _ in steps}.get(round) for peer, steps in swarm.steps.items()}
        paired = {peer for peer, partner in partners.items() if partner is not None}
        assert len(paired) == size // 2 * 2, round
        assert all(partners[partner] == peer for peer, partner in partners.items() if partner is not None)


def test_a_silent_partner_costs_a_bounded_delay_and_nobody_else_notices() -> None:
    swarm = Swarm(NAMES[:4])
    swarm.mute = {NAMES[3]}
    swarm.run(until_s=60)
    longest = 1.0 + CANDIDATE_LIMIT * TIMEOUT_S + swarm.fetch_s + 10 * swarm.delay_s
    for peer in NAMES[:3]:
        ends = [at for _, _, at in swarm.steps[peer]]
        assert len(ends) > 15
        assert max(b - a for a, b in pairwise([0.0, *ends])) <= longest
    assert any(partner is not None for peer in NAMES[:3] for _, partner, _ in swarm.steps[peer])
    assert all(partner != NAMES[3] for peer in NAMES[:3] for _, partner, _ in swarm.steps[peer])


def test_who_is_slow_skips_rounds_and_still_finds_partners_while_the_others_wait_within_the_bound() -> None:
    slow = NAMES[0]
    swarm = Swarm(NAMES[:5], train_s={slow: 4.5})
    swarm.run(until_s=200)
    rounds = [round for round, _, _ in swarm.steps[slow]]
    newest = max(round for steps in swarm.steps.values() for round, _, _ in steps)
    assert rounds == sorted(set(rounds))
    assert rounds[-1] >= newest - 6  # far more rounds than it made
    assert len(rounds) < newest / 2
    assert sum(partner is not None for _, partner, _ in swarm.steps[slow]) > len(rounds) / 2
    for peer in NAMES[1:5]:
        ends = [at for _, _, at in swarm.steps[peer]]
        assert max(b - a for a, b in pairwise(ends)) <= 1.2 + CANDIDATE_LIMIT * TIMEOUT_S
        assert len(ends) > 200 / (1.2 + TIMEOUT_S)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_who_was_away_finds_partners_at_once_and_is_where_two_others_are_in_a_few_steps(size: int) -> None:
    away, others = NAMES[0], NAMES[1:size]
    swarm = Swarm(NAMES[:size], done=dict.fromkeys(others, 500) | {away: 3})
    swarm.run(until_s=60)
    steps = swarm.steps[away]
    assert any(partner is not None for _, partner, _ in steps[:3])
    assert sum(partner is not None for _, partner, _ in steps) > len(steps) / 2
    assert (steps[4][0] >= 500) == (size > 2)
    assert all(round < 500 + 2 * 60 for steps in swarm.steps.values() for round, _, _ in steps)


LIAR = NAMES[20]


class LiedTo(Swarm):
    """One who refuses every offer names another round, far ahead, to each of the others just before its vector."""

    named = 1000

    def _do(self, peer: PeerId, kind: str, what: object) -> None:
        if kind == "made":
            self.named *= 2
            self.machines[peer].receive(LIAR, Decline(round=0, mine=self.named), self.now)
        super()._do(peer, kind, what)


def test_one_who_lies_of_its_round_keeps_nobody_apart_and_leads_nobody_far() -> None:
    paired, newest = {}, {}
    for kind in (Swarm, LiedTo):
        swarm = kind([*NAMES[:6], LIAR])
        swarm.mute = {LIAR}
        swarm.run(until_s=60)
        paired[kind] = sum(partner is not None for steps in swarm.steps.values() for _, partner, _ in steps)
        newest[kind] = max(round for steps in swarm.steps.values() for round, _, _ in steps)
    assert paired[LiedTo] > 0.8 * paired[Swarm] > 50
    assert newest[LiedTo] < 3 * newest[Swarm]


def test_views_that_differ_stop_nobody() -> None:
    peers = NAMES[:6]
    swarm = Swarm(peers)
    swarm.apart = {(peers[0], peers[1]), (peers[2], peers[3]), (peers[3], peers[4]), (peers[5], peers[0])}
    swarm.run(until_s=60)
    assert all(len(steps) > 60 / (1.2 + CANDIDATE_LIMIT * TIMEOUT_S) for steps in swarm.steps.values())
    paired = [partner is not None for steps in swarm.steps.values() for _, partner, _ in steps]
    assert sum(paired) > len(paired) / 2


# --- single steps ---

ME, A, B = NAMES[:3]


def machine(round: int = 1) -> PairingMachine:
    made = PairingMachine(me=ME, swarm=SWARM, shape=SHAPE, timeout_s=TIMEOUT_S, round=round - 1)
    made.begin(round)
    return made


def said(effects: list[Effect]) -> list[tuple[PeerId, GossipMessage]]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Say)]


def test_whoever_waits_is_taken_before_anybody_is_asked() -> None:
    one = machine()
    assert one.receive(A, offer(1, mark=7), 0.0) == []
    assert one.made(offer(1), [A, B], 1.0) == [Say(A, offer(1)), Fetch(A, offer(1, mark=7))]
    assert (one.phase, one.partner) == (Phase.PAIRED, A)


def test_of_two_that_wait_the_other_is_declined() -> None:
    one = machine()
    one.receive(A, offer(1), 0.0)
    one.receive(B, offer(1), 0.0)
    first = candidates(SWARM, 1, ME, [A, B])[0]
    second = B if first == A else A
    effects = one.made(offer(1), [A, B], 1.0)
    assert effects == [Say(first, offer(1)), Fetch(first, offer(1)), Say(second, Decline(round=1, mine=1))]


def test_who_seeks_declines_others_at_once_so_that_no_circle_waits() -> None:
    one = machine()
    ((target, _),) = said(one.made(offer(1), [A, B], 0.0))
    other = B if target == A else A
    assert one.receive(other, offer(1), 0.0) == [Say(other, Decline(round=1, mine=1))]
    assert one.partner == target


@pytest.mark.parametrize("apart", [-50, -1, 0, 1, 50])
def test_an_offer_of_any_round_is_held(apart: int) -> None:
    one = machine(60)
    assert one.receive(A, offer(60 + apart), 0.0) == []
    assert one.made(offer(60), [A], 0.0)[1] == Fetch(A, offer(60 + apart))


@pytest.mark.parametrize("word", [offer(2**61), Decline(round=60, mine=2**61)])
def test_one_peers_word_leads_a_round_a_step_and_that_of_two_to_where_both_have_come(
    word: Offer | Decline,
) -> None:
    one = machine(60)
    for _ in range(2):
        one.receive(A, word, 0.0)
    assert (one.next_round, one.catch_up(), one.next_round) == (61, 60 + LED_ALONE_ROUNDS, 61 + LED_ALONE_ROUNDS)
    one.receive(B, Decline(round=60, mine=500), 0.0)
    assert (one.next_round, one.catch_up()) == (500, 500)


def test_the_word_of_who_is_gone_leads_nowhere() -> None:
    one = machine(60)
    for peer in (A, B):
        one.receive(peer, Decline(round=60, mine=500), 0.0)
    one.tick([B], 0.0)
    assert one.catch_up() == 60 + LED_ALONE_ROUNDS


def test_a_vector_of_another_shape_is_declined() -> None:
    one = machine()
    for shape in (("fp32", 4096, 4096), ("bf16", 4097, 4096), ("bf16", 4096, 8192)):
        assert one.receive(A, offer(1, shape), 0.0) == [Say(A, Decline(round=1, mine=1))]


def test_a_withdrawn_offer_is_not_taken() -> None:
    one = machine()
    one.receive(A, offer(1), 0.0)
    one.receive(A, Withdraw(round=1), 0.0)
    assert said(one.made(offer(1), [A], 0.0)) == [(A, offer(1))]
    assert one.phase is Phase.SEEKING


def test_who_does_not_answer_in_time_is_told_and_the_next_is_asked_and_then_nobody() -> None:
    one = machine()
    ((first, _),) = said(one.made(offer(1), [A, B], 0.0))
    assert one.tick([A, B], TIMEOUT_S - 0.01) == []
    withdrawn, asked = said(one.tick([A, B], TIMEOUT_S))
    assert withdrawn == (first, Withdraw(round=1))
    assert asked == (B if first == A else A, offer(1))
    *_, alone = one.tick([A, B], 2 * TIMEOUT_S)
    assert isinstance(alone, Alone)
    assert len(alone.reasons) == CANDIDATE_LIMIT
    assert all("did not answer in 2.0 s" in reason for reason in alone.reasons)


def test_who_dies_is_not_waited_for() -> None:
    one = machine()
    ((first, _),) = said(one.made(offer(1), [A, B], 0.0))
    other = B if first == A else A
    assert said(one.tick([other], 0.1)) == [(other, offer(1))]


def test_a_vector_that_cannot_be_had_leads_to_the_next_candidate() -> None:
    one = machine()
    one.receive(A, offer(1), 0.0)
    one.made(offer(1), [A, B], 0.0)
    assert one.failed(B, "not the partner", 0.1) == []
    assert said(one.failed(A, "was not what it offered", 0.1)) == [(B, offer(1))]


def test_who_failed_counts_as_asked_though_it_was_not_proposed() -> None:
    one, others = machine(), NAMES[1:10]
    uninvited = next(peer for peer in others if peer not in candidates(SWARM, 1, ME, others))
    one.receive(uninvited, offer(1), 0.0)
    one.made(offer(1), others, 0.0)
    assert len(said(one.failed(uninvited, "was not what it offered", 0.0))) == 1
    assert isinstance(one.tick(others, TIMEOUT_S)[-1], Alone)


def test_who_pauses_lets_nobody_wait() -> None:
    one = machine()
    one.receive(A, offer(1), 0.0)
    assert one.pause() == [Say(A, Decline(round=1, mine=1))]
    assert one.receive(B, offer(2), 0.0) == [Say(B, Decline(round=2, mine=1))]
    one.resume()
    assert one.receive(B, offer(1), 0.0) == []


def test_a_partner_is_owed_the_vector_until_it_says_it_has_it_or_dies() -> None:
    for settle in (lambda one: one.receive(A, Taken(round=1), 0.0), lambda one: one.tick([], 0.0)):
        one = machine()
        one.receive(A, offer(1), 0.0)
        one.made(offer(1), [A], 0.0)
        one.fetched(A)
        one.receive(A, Taken(round=7), 0.0)
        assert one.owed
        settle(one)
        assert not one.owed


def test_no_word_of_a_peer_leads_beyond_what_a_round_can_be() -> None:
    one = machine()
    for peer in (A, B):
        one.receive(peer, Decline(round=1, mine=2**63 - 1), 0.0)
    assert one.next_round < ROUND_LIMIT


def test_what_cannot_be_is_refused() -> None:
    one = machine()
    with pytest.raises(LocalError):
        one.begin(1)
    with pytest.raises(LocalError):
        one.made(offer(2), [A], 0.0)


# --- messages ---

PEER = Identity.from_seed(bytes(32)).peer_id


@pytest.mark.parametrize("field", [{"chunk_values": 2048}, {"numel": 4097}, {"hashes": bytes(64)}, {"hashes": b""}])
def test_an_offer_has_exactly_one_hash_per_chunk(field: dict[str, object]) -> None:
    tables = msgspec.to_builtins(offer(3), builtin_types=(bytes,)) | field
    with pytest.raises(RemoteError):
        decode(canonical(tables), Offer, peer=PEER)


def test_the_root_of_an_offer_covers_every_field() -> None:
    roots = {offer(3).root, offer(4).root, offer(3, mark=1).root, offer(3, ("fp32", 4096, 4096)).root}
    roots |= {offer(3, ("bf16", 4095, 4096)).root, offer(3, ("bf16", 4096, 8192)).root}
    assert len(roots) == 6
