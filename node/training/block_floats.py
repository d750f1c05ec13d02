"""Tensors of 8 bits a value: small floating-point numbers in blocks that share an exponent.

A row of a tensor, all that belongs to one index of its first dimension, is cut into as few equal blocks of at most
BLOCK_VALUES values as there can be. A block has one byte beside its values', E, the exponent of its largest magnitude,
and each value is

    signed     1 bit of sign, 7 of level     16 octaves below 2^(E+1); level 0 is zero
    unsigned   8 bits of level               32 octaves below 2^(E+1); level 0 is the least of them and no zero

with 8 levels an octave: a level is the exponent and the first three bits of the fraction, as float32 has them, counted
from below. A value is rounded to one of its two neighbours at random, so that the mean is the value (`rounding`). Since
E is a power of two, the levels stay where they are when the largest of a block changes, and what did not change is the
same after any number of roundings.

That level 0 is no zero where there is no sign keeps quotients by the root of such a number from growing without
bounds: what is too small for its block is taken for larger than it is.

As blocks are parts of rows, processes that hold some rows each have whole blocks.

Source: blocks after 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861; their common power of two after
Microscaling Data Formats, arXiv 2310.10537.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shoal.node.training.cut_tensors import own_rows, zeros_beside

BLOCK_VALUES = 128
_DROPPED = 20
"""Bits of a float32 fraction that are rounded off: three are left."""
_LEVELS = 8
"""In an octave."""
_FRACTION = 23


class BlockFloats:
    """One tensor in 8 bits, zero at first."""

    def __init__(self, like: torch.Tensor, *, signed: bool) -> None:
        """Make one of as many rows as `like` has, each of as many values; cut as it is."""
        self._values = like.numel() // len(like)
        blocks = -(-self._values // BLOCK_VALUES)
        width = -(-self._values // blocks)
        self.signed = signed
        self.codes = zeros_beside(like, (blocks, width), torch.uint8)
        """``(rows, blocks, width) uint8``; the last block of a row may have values too many, which are zero."""
        self.exponents = zeros_beside(like, (blocks,), torch.uint8)
        """``(rows, blocks) uint8``: E, biased as in float32; 0 for a block of zeros."""

    def to(self, device: torch.device) -> None:
        """Take it to a device."""
        self.codes, self.exponents = self.codes.to(device), self.exponents.to(device)

    @property
    def _top(self) -> int:
        return 127 if self.signed else 255

    def _lowest(self, exponents: torch.Tensor) -> torch.Tensor:
        """Offset of a level that makes it the upper 12 bits of a float32; ``(rows, blocks, 1) int32``."""
        return (exponents.to(torch.int32)[..., None] + 1).mul_(_LEVELS).sub_(self._top)

    def read(self, rows: slice) -> torch.Tensor:
        """The values of some of this process' rows, ``(rows, values) float32``."""
        codes = own_rows(self.codes)[rows].to(torch.int32)
        level = codes & self._top
        bits = (level + self._lowest(own_rows(self.exponents)[rows])).clamp_(min=0) << _DROPPED
        if self.signed:
            bits.masked_fill_(level == 0, 0).bitwise_or_((codes >> 7) << 31)
        return bits.view(torch.float32).flatten(1)[:, : self._values]

    def write(self, rows: slice, values: torch.Tensor, words: torch.Tensor) -> None:
        """Round values, ``(rows, values) float32``, all below 2^126, to be theirs.

        words: 20 random bits for each, ``(rows, values) int32``.
        """
        codes, exponents = own_rows(self.codes)[rows], own_rows(self.exponents)[rows]
        bits = values.contiguous().view(torch.int32)
        magnitude = bits & 0x7FFF_FFFF
        level = (magnitude + words) >> _DROPPED
        if more := codes.shape[1] * codes.shape[2] - self._values:
            bits, magnitude, level = (F.pad(part, (0, more)) for part in (bits, magnitude, level))
        exponents.copy_(magnitude.view(codes.shape).amax(-1) >> _FRACTION)
        level = level.view(codes.shape).sub_(self._lowest(exponents)).clamp_(0, self._top)
        if self.signed:
            level.bitwise_or_((bits.view(codes.shape) >> 24) & 0x80)
        codes.copy_(level)
