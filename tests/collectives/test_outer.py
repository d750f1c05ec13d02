from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

from shoal.collectives import outer
from shoal.collectives.codecs import F32, Undecodable
from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.grid import Grid
from shoal.collectives.memory import VectorPool
from shoal.collectives.outer import NextState, OuterSettings, advance, nesterov_step
from shoal.collectives.state import CertifiedState, frozen, header_of
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Participant, Plan, Term
from tests.round_messages import plan_with


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def step(anchor: F32, momentum: F32, update: F32, settings: OuterSettings) -> tuple[F32, F32]:
    out_anchor, out_momentum = np.empty_like(anchor), np.empty_like(anchor)
    nesterov_step(anchor, momentum, update, settings, out_anchor, out_momentum)
    return out_anchor, out_momentum


def test_step_of_round_numbers_by_hand() -> None:
    anchor, momentum = step(f32(10), f32(4), f32(2), OuterSettings(lr=0.5, momentum=0.25))
    assert momentum.tolist() == [3.0]  # 0.25·4 + 2
    assert anchor.tolist() == [8.625]  # 10 − 0.5·(2 + 0.25·3)


def test_step_rounds_every_operation_by_itself() -> None:
    """Each fp32 operation again, as a double rounded to fp32: correct for one operation, not for fused ones."""
    mixed = np.arange(1, 4001, dtype=np.uint32) * np.uint32(2_654_435_761)
    values = (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    anchor, momentum, update = values[:1000], values[1000:2000], values[2000:3000] * np.float32(2.0**-9)
    lr, mu = float(np.float32(0.7)), float(np.float32(0.9))

    def rounded(doubles: np.ndarray) -> np.ndarray:
        return doubles.astype(np.float32).astype(np.float64)

    a, m, g = (x.astype(np.float64) for x in (anchor, momentum, update))
    want_m = rounded(rounded(m * mu) + g)
    want_a = rounded(a - rounded(lr * rounded(g + rounded(mu * want_m))))
    got_a, got_m = step(anchor, momentum, update, OuterSettings(lr=0.7, momentum=0.9))
    assert got_m.tobytes() == want_m.astype(np.float32).tobytes()
    assert got_a.tobytes() == want_a.astype(np.float32).tobytes()
    assert blake3(got_a.tobytes() + got_m.tobytes()).hexdigest()[:16] == "c60f8fe6915a0696"


def test_step_keeps_subnormals() -> None:
    tiny = np.array([1, 3, 0x8000_0002], np.uint32).view(np.float32)
    anchor, momentum = step(f32(0, 0, 0), f32(0, 0, 0), tiny, OuterSettings(lr=1, momentum=0))
    assert momentum.tobytes() == tiny.tobytes()
    assert anchor.tobytes() == (-tiny).tobytes()


def test_steps_agree_with_torch_sgd() -> None:
    generator = np.random.default_rng(7)
    anchor = generator.standard_normal(500).astype(np.float32)
    momentum = np.zeros(500, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(6):
        update = (generator.standard_normal(500) * 0.01).astype(np.float32)
        anchor, momentum = step(anchor, momentum, update, OuterSettings(lr=0.7, momentum=0.9))
        parameter.grad = torch.from_numpy(update)
        optimizer.step()
    np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("lr", "momentum"), [(0, 0.9), (-1, 0.9), (float("nan"), 0), (0.7, 1), (0.7, -0.1)])
def test_settings_that_cannot_train_are_refused(lr: float, momentum: float) -> None:
    with pytest.raises(LocalError):
        OuterSettings(lr=lr, momentum=momentum)


# --- the next state ---

GRID = Grid(20_500, 5_000)
WHO = [Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3)]


def start(round_: int = 0) -> CertifiedState:
    rng = np.random.default_rng(99)
    anchor, momentum = (frozen(rng.standard_normal(GRID.numel).astype(np.float32)) for _ in range(2))
    return CertifiedState(term=Term(), round=round_, tokens=70, layout_hash=bytes(32), anchor=anchor, momentum=momentum)


def plan_of(codec: str = "fp32", *, attempt: int = 0, round_: int = 1) -> Plan:
    return plan_with(
        (Participant(one.peer_id, 20, 20, bytes([n]) * 32) for n, one in enumerate(WHO)),
        GRID,
        round=round_,
        base=bytes(32),
        attempt=attempt,
        codec=codec,
    )


def finals_of(plan: Plan, seed: int = 1) -> Finals:
    final_format = FinalFormat(plan)
    mean = np.random.default_rng(seed).standard_normal(GRID.numel).astype(np.float32)
    chunks = (
        final_format.sign(WHO[o], c, mean[slice(*GRID.span(c))], [0, 1, 2]) for c, o in enumerate(final_format.owners)
    )
    return Finals(plan=plan, chunks=tuple(chunks))


def with_chunk(finals: Finals, chunk: int, other: Finals) -> Finals:
    """The finals of another's plan, after a repair: one chunk is the other's, the rest stand."""
    chunks = [other.chunks[c] if c == chunk else final for c, final in enumerate(finals.chunks)]
    return Finals(plan=other.plan, chunks=tuple(chunks))


