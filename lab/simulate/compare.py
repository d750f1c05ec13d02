"""Three ways to take a mean among many, over the same links and churn: `python -m shoal.lab.simulate.compare`.

    flat       everyone in one plan, as nodes do it       `simulate`, up to the limit of a plan
    two-level  rows, then columns                         `cells`, from `ROWS_FROM_PEERS` on
    gossip     pairs, no mean of all                      `gossip`

One row per way and size: seconds from one round to the next; bytes of chunks that a peer sends in a round; bytes/s that
it sends beside them, and how many of them are greetings and records; bytes of a certificate and how many signed it; and
for gossip the share of steps with a partner and its disagreement (see there). Every way but gossip leaves no
disagreement at all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from shoal.lab.simulate.cells import Population
from shoal.lab.simulate.gossip import GossipSwarm
from shoal.lab.simulate.outcome import Components, Outcome, Workload
from shoal.lab.simulate.rings import EXPECTED_ROUND_S
from shoal.lab.simulate.scenario import FLAT_LIMIT_PEERS, Fault, Scenario
from shoal.lab.simulate.simulation import Simulation
from shoal.protocol.messages import Certificate
from shoal.protocol.wire import canonical

ROWS_FROM_PEERS = 64
"""With fewer there are less than four heads, of which none may be lost."""
CHUNKS_LEAST, CHUNKS_PER_PEER = 32, 4
"""The modelled links carry one payload after the other, and a receiver must hear of the slowest sender before it takes
it for stalled; so chunks are small."""
TRAIN_S = (4.0, 8.0)
REDUCE_DEADLINE_S = 300.0
BF16_SEED = 2
"""A seed of which the simulator's codec is bf16, as gossip's is."""
JOIN_AFTER_S = 0.001
GOSSIP_ROUNDS = 10
TOLD_ROUNDS = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One way at one size. `left` and `kept` are gossip's disagreement by rounds; see `gossip`."""

    way: str
    peers: int
    rounds: int
    round_s: float
    sent_mb: float
    control_bytes_per_s: float
    records_bytes_per_s: float | None
    head_control_bytes_per_s: float = 0.0
    """Traffic of a row's head as one of the heads, beside that of any peer."""
    certificate_bytes: int = 0
    signers: int = 0
    partnered: float = 1.0
    left: dict[int, float] | None = None
    kept: dict[int, float] | None = None
    violation: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that are the same for everything compared."""

    seed: int = BF16_SEED
    rounds: int = 4
    loss: float = 0.01
    churn: float = 0.05
    model_bytes: float = 20e6

    def scenario(self, peers: int, rounds: int, faults: Sequence[Fault] = ()) -> Scenario:
        """Of so many peers, without churn."""
        return Scenario(peers=peers, rounds=rounds, seed=self.seed, loss=self.loss, fault=tuple(faults))

    def work(self, chunks: int) -> Workload:
        """The workload of a round with so many chunks."""
        return Workload(
            chunks=max(CHUNKS_LEAST, chunks),
            model_bytes=self.model_bytes,
            train_s=TRAIN_S,
            reduce_deadline_s=REDUCE_DEADLINE_S,
        )

    def losses(self, peers: int, for_s: float) -> list[Fault]:
        """The same churn as single faults: at each time one of the first peers crashes for good, and another starts."""
        rng, faults, left, now = random.Random(f"losses {self.seed} {peers}"), [], list(range(peers)), 0.0
        while self.churn and len(left) > peers // 2:
            now += rng.expovariate(self.churn * peers / EXPECTED_ROUND_S)
            if now > for_s:
                break
            victim = left.pop(rng.randrange(len(left)))
            faults += [Fault(kind="crash", at_s=now, peer=victim), Fault(kind="join", at_s=now + JOIN_AFTER_S)]
        return faults


def flat(conditions: Conditions, peers: int) -> Compared:
    """Everyone in one plan."""
    began = time.perf_counter()
    faults = conditions.losses(peers, conditions.rounds * EXPECTED_ROUND_S)
    simulation = Simulation(
        conditions.scenario(peers, conditions.rounds, faults), Components(work=conditions.work(CHUNKS_PER_PEER * peers))
    )
    outcome = simulation.run()
    bulk = sum(place.bulk_bytes for place in simulation.network.places)
    return _of_rounds("flat", simulation, outcome, bulk, peers, None, time.perf_counter() - began)


def two_level(conditions: Conditions, peers: int) -> Compared:
    """Rows, then columns."""
    began = time.perf_counter()
    population = Population(conditions.scenario(peers, conditions.rounds), Components(work=conditions.work(0)))
    population.churn = conditions.churn
    outcome = population.run()
    took_s = time.perf_counter() - began
    told = _of_rounds(
        "two-level", population.seats, outcome, population.bulk_bytes(), peers, population.record_bytes, took_s
    )
    by_heads = sum(place.control_bytes for place in population.seats.network.places)
    return replace(told, head_control_bytes_per_s=by_heads / len(population.cells) / outcome.virtual_s)


def _of_rounds(
    way: str, simulation: Simulation, outcome: Outcome, bulk: float, peers: int, records: int | None, wall_s: float
) -> Compared:
    """The first round is not counted in the time of one: links come up in it."""
    decided = [simulation.decided_at[round] for round in sorted(simulation.decided_at)]
    gaps = [later - earlier for earlier, later in pairwise(decided)]
    rounds = max(1, outcome.rounds_certified)
    certificates = [one for peer in simulation.peers if (one := peer.disk.newest) is not None]
    newest = max(certificates, key=lambda one: one.value.round, default=None)
    return Compared(
        way=way,
        peers=peers,
        rounds=outcome.rounds_certified,
        round_s=sum(gaps) / len(gaps) if gaps else outcome.virtual_s,
        sent_mb=bulk / peers / rounds / 1e6,
        control_bytes_per_s=outcome.control_bytes_per_peer_per_s,
        records_bytes_per_s=None if records is None else records / peers / outcome.virtual_s,
        certificate_bytes=_size(newest),
        signers=0 if newest is None else len(newest.signers),
        violation=f"{outcome.violation} {outcome.detail}".strip(),
        wall_s=wall_s,
    )


def _size(certificate: Certificate | None) -> int:
    return 0 if certificate is None else len(canonical(certificate))


def gossip(conditions: Conditions, peers: int) -> Compared:
    """Pairs."""
    began = time.perf_counter()
    swarm = GossipSwarm(conditions.scenario(peers, GOSSIP_ROUNDS), conditions.work(0))
    swarm.churn = conditions.churn
    swarm.run()
    now, rounds = swarm.timeline.now, swarm.rounds
    return Compared(
        way="gossip",
        peers=peers,
        rounds=int(rounds),
        round_s=now / rounds,
        sent_mb=sum(leaf.bulk_bytes for leaf in swarm.leaves) / peers / rounds / 1e6,
        control_bytes_per_s=sum(leaf.control_bytes for leaf in swarm.leaves) / peers / now,
        records_bytes_per_s=swarm.record_bytes / peers / now,
        partnered=swarm.exchanged / swarm.steps,
        left={k: swarm.disagreement[k][0] for k in TOLD_ROUNDS if k in swarm.disagreement},
        kept={k: swarm.disagreement[k][1] for k in TOLD_ROUNDS if k in swarm.disagreement},
        wall_s=time.perf_counter() - began,
    )


def compare(conditions: Conditions, sizes: Iterable[int], ways: Sequence[str]) -> Iterator[Compared]:
    """All that there is to compare at these sizes, as it comes."""
    for peers in sizes:
        if "flat" in ways and peers <= FLAT_LIMIT_PEERS:
            yield flat(conditions, peers)
        if "two-level" in ways and peers >= ROWS_FROM_PEERS:
            yield two_level(conditions, peers)
        if "gossip" in ways:
            yield gossip(conditions, peers)


HEADER = (
    "| peers | way | round (s) | sent (MB) | control (bytes/s) | of it records | certificate | left | kept |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |"
)


def line_of(one: Compared) -> str:
    """A row of the table."""
    signed = f"{one.certificate_bytes:,} bytes, {one.signers} signatures" if one.signers else "none"
    last = max(one.left, default=0) if one.left else 0
    left = f"{one.left[last]:.3f} after {last}" if one.left else "0"
    kept = f"{one.kept[last]:.1f}" if one.kept else "0"
    cells = (
        f"{one.peers:,}",
        one.way if one.way != "gossip" else f"gossip, {one.partnered:.0%} with a partner",
        f"{one.round_s:.1f}",
        f"{one.sent_mb:.1f}",
        f"{one.control_bytes_per_s:,.0f}",
        "" if one.records_bytes_per_s is None else f"{one.records_bytes_per_s:,.0f}",
        signed if not one.violation else f"**{one.violation}**",
        left,
        kept,
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exits 1 if a run ended in a violation."""
    parser = argparse.ArgumentParser(prog="simulate_compare", description=__doc__)
    parser.add_argument("--peers", default="8,16,32,64,256,1024,4096", help="sizes, separated by commas")
    parser.add_argument("--ways", default="flat,two-level,gossip")
    parser.add_argument("--rounds", type=int, default=4, help=f"of the first two ways; gossip has {GOSSIP_ROUNDS}")
    parser.add_argument("--churn", type=float, default=0.05, help="share of the peers that vanish in 15 s")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--model-mb", type=float, default=20.0, help="an encoded contribution")
    parser.add_argument("--seed", type=int, default=BF16_SEED)
    parser.add_argument("--json", action="store_true", help="a line of JSON per row instead of the table")
    asked = parser.parse_args(arguments)
    conditions = Conditions(
        seed=asked.seed, rounds=asked.rounds, loss=asked.loss, churn=asked.churn, model_bytes=asked.model_mb * 1e6
    )
    if not asked.json:
        print(HEADER)
    failed = False
    for one in compare(conditions, [int(size) for size in asked.peers.split(",")], asked.ways.split(",")):
        print(json.dumps(asdict(one)) if asked.json else line_of(one), flush=True)
        failed |= bool(one.violation)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
