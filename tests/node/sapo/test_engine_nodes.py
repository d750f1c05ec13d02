"""A node that samples through a real `shoal engine`, and one that trains on what it shares."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from shoal.node.sapo.causal_lm_policy import CausalLMPolicy, CausalLMSettings
from shoal.node.sapo.policy import Sample
from shoal.node.workloads.causal_lm_model import EXPORT_FOLDER, load_model, load_tokenizer
from shoal.protocol.rollouts import RolloutGroup, Sampling
from tests.node.lab import Node, assert_exact, eventually
from tests.node.sapo.agent_lab import newest_round, origins, sharing_swarm
from tests.node.sapo.engine_lab import Engine, Judge, save_model
from tests.node.sapo.test_agents import goes_on, groups_on_disk, is_even

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        None in (find_spec("transformers"), find_spec("peft")), reason="the extra shoal[hf] is not installed"
    ),
]


def shared_by(sampler: Node, at: Node) -> list[RolloutGroup]:
    """The sampler's groups that lie at another node."""
    return [group for _, group in groups_on_disk(at).values() if group.origin == sampler.peer_id]


def assert_only_the_trainer_goes_on(trainer: Node, sampler: Node) -> int:
    """The sampler, whose engine is away, makes no more rounds and does not end; the round in which it stood."""
    sampler.wait("engine_failed")
    stood = newest_round(sampler)
    goes_on(trainer)
    assert newest_round(sampler) <= stood + 1
    assert sampler.running
    return stood


def assert_labelled_rightly(group: RolloutGroup, models: dict[str, str], judge: Judge) -> None:
    """Its version, policy, tokens and log-probabilities are those of the model that drew it, which alone could have."""
    assert isinstance(group.sampling, Sampling)
    assert group.policy_version == int(group.sampling.policy.partition("-")[0])
    assert len(group.sampling.drawn) == len(group.completions) == 4
    question = f"{group.task.seed % 10}?"
    for text, drawn in zip(group.completions, group.sampling.drawn, strict=True):
        assert judge.text(drawn.ids()) == text
        assert judge.names(question, drawn.ids(), drawn.values()) == [models[group.sampling.policy]]


def test_groups_of_an_engine_arrive_with_the_policy_that_drew_them_though_it_loads_another_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    one, two = save_model(folder / "one"), save_model(folder / "two", shift=0.02)
    judge = Judge(one=0.0, two=0.02)
    with (
        Engine(one, "--version", "3") as engine,
        sharing_swarm(tmp_path, monkeypatch, nodes=2, labels=True, staleness_rounds=1000) as swarm,
    ):
        models = {engine.policy: "one"}
        trainer, sampler = swarm.nodes
        trainer.start()
        sampler.start("--rollouts", "sample", "--engine", f"http://{engine.address}", join=[trainer])
        eventually(lambda: origins(trainer)[sampler.peer_id] >= 2, "groups of the first model are trained on")

        models[engine.load(two, version=4)] = "two"
        eventually(
            lambda: any(group.policy_version == 4 for group in shared_by(sampler, trainer)), "groups of the second come"
        )

        engine.kill()
        stood = assert_only_the_trainer_goes_on(trainer, sampler)
        models[engine.start()] = "one"
        eventually(lambda: newest_round(sampler) > stood + 2, "the sampler goes on with the engine that came back")

        groups = shared_by(sampler, trainer)
        for group in groups:
            assert_labelled_rightly(group, models, judge)
        assert {group.policy_version for group in groups} == {3, 4}
        right = [is_even(text) for group in groups for text in group.completions]
        assert 0 < sum(right) < len(right)
        assert not any(event.get("ignored") for event in trainer.all_events())
        status = sampler.ask("status")["rollouts"]
        assert status["made"] >= len(groups)
        agent = psutil.Process(sampler.wait("agent_started")["pid"])
        print(json.dumps({"sampler_process_bytes": agent.memory_info().rss, "groups": len(groups)}))
        for node in swarm.nodes:
            node.ask("leave")
            assert node.wait_exit() == 0


