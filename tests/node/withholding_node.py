"""A node that keeps its finals from one peer, for tests: it is named in WITHHELD_FROM, and gets everything else."""

from __future__ import annotations

import os

from shoal.cli.main import main
from shoal.collectives.traffic import PlanTraffic
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FrameKind

honest_post = PlanTraffic.post


def post(self: PlanTraffic, scope: bytes, peer: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
    """As if it had been sent."""
    if kind is not FrameKind.FINAL or peer != os.environ["WITHHELD_FROM"]:
        honest_post(self, scope, peer, kind, chunk, payload)


if __name__ == "__main__":
    PlanTraffic.post = post  # type: ignore[method-assign]
    main()
