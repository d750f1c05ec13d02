"""States as files: how they are laid out, written such that a crash cannot hurt, and read back.

A file is safetensors, with the vectors `anchor` and `momentum`, and `second_moment` where a state has one, and with
counters and the hashes of the chunks as metadata. It is believed only where its digest is a certificate's. Numbers are
little-endian.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.collectives.memory import F32, VectorPool
from shoal.collectives.state import ADAMW_KINDS, NESTEROV_KINDS, CertifiedState, StateHeader, StateKind, frozen
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile, write_tensors
from shoal.protocol.errors import StorageError
from shoal.protocol.messages import Term


def write_state(path: Path, state: CertifiedState, header: StateHeader | None = None) -> None:
    """Write a state durably; a crash leaves it whole or not there. With its header, damage can be told by the chunk.

    Raises StorageError.
    """
    metadata = {
        "rebases": str(state.term.rebases),
        "rollbacks": str(state.term.rollbacks),
        "round": str(state.round),
        "tokens": str(state.tokens),
        "layout": state.layout_hash.hex(),
    }
    if state.imaged:
        metadata["imaged"] = "1"
    if header is not None:
        metadata["chunk_values"] = str(header.chunk_values)
        metadata |= {f"{kind}_hashes": header.hashes(kind).hex() for kind in header.kinds}
    if header is not None and header.image:
        metadata["image_hashes"] = header.image.hex()
    vectors = [TensorBytes.of(str(kind), state.vector(kind)) for kind in state.kinds]
    write_tensors(path, vectors, metadata, checksum=False)


def kinds_in(file: TensorFile) -> tuple[StateKind, ...]:
    """The vectors of the state in a file, by what it names."""
    return ADAMW_KINDS if StateKind.SECOND_MOMENT in file.names else NESTEROV_KINDS


def is_imaged(file: TensorFile) -> bool:
    """True if the digest of the state in a file covers its image in bf16, by what the file says."""
    return "imaged" in file.metadata


def header_in(file: TensorFile) -> StateHeader | None:
    """The header that a state was written with, not believed yet; None if there is none, or none that holds."""
    told = file.metadata
    try:
        return StateHeader(
            term=Term(int(told["rebases"]), int(told["rollbacks"])),
            round=int(told["round"]),
            tokens=int(told["tokens"]),
            numel=(file.span("anchor")[1] - file.span("anchor")[0]) // 4,
            chunk_values=int(told["chunk_values"]),
            layout=bytes.fromhex(told["layout"]),
            anchor=bytes.fromhex(told["anchor_hashes"]),
            momentum=bytes.fromhex(told["momentum_hashes"]),
            second_moment=bytes.fromhex(told.get("second_moment_hashes", "")),
            image=bytes.fromhex(told.get("image_hashes", "")) or msgspec.UNSET,
        )
    except (KeyError, ValueError, ZeroDivisionError, DamagedFile):
        return None


def read_state(path: Path, vectors: VectorPool | None = None) -> CertifiedState:
    """Read a state into memory of `vectors`. Raises OSError, KeyError, ValueError or LocalError if the file is none.

    Raises StorageError if there is no such memory.
    """
    try:
        file = TensorFile(path)
        kinds = kinds_in(file)
        shapes = [_numel(file, kind) for kind in kinds]
    except StorageError as error:
        raise ValueError(str(error)) from None
    pool = vectors or VectorPool(0)
    told = file.metadata
    return CertifiedState.of_vectors(
        [frozen(_read_vector(file, kind, pool.take(numel))) for kind, numel in zip(kinds, shapes, strict=True)],
        term=Term(int(told["rebases"]), int(told["rollbacks"])),
        round=int(told["round"]),
        tokens=int(told["tokens"]),
        layout_hash=bytes.fromhex(told["layout"]),
        imaged=is_imaged(file),
    )


def _numel(file: TensorFile, name: str) -> int:
    begin, end = file.span(name)
    numel = (end - begin) // 4
    if file.dtype(name) != "F32" or file.shape(name) != (numel,) or not numel:
        raise ValueError(f"{name} is no vector of float32")
    return numel


def _read_vector(file: TensorFile, name: str, vector: F32) -> F32:
    """Read into `vector`, and not mapped: this file has a name, by which others may change it once it was checked."""
    begin, _ = file.span(name)
    with file.path.open("rb") as opened:
        opened.seek(file.data_offset + begin)
        if opened.readinto(vector.data.cast("B")) != vector.nbytes:
            raise ValueError(f"{name} is cut short")
    return vector
