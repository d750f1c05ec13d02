"""Real nodes that share rollouts and average their policies: certified rounds, and an exchange beside them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shoal.cli.main import execute
from shoal.protocol.rollouts import Sampling
from tests.node.dashboard.test_node_page import read
from tests.node.lab import Node, assert_exact, eventually
from tests.node.sapo.agent_lab import origins, sharing_swarm
from tests.node.sapo.test_agents import groups_on_disk

STEPS = 2

pytestmark = pytest.mark.long


def exported(node: Node, out: Path) -> dict[str, object]:
    """The certified parameters that the node ends with, by name."""
    assert execute(["export", str(node.folder), "--out", str(out)]) == 0
    return {name: value.tolist() for name, value in load_file(out / "model.safetensors").items()}


def contributed_after(node: Node, at: float) -> bool:
    return any(event["at"] > at for event in node.events("contributed"))


def test_policies_are_averaged_in_certified_rounds_and_an_agent_that_dies_is_back_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync: dict[str, object] = {"strategy": "diloco", "inner_steps": STEPS, "balance": False}
    partial: dict[str, object] = {"labels": True, "external_terms": "tis", "over_provision": 2.0}
    with sharing_swarm(tmp_path, monkeypatch, nodes=2, sync=sync, **partial) as swarm:
        one, other = swarm.nodes
        one.start("--dashboard", "127.0.0.1:0")
        other.start(join=[one])
        other.wait("certified")
        first = other.wait("agent_started")
        status = other.ask("status")
        assert status["digest"] is not None
        assert status["rollouts"]["role"] == "train"
        os.kill(first["pid"], signal.SIGKILL)
        other.wait("agent_died")
        again = eventually(lambda: other.events("agent_started")[1:], "a second agent")[0]
        assert again["restored"] is not None
        eventually(lambda: contributed_after(other, again["at"]), "its node contributes again")
        eventually(lambda: origins(one)[other.peer_id] and origins(other)[one.peer_id], "each took from the other")
        url = one.ask("status")["dashboard"]
        page = read(url, "api/snapshot")
        assert page["node"]["digest"] is not None
        assert page["node"]["rollouts"]["taken"] > 0
        eventually(
            lambda: other.peer_id in {group["peer_id"] for group in read(url, "api/snapshot")["groups"]},
            "the page shows a group of the other",
        )
        for node in (other, one):
            node.ask("leave")
            assert node.wait_exit() == 0, node.log

        groups = [group for _, group in groups_on_disk(one).values()]
        assert {group.origin for group in groups} == {one.peer_id, other.peer_id}
        for group in groups:
            assert isinstance(group.sampling, Sampling)
            assert group.sampling.policy == f"{group.policy_version}-char-policy"
            assert all(1 <= len(drawn.ids()) == len(drawn.values()) <= 4 for drawn in group.sampling.drawn)
        refused = [set(event["rejected"]) for node in (one, other) for event in node.events("rollouts")]
        assert set().union(*refused) <= {"no variance", "stale", "unavailable"}, "no group came twice"
        rounds = max(event["round"] for event in other.events("certified"))
        assert_exact(swarm.report(rounds))
        made = max(event["round"] for event in one.events("contributed"))
        assert len(one.events("rollouts")) >= STEPS * made  # every inner step is a round of the agent
        names = set(exported(one, tmp_path / "model"))
        assert {"blocks.0.qkv.weight", "embed.weight", "head.weight"} <= names


def test_sampler_follows_the_averaged_policy_and_trainers_learn_from_what_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its finals are more bytes than what changes in bf16.
    sync: dict[str, object] = {"strategy": "diloco", "inner_steps": STEPS, "balance": False, "codec": "fp32"}
    with sharing_swarm(tmp_path, monkeypatch, nodes=2, founders=1, sync=sync, images=True) as swarm:
        trainer, sampler = swarm.nodes
        trainer.start()
        trainer.certified(1)
        sampler.start("--rollouts", "sample", join=[trainer])
        eventually(lambda: origins(trainer)[sampler.peer_id] >= 4, "its groups are trained on")
        agent = sampler.events("agent_started")[0]
        os.kill(agent["pid"], signal.SIGKILL)
        again = eventually(lambda: sampler.events("agent_started")[1:], "a second agent")[0]
        made = lambda: [event for event in sampler.events("rollouts") if event["at"] > again["at"]]  # noqa: E731
        eventually(lambda: len(made()) >= 2, "it samples again")
        eventually(lambda: sampler.ask("status")["phase"] == "following", "it stands on the head")
        assert sampler.events("contributed") == sampler.events("round_started") == []
        followed = lambda: sampler.events("caught_up")  # noqa: E731
        eventually(lambda: len(followed()) >= 2, "it takes states")
        eventually(lambda: "changes" in sampler.ask("status")["fetched"], "it takes what changed")
        status = sampler.ask("status")
        assert status["digest"] in {event["digest"] for event in trainer.events("certified")}
        for node in (sampler, trainer):
            node.ask("leave")
            assert node.wait_exit() == 0, node.log
        assert sampler.events("certified") == []
        assert {path.name.partition(".")[2] for path in (sampler.folder / "state").iterdir()} == {"image.safetensors"}
        certified = trainer.events("certified")
        assert {tuple(event["members"]) for event in certified} == {(trainer.peer_id,)}
        assert {event["round"] for event in followed()} <= {event["round"] for event in certified}
