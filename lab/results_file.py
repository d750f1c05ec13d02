"""Results of runs that take long, in a file: a document a line, each written as soon as it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from shoal.protocol.errors import ConfigError

RESULTS_LIMIT_BYTES: Final = 64 << 20

ResultT = TypeVar("ResultT", bound=msgspec.Struct)


def read_results(path: Path, kind: type[ResultT]) -> list[ResultT]:
    """The results that are in the file; none if there is no file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            lines = file.read(RESULTS_LIMIT_BYTES).splitlines()
        return [msgspec.json.decode(line, type=kind) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--results {path} does not hold results of this command: {error}; name another") from None


def add_result(path: Path, result: msgspec.Struct) -> None:
    """Add a result to the file. Raises ConfigError where it cannot be written."""
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise ConfigError(f"--results {path} cannot be written: {error.strerror}; name another file") from None
