"""Members that attack every round, as a node would have to: by what they contribute, declare, and sign.

All of them act together and know what every honest member contributes before they do: more than the commitments of a
real round allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import MerkleTree, chunk_hash
from shoal.collectives.contribution import EncodedContribution
from shoal.lab.bench.train_local import LocalNode
from shoal.node.state.contributions import Made
from shoal.node.workload import Workload
from shoal.node.workloads.text import SYMBOLS, TextWorkload
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import WEIGHT_LIMIT, Ready, Value

NOISE = 100.0
CONSTANT = 10.0
FLIP = -10.0
FALSE_FLIP = -10_000.0
LITTLE = 1.5
"""Standard deviations; arXiv 1902.06156, section 3.1, comes to 0.1 for 3 of 16, which changes nothing."""
WRONG_SUM = np.float32(-10)


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """Knowledge of the attackers in a round: every honest contribution, ``(numel,) float32`` each, and the round."""

    honest: Sequence[Made]
    round: int
    seed: int

    @property
    def mean(self) -> F32:
        """Mean of the honest contributions, ``(numel,) float32``."""
        mean: F32 = np.mean([made.values for made in self.honest], axis=0, dtype=np.float32)
        return mean

    @property
    def deviation(self) -> F32:
        """Deviation of the honest contributions, value by value."""
        deviation: F32 = np.std([made.values for made in self.honest], axis=0, dtype=np.float32)
        return deviation

    @property
    def norm(self) -> float:
        """Median norm of the honest contributions."""
        return float(np.median([np.linalg.norm(made.values) for made in self.honest]))


class FlippedLabels(TextWorkload):
    """The text workload with every byte that is to be predicted turned into 255 less it."""

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Cross-entropy of the turned bytes, in nats per byte, and how many."""
        symbols = batch.long()
        logits = model(symbols[:, :-1])  # (B, T, 256)
        targets = SYMBOLS - 1 - symbols[:, 1:]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, SYMBOLS), targets.reshape(-1)), targets.numel()


class Attacker(LocalNode):
    """One attacking member. Of all attacks but label_flip it never trains, and takes no note of any state."""

    def __init__(
        self, identity: Identity, manifest: Manifest, workload: Workload, *, attack: str, options: Mapping[str, Any]
    ) -> None:
        self.attack = attack
        self._trains = attack in ("label_flip", "wrong_sums")
        super().__init__(identity, manifest, FlippedLabels(**options) if attack == "label_flip" else workload)

    def stand_on(self, state: Any) -> None:
        """Take over a certified state, if it trains."""
        if self._trains:
            super().stand_on(state)

    def announce(self, head: Value, state: Any, known: Knowledge) -> Ready:
        """Return the Ready that it announces in the round after `head`, and make the contribution for it."""
        if self._trains:
            return self.train(head, state)
        if self.attack == "copy":
            return self._copy(head, known)
        values = self._values(known)
        tokens = WEIGHT_LIMIT if self.attack == "tokens" else known.honest[0].tokens
        made = self.contributions.make(known.round, 0, tokens, values, base=head.hash)
        if self.attack == "nan":
            made = self._spoil(made)
        ready = made.ready(head, head.digest, sender=self.identity.peer_id, upload=0, download=0, reaches=())
        if self.attack == "false_norm":
            return msgspec.structs.replace(ready, squares=known.honest[0].encoded.squares)
        return ready

    def _values(self, known: Knowledge) -> F32:
        if self.attack in ("sign_flip", "tokens"):
            return known.mean * np.float32(FLIP)
        if self.attack == "false_norm":
            return known.mean * np.float32(FALSE_FLIP)
        if self.attack == "little":
            return known.mean - np.float32(LITTLE) * known.deviation * np.sign(known.mean)
        if self.attack == "nan":
            return known.mean.copy()
        constant = self.attack == "constant"
        place = (known.seed, 0) if constant else (known.seed, known.round, *self.identity.peer_id.encode())
        drawn = np.random.default_rng(place).standard_normal(known.mean.size).astype(np.float32)
        norm = known.norm * (CONSTANT if constant else NOISE)
        scaled: F32 = drawn * np.float32(norm / np.linalg.norm(drawn))
        return scaled

    def _copy(self, head: Value, known: Knowledge) -> Ready:
        """Copy the first honest member's contribution in full."""
        made = self.contributions.made = known.honest[0]
        return made.ready(head, head.digest, sender=self.identity.peer_id, upload=0, download=0, reaches=())

    def _spoil(self, made: Made) -> Made:
        """`made` with the bytes of a NaN scale at the head of every chunk, and a root over these."""
        made = self.contributions.made = replace(made, encoded=with_nan(made.encoded))
        return made

    def forget(self) -> None:
        """Drop the residuals at the end of a round, unless it trains."""
        if not self._trains:
            self.contributions.drop()


def with_nan(good: EncodedContribution) -> EncodedContribution:
    """`good`, of codec fp32 or int8, with a NaN in the first four bytes of every chunk, committed to."""
    buffer = np.array(good.buffer)
    for offset in good.offsets[:-1]:
        buffer[offset : offset + 4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    spoilt = replace(good, buffer=buffer)
    tree = MerkleTree([chunk_hash(spoilt.encoded(chunk).data) for chunk in range(good.grid.chunks)])
    for chunk in range(good.grid.chunks):
        path = tree.path(chunk)
        buffer[good.offsets[chunk + 1] - len(path) : good.offsets[chunk + 1]] = np.frombuffer(path, np.uint8)
    return replace(spoilt, root=tree.root, top=tree.top)
