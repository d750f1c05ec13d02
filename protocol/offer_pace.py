"""The pace of a node that makes groups for others alone: what is taken, twice over, and one now and then.

Every announcement costs every node of the swarm a signature to check and a place among its offers, whether anybody
takes the group or not; and a sampler has nothing else to do. So it may make only so many:

    GRANTED_FIRST groups at the beginning
    GRANTED_PER_PULL more for each of its groups that somebody pulls, once, whoever pulls it and however often
    one every PROBE_S, by which it notices that groups are wanted again

of which GRANTED_LIMIT at most are kept for later. Where more than one in GRANTED_PER_PULL of its groups is taken it
makes them faster and faster, up to what its machine can do; where fewer are, it slows down until one in that many is.
What nobody takes is thus as much as what is taken at most, but for the first ones and the probes.

Sans-IO: times are seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import OrderedDict

GRANTED_FIRST = 8.0
"""Two rounds as `shoal init` writes them: what two trainers take in one of theirs."""
GRANTED_PER_PULL = 2.0
GRANTED_LIMIT = 32.0
"""So many groups are made at most that nobody wants any more."""
PROBE_S = 15.0
AWAITED_LIMIT = 4096
"""Groups that are remembered as not pulled yet; of more the oldest would hardly be."""


class OfferPace:
    """How many groups one node may make. `pulled`: how many of those that it made somebody has pulled."""

    def __init__(self, now: float) -> None:
        self.pulled = 0
        self._granted = GRANTED_FIRST
        self._probed_at = now
        self._awaited: OrderedDict[bytes, None] = OrderedDict()

    def made(self, digest: bytes, now: float) -> None:
        """Note that a group was announced. A round of several may take more than was granted, which is made good."""
        self._advance(now)
        self._granted -= 1
        self._awaited[digest] = None
        if len(self._awaited) > AWAITED_LIMIT:
            self._awaited.popitem(last=False)

    def pull(self, digest: bytes, now: float) -> bool:
        """Note that somebody pulled a group. Whether that was the first to pull this one of the node's own."""
        if digest not in self._awaited:
            return False
        del self._awaited[digest]
        self._advance(now)
        self.pulled += 1
        self._grant(GRANTED_PER_PULL)
        return True

    def wait_s(self, now: float) -> float:
        """Return how long to make no group, if nobody pulls one meanwhile; 0 if one may be made."""
        self._advance(now)
        missing = 1 - self._granted
        return max(0.0, missing * PROBE_S - (now - self._probed_at)) if missing > 0 else 0.0

    def _advance(self, now: float) -> None:
        probes = max(0, int((now - self._probed_at) / PROBE_S))
        self._probed_at += probes * PROBE_S
        self._grant(probes)

    def _grant(self, groups: float) -> None:
        self._granted = min(GRANTED_LIMIT, self._granted + groups)
