"""The line of a node that is linked with nobody: whom it looks for, what it tried, what helps."""

from __future__ import annotations

import pytest

from shoal.node.discovery.alone import REASON_LIMIT_CHARS, Alone
from tests.swarm.test_members import identity

PEERS = [identity(n).peer_id for n in range(5)]
HELP = (
    "Start one of them, or see that its port is open (`shoal doctor` there), or give this node the address of one that "
    "runs, with --join or a fresh `shoal link`"
)


@pytest.mark.parametrize(
    ("wanted", "tried", "in_book", "locally", "publicly", "said"),
    [
        (1, {}, 0, False, False, "{0}. No address is given. "),
        (1, {}, 1, False, False, "{0}. No address is given; the one known before does not answer. "),
        (1, {}, 0, True, False, "{0}. No address is given and the local network is searched. "),
        (2, {"a": "nobody listens at h:1"}, 1, False, False, "{0}, {1}. Tried: nobody listens at h:1; the one known "),
        (
            5,
            {"a": "x", "b": "y", "c": "z"},
            3,
            True,
            True,
            "{0}, {1} and 3 more. Tried: x, y and 1 more; of the 3 in the address book none answers and "
            "the local network and the public meeting points are searched. ",
        ),
    ],
)
def test_line_names_whom_what_and_what_helps(
    wanted: int, tried: dict[str, str], in_book: int, locally: bool, publicly: bool, said: str
) -> None:
    peers = sorted(PEERS[:wanted])
    line = Alone(seconds=7.4, wanted=peers, tried=tried, in_book=in_book, locally=locally, publicly=publicly).line
    assert line.startswith("linked with nobody for 7 s; looked for: " + said.format(*peers))
    assert line.endswith(HELP)
    assert "\n" not in line


def test_long_reason_is_cut() -> None:
    line = Alone(seconds=7, wanted=PEERS[:1], tried={"a": "r" * 500}, in_book=0, locally=False, publicly=False).line
    assert "r" * (REASON_LIMIT_CHARS - 1) + "…" in line
    assert "r" * REASON_LIMIT_CHARS not in line
