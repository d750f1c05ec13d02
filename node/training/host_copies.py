"""Tensors that leave their device for a while, and come back as the objects they are.

What others hold of them stays valid: views, and the parameters of a model that is cut into parts, of which each library
keeps references of its own. So no tensor is replaced; its storage is copied to the host, and made empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostCopies:
    """The storages of some tensors, on the host. While it exists the tensors must not be used."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy them, each storage once, and give the memory that they had back to their devices."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._copies = [(storage, _copied(storage)) for storage in storages.values() if storage.nbytes()]
        for storage, _ in self._copies:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """How much was given back."""
        return sum(copy.nbytes() for _, copy in self._copies)

    def put_back(self) -> None:
        """Have them on their devices again, to the bit."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies = []


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes(), device="cpu")  # type: ignore[no-untyped-call]
    copy.copy_(storage)
    return copy
