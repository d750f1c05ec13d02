"""Token buckets: limits on the rate in the long run, and on the amount at once; for one thing, or for each key."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

KEY_LIMIT = 4096
"""Keys that are remembered where nothing else is said; beyond it the one unused longest begins anew."""

Key = TypeVar("Key", bound=Hashable)


class TokenBucket:
    """Rate limit: `burst` at once, `per_second` in the long run; times in seconds, never going back. Full at first."""

    __slots__ = ("_at", "_burst", "_level", "_per_second")

    def __init__(self, per_second: float, burst: float, now: float = -math.inf) -> None:
        self._per_second, self._burst = per_second, burst
        self._level, self._at = burst, now

    def has(self, amount: float, now: float) -> bool:
        """Return whether there is room for `amount`."""
        self._level = min(self._burst, self._level + (now - self._at) * self._per_second)
        self._at = now
        return amount <= self._level

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` if there is room for it; return whether there was."""
        if not self.has(amount, now):
            return False
        self._level -= amount
        return True

    def owe(self, amount: float, now: float) -> float:
        """Take `amount`, whatever there is room for; return the seconds until that is paid, 0 if it was there."""
        self.has(amount, now)
        self._level -= amount
        return max(0.0, -self._level / self._per_second)


class Rates(Generic[Key]):
    """A token bucket per key, for as many keys as there is room; those unused longest make room."""

    def __init__(self, per_s: float, burst: float, *, limit: int = KEY_LIMIT) -> None:
        self._per_s, self._burst, self._limit = per_s, burst, limit
        self._buckets: OrderedDict[Key, TokenBucket] = OrderedDict()

    def take(self, key: Key, now: float, amount: float = 1.0) -> bool:
        """Take `amount` from the bucket of `key`; False, and nothing is taken, where there is too little in it."""
        return self.of(key, now).take(amount, now)

    def owe(self, key: Key, now: float, amount: float = 1.0) -> float:
        """Take `amount` of `key`, whatever there is room for; return the seconds until that is paid."""
        return self.of(key, now).owe(amount, now)

    def of(self, key: Key, now: float) -> TokenBucket:
        """The bucket of `key`, which is the one used last from now on."""
        bucket = self._buckets.pop(key, None) or TokenBucket(self._per_s, self._burst, now)
        if len(self._buckets) >= self._limit:
            self._buckets.popitem(last=False)
        self._buckets[key] = bucket
        return bucket

    def is_spent(self, key: Key, now: float) -> bool:
        """True if there is no room for one more of `key`; nothing is taken."""
        bucket = self._buckets.get(key)
        return bucket is not None and not bucket.has(1.0, now)

    def forget(self, key: Key) -> None:
        """Begin anew with `key`."""
        self._buckets.pop(key, None)

    def __len__(self) -> int:
        return len(self._buckets)


def take_of_all(buckets: Iterable[TokenBucket], amount: float, now: float) -> bool:
    """Take `amount` of each bucket if there is room in all of them; of none otherwise. Returns whether there was."""
    buckets = tuple(buckets)
    return all(bucket.has(amount, now) for bucket in buckets) and all(b.take(amount, now) for b in buckets)
