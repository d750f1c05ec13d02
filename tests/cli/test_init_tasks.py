"""`shoal init` for rollouts where the tasks that it names are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import init
from shoal.cli.main import execute


@pytest.mark.parametrize("installed", [True, False])
def test_init_of_rollouts_says_what_its_tasks_need(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: object() if installed else None)
    given = ["init", "-o", str(tmp_path / "swarm.toml"), "--data-dir", str(tmp_path / "node"), "--strategy", "rollouts"]
    assert execute(given) == 0
    said = capsys.readouterr().out
    assert ("reasoning-gym's, which is not installed: pip install 'shoal[rl]'" in said) is not installed
