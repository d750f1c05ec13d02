"""A model's parameters as one vector: what is read and replaced of it, in spans that know nothing of parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.training import accounts
from shoal.node.training.accounts import changed
from shoal.node.training.flat_parameters import DeviceCopies, FlatParameters, HostCopy
from shoal.protocol.errors import ConfigError

SHAPES = ((3, 4), (1,), (5,), (2, 3, 2), (7,))


class Model(torch.nn.Module):
    """Parameters of several shapes; the last but one is not contiguous, and the first has two names."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            value = torch.randn(shape)
            if number == 3:
                value = torch.randn(tuple(reversed(shape))).permute(2, 1, 0)
            self.register_parameter(f"p{number}", torch.nn.Parameter(value))
        self.tied = self.p0


NUMEL = FlatParameters(Model()).layout.numel
Spans = st.lists(st.integers(0, NUMEL), min_size=2, max_size=8, unique=True).map(
    lambda ends: [slice(a, b) for a, b in zip(*[iter(sorted(ends)[: len(ends) // 2 * 2])] * 2, strict=True)]
)


@settings(max_examples=60)
@given(Spans)
def test_spans_are_read_and_replaced_wherever_parameters_begin(spans: list[slice]) -> None:
    flat = FlatParameters(Model())
    whole = flat.gather(flat.new_vector())
    read = flat.copy_out(spans).wait()
    assert torch.equal(read, torch.cat([whole[span] for span in spans]))
    assert torch.equal(flat.to_device(whole, spans), read)
    flat.update(spans, lambda values: values.mul_(-2))
    expected = whole.clone()
    for span in spans:
        expected[span] *= -2
    assert torch.equal(flat.gather(flat.new_vector()), expected)
    assert torch.equal(read, torch.cat([whole[span] for span in spans]))  # what was read is a copy


def test_parameters_stay_the_objects_they_are_and_keep_their_gradients() -> None:
    model = Model()
    flat = FlatParameters(model)
    before = dict(model.named_parameters())
    sum(parameter.sum() for parameter in before.values()).backward()  # type: ignore[union-attr]
    flat.update([slice(0, NUMEL)], torch.zeros_like)
    assert all(value is before[name] and not value.any() for name, value in model.named_parameters())
    assert all(value.grad is not None and bool((value.grad == 1).all()) for value in before.values())
    assert torch.equal(model.tied, torch.zeros(SHAPES[0]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [3, 8])
def test_chunks_are_changed_where_a_bit_is(threads: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where numbers are called equal: the two zeros, and a value that is no number, which is as it was."""
    monkeypatch.setattr(accounts, "THREADED_VALUES", 50 * length)
    before = np.random.default_rng(0).standard_normal(100 * length).astype(np.float32)
    before[[0, length]] = 0.0, np.nan
    after = before.copy()
    after[0] = -0.0
    after[41 * length + length - 1] += 1
    spans = [slice(at, at + length) for at in range(0, before.size, length)]
    had = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert changed(before, after, spans) == [spans[0], spans[41]]
        assert changed(before, after, spans[1:41]) == []
    finally:
        torch.set_num_threads(had)


def test_parameter_that_does_not_lie_in_one_piece_is_copied_once_however_many_chunks_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Conv2d(16, 32, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    flat = FlatParameters(model)
    spans = [slice(at, at + 64) for at in range(0, flat.layout.numel, 128)]
    copies = []
    reshape = torch.Tensor.reshape

    def counted(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        copies.append(shape)
        return reshape(tensor, *shape)

    whole = flat.gather(flat.new_vector())
    monkeypatch.setattr(torch.Tensor, "reshape", counted)
    flat.update(spans, torch.neg)
    monkeypatch.undo()
    assert len(copies) == 2  # to read, and to write
    for span in spans:
        whole[span] *= -1
    assert torch.equal(flat.gather(flat.new_vector()), whole)


def test_contribution_of_a_device_that_has_no_room_for_it_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = FlatParameters(Model())
    whole = flat.gather(flat.new_vector())

    def none(copies: DeviceCopies, values: torch.Tensor) -> HostCopy:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DeviceCopies, "to_host", none)
    copy = flat.copy_out([slice(2, 20)])
    assert copy.here
    assert torch.equal(copy.wait(), whole[2:20])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_gpu_go_through_page_locked_memory_beside_its_work() -> None:
    copies, values = DeviceCopies(), torch.arange(1 << 22, dtype=torch.float32, device="cuda")
    expected = values.cpu()
    factor = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        factor = factor @ factor  # work that the copy is to be beside
    copy = copies.to_host(values)
    del values  # its memory may be used again at once, and not before it is read
    other = torch.zeros(1 << 22, device="cuda")
    assert torch.equal(copy.wait(), expected)
    assert copy.here
    assert copy.wait().is_pinned()
    assert not other.any()


class Two(torch.nn.Module):
    """Two parameters, of these values."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Parameter(one), torch.nn.Parameter(other)


WHOLE = torch.zeros(10)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: Two(WHOLE, WHOLE.view(2, 5)), "parameters 'one' and 'other' share memory; make them one parameter"),
        (lambda: Two(WHOLE[:6], WHOLE[5:]), "parameters 'one' and 'other' share memory"),
        (lambda: Two(WHOLE[5:], WHOLE), "parameters 'other' and 'one' share memory"),
        (lambda: Two(WHOLE, torch.zeros(2, dtype=torch.complex64)), r"'other' is torch.complex64; make it of two"),
        (lambda: torch.nn.LazyLinear(3), "parameter 'bias' has no shape yet; run the model on a batch before"),
    ],
    ids=["the same", "a part", "within", "complex", "lazy"],
)
def test_what_would_be_changed_twice_or_not_at_all_is_refused(model: Callable[[], torch.nn.Module], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        FlatParameters(model(), frozen=False)


def test_parts_of_one_memory_are_parameters_like_others() -> None:
    assert FlatParameters(Two(WHOLE[:5], WHOLE[5:])).layout.numel == 10
    assert FlatParameters(Two(torch.zeros(0), torch.zeros(4))).layout.numel == 4
