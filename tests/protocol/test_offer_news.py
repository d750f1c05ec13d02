"""News of neighbours by value: everything once, in order, from where the last answer ended."""

from __future__ import annotations

import pytest

from shoal.protocol.identity import PeerId
from shoal.protocol.offer_news import NEWS_LOG_LIMIT, PARTNERS, TURNS_OF_PARTNERS, OfferNews
from shoal.protocol.rollouts import (
    BATCH_LIMIT_BYTES,
    BATCH_LIMIT_ITEMS,
    SEALED_LIMIT_BYTES,
    News,
    NewsRequest,
    decode_message,
)
from shoal.protocol.wire import canonical

A, B, C = (PeerId(name) for name in ("a", "b", "c"))


def item(number: int) -> bytes:
    return number.to_bytes(4, "big")


def log_of(count: int, *, boot: int = 7) -> OfferNews:
    news = OfferNews(boot=boot)
    for number in range(1, count + 1):
        news.note(item(number))
    return news


def numbers(announcements: tuple[bytes, ...]) -> list[int]:
    return [int.from_bytes(one, "big") for one in announcements]


@pytest.mark.parametrize(
    ("request_", "first", "count"),
    [
        (NewsRequest(boot=7, after=0), 1, BATCH_LIMIT_ITEMS),
        (NewsRequest(boot=7, after=150), 151, 50),
        (NewsRequest(boot=7, after=200), 201, 0),
        (NewsRequest(boot=7, after=900), 201, 0),  # more than there are
        (NewsRequest(boot=6, after=150), 201 - BATCH_LIMIT_ITEMS, BATCH_LIMIT_ITEMS),  # of an earlier life: the last
        (NewsRequest(), 201 - BATCH_LIMIT_ITEMS, BATCH_LIMIT_ITEMS),
    ],
)
def test_answer_is_what_came_after(request_: NewsRequest, first: int, count: int) -> None:
    news = log_of(200).answer(request_)
    assert numbers(news.announcements) == list(range(first, first + count))
    assert (news.boot, news.last) == (7, first + count - 1)


def test_who_asks_again_and_again_has_everything_once_though_it_begins_late() -> None:
    theirs, mine = log_of(NEWS_LOG_LIMIT + 100), OfferNews(boot=1)
    assert mine.turn([A]) == A
    mine.came(A, theirs.answer(NewsRequest(boot=7, after=0)))  # the first hundred are gone
    had = BATCH_LIMIT_ITEMS
    assert mine.request(A) == NewsRequest(boot=7, after=100 + had)
    while True:
        news = theirs.answer(mine.request(A))
        assert numbers(news.announcements)[:1] in ([], [100 + had + 1])
        had += len(news.announcements)
        if not mine.came(A, news):
            break
    assert had == NEWS_LOG_LIMIT
    theirs.note(item(5))
    assert numbers(theirs.answer(mine.request(A)).announcements) == [5]


def test_neighbours_take_turns_and_who_is_none_any_more_is_forgotten() -> None:
    news = OfferNews(boot=1)
    assert news.turn([]) is None
    assert [news.turn([B, A]) for _ in range(3)] == [A, B, A]
    news.came(A, log_of(3).answer(NewsRequest()))
    assert [news.turn([A, B, C]) for _ in range(4)] == [C, B, A, C]
    assert news.request(C) == NewsRequest(), "the last ones, of who was never asked"
    assert news.request(A) == NewsRequest(boot=7, after=3)
    news.turn([B])
    assert news.request(A) == NewsRequest()


def test_partners_are_few_and_one_after_the_other_makes_room() -> None:
    news, neighbours = OfferNews(boot=1), [PeerId(name) for name in "abcdefg"]
    asked = [news.turn(neighbours) for _ in range(TURNS_OF_PARTNERS - 1)]
    assert set(asked) == {PeerId(name) for name in "abc"}
    assert all(asked.count(peer) == (TURNS_OF_PARTNERS - 1) // PARTNERS for peer in set(asked))
    news.came(A, log_of(3).answer(NewsRequest()))
    longest_ago = asked[-PARTNERS]
    assert longest_ago is not None
    after = [news.turn(neighbours) for _ in range(TURNS_OF_PARTNERS)]
    assert set(after[:-1]) == {PeerId(name) for name in "abcd"} - {longest_ago}
    assert news.request(longest_ago) == NewsRequest(), "where it was is forgotten"
    ever = {news.turn(neighbours) for _ in range(TURNS_OF_PARTNERS * len(neighbours))}
    assert ever == set(neighbours), "nobody is left out for good"


def test_largest_answer_fits_what_is_received() -> None:
    news = OfferNews(boot=1)
    for _ in range(BATCH_LIMIT_ITEMS):
        news.note(bytes(SEALED_LIMIT_BYTES))
    answer = news.answer(NewsRequest(boot=1))
    data = canonical(answer)
    assert len(data) <= BATCH_LIMIT_BYTES
    assert decode_message(data, News) == answer
    assert answer.announcements
