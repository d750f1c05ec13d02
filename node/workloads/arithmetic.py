"""Number formats of a workload's products: one rule for all workloads that have a choice."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

DTYPES: Final = ("auto", "bf16", "float32")


def arithmetic(dtype: str, device: str) -> AbstractContextManager[object]:
    """Compute forward passes within in one of `DTYPES`; parameters, gradients and sums over them stay float32.

    device: a kind of device, such as cuda. auto is bf16 on CUDA, else float32. A GPU without bf16 computes in float32.
    """
    import torch  # here, as the names alone are wanted where nothing is computed

    wanted = dtype == "bf16" or (dtype == "auto" and device == "cuda")
    if not wanted or (device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return nullcontext()
    return torch.autocast(device, torch.bfloat16)
