"""What a node does about rollbacks: its user's order, its policy for others', and the state that comes first."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from shoal.collectives.partition import deal
from shoal.collectives.state import CertifiedState, header_of
from shoal.node.config import RollbackPolicy
from shoal.node.outcome import Notice, Progress
from shoal.node.rounds.evaluations import past_losses
from shoal.node.rounds.going_back import NAME, RETRY_S, GoingBack
from shoal.node.rounds.inbox import Own, StateHeld
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.state_files import read_state, write_state
from shoal.node.training.trainer_messages import Evaluated
from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import Effect
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import Consent, Target, Value
from shoal.protocol.planning import RoundSettings
from shoal.protocol.round import RoundMachine
from shoal.protocol.terms import make_consent
from tests.node.donors import World
from tests.node.ledger import GRID, OUTER, Ledger, state_of
from tests.node.state_store_lab import run

SETTINGS = RoundSettings(
    numel=GRID.numel, chunk_values=GRID.chunk_values, codec="int8", grace_s=3, reduce_deadline_s=30, weight_cap=4
)


class Bench:
    """A node of three in the round after those that the ledger certified; those in `saved` are on its disk."""

    def __init__(self, folder: Path, *, policy: RollbackPolicy = "spike", saved: Sequence[int] = ()) -> None:
        self.ledger = Ledger()
        self.ledger.certify(6)
        self.me, self.other, self.third = self.ledger.founders
        world = World(folder, self.ledger)
        self.folder = folder / "me"
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        for round in saved:
            self.save(self.ledger.states[round])
        self.cache = world.cache
        self.notices: list[Progress] = []
        self.given: list[Own] = []
        self._arrived = trio.Event()
        self.fetched: list[int] = []
        self.earlier = EarlierStates(self.folder, chain=self.ledger.chain, cache=world.cache, outer=OUTER)
        state_store = SimpleNamespace(chain=self.ledger.chain, earlier=self.earlier)
        self._parts = SimpleNamespace(
            state_store=state_store,
            config=SimpleNamespace(rollback=policy),
            identity=self.me,
            store=SimpleNamespace(folder=self.folder),
            cache=world.cache,
            links=SimpleNamespace(linked=lambda: frozenset({self.other.peer_id})),
            on_progress=self.notices.append,
        )
        self.peers_have: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Be a new process over the same folder, in the round after the head."""
        self.going_back = GoingBack(self._parts, put=self._put, fetch=self._fetch)  # type: ignore[arg-type]
        self.machine = self.new_machine()

    def save(self, state: CertifiedState) -> None:
        """Have a state on disk as its saver leaves it."""
        write_state(self.folder / "state" / f"{state.round}.safetensors", state, header_of(state, GRID))

    def _put(self, event: Own) -> None:
        self.given.append(event)
        self._arrived.set()

    def new_machine(self) -> RoundMachine:
        head = self.ledger.chain.head
        return RoundMachine(
            identity=self.me, previous=head, state=head.digest, life=bytes(32), settings=SETTINGS, deal=deal
        )

    async def _fetch(self, value: Value, initial: bytes) -> CertifiedState | None:
        self.fetched.append(value.round)
        await trio.lowlevel.checkpoint()
        return self.ledger.states[value.round] if value.round in self.peers_have else None

    def target(self, round: int) -> Target:
        return Target(round, self.ledger.chain.value(round).hash)

    def hears(self, round: int, *, asked: bool = True) -> None:
        consent = make_consent(self.other, self.ledger.chain.head, self.target(round), asked=asked)
        self.machine.receive(self.other.peer_id, consent, 0.0)

    def advise(self) -> list[Effect]:
        return list(self.going_back.advise(self.machine, 0.0))

    async def settled(self) -> None:
        """Wait for the state that is being got, and tell the engine's part of it."""
        while not self.given:
            self._arrived = trio.Event()
            await self._arrived.wait()
        event = self.given.pop(0)
        assert isinstance(event, StateHeld)
        self.going_back.held(event, self.machine)


def at_work(bench: Bench, main: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.going_back.run)
            await main()
            nursery.cancel_scope.cancel()

    run(whole)


def consents(effects: Sequence[Effect]) -> list[tuple[int, bool]]:
    said = [effect.message for effect in effects if isinstance(effect, Broadcast)]
    return [(message.target.round, message.asked) for message in said if isinstance(message, Consent)]


