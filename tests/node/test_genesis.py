"""Founders whose machines draw other initial parameters from the same seed: the first founder's count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.lab import Swarm, assert_exact

DRAWN = '''
from pathlib import Path

import torch

from shoal.node.workloads.regression import RegressionWorkload


class Drawn(RegressionWorkload):
    """Draws what the local data file says, as another processor might."""

    def __init__(self, data=None, **options):
        super().__init__(**options)
        self.bias = float(Path(data).read_text())

    def build(self):
        model = super().build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self.bias)
        return model
'''


@pytest.mark.long
def test_founders_that_drew_other_parameters_take_the_first_founders(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    with Swarm(tmp_path, nodes=2, workload="drawn:Drawn") as swarm:
        extra = {}
        for index in range(2):
            (tmp_path / f"bias{index}").write_text(f"{index * 1e-6}")
            extra[f"node{index}"] = ["--data", str(tmp_path / f"bias{index}"), "--rounds", "2"]
        swarm.start_together(**extra)
        for node in swarm.nodes:
            assert len(node.certified(2)["members"]) == 2
            assert node.wait_exit() == 0
        assert "differ from the first founder's" in swarm.nodes[1].log
        assert "differ from the first founder's" not in swarm.nodes[0].log
        report = swarm.report(2)
        assert_exact(report)
        assert all(round.members == 2 for round in report.rounds)
