"""Whose code a manifest may name."""

from __future__ import annotations

from functools import partial

import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_workload import check_workload_allowed
from tests.protocol.test_manifest import changed, minimal


def test_workload_of_a_manifest_must_be_installed_or_allowed_or_founded_with() -> None:
    installed = ["text", "regression"]
    code = changed("workload", {"name": "evil.module:Class"})
    unknown = changed("workload", {"name": "vision"})
    for founded in (True, False):
        allows = partial(check_workload_allowed, entry_points=installed, founded=lambda founded=founded: founded)
        allows(minimal().workload, allowed=[])
        with pytest.raises(ConfigError, match=r"'vision' is not installed here .installed: regression, text"):
            allows(unknown.workload, allowed=[])
    with pytest.raises(ConfigError, match=r"--allow-workload evil\.module:Class"):
        check_workload_allowed(code.workload, entry_points=installed, allowed=["other:Class"])
    check_workload_allowed(code.workload, entry_points=installed, allowed=["evil.module:Class"])
    check_workload_allowed(code.workload, entry_points=installed, allowed=[], founded=lambda: True)


def test_who_founded_a_swarm_is_asked_only_where_it_matters() -> None:
    def ask() -> bool:
        raise AssertionError("asked")

    check_workload_allowed(minimal().workload, entry_points=["text"], allowed=[], founded=ask)
    code = changed("workload", {"name": "own.module:Class"})
    check_workload_allowed(code.workload, entry_points=["text"], allowed=["own.module:Class"], founded=ask)
