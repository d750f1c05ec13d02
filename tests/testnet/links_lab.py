"""Swarms of real nodes over links that a test cuts and narrows, and what their plans and logs say of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from shoal.testnet.links.namespaces import Uplink, why_not
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Fault, Scenario
from shoal.testnet.swarm import run_testnet

DEADLINE_S = 150.0
"""It bounds a test that fails; one that passes takes a tenth of it where the machine is idle."""
MODEL = {"inputs": 1024, "outputs": 256}
PAYLOAD_BYTES = 4 * (1024 * 256 + 256)
"""Of one contribution in fp32."""

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


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
