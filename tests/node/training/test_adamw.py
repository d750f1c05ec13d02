"""Our AdamW is torch's."""

from __future__ import annotations

import torch

from shoal.node.training.adamw import AdamW


def test_adamw_agrees_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (2,))]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    mine = AdamW(ours, betas=(0.9, 0.95), weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.0, foreach=False, **settings)  # type: ignore[arg-type]
    for step in range(20):
        reference.zero_grad()
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = None
            if index == 2 and step % 3:
                continue  # a parameter that not every step gives a gradient
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        lr = 0.01 * (step + 1)
        reference.param_groups[0]["lr"] = lr
        mine.step(lr)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
