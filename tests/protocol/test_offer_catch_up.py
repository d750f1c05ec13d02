"""Asking for announcements that gossip lost: who is asked, how often, and what an origin answers."""

from __future__ import annotations

from shoal.protocol.identity import PeerId
from shoal.protocol.offer_catch_up import (
    ASK_PERIOD_BESIDE_NEWS_S,
    ASK_PERIOD_LIMIT_S,
    ASK_PERIOD_S,
    ASKED_PER_PERIOD,
    HISTORY_DELAY_S,
    HISTORY_LIMIT,
    OfferCatchUp,
)
from shoal.protocol.rollouts import BATCH_LIMIT_ITEMS, AnnouncementBatch, CatchUpRequest

PEERS = [PeerId(name) for name in "abcdefghi"]


class Lab(OfferCatchUp):
    """`gaps`: peers whose numbers have gaps here."""

    def __init__(self) -> None:
        self.gaps: set[PeerId] = set()
        super().__init__(boot=7, missing=self.lacks)

    def lacks(self, peer: PeerId) -> CatchUpRequest:
        return CatchUpRequest(boot=1, newest=9, missing=(3,) if peer in self.gaps else ())

    def turn(self, peers: list[PeerId], news: int = 0) -> list[PeerId]:
        asked = self.begin_turn(peers)
        for peer in asked:
            assert not self.came(AnnouncementBatch(announcements=(b"x",)), news), peer
        self.end_turn()
        return asked


def test_everybody_is_asked_in_turn() -> None:
    lab = Lab()
    turns = [lab.turn(PEERS) for _ in range(9)]
    assert all(len(turn) == ASKED_PER_PERIOD for turn in turns)
    assert {peer for turn in turns[:3] for peer in turn} == set(PEERS)
    counts = [sum(peer in turn for turn in turns) for peer in PEERS]
    assert counts == [4] * len(PEERS)


def test_peers_with_gaps_go_first_and_leave_a_place_to_others() -> None:
    lab = Lab()
    lab.turn(PEERS)
    lab.gaps = set(PEERS[:6])
    turns = [lab.turn(PEERS) for _ in range(8)]
    assert all(len(lab.gaps & set(turn)) >= ASKED_PER_PERIOD - 1 for turn in turns)
    assert {peer for turn in turns for peer in turn} == set(PEERS)


def test_quiet_node_asks_less_often() -> None:
    lab = Lab()
    periods = []
    for _ in range(3):
        lab.turn(PEERS)
        periods.append(lab.period_s)
    assert periods == [2 * ASK_PERIOD_S, ASK_PERIOD_LIMIT_S, ASK_PERIOD_LIMIT_S]
    lab.turn(PEERS, news=1)
    assert lab.period_s == ASK_PERIOD_S
    lab.turn(PEERS)
    lab.gaps = {PEERS[0]}
    lab.turn(PEERS)
    assert lab.period_s == ASK_PERIOD_S


def test_who_hears_news_of_neighbours_asks_seldom() -> None:
    quiet = OfferCatchUp(boot=1, missing=lambda peer: CatchUpRequest(), beside_news=True)
    for _ in range(8):
        quiet.begin_turn(PEERS)
        quiet.end_turn()
    assert quiet.period_s == ASK_PERIOD_BESIDE_NEWS_S


def test_peer_that_is_not_reachable_is_not_asked() -> None:
    lab = Lab()
    lab.turn(PEERS[:4])
    assert lab.begin_turn(PEERS[2:3]) == PEERS[2:3]
    assert lab.begin_turn([]) == []


def test_origin_answers_what_is_lacked_once_gossip_had_its_time() -> None:
    lab = Lab()
    for sequence in range(1, 101):
        lab.note(sequence, bytes([sequence]), sequence // 10, now=float(sequence))
    late = 100 + HISTORY_DELAY_S
    assert lab.answer(CatchUpRequest(boot=7, newest=90, missing=(3, 5)), late).announcements == (
        bytes([3]), bytes([5]), *(bytes([n]) for n in range(91, 101))
    )  # fmt: skip
    assert lab.answer(CatchUpRequest(boot=7, newest=98), 99 + HISTORY_DELAY_S).announcements == (bytes([99]),)
    first = lab.answer(CatchUpRequest(boot=6, newest=90), late).announcements  # of an earlier life
    assert first == tuple(bytes([n]) for n in range(1, BATCH_LIMIT_ITEMS + 1))
    lab.expire(10)
    assert lab.answer(CatchUpRequest(), late).announcements == (bytes([100]),)


def test_history_is_bounded_and_full_answers_have_more_behind_them() -> None:
    lab = Lab()
    for sequence in range(HISTORY_LIMIT + 5):
        lab.note(sequence, b"x", 0, now=0.0)
    assert len(lab) == HISTORY_LIMIT
    assert lab.came(AnnouncementBatch(announcements=(b"x",) * BATCH_LIMIT_ITEMS), 0)
