"""The manifests of tests: the least that one can say, and what the test adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.protocol.manifest import Manifest, validate_manifest


def manifest_of(founders: Iterable[str], sections: Mapping[str, object] | None = None, **swarm: object) -> Manifest:
    """A swarm of these founders, of the workload `regression`, with rounds of one step.

    sections: what stands beside these, or in their place. swarm: more of its [swarm].
    """
    tables: dict[str, object] = {
        "swarm": {"name": "test", "founders": list(founders), **swarm},
        "workload": {"name": "regression"},
        "sync": {"inner_steps": 1},
        **(sections or {}),
    }
    return validate_manifest(tables, source="the test's manifest")
