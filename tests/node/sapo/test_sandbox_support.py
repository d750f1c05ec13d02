"""A kernel that can lock a process does: where the other tests of the sandbox would be skipped, this one fails."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from shoal.node.sapo import sandbox_filter
from shoal.node.sapo.sandbox_support import environment, missing_sandbox

SECCOMP_ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or not SECCOMP_ACTIONS.exists(),
    reason="no seccomp in this kernel",
)
def test_sandbox_is_there_where_the_kernel_has_seccomp() -> None:
    assert missing_sandbox() is None
    assert sandbox_filter.self_test() is None


def test_self_test_says_what_a_filter_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_filter, "lock", lambda cpu_s: None)
    assert sandbox_filter.self_test() == "the filter lets opening a file through"


def test_sandbox_is_missing_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert sandbox_filter.self_test() == (
        "no sandbox here: there is a sandbox on 64-bit Linux on x86-64 and ARM64 only"
    )


def test_missing_sandbox_is_said_where_its_test_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    missing_sandbox.cache_clear()
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert (missing_sandbox() or "").startswith("its test does not run: ")
    monkeypatch.undo()
    missing_sandbox.cache_clear()


def test_environment_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HOME", "/root")
    assert "secret" not in environment().values()
    assert "HOME" not in environment()