def assert_drawn_by(folder: Path, groups: list[RolloutGroup]) -> None:
    """The tokens of these groups have the log-probabilities that the model in a folder gives them."""
    settings = CausalLMSettings(prompt_tokens=12, completion_tokens=8)
    policy = CausalLMPolicy(load_model(folder, pretrained=True), load_tokenizer(folder), settings)  # type: ignore[arg-type]
    for group in groups:
        assert isinstance(group.sampling, Sampling)
        prompt = policy.encode_prompt(f"{group.task.seed % 10}?")
        for drawn in group.sampling.drawn:
            with torch.no_grad():
                found = policy.log_probs([Sample(prompt=prompt, completion=drawn.ids())])[0]
            assert torch.allclose(found, torch.tensor(drawn.values()), atol=1e-4)


def of_the_newest(sampler: Node, copies: Path) -> tuple[Path, list[RolloutGroup]] | None:
    """A copy of the policy that the engine was handed last, and the sampler's groups that name it, if any.

    A round under way when the trainers paused may put another in its place meanwhile.
    """
    for folder in (sampler.folder / "rollouts" / "agent" / "engine").glob("*"):
        groups = [group for group in shared_by(sampler, sampler) if group.policy_version == int(folder.name)]
        if groups:
            try:
                return shutil.copytree(folder / EXPORT_FOLDER, copies / folder.name, dirs_exist_ok=True), groups
            except (FileNotFoundError, shutil.Error):
                return None
    return None


def test_an_engine_is_handed_each_certified_policy_and_again_when_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("--data", str(tmp_path / "data"))
    model = save_model(tmp_path / "data" / "models" / "tiny")
    rounds = 20
    with (
        Engine(model) as engine,
        sharing_swarm(
            tmp_path,
            monkeypatch,
            nodes=3,
            founders=2,
            sync={"strategy": "diloco", "inner_steps": 2},
            workload={"name": "causal-lm-policy", "options": {"model": "tiny", "prompt_tokens": 12}},
            labels=True,
            completion_tokens=8,
            staleness_rounds=1000,
        ) as swarm,
    ):
        began_with = engine.policy
        first, second, sampler = swarm.nodes
        first.start(*data)
        second.start(*data, join=[first])
        first.certified(1)
        sampler.start("--rollouts", "sample", "--engine", f"http://{engine.address}", *data, join=[first])
        taken = lambda: origins(first)[sampler.peer_id] + origins(second)[sampler.peer_id]  # noqa: E731
        eventually(lambda: taken() >= 2, "its groups are trained on")
        engine.kill()
        sampler.wait("engine_failed")
        assert engine.start() == began_with, "it knows nothing of the swarm's policy"
        before = taken()
        eventually(lambda: taken() >= before + 2, "groups of the engine that came back are trained on")
        first.certified(rounds)
        groups = shared_by(sampler, sampler)
        named: dict[int, set[str]] = defaultdict(set)
        for group in groups:
            assert isinstance(group.sampling, Sampling)
            assert group.policy_version == int(group.sampling.policy.partition("-")[0])
            named[group.policy_version].add(group.sampling.policy)
        assert len(named) >= 2
        assert all(len(names) == 1 for names in named.values())
        assert began_with not in set().union(*named.values())
        for trainer in (first, second):
            trainer.ask("pause")
        copies = tmp_path / "copies"
        newest = eventually(
            lambda: of_the_newest(sampler, copies), "groups of the policy that the engine was handed last"
        )
        assert_drawn_by(*newest)
        rewards = [event["reward"] for event in first.events("rollouts") if event["reward"] is not None]
        print(json.dumps({"rounds": rounds, "groups": len(groups), "policies": len(named), "reward": rewards[-1]}))
        for node in swarm.nodes:
            node.ask("leave")
            assert node.wait_exit() == 0, node.log
        assert_exact(swarm.report(rounds))
