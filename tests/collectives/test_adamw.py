"""AdamW as a certified outer step: against torch, against arithmetic in another width, and to the bit."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

from shoal.collectives import outer
from shoal.collectives.adamw import NORM_SPAN_VALUES, AdamWFactors, Moments, adamw_step, power, square_sum
from shoal.collectives.codecs import F32
from shoal.collectives.finals import Finals
from shoal.collectives.memory import VectorPool
from shoal.collectives.outer import NextState, OuterSettings, advance
from shoal.collectives.schedule import cosine_of_half_turns, learning_rate
from shoal.collectives.state import ADAMW_KINDS, CertifiedState, frozen, header_of
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest import InnerSection
from shoal.protocol.messages import Term
from tests.collectives.test_outer import GRID, finals_of, with_chunk
from tests.collectives.test_outer import plan_of as plan_of_round

INNER = InnerSection(lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), clip_norm=1.0)


def drawn(seed: int, size: int, scale: float = 1.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def even(seed: int, size: int) -> F32:
    """Between -1 and 1, made of a generator's bits without any library's logarithm."""
    return np.random.default_rng(seed).random(size, np.float32) * np.float32(2) - np.float32(1)


def norm_of(update: F32) -> float:
    return math.sqrt(square_sum(update, np.empty(NORM_SPAN_VALUES)))


def step(before: Moments, update: F32, factors: AdamWFactors) -> Moments:
    out = np.empty_like(update), np.empty_like(update), np.empty_like(update)
    adamw_step(before, update, factors, out, np.empty_like(update))
    return out


def run(inner: InnerSection, start: F32, updates: list[F32], tokens: int = 0) -> Moments:
    state: Moments = start, np.zeros_like(start), np.zeros_like(start)
    for number, update in enumerate(updates, 1):
        factors = AdamWFactors.of(inner, steps=number, tokens=tokens * (number - 1), norm=norm_of(update))
        state = step(state, update, factors)
    return state


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_fifty_steps_are_those_of_torch(scale: float) -> None:
    """Gradients of norms below clip_norm and above."""
    start, updates = drawn(1, 500), [drawn(2 + n, 500, scale) for n in range(50)]
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=INNER.lr, betas=INNER.betas, eps=1e-8, weight_decay=0.1)
    for update in updates:
        parameter.grad = torch.from_numpy(update.copy())
        torch.nn.utils.clip_grad_norm_([parameter], INNER.clip_norm)
        optimizer.step()
    anchor, first, second = run(INNER, start, updates)
    theirs = optimizer.state[parameter]
    wanted = parameter.detach().numpy(), theirs["exp_avg"].numpy(), theirs["exp_avg_sq"].numpy()
    for mine, expected in zip((anchor, first, second), wanted, strict=True):
        assert np.linalg.norm(mine - expected) <= 1e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(anchor, wanted[0], rtol=1e-6, atol=1e-6)
    assert np.abs(anchor - start).max() > 0.1  # so that 1e-6 says something


def rounded(value: float) -> float:
    """To float32: correct for one operation on float32 that was made in float64, where 53 >= 2 * 24 + 2."""
    return float(np.float32(value))


def in_float64(before: Moments, update: F32, f: AdamWFactors) -> list[tuple[float, float, float]]:
    found = []
    for theta, m, v, g in zip(*(x.tolist() for x in (*before, update)), strict=True):
        g = rounded(g * float(f.clip))
        m = rounded(rounded(m * float(f.keep_first)) + rounded(g * float(f.take_first)))
        v = rounded(rounded(v * float(f.keep_second)) + rounded(rounded(g * g) * float(f.take_second)))
        spread = rounded(rounded(rounded(math.sqrt(v)) / float(f.root)) + rounded(1e-8))
        theta = rounded(rounded(theta * float(f.decay)) - rounded(rounded(m / spread) * float(f.step)))
        found.append((theta, m, v))
    return found


def test_every_operation_is_rounded_by_itself_in_the_stated_order() -> None:
    before = drawn(1, 300), drawn(2, 300, 0.1), np.square(drawn(3, 300, 0.1))
    update = drawn(4, 300)
    update[:4] = 0.0, 1e-30, 1e-20, 1.8e19  # of the second and third the squares are nothing and subnormal
    factors = AdamWFactors.of(INNER, steps=7, tokens=0, norm=2.5)
    anchor, first, second = step(before, update, factors)
    expected = np.array(in_float64(before, update, factors), np.float32).T
    assert (anchor.tobytes(), first.tobytes(), second.tobytes()) == tuple(row.tobytes() for row in expected)


def test_golden_bytes() -> None:
    """What every machine and version has to come to: also clipped, warmed up and on the way down a cosine."""
    inner = InnerSection(lr=0.02, warmup_tokens=50, schedule="cosine", decay_tokens=300, min_lr=0.001)
    found = run(inner, even(1, 257), [even(2 + n, 257) for n in range(12)], tokens=40)
    assert blake3(b"".join(vector.tobytes() for vector in found)).hexdigest() == GOLDEN


GOLDEN = "9acbc32c7594e57e0f9e6c2bc4c39bb9cef14d60bb4ece0b415ae6b9b235637d"


def test_factors_follow_round_tokens_and_norm() -> None:
    inner = InnerSection(lr=0.5, weight_decay=0.1, betas=(0.5, 0.75), clip_norm=2.0, warmup_tokens=100)
    f = AdamWFactors.of(inner, steps=2, tokens=49, norm=4.0)
    assert (f.keep_first, f.take_first, f.keep_second, f.take_second) == (0.5, 0.5, 0.75, 0.25)
    assert f.clip == np.float32(2.0 / (4.0 + 1e-6))
    assert f.decay == np.float32(1 - 0.25 * 0.1)  # half way up the warm-up
    assert f.step == np.float32(0.25 / (1 - 0.25))
    assert f.root == np.float32(math.sqrt(1 - 0.5625))
    assert AdamWFactors.of(inner, steps=2, tokens=49, norm=1.5).clip == 1
    assert AdamWFactors.of(inner, steps=2, tokens=49, norm=0.0).clip == 1


@pytest.mark.parametrize("base", [0.0, 0.9, 0.95, 0.999])
def test_powers_are_products(base: float) -> None:
    assert power(base, 1) == base
    assert power(base, 5) == base * ((base * base) * (base * base))
    for exponent in (2, 3, 100, 12_345):
        assert power(base, exponent) == pytest.approx(float(Fraction(base) ** exponent), rel=1e-11, abs=1e-300)
    assert power(base, 0) == 1.0


def test_cosine_needs_no_library_and_is_as_exact() -> None:
    turns = [n / 997 for n in range(998)]
    assert max(abs(cosine_of_half_turns(t) - math.cos(math.pi * t)) for t in turns) < 4e-16
    assert [cosine_of_half_turns(t) for t in (0.0, 1.0)] == [1.0, -1.0]
    golden = blake3(np.array([cosine_of_half_turns(t) for t in turns]).tobytes()).hexdigest()
    assert golden == COSINES


COSINES = "961239c7529c6b586ac4129bee844687eeda019766d544ce862c2e384ec73d03"


@pytest.mark.parametrize("size", [1, 2, 3, 1000, NORM_SPAN_VALUES - 1, NORM_SPAN_VALUES])
def test_sum_of_squares(size: int) -> None:
    values = drawn(size, size)
    values[0] = 1.7e19
    scratch = np.full(NORM_SPAN_VALUES, np.nan)
    assert square_sum(values, scratch) == pytest.approx(math.fsum(float(x) ** 2 for x in values), rel=1e-15)


def test_sum_of_squares_adds_halves() -> None:
    """Beside 2^54 sums are multiples of 4: from left to right, or by neighbours, these make 8."""
    values = np.array([2.0**27, 1.5, 1.0, 1.5], np.float32)
    assert square_sum(values, np.empty(4)) == 2.0**54 + 4  # (2^54 + 1) + (2.25 + 2.25)


# --- the next state ---

SETTINGS = OuterSettings(adamw=INNER)
plan_of = partial(plan_of_round, round_=5)


def beginning(round_: int = 4) -> CertifiedState:
    anchor, first = (frozen(drawn(n, GRID.numel)) for n in (1, 2))
    second = frozen(np.square(drawn(3, GRID.numel)))
    return CertifiedState(
        term=Term(), round=round_, tokens=70, layout_hash=bytes(32), anchor=anchor, momentum=first, second_moment=second
    )


def plainly(before: CertifiedState, finals: Finals) -> tuple[bytes, ...]:
    """One step over whole vectors, with the sum of squares chunk by chunk."""
    update, total = finals.decoded(), 0.0
    for chunk in range(GRID.chunks):
        total += square_sum(update[slice(*GRID.span(chunk))], np.empty(8192))
    factors = AdamWFactors.of(INNER, steps=before.round + 1, tokens=before.tokens, norm=math.sqrt(total))
    assert factors.clip < 0.1
    assert before.second_moment is not None
    return tuple(x.tobytes() for x in step((before.anchor, before.momentum, before.second_moment), update, factors))


def vectors(state: CertifiedState) -> tuple[bytes, ...]:
    return tuple(state.vector(kind).tobytes() for kind in state.kinds)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("span", [4096, 1 << 17])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_advance_is_the_plain_step_and_its_hashes(
    codec: str, span: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer, "SPAN_VALUES", span)
    before, finals = beginning(), finals_of(plan_of(codec))
    after, header = advance(before, finals, SETTINGS, threads=threads)
    assert vectors(after) == plainly(before, finals)
    assert after.kinds == header.kinds == ADAMW_KINDS
    assert header == header_of(after, GRID)
    assert (after.round, after.tokens) == (5, 130)


def measured_squares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the spans whose squares are added up, as they are."""
    measured: list[int] = []
    real = outer.square_sum

    def counted(values: F32, scratch: Any) -> float:
        measured.append(values.size)
        return real(values, scratch)

    monkeypatch.setattr(outer, "square_sum", counted)
    return measured


