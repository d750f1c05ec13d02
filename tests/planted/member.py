"""Bugs of a member that the simulator sees (`python -m tests.planted --seeds 300 member`).

`MEMBER` are those that no other test is named for. `SEEDS` names, for these and for those of other areas that the
simulator sees too, one seed that does, which is not always the first: with it the check is quick to repeat.
"""

from __future__ import annotations

from tests.planted.bugs import Bug, Edit


def simulated(name: str, *texts: str) -> Bug:
    """A bug that the simulator sees; `texts` as in `bug`."""
    return Bug(name, "", tuple(Edit(was, planted) for was, planted in zip(texts[::2], texts[1::2], strict=True)))


MEMBER: tuple[Bug, ...] = (
    simulated(
        "what the disk binds a member to does not bind its machine",
        "unfinished = machine.restore(here.bound_in(next_position(head)))",
        "unfinished = machine.restore(())",
    ),
    simulated(
        "tokens of work that was counted come again",
        """
        if any(bits):
            left.tokens, left.rounds_excluded = 0, 0
        """,
        """
        if any(bits):
            left.tokens, left.rounds_excluded = made.tokens, 0
        """,
    ),
    simulated(
        "a residual is taken for what was encoded",
        "np.subtract(here, out, out=out)",
        "np.add(here, out, out=out)",
    ),
    simulated(
        "a certificate is said before it is on disk",
        """
        yield Append(certificate)
        yield Broadcast(certificate)
        """,
        """
        yield Broadcast(certificate)
        yield Append(certificate)
        """,
    ),
    simulated(
        "a member votes without a quorum of prepares",
        "prepared = self._certified(self._prepares, view, value)",
        "prepared = self._certified(self._prepares, view, value) or Prepared(view, (), ())",
    ),
)

SEEDS: dict[str, int] = {
    "a Prepare counts as a vote": 8,
    "a certificate is said before it is on disk": 8,
    "a member votes without a quorum of prepares": 8,
    "a prepare is sent before it is written": 8,
    "a promise is sent before it is written": 34,
    "a proposal is sent before it is written": 8,
    "a residual is taken for what was encoded": 8,
    "a vote for what was not prepared here": 8,
    "a vote is sent before it is written": 8,
    "the contribution is not settled before the state is applied": 8,
    "the engine sends before it persists": 8,
    "the ready mark not written before Ready": 8,
    "tokens of work that was counted come again": 8,
    "what the disk binds a member to does not bind its machine": 15,
}
"""By the name of a bug, a seed of the simulator that sees it."""
