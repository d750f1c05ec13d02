"""A node raises its own soft limit of open files, never beyond the hard one and never down."""

from __future__ import annotations

import gc
import resource

import pytest
import trio

from shoal.cli import open_files, run
from shoal.swarm import incoming
from shoal.swarm.lanes.pool import LANE_COUNT_LIMIT
from shoal.swarm.limits import CONNECTION_LIMIT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (open_files.FILES, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), (open_files.FILES, resource.RLIM_INFINITY)),
        ((65536, 1 << 20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_soft_limit_is_raised_as_far_as_it_goes(
    before: tuple[int, int], after: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: before}.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: told.append((kind, limits)))
    open_files.allow_files()
    assert told == ([] if after is None else [(resource.RLIMIT_NOFILE, after)])


@pytest.mark.parametrize("error", [ValueError("not allowed to raise maximum limit"), PermissionError(1, "no")])
def test_system_that_says_no_keeps_the_limit(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    open_files.allow_files()


def test_there_are_files_for_all_peers_and_lanes_and_for_as_many_as_may_hang() -> None:
    hanging = 4 * incoming.HANGING_LIMIT  # two kinds each, at the door and at the lanes' port
    assert CONNECTION_LIMIT + LANE_COUNT_LIMIT + hanging <= open_files.FILES
    assert open_files.FILES * incoming.HANGING_FILES_SHARE >= incoming.HANGING_LIMIT


def test_node_raises_it_before_anything_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(run, "share_arenas", lambda: None)
    monkeypatch.setattr(run, "allow_files", lambda: done.append("raised"))
    monkeypatch.setattr(trio, "run", lambda _: done.append("ran"))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    run.run_to_end(None, None)  # type: ignore[arg-type]
    assert done == ["raised", "ran"]
