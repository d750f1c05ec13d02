"""What a member makes of others' words about rounds that it has decided otherwise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from shoal.node.outcome import Notice, Progress
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.fork_watch import PERIOD_S, ForkWatch
from shoal.protocol.chain import Chain
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Leave, Message, Value
from shoal.protocol.peering import ChainPart
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, Ledger, certificate_of, identity
from tests.node.state.test_chain_choice import chain_of, invented

PEER = PeerId("peer")


class Watch:
    """A watch over a chain, beside one peer with another."""

    def __init__(self, folder: Path, chain: Chain, theirs: Chain) -> None:
        self.chain = chain
        self.theirs = theirs
        self.asked = 0
        self.said: list[Certificate] = []
        self.told: list[Progress] = []
        self.stopped = 0
        self.events = EventLog(folder / "events.jsonl")
        self.watch = ForkWatch(
            folder=folder,
            chain=chain,
            ask=self.ask,
            say=self.said.append,
            log=RoundLog(self.events),
            tell=self.told.append,
        )
        self.watch.on_found = self.stop

    def stop(self) -> None:
        self.stopped += 1

    async def ask(self, after: int, peer: PeerId, rebases: int) -> ChainPart:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        return ChainPart(certificates=self.theirs.after(after, 64, rebases), head=self.theirs.height)

    def hear(self, message: Message, value: Value) -> None:
        self.watch.heard(PEER, message, (value.term, value.round))


def run(watch: Watch, main: Callable[[], Awaitable[None]]) -> None:
    async def both() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch.watch.run)
            await main()
            await trio.sleep(1)
            nursery.cancel_scope.cancel()

    try:
        trio.run(both, clock=MockClock(autojump_threshold=0))
    finally:
        watch.events.close()


def word_on(value: Value) -> Leave:
    """Something said in the round after `value`."""
    return Leave(term=value.next_term, round=value.next_round, base=value.hash, signature=bytes(64))


def test_certificate_for_a_decided_round_stops_the_node_and_is_kept_and_passed_on(tmp_path: Path) -> None:
    chain = chain_of(5)
    other = invented(chain, 2, rounds=1)
    watch = Watch(tmp_path, chain, other)
    lie = other.entries[2]
    assert isinstance(lie, Certificate)

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        watch.hear(lie, lie.value)
        watch.hear(lie, lie.value)

    run(watch, main)
    fork = watch.watch.fork
    assert fork is not None
    assert fork.signers == tuple(sorted(identity(n).peer_id for n in (1, 2)))
    assert (watch.stopped, watch.asked) == (1, 0)
    assert watch.said == [fork.one, fork.other]
    assert [one.text for one in watch.told if isinstance(one, Notice)] == [str(fork)]
    again = Watch(tmp_path, chain, other)
    assert again.watch.fork == fork
    chain.extend(make_rebase(AUTHORITY, chain.head, [identity(3).peer_id]))
    assert again.watch.fork is None
    again.events.close()


@pytest.mark.parametrize("rounds", [1, 3])
def test_word_on_a_base_that_is_not_here_has_the_chains_compared(tmp_path: Path, rounds: int) -> None:
    chain = chain_of(5)
    other = invented(chain, 2, rounds=rounds)
    watch = Watch(tmp_path, chain, other)

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        watch.hear(word_on(other.head), msgspec.structs.replace(other.head, round=other.head.round + 1))

    run(watch, main)
    fork = watch.watch.fork
    assert fork is not None
    assert (fork.round, fork.signers) == (3, tuple(sorted(identity(n).peer_id for n in (1, 2))))


def test_words_that_go_with_the_chain_cost_nothing_and_one_peer_is_compared_now_and_then(tmp_path: Path) -> None:
    chain = chain_of(5)
    watch = Watch(tmp_path, chain, chain.up_to(3))

    async def main() -> None:
        for entry in chain.entries:
            assert isinstance(entry, Certificate)
            watch.hear(entry, entry.value)
            watch.hear(word_on(entry.value), msgspec.structs.replace(entry.value, round=entry.value.round + 1))
        ahead = msgspec.structs.replace(chain.head, round=9, base=bytes(32))
        watch.hear(word_on(ahead), msgspec.structs.replace(ahead, round=10))
        await trio.sleep(1)
        assert watch.asked == 0
        lost = msgspec.structs.replace(chain.head, base=bytes(32))
        for _ in range(20):
            watch.hear(word_on(lost), msgspec.structs.replace(lost, round=lost.round + 1))
            await trio.sleep(PERIOD_S / 15)
        assert 0 < watch.asked <= 8

    run(watch, main)
    assert watch.watch.fork is None


def test_what_a_rebase_or_a_rollback_abandoned_is_no_fork(tmp_path: Path) -> None:
    before = chain_of(5)
    rebased = before.up_to(3)
    rebased.extend(make_rebase(AUTHORITY, rebased.head, [identity(1).peer_id]))
    ledger = Ledger()
    ledger.certify(4)
    behind = ledger.chain.up_to(4)
    ledger.go_back(2)
    for folder, chain, other in (("rebased", rebased, before), ("back", ledger.chain, behind)):
        (tmp_path / folder).mkdir()
        watch = Watch(tmp_path / folder, chain, other)

        async def main(watch: Watch = watch, other: Chain = other) -> None:
            await trio.lowlevel.checkpoint()
            watch.hear(word_on(other.head), msgspec.structs.replace(other.head, round=other.head.round + 1))
            entry = other.entries[-1]
            assert isinstance(entry, Certificate)
            watch.hear(entry, entry.value)

        run(watch, main)
        assert watch.watch.fork is None


def test_certificate_without_a_quorum_convicts_nobody(tmp_path: Path) -> None:
    chain = chain_of(3)
    value = msgspec.structs.replace(chain.head, tokens=7)
    watch = Watch(tmp_path, chain, chain)

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        watch.hear(certificate_of(value, [identity(2)]), value)

    run(watch, main)
    assert (watch.watch.fork, watch.stopped, watch.said) == (None, 0, [])
