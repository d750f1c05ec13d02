"""What this node has learnt and no certificate has counted yet: made into one contribution a round, counted once.

    input(e)    = pseudo-gradient of round e + residual
    residual'   = input − decoded   where the certificate of e includes the chunk (the quantisation error)
                = input             where it does not

The pseudo-gradient is θ − θᵢ of arXiv 2311.08105. A residual that was excluded as a whole for more than the staleness
limit of rounds belongs to an anchor long gone, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.collectives.codecs import F32, VALUE_LIMIT
from shoal.collectives.contribution import EncodedContribution, residual_after
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.node.work_file import SavedWork, WorkAccount
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, WEIGHT_LIMIT, Ready, Term, Value
from shoal.protocol.planning import CONTRIBUTOR


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """One round's contribution: what went in, what is sent, and its weight. `base` is the hash of C(e-1)'s value."""

    round: int
    base: bytes
    number: int
    tokens: int
    values: F32
    encoded: EncodedContribution

    def ready(self, head: Value, state: bytes, *, upload: int, download: int, reaches: Iterable[PeerId]) -> Ready:
        """The announcement of it for the round after `head`; caps in bytes/s, 0 where there are none."""
        return Ready(
            term=head.next_term,
            round=self.round,
            base=head.hash,
            role=CONTRIBUTOR,
            state=state,
            root=self.encoded.root,
            squares=self.encoded.squares,
            tokens=self.tokens,
            upload=upload,
            download=download,
            reaches=tuple(sorted(reaches))[:MEMBER_LIMIT],
        )


class Contributions:
    """The contribution of the round under way, and the residual behind it."""

    def __init__(self, grid: Grid, codec: str, staleness_rounds: int, *, sender: PeerId) -> None:
        self._grid = grid
        self._codec = codec
        self._sender = sender
        self._staleness_rounds = staleness_rounds
        self._nothing: F32 = np.zeros(grid.numel, np.float32)
        self._residual = self._nothing
        self._carried_tokens = 0
        self._rounds_excluded = 0
        self.made: Made | None = None
        self.taken = 0
        """Number of the newest contribution that was ever taken from the trainer."""

    def make(self, round: int, number: int, tokens: int, pseudo_gradient: F32, *, base: bytes) -> Made:
        """Encode this round's contribution, once; `base` is the hash of the previous certificate's value.

        Raises LocalError if it is not finite.
        """
        values = np.add(pseudo_gradient, self._residual)
        dither = Dither(base, "contribution", self._sender)
        encoded = EncodedContribution.encode(values, self._grid, self._codec, dither=dither, threads=2)
        weight = min(tokens + self._carried_tokens, WEIGHT_LIMIT)
        self.made = Made(round=round, base=base, number=number, tokens=weight, values=values, encoded=encoded)
        self.taken = number
        return self.made

    def saved(self, made: Made, term: Term) -> SavedWork:
        """What of a contribution has to be on disk, so that after a restart it can be made again and counted once."""
        account = WorkAccount(
            term=term,
            round=made.round,
            base=made.base,
            root=made.encoded.root,
            tokens=made.tokens,
            rounds_excluded=self._rounds_excluded,
        )
        return SavedWork(account, made.values)

    def make_again(self, work: SavedWork) -> bool:
        """Take up what was made before a restart, to be settled as if it had been made just now.

        Returns False, with nothing changed, if it is of another model or codec: it would not be what was announced.
        """
        account, values = work.account, work.values
        if values.size != self._grid.numel:
            return False
        dither = Dither(account.base, "contribution", self._sender)
        encoded = EncodedContribution.encode(values, self._grid, self._codec, dither=dither, threads=2)
        if encoded.root != account.root:
            return False
        # The number is the trainer's, and the one that made this is gone: it counts as older than any.
        self.made = Made(
            round=account.round, base=account.base, number=0, tokens=account.tokens, values=values, encoded=encoded
        )
        self._rounds_excluded = account.rounds_excluded
        return True

    def settle(self, round: int, included: Sequence[bool] | None, *, rounds: int = 1) -> None:
        """The round is certified; `included` says per chunk whether this node's contribution is in it.

        rounds: how many have been certified since what it stands on, this one included.
        """
        made, self.made = self.made, None
        if made is None or made.round != round:
            return
        bits = included if included is not None else [False] * self._grid.chunks
        if any(bits):
            self._carried_tokens, self._rounds_excluded = 0, 0
        else:
            self._carried_tokens, self._rounds_excluded = made.tokens, self._rounds_excluded + rounds
        if self._rounds_excluded > self._staleness_rounds:
            self.forget()
        elif all(bits) and _is_exact(made.encoded):
            self._residual = self._nothing
        else:
            self._residual = residual_after(made.values, made.encoded, bits)

    def drop(self) -> None:
        """Drop the contribution under way and the residual: the state that they stand on was abandoned."""
        self.made = None
        self.forget()

    def forget(self) -> None:
        """Drop the residual: the state it belongs to was lost or left behind."""
        self._residual = self._nothing
        self._carried_tokens, self._rounds_excluded = 0, 0


def _is_exact(encoded: EncodedContribution) -> bool:
    """Whether the codec has lost nothing: it writes fp32 as it is, and no value was so large that it was cut."""
    return encoded.codec.name == "fp32" and max(encoded.squares) < float(VALUE_LIMIT) ** 2
