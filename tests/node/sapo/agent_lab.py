"""Swarms of real nodes that share rollouts, on a task that a policy without any training already answers by halves."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from shoal.protocol.manifest import Manifest, render_manifest, validate_manifest
from tests.node.lab import Node, Swarm

FAMILY = '''
"""Say something that begins with a character of an even code."""

from shoal.node.sapo.tasks import TaskFamily


class Even(TaskFamily):
    name = "even"
    version = "1"
    scoring = "direct"

    def question(self, config, seed, index):
        return f"{seed % 10}?"

    def score(self, task, text):
        return float(text[:1] != "" and ord(text[0]) % 2 == 0)
'''

TINY_POLICY: dict[str, str | int | float | bool] = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "prompt_chars": 4,
    "warm_up_updates": 0,
}


def install_family(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with the family `even`, for this process's children."""
    information = folder / "even_tasks-1.dist-info"
    information.mkdir(parents=True)
    (folder / "even_tasks.py").write_text(FAMILY)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: even-tasks\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[shoal.tasks]\neven = even_tasks:Even\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def sharing_manifest(
    manifest: Manifest,
    *,
    sync: dict[str, object] | None = None,
    workload: dict[str, object] | None = None,
    **rollouts: object,
) -> Manifest:
    """The same swarm, but one that shares rollouts of the family `even`; sync: beside averaging policies.

    workload: the policy, a tiny one unless it is said.
    """
    tables = msgspec.to_builtins(manifest)
    tables["workload"] = workload or {"name": "char-policy", "options": TINY_POLICY}
    tables["sync"] = sync or {"strategy": "rollouts"}
    tables["rollouts"] = {
        "tasks": [{"family": "even"}],
        "local": 3,
        "external": 2,
        "group_size": 4,
        "completion_tokens": 4,
        **rollouts,
    }
    return validate_manifest(tables, source="the test's manifest")


def sharing_swarm(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    nodes: int,
    founders: int | None = None,
    sync: dict[str, object] | None = None,
    workload: dict[str, object] | None = None,
    **rollouts: object,
) -> Swarm:
    """Nodes of such a swarm, not yet started."""
    install_family(workplace / "families", monkeypatch)
    swarm = Swarm(workplace, nodes=nodes, founders=founders)
    swarm.manifest = sharing_manifest(swarm.manifest, sync=sync, workload=workload, **rollouts)
    swarm.manifest_path.write_text(render_manifest(swarm.manifest))
    return swarm


def origins(node: Node, *, all_lives: bool = False) -> Counter[str]:
    """How many groups of whom the node took."""
    events = node.all_events() if all_lives else node.events()
    taken: Counter[str] = Counter()
    for event in events:
        if event["event"] == "rollouts":
            taken.update(event["origins"])
    return taken


def newest_round(node: Node) -> int:
    """The last round that it finished, over all its lives."""
    return max((event["round"] for event in node.all_events() if event["event"] == "rollouts"), default=0)
