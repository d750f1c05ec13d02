"""Checkpoints as folders: complete or not there, linked and not copied, and whole whenever the writer was killed."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from shoal.collectives.state import frozen
from shoal.node.state import checkpoints
from shoal.node.state.checkpoint_check import check_checkpoint
from shoal.node.state.checkpoints import (
    CheckpointParts,
    Checkpoints,
    checkpoints_in,
    read_layout,
    tidy,
    write_checkpoint,
)
from shoal.node.state.contributions import read_work
from shoal.node.state.resumption import Resumption
from shoal.node.state.state_files import read_state
from shoal.node.state.states import StateCache
from shoal.node.state.tensor_files import TensorFile
from shoal.protocol.errors import ConfigError, StorageError
from tests.node.checkpoint_lab import LAYOUT, CheckpointLedger, new_ledger
from tests.node.ledger import GRID
from tests.node.simulated_disk import Disks, Survival
from tests.small_disk import small_disk

KILLS = 200


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder / "checkpoints")]


def test_checkpoint_holds_everything_of_its_round_and_is_linked(tmp_path: Path) -> None:
    ledger = new_ledger()
    path = ledger.checkpoint(tmp_path, 2)
    assert path == tmp_path / "checkpoints" / "0.0-2"
    assert sorted(entry.name for entry in path.iterdir()) == [
        "chain",
        "layout.json",
        "state.safetensors",
        "swarm.toml",
    ]
    assert (path / "state.safetensors").samefile(tmp_path / "state" / "2.safetensors")
    assert read_layout(path / "layout.json") == LAYOUT
    (tmp_path / "state" / "2.safetensors").unlink()
    assert check_checkpoint(path).ok


def test_only_the_newest_are_kept_in_the_order_of_terms_and_rounds(tmp_path: Path) -> None:
    ledger = new_ledger(12)
    for round in (2, 9, 10):
        ledger.checkpoint(tmp_path, round, keep=2)
    assert names(tmp_path) == ["0.0-10", "0.0-9"]
    (tmp_path / "checkpoints" / "0.1-3").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    ledger.checkpoint(tmp_path, 11, keep=2)
    assert names(tmp_path) == ["0.1-3", "0.0-11"]
    assert (tmp_path / "checkpoints" / "notes").is_dir()


async def test_a_state_whose_checkpoint_is_made_is_not_held_on_to(tmp_path: Path) -> None:
    ledger = new_ledger()
    state = replace(ledger.states[3], anchor=frozen(ledger.states[3].anchor.copy()))
    memory = weakref.ref(state.anchor)
    (tmp_path / "state").mkdir()
    parts = CheckpointParts(
        folder=tmp_path,
        manifest=ledger.manifest,
        chain=ledger.chain,
        save=_nobody,
        cache=StateCache(tmp_path, GRID.chunk_values),
        on_progress=lambda _: None,
    )
    made = Checkpoints(parts, every=3, keep=1)
    await made.expect(LAYOUT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        made.certified(state)
        del state
        with trio.fail_after(20):
            while names(tmp_path) != ["0.0-3"] or memory() is not None:
                await trio.to_thread.run_sync(threading.Event().wait, 0.001)
                gc.collect()
        nursery.cancel_scope.cancel()
    assert check_checkpoint(tmp_path / "checkpoints" / "0.0-3").ok


def test_the_first_checkpoint_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leads to its folder too."""
    disk = Disks(monkeypatch).add(tmp_path / "disk", random.Random(1))
    write_checkpoint(disk.root / "checkpoints", new_ledger().content(disk.root, 2), keep=2)
    disk.copy_survivors(tmp_path / "after", Survival.SYNCED)
    assert check_checkpoint(tmp_path / "after" / "checkpoints" / "0.0-2").ok


def test_state_that_is_no_longer_saved_is_written(tmp_path: Path) -> None:
    ledger = new_ledger()
    path = write_checkpoint(tmp_path / "checkpoints", ledger.content(tmp_path, 3), keep=1)
    assert check_checkpoint(path).ok
    np.testing.assert_array_equal(read_state(path / "state.safetensors").anchor, ledger.states[3].anchor)


def test_files_are_copied_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(checkpoints.os, "link", no_links)
    path = new_ledger().checkpoint(tmp_path, 3)
    assert not (path / "state.safetensors").samefile(tmp_path / "state" / "3.safetensors")
    assert check_checkpoint(path).ok


