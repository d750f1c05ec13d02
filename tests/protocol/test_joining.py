"""Many who join at once: the electorate that meets them all in one round, while its rounds go on."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.certificate import genesis
from shoal.protocol.facts import Gathering
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Ready
from shoal.protocol.planning import CONTRIBUTOR, OBSERVER, TRAINING, absent_ready
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_lab import RoundLab

pytestmark = pytest.mark.usefixtures("paper_signatures")

FOUNDERS, JOINERS = 3, 10
ROUND_S = 3.0
"""More than a second of training, one of the reduction, and the messages."""
ALL = set(range(FOUNDERS + JOINERS))


@pytest.mark.parametrize("apart_s", [0.0, 0.1])
def test_ten_joiners_are_weightless_once_and_all_count_in_the_next_round(apart_s: float) -> None:
    """At once, or over a second, which is most of a round's training: some come in one round, some in the next."""
    lab = RoundLab(FOUNDERS + JOINERS, founders=FOUNDERS, seed=11)
    lab.run_until(lab.height_of(range(FOUNDERS), 1), 10)
    began_at, began = lab.now, lab.nodes[0].height
    for joiner in range(FOUNDERS, FOUNDERS + JOINERS):
        lab.after(apart_s * (joiner - FOUNDERS), lambda joiner=joiner: lab.join(joiner))  # type: ignore[misc]
    lab.run_until(lambda: lab.nodes[0].height > began and lab.members(lab.nodes[0].height) == ALL, 3 * ROUND_S)
    arrived = lab.nodes[0].height
    # No round was missed, and none waited for them.
    assert arrived - began >= (lab.now - began_at) // (2 * ROUND_S)
    for height in range(began + 1, arrived + 1):
        newcomers = lab.members(height) - lab.members(height - 1)
        assert not newcomers & lab.contributors(height)  # weightless in the round in which they come
        assert lab.contributors(height) == lab.members(height - 1)
    lab.run_until(lab.height_of_all(arrived + 2), 4 * ROUND_S)
    assert lab.contributors(arrived + 1) == lab.contributors(arrived + 2) == ALL
    assert len({lab.nodes[number].values[arrived + 2].hash for number in ALL}) == 1


@pytest.mark.parametrize("founders", [1, 3])
def test_joiner_contributes_where_all_members_are_paused_and_they_all_vote(founders: int) -> None:
    lab = RoundLab(founders + 1, founders=founders, seed=7)
    everyone, joiner = set(range(founders + 1)), founders
    lab.run_until(lab.height_of(range(founders), 1), 10)
    for founder in range(founders):
        lab.pause(founder)
    lab.run_for(5 * ROUND_S)
    stood = lab.nodes[0].height
    lab.join(joiner)
    lab.run_until(lab.height_of_all(stood + 3), 20 * ROUND_S)
    assert [lab.contributors(height) for height in range(stood + 1, stood + 4)] == [{joiner}] * 3
    assert [lab.members(height) for height in range(stood + 1, stood + 4)] == [everyone] * 3


def test_newcomers_contribution_counts_only_where_no_member_trains() -> None:
    member, newcomer = (identity.peer_id for identity in paper_identities(2))
    state = bytes(32)
    gathering = Gathering(members=[member], returners=(), state=state)
    readies = {newcomer: ready(CONTRIBUTOR, state)}
    counts = {
        role: set(gathering.weighty({**readies, member: ready(role, state)})) & {member, newcomer}
        for role in (TRAINING, CONTRIBUTOR, OBSERVER)
    }
    assert counts == {TRAINING: {member}, CONTRIBUTOR: {member}, OBSERVER: {member, newcomer}}
    assert newcomer in gathering.weighty(readies)


def ready(role: str, state: bytes) -> Ready:
    return msgspec.structs.replace(absent_ready(OBSERVER, genesis(SWARM, [PeerId("a")]), state), role=role)
