"""Steps by speed: who has how many, that fast and slow arrive together, and that no claim does harm."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from shoal.collectives.state import CertifiedState
from shoal.node.outcome import HELD_OUT_LOSS, StepsMade
from shoal.node.training.fair_share import SteadySpeed, fair_steps
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer import Restarted
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Command,
    Contribution,
    Evaluated,
    Evaluating,
    Progress,
    Train,
    Trained,
)
from shoal.node.training.training_client import EVALUATING_S, STUCK_S, STUCK_TIMES, TrainingClient
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.wire import SwarmId

H = 40
PEERS = sorted(Identity.from_seed(bytes([n]) * 32).peer_id for n in range(4))


class Fleet:
    """Nodes of given speeds, in steps/s, that hear each other's records between two rounds."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = list(speeds)
        self.measured = [SteadySpeed() for _ in speeds]
        self.steps: list[int] = []

    def run_round(self) -> list[float]:
        """When each contribution is ready, in seconds from the round's beginning."""
        told = [node.per_s for node in self.measured]
        self.steps = [fair_steps(H, told[i], told[:i] + told[i + 1 :]) for i in range(len(told))]
        for node, speed in zip(self.measured, self.speeds, strict=True):
            node.measured(speed)
        return [steps / speed for steps, speed in zip(self.steps, self.speeds, strict=True)]


def spread(arrivals: Sequence[float]) -> float:
    return max(arrivals) / min(arrivals) - 1


def test_a_fleet_with_one_slow_node_arrives_together_from_the_second_round_on() -> None:
    fleet = Fleet([1.0, 1.0, 1.0, 0.25])
    assert spread(fleet.run_round()) == pytest.approx(3.0)
    for _ in range(3):
        assert spread(fleet.run_round()) < 0.1
        assert fleet.steps == [49, 49, 49, 12]  # of 160 in all: 160 · 1 / 3.25 and 160 · 0.25 / 3.25


