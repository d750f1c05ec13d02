"""The newest policies of a swarm that averages them, as the images in bf16 that samplers draw from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from shoal.collectives.memory import F32
from shoal.collectives.policy_image import U8, image_of, put_values
from shoal.node.training.accounts import Flat

KEPT: Final = 2
"""Images, two bytes a parameter each: a group may be on its way while the policy moves once."""


class PastPolicies:
    """Images of the last policies, by round. flat: of the policy whose parameters stand on them for a while.

    made_again_to: the last round of which there was another policy, which a rollback has abandoned; 0 before any.
    """

    def __init__(self, flat: Callable[[], Flat]) -> None:
        self._flat = flat
        self._images: OrderedDict[int, U8] = OrderedDict()
        self.made_again_to = 0

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of which the policy is here, the oldest first."""
        return tuple(sorted(self._images))

    def note(self, round: int, values: F32) -> None:
        """Keep the image of the policy of this round, ``(numel,) float32``; of a later one nothing is known then."""
        image, later = image_of(values), [known for known in self._images if known >= round]
        if later and not (later == [round] and np.array_equal(self._images[round], image)):
            self.made_again_to = max(self.made_again_to, *later)
        for known in later:
            del self._images[known]
        self._images[round] = image
        while len(self._images) > KEPT:
            self._images.popitem(last=False)

    @contextmanager
    def standing_on(self, round: int) -> Iterator[None]:
        """Have the policy of a round in the parameters for as long as the block lasts. Raises KeyError if not here."""
        flat, image = self._flat(), self._images[round]
        own = flat.set_aside()
        values = np.empty(image.size // 2, np.float32)
        put_values(image, values)
        flat.scatter(torch.from_numpy(values))
        try:
            yield
        finally:
            flat.scatter(own)
