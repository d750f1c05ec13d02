"""A node that lies about one peer, named in ACCUSED, for tests.

It keeps its contribution from that one, so that no reduction ends by itself, and says all the time that it is the one
who moves nothing. With ACCUSED_LATE in the environment it says so of its finals only.
"""

from __future__ import annotations

import os
import time

from shoal.cli.main import main
from shoal.collectives.traffic import PlanTraffic
from shoal.node.rounds.pace import Stall
from shoal.node.rounds.reducing import ReductionDriver
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FrameKind

PERIOD_S = 0.5
honest_post = PlanTraffic.post
said_at = [float("-inf")]


def post(self: PlanTraffic, scope: bytes, peer: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
    """As if it had been sent."""
    if kind is not FrameKind.CONTRIBUTION or peer != os.environ["ACCUSED"]:
        honest_post(self, scope, peer, kind, chunk, payload)


def stalled(self: ReductionDriver) -> Stall | None:
    """Whatever is the case."""
    now = time.monotonic()
    if self._reduction is None or now - said_at[0] < PERIOD_S:
        return None
    said_at[0] = now
    accused = frozenset({PeerId(os.environ["ACCUSED"])})
    nobody: frozenset[PeerId] = frozenset()
    return Stall(nobody, accused) if "ACCUSED_LATE" in os.environ else Stall(accused, nobody)


if __name__ == "__main__":
    PlanTraffic.post = post  # type: ignore[method-assign]
    ReductionDriver.stalled = stalled  # type: ignore[method-assign]
    main()
