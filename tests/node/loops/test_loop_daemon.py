"""The daemon that a training loop starts by a link: which swarm it is for, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from shoal.node import own_loop
from shoal.node.loops import loop_daemon
from shoal.node.loops.loop_daemon import LoopDaemon, found_or_started
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest
from shoal.protocol.swarm_link import SwarmLink, format_link, join_line
from shoal.protocol.wire import SwarmId
from tests.node.lab import manifest_of

NOWHERE = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.from_seed(bytes(32)).peer_id}"


def folder_of(tmp_path: Path, workload: str) -> tuple[Path, str]:
    """A data folder that has been in a swarm of this workload, and the line that joins it."""
    manifest = manifest_of([Identity.generate().peer_id], workload)
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    (folder / "swarm").write_text(manifest.swarm_id.hex())
    (folder / "swarm.toml").write_text(render_manifest(manifest))
    return folder, join_line(format_link(SwarmLink(swarm=manifest.swarm_id, addresses=(NOWHERE,))), workload)


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def test_daemon_that_ran_before_the_loop_is_not_quoted_from_its_earlier_runs(tmp_path: Path) -> None:
    (tmp_path / "daemon.log").write_text("shoal: nobody listens\n")
    assert LoopDaemon(tmp_path, None, 0).last_words() == ""


def test_a_daemon_that_starts_as_its_loop_is_interrupted_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start = children(), subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)  # it is there, and nobody has heard of it
        return process

    folder, line = folder_of(tmp_path, "own-loop")
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found_or_started(line, folder, peers=(), options=())
    assert children() == before


def test_reason_of_a_daemon_that_goes_away_is_known_although_it_says_it_last(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    with (
        log.open("wb") as written,
        subprocess.Popen(
            ["sh", "-c", "read x; echo 'shoal: it trains another model'"], stdin=subprocess.PIPE, stdout=written
        ) as process,
    ):
        assert process.stdin is not None
        saying = threading.Timer(0.3, process.stdin.close)  # by then who did not wait has looked
        saying.start()
        assert LoopDaemon(tmp_path, process, 0).last_words() == "it trains another model"
        saying.join()


def test_manifest_that_nobody_gives_is_asked_for_as_long_as_the_loop_waits(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(NetworkError, match="has no manifest yet"):
        LoopDaemon(tmp_path, None, 0).wait_for_manifest(SwarmId(bytes(32)), wait_s=0.2)
    assert time.monotonic() - began < 30


def test_wait_for_a_manifest_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_daemon, "TELL_PERIOD_S", 0.05)
    with caplog.at_level("INFO"), pytest.raises(NetworkError, match="has no manifest yet"):
        LoopDaemon(tmp_path, None, 0).wait_for_manifest(SwarmId(bytes(32)), wait_s=0.3)
    assert caplog.messages[0] == "asking for the manifest whom the link names"
    assert caplog.messages[1] == "no manifest after 0 s; whom the link names is asked again"


@pytest.mark.parametrize("given", ["", " \n"])
def test_nothing_in_place_of_a_manifest_is_called_that(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="where the manifest or link should stand is nothing; give a file of"):
        found_or_started(given, tmp_path, peers=(), options=())


def test_line_of_a_swarm_that_trains_by_itself_is_refused_and_leaves_no_daemon(tmp_path: Path) -> None:
    folder, line = folder_of(tmp_path, "regression")
    before = children()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"names the workload 'regression'; for a loop of your own") as caught:
        own_loop.join(model, optimizer, line, data_dir=folder).__enter__()
    assert children() == before
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["__enter__"]
    assert caught.value.__suppress_context__


def test_link_is_told_to_the_daemon_where_no_other_user_sees_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, line = folder_of(tmp_path, "own-loop")
    caplog.set_level("INFO", logger="shoal.loop")
    told = f"note: 'nodes of this swarm train loops: join(model, optimizer, LINK) takes the link'\n{line}\n" * 4
    daemon = found_or_started(told, folder, peers=(), options=("--no-mdns", "--listen", "/ip4/127.0.0.1/tcp/0"))
    try:
        assert daemon.manifest.workload.name == "own-loop"
        (commands,) = (child.cmdline() for child in psutil.Process().children() if str(folder) in child.cmdline())
        assert not [word for word in commands if "shoal:" in word]
        assert caplog.messages == [f"starting a node on {folder}"]
    finally:
        daemon.give_up()


def test_link_that_is_damaged_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a whole swarm link"):
        found_or_started("shoal:damaged", tmp_path / "node", peers=(), options=())
    assert not (tmp_path / "node").exists()
