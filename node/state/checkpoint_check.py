"""Checking a checkpoint: the chain from the founders on, and every chunk of the state against the certificate.

    swarm.toml ── founders ── entries of the chain, each on the one before ── certificate of the state's round: a digest
    state.safetensors: its header has that digest, and each chunk the hash that the header names

Nothing here imports torch, and no more than a chunk a thread is in memory. The manifest in the folder says who the
founders are: that they are the right ones only the reader's own manifest can tell (`expected`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.grid import Grid
from shoal.collectives.policy_image import image_of
from shoal.collectives.state import StateHeader, StateKind
from shoal.node.control_groups import usable_cores
from shoal.node.state.checkpoints import CHAIN, LAYOUT, MANIFEST, STATE, read_layout
from shoal.node.state.state_files import header_in, is_imaged, kinds_in
from shoal.node.state.store import read_records
from shoal.node.state.tensor_files import TensorFile
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, RemoteError, ShoalError
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.messages import Entry, Term, Value

HASH_THREADS = min(8, usable_cores())
CHAIN_LIMIT_BYTES = 4 << 30
_ENTRY: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class BadCheckpoint(ShoalError):
    """A state on disk that is not what was certified or written; the text names the file, and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """Result of a check. chunks: of all vectors; bad_chunks: those that are not the certified ones, as `anchor/3`.

    state_ok: chain and state hold; bad_files: others that are damaged. error: None if all is well.
    """

    ok: bool
    state_ok: bool = False
    term: str | None = None
    round: int | None = None
    digest: str | None = None
    chunks: int = 0
    bad_chunks: tuple[str, ...] = ()
    bad_files: tuple[str, ...] = ()
    swarm: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Paths of the parts: in a checkpoint, or in a node's data folder, which has the newest state it saved."""

    folder: Path
    state: Path
    chain: Path
    growing: bool
    """The chain's last entry may be half written."""

    @staticmethod
    def find(folder: Path) -> CheckpointFiles:
        """The parts in `folder`. Raises ConfigError if it is neither."""
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; give a checkpoint, or the --data-dir of a node")
        if (folder / STATE).exists() or (folder / CHAIN).exists():
            return CheckpointFiles(folder=folder, state=folder / STATE, chain=folder / CHAIN, growing=False)
        rounds = [int(path.stem) for path in (folder / "state").glob("*.safetensors") if path.stem.isdecimal()]
        if not rounds:
            raise ConfigError(f"{folder} is no checkpoint and holds no saved state; give one of a node's checkpoints/")
        state = folder / "state" / f"{max(rounds)}.safetensors"
        return CheckpointFiles(folder=folder, state=state, chain=folder / "chain.log", growing=True)


def check_checkpoint(folder: Path, *, expected: Manifest | None = None) -> CheckpointReport:
    """Check a checkpoint, or the newest state of a node's data folder. Never raises for what is in the files.

    expected: the manifest that the swarm should have. Raises ConfigError if `folder` is neither.
    """
    files = CheckpointFiles.find(folder)
    report = CheckpointReport(ok=False)
    try:
        manifest = _manifest(files, expected)
        report = replace(report, swarm=manifest.swarm_id.hex())
        state = _open_state(files.state)
        value = _certified(files, manifest, state)
        report = replace(report, term=str(value.term), round=value.state_round, digest=value.digest.hex())
        header, bad, count = _check_chunks(files.state, state, value, manifest.round.chunk_values)
        report = replace(report, chunks=count, bad_chunks=tuple(bad))
        if bad:
            raise BadCheckpoint(
                f"{files.state}: {len(bad)} of {count} chunks are not the certified ones; use another checkpoint"
            )
        bad_files = _check_beside(files, header)
    except (BadCheckpoint, ConfigError) as error:
        return replace(report, error=str(error))
    report = replace(report, state_ok=True)
    if bad_files:
        names = ", ".join(str(files.folder / name) for name in bad_files)
        text = f"damaged, or of another checkpoint: {names}; the certified state itself is whole"
        return replace(report, bad_files=bad_files, error=text)
    return replace(report, ok=True)


def read_chain(folder: Path) -> Chain:
    """The chain in a checkpoint or a data folder, every entry of it checked.

    Raises BadCheckpoint, or ConfigError if `folder` is neither.
    """
    files = CheckpointFiles.find(folder)
    return _chain(files, _manifest(files, None))


def _manifest(files: CheckpointFiles, expected: Manifest | None) -> Manifest:
    path = files.folder / MANIFEST
    if not path.exists():
        raise BadCheckpoint(f"there is no {path}; put the swarm's manifest there, or use another checkpoint")
    manifest = load_manifest(path)
    if expected is not None and manifest.swarm_id != expected.swarm_id:
        raise BadCheckpoint(
            f"{files.folder} is of another swarm, {manifest.swarm_id.hex()[:16]}… and not "
            f"{expected.swarm_id.hex()[:16]}…; give the manifest it was made with, or another checkpoint"
        )
    return manifest


