"""Error feedback under the sparse codecs: three nodes over several rounds against a few plain lines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32, Undecodable, codec, final_chunk_codec
from shoal.collectives.finals import Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.state import CertifiedState, frozen
from shoal.node.state.catchup import replay_limit_rounds
from shoal.node.state.contributions import Contributions, Made
from shoal.protocol.messages import Term
from shoal.protocol.planning import norm_clips
from tests.collectives.reduce_lab import Mesh, check_exact, make_plan, peer

GRID = Grid(23_457, 5_000)
NAME = "topk16-48"
WEIGHTS = (3, 1, 2)
BETA = 0.95


def gradient(node: int, round: int) -> F32:
    """One node's is ten times as large, and so is clipped."""
    values = np.random.default_rng((node, round)).standard_normal(GRID.numel)
    return (values * (10 if node == 2 else 1)).astype(np.float32)


def through(values: F32) -> F32:
    """Encoded and decoded, chunk by chunk."""
    out = np.empty_like(values)
    for chunk in range(GRID.chunks):
        at = slice(*GRID.span(chunk))
        codec(NAME).decode_into(codec(NAME).encode(values[at]), out[at])
    return out


def chosen(sent: Sequence[F32], clips: Sequence[int]) -> tuple[F32, F32]:
    """The mean of what was sent, and which of its values the final has room for: per block the 48 largest.

    Clipped by the smaller of the plan's clip and that to the median norm of the chunk.
    """
    total = np.zeros(GRID.numel, np.float32)
    for chunk in range(GRID.chunks):
        at = slice(*GRID.span(chunk))
        norms = [float(np.linalg.norm(values[at].astype(np.float64))) for values in sent]
        for values, weight, clip, norm in zip(sent, WEIGHTS, clips, norms, strict=True):
            smaller = min(clip, int(65536 * sorted(norms)[1] / norm))
            total[at] = total[at] + np.float32(weight * smaller / 65536) * values[at]
    mean = total / np.float32(sum(WEIGHTS))
    kept = np.zeros_like(mean)
    for chunk in range(GRID.chunks):
        start, stop = GRID.span(chunk)
        for first in range(start, stop, 4096):
            at = np.arange(first, min(first + 4096, stop))
            largest = at[np.argsort(-np.abs(mean[at]), kind="stable")[:48]]
            kept[largest] = mean[largest]
    return mean, kept


def test_history_of_three_nodes_is_that_of_the_plain_recurrence() -> None:
    nodes = [Contributions(Fragments(GRID), NAME, 3, sender=peer(n), error_feedback=BETA) for n in range(len(WEIGHTS))]
    residuals = [np.zeros(GRID.numel, np.float32) for _ in nodes]
    clipped = 0
    for round in range(1, 6):
        base = bytes([round]) * 32
        made = [node.make(round, round, 10, gradient(n, round), base=base) for n, node in enumerate(nodes)]
        inputs = [gradient(n, round) + np.float32(BETA) * residual for n, residual in enumerate(residuals)]
        sent = [through(values) for values in inputs]
        for one, values, decoded in zip(made, inputs, sent, strict=True):
            assert one.values.tobytes() == values.tobytes()
            assert one.encoded.decoded().tobytes() == decoded.tobytes()

        by_peer = norm_clips({peer(n): one.encoded.squares for n, one in enumerate(made)})
        clips = tuple(by_peer[peer(n)] for n in range(len(nodes)))
        norms = [float(np.linalg.norm(decoded.astype(np.float64))) for decoded in sent]
        assert clips == pytest.approx([min(1, sorted(norms)[1] / norm) * 65536 for norm in norms], abs=1)
        clipped += sum(clip < 65536 for clip in clips)

        contributions = [one.encoded for one in made]
        plan = msgspec.structs.replace(make_plan(contributions, WEIGHTS, base=base), clips=clips)
        mesh = Mesh(plan, contributions)
        mesh.start()
        mesh.run(round)
        finals = check_exact(mesh)
        update = finals.decoded()
        mean, kept = chosen(sent, clips)
        steps = np.repeat([np.abs(mean[slice(*GRID.span(c))]).max() / 127 for c in range(5)], 5000)[: GRID.numel]
        assert (np.abs(update - kept) <= 0.51 * steps).all()
        assert np.count_nonzero(update) > 48 * 5

        included = [[round != 4 or n != 1 or chunk != 3 for chunk in range(GRID.chunks)] for n in range(len(nodes))]
        for n, node in enumerate(nodes):
            residuals[n] = np.where(update == 0, inputs[n], inputs[n] - sent[n])
            for chunk in range(GRID.chunks):
                at = slice(*GRID.span(chunk))
                if not included[n][chunk]:
                    residuals[n][at] = inputs[n][at]
            node.settle(round, included[n], finals)
    assert clipped == 5  # the large one, each time


