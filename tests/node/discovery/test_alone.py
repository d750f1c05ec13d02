"""The line of a node that is linked with nobody: whom it looks for, what it tried, what helps."""

from __future__ import annotations

from functools import partial

import pytest

from shoal.node.discovery.alone import REASON_LIMIT_CHARS, Alone
from shoal.protocol.names import NAME_LIMIT_CHARS
from tests.swarm.test_members import identity

PEERS = [identity(n).peer_id for n in range(5)]
HELP = "Start one, open its port (`shoal doctor` tells), or give an address that works: --join, or a fresh `shoal link`"
TOLD_LIMIT_CHARS = 400
"""Of a line in a terminal, with the time of day before it."""
alone = partial(Alone, given=0, cut_off=False)


@pytest.mark.parametrize(
    ("wanted", "tried", "in_book", "locally", "publicly", "said"),
    [
        (1, {}, 0, False, False, "{0}. No address is given. "),
        (1, {}, 1, False, False, "{0}. No address is given; the one known before does not answer. "),
        (1, {}, 0, True, False, "{0}. No address is given; searched: local network. "),
        (2, {"a": "nobody listens at h:1"}, 1, False, False, "{0}, {1}. Tried: nobody listens at h:1; the one known "),
        (
            5,
            {"a": "x", "b": "y", "c": "z"},
            3,
            True,
            True,
            "{0}, {1} and 3 more. Tried: x and 2 more; none of the 3 known before answers; "
            "searched: local network, public meeting points. ",
        ),
    ],
)
def test_line_names_whom_what_and_what_helps(
    wanted: int, tried: dict[str, str], in_book: int, locally: bool, publicly: bool, said: str
) -> None:
    peers = sorted(PEERS[:wanted])
    line = alone(seconds=7.4, wanted=peers, tried=tried, in_book=in_book, locally=locally, publicly=publicly).line
    assert line.startswith("linked with nobody for 7 s; looked for: " + said.format(*peers))
    assert line.endswith(HELP)
    assert "\n" not in line


def test_line_is_never_long() -> None:
    tried = {str(number): "r" * 500 for number in range(999)}
    line = alone(seconds=86_400, wanted=PEERS, tried=tried, in_book=4096, locally=True, publicly=True).line
    for peer in PEERS:
        line = line.replace(peer, "n" * NAME_LIMIT_CHARS)
    assert len(f"12:00:00 warning {line}") < TOLD_LIMIT_CHARS


def test_long_reason_is_cut() -> None:
    line = alone(seconds=7, wanted=PEERS[:1], tried={"a": "r" * 500}, in_book=0, locally=False, publicly=False).line
    assert "r" * (REASON_LIMIT_CHARS - 1) + "…" in line
    assert "r" * REASON_LIMIT_CHARS not in line


def test_machine_without_a_network_blames_nobody() -> None:
    line = Alone(
        seconds=7, wanted=PEERS, tried={"a": "b"}, given=1, in_book=3, locally=True, publicly=True, cut_off=True
    ).line
    assert line == (
        "linked with nobody for 7 s: this machine has no network; once it has one, this node links again by itself"
    )


@pytest.mark.parametrize(("given", "said"), [(1, "the address given"), (2, "the 2 addresses given")])
def test_addresses_that_worked_before_or_are_being_tried_are_not_said_to_lack(given: int, said: str) -> None:
    """The one of a link worked, and its peer is gone since: it is in the book."""
    line = alone(seconds=36, wanted=PEERS[:1], tried={}, given=given, in_book=2, locally=False, publicly=False).line
    assert f". Tried: {said}; none of the 2 known before answers. " in line
