"""Bytes a parameter that a trainer takes, by its optimizer: one formula, for whoever asks before there is one.

    parameters 4 + gradients 4 + moments m     on the device of the model
    parameters as contributed 4                in host memory

so 12 + m. The anchor, and what a snapshot is copied to, lie in files whose pages the system can drop; where the device
is a GPU they are page-locked memory: another 8 + m of the host. What layers keep for the backward pass comes on top,
and depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.protocol.manifest import OptimizerName

MOMENT_BYTES: Final[Mapping[OptimizerName, float]] = {"adamw": 8, "adamw8bit": 2.1, "muon": 8}
"""At most. In 8 bits two, and two for each block; muon keeps one number of a matrix' values in place of two."""
_ELSE_BYTES: Final = 12


def trainer_bytes(optimizer: OptimizerName) -> float:
    """Bytes that a trainer takes for each parameter."""
    return _ELSE_BYTES + MOMENT_BYTES[optimizer]
