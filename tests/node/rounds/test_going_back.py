"""What a member does about rollbacks: its user's order, its policy for others', and the state that comes first."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from shoal.collectives.partition import deal
from shoal.collectives.state import CertifiedState, header_of
from shoal.node.rounds.evaluations import past_losses
from shoal.node.rounds.order_file import FILES, OrderFiles
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.errands import Performers, carry_out
from shoal.node.state.state_files import read_state, write_state
from shoal.protocol.agreement import Broadcast
from shoal.protocol.catching_up import CatchingUp
from shoal.protocol.donors import DonorScores
from shoal.protocol.effects import (
    DropOrder,
    Effect,
    FindEarlierRounds,
    ForgetEarlier,
    KeepOrder,
    MemberEffect,
    Steps,
    Tell,
)
from shoal.protocol.errands import AskHolders, FetchState, FindBegun, FindEarlier, Holders, KeepEarlier, Replay
from shoal.protocol.errors import ConfigError
from shoal.protocol.fork_watch import ForkWatch
from shoal.protocol.going_back import RETRY_S, GoingBack
from shoal.protocol.inputs import Evaluated, Loaded, OfState, StateHeld
from shoal.protocol.messages import Consent, Target, Value
from shoal.protocol.planning import RoundSettings
from shoal.protocol.round import RoundMachine
from shoal.protocol.terms import RollbackPolicy, make_consent
from tests.node.donors import World
from tests.node.ledger import GRID, OUTER, Ledger, state_of

NAME = FILES[Target][0]
SETTINGS = RoundSettings(
    numel=GRID.numel, chunk_values=GRID.chunk_values, codec="int8", grace_s=3, reduce_deadline_s=30, weight_cap=4
)


class Bench:
    """A member of three in the round after those that the ledger certified; those in `saved` are on its node's disk.

    Its effects and errands are done there for real; what is not there, peers give if they are said to have it.
    """

    def __init__(self, folder: Path, *, policy: RollbackPolicy = "spike", saved: Sequence[int] = ()) -> None:
        self.ledger = Ledger()
        self.ledger.certify(6)
        self.me, self.other, self.third = self.ledger.founders
        world = World(folder, self.ledger)
        self.folder = folder / "me"
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        for round in saved:
            self.save(self.ledger.states[round])
        self.policy = policy
        self.notices: list[str] = []
        self.given: list[StateHeld] = []
        self.fetched: list[int] = []
        self.peers_have: set[int] = set()
        self.now = 0.0
        self.earlier = EarlierStates(self.folder, chain=self.ledger.chain, cache=world.cache, outer=OUTER)
        self.orders = OrderFiles(self.folder)
        self.performers: Performers = {
            FindEarlier: lambda request: self.earlier.find(request.round, request.initial),
            KeepEarlier: lambda request: self.earlier.keep(request.state),
            FindBegun: self._nothing_begun,
            AskHolders: self._holders,
            FetchState: self._fetched,
            Replay: self._replayed,
        }
        self.restart()

    def restart(self) -> None:
        """Be a new process over the same folder, in the round after the head."""
        here: Any = SimpleNamespace(
            chain=self.ledger.chain,
            replayed_rounds=0,
            takes_images=False,
            linked=lambda: frozenset({self.other.peer_id}),
        )
        catching_up = CatchingUp(self.me.peer_id, here, DonorScores(), ForkWatch(here))
        self.going_back = GoingBack(self.me.peer_id, here, catching_up, self.policy)
        self.going_back.loaded(Loaded(self.orders.read(), past_losses(self.folder / "events.jsonl")))
        self.machine = self.new_machine()

    def save(self, state: CertifiedState) -> None:
        """Have a state on disk as its saver leaves it."""
        write_state(self.folder / "state" / f"{state.round}.safetensors", state, header_of(state, GRID))

    def new_machine(self, *, member: bool = True) -> RoundMachine:
        head = self.ledger.chain.head
        if not member:
            head = msgspec.structs.replace(head, members=(self.other.peer_id, self.third.peer_id))
        return RoundMachine(
            identity=self.me, previous=head, state=head.digest, life=bytes(32), settings=SETTINGS, deal=deal
        )

    # -- what peers have -------------------------------------------------------------------------------------

    async def _nothing_begun(self, request: FindBegun) -> list[tuple[int, bytes]]:
        return []

    async def _holders(self, request: AskHolders) -> Holders:
        round = request.value.round
        self.fetched.append(round)
        has = round in self.peers_have and set(request.peers) == {self.other.peer_id}
        found = {self.other.peer_id: header_of(self.ledger.states[round], GRID)} if has else {}
        return Holders(found, [peer for peer in request.peers if peer not in found])

    async def _fetched(self, request: FetchState) -> CertifiedState:
        return self.ledger.states[request.value.round]

    async def _replayed(self, request: Replay) -> OfState:
        return request.state

    # -- its driver ------------------------------------------------------------------------------------------

    def does(self, steps: Steps) -> None:
        """All effects, in order. Raises ConfigError for an order that cannot be."""
        came: Any = None
        while True:
            try:
                effect = steps.send(came)
            except StopIteration:
                return
            came = self._do(effect)

    def _do(self, effect: MemberEffect) -> Any:
        match effect:
            case KeepOrder(order):
                return self.orders.write(order)
            case DropOrder(kind):
                return self.orders.remove(kind)
            case FindEarlierRounds():
                return self.earlier.rounds()
            case ForgetEarlier(besides):
                return trio.run(self.earlier.forget, besides)
            case Tell(text):
                return self.notices.append(text)
        raise AssertionError(effect)

    def order(self, round: int) -> None:
        self.does(self.going_back.order(round))

    def withdraw(self) -> None:
        self.does(self.going_back.withdraw())

    def begins_round(self) -> None:
        self.does(self.going_back.begin_round())

    def loses(self, round: int, loss: float) -> None:
        self.going_back.evaluated(Evaluated(round, loss))

    def target(self, round: int) -> Target:
        return Target(round, self.ledger.chain.value(round).hash)

    def hears(self, round: int, *, asked: bool = True) -> None:
        consent = make_consent(self.other, self.ledger.chain.head, self.target(round), asked=asked)
        self.machine.receive(self.other.peer_id, consent, self.now)

    def need(self, value: Value) -> Sequence[Effect]:
        return self.going_back.need(value, self.machine, self.now)

    def held(self, digest: bytes | None, round: int) -> Sequence[Effect]:
        return self.going_back.held(StateHeld(self.target(round), digest), self.machine, self.now)

    def says(self) -> list[tuple[int, bool]]:
        """Where it consents to go back to in this round, and whether its user ordered that."""
        return consents(self.going_back.advise(self.machine, self.now))

    def seeks(self) -> bool:
        """Seek the state that it lacks, if that is due; whether it was."""
        errand = self.going_back.due(self.machine, self.now)
        if errand is None:
            return False
        assert self.going_back.due(self.machine, self.now) is None, "one after the other"
        event = trio.run(carry_out, errand, self.performers)
        self.given.append(event)
        self.going_back.held(event, self.machine, self.now)
        return True


def consents(effects: Sequence[Effect]) -> list[tuple[int, bool]]:
    said = [effect.message for effect in effects if isinstance(effect, Broadcast)]
    return [(message.target.round, message.asked) for message in said if isinstance(message, Consent)]


def test_order_is_said_in_every_round_once_the_state_is_on_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3, 6])
    bench.order(3)
    assert bench.says() == []
    assert bench.seeks()
    assert (bench.folder / "rollback" / "3.safetensors").exists()
    assert bench.machine.agreement.digest_of(bench.target(3)) == bench.ledger.chain.value(3).digest
    assert bench.says() == [(3, True)]
    assert bench.says() == []
    bench.begins_round()
    bench.ledger.certify()
    bench.machine = bench.new_machine()
    bench.begins_round()
    assert bench.says() == [(3, True)]
    assert not bench.seeks()
    assert (bench.folder / "rollback" / "3.safetensors").exists()
    bench.withdraw()
    bench.machine = bench.new_machine()
    assert bench.says() == []


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
        bench.order(round)
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
        bench.loses(round, loss)
    bench.hears(3)
    assert bench.says() == []
    assert bench.seeks() is agrees
    assert bench.says() == ([(3, False)] if agrees else [])


def test_losses_of_an_earlier_life_count_and_those_of_abandoned_rounds_do_not(tmp_path: Path) -> None:
    def evaluated(round: int, loss: float | None) -> str:
        return json.dumps({"at": 0.0, "event": "evaluated", "round": round, "loss": loss, "metric": "loss"})

    folder = tmp_path / "me"
    folder.mkdir()
    told = [evaluated(3, 9.0), evaluated(3, 1.0), evaluated(4, None), "{", '{"event": "left"}', evaluated(8, 9.0)]
    (folder / "events.jsonl").write_text("\n".join(told) + "\n" + evaluated(6, 1.2)[:-3])
    bench = Bench(tmp_path, saved=[3])
    assert bench.going_back._losses == {3: 1.0, 8: 9.0}
    bench.begins_round()  # the newest round is 6
    assert bench.going_back._losses == {3: 1.0}
    assert past_losses(tmp_path / "none") == {}


def test_policy_follows_what_a_user_ordered_and_no_other_policy(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="always", saved=[3])
    bench.hears(3, asked=False)
    assert bench.says() == []
    assert not bench.seeks()


def test_state_for_a_vote_comes_from_peers_and_is_tried_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never")
    rollback = Bench(tmp_path / "another", policy="never").ledger.go_back(2).value
    assert bench.need(rollback) == ()
    assert bench.seeks()
    assert bench.machine.agreement.digest_of(bench.target(2)) is None
    bench.peers_have.add(2)
    bench.now = RETRY_S - 0.1
    assert not bench.seeks()
    bench.now = RETRY_S
    assert bench.seeks()
    assert bench.fetched.count(2) == 2
    assert [event.digest for event in bench.given] == [None, rollback.digest]
    assert bench.machine.agreement.digest_of(bench.target(2)) == rollback.digest
    assert bench.says() == []  # it votes, but does not want it
    bench.machine = bench.new_machine()
    bench.need(rollback)  # shown to the next machine as soon as that asks
    assert bench.machine.agreement.digest_of(bench.target(2)) == rollback.digest
    assert not bench.seeks()


def test_what_was_kept_goes_when_it_can_no_longer_be_gone_back_to(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3])
    bench.begins_round()
    bench.order(3)
    bench.seeks()
    bench.ledger.go_back(3)
    bench.machine = bench.new_machine()
    bench.begins_round()
    assert not (bench.folder / "rollback" / "3.safetensors").exists()
    assert bench.says() == []  # the order is carried out


def test_state_that_is_another_than_was_certified_is_not_shown(tmp_path: Path) -> None:
    bench = Bench(tmp_path, saved=[3])
    certified = bench.ledger.chain.value(3).digest
    for digest in (None, bytes(32)):
        assert bench.held(digest, 3) == ()
        assert bench.machine.agreement.digest_of(bench.target(3)) is None
    bench.held(certified, 3)
    assert bench.machine.agreement.digest_of(bench.target(3)) == certified


# -- restarts ------------------------------------------------------------------------------------------------


def test_order_outlives_a_restart_until_it_is_carried_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3])
    bench.order(3)
    bench.restart()
    bench.begins_round()
    assert len(bench.notices) == 1
    assert "still proposing to go back to round 3; `shoal rollback --withdraw`" in bench.notices[0]
    assert bench.says() == []
    assert bench.seeks()
    assert bench.says() == [(3, True)]
    bench.ledger.certify()
    bench.machine = bench.new_machine()
    bench.begins_round()
    assert len(bench.notices) == 1
    assert bench.says() == [(3, True)]
    bench.restart()  # in the middle of the next round
    bench.ledger.go_back(3)
    bench.begins_round()
    assert not (bench.folder / NAME).exists()
    bench.notices.clear()
    bench.restart()
    bench.begins_round()
    assert bench.notices == []
    assert bench.says() == []


def test_state_of_an_order_is_kept_while_this_node_is_no_member(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3, 6])
    bench.order(3)
    bench.machine = bench.new_machine(member=False)
    bench.begins_round()
    assert bench.seeks()
    assert bench.says() == []
    (bench.folder / "state" / "3.safetensors").unlink()  # newer ones were saved
    bench.machine = bench.new_machine()
    bench.begins_round()
    assert bench.says() == [(3, True)]


def test_state_of_an_order_outlives_rounds_in_which_it_is_not_read_yet(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3, 6])
    bench.order(3)
    assert bench.seeks()
    (bench.folder / "state" / "3.safetensors").unlink()
    bench.restart()
    for _ in range(2):
        bench.begins_round()
    assert bench.seeks()
    assert bench.fetched == []
    assert bench.says() == [(3, True)]


def test_order_that_was_withdrawn_stays_withdrawn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[2, 3])
    bench.order(2)
    bench.order(3)  # in place of the first
    bench.restart()
    assert bench.orders.read() == (bench.target(3),)
    bench.withdraw()
    bench.restart()
    assert bench.orders.read() == ()
    assert not bench.seeks()
    bench.withdraw()


@pytest.mark.parametrize("content", [b"", b"\xff" * 60, None])
def test_damaged_order_is_told_and_nothing_else_of_it(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, policy="never", saved=[3])
    bench.order(3)
    path = bench.folder / NAME
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with caplog.at_level(logging.WARNING):
        bench.restart()
    assert f"{path} is damaged and is ignored; order again with `shoal rollback --to`" in caplog.text
    assert bench.says() == []
    assert not bench.seeks()


# -- the initial state ---------------------------------------------------------------------------------------


def test_initial_state_can_be_gone_back_to_where_it_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="never", saved=[0, 6])
    initial = header_of(bench.ledger.states[0], GRID).digest
    bench.order(0)
    assert bench.seeks()
    assert bench.fetched == []
    assert bench.machine.agreement.digest_of(bench.target(0)) == initial
    assert bench.says() == [(0, True)]


def test_another_initial_state_than_was_proposed_is_replaced_for_the_vote(tmp_path: Path) -> None:
    """This founder drew other bits than the swarm began with: it votes for the S(0) that was proposed, or for none."""
    bench = Bench(tmp_path, policy="never")
    bench.save(state_of(0, seed=7))
    other = Bench(tmp_path / "another", policy="never")
    rollback = other.ledger.go_back(0).value
    bench.order(0)
    bench.seeks()
    assert bench.machine.agreement.digest_of(bench.target(0)) == header_of(state_of(0, seed=7), GRID).digest
    assert bench.need(rollback) == ()
    bench.seeks()  # no peer has it
    bench.peers_have.add(0)
    bench.now = RETRY_S
    bench.seeks()
    assert bench.fetched == [0, 0]
    assert bench.machine.agreement.digest_of(bench.target(0)) == rollback.digest
    kept = read_state(bench.folder / "rollback" / "0.safetensors")
    assert header_of(kept, GRID).digest == rollback.digest
    bench.need(rollback)
    assert not bench.seeks()
