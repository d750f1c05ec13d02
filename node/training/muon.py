"""Muon: matrices move by their orthogonalised momentum, all else by AdamW.

    m ← μ · m + g                                   per matrix, μ = MOMENTUM
    u = orthogonalised(g + μ · m)                    Nesterov's
    θ ← θ − lr · weight_decay · θ − lr · RMS · √max(rows, columns) · u

so that an entry of an update is as large, RMS of the mean, as one of AdamW's is, and one learning rate and one weight
decay serve both. Orthogonalised is what has the singular vectors of a matrix and singular values near 1: ITERATIONS of
X ← a · X + (b · XXᵀ + c · (XXᵀ)²) · X, in fp32, from X = u ÷ ‖u‖.

A matrix is a parameter of two dimensions that is no embedding, nor of an embedding's shape, as the layer that leads to
tokens is. Embeddings, vectors and kernels of convolutions are AdamW's. `torch.optim.Muon` is the same arithmetic in
bf16, and refuses what is no matrix; the test compares the two.

Source: K. Jordan and others, "Muon" (2024); its scale after arXiv 2502.16982, section 2.2; as inner optimizer of DiLoCo
in MuLoCo, arXiv 2505.23725.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.node.training.adamw import BesideAdamW
from shoal.node.training.cut_tensors import own_rows, own_rows_of, whole

MOMENTUM = 0.95
RMS = 0.2
"""Of the entries of an update of AdamW, about, and so of one of a matrix here."""
ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Of the odd polynomial that brings singular values from anywhere above some 0.01 to between 0.7 and 1.2."""
_SMALLEST_NORM = 1e-7


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix`, (rows, columns), with all singular values near 1, in float32; zero stays zero."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).float()
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def matrices(model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> tuple[bool, ...]:
    """For each of `parameters` of `model` whether it is a matrix, as above."""
    embeddings = [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    shapes = {tuple(embedding.shape) for embedding in embeddings}
    return tuple(parameter.dim() == 2 and tuple(parameter.shape) not in shapes for parameter in parameters)


def move(
    matrix: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, *, lr: float, weight_decay: float
) -> None:
    """Take one step in place: the momentum first, then the matrix. A collective where it is cut."""
    own_rows(momentum).mul_(MOMENTUM).add_(own_rows(gradient))
    update = orthogonalised(whole(gradient.add(momentum, alpha=MOMENTUM)))
    rows = own_rows(matrix)
    rows.mul_(1 - lr * weight_decay)
    rows.add_(own_rows_of(update, matrix).to(rows.dtype), alpha=-lr * RMS * math.sqrt(max(matrix.shape)))


class Muon(BesideAdamW):
    """A momentum of each matrix, and AdamW's moments of all other parameters, on the parameter's device."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, matrices(model, parameters), betas=betas, weight_decay=weight_decay)
        self._momenta = [torch.zeros_like(parameter) for parameter in self._parameters]

    def _own_state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        return [(f"momentum.{name}", momentum) for name, momentum in zip(names, self._momenta, strict=True)]

    def move(self, device: torch.device) -> None:
        """Take what it knows to where the parameters went."""
        self._momenta = [momentum.to(device) for momentum in self._momenta]
        self._others.move(device)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient. A collective where matrices are cut."""
        for parameter, momentum in zip(self._parameters, self._momenta, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            move(parameter, gradient, momentum, lr=lr, weight_decay=self._weight_decay)
        self._others.step(lr)
