"""What products are computed in."""

from __future__ import annotations

import pytest
import torch

from shoal.node.workloads.arithmetic import arithmetic
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("dtype", "product"), [("auto", torch.float32), ("float32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_products_on_a_cpu_are_in_bf16_where_it_is_asked_for(dtype: str, product: torch.dtype) -> None:
    with arithmetic(dtype, "cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product


def test_a_gpu_without_bf16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with arithmetic("auto", "cuda"):
        assert not torch.is_autocast_enabled("cuda")


def test_text_learns_alike_in_bf16() -> None:
    losses = {}
    for dtype in ("float32", "bf16"):
        workload = TextWorkload(width=32, layers=2, heads=2, context=16, batch=2, dtype=dtype)
        torch.manual_seed(1)
        model = workload.build()
        torch.nn.init.normal_(model.head.weight, std=0.1)
        batch = torch.arange(34, dtype=torch.uint8).view(2, 17)
        losses[dtype] = float(workload.loss(model, batch)[0].detach())
    assert losses["bf16"] != losses["float32"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.01)


def test_a_number_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is 'fp8', expected one of auto, bf16, float32"):
        TextWorkload(dtype="fp8")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch, of its own modules
def test_a_compiled_model_has_the_same_parameters() -> None:
    plain, compiled = (
        TextWorkload(width=32, layers=1, heads=2, context=16, batch=2, compile=one).build() for one in (False, True)
    )
    assert plain._compiled_call_impl is None
    assert compiled._compiled_call_impl is not None
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in compiled.named_parameters()]