def plainly(before: CertifiedState, finals: Finals, settings: OuterSettings) -> tuple[bytes, bytes]:
    """Anchor and momentum after one step over whole vectors."""
    anchor, momentum = np.empty(GRID.numel, np.float32), np.empty(GRID.numel, np.float32)
    nesterov_step(before.anchor, before.momentum, finals.decoded(), settings, anchor, momentum)
    return anchor.tobytes(), momentum.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("span", [4096, 1 << 17])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_advance_is_the_plain_step_and_its_hashes(
    codec: str, span: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer, "SPAN_VALUES", span)  # within a chunk of 5,000, and the chunk at once
    before, finals, settings = start(), finals_of(plan_of(codec)), OuterSettings(lr=0.7, momentum=0.9)
    after, header = advance(before, finals, settings, threads=threads)
    assert (after.anchor.tobytes(), after.momentum.tobytes()) == plainly(before, finals, settings)
    assert header == header_of(after, GRID)
    assert (after.round, after.tokens, after.layout_hash) == (1, 70 + 60, before.layout_hash)
    assert before.anchor.tobytes() == start().anchor.tobytes()
    assert before.momentum.tobytes() == start().momentum.tobytes()


@pytest.mark.parametrize("span", [4096, 1 << 17])
def test_advance_hashes_the_image_of_an_imaged_state(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "SPAN_VALUES", span)
    before = replace(start(), imaged=True)
    after, header = advance(before, finals_of(plan_of()), OuterSettings(imaged=True), threads=2)
    assert header == header_of(after, GRID)
    assert header.image
    assert header.digest != header_of(replace(after, imaged=False), GRID).digest
    for state, settings in ((before, OuterSettings()), (start(), OuterSettings(imaged=True))):
        with pytest.raises(LocalError, match="or its images"):
            NextState(state, settings, GRID, VectorPool(0))


def test_advance_by_finals_that_do_not_follow_is_our_bug() -> None:
    other_grid = msgspec.structs.replace(plan_of(), chunk_values=4_999)
    later_term = msgspec.structs.replace(plan_of(), term=Term(0, 1))
    after = NextState(start(), OuterSettings(), GRID, VectorPool(0))
    after.complete(finals_of(later_term))  # after a rollback to that state
    for plan in (plan_of(round_=2), msgspec.structs.replace(plan_of(round_=2), term=Term(0, 1)), other_grid):
        after = NextState(start(), OuterSettings(), GRID, VectorPool(0))
        with pytest.raises(LocalError, match="do not follow"):
            after.complete(Finals(plan=plan, chunks=finals_of(plan_of()).chunks))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that are made, as they are."""
    made: list[int] = []
    make = NextState._make

    def count(self: NextState, chunk: int, *rest: Any) -> tuple[bytes, bytes]:
        made.append(chunk)
        return make(self, chunk, *rest)

    monkeypatch.setattr(NextState, "_make", count)
    return made


def test_next_state_of_a_repaired_plan_makes_only_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    made, settings, before = counted(monkeypatch), OuterSettings(), start()
    first = finals_of(plan_of())
    repaired = with_chunk(first, 3, finals_of(plan_of(attempt=1), seed=2))
    after = NextState(before, settings, GRID, VectorPool(0))
    headers = []
    for finals, cost in ((first, [0, 1, 2, 3, 4]), (repaired, [3]), (repaired, []), (first, [3]), (repaired, [3])):
        made.clear()
        headers.append(after.complete(finals))
        assert made == cost
    assert headers[0] == headers[3] != headers[1] == headers[2] == headers[4]
    assert headers[0] == advance(before, first, settings)[1]
    state = after.take(headers[4])
    assert (state.anchor.tobytes(), state.momentum.tobytes()) == plainly(before, repaired, settings)
    assert headers[4] == header_of(state, GRID)


def test_every_thread_that_applies_checks_its_denormals(monkeypatch: pytest.MonkeyPatch) -> None:
    def flushes() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise LocalError("flushes")

    monkeypatch.setattr(outer, "check_denormals", flushes)
    with pytest.raises(LocalError, match="flushes"):
        advance(start(), finals_of(plan_of()), OuterSettings(), threads=2)


def test_state_on_too_fine_a_grid_is_our_bug() -> None:
    with pytest.raises(LocalError):
        NextState(start(), OuterSettings(), Grid(GRID.numel, 1), VectorPool(0))


def test_what_was_applied_ahead_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, settings, before, finals = counted(monkeypatch), OuterSettings(), start(), finals_of(plan_of())
    after = NextState(before, settings, GRID, VectorPool(0))
    apply = after.ahead(finals.plan)
    for chunk in (4, 1, 1):
        apply(finals.chunks[chunk])
    assert made == [4, 1]
    header = after.complete(finals)
    assert made == [4, 1, 0, 2, 3]
    assert header == advance(before, finals, settings)[1]
    state = after.take(header)
    assert (state.anchor.tobytes(), state.momentum.tobytes()) == plainly(before, finals, settings)


def test_what_was_applied_ahead_of_another_plan_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, before = counted(monkeypatch), start()
    first, other = finals_of(plan_of()), finals_of(plan_of(attempt=1), seed=2)
    after = NextState(before, OuterSettings(), GRID, VectorPool(0))
    apply = after.ahead(first.plan)
    apply(first.chunks[2])
    assert after.complete(other) == advance(before, other, OuterSettings())[1]
    assert made[:6] == [2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("ends", ["complete", "close", "another", "close before"])
def test_nothing_is_applied_ahead_once_it_is_another_turn(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    made, finals = counted(monkeypatch), finals_of(plan_of())
    after = NextState(start(), OuterSettings(), GRID, VectorPool(0))
    if ends == "close before":
        after.close()
    apply = after.ahead(finals.plan)
    if ends == "complete":
        after.complete(with_chunk(finals, 0, finals_of(finals.plan, seed=2)))
    elif ends == "close":
        after.close()
    elif ends == "another":
        after.ahead(plan_of(attempt=1))
    made.clear()
    apply(finals.chunks[0])
    assert made == []


def test_who_completes_waits_for_who_applies_ahead_and_lets_nobody_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is in the midst of a chunk of plan A when another completes by plan B, and a third begins with A."""
    before, make = start(), NextState._make
    first, other = finals_of(plan_of()), finals_of(plan_of(attempt=1), seed=2)
    under_way, let, ended = threading.Event(), threading.Event(), threading.Event()
    after = NextState(before, OuterSettings(), GRID, VectorPool(0))
    headers = []

    def held(self: NextState, chunk: int, how: Any, final: Any, factors: Any) -> tuple[bytes, ...]:
        if final is first.chunks[3]:
            under_way.set()
            assert let.wait(20)
        elif final is other.chunks[4]:
            self.ahead(first.plan)(first.chunks[0])  # which is completed already
        return make(self, chunk, how, final, factors)

    def complete() -> None:
        headers.append(after.complete(other))
        ended.set()

    monkeypatch.setattr(NextState, "_make", held)
    threads = [
        threading.Thread(target=after.ahead(first.plan), args=(first.chunks[3],)),
        threading.Thread(target=complete),
    ]
    threads[0].start()
    assert under_way.wait(20)
    threads[1].start()
    assert not ended.wait(0.2)
    let.set()
    for thread in threads:
        thread.join(20)
    assert headers == [advance(before, other, OuterSettings())[1]]
    state = after.take(headers[0])
    assert (state.anchor.tobytes(), state.momentum.tobytes()) == plainly(before, other, OuterSettings())


