"""The check of the values, on files made by hand: exact rounds pass, and every way of being wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32, codec
from shoal.collectives.commitment import bitmap, chunk_hash, merkle_root
from shoal.collectives.grid import Grid
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import OwnedRange, Participant, Plan
from shoal.protocol.wire import canonical
from shoal.testnet.check import RoundCheck, Witness, check_round, check_swarm
from tests.round_messages import plan_with

NUMEL, CHUNK_VALUES, CHUNKS = 10_000, 4096, 3
PEERS = [Identity.from_seed(bytes([i + 1]) * 32).peer_id for i in range(3)]
WEIGHTS = [100, 300, 0]


@dataclass
class Sum:
    """How a chunk is summed; tests replace parts of it by wrong ones."""

    counts: Callable[[int], tuple[int, ...]] = lambda chunk: (0, 1)
    divisor: Callable[[int], int] = lambda total: total


def spans() -> list[slice]:
    return [slice(c * CHUNK_VALUES, min((c + 1) * CHUNK_VALUES, NUMEL)) for c in range(CHUNKS)]


def gradients(round: int) -> list[F32]:
    generator = np.random.default_rng(round)
    return [generator.standard_normal(NUMEL).astype(np.float32) for _ in PEERS]


def encode(values: F32) -> list[bytes]:
    return [codec("int8").encode(np.ascontiguousarray(values[span])).tobytes() for span in spans()]


def decode(chunks: list[bytes]) -> F32:
    out = np.empty(NUMEL, np.float32)
    for chunk, span in zip(chunks, spans(), strict=True):
        codec("int8").decode_into(chunk, out[span])
    return out


def plan_of(round: int, contributions: list[list[bytes]]) -> Plan:
    roots = [merkle_root([chunk_hash(chunk) for chunk in chunks]) for chunks in contributions]
    return plan_with(
        (Participant(peer, weight, weight, root) for peer, weight, root in zip(PEERS, WEIGHTS, roots, strict=True)),
        Grid(NUMEL, CHUNK_VALUES),
        round=round,
        owners=(OwnedRange(0, 0, CHUNKS),),
    )


def write_round(
    root: Path,
    round: int = 1,
    *,
    missing: tuple[int, int] | None = None,
    nobody: bool = False,
    how: Sum | None = None,
) -> None:
    """Three nodes' files of one round, summed by arithmetic of this file's own.

    missing: (chunk, place) that the bitmap does not include. nobody: it includes no place at all.
    """
    how = how or Sum()
    contributions = [encode(values) for values in gradients(round)]
    plan = plan_of(round, contributions)
    decoded = [decode(chunks) for chunks in contributions]
    mean = np.zeros(NUMEL, np.float32)
    bitmaps = []
    for chunk, span in enumerate(spans()):
        included = [place for place in (0, 1) if (chunk, place) != missing and not nobody]
        summed = [place for place in how.counts(chunk) if place in included]
        bitmaps.append(bitmap(included, len(PEERS)))
        total = np.zeros(span.stop - span.start, np.float32)
        for place in summed:
            total = total + np.float32(WEIGHTS[place]) * decoded[place][span]
        mean[span] = total / np.float32(how.divisor(sum(WEIGHTS[place] for place in included)) or 1)
    finals = encode(mean)
    for index in range(3):
        folder = root / str(index) / "rounds" / f"0.0-{round}"
        folder.mkdir(parents=True)
        stored = {"codec": "int8", "numel": NUMEL, "chunk_values": CHUNK_VALUES, "tokens": WEIGHTS[index]}
        stored |= {"root": plan.participants[index].root, "chunks": contributions[index]}
        (folder / "contribution").write_bytes(msgspec.msgpack.encode(stored))
        (folder / "plan").write_bytes(canonical(plan))
        body = {"plan": plan.hash, "bitmaps": bitmaps, "chunks": finals}
        (folder / "finals").write_bytes(msgspec.msgpack.encode(body))
        (folder / "applied").write_bytes(decode(finals).astype("<f4").tobytes())


def witnesses(root: Path, *, settled: bool = True) -> list[Witness]:
    known = frozenset({("0.0", 1)}) if settled else frozenset()
    return [Witness(index=i, peer_id=PEERS[i], folder=root / str(i), settled=known) for i in range(3)]


def checked(root: Path) -> RoundCheck:
    return check_round(witnesses(root), "0.0", 1)


def round_file(root: Path, node: int, name: str) -> Path:
    return root / str(node) / "rounds" / "0.0-1" / name


def flip(path: Path, element: int) -> None:
    values = np.frombuffer(path.read_bytes(), "<u4").copy()
    values[element] ^= 1
    path.write_bytes(values.tobytes())


def test_check_passes_an_exact_round(tmp_path: Path) -> None:
    write_round(tmp_path)
    assert checked(tmp_path) == RoundCheck(
        term="0.0", round=1, codec="int8", numel=NUMEL, contributors=2, coverage=1.0, updates_compared=3
    )


def test_check_passes_an_exact_round_that_lacks_a_chunk_of_one(tmp_path: Path) -> None:
    write_round(tmp_path, missing=(1, 0))
    found = checked(tmp_path)
    assert (found.wrong_values, found.errors, found.contributors) == (0, (), 2)
    assert found.coverage == pytest.approx(5 / 6)


def test_check_refuses_a_round_that_counts_nobody_while_one_who_contributed_is_there(tmp_path: Path) -> None:
    write_round(tmp_path, nobody=True)
    found = checked(tmp_path)
    assert (found.coverage, found.contributors, found.wrong_values) == (0.0, 0, 0)
    assert found.errors == ("round 1: nobody's contribution is in it, and not all who contributed are gone",)
    for node in (0, 1):  # only who contributed nothing ended the round
        round_file(tmp_path, node, "applied").unlink()
    left = check_round(witnesses(tmp_path, settled=False), "0.0", 1)
    assert (left.coverage, left.updates_compared, left.errors) == (0.0, 1, ())


def flip_final(root: Path, node: int, chunk: int) -> None:
    """As a node keeps it whose file of finals has another bit when the round is certified than when it applied it."""
    path = round_file(root, node, "finals")
    body = msgspec.msgpack.decode(path.read_bytes())
    changed = bytearray(body["chunks"][chunk])
    changed[len(changed) // 2] ^= 64
    body["chunks"][chunk] = bytes(changed)
    path.write_bytes(msgspec.msgpack.encode(body))
    round_file(root, node, "applied").write_bytes(decode(body["chunks"]).astype("<f4").tobytes())


def test_check_believes_nothing_of_a_chunk_whose_file_was_struck_and_all_of_the_others(tmp_path: Path) -> None:
    write_round(tmp_path)
    flip_final(tmp_path, 1, 1)
    found = checked(tmp_path)
    assert found.wrong_values > 0
    assert found.errors == ("round 1: node 1 kept finals that are not what the contributions lead to",)

    def struck(node: int) -> RoundCheck:
        of_round = frozenset({("0.0", 1)})
        return check_round(
            [replace(one, flipped=of_round) if one.index == node else one for one in witnesses(tmp_path)], "0.0", 1
        )

    assert (struck(1).wrong_values, struck(1).errors) == (0, ())
    assert struck(0) == found
    flip(round_file(tmp_path, 1, "applied"), 2 * CHUNK_VALUES)
    assert struck(1).wrong_values == 1


def test_check_sums_over_rounds(tmp_path: Path) -> None:
    write_round(tmp_path, 1)
    write_round(tmp_path, 2)
    flip(tmp_path / "1" / "rounds" / "0.0-2" / "applied", 17)
    found = check_swarm(witnesses(tmp_path), {("0.0", 1), ("0.0", 2)})
    assert (found.wrong_values, found.errors, len(found.rounds)) == (1, (), 2)
    second = found.of("0.0", 2)
    assert second is not None
    assert second.wrong_values == 1


@pytest.mark.parametrize("element", [0, 4095, NUMEL - 1])
def test_check_counts_one_flipped_element_as_one(tmp_path: Path, element: int) -> None:
    write_round(tmp_path)
    flip(round_file(tmp_path, 2, "applied"), element)
    assert (checked(tmp_path).wrong_values, checked(tmp_path).errors) == (1, ())


def test_check_sees_a_contribution_counted_twice(tmp_path: Path) -> None:
    write_round(tmp_path, how=Sum(counts=lambda chunk: (0, 1, 1) if chunk == 1 else (0, 1)))
    found = checked(tmp_path)
    assert 3 * 4000 < found.wrong_values <= 3 * 4096  # all of chunk 1 at all three, but for the values that stay zero


def test_check_sees_a_contribution_left_out_of_the_sum(tmp_path: Path) -> None:
    write_round(tmp_path, how=Sum(counts=lambda chunk: (1,) if chunk == 2 else (0, 1)))
    assert 3 * 1700 < checked(tmp_path).wrong_values <= 3 * (NUMEL - 2 * 4096)


def test_check_sees_a_wrong_divisor(tmp_path: Path) -> None:
    write_round(tmp_path, how=Sum(divisor=lambda total: total + 1))
    assert checked(tmp_path).wrong_values > 3 * 0.98 * NUMEL


def test_check_sees_the_divisor_of_a_contribution_that_is_missing(tmp_path: Path) -> None:
    write_round(tmp_path, missing=(1, 0), how=Sum(divisor=lambda total: sum(WEIGHTS)))
    assert 3 * 4000 < checked(tmp_path).wrong_values <= 3 * 4096


def test_check_reports_a_missing_contribution(tmp_path: Path) -> None:
    write_round(tmp_path)
    round_file(tmp_path, 1, "contribution").unlink()
    found = checked(tmp_path)
    assert found.errors == (f"round 1: there is no contribution of {PEERS[1]} such as the plan names",)
    assert found.updates_compared == 0


def test_check_does_not_need_a_contribution_that_does_not_count(tmp_path: Path) -> None:
    write_round(tmp_path)
    round_file(tmp_path, 2, "contribution").unlink()
    assert (checked(tmp_path).wrong_values, checked(tmp_path).errors) == (0, ())


def test_check_refuses_a_contribution_that_is_not_the_promised_one(tmp_path: Path) -> None:
    write_round(tmp_path)
    path = round_file(tmp_path, 0, "contribution")
    stored = msgspec.msgpack.decode(path.read_bytes())
    stored["chunks"][1] = stored["chunks"][1][:-4] + b"\1\1\1\1"
    path.write_bytes(msgspec.msgpack.encode(stored))
    assert checked(tmp_path).errors == (f"round 1: there is no contribution of {PEERS[0]} such as the plan names",)


def test_check_finds_the_promised_one_among_several_contributions(tmp_path: Path) -> None:
    write_round(tmp_path)
    path = round_file(tmp_path, 0, "contribution")
    path.rename(path.with_name("contribution-1"))
    path.write_bytes(round_file(tmp_path, 1, "contribution").read_bytes())
    assert (checked(tmp_path).wrong_values, checked(tmp_path).errors) == (0, ())


def test_check_reports_a_settled_round_without_its_update(tmp_path: Path) -> None:
    write_round(tmp_path)
    round_file(tmp_path, 1, "applied").unlink()
    assert checked(tmp_path).errors == ("round 1: node 1 certified it but kept no applied update",)
    assert check_round(witnesses(tmp_path, settled=False), "0.0", 1).errors == ()


def test_check_never_passes_a_round_of_which_nothing_was_kept(tmp_path: Path) -> None:
    found = check_round(witnesses(tmp_path, settled=False), "0.0", 1)
    assert found.errors == ("round 1: no node kept what it applied",)


def test_check_reports_nodes_that_differ_on_who_is_in_it(tmp_path: Path) -> None:
    write_round(tmp_path)
    path = round_file(tmp_path, 2, "finals")
    body = msgspec.msgpack.decode(path.read_bytes())
    body["bitmaps"][0] = bitmap([1], 3)
    path.write_bytes(msgspec.msgpack.encode(body))
    assert checked(tmp_path).errors == ("round 1: nodes 0 and 2 differ on the plan or who is in it",)


def test_check_reports_finals_that_no_one_could_have_made(tmp_path: Path) -> None:
    write_round(tmp_path)
    path = round_file(tmp_path, 2, "finals")
    body = msgspec.msgpack.decode(path.read_bytes())
    body["chunks"][0] = body["chunks"][0][:-1] + bytes([body["chunks"][0][-1] ^ 1])
    path.write_bytes(msgspec.msgpack.encode(body))
    found = checked(tmp_path)
    assert (found.wrong_values, len(found.errors)) == (0, 1)


def test_check_counts_an_update_of_the_wrong_size_as_all_wrong(tmp_path: Path) -> None:
    write_round(tmp_path)
    path = round_file(tmp_path, 0, "applied")
    path.write_bytes(path.read_bytes()[:-4])
    found = checked(tmp_path)
    assert (found.wrong_values, len(found.errors)) == (NUMEL, 1)


@pytest.mark.parametrize("name", ["plan", "finals"])
def test_check_reports_files_that_are_damaged(tmp_path: Path, name: str) -> None:
    write_round(tmp_path)
    round_file(tmp_path, 1, name).write_bytes(b"\x81")
    assert len(checked(tmp_path).errors) == 1


def test_check_refuses_a_plan_that_names_a_participant_twice(tmp_path: Path) -> None:
    write_round(tmp_path)
    for node in range(3):
        plan = msgspec.msgpack.decode(round_file(tmp_path, node, "plan").read_bytes(), type=Plan)
        twice = msgspec.structs.replace(plan, participants=(plan.participants[0], *plan.participants[:2]))
        round_file(tmp_path, node, "plan").write_bytes(canonical(twice))
        body = msgspec.msgpack.decode(round_file(tmp_path, node, "finals").read_bytes())
        round_file(tmp_path, node, "finals").write_bytes(msgspec.msgpack.encode(body | {"plan": twice.hash}))
    assert "round 1: the plan names a participant twice" in checked(tmp_path).errors


def rewrite_plan(root: Path, *participants: Participant) -> None:
    for node in range(3):
        plan = msgspec.msgpack.decode(round_file(root, node, "plan").read_bytes(), type=Plan)
        other = msgspec.structs.replace(plan, participants=participants)
        round_file(root, node, "plan").write_bytes(canonical(other))
        body = msgspec.msgpack.decode(round_file(root, node, "finals").read_bytes())
        round_file(root, node, "finals").write_bytes(msgspec.msgpack.encode(body | {"plan": other.hash}))


def test_check_refuses_weights_that_are_not_as_the_tokens_that_were_contributed(tmp_path: Path) -> None:
    write_round(tmp_path)
    plan = msgspec.msgpack.decode(round_file(tmp_path, 0, "plan").read_bytes(), type=Plan)
    first, *others = plan.participants
    rewrite_plan(tmp_path, msgspec.structs.replace(first, tokens=99), *others)
    assert checked(tmp_path).errors == ("round 1: the plan's weights are not as its tokens",)
    second = msgspec.structs.replace(others[0], tokens=360)
    rewrite_plan(tmp_path, msgspec.structs.replace(first, tokens=120), second, others[1])
    assert checked(tmp_path).errors == tuple(
        f"round 1: the plan says that {peer} trained on more tokens than it did" for peer in PEERS[:2]
    )
    rewrite_plan(
        tmp_path, msgspec.structs.replace(first, tokens=80), msgspec.structs.replace(second, tokens=240), others[1]
    )
    assert (checked(tmp_path).wrong_values, checked(tmp_path).errors) == (0, ())  # capped


def test_peer_ids_are_in_plan_order() -> None:
    assert len(set(PEERS)) == 3
    assert all(isinstance(peer, str) and peer.startswith(PeerId("12D3Koo")) for peer in PEERS)
