"""Simulated gossip: the same trace for a seed, weights that come together, and nobody who waits for who is gone."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.collectives.gossip import GossipSettings
from shoal.lab.simulate import gossip as gossip_module
from shoal.lab.simulate.gossip import VALUES, GossipSwarm, Proposals
from shoal.lab.simulate.outcome import Workload
from shoal.lab.simulate.scenario import Scenario
from shoal.protocol.identity import PeerId
from shoal.protocol.pairing import candidates

WORK = Workload(model_bytes=1e6, train_s=(4.0, 8.0))
SWARM = bytes(range(32))


def swarm_of(peers: int = 32, rounds: int = 6, churn: float = 0.0, **changes: float) -> GossipSwarm:
    swarm = GossipSwarm(Scenario(peers=peers, rounds=rounds, seed=2, **changes), WORK)  # type: ignore[arg-type]
    swarm.churn = churn
    swarm.run()
    return swarm


def test_seed_gives_the_same_trace() -> None:
    one, other = swarm_of(churn=0.1, loss=0.01), swarm_of(churn=0.1, loss=0.01)
    assert one.timeline.digest() == other.timeline.digest()
    assert one.disagreement == other.disagreement
    assert swarm_of(rounds=5, churn=0.1, loss=0.02).timeline.digest() != one.timeline.digest()


def test_weights_come_together_and_their_mean_stays_where_it_is() -> None:
    swarm = swarm_of()
    left = [swarm.disagreement[rounds][0] for rounds in (1, 3, 6)]
    assert 1 > left[0] > left[1] > left[2] > 0
    assert left[2] < 0.25
    half = VALUES // 2
    before = np.random.default_rng([2, 7]).standard_normal((32, half)).astype(np.float32)
    after = np.array([pairer.weights[:half] for pairer in swarm.pairers])
    apart = np.abs(after.mean(axis=0) - before.mean(axis=0)).max()
    assert apart < 0.05  # where a pair is in the midst of it, one has moved and the other not yet


def test_pull_beyond_the_manifests_bound_drives_weights_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_module, "SETTINGS", GossipSettings(momentum=0.5, lr=0.7, gamma=1.9))
    assert swarm_of().disagreement[6][0] > 1


def test_nobody_waits_long_for_who_is_gone() -> None:
    swarm = swarm_of(rounds=8, churn=0.3)
    gone = [leaf for leaf in swarm.leaves if not leaf.up]
    assert len(gone) > 5
    assert len(swarm.evicted_after_s) > 3
    assert swarm.false_evictions == 0
    rounds = [swarm.pairers[leaf.number].machine.round for leaf in swarm.leaves if leaf.up]
    assert max(rounds) - min(rounds) <= 3
    assert 0.4 < swarm.exchanged / swarm.steps < 1


def test_bytes_are_a_vector_for_each_exchange() -> None:
    swarm = swarm_of()
    vectors = sum(leaf.bulk_bytes for leaf in swarm.leaves) / WORK.model_bytes
    assert swarm.exchanged <= vectors < 1.15 * swarm.exchanged


def test_proposals_made_once_for_all_are_those_that_each_makes() -> None:
    members = [PeerId(f"peer{number}") for number in range(31)]
    shared = Proposals(SWARM)
    for round in (1, 2):
        for me in members:
            found = shared.of(SWARM, round, me, members)
            assert found
            assert found == candidates(SWARM, round, me, set(members) - {me})[: len(found)]