def test_ahead_of_finals_that_do_not_follow_is_our_bug() -> None:
    after = NextState(start(), OuterSettings(), GRID, VectorPool(0))
    with pytest.raises(LocalError, match="do not follow"):
        after.ahead(plan_of(round_=2))


def test_final_that_nobody_checked_is_checked_when_it_is_applied() -> None:
    plan = plan_of()
    good = finals_of(plan)
    payloads = [chunk.payload.copy() for chunk in good.chunks]
    payloads[2][:4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    unchecked = Finals(plan=plan, chunks=tuple(FinalFormat(plan).read(n, data) for n, data in enumerate(payloads)))
    after = NextState(start(), OuterSettings(), GRID, VectorPool(0))
    with pytest.raises(Undecodable):
        after.complete(unchecked)
    assert after.complete(good) == advance(start(), good, OuterSettings())[1]


def test_who_is_in_the_finals_is_counted_by_chunk() -> None:
    """Of three participants one trained on nothing, and one is left out of some chunks, or of all."""
    plan = plan_of()
    weightless = msgspec.structs.replace(plan.participants[1], weight=0)
    plan = msgspec.structs.replace(plan, participants=(plan.participants[0], weightless, plan.participants[2]))
    final_format, values = FinalFormat(plan), np.ones(GRID.numel, np.float32)

    def finals(*included: list[int]) -> Finals:
        parts = enumerate(zip(final_format.owners, included, strict=True))
        return Finals(
            plan=plan,
            chunks=tuple(final_format.sign(WHO[o], c, values[slice(*GRID.span(c))], i) for c, (o, i) in parts),
        )

    def numbers(one: Finals) -> tuple[int, int, float]:
        return len(one.counted), one.tokens, one.coverage

    assert numbers(finals([0, 2], [0, 2], [0, 2], [0, 2], [0, 2])) == (2, 40, 1.0)
    assert numbers(finals([0], [2], [0, 2], [], [0])) == (2, 40, 0.5)
    assert numbers(finals([2], [2], [], [2], [2])) == (1, 20, 0.4)
    assert numbers(finals([0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 2])) == (3, 60, 1.0)
    assert numbers(finals([], [], [], [], [])) == (0, 0, 0.0)
