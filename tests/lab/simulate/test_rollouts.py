"""Simulated agents share rollouts over gossip that loses, among peers that die, hang and lie about what they have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from shoal.lab.simulate import agents as agents_module
from shoal.lab.simulate.agents import Agent
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.rollouts import RolloutSwarm
from shoal.lab.simulate.scenario import Fault, Lie, Scenario
from shoal.lab.simulate.shrink import as_test
from shoal.lab.simulate.simulation import run_scenario
from shoal.protocol.group_pull import GroupPull, LeftAlone
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer, OfferBook
from shoal.protocol.offer_catch_up import OfferCatchUp


def sharing(*faults: Fault, peers: int = 4, loss: float = 0.0) -> Scenario:
    return Scenario(peers=peers, rounds=3, seed=1, loss=loss, fault=faults, rollouts=True)


def lying(lie: Lie) -> Scenario:
    return sharing(Fault(kind="lie", lie=lie, peer=1, at_s=0.0, duration_s=20.0))


def run(scenario: Scenario) -> RolloutSwarm:
    """A run in which nothing is violated."""
    swarm = RolloutSwarm(scenario)
    outcome = swarm.run()
    assert (outcome.violation, outcome.detail, outcome.rounds_certified) == ("", "", 3)
    return swarm


def test_agents_train_on_what_they_pull_and_pull_nothing_else() -> None:
    swarm = run(sharing())
    for agent in swarm.agents:
        assert agent.tally.fetched_bytes == agent.intake.budget.trained_bytes > 0
        assert agent.tally.wasted_bytes == 0
    rounds = sum(agent.rounds_done for agent in swarm.agents)
    assert 2 * rounds - 12 <= swarm.judge.trained_groups <= 2 * rounds  # there was little to choose in the first round
    assert not swarm.refusals


def test_announcements_that_gossip_loses_are_heard_all_the_same() -> None:
    swarm = run(sharing(loss=0.5))
    made = {agent.number: len(agent.catch_up) for agent in swarm.agents}
    heard = swarm.judge._heard[0, 1]
    assert len([row for row in heard if row[0] == 1]) >= made[1] - 4 >= 10


@pytest.mark.parametrize(("lie", "harm"), [("group", True), ("hint", True), ("held", False), ("flood", False)])
def test_liars_spoil_little_and_what_others_train_on_is_right(lie: Lie, harm: bool) -> None:
    swarm = run(lying(lie))
    honest = [agent for agent in swarm.agents if agent.number != 1]
    spoilt = sum(agent.tally.fetched_bytes - agent.intake.budget.trained_bytes for agent in honest)
    assert (spoilt > 0) is harm
    assert sum(agent.intake.budget.trained_bytes for agent in honest) > 5 * spoilt
    if lie == "flood":
        assert swarm.refusals["quota"] > 0


def test_group_of_an_origin_that_is_gone_comes_from_who_pulled_it() -> None:
    swarm = run(sharing(Fault(kind="leave", peer=2, at_s=14.0), peers=5))
    gone, later = swarm.agents[2].id, [agent for agent in swarm.agents if agent.running]
    assert all(offer.origin != gone or offer.digest for agent in later for offer in agent.book.offers())
    assert swarm.judge.trained_groups > 40


# -- seeded bugs: each promise can be seen broken ----------------------------------------------------------------


class NeverAsks(OfferCatchUp):
    """Takes what gossip brings."""

    def begin_turn(self, reachable: Collection[PeerId]) -> list[PeerId]:
        return []


class Trusting(GroupPull):
    """Takes any bytes of the right size for the group."""

    def _take(self, data: bytes, peer: PeerId) -> None:
        self._data += data
        if len(self._data) == self.size_bytes:
            self._end = agents_module.Came(bytes(self._data))
            self._release()


class PullsToCompare(GroupPull):
    """Throws the first copy of a group away and pulls another."""

    compared = False

    def _take(self, data: bytes, peer: PeerId) -> None:
        super()._take(data, peer)
        if self._end is not None and not self.compared:
            self.compared, self._end, self._again = True, None, True


class Hoards(OfferBook):
    """Lets nobody's offers go."""

    def _crowd_out(self, origin: Any) -> None:
        return


def test_seeded_loss_of_announcements_is_found() -> None:
    assert run_scenario(sharing(loss=0.3), Components(catch_up=NeverAsks)).violation == "no lost announcement"
    assert run_scenario(sharing(), Components(catch_up=NeverAsks)).violation == ""


def test_seeded_trust_in_any_bytes_is_found() -> None:
    assert run_scenario(lying("group"), Components(pull=Trusting)).violation == "the reference"


def test_seeded_bytes_for_nothing_are_found() -> None:
    assert run_scenario(sharing(), Components(pull=PullsToCompare)).violation == "bytes"


def test_seeded_offers_without_bound_are_found() -> None:
    flood = sharing(*(Fault(kind="lie", lie="flood", peer=peer, at_s=0.0, duration_s=40.0) for peer in (1, 2)))
    assert run_scenario(flood).violation == ""
    outcome = run_scenario(flood, Components(offer_book=Hoards))
    assert outcome.violation == "bounded queues"
    assert "offers" in outcome.detail


def test_seeded_pull_of_a_group_that_is_here_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Agent._gather

    def forgetful(agent: Agent) -> None:
        agent.held.clear()
        agent.intake._used.clear()
        agent.judge._seen._owners.clear()
        plain(agent)

    monkeypatch.setattr(Agent, "_gather", forgetful)
    assert run_scenario(sharing()).violation in ("one pull", "bytes")


def test_seeded_patience_with_a_server_that_failed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeftAlone, "pass_over", lambda servers, peer, now: None)
    assert run_scenario(lying("group")).violation == "left alone"


def test_seeded_pull_beyond_its_deadline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fetched = Agent._step, Agent._fetched

    def patient(agent: Agent, fetch: Any) -> None:
        if agent.rounds_done != 2:
            fetched(agent, fetch)

    def stuck(agent: Agent, fetch: Any, offer: Offer, pull: GroupPull) -> None:
        if agent.number or agent.rounds_done < 2:
            plain(agent, fetch, offer, pull)

    monkeypatch.setattr(Agent, "_step", stuck)
    monkeypatch.setattr(
        Agent, "_fetched", lambda agent, fetch: None if agent.rounds_done == 2 else _fetched(agent, fetch)
    )
    assert run_scenario(sharing()).violation == "no wait too long"


_fetched = Agent._fetched


def test_failing_scenario_is_printed_with_what_is_shared() -> None:
    assert "rollouts=True" in as_test(sharing(), "one pull")
