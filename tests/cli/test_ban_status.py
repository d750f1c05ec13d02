"""Who is banned, in a node's status."""

from __future__ import annotations

import msgspec

from shoal.cli.render import ban_lines, status_lines
from shoal.node.control_client import BanStatus
from shoal.node.status import _bans
from shoal.protocol.bans import FOR_EVER, Sentence
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term, domain_hash
from tests.cli.test_status import STATUS

EVIDENCE = domain_hash("evidence")


def test_status_names_the_banned_by_whom_on_what_and_until_when() -> None:
    for_ever = Sentence((Term(1, 0), 7), EVIDENCE, FOR_EVER)
    for_a_while = Sentence((Term(), 3), EVIDENCE, 13)
    assert _bans({PeerId("b"): for_ever, PeerId("a"): for_a_while}) == [
        BanStatus(peer_id="a", term="0.0", round=3, until=13, evidence=EVIDENCE.hex()),
        BanStatus(peer_id="b", term="1.0", round=7, until=None, evidence=EVIDENCE.hex()),
    ]


def test_bans_are_shown_to_people_and_nothing_where_there_are_none() -> None:
    assert ban_lines(STATUS) == []
    bans = _bans(
        {PeerId("b"): Sentence((Term(), 7), EVIDENCE, FOR_EVER), PeerId("a"): Sentence((Term(), 3), EVIDENCE, 13)}
    )
    lines = ["banned     a by round 3, until round 13", "banned     b by round 7, for ever"]
    status = msgspec.structs.replace(STATUS, bans=bans)
    assert ban_lines(status) == lines
    assert [line for line in status_lines(status) if line.startswith("banned")] == lines
