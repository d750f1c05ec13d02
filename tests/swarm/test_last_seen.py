"""Who was heard of, and when: nobody is taken for gone for good too early."""

from __future__ import annotations

import pytest

from shoal.protocol.identity import Identity
from shoal.swarm import last_seen
from shoal.swarm.last_seen import LONG_SILENCE_S, LastSeen

A, B, C = (Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 4))
BEGAN = 1000.0


def nobody() -> tuple[()]:
    return ()


def test_nobody_is_long_silent_before_an_hour_without_a_word_has_passed() -> None:
    heard = LastSeen(BEGAN)
    heard.note(A, BEGAN + 100, keep=nobody)
    assert heard.long_silent([A, B], BEGAN + LONG_SILENCE_S - 1) == []
    assert heard.long_silent([A, B], BEGAN + LONG_SILENCE_S) == [B], "never heard since this node listens"
    assert heard.long_silent([A, B], BEGAN + LONG_SILENCE_S + 99) == [B]
    assert heard.long_silent([A, B], BEGAN + LONG_SILENCE_S + 100) == [A, B]


def test_what_a_peer_signed_counts_once_however_often_others_repeat_it() -> None:
    heard = LastSeen(BEGAN)
    heard.note_signed(A, (1, 5), BEGAN + 10, keep=nobody)
    for again in range(20, 4000, 20):
        heard.note_signed(A, (1, 5), BEGAN + again, keep=nobody)
        heard.note_signed(A, (0, 9), BEGAN + again, keep=nobody)
    assert heard.long_silent([A], BEGAN + 10 + LONG_SILENCE_S) == [A]
    heard.note_signed(A, (1, 6), BEGAN + 10 + LONG_SILENCE_S, keep=nobody)
    assert heard.long_silent([A], BEGAN + 11 + LONG_SILENCE_S) == []


def test_strangers_push_out_nobody_that_is_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_seen, "PEERS_LIMIT", 2)
    heard = LastSeen(BEGAN)
    heard.note(A, BEGAN + 100, keep=lambda: {A})
    heard.note(B, BEGAN + 200, keep=lambda: {A})
    heard.note(C, BEGAN + 300, keep=lambda: {A})
    assert heard.long_silent([A, B, C], BEGAN + LONG_SILENCE_S + 50) == [B], "of B alone nothing is remembered"
