"""The state of a node of the strategy `gossip` as its disk has it: whole or not, for nobody certified it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from shoal.collectives.grid import Grid
from shoal.collectives.state import StateHeader, header_of
from shoal.node.state.checkpoint_check import HASH_THREADS, BadCheckpoint, CheckpointFiles
from shoal.node.state.state_files import header_in, read_state
from shoal.node.state.tensor_files import TensorFile
from shoal.protocol.errors import LocalError, StorageError


def check_own_state(folder: Path) -> StateHeader:
    """The header of the newest state in a data folder, every chunk of which has the hash it was written with.

    Raises ConfigError if there is no state, BadCheckpoint if it is damaged.
    """
    path = CheckpointFiles.find(folder).state
    try:
        written, state = header_in(TensorFile(path)), read_state(path)
        found = (
            None if written is None else header_of(state, Grid(state.numel, written.chunk_values), threads=HASH_THREADS)
        )
    except (SafetensorError, KeyError, ValueError, OSError, LocalError, StorageError) as error:
        raise BadCheckpoint(f"{path} is not readable ({error}); use another node's") from error
    if found is None or written is None or found.digest != written.digest:
        raise BadCheckpoint(f"{path} is damaged; remove it, and the state before it is used, or use another node's")
    return found
