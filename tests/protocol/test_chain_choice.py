"""What a newcomer takes: a chain with its link's checkpoint, or what all serve alike; of two chains neither."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
import trio
from trio.testing import MockClock

from shoal.node.state.errands import carry_out
from shoal.protocol import chain_choice
from shoal.protocol.chain import Chain
from shoal.protocol.chain_choice import QUICK_S, ChainChoice, check_link
from shoal.protocol.chain_comparison import ALL_REBASES
from shoal.protocol.errands import AskEntries, AwaitLinks, Clock, Errand, LookElsewhere, Warn
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.forks import Checkpoint
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Entry
from shoal.protocol.peering import ChainPart
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, Ledger, certificate_of, identity

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def chain_of(rounds: int) -> Chain:
    ledger = Ledger()
    ledger.certify(rounds)
    return ledger.chain


def invented(chain: Chain, height: int, *, rounds: int = 3, signers: tuple[int, ...] = (1, 2)) -> Chain:
    """The past up to a height, and another one after it, signed by who was a quorum then."""
    other = chain.up_to(height)
    for entry in chain.entries[height : height + rounds]:
        value = msgspec.structs.replace(entry.value, base=other.head.hash, tokens=7)
        other.extend(certificate_of(value, [identity(n) for n in signers]))
    return other


class Peers:
    """Who is linked, and what each serves; and who chooses among them."""

    def __init__(self, served: Mapping[PeerId, Chain | None]) -> None:
        self.served = dict(served)
        self.told: list[str] = []
        self.asked: list[PeerId] = []
        self.clock = Clock()
        self.chain: Chain

    def linked(self) -> frozenset[PeerId]:
        return frozenset(self.served)

    async def ask(self, request: AskEntries) -> ChainPart:
        await trio.lowlevel.checkpoint()
        self.asked.append(request.peer)
        chain = self.served[request.peer]
        if chain is None:
            await trio.sleep_forever()
            raise NetworkError("hangs")
        return ChainPart(certificates=chain.after(request.after, 2, request.rebases), head=chain.height)

    async def settle(self, request: AwaitLinks) -> None:
        await trio.lowlevel.checkpoint()

    async def look(self, request: LookElsewhere) -> Mapping[str, Chain]:
        await trio.lowlevel.checkpoint()
        return {}

    async def tell(self, request: Warn) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(request.text)

    def choice(self, chain: Chain, checkpoint: Checkpoint | None = None) -> ChainChoice:
        self.chain = chain
        return ChainChoice(self, checkpoint, self.clock)

    async def choose(self, choice: ChainChoice) -> list[Entry]:
        performers = {AskEntries: self.ask, AwaitLinks: self.settle, LookElsewhere: self.look, Warn: self.tell}
        return list(await carry_out(Errand(choice.choose(), self.clock), performers))


def chosen(peers: Peers, choice: ChainChoice) -> list[Entry]:
    return trio.run(peers.choose, choice, clock=MockClock(autojump_threshold=0))


def test_newcomer_takes_the_longest_of_chains_that_agree() -> None:
    real = chain_of(5)
    peers = Peers({A: real.up_to(3), B: real, C: real.up_to(0)})
    assert chosen(peers, peers.choice(real.up_to(0))) == list(real.entries)
    assert len(peers.asked) < 12


class Trickling(Peers):
    """Some give an entry every ten seconds, after the first `quick`, and claim to have more than anybody.

    shown: what they serve to who looks where two chains part; the same as to all others if left out.
    """

    def __init__(
        self,
        served: Mapping[PeerId, Chain | None],
        slow: frozenset[PeerId],
        shown: tuple[Entry, ...] = (),
        *,
        quick: int = 1,
    ) -> None:
        super().__init__(served)
        self.slow, self.shown, self.quick = slow, shown, quick

    async def ask(self, request: AskEntries) -> ChainPart:
        chain = self.served[request.peer]
        if request.peer not in self.slow or chain is None:
            return await super().ask(request)
        is_quick = request.after < self.quick and request.rebases < ALL_REBASES
        await trio.sleep(0.01 if is_quick else 9.9)
        if self.shown and request.rebases == ALL_REBASES:
            return ChainPart(certificates=self.shown[request.after : request.after + 1], head=len(self.shown))
        return ChainPart(certificates=chain.after(request.after, 1, request.rebases), head=10**9)

    def timed(self, chain: Chain) -> tuple[list[Entry], float]:
        async def choose() -> tuple[list[Entry], float]:
            began = trio.current_time()
            return await self.choose(self.choice(chain)), trio.current_time() - began

        return trio.run(choose, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("claims_a_fork", [False, True])
def test_who_serves_an_entry_every_ten_seconds_keeps_a_newcomer_waiting_no_longer_than_a_comparison_takes(
    claims_a_fork: bool,
) -> None:
    real = chain_of(40)
    forged = certificate_of(msgspec.structs.replace(real.entries[0].value, tokens=9), [identity(9)])
    peers = Trickling({A: real, B: real, C: real}, frozenset({C}), (forged,) if claims_a_fork else ())
    entries, took_s = peers.timed(real.up_to(0))
    assert entries == list(real.entries)
    assert took_s <= QUICK_S + 10 + 10 * (3 + 2 * claims_a_fork)


def test_chain_that_parts_is_found_however_slowly_it_is_served() -> None:
    real = chain_of(20)
    peers = Trickling({A: real, B: real, C: invented(real, 4)}, frozenset({C}))
    with pytest.raises(ConfigError, match="which part at round 5"):
        peers.timed(real.up_to(0))


def test_where_all_serve_slowly_all_of_it_comes() -> None:
    real = chain_of(20)
    peers = Trickling({A: real, B: real.up_to(8)}, frozenset({A, B}))
    entries, took_s = peers.timed(real.up_to(0))
    assert entries == list(real.entries)
    assert took_s > 10 * len(entries)


def test_what_came_of_who_became_slow_is_asked_of_nobody_again() -> None:
    real = chain_of(40)
    peers = Trickling({A: real, B: real}, frozenset({A}), quick=30)
    entries, _ = peers.timed(real.up_to(0))
    assert entries == list(real.entries)
    assert 5 <= len(peers.asked) <= 10, "it gives the last ten, two at a time, and is compared with what came before"


@pytest.mark.parametrize("height", [0, 2, 4])
def test_two_chains_are_both_refused_and_the_error_names_who_serves_which(height: int) -> None:
    real = chain_of(5)
    other = invented(real, height, rounds=1)
    peers = Peers({A: real, B: other, C: real.up_to(1)})
    with pytest.raises(ConfigError) as caught:
        chosen(peers, peers.choice(real.up_to(0)))
    text = str(caught.value)
    for chain, who in ((real, A), (other, B)):
        assert f"{who} serves {chain.entries[height].value.hash.hex()[:12]} (up to round {chain.head.round})" in text
    assert f"which part at round {height + 1}" in text
    assert "`shoal link`" in text


def test_checkpoint_decides_and_who_lacks_it_is_named_once() -> None:
    real = chain_of(5)
    other = invented(real, 1)
    peers = Peers({A: other, B: real})
    choice = peers.choice(real.up_to(0), Checkpoint.of(real.entries[2].value))
    assert chosen(peers, choice) == list(real.entries)
    assert chosen(peers, choice) == list(real.entries)
    assert len(peers.told) == 1
    assert peers.told[0].startswith(f"{A} serves another chain than the link's")


def test_chain_that_lacks_the_checkpoint_is_not_taken_though_nobody_has_another() -> None:
    real = chain_of(5)
    checkpoint = Checkpoint.of(real.entries[3].value)
    peers = Peers({A: invented(real, 2)})
    assert chosen(peers, peers.choice(real.up_to(0), checkpoint)) == []
    assert peers.told
    behind = Peers({A: real.up_to(3)})
    assert chosen(behind, behind.choice(real.up_to(0), checkpoint)) == []
    assert behind.told == []  # it may have it soon


def test_two_chains_that_both_have_the_checkpoint_are_both_refused() -> None:
    real = chain_of(5)
    peers = Peers({A: real, B: invented(real, 3, rounds=2)})
    choice = peers.choice(real.up_to(0), Checkpoint.of(real.entries[1].value))
    with pytest.raises(ConfigError, match="which part at round 4"):
        chosen(peers, choice)


def test_later_rebase_of_the_authority_goes_before_what_it_abandoned() -> None:
    real = chain_of(5)
    rebased = real.up_to(3)
    rebased.extend(make_rebase(AUTHORITY, rebased.head, [identity(1).peer_id]))
    both, later = Peers({A: real, B: rebased}), Peers({B: rebased})
    assert chosen(both, both.choice(real.up_to(0))) == list(rebased.entries)
    checkpoint = Checkpoint.of(real.entries[4].value)
    assert chosen(later, later.choice(real.up_to(0), checkpoint)) == list(rebased.entries)


def test_chain_that_does_not_hold_is_left_out_and_hinders_nobody() -> None:
    real = chain_of(5)
    served = Peers({A: real, B: real})
    broken = invented(real, 1)
    forged = certificate_of(msgspec.structs.replace(broken.head, tokens=9), [identity(9)])
    assert isinstance(forged, Certificate)
    honest = served.ask

    async def ask(request: AskEntries) -> ChainPart:
        if request.peer == A:
            await trio.lowlevel.checkpoint()
            entries = (*broken.entries[:-1], forged)
            return ChainPart(certificates=entries[request.after : request.after + 2], head=99)
        return await honest(request)

    served.ask = ask  # type: ignore[method-assign]
    assert chosen(served, served.choice(real.up_to(0))) == list(real.entries)


def test_peer_that_hangs_is_not_waited_for_longer_than_others_are() -> None:
    real = chain_of(3)
    peers = Peers({A: None, B: real})

    async def main() -> None:
        assert await peers.choose(peers.choice(real.up_to(0))) == list(real.entries)
        assert trio.current_time() < chain_choice.HEADS_TIMEOUT_S + 1

    trio.run(main, clock=MockClock(autojump_threshold=0, rate=0))


def test_peers_that_are_about_to_be_linked_are_waited_for() -> None:
    real = chain_of(4)
    peers = Peers({A: real})
    waited: list[float] = []

    async def settle(request: AwaitLinks) -> None:
        await trio.sleep(0.5)
        peers.served[B] = invented(real, 1)
        waited.append(request.limit_s)

    peers.settle = settle  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="two chains"):
        chosen(peers, peers.choice(real.up_to(0)))
    assert waited == [chain_choice.SETTLE_S]


def test_one_peer_in_two_places_is_named_by_them() -> None:
    real = chain_of(4)
    other = invented(real, 1)

    async def look(request: LookElsewhere) -> Mapping[str, Chain]:
        await trio.lowlevel.checkpoint()
        return {"here": real, "there": other, "nowhere": request.base}

    peers = Peers({A: real})
    peers.look = look  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        chosen(peers, peers.choice(real.up_to(0)))
    assert "a at here serves" in str(caught.value)
    assert "a at there serves" in str(caught.value)
    assert " a serves" not in str(caught.value)


def test_node_whose_own_chain_contradicts_its_link_says_so_at_its_start() -> None:
    real = chain_of(5)
    other = invented(real, 1)
    with pytest.raises(ConfigError, match=r"is another than the link's, which has round 4 of term 0\.0"):
        check_link(other, Checkpoint.of(real.entries[3].value))
    check_link(real, Checkpoint.of(real.entries[3].value))
    check_link(real.up_to(2), Checkpoint.of(real.entries[3].value))
    assert not Peers({}).choice(real, Checkpoint.of(real.entries[3].value)).pending
    assert Peers({}).choice(real.up_to(2), Checkpoint.of(real.entries[3].value)).pending
    assert not Peers({}).choice(real.up_to(2)).pending
    assert Peers({}).choice(real.up_to(0)).pending