def test_what_was_sent_and_what_is_carried_is_all_that_was_learnt() -> None:
    node = Contributions(Fragments(GRID), NAME, 3, sender=peer(0))
    learnt, sent = np.zeros(GRID.numel, np.float64), np.zeros(GRID.numel, np.float64)
    for round in range(1, 31):
        learnt += gradient(0, round)
        made = node.make(round, round, 10, gradient(0, round), base=bytes(32))
        sent += made.encoded.decoded()
        node.settle(round, [True] * GRID.chunks)
    carried = node.make(31, 31, 10, np.zeros(GRID.numel, np.float32), base=bytes(32)).values
    np.testing.assert_allclose(sent + carried, learnt, atol=1e-4)
    assert np.count_nonzero(sent) > 10 * 16 * 7  # ever other values, since what is left out grows until it is sent


def reduce_round(nodes: Sequence[Contributions], round: int) -> tuple[list[Made], Finals]:
    """Have every node contribute what it learnt, and reduce it with equal weights."""
    base = bytes([round]) * 32
    made = [node.make(round, round, 10, gradient(n, round), base=base) for n, node in enumerate(nodes)]
    contributions = [one.encoded for one in made]
    mesh = Mesh(make_plan(contributions, (1,) * len(nodes), base=base), contributions)
    mesh.start()
    mesh.run(round)
    return made, check_exact(mesh)


def crowd() -> list[Contributions]:
    """Eight nodes, the values of one of whom a final has places for."""
    return [Contributions(Fragments(GRID), "topk16-16", 3, sender=peer(n)) for n in range(8)]


def carried_by(node: Contributions) -> F32:
    """What comes again in a round in which nothing is learnt."""
    return node.make(100, 100, 0, np.zeros(GRID.numel, np.float32), base=bytes(32)).values


def test_nothing_is_lost_of_many_contributions_for_which_a_final_has_no_place() -> None:
    nodes = crowd()
    applied, learnt, steps = (np.zeros(GRID.numel) for _ in range(3))
    without_place = 0
    for round in range(1, 13):
        made, finals = reduce_round(nodes, round)
        update = finals.decoded()
        applied += update
        for chunk in range(GRID.chunks):
            at = slice(*GRID.span(chunk))
            steps[at] += np.abs(update[at]).max() / 127
        for n, node in enumerate(nodes):
            learnt += gradient(n, round) / len(nodes)
            without_place += np.count_nonzero(made[n].encoded.decoded()[update == 0])
            node.settle(round, [True] * GRID.chunks, finals)
    carried = np.mean([carried_by(node) for node in nodes], axis=0, dtype=np.float64)
    assert (np.abs(applied + carried - learnt) <= 0.51 * steps + 1e-4).all()
    assert without_place > 1000


