"""`shoal export` of a node that shares rollouts: what it has learnt, as any other program reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.cli.main import execute
from shoal.node.sapo import learner_state
from shoal.node.sapo.char_policy import CharPolicyFactory
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings
from shoal.node.sapo.policies import PolicyLimits
from shoal.node.sapo.policy import trained_parameters
from shoal.node.sapo.policy_export import AGENT_FOLDER
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest, validate_manifest
from tests.node.donors import flipped
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import score, sum_task

OPTIONS = {"width": 16, "layers": 1, "heads": 2, "prompt_chars": 8, "warm_up_updates": 0}


def node_folder(folder: Path, *rounds: int) -> dict[str, torch.Tensor]:
    """What a node leaves that saved after each of `rounds`; the parameters of the last."""
    tables = {
        "swarm": {"name": "test", "founders": [Identity.from_seed(bytes(32)).peer_id]},
        "workload": {"name": "char-policy", "options": OPTIONS},
        "sync": {"strategy": "rollouts"},
        "rollouts": {"tasks": [{"family": "basic_arithmetic"}], "completion_tokens": 4},
    }
    folder.mkdir()
    (folder / "swarm.toml").write_text(render_manifest(validate_manifest(tables, source="the test's manifest")))
    policy = CharPolicyFactory(**OPTIONS).build(  # type: ignore[arg-type]
        PolicyLimits(seed=7, completion_tokens=4, temperature=1.0)
    )
    learner = Learner(policy, LearnerSettings(), draw=sum_task, score=score, sharing=Alone(), draws=assigned(1))
    chance = torch.Generator().manual_seed(1)
    for round in rounds:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += torch.randn(parameter.shape, generator=chance)
        learner.round = round
        learner_state.save(learner, folder / AGENT_FOLDER, policy="char-policy")
    return {name: value.detach().clone() for name, value in policy.model.state_dict().items()}


def test_export_writes_the_newest_policy_under_the_names_of_its_module(tmp_path: Path) -> None:
    expected = node_folder(tmp_path / "node", 4, 8)
    assert execute(["export", str(tmp_path / "node"), "--out", str(tmp_path / "model")]) == 0
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


def test_a_damaged_file_is_passed_over_and_nothing_is_written_without_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    node_folder(folder, 4, 8)
    out = ["export", str(folder), "--out", str(tmp_path / "model")]
    for round, code in ((8, 0), (4, 1)):
        path = folder / AGENT_FOLDER / f"{round}.safetensors"
        path.write_bytes(flipped(path.read_bytes(), 5000))
        assert execute([*out, "--force"]) == code
    printed = capsys.readouterr()
    assert "after 4 rounds" in printed.out
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("rounds", "before", "said"), [((), False, "no policy yet"), ((3,), True, "--force")])
def test_export_says_why_it_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: tuple[int, ...], before: bool, said: str
) -> None:
    node_folder(tmp_path / "node", *rounds)
    if before:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").touch()
    assert execute(["export", str(tmp_path / "node"), "--out", str(tmp_path / "model")]) == 2
    assert said in capsys.readouterr().err


def test_parameters_have_their_numbers_where_no_module_has_names_for_all() -> None:
    class Parts:
        """A policy's parameters, of which its `model` holds one."""

        def __init__(self) -> None:
            self.model = torch.nn.Linear(2, 2, bias=False)
            self.other = torch.nn.Parameter(torch.zeros(3))

        def parameters(self) -> list[torch.nn.Parameter]:
            return [self.other, self.model.weight]

    parts = Parts()
    assert [*trained_parameters(parts)] == ["0", "1"]  # type: ignore[arg-type]
    parts.other.requires_grad_(False)
    assert [*trained_parameters(parts)] == ["weight"]  # type: ignore[arg-type]