def test_a_repair_changes_the_clip_and_so_every_chunk_but_no_final_is_measured_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = measured_squares(monkeypatch)
    monkeypatch.setattr(outer, "SPAN_VALUES", 4096)  # in which steps are made; sums have spans of their own
    before, first = beginning(), finals_of(plan_of())
    repaired = with_chunk(first, 3, finals_of(plan_of(attempt=1), seed=2))
    after, headers = NextState(before, SETTINGS, GRID, VectorPool(0)), []
    for finals, sizes in ((first, [5000, 5000, 5000, 5000, 500]), (repaired, [5000]), (repaired, [])):
        measured.clear()
        headers.append(after.complete(finals))
        assert measured == sizes
    assert headers[0] != headers[1] == headers[2]
    state = after.take(headers[2])
    assert vectors(state) == plainly(before, repaired)
    assert headers[2] == header_of(state, GRID)


def test_squares_are_added_up_ahead_and_the_step_is_made_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measured_squares(monkeypatch)
    before, finals = beginning(), finals_of(plan_of())
    after = NextState(before, SETTINGS, GRID, VectorPool(0))
    apply = after.ahead(finals.plan)
    for chunk in (4, 2):
        apply(finals.chunks[chunk])
    assert measured == [500, 5000]
    header = after.complete(finals)
    assert measured == [500, 5000, 5000, 5000, 5000]
    assert vectors(after.take(header)) == plainly(before, finals)


def test_states_of_another_outer_optimizer_are_refused() -> None:
    two = CertifiedState.initial(drawn(1, GRID.numel), bytes(32))
    with pytest.raises(LocalError, match="outer optimizer"):
        NextState(two, SETTINGS, GRID, VectorPool(0))
    with pytest.raises(LocalError, match="outer optimizer"):
        NextState(beginning(), OuterSettings(), GRID, VectorPool(0))
    with pytest.raises(LocalError, match="at once"):
        OuterSettings(adamw=INNER, fragments=2)


def test_learning_rate_of_a_step_is_that_of_the_tokens_before_the_round() -> None:
    inner = msgspec.structs.replace(INNER, warmup_tokens=140)
    after, _ = advance(beginning(), finals_of(plan_of()), OuterSettings(adamw=inner))
    halved = msgspec.structs.replace(INNER, lr=INNER.lr * 71 / 140)
    assert learning_rate(inner, 70) == halved.lr
    same, _ = advance(beginning(), finals_of(plan_of()), OuterSettings(adamw=halved))
    assert vectors(after) == vectors(same)
    assert vectors(after) != vectors(advance(beginning(), finals_of(plan_of()), SETTINGS)[0])
