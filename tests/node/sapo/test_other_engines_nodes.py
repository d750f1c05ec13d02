"""A node that samples through a real engine of others, and one that trains on what it shares."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from shoal.node.sapo.causal_lm_policy import CausalLMPolicy
from shoal.node.sapo.policy import Sample
from shoal.protocol.rollouts import RolloutGroup, Sampling
from tests.node.lab import Node, eventually
from tests.node.sapo.agent_lab import origins, sharing_swarm
from tests.node.sapo.other_engines import (
    DIGITS,
    FOUR_TOGETHER,
    LLAMA_SERVER,
    LlamaServer,
    TransformersServe,
    policy_of,
    save_gguf,
    save_sampled,
    text_of,
)
from tests.node.sapo.test_engine_nodes import assert_only_the_trainer_goes_on, shared_by

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        None in (find_spec("transformers"), find_spec("peft")), reason="the extra shoal[hf] is not installed"
    ),
]


def assert_drawn_by(policy: CausalLMPolicy, group: RolloutGroup) -> None:
    """Its texts are of its tokens, and these have the log-probabilities that the policy gives them."""
    assert isinstance(group.sampling, Sampling)
    assert len(group.sampling.drawn) == len(group.completions) == 4
    prompt = policy.encode_prompt(f"{group.task.seed % 10}?")
    for text, drawn in zip(group.completions, group.sampling.drawn, strict=True):
        assert text_of(drawn.ids()) == text
        with torch.no_grad():
            found = policy.log_probs([Sample(prompt=prompt, completion=drawn.ids())])[0]
        assert torch.allclose(found, torch.tensor(drawn.values()), atol=1e-3)


def models_of(sampler: Node, at: Node) -> dict[str, list[RolloutGroup]]:
    """The sampler's groups that lie at another node, by the model that they name."""
    groups = defaultdict(list)
    for group in shared_by(sampler, at):
        assert isinstance(group.sampling, Sampling)
        groups[group.sampling.policy.partition(" ")[0]].append(group)
    return groups


@pytest.mark.skipif(not LLAMA_SERVER.exists(), reason="`make ordeals` builds it (tests/install_llama_cpp.sh)")
def test_groups_of_llama_cpp_name_its_model_tokens_and_log_probabilities_though_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifts = {"one": 0.0, "two": 0.02}
    one, two = (save_gguf(tmp_path / f"{name}.gguf", shift) for name, shift in shifts.items())
    policies = {name: policy_of(shift) for name, shift in shifts.items()}
    with (
        LlamaServer(one, *FOUR_TOGETHER) as engine,
        sharing_swarm(tmp_path, monkeypatch, nodes=2, labels=True, staleness_rounds=1000) as swarm,
    ):
        trainer, sampler = swarm.nodes
        trainer.start()
        sampler.start("--rollouts", "sample", "--engine", f"http://{engine.address}", join=[trainer])
        eventually(lambda: origins(trainer)[sampler.peer_id] >= 2, "groups of the first model are trained on")

        engine.kill()
        assert_only_the_trainer_goes_on(trainer, sampler)
        engine.start(two, "--parallel", "1")  # which draws one completion at a time, and refuses four
        eventually(lambda: set(models_of(sampler, trainer)) == set(policies), "groups of the second model come too")

        for model, groups in models_of(sampler, trainer).items():
            for group in groups:
                assert_drawn_by(policies[model], group)
        assert not any(event.get("ignored") for event in trainer.all_events())
        for node in swarm.nodes:
            node.ask("leave")
            assert node.wait_exit() == 0


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="transformers[serving] is not installed")
def test_groups_of_transformers_serve_are_text_that_says_who_drew_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_sampled(tmp_path / "one", 0.0)
    with (
        TransformersServe(model) as engine,
        sharing_swarm(tmp_path, monkeypatch, nodes=2, labels=True, staleness_rounds=1000) as swarm,
    ):
        trainer, sampler = swarm.nodes
        trainer.start()
        sampler.start("--rollouts", "sample", "--engine", f"http://{engine.address}", join=[trainer])
        eventually(lambda: origins(trainer)[sampler.peer_id] >= 2, "its groups are trained on")

        groups = shared_by(sampler, trainer)
        for group in groups:
            assert isinstance(group.sampling, Sampling)
            assert group.sampling.policy.partition("@")[0] == str(model)
            assert group.sampling.drawn == ()
            assert all(set(text) <= set(DIGITS) | {"?"} for text in group.completions)
        assert any(len(set(group.completions)) > 1 for group in groups), "drawn, not always the likeliest"
        assert not any(event.get("ignored") for event in trainer.all_events())
        for node in swarm.nodes:
            node.ask("leave")
            assert node.wait_exit() == 0
