"""States as files: how they are laid out, written such that a crash cannot hurt, and read back.

A file is safetensors, with the vectors `anchor` and `momentum`, and `second_moment` where a state has one, and with
counters and the hashes of the chunks as metadata. It is believed only where its digest is a certificate's. Numbers are
little-endian.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.collectives.codecs import F32
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
    if header is not None:
        metadata["chunk_values"] = str(header.chunk_values)
        metadata |= {f"{kind}_hashes": header.hashes(kind).hex() for kind in header.kinds}
    vectors = [TensorBytes.of(str(kind), state.vector(kind)) for kind in state.kinds]
    write_tensors(path, vectors, metadata, checksum=False)


def kinds_in(file: TensorFile) -> tuple[StateKind, ...]:
    """The vectors of the state in a file, by what it names."""
    return ADAMW_KINDS if StateKind.SECOND_MOMENT in file.names else NESTEROV_KINDS


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
        )
    except (KeyError, ValueError, ZeroDivisionError, DamagedFile):
        return None


def read_state(path: Path) -> CertifiedState:
    """Read a state. Raises OSError, KeyError, ValueError or LocalError if the file is none."""
    try:
        file = TensorFile(path)
        vectors = [frozen(_read_vector(file, kind)) for kind in kinds_in(file)]
    except StorageError as error:
        raise ValueError(str(error)) from None
    told = file.metadata
    return CertifiedState.of_vectors(
        vectors,
        term=Term(int(told["rebases"]), int(told["rollbacks"])),
        round=int(told["round"]),
        tokens=int(told["tokens"]),
        layout_hash=bytes.fromhex(told["layout"]),
    )


def _read_vector(file: TensorFile, name: str) -> F32:
    """Read, and not mapped: what was checked once must not come from the disk again."""
    begin, end = file.span(name)
    numel = (end - begin) // 4
    if file.dtype(name) != "F32" or file.shape(name) != (numel,) or not numel:
        raise ValueError(f"{name} is no vector of float32")
    vector = np.fromfile(file.path, np.float32, numel, offset=file.data_offset + begin)
    if vector.size != numel:
        raise ValueError(f"{name} is cut short")
    return vector
