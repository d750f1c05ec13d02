"""Whose code a manifest may name."""

from __future__ import annotations

import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_workload import check_workload_allowed
from tests.protocol.test_manifest import changed, minimal


def test_workload_of_a_peers_manifest_must_be_installed_or_allowed() -> None:
    installed = ["text", "regression"]
    code = changed("workload", {"name": "evil.module:Class"})
    unknown = changed("workload", {"name": "vision"})
    for from_peer in (True, False):
        check_workload_allowed(minimal(), from_peer=from_peer, entry_points=installed, allowed=[])
        with pytest.raises(ConfigError, match=r"'vision' is not installed here .installed: regression, text"):
            check_workload_allowed(unknown, from_peer=from_peer, entry_points=installed, allowed=[])
    with pytest.raises(ConfigError, match=r"--allow-workload evil\.module:Class"):
        check_workload_allowed(code, from_peer=True, entry_points=installed, allowed=["other:Class"])
    check_workload_allowed(code, from_peer=True, entry_points=installed, allowed=["evil.module:Class"])
    check_workload_allowed(code, from_peer=False, entry_points=installed, allowed=[])