@pytest.mark.parametrize("seed", range(20))
def test_fleets_of_many_speeds_arrive_together_and_train_on_as_much_as_before(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet([rng.uniform(0.25, 1.0) for _ in range(rng.randint(2, 9))])
    fleet.run_round()
    arrivals = fleet.run_round()
    assert spread(arrivals) < 0.1
    assert abs(sum(fleet.steps) - H * len(fleet.speeds)) <= len(fleet.speeds) / 2
    assert max(arrivals) <= H / min(fleet.speeds)


def test_equal_nodes_make_equal_steps_whatever_a_hundredth_of_their_speeds_was_told_when() -> None:
    assert fair_steps(100, 9.9, [9.7, 9.72, 9.58, 9.9, 9.67]) == 100
    assert fair_steps(100, 9.58, [9.7, 9.72, 9.9, 9.9, 9.67]) == 100
    assert fair_steps(100, 10.4, [10.0, 10.0, 10.0]) == 103, "more than that is a faster node"
    assert fair_steps(100, 10.0, [10.0, 10.0, 9.6]) == 101


def test_a_node_that_becomes_slow_is_planned_for_two_rounds_later() -> None:
    fleet = Fleet([1.0] * 4)
    for _ in range(4):
        fleet.run_round()
    fleet.speeds[2] = 0.25
    assert [spread(fleet.run_round()) > 1 for _ in range(4)] == [True, True, False, False]
    assert spread(fleet.run_round()) < 0.1


def test_nodes_of_one_speed_make_the_steps_of_the_manifest() -> None:
    assert [fair_steps(steps, 7.0, [7.0] * 4) for steps in (1, 2, 40, 1000)] == [1, 2, 40, 1000]
    assert fair_steps(H, 7.0, []) == H
    assert fair_steps(H, 0.0, [0.0, 0.0]) == H


def test_an_unknown_speed_counts_as_the_median() -> None:
    assert fair_steps(H, 0.0, [1.0, 2.0, 4.0]) == fair_steps(H, 2.0, [1.0, 2.0, 4.0]) == 36
    assert fair_steps(H, 4.0, [1.0, 2.0, 0.0]) == fair_steps(H, 4.0, [1.0, 2.0, 2.0]) == 71


def test_steps_are_bounded_and_never_none() -> None:
    slow, fast = [1000.0] * 3, [8000.0] * 3
    assert fair_steps(H, 1.0, [*slow, *fast]) == H // 8
    assert [fair_steps(steps, 1.0, [*slow, *fast]) for steps in (1, 4, 8, 9)] == [1, 1, 1, 2]
    assert fair_steps(H, 1e9, [0.01] * 49 + [1.0] * 50) == 8 * H  # 8 times the median, the mean of which is below 1


@pytest.mark.parametrize("claim", [1e15, 1e6, 1e-9, math.inf, math.nan, -5.0])
def test_a_claim_that_is_no_speed_costs_the_others_little(claim: float) -> None:
    for others in (2, 4, 9):
        honest = fair_steps(H, 1.0, [1.0] * (others - 1) + [claim])
        assert H / 5 <= honest <= H * 2


def test_speed_is_the_median_of_the_last_three_and_small_changes_are_no_news() -> None:
    speed = SteadySpeed()
    assert speed.per_s == 0.0
    assert not speed.measured(0.0)
    assert speed.measured(100.0)
    assert not speed.measured(104.0)
    assert speed.per_s == 102.0
    assert not speed.measured(1.0)  # one odd stretch
    assert speed.per_s == 100.0
    assert speed.measured(1.0)
    assert speed.per_s == 1.0


class Orders:
    """The trainer's side of a training client: what it was ordered."""

    def __init__(self) -> None:
        self.trains: list[Train] = []
        self.started = SimpleNamespace(metric=HELD_OUT_LOSS)

    async def send(self, command: Command) -> None:
        if isinstance(command, Train):
            self.trains.append(command)

    async def apply(self, order: Apply, anchor: Vector) -> None:
        pass


def contribution(*, steps_per_s: float, batch: int = 9) -> Contribution:
    """One of a single step, of so many tokens."""
    seconds, speed = 1 / steps_per_s, batch * steps_per_s
    return Contribution(number=1, round=1, tokens=batch, steps=1, loss=1.0, seconds=seconds, tokens_per_s=speed)


def steps_ordered(
    told: dict[PeerId, float] | None, mine: float, *, contribute: bool = True, at_once: bool = False
) -> int:
    trainer = Orders()
    speeds = None if told is None else lambda peers: [told[peer] for peer in peers if peer in told]
    training_client = TrainingClient(trainer, seed=0, inner_steps=H, speeds=speeds)  # type: ignore[arg-type]
    training_client.heard(contribution(steps_per_s=mine))
    assert training_client.speed_is_news
    head = genesis(SwarmId(bytes(32)), PEERS)
    trio.run(lambda: training_client.train(head, PEERS[0], 0, contribute=contribute, at_once=at_once))
    (order,) = trainer.trains
    return order.steps


def test_a_round_is_ordered_with_the_fair_share_of_the_members_that_are_there() -> None:
    told = dict.fromkeys(PEERS[1:], 100.0)
    assert steps_ordered(told, 25.0) == 12
    assert steps_ordered(told | {PEERS[3]: 25.0}, 100.0) == 49
    assert steps_ordered({PEERS[1]: 100.0, "somebody else": 1.0}, 100.0) == H  # type: ignore[dict-item]
    assert steps_ordered(told, 25.0, contribute=False) == H
    assert steps_ordered(None, 25.0) == H


def test_who_has_larger_batches_makes_as_many_steps_as_who_needs_as_long_for_one() -> None:
    told = dict.fromkeys(PEERS[1:], 100.0)
    client = TrainingClient(trainer := Orders(), seed=0, inner_steps=H, speeds=lambda peers: list(told.values()))  # type: ignore[arg-type]
    client.heard(contribution(steps_per_s=100.0, batch=400))
    trio.run(lambda: client.train(genesis(SwarmId(bytes(32)), PEERS), PEERS[0], 0))
    assert (client.steady_tokens_per_s, client.steady_steps_per_s) == (40_000.0, 100.0)
    assert [order.steps for order in trainer.trains] == [H]


def test_who_is_to_contribute_at_once_makes_one_more_step() -> None:
    assert steps_ordered(dict.fromkeys(PEERS[1:], 100.0), 100.0, at_once=True) == 1


def test_an_order_says_who_contributed_to_the_state_below_it_where_that_was_certified_here() -> None:
    trainer = Orders()
    client = TrainingClient(trainer, seed=0, inner_steps=H)  # type: ignore[arg-type]
    head = genesis(SwarmId(bytes(32)), PEERS)
    other = genesis(SwarmId(bytes(range(32))), PEERS)
    client.certified(other, 4, ())
    client.certified(head, 3, PEERS[2:4])
    for value in (head, other):
        trio.run(lambda value=value: client.train(value, PEERS[0], 0))
    client.certified(head, 0, PEERS)
    trio.run(lambda: client.train(head, PEERS[0], 0))
    told = [(order.contributors, order.missing) for order in trainer.trains]
    assert told == [(3, tuple(PEERS[2:4])), (0, ()), (0, ())], "of more than a few nobody is named"


def test_how_far_a_stretch_is_is_known_until_its_contribution_is_made() -> None:
    client = TrainingClient(Orders(), seed=0, inner_steps=H)  # type: ignore[arg-type]
    trio.run(lambda: client.train(genesis(SwarmId(bytes(32)), PEERS), PEERS[0], 0))
    assert client.steps_made is None
    client.heard(Progress(round=1, step=7, loss=1.0, tokens_per_s=50.0))
    assert client.steps_made == StepsMade(round=1, step=7, steps=H)
    client.heard(Contribution(number=1, round=1, tokens=9, steps=H, loss=1.0, seconds=1.0, tokens_per_s=50.0))
    assert client.steps_made is None
    client.heard(Progress(round=1, step=2, loss=1.0, tokens_per_s=50.0))  # beyond it, of the overlap
    assert client.steps_made is None


def test_speed_of_before_a_sleep_is_forgotten_and_that_of_the_stretch_with_it_in_is_none() -> None:
    trainer = Orders()
    told = dict.fromkeys(PEERS[1:], 100.0)
    client = TrainingClient(trainer, seed=0, inner_steps=H, speeds=lambda peers: list(told.values()))  # type: ignore[arg-type]
    head = genesis(SwarmId(bytes(32)), PEERS)

    def contributes(per_s: float) -> None:
        client.heard(contribution(steps_per_s=per_s, batch=1))

    def steps() -> int:
        trio.run(lambda: client.train(head, PEERS[0], 0))
        return trainer.trains[-1].steps

    for _ in range(3):
        contributes(800.0)
    assert (client.steady_tokens_per_s, steps()) == (800.0, 4 * H * 8 // 11)
    client.measure_anew()
    assert (client.steady_tokens_per_s, steps()) == (0.0, H), "not known, and as many as the others"
    client.heard(Progress(round=1, step=1, loss=1.0, tokens_per_s=0.5))
    contributes(0.5)
    assert (client.steady_tokens_per_s, client.loss, steps()) == (0.0, 1.0, H)
    client.heard(Progress(round=2, step=1, loss=1.0, tokens_per_s=50.0))
    assert client.steady_tokens_per_s == 50.0
    contributes(100.0)
    assert (client.steady_tokens_per_s, client.speed_is_news, steps()) == (100.0, True, H)
    assert client.steady_steps_per_s == 100.0


def test_desk_knows_whether_its_trainer_has_done_what_it_was_told() -> None:
    trainer = Orders()
    training_client = TrainingClient(trainer, seed=0, inner_steps=H)  # type: ignore[arg-type]
    head = genesis(SwarmId(bytes(32)), PEERS)
    endings: list[Contribution | Trained | Restarted] = [
        Contribution(number=1, round=1, tokens=9, steps=1, loss=1.0, seconds=1.0, tokens_per_s=9.0),
        Trained(round=1, steps=1, loss=1.0, seconds=1.0, tokens_per_s=9.0),
        Restarted(cause="SIGKILL", round=0),
    ]
    for ending in endings:
        assert training_client.resting
        trio.run(lambda: training_client.train(head, PEERS[0], 0))
        training_client.heard(Progress(round=1, step=1, loss=1.0, tokens_per_s=9.0))
        assert not training_client.resting
        training_client.heard(ending)
    assert training_client.resting
    assert len(trainer.trains) == len(endings)


def test_loop_that_hangs_is_stuck_though_it_is_given_new_states_to_evaluate() -> None:
    now = [1000.0]
    client = TrainingClient(Orders(), seed=0, inner_steps=H, clock=lambda: now[0])  # type: ignore[arg-type]
    head = genesis(SwarmId(bytes(32)), PEERS)
    state = CertifiedState.initial(np.zeros(8, np.float32), bytes(32))
    for round in range(1, 8):  # the others go on
        assert client.stuck == (now[0] > 1000.0 + STUCK_S)
        trio.run(lambda round=round: client.stand_on(replace(state, round=round), state.anchor, taken=0))
        client.heard(Applied(round=round))  # a thread of the loop takes them
        trio.run(lambda: client.train(head, PEERS[0], 0))
        now[0] += STUCK_S / 4


def test_trainer_that_makes_no_step_for_long_is_stuck_and_one_that_is_slow_rests_or_evaluates_is_not() -> None:
    now = [1000.0]
    client = TrainingClient(Orders(), seed=0, inner_steps=H, clock=lambda: now[0])  # type: ignore[arg-type]
    head = genesis(SwarmId(bytes(32)), PEERS)

    def stuck_after(seconds: float) -> bool:
        now[0] += seconds
        return client.stuck

    def steps() -> None:
        client.heard(Progress(round=1, step=1, loss=1.0, tokens_per_s=9.0))

    assert not stuck_after(2 * STUCK_S), "nothing was ordered"
    trio.run(lambda: client.train(head, PEERS[0], 0))
    assert not stuck_after(STUCK_S)
    trio.run(lambda: client.train(head, PEERS[0], 0))  # a round went on without it
    client.heard(Applied(round=1))
    assert stuck_after(1)
    steps()
    assert not client.stuck
    now[0] += 1
    steps()
    assert stuck_after(STUCK_S + 1)
    client.paused = True
    assert not client.stuck, "its user has the accelerator"
    trio.run(client.resume)
    assert not client.stuck
    steps()
    now[0] += STUCK_S / 2
    steps()
    assert not stuck_after(2 * STUCK_S), "its steps take long"
    assert stuck_after((STUCK_TIMES / 2 - 2) * STUCK_S + 1)
    steps()
    assert not stuck_after(STUCK_TIMES * STUCK_S), "each of its steps takes minutes, and the first was not waited for"
    steps()
    now[0] += 1
    steps()
    assert stuck_after(STUCK_S + 1), "it is quick again"
    client.heard(Restarted(cause="SIGKILL", round=0))
    assert not client.stuck
    trio.run(lambda: client.train(head, PEERS[0], 0))
    client.heard(Evaluating(round=1))
    assert not stuck_after(2 * STUCK_S), "it evaluates"
    client.heard(Evaluated(round=1, value=1.0))
    assert not stuck_after(STUCK_S)
    assert stuck_after(1)
    client.heard(Evaluating(round=2))
    now[0] += 1
    steps()
    assert stuck_after(EVALUATING_S - STUCK_S), "it trains, and evaluates no more"
    client.heard(Contribution(number=1, round=1, tokens=9, steps=H, loss=1.0, seconds=1.0, tokens_per_s=50.0))
    assert not stuck_after(2 * STUCK_S)
