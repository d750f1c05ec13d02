"""Settings amended in mid-run, with real nodes: by a quorum and by the authority, for a joiner and after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Contribution,
    InnerSettings,
    Retune,
    SyncSettings,
    Train,
)
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from tests.node.lab import INNER_STEPS, Node, Swarm, assert_exact, assert_one_line, assert_votes_once, eventually, shoal
from tests.node.told_trainer import expect, running
from tests.node.training.test_sharded_replica import STEPS as STEPS_OF_TWO
from tests.node.training.test_sharded_replica import Single, share, spec

STEPS = 40


def amend(node: Node, *settings: str, options: tuple[str, ...] = ()) -> str:
    """What `shoal amend` says; it must succeed."""
    arguments = [word for setting in settings for word in ("--set", setting)]
    done = shoal("amend", *arguments, *options, "--data-dir", str(node.folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan(node: Node, round: int) -> Plan:
    return decode((node.folder / "rounds" / f"0.0-{round}" / "plan").read_bytes(), Plan)


def steps(node: Node, round: int) -> int:
    return int(node.wait("contributed", round=round)["steps"])


@pytest.mark.long
def test_a_quorum_amends_steps_and_codec_for_all_and_for_who_comes_later(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, third = swarm.nodes
        swarm.start_together(holds=["3:train"])
        for node in swarm.nodes:
            node.hold("3:train")  # the third stays there, so that the others wait for it and not for us
        for node in (first, second):
            node.release()
        refused = shoal("amend", "--set", "sync.inner_steps=0", "--data-dir", str(first.folder))
        assert refused.returncode == 1
        assert_one_line(refused.stderr, "the amended settings", "inner_steps")
        wanted = (f"sync.inner_steps={STEPS}", "sync.codec=bf16", "sync.outer_lr=0.5", "inner.weight_decay=0.01")
        amend(first, *wanted)
        eventually(lambda: second.ask("status")["amendments"], "the other hears of it")
        amend(second, *wanted)
        third.release()

        told = first.wait("amended")
        at = told["round"]
        assert told["settings"] == {
            "inner.weight_decay": 0.01,
            "sync.codec": "bf16",
            "sync.inner_steps": STEPS,
            "sync.outer_lr": 0.5,
        }
        for node in (second, third):
            assert node.wait("amended")["value"] == told["value"]
        first.certified(at + 2)
        for node in swarm.nodes:
            assert [steps(node, round) for round in (at, at + 1)] == [INNER_STEPS, STEPS]
            assert [plan(node, round).codec for round in (at, at + 1)] == ["int8", "bf16"]
        assert not (first.folder / "amend.order").exists()

        third.kill()
        joiner = Node(tmp_path / "joiner", swarm.manifest_path, tmp_path)
        swarm.nodes.append(joiner)
        joiner.start(join=[first])
        third.start(join=[first])
        for node in (joiner, third):
            last = eventually(lambda node=node: node.events("contributed"), "it takes part")[-1]["round"]  # type: ignore[misc]
            assert steps(node, last) == STEPS
            assert node.ask("status")["settings"] == told["settings"]
        assert joiner.wait("amended")["value"] == told["value"]
        assert third.events("amended") == []  # it was told in the life before
        final = last + 1
        for node in swarm.nodes:
            node.certified(final)
            node.kill()
            assert_votes_once(node)
        assert_exact(swarm.report(final))
        verified = shoal("verify", str(first.folder))
        assert verified.returncode == 0, verified.stderr


@pytest.mark.long
def test_members_follow_the_authority_but_for_whose_user_does_not(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        founder, follower, _ = swarm.nodes  # the first founder's key is the authority's
        swarm.start_together(node2=["--no-authority-amendments"])
        founder.certified(1)
        not_its = shoal("amend", "--set", "inner.lr=0.002", "--by-authority", "--data-dir", str(follower.folder))
        assert not_its.returncode == 1
        assert_one_line(not_its.stderr, "signed with the key of", founder.peer_id)
        amend(founder, f"sync.inner_steps={STEPS}", options=("--by-authority",))
        told = [node.wait("amended") for node in swarm.nodes]
        assert {event["value"] for event in told} == {told[0]["value"]}
        at = told[0]["round"]
        for node in swarm.nodes:
            assert steps(node, at + 1) == STEPS
            node.certified(at + 1)
        for node in swarm.nodes:
            node.kill()
        assert_exact(swarm.report(at + 1))


@pytest.mark.long
async def test_two_processes_that_hold_a_model_together_follow_amended_settings_as_one_does() -> None:
    inner = InnerSettings(lr=1e-3, weight_decay=5.0)
    plain, retuned = Single(), Single()
    plain.anchor = retuned.anchor = plain.initial - plain.first
    retuned.replica.retune(inner, SyncSettings())
    expected = retuned.second()
    assert np.abs(expected - plain.second()).max() > 1e-3
    async with running(spec()) as trainer:
        await trainer.apply(Apply(round=0, fresh=True), plain.initial.copy())
        await expect(trainer, Applied)
        await trainer.send(Train(round=1, steps=STEPS_OF_TWO, assignment=share(1)))
        await expect(trainer, Contribution)
        await trainer.apply(Apply(round=1, taken=1), plain.anchor.copy())
        await expect(trainer, Applied)
        await trainer.send(Retune(inner=inner, sync=SyncSettings()))
        await trainer.send(Train(round=2, steps=STEPS_OF_TWO, assignment=share(2)))
        await expect(trainer, Contribution)
        np.testing.assert_allclose(trainer.contribution, expected, rtol=0, atol=1e-5)