def test_what_a_crash_left_is_removed_and_made_again(tmp_path: Path) -> None:
    ledger = new_ledger()
    half = tmp_path / "checkpoints" / "0.0-3.partial"
    half.mkdir(parents=True)
    (half / "chain").write_bytes(b"half")
    assert names(tmp_path) == []
    assert check_checkpoint(ledger.checkpoint(tmp_path, 3)).ok
    half.mkdir()
    tidy(tmp_path / "checkpoints")
    assert not half.exists()
    assert names(tmp_path) == ["0.0-3"]


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 20 kB: what a full disk does, but for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_that_cannot_be_written_leaves_the_last_good_one(tmp_path: Path) -> None:
    ledger = new_ledger()
    good = ledger.checkpoint(tmp_path, 2, keep=1)
    content = ledger.content(tmp_path, 3)
    with small_files(), pytest.raises(StorageError, match=r"checkpoints/0\.0-3.*File too large; check the disk"):
        write_checkpoint(tmp_path / "checkpoints", content, keep=1)
    assert os.listdir(tmp_path / "checkpoints") == ["0.0-2"]
    assert check_checkpoint(good).ok


def test_full_file_system_leaves_the_last_good_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 140 << 10) as disk:
        ledger = new_ledger(2)
        good = ledger.checkpoint(disk, 1)
        with pytest.raises(StorageError, match="is full; free some space"):
            ledger.checkpoint(disk, 2)
        assert names(disk) == ["0.0-1"]
        assert check_checkpoint(good).ok


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(StorageError, match=r"checkpoints.*check the disk"):
        new_ledger().checkpoint(tmp_path, 3)
    assert (tmp_path / "checkpoints").read_text() == "a file is in the way"


@pytest.mark.parametrize(
    ("content", "why"), [(b"{", "damaged"), (b'{"names": 1}', "damaged"), (None, "there is no"), (b"\xff", "damaged")]
)
def test_layout_that_does_not_hold_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "layout.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{why}.*") as caught:
        read_layout(path)
    assert "layout.json" in str(caught.value)


# -- killed at any instant ---------------------------------------------------------------------------------------


def check_after_a_kill(ledger: CheckpointLedger, folder: Path) -> int:
    """Everything of round 2 or 3 is there, by value; the round of the newest checkpoint."""
    newest, *others = checkpoints_in(folder / "checkpoints")
    round = int(newest.name.split("-")[1])
    assert round in (2, 3)
    assert others or round == 3
    for checkpoint in (newest, *others):
        assert check_checkpoint(checkpoint).ok, checkpoint
    np.testing.assert_array_equal(read_state(newest / "state.safetensors").anchor, ledger.states[round].anchor)
    resumption = Resumption(folder, send=_nobody, on_progress=lambda _: None)
    files = resumption.on_disk()[0]
    TensorFile(files.trainer).check_whole()
    np.testing.assert_array_equal(read_work(files.work).values, ledger.work(files.position[1]).values)
    saved = max(int(path.stem) for path in (folder / "state").glob("*.safetensors"))
    np.testing.assert_array_equal(
        read_state(folder / "state" / f"{saved}.safetensors").momentum, ledger.states[saved].momentum
    )

    tidy(folder / "checkpoints")  # as the next start does, which then comes to round 3 again
    assert check_checkpoint(ledger.checkpoint(folder, 3)).ok
    assert names(folder) == ["0.0-3", "0.0-2"]
    return round


async def _nobody(_: object) -> None: ...


@pytest.mark.long
def test_last_good_one_loads_after_a_kill_at_any_of_200_instants() -> None:
    memory = Path("/dev/shm")  # a killed process loses nothing that it wrote, whatever holds the files
    scratch = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    try:
        written = subprocess.run(
            [sys.executable, "-m", "tests.node.checkpoint_writer", str(scratch), str(KILLS), "7"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        total, *kills = written.stdout.splitlines()
        ends = [int(line.split()[1]) for line in kills]
        assert len(ends) == KILLS
        assert ends.count(-9) >= KILLS * 0.9
        ledger = new_ledger()
        rounds = [check_after_a_kill(ledger, scratch / str(number)) for number in range(KILLS)]
        assert set(rounds) == {2, 3}
        assert int(total) > KILLS
    finally:
        shutil.rmtree(scratch)