def test_order_is_said_in_every_round_once_the_state_is_on_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3, 6])

    async def main() -> None:
        await bench.going_back.order(3)
        assert consents(bench.advise()) == []
        await bench.settled()
        assert (bench.folder / "rollback" / "3.safetensors").exists()
        assert bench.machine.agreement.digest_of(bench.target(3)) == bench.ledger.chain.value(3).digest
        assert consents(bench.advise()) == [(3, True)]
        assert bench.advise() == []
        await bench.going_back.begin_round()
        bench.ledger.certify()
        bench.machine = bench.new_machine()
        await bench.going_back.begin_round()
        assert consents(bench.advise()) == [(3, True)]
        assert (bench.folder / "rollback" / "3.safetensors").exists()
        await bench.going_back.withdraw()
        bench.machine = bench.new_machine()
        assert bench.advise() == []

    at_work(bench, main)


@pytest.mark.parametrize(
    ("round", "words"),
    [
        (0, ["--to 0", "does not have the state of that round, but of round 2, 3"]),
        (6, ["--to 6", "the swarm is at round 6"]),
        (4, ["--to 4", "does not have the state of that round, but of round 2, 3"]),
    ],
)
def test_order_that_cannot_be_is_refused_in_one_line(tmp_path: Path, round: int, words: list[str]) -> None:
    bench = Bench(tmp_path, saved=[2, 3, 6])
    with pytest.raises(ConfigError) as caught:
        run(partial(bench.going_back.order, round))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "losses", "agrees"),
    [
        ("always", {}, True),
        ("never", {3: 1.0, 6: 9.0}, False),
        ("spike", {}, False),  # it cannot tell
        ("spike", {6: 9.0}, False),
        ("spike", {3: 1.0, 6: 1.04}, False),
        ("spike", {3: 1.0, 6: 1.06}, True),
        ("spike", {3: 1.0, 5: 2.0, 6: 0.9}, False),  # it went by
        ("spike", {3: 1.0, 5: 2.0}, True),  # that of round 6 is not measured yet
        ("spike", {3: 1.0, 6: float("nan")}, True),
        ("spike", {3: -1.0, 6: -0.9}, True),
        ("spike", {2: 1.0, 6: 1.06}, True),  # round 3 itself was not evaluated
        ("spike", {1: 0.5, 2: 1.1, 6: 1.06}, False),
    ],
)
def test_policy_decides_whether_others_are_followed(
    tmp_path: Path, policy: RollbackPolicy, losses: dict[int, float], agrees: bool
) -> None:
    bench = Bench(tmp_path, policy=policy, saved=[3])
    for round, loss in losses.items():
        bench.going_back.note(Evaluated(round=round, value=loss))

    async def main() -> None:
        bench.hears(3)
        assert bench.advise() == []
        if agrees:
            await bench.settled()
        assert consents(bench.advise()) == ([(3, False)] if agrees else [])

    at_work(bench, main)


def test_losses_of_an_earlier_life_count_and_those_of_abandoned_rounds_do_not(tmp_path: Path) -> None:
    def evaluated(round: int, loss: float | None) -> str:
        return json.dumps({"at": 0.0, "event": "evaluated", "round": round, "loss": loss, "metric": "loss"})

    folder = tmp_path / "me"
    folder.mkdir()
    told = [evaluated(3, 9.0), evaluated(3, 1.0), evaluated(4, None), "{", '{"event": "left"}', evaluated(8, 9.0)]
    (folder / "events.jsonl").write_text("\n".join(told) + "\n" + evaluated(6, 1.2)[:-3])
    bench = Bench(tmp_path, saved=[3])
    assert bench.going_back._losses == {3: 1.0, 8: 9.0}
    run(bench.going_back.begin_round)  # the newest round is 6
    assert bench.going_back._losses == {3: 1.0}
    assert past_losses(tmp_path / "none") == {}


def test_policy_follows_what_a_user_ordered_and_no_other_policy(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="always", saved=[3])
    bench.hears(3, asked=False)
    bench.advise()
    assert bench.given == []
    assert bench.going_back._jobs.statistics().current_buffer_used == 0


def test_state_for_a_vote_comes_from_peers_and_is_tried_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never")
    rollback = Bench(tmp_path / "another", policy="never").ledger.go_back(2).value

    async def main() -> None:
        bench.going_back.need(rollback)
        assert bench.advise() == []
        began = trio.current_time()
        await bench.settled()
        assert trio.current_time() - began == pytest.approx(RETRY_S, abs=0.1)
        assert bench.machine.agreement.digest_of(bench.target(2)) is None
        bench.peers_have.add(2)
        assert bench.advise() == []
        await bench.settled()
        assert bench.fetched == [2, 2]
        assert bench.machine.agreement.digest_of(bench.target(2)) == rollback.digest
        assert consents(bench.advise()) == []  # it votes, but does not want it
        bench.going_back.need(rollback)  # said again as soon as it is asked for again
        assert [type(event) for event in bench.given] == [StateHeld]

    at_work(bench, main)


