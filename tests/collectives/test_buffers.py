"""Buffers among the chunks of a round: written as they are, averaged plainly, neither clipped nor stepped."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.aggregate import Aggregate, Term, combine
from shoal.collectives.codecs import F32, VALUE_LIMIT, chunk_codec, codec, final_chunk_codec
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.dither import Dither
from shoal.collectives.finals import FinalChunk
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.state import ADAMW_KINDS, NESTEROV_KINDS, CertifiedState, frozen, header_of
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import InnerSection
from shoal.protocol.messages import CLIP_UNIT, NO_HASH
from shoal.protocol.messages import Term as RoundTerm
from shoal.protocol.planning import split_codec, with_buffers
from tests.collectives.reduce_lab import CODECS, Mesh, check_exact, identity, make_plan, peer, values

GRID = Grid(5 * 4096 + 100, 4096)
BUFFERS = 2
BEGIN = 4 * 4096


def contributed(n: int, name: str, shift: float = 0.0) -> EncodedContribution:
    dither = Dither(NO_HASH, "contribution", peer(n))
    drawn = values(n, GRID)
    drawn[BEGIN:] += np.float32(shift)
    return EncodedContribution.encode(drawn, GRID, with_buffers(name, BUFFERS), dither=dither)


def f32(*numbers: float) -> F32:
    return np.array(numbers, np.float32)


def test_codec_of_a_plan_says_how_many_chunks_are_buffers() -> None:
    assert with_buffers("int8", 0) == "int8"
    assert with_buffers("topk64-256", 3) == "topk64-256+buffers3"
    assert split_codec("topk64-256+buffers3") == ("topk64-256", 3)
    for name in ("int8", "int8+buffers0", "int8+buffers03", "int8+buffers", "int8+buffers-1", "+buffers1"):
        assert split_codec(name) == (name, 0)
        if name != "int8":
            with pytest.raises(ConfigError, match="no codec"):
                chunk_codec(name, GRID, 0)
    kinds = [final_chunk_codec("topk64-256+buffers2", GRID, chunk).plain for chunk in range(GRID.chunks)]
    assert kinds == [False] * 4 + [True] * 2
    assert all(chunk_codec("int8", GRID, chunk) is codec("int8") for chunk in range(GRID.chunks))


@pytest.mark.parametrize("name", CODECS)
def test_reduction_averages_buffers_in_fp32_under_every_codec(name: str) -> None:
    made, weights = [contributed(n, name) for n in range(3)], [3, 1, 2]
    plan = msgspec.structs.replace(make_plan(made, weights), clips=(CLIP_UNIT, CLIP_UNIT // 3, CLIP_UNIT // 1000))
    mesh = Mesh(plan, made)
    mesh.start()
    mesh.run(7)
    finals = check_exact(mesh)
    each = [values(n, GRID)[BEGIN:].astype(np.float64) for n in range(3)]
    assert np.array_equal(finals.decoded()[BEGIN:], ((3 * each[0] + each[1] + 2 * each[2]) / 6).astype(np.float32))
    for one in made:
        assert one.squares[4:] == (0.0, 0.0)
        assert min(one.squares[:4]) > 0


def test_a_value_that_all_have_stays_to_the_bit_whatever_the_weights() -> None:
    how = chunk_codec("fp32+buffers1", Grid(4, 4), 0)
    same = f32(0.1, -1e-30, 3.3333333e18, 7.0)
    terms = [Term(n, weight, how.encode(same)) for n, weight in enumerate([1, 16_777_215, 3, 7, 11])]
    out = np.empty(4, np.float32)
    assert combine(how, terms, Aggregate(), out) == ([0, 1, 2, 3, 4], [])
    assert np.array_equal(out, same)
    combine(codec("fp32"), terms, Aggregate(), out)
    assert not np.array_equal(out, same)  # updates are added up in fp32


@pytest.mark.parametrize("rule", [Aggregate(), Aggregate("median"), Aggregate("trimmed", CLIP_UNIT // 4)])
def test_norms_clip_no_buffers(rule: Aggregate) -> None:
    how = chunk_codec("int8+buffers1", Grid(2, 4), 0)
    each = [f32(1, 2), f32(3, 4), f32(1000, 900)]
    terms = [Term(n, 1, how.encode(one), clip=CLIP_UNIT // 7) for n, one in enumerate(each)]
    out = np.empty(2, np.float32)
    combine(how, terms, replace(rule, bounded=True), out)
    assert np.array_equal(out, f32(1004 / 3, 302) if rule.rule == "mean" else f32(3, 4))


def test_buffers_that_do_not_decode_are_left_out() -> None:
    how = chunk_codec("int8+buffers1", Grid(2, 4), 0)
    good, bad = how.encode(f32(1, 2)), how.encode(f32(1, 2))
    bad[:4] = np.frombuffer(f32(np.nan).tobytes(), np.uint8)
    large = how.encode(f32(1, 2))
    large[4:] = np.frombuffer(f32(float(VALUE_LIMIT) * 2).tobytes(), np.uint8)
    out = np.empty(2, np.float32)
    assert combine(how, [Term(0, 1, bad), Term(1, 1, good), Term(2, 1, large)], Aggregate(), out) == ([1], [0, 2])
    assert out.tolist() == [1, 2]
    assert combine(how, [Term(0, 1, bad)], Aggregate(), out) == ([], [0])
    assert out.tolist() == [0, 0]


def test_buffers_are_in_every_fragment_behind_the_others() -> None:
    fragments = Fragments(GRID, 3, BUFFERS)
    assert [list(one.chunks) for one in fragments] == [[0, 3, 4, 5], [1, 4, 5], [2, 4, 5]]
    assert [one.numel for one in fragments] == [3 * 4096 + 100, 2 * 4096 + 100, 2 * 4096 + 100]
    assert fragments.buffers_begin == BEGIN
    vector, seen = np.arange(GRID.numel, dtype=np.float32), np.zeros(GRID.numel, np.float32)
    for one in fragments:
        values = one.gather(vector, np.empty(one.numel, np.float32))
        assert values.tolist() == np.concatenate([vector[run] for run in one.runs()]).tolist()
        one.scatter(values, seen)
    assert np.array_equal(seen, vector)
    assert fragments.fragment(0).parameter_runs() == [slice(0, 4096), slice(3 * 4096, BEGIN)]
    with pytest.raises(ConfigError, match="16384 parameters are 4 chunks"):
        Fragments(GRID, 5, BUFFERS)
    assert Fragments(GRID).buffers_begin == GRID.numel


@pytest.mark.parametrize("settings", [OuterSettings(lr=0.7, momentum=0.9), OuterSettings(adamw=InnerSection())])
def test_outer_step_replaces_buffers_and_keeps_those_that_nobody_gave(settings: OuterSettings) -> None:
    kinds = NESTEROV_KINDS if settings.adamw is None else ADAMW_KINDS
    before = CertifiedState.of_vectors(
        [frozen(values(n, GRID)) if n != 2 else frozen(np.abs(values(n, GRID))) for n in range(len(kinds))],
        term=RoundTerm(),
        round=0,
        tokens=0,
        layout_hash=bytes(32),
    )
    ends: list[CertifiedState] = []
    for shift in (0.0, 1e6):
        made = [contributed(n, "bf16", shift) for n in range(2)]
        mesh = Mesh(make_plan(made, [1, 3]), made)
        mesh.start()
        mesh.run(1)
        finals = mesh.finals()[0]
        after, header = advance(before, finals, settings)
        assert header == header_of(after, GRID)
        assert np.array_equal(after.anchor[BEGIN:], finals.decoded()[BEGIN:])
        assert not any(after.vector(kind)[BEGIN:].any() for kind in kinds[1:])
        assert all(after.vector(kind)[:BEGIN].any() for kind in kinds)
        ends.append(after)
        kept, _ = advance(before, replace(finals, chunks=(*finals.chunks[:5], of_nobody(mesh, 5))), settings)
        assert np.array_equal(kept.anchor[5 * 4096 :], before.anchor[5 * 4096 :])
        assert np.array_equal(kept.anchor[: 5 * 4096], after.anchor[: 5 * 4096])
    # Whatever the buffers are, the parameters go the same way: they are in no norm.
    assert np.array_equal(ends[0].anchor[:BEGIN], ends[1].anchor[:BEGIN])


def of_nobody(mesh: Mesh, chunk: int) -> FinalChunk:
    """The final of a chunk to which nobody's contribution came, as its owner signs it."""
    final_format = next(iter(mesh.reductions.values())).final_format
    owner = next(n for n in range(2) if peer(n) == final_format.owner(chunk))
    return final_format.sign(identity(owner), chunk, np.zeros(GRID.length(chunk), np.float32), [])
