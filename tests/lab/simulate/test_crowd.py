"""Followers beside simulated members: all have each state, nobody gives to too many, and who lies is done without."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.collectives.finals import Finals
from shoal.lab.simulate import crowd as crowd_module
from shoal.lab.simulate.crowd import Crowd
from shoal.lab.simulate.outcome import Outcome
from shoal.lab.simulate.scenario import Churn, Scenario
from shoal.protocol.followers import FOLLOWERS_LIMIT
from shoal.protocol.peering import ChainPart

MEMBERS, PEERS = 2, 66


def scenario(rounds: int = 3, **options: Any) -> Scenario:
    return Scenario(peers=PEERS, seats=MEMBERS, rounds=rounds, **options)


def assert_followed(outcome: Outcome, rounds: int) -> None:
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified == rounds
    assert 0 < outcome.control_bytes_per_peer_per_s < 20_000, "of a member, without what its followers send"
    assert 0 < outcome.most_served <= FOLLOWERS_LIMIT


def test_every_follower_has_every_state_and_takes_part_in_nothing() -> None:
    crowd = Crowd(scenario())
    outcome = crowd.run()
    assert_followed(outcome, 3)
    assert (outcome.peers, outcome.followers) == (PEERS, PEERS - MEMBERS)
    assert all(one.round >= 3 for one in crowd.followers.values())
    members = {peer.id for peer in crowd.peers}
    assert {peer for one in crowd.peers[0].disk.chain for peer in one.members} <= members
    reached = {number for peer in crowd.peers for number in crowd.links_of(peer.number)}
    assert len(reached) <= MEMBERS * FOLLOWERS_LIMIT < outcome.followers, "most have it through others"


def test_followers_die_and_newcomers_without_a_state_come_to_it() -> None:
    crowd = Crowd(scenario(4, churn=Churn(share_per_round=0.2)))
    outcome = crowd.run()
    assert_followed(outcome, 4)
    assert outcome.followers_died > 5
    came = [one for number, one in crowd.followers.items() if number >= PEERS]
    assert came
    assert all(one.round >= 4 for one in came)


def test_who_serves_other_entries_or_other_finals_costs_nobody_a_round() -> None:
    class Lied(Crowd):
        def lies(self, number: int) -> bool:
            return number >= MEMBERS and number % 4 == 0

        def part(self, number: int, after: int, rebases: int) -> ChainPart:
            part = super().part(number, after, rebases)
            return ChainPart(certificates=part.certificates[1:], head=part.head + 1) if self.lies(number) else part

        def finals_of(self, number: int, plan: bytes) -> Finals | None:
            finals = super().finals_of(number, plan)
            if finals is None or not self.lies(number):
                return finals
            mine = self.peers[0].disk.finals
            return next((other for hash, other in mine.items() if hash != plan), None)

    crowd = Lied(scenario(4))
    assert_followed(crowd.run(), 4)
    assert all(one.round >= 4 for one in crowd.followers.values())


@pytest.mark.parametrize("bug", ["links", "waits"])
def test_giving_to_too_many_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "links":
        monkeypatch.setattr(crowd_module, "has_room", lambda followers, newcomer: True)
    else:
        monkeypatch.setattr("shoal.protocol.followers.has_room", lambda followers, newcomer: True)
        monkeypatch.setattr(crowd_module, "has_room", lambda followers, newcomer: len(followers) < FOLLOWERS_LIMIT)
        monkeypatch.setattr(crowd_module, "FOLLOWERS_LIMIT", 4)
        monkeypatch.setattr(Crowd, "_note_served", lambda crowd, links: None)
    assert Crowd(scenario()).run().violation == "bounded followers"
