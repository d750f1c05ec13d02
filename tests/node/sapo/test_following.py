"""An agent that only samples beside averaged policies: its policy is the certified one, to the bit, and no other."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.node.loops.external_trainer import Detached
from shoal.node.loops.loop_daemon import MANIFEST_NAME
from shoal.node.pipe import Pause, Resume, Stop
from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.char_policy import CharPolicy
from shoal.node.sapo.following import Following
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.learner import Learner, LearnerSettings
from shoal.node.training.trainer_messages import Evaluate, Evaluated, WriteInitial
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.manifest import render_manifest
from tests.node import loop_ends
from tests.node.checkpoint_lab import manifest_of
from tests.node.ledger import identity
from tests.node.loop_ends import DaemonEnd, Ends, flat
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import score, sum_task
from tests.node.sapo.test_averaging import SETTINGS

SIZE = 4


class Kept:
    """A `Sharing` that keeps what it is offered."""

    def __init__(self) -> None:
        self.groups: list[JudgedGroup] = []

    def offer(self, groups: list[JudgedGroup]) -> None:  # type: ignore[override]
        self.groups += groups

    def take(self, count: int) -> list[JudgedGroup]:
        return []


def sampler(sharing: Kept) -> Learner:
    return Learner(
        CharPolicy(SETTINGS, seed=1),
        LearnerSettings(local=2, group_size=SIZE, trains=False),
        draw=lambda round, index: sum_task(round, index, most=1),
        score=score,
        sharing=sharing,
        draws=assigned(1),
    )


def parameters(learner: Learner) -> np.ndarray:
    assert isinstance(learner.policy, CharPolicy)
    return flat(learner.policy.model)


@pytest.fixture(autouse=True)
def _manifest(tmp_path: Path) -> None:
    """That of the node, in its folder."""
    (tmp_path / MANIFEST_NAME).write_text(render_manifest(manifest_of()))


def test_policy_is_each_certified_state_to_the_bit_and_groups_name_its_round(tmp_path: Path) -> None:
    kept = Kept()
    learner = sampler(kept)
    drawn = parameters(learner)
    states = [np.random.default_rng(seed).normal(size=drawn.size).astype(np.float32) for seed in (1, 2)]
    sampled, moved = threading.Event(), threading.Event()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(states[0], 4, fresh=True)
        await end.train(5, steps=2)  # what no daemon orders of it, and it does not do
        await end.wait(sampled)
        await end.apply(states[1], 7)
        moved.set()
        await end.send(Evaluate(round=7))
        assert (await end.expect(Evaluated)).value == pytest.approx(1 - reports[0].reward)
        await end.send(Stop())

    reports: list[RoundReport] = []
    histories: list[int | None] = []

    def begun() -> None:
        histories.append(learner.version)

    with Ends(tmp_path, daemon), Following(learner, tmp_path, replays=False, on_fresh=begun) as beside:
        assert np.array_equal(parameters(learner), states[0])
        reports.append(learner.run_round())
        assert np.array_equal(parameters(learner), states[0]), "what it samples teaches it nothing"
        sampled.set()
        assert moved.wait(60)
        while beside.count(reports[0], group_size=SIZE):
            pass
        assert beside.over
        assert np.array_equal(parameters(learner), states[1])
        learner.run_round()
    assert [group.policy_version for group in kept.groups] == [4, 4, 7, 7]
    assert [group.round for group in kept.groups] == [0, 0, 1, 1]
    assert not learner.optimizer.state, "it holds no moments"
    assert histories == [None], "told before the first, and not of what goes on from it"


@pytest.mark.parametrize("judges", [False, True])
def test_where_groups_are_replayed_its_policy_is_the_image_of_the_certified_one(tmp_path: Path, judges: bool) -> None:
    learner = sampler(Kept())
    state = np.random.default_rng(1).normal(size=parameters(learner).size).astype(np.float32)

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(state, 4, fresh=True)
        await end.wait(over)

    over = threading.Event()
    with Ends(tmp_path, daemon), Following(learner, tmp_path, replays=True, judges=judges) as beside:
        image = torch.from_numpy(state).bfloat16().float().numpy()
        assert not np.array_equal(image, state)
        assert np.array_equal(parameters(learner), image)
        assert beside.past.rounds == ((4,) if judges else ()), "who judges nothing keeps none"
        over.set()


def test_pause_of_its_user_holds_it_between_two_rounds_and_a_daemon_that_dies_ends_it(tmp_path: Path) -> None:
    learner = sampler(Kept())
    held = threading.Event()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(np.ones_like(parameters(learner)), 1, fresh=True)
        await end.send(Pause())
        await end.wait(held)
        await end.apply(np.zeros_like(parameters(learner)), 2)
        await end.send(Resume())
        await end.wait(went_on)

    went_on = threading.Event()
    with Ends(tmp_path, daemon), Following(learner, tmp_path, replays=False) as beside:
        report = learner.run_round()
        while not beside._paused:  # a thread of the client's reads orders: that one was sent is not that it is here
            beside.refresh()
        held.set()
        assert beside.count(report, group_size=SIZE), "and not before it is resumed"
        assert learner.version == 2
        assert not parameters(learner).any()
        went_on.set()


def test_first_founder_has_to_train_for_its_policy_is_the_first_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def daemon(end: DaemonEnd) -> None:
        await end.send(WriteInitial())
        await end.expect(Detached)

    monkeypatch.setattr(loop_ends, "PEER", identity(1).peer_id)
    with (
        Ends(tmp_path, daemon),
        pytest.raises(ConfigError, match="--rollouts train"),
        Following(sampler(Kept()), tmp_path, replays=False),
    ):
        pass


def test_any_other_founder_that_samples_draws_a_policy_and_then_takes_the_firsts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = sampler(Kept())
    drawn = parameters(learner)

    async def daemon(end: DaemonEnd) -> None:
        assert np.array_equal(await end.initial(), drawn)
        await end.apply(drawn + 1, 0, fresh=True)

    monkeypatch.setattr(loop_ends, "PEER", identity(2).peer_id)
    with Ends(tmp_path, daemon), Following(learner, tmp_path, replays=False):
        assert np.array_equal(parameters(learner), drawn + 1)


def test_node_that_ends_before_there_is_a_state_ends_the_wait(tmp_path: Path) -> None:
    async def daemon(end: DaemonEnd) -> None:
        await end.send(Stop())

    with (
        Ends(tmp_path, daemon),
        pytest.raises(NetworkError, match="before there was a policy"),
        Following(sampler(Kept()), tmp_path, replays=False),
    ):
        pass
