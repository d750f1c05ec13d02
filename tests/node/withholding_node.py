"""A node that keeps its finals from one peer, for tests: it is named in WITHHELD_FROM, and gets everything else.

Nobody gets finals of it on request.
"""

from __future__ import annotations

import os

from shoal.cli.main import main
from shoal.collectives.traffic import PlanTraffic
from shoal.node.state.state_server import StateServer
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import FetchAnswer, FetchRequest, GetFinals, Refusal
from shoal.swarm.lanes.frame import FrameKind

honest_post = PlanTraffic.post
honest_answer = StateServer.answer


def post(self: PlanTraffic, scope: bytes, peer: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
    """As if it had been sent."""
    if kind is not FrameKind.FINAL or peer != os.environ["WITHHELD_FROM"]:
        honest_post(self, scope, peer, kind, chunk, payload)


def answer(self: StateServer, request: FetchRequest) -> FetchAnswer:
    """As if it had no finals."""
    return Refusal(reason="not held here") if isinstance(request, GetFinals) else honest_answer(self, request)


if __name__ == "__main__":
    StateServer.answer = answer  # type: ignore[method-assign]
    PlanTraffic.post = post  # type: ignore[method-assign]
    main()
