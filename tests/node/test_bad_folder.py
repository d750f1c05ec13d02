"""A data folder that is not as its node left it, or a disk that takes no more: what is said, and what stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.node.node import stored_chain
from shoal.node.rounds.order_file import OrderFiles
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.state_files import read_state
from shoal.node.state.store import Store, frame_record, write_atomically
from shoal.protocol.errors import StorageError
from shoal.protocol.manifest import render_manifest
from shoal.protocol.messages import Entry, Target
from shoal.protocol.terms import make_rebase
from shoal.protocol.wire import canonical
from tests.node.checkpoint_lab import CheckpointLedger, manifest_of, new_ledger
from tests.node.donors import World
from tests.node.lab import assert_one_line, shoal
from tests.node.ledger import AUTHORITY, OUTER, Ledger, forged
from tests.small_disk import small_disk

# -- the chain -----------------------------------------------------------------------------------------------

Spoil = Callable[[list[Entry]], list[Entry]]


def without_the_second(entries: list[Entry]) -> list[Entry]:
    return [entries[0], *entries[2:]]


def with_a_forged_one(entries: list[Entry]) -> list[Entry]:
    return [entries[0], forged(entries[1]), *entries[2:]]  # type: ignore[arg-type]


def with_two_swapped(entries: list[Entry]) -> list[Entry]:
    return [entries[1], entries[0], *entries[2:]]


def of_another_swarm(entries: list[Entry]) -> list[Entry]:
    return list(new_ledger(name="another").chain.after(0, 9))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without_the_second, "the certificate of round 3 does not follow round 1"),
        (with_a_forged_one, "the certificate of round 2 has a forged signature"),
        (with_two_swapped, "the certificate of round 2 does not follow round 0"),
        (of_another_swarm, "the certificate of round 1 does not follow round 0"),
    ],
)
def test_chain_that_does_not_hold_is_named(tmp_path: Path, spoil: Spoil, why: str) -> None:
    chain = chain_log(tmp_path, new_ledger(), spoil)
    with Store(tmp_path / "data") as store:
        pass
    (store.folder / "chain.log").write_bytes(chain)
    with Store(store.folder) as store, pytest.raises(StorageError) as caught:
        stored_chain(store, manifest_of())
    assert str(caught.value).startswith(f"{store.folder}/chain.log does not hold ({why}")
    assert str(caught.value).endswith("); remove it to fetch it anew")
    assert (store.folder / "chain.log").read_bytes() == chain


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("cut", [True, False])
def test_entries_that_the_chain_lost_are_taken_from_the_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: bool
) -> None:
    """Where the log was cut short within the second, or only that is damaged and others hold behind it."""
    ledger = new_ledger(rounds=4)
    data = chain_log(tmp_path, ledger, list)
    ends = [len(chain_log(tmp_path / str(n), ledger, lambda entries, n=n: entries[:n])) for n in (1, 2)]  # type: ignore[misc]
    path = tmp_path / "data" / "chain.log"
    ledger.checkpoint(path.parent, 2)
    path.write_bytes(data[: ends[1] - 9] if cut else damaged(data, ends[1] - 9))
    expected = ledger.chain.after(0, 2 if cut else 4)
    for _ in range(2):
        with Store(path.parent) as store:
            assert stored_chain(store, manifest_of()).entries == expected
        assert caplog.text.count("chain.log had lost") == 1


def test_checkpoint_that_does_not_fit_the_chain_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, path = new_ledger(), tmp_path / "data" / "chain.log"
    chain = chain_log(tmp_path, ledger, lambda entries: entries[:1])
    checkpoint = ledger.checkpoint(path.parent, 3) / "chain"
    path.write_bytes(chain)
    whole = checkpoint.read_bytes()
    first = len(b"".join(framed(ledger.chain.after(0, 1))))
    forged_chain = b"".join(framed(with_a_forged_one(list(ledger.chain.entries))))
    another = b"".join(framed(of_another_swarm([])))
    for spoilt in (forged_chain, another, b"", damaged(whole, first + 40), frame_record(b"none")):
        checkpoint.write_bytes(spoilt)
        with Store(path.parent) as store:
            assert stored_chain(store, manifest_of()).entries == ledger.chain.after(0, 1)
        assert path.read_bytes() == chain
    checkpoint.write_bytes(whole)
    with Store(path.parent) as store:
        assert stored_chain(store, manifest_of()).entries == ledger.chain.entries


def test_rebase_that_the_chain_lost_is_taken_from_the_newest_checkpoint_though_fewer_entries_are_left(
    tmp_path: Path,
) -> None:
    manifest = msgspec.structs.replace(
        manifest_of(), swarm=msgspec.structs.replace(manifest_of().swarm, authority=AUTHORITY.peer_id)
    )
    ledger = CheckpointLedger(manifest=manifest)
    ledger.certify(3)
    path = tmp_path / "data" / "chain.log"
    path.parent.mkdir()
    path.write_bytes(chain_log(tmp_path, ledger, list))
    first = ledger.chain.after(0, 1)[0]
    entries = (first, make_rebase(AUTHORITY, first.value, ledger.peers))
    write_atomically(made(path.parent / "checkpoints" / "1.0-2") / "chain", *framed(entries))
    with Store(path.parent) as store:
        assert stored_chain(store, manifest).entries == entries
    with Store(path.parent) as store:
        assert tuple(store.certificates()) == entries


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def framed(entries: Iterable[Entry]) -> Iterator[bytes]:
    return (frame_record(canonical(entry)) for entry in entries)


def test_node_does_not_start_on_a_forged_chain_and_leaves_all_as_it_is(tmp_path: Path) -> None:
    manifest, folder = tmp_path / "swarm.toml", tmp_path / "data"
    manifest.write_text(render_manifest(manifest_of()))
    ledger = new_ledger()
    files = {folder / "chain.log": chain_log(tmp_path, ledger, with_a_forged_one)}
    files |= {path: path.read_bytes() for path in (ledger.saved(folder, 2), ledger.saved(folder, 3))}
    (folder / "chain.log").write_bytes(files[folder / "chain.log"])
    done = shoal("run", str(manifest), "--data-dir", str(folder), "--no-mdns")
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, str(folder / "chain.log"), "has a forged signature", "remove it to fetch it anew")
    assert {path: path.read_bytes() for path in files} == files


def chain_log(folder: Path, ledger: Ledger, spoil: Spoil) -> bytes:
    """The log of a node that appended these entries, in a folder of its own."""
    (folder / "spoilt").mkdir(parents=True)
    with Store(folder / "spoilt") as store:
        for entry in spoil(list(ledger.chain.after(0, 9))):
            store.append_certificate(entry)
    return (folder / "spoilt" / "chain.log").read_bytes()


# -- a rollback on a disk that is full -----------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 200 kB: two states of 80 kB and not a third."""
    with small_disk(tmp_path / "disk", 200 << 10) as folder:
        yield folder


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_state_to_go_back_to_that_does_not_fit_leaves_those_before(disk: Path) -> None:
    ledger = Ledger()
    ledger.certify(4)
    world = World(disk, ledger)
    earlier = EarlierStates(disk / "me", chain=ledger.chain, cache=world.cache, outer=OUTER)
    for round in (1, 2):
        trio.run(earlier.keep, ledger.states[round])
    with pytest.raises(StorageError, match=r"disk/me/rollback is full; free some space or choose another --data-dir"):
        trio.run(earlier.keep, ledger.states[3])
    kept = sorted((disk / "me" / "rollback").iterdir())
    assert [path.name for path in kept] == ["1.safetensors", "2.safetensors"]
    for path in kept:
        assert read_state(path).anchor.tobytes() == ledger.states[int(path.stem)].anchor.tobytes()


def test_order_that_does_not_fit_leaves_the_one_before(disk: Path) -> None:
    orders = OrderFiles(disk)
    before, after = Target(3, bytes(32)), Target(2, bytes(32))
    orders.write(before)
    fill(disk)
    with pytest.raises(StorageError, match="is full; free some space"):
        orders.write(after)
    assert orders.read() == (before,)
    (disk / "ballast").unlink()
    orders.write(after)
    assert orders.read() == (after,)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for attempt in (partial(orders.write, before), partial(orders.remove, Target)):
        with pytest.raises(StorageError, match="cannot be written; give this user the folder"):
            attempt()
    assert orders.read() == (after,)
    assert os.listdir(disk) == ["rollback.order"]