def _open_state(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except FileNotFoundError:
        raise BadCheckpoint(f"there is no {path}; use another checkpoint") from None


def _chain(files: CheckpointFiles, manifest: Manifest) -> Chain:
    """Read every entry of the file, and check each. Raises BadCheckpoint."""
    path = files.chain
    try:
        size = path.stat().st_size
        if size > CHAIN_LIMIT_BYTES:
            raise BadCheckpoint(f"{path} is longer than {CHAIN_LIMIT_BYTES} bytes; use another checkpoint")
        records, whole = read_records(path)
    except FileNotFoundError:
        raise BadCheckpoint(f"there is no {path}; use another checkpoint") from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}; check its mode and the disk") from None
    if whole != size and not files.growing:
        raise BadCheckpoint(f"{path} is damaged or cut short after {len(records)} entries; use another checkpoint")
    chain = Chain(genesis(manifest.swarm_id, manifest.swarm.founders), manifest.swarm.authority, manifest=manifest)
    for number, record in enumerate(records, 1):
        try:
            chain.extend(_ENTRY.decode(record), trusted=True)
        except (msgspec.MsgspecError, RemoteError, ValueError) as error:
            raise BadCheckpoint(f"{path}: entry {number} does not hold: {error}; use another checkpoint") from None
    return chain


def _certified(files: CheckpointFiles, manifest: Manifest, state: TensorFile) -> Value:
    """The value that the state claims to belong to. Raises BadCheckpoint if the chain has none."""
    try:
        round = int(state.metadata["round"])
        term = Term(int(state.metadata["rebases"]), int(state.metadata["rollbacks"]))
    except (KeyError, ValueError):
        raise BadCheckpoint(f"{files.state} is no saved state; use another checkpoint") from None
    chain = _chain(files, manifest)
    if round < 1:
        raise BadCheckpoint(f"{files.state} is the initial state, which nobody certifies; wait for the first round")
    try:
        value = chain.value(round)
    except IndexError:
        raise BadCheckpoint(
            f"{files.chain} ends before round {round}, of which {files.state} is; use another checkpoint"
        ) from None
    if value.term != term:
        raise BadCheckpoint(
            f"{files.state} is of term {term}, the certificate of round {round} of {value.term}; use another checkpoint"
        )
    return value


def _check_chunks(path: Path, state: TensorFile, value: Value, chunk_values: int) -> tuple[StateHeader, list[str], int]:
    """The certified header, the chunks that are not as it says, and how many there are. Raises BadCheckpoint."""
    kinds = kinds_in(state)
    spans = {kind: state.span(kind) for kind in kinds}
    numel = (spans[StateKind.ANCHOR][1] - spans[StateKind.ANCHOR][0]) // 4
    if numel < 1 or any(end - begin != 4 * numel for begin, end in spans.values()):
        raise BadCheckpoint(f"{path} holds no {len(kinds)} vectors of one length; use another checkpoint")
    grid = Grid(numel, chunk_values)
    chunks = [(kind, chunk) for kind in kinds for chunk in range(grid.chunks)]
    if set(state.names) != set(kinds) or any((state.dtype(k), state.shape(k)) != ("F32", (numel,)) for k in kinds):
        raise BadCheckpoint(f"{path} has other tensors than a certified state; use another checkpoint")
    told = header_in(state)

    def hash_of(place: tuple[StateKind, int]) -> bytes:
        kind, chunk = place
        start, stop = grid.span(chunk)
        begin = spans[kind][0]
        return chunk_hash(state.data[begin + 4 * start : begin + 4 * stop])

    def hash_of_image(chunk: int) -> bytes:
        start, stop = grid.span(chunk)
        begin = spans[StateKind.ANCHOR][0]
        part = state.data[begin + 4 * start : begin + 4 * stop]  # shorter where the file was cut short
        return chunk_hash(image_of(np.frombuffer(part[: len(part) // 4 * 4], np.float32)).data)

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = list(pool.map(hash_of, chunks))
        image = b"".join(pool.map(hash_of_image, range(grid.chunks if is_imaged(state) else 0)))
    found = _header(state, value, grid, hashes, image)
    if found is not None and found.digest == value.digest:
        return found, [], len(chunks)
    if told is None or told.digest != value.digest or told.kinds != kinds:
        raise BadCheckpoint(
            f"{path} is not the state that round {value.state_round} certified, and names no chunks to tell which part "
            "is wrong; use another checkpoint"
        )
    found_and_told = zip(chunks, hashes, (told.chunk_hash(*place) for place in chunks), strict=True)
    bad = [f"{kind}/{chunk}" for (kind, chunk), found_hash, told_hash in found_and_told if found_hash != told_hash]
    return told, bad, len(chunks)


def _header(state: TensorFile, value: Value, grid: Grid, hashes: list[bytes], image: bytes) -> StateHeader | None:
    """The header that the file's values have; None if its counters are none."""
    anchor, momentum, second_moment = (b"".join(hashes[n * grid.chunks : (n + 1) * grid.chunks]) for n in range(3))
    try:
        return StateHeader(
            term=value.term,
            round=value.state_round,
            tokens=int(state.metadata["tokens"]),
            numel=grid.numel,
            chunk_values=grid.chunk_values,
            layout=bytes.fromhex(state.metadata["layout"]),
            anchor=anchor,
            momentum=momentum,
            second_moment=second_moment,
            image=image or msgspec.UNSET,
        )
    except (KeyError, ValueError):
        return None


def _check_beside(files: CheckpointFiles, header: StateHeader) -> tuple[str, ...]:
    """The names of the other files that are damaged or do not belong here."""
    bad = []
    try:
        if not files.growing:
            layout = read_layout(files.folder / LAYOUT)
            if (layout.digest, layout.numel) != (header.layout, header.numel):
                bad.append(LAYOUT)
    except ConfigError:
        bad.append(LAYOUT)
    return tuple(bad)
