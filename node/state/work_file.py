"""A node's own contribution to a round, on disk: what a restart needs to make it again the same, and to count it once.

    values        (numel,) float32: the pseudo-gradient and the residual of earlier rounds, as they were encoded
    residual.<p>  the residual of fragment p, of each that the round is not of and that has one
    retained      (numel,) float32: what of the values stays in the trainer's replica, where anything does
    metadata      term and round, the hash of the certificate's value that the round follows, weight, root, ages

With the finals of the round the residual follows from it (contributions.py), so nothing has to be written after the
round is certified. The encoding is a function of values, codec and that hash: made again it has the same root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from shoal.collectives.codecs import F32
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile, write_tensors
from shoal.protocol.messages import Count, Hash, Term

METADATA = "work"
RETAINED = "retained"
FORMAT = "shoal work 1"


class Carried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of the residual of a fragment that the round is not of."""

    fragment: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Count
    rounds_excluded: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class WorkAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a contribution. base: the value that its round follows; root: what was announced."""

    format: str = FORMAT
    term: Term
    round: Count
    base: Hash
    root: Hash
    tokens: Count
    rounds_excluded: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SavedWork:
    """A contribution as it is, or was, on disk. residuals: by fragment, of all that the account says are carried.

    retained: what of `values` stays in the trainer's replica, ``(numel,)``; None for nothing.
    """

    account: WorkAccount
    values: F32
    residuals: Mapping[int, F32] = field(default_factory=dict)
    retained: F32 | None = None


def write_work(path: Path, work: SavedWork) -> None:
    """Write it durably; a crash leaves it whole or not there. Raises StorageError."""
    metadata = {METADATA: msgspec.json.encode(work.account).decode()}
    vectors = {"values": work.values} | {f"residual.{fragment}": values for fragment, values in work.residuals.items()}
    if work.retained is not None:
        vectors[RETAINED] = work.retained
    write_tensors(path, [TensorBytes.of(name, values) for name, values in vectors.items()], metadata)


def read_account(file: TensorFile) -> WorkAccount:
    """Its numbers, not yet checked against the file's hash. Raises DamagedFile."""
    try:
        account = msgspec.json.decode(file.metadata[METADATA], type=WorkAccount)
    except (KeyError, msgspec.MsgspecError) as error:
        raise DamagedFile(f"{file.path} holds no contribution ({error}); remove it") from None
    if account.format != FORMAT:
        raise DamagedFile(f"{file.path} is of format {account.format!r}, not {FORMAT!r}; remove it")
    return account


def read_work(path: Path) -> SavedWork:
    """Read it, every byte checked. Raises DamagedFile, StorageError, FileNotFoundError."""
    file = TensorFile(path)
    file.check_whole()
    account = read_account(file)
    residuals = {one.fragment: _vector(file, f"residual.{one.fragment}") for one in account.carried}
    values = _vector(file, "values")
    retained = _vector(file, RETAINED) if RETAINED in file.names else None
    if retained is not None and retained.size != values.size:
        raise DamagedFile(f"{file.path} holds no contribution; remove it")
    return SavedWork(account, values, residuals, retained)


def _vector(file: TensorFile, name: str) -> F32:
    values = file.array(name)
    if values.dtype != np.float32 or values.ndim != 1:
        raise DamagedFile(f"{file.path} holds no contribution; remove it")
    return values.astype(np.float32)
