"""Verifying a checkpoint: what is whole is found whole, and of what is not the file is named."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.collectives.state import header_of
from shoal.node.state.checkpoint_check import CheckpointReport, check_checkpoint
from shoal.node.state.checkpoint_export import export_model
from shoal.node.state.checkpoints import read_layout
from shoal.node.state.state_files import write_state
from shoal.node.state.store import frame_record
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.manifest import render_manifest
from shoal.protocol.messages import Certificate
from shoal.protocol.wire import canonical
from tests.node.checkpoint_lab import CheckpointLedger, manifest_of, new_ledger
from tests.node.ledger import GRID, certificate_of, forged, identity

CHUNK_BYTES = 4 * 4096


@pytest.fixture
def ledger() -> CheckpointLedger:
    return new_ledger()


@pytest.fixture
def checkpoint(ledger: CheckpointLedger, tmp_path: Path) -> Path:
    return ledger.checkpoint(tmp_path, 2)


def rewrite_chain(path: Path, entries: list[Certificate]) -> None:
    path.write_bytes(b"".join(frame_record(canonical(entry)) for entry in entries))


def entries_of(ledger: CheckpointLedger, round: int) -> list[Certificate]:
    return [entry for entry in ledger.chain.after(0, round) if isinstance(entry, Certificate)]


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_whole_checkpoint_is_ok(ledger: CheckpointLedger, checkpoint: Path) -> None:
    assert check_checkpoint(checkpoint, expected=manifest_of()) == CheckpointReport(
        ok=True,
        state_ok=True,
        term="0.0",
        round=2,
        digest=ledger.chain.value(2).digest.hex(),
        chunks=6,
        swarm=ledger.manifest.swarm_id.hex(),
    )


def test_data_folder_is_checked_by_its_newest_state(ledger: CheckpointLedger, tmp_path: Path) -> None:
    for round in (1, 3):
        ledger.saved(tmp_path, round)
    rewrite_chain(tmp_path / "chain.log", entries_of(ledger, 3))
    with (tmp_path / "chain.log").open("ab") as log:
        log.write(b"the next one, half writ")
    (tmp_path / "swarm.toml").write_text(render_manifest(ledger.manifest))
    report = check_checkpoint(tmp_path)
    assert (report.ok, report.round, report.digest) == (True, 3, ledger.chain.value(3).digest.hex())


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        (0, "anchor/0"),
        (2 * CHUNK_BYTES + 7, "anchor/2"),
        (40_000, "momentum/0"),
        (79_999, "momentum/2"),
    ],
)
def test_changed_value_is_found_by_its_chunk(checkpoint: Path, place: int, bad: str) -> None:
    path = checkpoint / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[data_start(path) + place] ^= 1
    path.write_bytes(data)
    report = check_checkpoint(checkpoint)
    assert (report.ok, report.chunks, report.bad_chunks) == (False, 6, (bad,))
    assert report.error is not None
    assert "state.safetensors: 1 of 6 chunks" in report.error
    assert "use another checkpoint" in report.error


def test_swapped_chunks_are_both_bad(checkpoint: Path) -> None:
    path = checkpoint / "state.safetensors"
    data, at = bytearray(path.read_bytes()), data_start(path)
    first, second = slice(at, at + CHUNK_BYTES), slice(at + CHUNK_BYTES, at + 2 * CHUNK_BYTES)
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    assert check_checkpoint(checkpoint).bad_chunks == ("anchor/0", "anchor/1")


def test_chunks_that_were_cut_off_are_bad(checkpoint: Path) -> None:
    path = checkpoint / "state.safetensors"
    path.write_bytes(path.read_bytes()[: data_start(path) + 40_000 + CHUNK_BYTES + 1])
    assert check_checkpoint(checkpoint).bad_chunks == ("momentum/1", "momentum/2")


def test_hashes_that_lie_about_the_values_help_nobody(ledger: CheckpointLedger, checkpoint: Path) -> None:
    """A state that was replaced, hashes and all: they have not the certified digest, and no chunk is named."""
    replaced = replace(ledger.states[1], round=2, tokens=ledger.states[2].tokens)
    write_state(checkpoint / "state.safetensors", replaced, header_of(replaced, GRID))
    report = check_checkpoint(checkpoint)
    assert (report.ok, report.bad_chunks) == (False, ())
    assert "is not the state that round 2 certified" in str(report.error)


Damage = Callable[[CheckpointLedger, Path], None]


def a_missing_certificate(ledger: CheckpointLedger, folder: Path) -> None:
    rewrite_chain(folder / "chain", entries_of(ledger, 2)[1:])


def a_missing_last_certificate(ledger: CheckpointLedger, folder: Path) -> None:
    rewrite_chain(folder / "chain", entries_of(ledger, 1))


def a_forged_certificate(ledger: CheckpointLedger, folder: Path) -> None:
    first, second = entries_of(ledger, 2)
    rewrite_chain(folder / "chain", [first, forged(second)])


def a_certificate_of_strangers(ledger: CheckpointLedger, folder: Path) -> None:
    first, second = entries_of(ledger, 2)
    rewrite_chain(folder / "chain", [first, certificate_of(second.value, [identity(n) for n in (7, 8, 9)])])


def a_chain_cut_short(ledger: CheckpointLedger, folder: Path) -> None:
    path = folder / "chain"
    path.write_bytes(path.read_bytes()[:-1])


def no_chain(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "chain").unlink()


def no_manifest(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "swarm.toml").unlink()


def another_swarm(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "swarm.toml").write_text(render_manifest(manifest_of("another")))


def no_state(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "state.safetensors"
    data = path.read_bytes()
    header = json.loads(data[8 : data_start(path)])
    change(header)
    told = json.dumps(header).encode()
    path.write_bytes(len(told).to_bytes(8, "little") + told + data[data_start(path) :])


def another_type(ledger: CheckpointLedger, folder: Path) -> None:
    rewrite_header(folder, lambda header: header["anchor"].update(dtype="I32"))


def another_shape(ledger: CheckpointLedger, folder: Path) -> None:
    rewrite_header(folder, lambda header: header["anchor"].update(shape=[2, header["anchor"]["shape"][0] // 2]))


def another_tensor(ledger: CheckpointLedger, folder: Path) -> None:
    end = ledger.states[2].numel * 8
    rewrite_header(
        folder, lambda header: header.update(evil={"dtype": "F32", "shape": [0], "data_offsets": [end, end]})
    )


def a_pipe(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "state.safetensors").unlink()
    os.mkfifo(folder / "state.safetensors")


def a_chain_that_is_a_device(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "chain").unlink()
    (folder / "chain").symlink_to("/dev/zero")


def no_header(ledger: CheckpointLedger, folder: Path) -> None:
    (folder / "state.safetensors").write_bytes(b"\xff" * 200)


def of_the_beginning(ledger: CheckpointLedger, folder: Path) -> None:
    write_state(folder / "state.safetensors", ledger.states[0], ledger.header(0))


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (a_missing_certificate, "chain", "entry 1 does not hold: the certificate of round 2 does not follow"),
        (a_missing_last_certificate, "chain", "ends before round 2"),
        (a_forged_certificate, "chain", "entry 2 does not hold: the certificate of round 2 has a forged signature"),
        (a_certificate_of_strangers, "chain", "entry 2 does not hold: the certificate of round 2 has no quorum"),
        (a_chain_cut_short, "chain", "damaged or cut short after 1 entries"),
        (no_chain, "chain", "there is no"),
        (no_manifest, "swarm.toml", "there is no"),
        (another_swarm, "chain", "entry 1 does not hold"),
        (no_state, "state.safetensors", "there is no"),
        (no_header, "state.safetensors", "damaged"),
        (another_type, "state.safetensors", "has other tensors than a certified state"),
        (another_shape, "state.safetensors", "has other tensors than a certified state"),
        (another_tensor, "state.safetensors", "has other tensors than a certified state"),
        (a_pipe, "state.safetensors", "it is no regular file"),
        (a_chain_that_is_a_device, "chain", "it is no regular file"),
        (of_the_beginning, "state.safetensors", "the initial state, which nobody certifies"),
    ],
)
def test_what_does_not_hold_is_named(
    ledger: CheckpointLedger, checkpoint: Path, damage: Damage, file: str, words: str
) -> None:
    damage(ledger, checkpoint)
    report = check_checkpoint(checkpoint)
    assert (report.ok, report.state_ok, report.bad_chunks) == (False, False, ())
    assert str(checkpoint / file) in str(report.error)
    assert words in str(report.error)


def test_checkpoint_of_another_swarm_is_told_by_the_readers_manifest(checkpoint: Path) -> None:
    report = check_checkpoint(checkpoint, expected=manifest_of("another"))
    assert not report.ok
    assert "of another swarm" in str(report.error)


@pytest.mark.parametrize("what", ["names", "length"])
def test_damage_beside_the_state_is_told_apart(checkpoint: Path, what: str) -> None:
    layout = Layout(names=("other",), shapes=((10_000,),), numel=10_000)
    if what == "length":
        layout = msgspec.structs.replace(read_layout(checkpoint / "layout.json"), numel=10_001)
    (checkpoint / "layout.json").write_bytes(msgspec.json.encode(layout))
    report = check_checkpoint(checkpoint)
    assert (report.ok, report.state_ok, report.bad_files) == (False, True, ("layout.json",))
    assert f"{checkpoint / 'layout.json'}; the certified state itself is whole" in str(report.error)


def test_files_of_another_checkpoint_are_told_apart(ledger: CheckpointLedger, checkpoint: Path) -> None:
    other, name = ledger.checkpoint(checkpoint.parent.parent, 3), "state.safetensors"
    swap(checkpoint / name, other / name)
    newer, older = check_checkpoint(checkpoint), check_checkpoint(other)
    assert f"{checkpoint / 'chain'} ends before round 3, of which {checkpoint / name} is" in str(newer.error)
    assert (older.ok, older.round) == (True, 2)
    swap(checkpoint / name, other / name)
    assert check_checkpoint(checkpoint).ok
    assert check_checkpoint(other).ok


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The same folder without the right to write there, be it for root: a bind mount, or the folder's mode."""
    bind = subprocess.run(["mount", "--bind", str(folder), str(folder)], check=False, capture_output=True)
    if bind.returncode:
        if os.geteuid() == 0:
            pytest.skip("mounting is not permitted here, and root may write anywhere")
        folder.chmod(0o500)
    else:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    try:
        yield
    finally:
        if bind.returncode:
            folder.chmod(0o700)
        else:
            subprocess.run(["umount", str(folder)], check=True)


def test_checkpoint_is_checked_and_exported_from_where_nothing_can_be_written(
    ledger: CheckpointLedger, checkpoint: Path, tmp_path: Path
) -> None:
    digest = ledger.header(2).digest.hex()
    with read_only(checkpoint):
        with pytest.raises(OSError, match=r"probe"):
            (checkpoint / "probe").write_bytes(b"")
        assert check_checkpoint(checkpoint).ok
        model = export_model(checkpoint, tmp_path / "out", digest=digest)
        assert model.stat().st_size > 40_000
        with pytest.raises(StorageError, match="cannot be written; give this user the folder or choose another --out"):
            export_model(checkpoint, checkpoint, digest=digest)
        with pytest.raises(StorageError, match=r"cannot be written.*another --out"):
            export_model(checkpoint, checkpoint / "out", digest=digest)
    assert check_checkpoint(checkpoint).ok


def test_folder_that_is_no_checkpoint_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint and holds no saved state"):
        check_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder .*none; give a checkpoint"):
        check_checkpoint(tmp_path / "none")
