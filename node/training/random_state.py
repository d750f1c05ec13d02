"""The random numbers of a trainer process: torch's, numpy's and Python's generators, as tensors and plain numbers.

A workload may draw from any of them, and goes on with the same numbers after a restart. Nothing is pickled: states are
integers and bytes, checked before they are put back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile

METADATA = "random"
_PYTHON_VERSION = 3
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


class _Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of the generators' states that are no arrays."""

    python_gauss: float | None
    numpy_position: Annotated[int, msgspec.Meta(ge=0, le=_NUMPY_WORDS)]
    numpy_has_gauss: Annotated[int, msgspec.Meta(ge=0, le=1)]
    numpy_gauss: float


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """State of this process's random generators: torch's on CPU and CUDA, Python's, numpy's."""

    cpu: npt.NDArray[np.uint8]
    cuda: npt.NDArray[np.uint8] | None
    python: npt.NDArray[np.uint32]
    numpy: npt.NDArray[np.uint32]
    numbers: _Numbers

    @staticmethod
    def capture(device: torch.device) -> RandomState:
        """Copy the generators' states as they stand now; `device` is the one that the model is on."""
        _, words, python_gauss = random.getstate()
        # numpy's own bookkeeping of the legacy generator, which is what np.random.* draws from
        legacy: Any = np.random.get_state(legacy=False)
        return RandomState(
            cpu=torch.get_rng_state().numpy().copy(),
            cuda=torch.cuda.get_rng_state(device).numpy().copy() if device.type == "cuda" else None,
            python=np.array(words, np.uint32),
            numpy=np.array(legacy["state"]["key"], np.uint32),
            numbers=_Numbers(
                python_gauss=python_gauss,
                numpy_position=int(legacy["state"]["pos"]),
                numpy_has_gauss=int(legacy["has_gauss"]),
                numpy_gauss=float(legacy["gauss"]),
            ),
        )

    def restore(self, device: torch.device) -> None:
        """Put the generators back to where they stood."""
        torch.set_rng_state(torch.from_numpy(self.cpu))
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(self.cuda), device)
        numbers = self.numbers
        random.setstate((_PYTHON_VERSION, tuple(self.python.tolist()), numbers.python_gauss))
        np.random.set_state(
            ("MT19937", self.numpy, numbers.numpy_position, numbers.numpy_has_gauss, numbers.numpy_gauss)
        )

    def tensors(self) -> list[TensorBytes]:
        """The arrays of it, as they go into a file."""
        named = {"torch": self.cpu, "cuda": self.cuda, "python": self.python, "numpy": self.numpy}
        return [TensorBytes.of(f"random.{name}", array) for name, array in named.items() if array is not None]

    def metadata(self) -> Mapping[str, str]:
        """The rest of it."""
        return {METADATA: msgspec.json.encode(self.numbers).decode()}

    @staticmethod
    def read(file: TensorFile) -> RandomState:
        """Out of a file. Raises DamagedFile if there is none in it that this process could take."""
        try:
            numbers = msgspec.json.decode(file.metadata[METADATA], type=_Numbers)
        except (KeyError, msgspec.MsgspecError) as error:
            raise DamagedFile(f"{file.path} holds no state of random numbers ({error}); remove it") from None
        expected = torch.get_rng_state().numel()
        state = RandomState(
            cpu=_words(file, "torch", np.uint8, expected),
            cuda=_words(file, "cuda", np.uint8, None) if "random.cuda" in file.names else None,
            python=_words(file, "python", np.uint32, _PYTHON_WORDS),
            numpy=_words(file, "numpy", np.uint32, _NUMPY_WORDS),
            numbers=numbers,
        )
        if not 0 < state.python[-1] <= _PYTHON_WORDS - 1:
            raise DamagedFile(f"{file.path} holds no state of Python's random numbers; remove it")
        return state


def _words(file: TensorFile, name: str, dtype: type[Any], count: int | None) -> npt.NDArray[Any]:
    words = file.array(f"random.{name}")
    if words.dtype != dtype or words.ndim != 1 or count not in (None, words.size):
        raise DamagedFile(f"{file.path} holds {words.size} words of {name}'s random numbers; remove it")
    return words.copy()
