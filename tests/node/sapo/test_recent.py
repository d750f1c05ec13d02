"""The newest groups, for people to read: bounded, and with the questions that the agent told."""

from __future__ import annotations

from shoal.node.sapo.recent import RECENT_LIMIT, RecentGroup, RecentGroups
from tests.node.sapo.offering import announced, group_of, peer_id


def test_question_stands_beside_its_group_alone_and_the_oldest_make_room() -> None:
    recent, digests = RecentGroups(), []
    for index in range(RECENT_LIMIT + 1):
        announcement, data = announced(group_of(peer_id(1), index))
        recent.add(RecentGroup(announcement=announcement, origin=peer_id(1), group=data))
        digests.append(announcement.digest)
    recent.ask(digests[2], "How many?")
    recent.ask(digests[0], "Gone?")
    found = {group.digest: group.question for group in recent}
    assert list(found) == digests[1:]
    assert found == dict.fromkeys(digests[1:], "") | {digests[2]: "How many?"}
