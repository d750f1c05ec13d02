"""The accounts of a replica that contributes gradients: it stands on the anchor exactly, and owes the swarm nothing.

With the strategy ddp a contribution is the gradient of the mean loss of one batch at the anchor, not clipped: clipping
is of the swarm's mean, in the certified step (`collectives.adamw`). A gradient belongs to the anchor at which it was
computed, so what no round has taken is dropped when the next anchor comes. What `accounts` has to keep of progress,
marks and overlap does not exist here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shoal.node.training.accounts import Contributed, Flat, Outgoing, SavedAccounts
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import SyncSettings
from shoal.protocol.errors import LocalError


class FlatGradients(Flat, Protocol):
    """A model's parameters as one host vector, and their gradients as another."""

    def gather_gradients(self, out: torch.Tensor) -> None:
        """Copy the gradients into `out`, ``(numel,) float32``; zeros for parameters that have none."""


@dataclass(frozen=True, slots=True)
class _FromGradients:
    """The gradient that the parameters have."""

    accounts: GradientAccounts
    here: bool = True

    def write(self, out: Vector) -> Contributed:
        return self.accounts.contribute(out, 0)


class GradientAccounts:
    """What a replica has contributed, in the place of `Accounts`: `apply`, `count`, `contribute`, and so on."""

    mixes = False
    overlap_left = 0
    goes_on = False
    """There are no steps but the one that a round waits for."""

    def __init__(self, flat: FlatGradients, *, contributions: int = 0) -> None:
        self._flat = flat
        self._base: torch.Tensor | None = None
        self._issued = contributions
        self.waiting = False
        """Whether a gradient was written and the anchor after it is not here yet."""
        self.tokens = 0
        """Of the batch whose gradient the parameters have."""
        self.steps = 0

    @property
    def base(self) -> torch.Tensor | None:
        """The anchor that it stands on, ``(numel,) float32``, not to be changed; None before the first `apply`."""
        return self._base

    def retune(self, sync: SyncSettings) -> None:
        """There is no overlap and no mixing to be amended."""

    def local(self) -> torch.Tensor:
        """A host copy of the parameters, ``(numel,) float32``."""
        return self._flat.gather(self._flat.new_vector())

    def write_initial(self, out: Vector) -> None:
        """Write the parameters drawn from the seed, S(0), into `out`, ``(numel,) float32``.

        Raises LocalError after the first `apply`: they are gone then.
        """
        if self._base is not None:
            raise LocalError("the initial parameters are asked for after an anchor was applied")
        self._flat.gather(torch.from_numpy(out))

    def count(self, tokens: int) -> None:
        """The parameters have the gradient of a batch of so many tokens; of none if it is not to be used."""
        self.tokens = tokens

    def mark(self, round: int) -> Outgoing:
        """What `contribute` writes: there is no step beside it, and so nothing to be settled before."""
        return _FromGradients(self)

    def contribute(self, out: Vector, round: int) -> Contributed:
        """Write the gradient to the front of `out`, ``(≥ numel,)``; zeros for what the loss does not depend on.

        Raises LocalError before an `apply`.
        """
        if self._base is None:
            raise LocalError("a contribution was ordered before any anchor was applied")
        written = out[: self._flat.layout.numel]
        if self.tokens:
            self._flat.gather_gradients(torch.from_numpy(written))
        else:
            written.fill(0.0)
        self._issued += 1
        self.waiting = True
        return Contributed(number=self._issued, tokens=self.tokens)

    def apply(self, anchor: Vector, *, round: int | None = None, taken: int = 0, fresh: bool = False) -> None:
        """Stand on a new anchor, ``(numel,) float32``. A gradient at the one before is dropped, taken or not."""
        if self._base is None:
            self._base = self._flat.new_vector()
        np.copyto(self._base.numpy(), anchor)
        self._flat.scatter(self._base)
        self.tokens, self.waiting = 0, False

    def saved(self, round: int) -> SavedAccounts:
        """What is to be kept for a restart: nothing. Raises LocalError before an `apply`."""
        if self._base is None:
            raise LocalError("a snapshot was ordered before any anchor was applied")
        return SavedAccounts(round=round, tokens=(0,))

    def restore(self, saved: SavedAccounts, *, spent: bool = False) -> None:
        """There is nothing to take over. Raises LocalError after an `apply`."""
        if self._base is not None:
            raise LocalError("a snapshot is to be restored after an anchor was applied")