def test_what_was_kept_goes_when_it_can_no_longer_be_gone_back_to(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3])

    async def main() -> None:
        await bench.going_back.begin_round()
        await bench.going_back.order(3)
        bench.advise()
        await bench.settled()
        bench.ledger.go_back(3)
        bench.machine = bench.new_machine()
        await bench.going_back.begin_round()
        assert not (bench.folder / "rollback" / "3.safetensors").exists()
        assert bench.advise() == []  # the order is carried out

    at_work(bench, main)


def test_state_that_is_another_than_was_certified_is_not_shown(tmp_path: Path) -> None:
    bench = Bench(tmp_path, saved=[3])
    certified = bench.ledger.chain.value(3).digest

    async def main() -> None:
        for digest in (None, bytes(32)):
            assert bench.going_back.held(StateHeld(bench.target(3), digest), bench.machine) == ()
            assert bench.machine.agreement.digest_of(bench.target(3)) is None
        bench.going_back.held(StateHeld(bench.target(3), certified), bench.machine)
        assert bench.machine.agreement.digest_of(bench.target(3)) == certified

    run(main)


# -- restarts ------------------------------------------------------------------------------------------------


def test_order_outlives_a_restart_until_it_is_carried_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3])

    async def ordered() -> None:
        await bench.going_back.order(3)

    async def goes_on() -> None:
        await bench.going_back.begin_round()
        assert [type(notice) for notice in bench.notices] == [Notice]
        assert "still proposing to go back to round 3; `shoal rollback --withdraw`" in str(bench.notices)
        assert bench.advise() == []
        await bench.settled()
        assert consents(bench.advise()) == [(3, True)]
        bench.ledger.certify()
        bench.machine = bench.new_machine()
        await bench.going_back.begin_round()
        assert len(bench.notices) == 1
        assert consents(bench.advise()) == [(3, True)]

    async def carried_out() -> None:
        bench.ledger.go_back(3)
        await bench.going_back.begin_round()

    run(ordered)
    bench.restart()
    at_work(bench, goes_on)
    bench.restart()  # in the middle of the next round
    run(carried_out)
    assert not (bench.folder / NAME).exists()
    bench.notices.clear()
    bench.restart()
    run(bench.going_back.begin_round)
    assert bench.notices == []
    assert bench.advise() == []


def test_order_that_was_withdrawn_stays_withdrawn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[2, 3])

    async def main() -> None:
        await bench.going_back.order(2)
        await bench.going_back.order(3)  # in place of the first
        bench.restart()
        assert bench.going_back._asked == bench.target(3)
        await bench.going_back.withdraw()
        bench.restart()
        assert bench.going_back._asked is None
        await bench.going_back.withdraw()

    run(main)


@pytest.mark.parametrize("content", [b"", b"\xff" * 60, None])
def test_damaged_order_is_told_and_nothing_else_of_it(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3])
    run(partial(bench.going_back.order, 3))
    path = bench.folder / NAME
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with caplog.at_level(logging.WARNING):
        bench.restart()
    assert f"{path} is damaged and is ignored; order again with `shoal rollback --to`" in caplog.text
    assert bench.advise() == []


# -- the initial state ---------------------------------------------------------------------------------------


def test_initial_state_can_be_gone_back_to_where_it_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[0, 6])
    initial = header_of(bench.ledger.states[0], GRID).digest

    async def main() -> None:
        await bench.going_back.order(0)
        assert bench.advise() == []
        await bench.settled()
        assert bench.fetched == []
        assert bench.machine.agreement.digest_of(bench.target(0)) == initial
        assert consents(bench.advise()) == [(0, True)]

    at_work(bench, main)


def test_another_initial_state_than_was_proposed_is_replaced_for_the_vote(tmp_path: Path) -> None:
    """This founder drew other bits than the swarm began with: it votes for the S(0) that was proposed, or for none."""
    bench = Bench(tmp_path, policy="never")
    bench.save(state_of(0, seed=7))
    other = Bench(tmp_path / "another", policy="never")
    rollback = other.ledger.go_back(0).value

    async def main() -> None:
        await bench.going_back.order(0)
        bench.advise()
        await bench.settled()
        assert bench.machine.agreement.digest_of(bench.target(0)) == header_of(state_of(0, seed=7), GRID).digest
        bench.going_back.need(rollback)
        assert bench.given == []
        bench.advise()
        await bench.settled()  # no peer has it
        bench.peers_have.add(0)
        bench.advise()
        await bench.settled()
        assert bench.fetched == [0, 0]
        assert bench.machine.agreement.digest_of(bench.target(0)) == rollback.digest
        kept = read_state(bench.folder / "rollback" / "0.safetensors")
        assert header_of(kept, GRID).digest == rollback.digest
        bench.going_back.need(rollback)
        assert bench.given == [StateHeld(bench.target(0), rollback.digest)]

    at_work(bench, main)
