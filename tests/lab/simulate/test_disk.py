"""Disks of simulated peers: what a restart reads, and that nothing is said before it is written."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from shoal.lab.simulate.disk import AGREEMENT, CHAIN, Disk, Disks
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.scenario import Fault, Scenario, random_scenario
from shoal.lab.simulate.shrink import candidates
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol.certificate import genesis
from shoal.protocol.durable import DurableRecord, Persist
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Term
from shoal.protocol.round import RoundMachine
from shoal.protocol.wire import canonical

PLAIN = Scenario(peers=4, rounds=2, seed=3)
PROMISES = [DurableRecord(kind="promise", term=Term(), round=1, view=view) for view in (1, 2, 3)]


def disk_of_one(disks: Disks) -> Disk:
    founder = Identity.from_seed(bytes(32)).peer_id
    disk = disks.add(genesis(bytes(32), [founder]), np.zeros(4, np.float32), founder)
    disk.open()
    return disk


def test_log_torn_at_any_byte_of_its_last_batch_has_that_batch_whole_or_not_at_all() -> None:
    disks = Disks()
    disk = disk_of_one(disks)
    disk.logs.persist(PROMISES[0])
    before = (disk.folder / AGREEMENT).stat().st_size
    disk.logs.persist(*PROMISES[1:])
    size = (disk.folder / AGREEMENT).stat().st_size - before
    disk.close()
    for written in range(size + 1):
        disk = disk_of_one(disks)
        disk.logs.persist(PROMISES[0])
        disk.tears = written / size
        disk.tear(tuple(PROMISES[1:]))
        disk.close()
        assert (disk.folder / AGREEMENT).stat().st_size == before + written
        disk.open()
        assert disk.logs.durable_records() == (PROMISES if written == size else PROMISES[:1])
        assert disk.logs.damage == []
    disks.clear()
    assert not disk.folder.exists()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_peer_whose_power_fails_in_the_middle_of_a_write_comes_back_and_breaks_no_promise(share: float) -> None:
    faults = tuple(Fault(kind="kill", peer=n, at_s=1.0 + n, duration_s=9.0, torn=share) for n in range(3))
    simulation = Simulation(Scenario(peers=5, rounds=4, seed=11, fault=faults))
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.rounds_certified) == ("", "", 4)
    assert outcome.met["torn log"] == 3
    assert all(peer.disk.height >= 4 for peer in simulation.peers)


def test_only_a_death_tears_a_log() -> None:
    with pytest.raises(ValueError, match="tears no log"):
        Fault(kind="stop", peer=1, at_s=0.0, torn=0.5)


def test_logs_are_torn_in_a_share_of_all_seeds() -> None:
    faults = [fault for seed in range(200) for fault in random_scenario(seed).fault]
    shares = {fault.torn for fault in faults if fault.torn is not None}
    assert {0.0, 1.0} < shares
    assert any(0 < share < 1 for share in shares)


def test_chain_is_read_again_by_every_life() -> None:
    simulation = Simulation(Scenario(peers=3, rounds=3, fault=(Fault(kind="kill", peer=1, at_s=6.0, duration_s=2.0),)))
    with simulation.keys.in_use():
        simulation._run()
        peer = simulation.peers[1]
        assert peer.life == 3
        assert (peer.disk.folder / CHAIN).read_bytes().count(canonical(peer.disk.ledger.entries[0])) == 1
        head = peer.disk.ledger.head
        peer.stop()
        peer.disk.open()
        assert peer.disk.ledger.head == head


class SaysFirst(RoundMachine):
    """Writes what binds it after it is said."""

    def receive(self, *told: object) -> list[object]:  # type: ignore[override]
        return last_written(super().receive(*told))  # type: ignore[arg-type]


def last_written(effects: Iterable[object]) -> list[object]:
    return sorted(effects, key=lambda effect: isinstance(effect, Persist))


def test_seeded_vote_before_it_is_written_is_found() -> None:
    outcome = run_scenario(PLAIN, Components(machine=SaysFirst))
    assert outcome.violation == "written first"


def test_torn_death_is_made_a_plain_one_when_a_scenario_is_shrunk() -> None:
    fault = Fault(kind="kill", peer=1, at_s=0.0, duration_s=1.0, torn=0.5)
    easier = {scenario.fault for scenario in candidates(msgspec.structs.replace(PLAIN, fault=(fault,)))}
    assert (msgspec.structs.replace(fault, torn=None),) in easier
