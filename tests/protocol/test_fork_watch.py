"""What a member makes of others' words about rounds that it has decided otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.node.rounds.fork_file import LOG_NAME as FORKS_LOG
from shoal.node.rounds.fork_file import ForkFile
from shoal.protocol.agreement import Broadcast
from shoal.protocol.chain import Chain
from shoal.protocol.chain_comparison import ALL_REBASES
from shoal.protocol.effects import KeepFork, Steps
from shoal.protocol.errands import AskEntries
from shoal.protocol.errors import NetworkError, StorageError
from shoal.protocol.fork_watch import PERIOD_S, ForkWatch
from shoal.protocol.forks import Fork, binding
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Leave, Message, Value
from shoal.protocol.peering import ChainPart
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, Ledger, certificate_of, identity
from tests.protocol.test_chain_choice import chain_of, invented

PEER = PeerId("peer")


class Watch:
    """A watch over a chain, beside one peer with another."""

    def __init__(self, chain: Chain, theirs: Chain) -> None:
        self.chain = chain
        self.theirs = theirs
        self.asked = 0
        self.now = 0.0
        self.forks: list[Fork] = []
        self.said: list[Any] = []
        self.watch = ForkWatch(self)

    def hear(self, message: Message, value: Value) -> None:
        self.do(self.watch.heard(PEER, message, (value.term, value.round), self.now))
        self.compare()

    def do(self, effects: Steps) -> None:
        for effect in effects:
            if isinstance(effect, KeepFork):
                self.forks.append(effect.fork)
            else:
                assert isinstance(effect, Broadcast)
                self.said.append(effect.message)

    def compare(self) -> None:
        """Carry out what is due."""
        errand = self.watch.due(self.now)
        if errand is None:
            return
        came = None
        while (request := errand.go_on(came, self.now)) is not None:
            assert isinstance(request, AskEntries)
            self.asked += 1
            part = self.theirs.after(request.after, 64, request.rebases)
            came = ChainPart(certificates=part, head=self.theirs.height)
        self.do(self.watch.compared(errand.outcome))


def after(value: Value) -> Value:
    """A value at the position after this one's, in its term."""
    return msgspec.structs.replace(value, round=value.round + 1)


def word_on(value: Value) -> Leave:
    """Something said in the round after `value`."""
    return Leave(term=value.next_term, round=value.next_round, base=value.hash, signature=bytes(64))


def test_certificate_for_a_decided_round_stops_the_node_and_is_kept_and_passed_on(tmp_path: Path) -> None:
    chain = chain_of(5)
    other = invented(chain, 2, rounds=1)
    watch = Watch(chain, other)
    lie = other.entries[2]
    assert isinstance(lie, Certificate)
    watch.hear(lie, lie.value)
    watch.hear(lie, lie.value)
    (fork,) = watch.forks
    assert binding(watch.forks, chain.head) == fork
    assert fork.signers == tuple(sorted(identity(n).peer_id for n in (1, 2)))
    assert watch.asked == 0
    assert watch.said == [fork.one, fork.other]
    kept = ForkFile(tmp_path)
    kept.keep(fork)
    assert ForkFile(tmp_path).forks == [fork]
    path = tmp_path / FORKS_LOG
    written = path.read_bytes()
    damaged = written[:-1] + bytes([written[-1] ^ 1])
    path.write_bytes(damaged)
    with pytest.raises(StorageError, match="is damaged"):  # and nothing is signed as if there had been none
        ForkFile(tmp_path)
    kept.keep(fork)  # it was damaged while the node ran, which has them all
    assert ForkFile(tmp_path).forks == [fork, fork]
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged
    chain.extend(make_rebase(AUTHORITY, chain.head, [identity(3).peer_id]))
    assert binding(watch.forks, chain.head) is None


@pytest.mark.parametrize("rounds", [1, 3])
def test_word_on_a_base_that_is_not_here_has_the_chains_compared(rounds: int) -> None:
    chain = chain_of(5)
    other = invented(chain, 2, rounds=rounds)
    watch = Watch(chain, other)
    watch.hear(word_on(other.head), after(other.head))
    (fork,) = watch.forks
    assert (fork.round, fork.signers) == (3, tuple(sorted(identity(n).peer_id for n in (1, 2))))


def test_words_that_go_with_the_chain_cost_nothing_and_one_peer_is_compared_now_and_then() -> None:
    chain = chain_of(5)
    watch = Watch(chain, chain.up_to(3))
    for entry in chain.entries:
        assert isinstance(entry, Certificate)
        watch.hear(entry, entry.value)
        watch.hear(word_on(entry.value), after(entry.value))
    ahead = msgspec.structs.replace(chain.head, round=9, base=bytes(32))
    watch.hear(word_on(ahead), after(ahead))
    assert watch.asked == 0
    lost = msgspec.structs.replace(chain.head, base=bytes(32))
    for _ in range(20):
        watch.hear(word_on(lost), after(lost))
        watch.now += PERIOD_S / 15
    assert 0 < watch.asked <= 8
    assert watch.forks == []


def test_one_peer_after_the_other_is_compared() -> None:
    chain = chain_of(3)
    watch = Watch(chain, chain)
    for name in ("one", "two"):
        watch.watch.suspect(PeerId(name), 0.0)
    first = watch.watch.due(0.0)
    assert first is not None
    assert watch.watch.due(0.0) is None
    assert first.go_on(None, 0.0) == AskEntries(PeerId("one"), 3, ALL_REBASES)
    assert first.go_on(NetworkError("does not answer"), 9.0) is None
    watch.do(watch.watch.compared(first.outcome))
    second = watch.watch.due(9.0)
    assert second is not None
    assert second.go_on(None, 9.0) == AskEntries(PeerId("two"), 3, ALL_REBASES)


def test_what_a_rebase_or_a_rollback_abandoned_is_no_fork() -> None:
    before = chain_of(5)
    rebased = before.up_to(3)
    rebased.extend(make_rebase(AUTHORITY, rebased.head, [identity(1).peer_id]))
    ledger = Ledger()
    ledger.certify(4)
    behind = ledger.chain.up_to(4)
    ledger.go_back(2)
    for chain, other in ((rebased, before), (ledger.chain, behind)):
        watch = Watch(chain, other)
        watch.hear(word_on(other.head), after(other.head))
        entry = other.entries[-1]
        assert isinstance(entry, Certificate)
        watch.hear(entry, entry.value)
        assert watch.forks == []


def test_certificate_without_a_quorum_convicts_nobody() -> None:
    chain = chain_of(3)
    value = msgspec.structs.replace(chain.head, tokens=7)
    watch = Watch(chain, chain)
    watch.hear(certificate_of(value, [identity(2)]), value)
    assert (watch.forks, watch.said) == ([], [])
