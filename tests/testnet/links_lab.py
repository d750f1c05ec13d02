"""Swarms of real nodes over links that a test cuts and narrows, and what their plans and logs say of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from shoal.node.control_client import request
from shoal.node.reporting.events import Certified, Linked
from shoal.protocol.manifest import render_manifest
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from shoal.testnet.check import Check, Witness, check_swarm
from shoal.testnet.journal import Journal
from shoal.testnet.links import namespaces
from shoal.testnet.links.namespaces import Network, Uplink, network, why_no_routers, why_not
from shoal.testnet.nodes import Launch, NodeProcess, Runtime
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Fault, Scenario
from shoal.testnet.swarm import run_testnet
from shoal.testnet.swarm import testnet_manifest as manifest_of

DEADLINE_S = 150.0
"""It bounds a test that fails; one that passes takes a tenth of it where the machine is idle."""
MODEL = {"inputs": 1024, "outputs": 256}
PAYLOAD_BYTES = 4 * (1024 * 256 + 256)
"""Of one contribution in fp32."""

BEHIND = (1, 2)
"""Of three nodes, those that sit behind routers where a test wants routers."""

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
needs_routers = pytest.mark.skipif(why_no_routers() is not None, reason=str(why_no_routers()))


def scenario(
    rounds: int, *faults: Fault, nodes: int = 4, uplinks: tuple[Uplink, ...] = (), inputs: int = MODEL["inputs"]
) -> Scenario:
    return Scenario(
        nodes=nodes,
        rounds=rounds,
        workload="regression",
        options=MODEL | {"inputs": inputs},
        codec="fp32",
        inner_steps=10,
        faults=faults,
        uplinks=uplinks,
    )


def behind_routers(rounds: int) -> Scenario:
    """Three nodes, of which two sit behind routers that let nothing in."""
    return Scenario(
        nodes=3,
        rounds=rounds,
        workload="regression",
        options=MODEL,
        codec="fp32",
        inner_steps=10,
        behind_routers=BEHIND,
    )


@dataclass(frozen=True)
class Routed:
    """Three running nodes, the last two behind routers."""

    nodes: list[NodeProcess]
    journal: Journal
    links: Network

    async def all_certified(self, round: int) -> None:
        """Wait until each node certified this round, or one after it where it came later."""

        def certified(node: NodeProcess) -> bool:
            return any(one.round >= round for one in self.journal.of(Certified, node.index))

        await self.journal.until(lambda: all(map(certified, self.nodes)))

    async def go_on_by_themselves(self, rounds: int) -> None:
        """Wait until those behind routers certified so many rounds more that have them alone, and both in full.

        Every value of these rounds is recomputed.
        """
        before = max(one.round for index in BEHIND for one in self.journal.of(Certified, index))

        def certified(index: int) -> dict[int, Certified]:
            own = {one.round: one for one in self.journal.of(Certified, index) if one.round > before}
            return {number: one for number, one in own.items() if len(one.members) == len(BEHIND)}

        await self.journal.until(lambda: all(len(certified(index)) >= rounds for index in BEHIND))
        one, other = map(certified, BEHIND)
        both = sorted(one.keys() & other.keys())
        assert len(both) >= rounds - 1
        for number in both:
            assert one[number].digest == other[number].digest
        whole = [number for number in both if (one[number].contributors, one[number].coverage) == (len(BEHIND), 1.0)]
        assert len(whole) >= rounds - 1, "the first round of two may have begun with three"
        check = await trio.to_thread.run_sync(self._recompute, [(one[number].term, number) for number in both])
        assert (check.errors, check.wrong_values) == ((), 0)
        assert min(found.updates_compared for found in check.rounds) == len(BEHIND)

    def _recompute(self, rounds: list[tuple[str, int]]) -> Check:
        witnesses = [
            Witness(index=node.index, peer_id=node.peer_id, folder=node.folder, settled=frozenset(rounds))
            for node in self.nodes
            if node.index in BEHIND
        ]
        return check_swarm(witnesses, rounds)

    async def status(self, index: int) -> dict[str, Any]:
        """What a node knows, as it tells it over its control socket."""
        return await trio.to_thread.run_sync(partial(request, self.nodes[index].folder, "status", deadline_s=30.0))


@asynccontextmanager
async def two_behind_routers(
    folder: Path, rounds: int, *, prepare: Callable[[Network], None] = lambda links: None
) -> AsyncIterator[Routed]:
    """Yields when the two behind routers are linked with all; the nodes end with the block. prepare: done to the
    links before any node starts."""
    journal = Journal()
    nodes = []
    for index in range(3):
        (folder / str(index)).mkdir()
        nodes.append(NodeProcess(index, folder / str(index), journal, Runtime()))
    manifest = folder / "swarm.toml"
    manifest.write_text(render_manifest(manifest_of(behind_routers(rounds), [node.peer_id for node in nodes])))
    with network(3, behind=BEHIND) as links, trio.fail_after(DEADLINE_S):
        prepare(links)
        async with trio.open_nursery() as nursery:

            def start(index: int, join: tuple[str, ...]) -> None:
                node = nodes[index]
                launch = Launch(manifest=manifest, data_dir=node.folder, join=join, place=links.place(index))
                nursery.start_soon(node.run, launch)

            start(0, ())
            await journal.until(lambda: bool(nodes[0].addresses))
            for index in BEHIND:
                start(index, nodes[0].addresses)
            await journal.until(lambda: all(len(journal.of(Linked, index)) >= 2 for index in BEHIND))
            yield Routed(nodes, journal, links)
            nursery.cancel_scope.cancel()


def change_rules(links: Network, rules: str) -> None:
    """Have both routers do by these rules of nftables from now on; what is connected stays so."""
    for index in BEHIND:
        enter = [namespaces._tool("ip"), "netns", "exec", links._near(index), namespaces._tool("nft"), "-f", "-"]
        namespaces._run(enter, rules)


def change_ports(links: Network) -> None:
    """Have the routers give every connection another port of its own, by chance."""
    change_rules(
        links, 'flush chain inet router leave\nadd rule inet router leave oifname "outside" masquerade fully-random\n'
    )


def run(what: Scenario, out: Path) -> Report:
    """Run it, and see that whatever happened nothing is wrong: values, digests, forks; no round is missing."""

    async def limited() -> Report:
        with trio.fail_after(DEADLINE_S):
            return await partial(run_testnet, what, out)()

    report = trio.run(limited)
    assert report.trouble is None
    assert (report.forks, report.wrong_values, report.digests_equal, report.unverified) == (0, 0, True, ())
    assert report.rounds_certified == what.rounds
    assert [fault.error for fault in report.faults] == [None] * len(what.faults)
    assert [node.outcome for node in report.nodes] == ["running"] * what.nodes
    return report


def assert_everyone_is_in_every_chunk(report: Report, *, first: int = 1) -> None:
    """Nobody was evicted, nothing left out, from the round `first` on."""
    rounds = [r for r in report.rounds if r.round >= first]
    expected = (report.scenario.nodes, report.scenario.nodes, 1.0)
    assert [(r.members, r.contributors, r.coverage) for r in rounds] == [expected] * len(rounds)


def plan(report: Report, out: Path, round: int) -> Plan:
    """The certified plan of a round, as the nodes kept it."""
    kept = [out / "nodes" / str(node.index) / "rounds" / f"0.0-{round}" / "plan" for node in report.nodes]
    return decode(next(path for path in kept if path.exists()).read_bytes(), Plan)


def relays(report: Report, out: Path, round: int) -> list[tuple[int, int, int]]:
    """(one, other, through whom) of a round's certified plan, by node index, the lower of a pair first."""
    found = plan(report, out, round)
    index = {node.peer_id: node.index for node in report.nodes}
    seats = [index[participant.peer] for participant in found.participants]
    pairs = [(*sorted((seats[r.one], seats[r.other])), seats[r.via]) for r in found.relays]
    return sorted((one, other, via) for one, other, via in pairs)


def events(out: Path, node: int, event: str) -> list[dict[str, Any]]:
    """All events of a kind that a node logged."""
    lines = (out / "nodes" / str(node) / "events.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if found["event"] == event]


def lanes_sent(out: Path, node: int, round: int) -> int:
    """Bytes that a node gave to its lanes from the certificate before this round's to this round's."""
    sent = {e["round"]: int(e["lanes_sent"]) for e in events(out, node, "certified")}
    return sent[round] - sent.get(round - 1, 0)