def test_value_without_a_place_in_the_final_is_carried_on_whole_and_any_other_by_its_error() -> None:
    nodes = crowd()
    made, finals = reduce_round(nodes, 1)
    update = finals.decoded()
    without_place = []
    for n, node in enumerate(nodes):
        node.settle(1, [True] * GRID.chunks, finals)
        values, sent = gradient(n, 1), made[n].encoded.decoded()
        assert carried_by(node).tobytes() == np.where(update == 0, values, values - sent).tobytes()
        without_place.append(np.count_nonzero(sent[update == 0]))
    assert without_place[2] == 0  # whose values are the largest
    assert min(without_place[:2] + without_place[3:]) > 50


def test_final_in_whose_file_a_bit_was_flipped_costs_its_chunk_what_had_no_place_and_the_node_nothing_else() -> None:
    nodes = crowd()
    made, finals = reduce_round(nodes, 1)
    update = finals.decoded()
    struck = finals.chunks[1]
    changed = np.array(struck.payload)
    changed[: struck.encoded.size // 2] = 0xFF
    with pytest.raises(Undecodable):
        final_chunk_codec(finals.plan.codec, GRID, 1).decode_into(
            changed[: struck.encoded.size], np.empty(5_000, "<f4")
        )
    struck.move_to(changed)
    here = slice(*GRID.span(1))
    assert np.isnan(finals.decoded()[here]).all()
    for n, node in enumerate(nodes):
        node.settle(1, [True] * GRID.chunks, finals)
        values, sent = gradient(n, 1), made[n].encoded.decoded()
        expected = np.where(update == 0, values, values - sent)
        expected[here] = (values - sent)[here]
        assert carried_by(node).tobytes() == expected.tobytes()


def test_what_has_no_place_is_found_out_after_a_restart_too() -> None:
    nodes = crowd()
    made, finals = reduce_round(nodes, 1)
    for n, node in enumerate(nodes):
        again = Contributions(Fragments(GRID), "topk16-16", 3, sender=peer(n))
        assert again.make_again(node.saved(made[n], Term()))
        for one in (node, again):
            one.settle(1, [True] * GRID.chunks, finals)
        assert carried_by(again).tobytes() == carried_by(node).tobytes()


def test_what_no_certificate_counts_comes_again_less_the_decay() -> None:
    node = Contributions(Fragments(GRID), NAME, 3, sender=peer(0), error_feedback=BETA)
    node.make(1, 1, 10, gradient(0, 1), base=bytes(32))
    node.settle(1, [False] * GRID.chunks)
    again = node.make(2, 2, 10, gradient(0, 2), base=bytes(32))
    assert again.values.tobytes() == (gradient(0, 2) + np.float32(BETA) * gradient(0, 1)).tobytes()
    assert again.tokens == 20


def test_outer_step_and_replay_read_the_finals_and_not_contributions() -> None:
    nodes = [Contributions(Fragments(GRID), NAME, 3, sender=peer(n)) for n in range(len(WEIGHTS))]
    contributions = [node.make(1, 1, 10, gradient(n, 1), base=bytes(32)).encoded for n, node in enumerate(nodes)]
    mesh = Mesh(make_plan(contributions, WEIGHTS), contributions)
    mesh.start()
    mesh.run(1)
    finals = check_exact(mesh)
    anchor, momentum = frozen(gradient(7, 7)), frozen(np.zeros(GRID.numel, np.float32))
    state = CertifiedState(term=Term(), round=0, tokens=0, layout_hash=bytes(32), anchor=anchor, momentum=momentum)
    after, _ = advance(state, finals, OuterSettings(lr=1.0, momentum=0.0))
    assert after.anchor.tobytes() == (anchor - finals.decoded()).tobytes()
    assert finals.decoded().any()

    # Of 64 blocks in a chunk 452 bytes each, and of every chunk a bitmap and a signature.
    assert replay_limit_rounds("topk64-256", 1 << 20, 1 << 18) == (8 * (1 << 20) - 1) // (4 * (64 * 452 + 8 + 64))
