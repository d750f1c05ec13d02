"""A real node that is stopped for many rounds, as a laptop that sleeps: it comes back with today's speed and work."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import trio

from shoal.node.reporting.events import Certified, Contributed, Linked, Woke
from shoal.protocol.manifest import render_manifest
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime
from shoal.testnet.swarm import testnet_manifest as manifest_of
from tests.testnet.links_lab import scenario

pytestmark = [pytest.mark.long]

NODES, SLEEPER = 4, 3
ROUNDS_ASLEEP = 30
DEADLINE_S = 240.0


async def sleep_long(folder: Path) -> None:
    journal, nodes = Journal(), []
    for index in range(NODES):
        (folder / str(index)).mkdir()
        nodes.append(NodeProcess(index, folder / str(index), journal, Runtime()))
    manifest = folder / "swarm.toml"
    manifest.write_text(render_manifest(manifest_of(scenario(100_000, nodes=NODES), [one.peer_id for one in nodes])))

    def newest(index: int) -> int:
        return max((one.round for one in journal.of(Certified, index)), default=0)

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for index, node in enumerate(nodes):
                if index:
                    await journal.until(lambda: bool(nodes[0].addresses))
                join = nodes[0].addresses if index else ()
                nursery.start_soon(node.run, Launch(manifest=manifest, data_dir=node.folder, join=join))
            await journal.until(lambda: all(len(journal.of(Linked, index)) >= NODES - 1 for index in range(NODES)))
            await journal.until(lambda: len(journal.of(Contributed, SLEEPER)) >= 4)
            stopped_at, before = time.time(), newest(SLEEPER)
            nodes[SLEEPER].signal(signal.SIGSTOP)
            await journal.until(lambda: newest(0) >= before + ROUNDS_ASLEEP)
            woke_at = time.time()
            nodes[SLEEPER].signal(signal.SIGCONT)

            def since() -> list[Contributed]:
                return [one for one in journal.of(Contributed, SLEEPER) if one.at > woke_at and one.round > before + 3]

            await journal.until(lambda: len(since()) >= 4)
            nursery.cancel_scope.cancel()
    slept_s = woke_at - stopped_at
    first, *later = since()
    others = [one.steps for one in journal.of(Contributed, 0) if one.at > woke_at]
    print(f"slept {slept_s:.1f} s; then steps {[one.steps for one in since()]}, others {others}")
    print(f"seconds since the contribution before {[round(one.wall_s, 2) for one in since()]}")
    (woke,) = journal.of(Woke, SLEEPER)
    assert woke.seconds == pytest.approx(slept_s, abs=5.0)
    assert first.wall_s < slept_s, "what is in it was learnt since"
    assert all(one.steps <= 2 * max(others) for one in (first, *later))
    assert not [one for index in range(SLEEPER) for one in journal.of(Woke, index)]


def test_node_that_slept_contributes_what_it_learnt_since_at_the_speed_that_it_has_now(tmp_path: Path) -> None:
    trio.run(sleep_long, tmp_path)
