"""The task families of the documents, as a reader would install them: a real node trains on them from nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from shoal.protocol.manifest import render_manifest, validate_manifest
from tests.node.lab import Swarm

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = "tasks.md"
ROUNDS = 2
SMALL: dict[str, str | int | float | bool] = {"width": 48, "layers": 2, "heads": 2}
"""Half of the policy that `shoal init` writes; it is taught within 220 updates, 6 s of processor time."""
DEADLINE_S = 240.0
"""Before the limit of a test, so that what the node wrote is shown."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_page_of_tasks_has_the_only_families_that_documents_write() -> None:
    written = {
        page.name: len(re.findall(r"^class \w+\(TaskFamily\)", code, re.MULTILINE))
        for page in sorted(DOCS.glob("*.md"))
        for code in blocks(page.name, "python")
    }
    assert {page: count for page, count in written.items() if count} == {PAGE: 1}


def test_example_of_the_page_is_taught_and_then_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra shoal[rl] is not installed")
    (code,), (points, section) = blocks(PAGE, "python"), map(msgspec.toml.decode, blocks(PAGE, "toml"))
    installed = tmp_path / "installed"
    information = installed / "my_tasks-1.dist-info"
    information.mkdir(parents=True)
    (installed / "my_tasks.py").write_text(code)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-tasks\nVersion: 1\n")
    ((group, named),) = points["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)

    with Swarm(tmp_path, nodes=1, workload="char-policy", options=SMALL, forked=False) as swarm:
        tables = msgspec.to_builtins(swarm.manifest)
        tables |= {"sync": {"strategy": "rollouts"}, "rollouts": section["rollouts"]}
        swarm.manifest_path.write_text(render_manifest(validate_manifest(tables, source="the page")))
        (node,) = swarm.nodes
        node.start("--rounds", str(ROUNDS), "--device", "cpu")
        assert node.wait_exit(DEADLINE_S) == 0, node.log
        assert node.events("agent_started")[0]["warm_up_reward"] >= 0.2
        rounds = node.events("rollouts")
        assert [event["round"] for event in rounds] == list(range(1, ROUNDS + 1))
        assert sum(event["informative"] for event in rounds) > 0  # whose rewards vary: there is something to learn
