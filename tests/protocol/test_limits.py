"""Token buckets, of one thing and of each key."""

from __future__ import annotations

from shoal.protocol.limits import Rates, TokenBucket, take_of_all


def test_token_bucket_values() -> None:
    bucket = TokenBucket(2.0, 3.0, 10.0)
    assert [bucket.take(1, 10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(1, 10.4)
    assert bucket.take(1, 10.5)
    assert not bucket.take(4, 100.0)
    assert bucket.take(3, 100.0)


def test_token_bucket_overdrawn_gives_nothing_until_that_is_paid() -> None:
    bucket = TokenBucket(2.0, 3.0)
    assert bucket.owe(3, 10.0) == 0.0
    assert bucket.owe(5, 10.0) == 2.5
    assert not bucket.has(0, 12.4)
    assert bucket.has(0, 12.5)
    assert bucket.owe(1, 100.0) == 0.0
    assert [bucket.take(1, 100.0) for _ in range(3)] == [True, True, False]


def test_rates_remember_few() -> None:
    rates: Rates[int] = Rates(1, 2, limit=10)
    for key in range(1000):
        assert rates.take(key, 0.0)
    assert len(rates) == 10
    assert rates.take(999, 0.0)
    assert not rates.take(999, 0.0)


def test_rates_forget_what_was_asked_for_least_lately() -> None:
    rates: Rates[str] = Rates(0, 1, limit=2)
    assert [rates.take(key, 0.0) for key in ("a", "b", "a", "c")] == [True, True, False, True]
    assert not rates.take("a", 0.0), "asked again, and remembered"
    assert rates.take("b", 0.0)


def test_what_takes_of_several_buckets_takes_of_all_or_of_none() -> None:
    wide, narrow = TokenBucket(1, 10), TokenBucket(1, 2)
    assert not take_of_all((wide, narrow), 3, 0.0)
    assert wide.has(10, 0.0)
    assert take_of_all((wide, narrow), 2, 0.0)
    assert [wide.has(8, 0.0), wide.has(9, 0.0), narrow.has(1, 0.0)] == [True, False, False]
    assert take_of_all((wide, narrow), 1, 1.0)
