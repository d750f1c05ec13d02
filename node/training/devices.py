"""Which device a trainer computes on."""

from __future__ import annotations

import torch

from shoal.protocol.errors import ConfigError


def pick_device(wanted: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``mps`` into a device. Raises `ConfigError` if it is not there."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if wanted == "auto":
        return torch.device(next(name for name, there in present.items() if there))
    if not present.get(wanted.partition(":")[0], False):
        there = ", ".join(name for name, there in present.items() if there)
        raise ConfigError(f"device {wanted!r} is not available here; use auto or one of: {there}")
    return torch.device(wanted)
