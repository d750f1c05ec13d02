"""Final payloads: nothing but what their owner signed, over values that decode and of who contributes, is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.memory import PayloadPool
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import ChunkStatement
from shoal.swarm.lanes.frame import FrameKind
from tests.collectives.reduce_lab import Mesh, Parcel, deliver, encode, identity, make_plan, peer


def held_back(kind: FrameKind, *, sender: int, to: int) -> tuple[Mesh, list[Parcel]]:
    """A mesh of two where everything has arrived but these parcels, and what only they bring about; and them."""
    contributions = [encode(n, "fp32") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    mesh.start()
    held: list[Parcel] = []

    def hold(parcel: Parcel) -> bool:
        keep = (parcel.kind, parcel.sender, parcel.to) == (kind, peer(sender), peer(to))
        held.extend([parcel] * keep)
        return keep

    mesh.run(1, drop=hold)
    return mesh, held


def one_final() -> tuple[Mesh, Parcel]:
    """A mesh of two where everything has arrived but node 0's finals at node 1; and the first of these."""
    mesh, (first, *others) = held_back(FrameKind.FINAL, sender=0, to=1)
    mesh.parcels += others
    return mesh, first


def refuse(mesh: Mesh, parcel: Parcel, says: str) -> None:
    """The final is taken for what it says it is, until it is verified; then it is wanted again."""
    receiver = mesh.reductions[parcel.to]
    before = receiver.final_chunks
    deliver(mesh.reductions, parcel)
    assert receiver.final_chunks == before + 1
    (error,) = receiver.verify()
    assert says in str(error)
    assert (error.chunk, error.peer) == (parcel.chunk, parcel.sender)
    assert receiver.final_chunks == before
    assert parcel.sender in receiver.waiting_for().finals
    assert receiver.verify() == []


@pytest.mark.parametrize("at", [0, 100, -1, -64])  # value, value, signature twice
def test_final_that_was_tampered_with_is_refused_and_still_wanted(at: int) -> None:
    mesh, parcel = one_final()
    changed = bytearray(parcel.payload)
    changed[at] ^= 1
    refuse(mesh, replace(parcel, payload=bytes(changed)), "signed")
    deliver(mesh.reductions, parcel)
    mesh.run(2)
    assert all(reduction.verify() == [] for reduction in mesh.reductions.values())
    finals = mesh.finals()
    assert finals[0].concatenated() == finals[1].concatenated()


def test_final_with_another_bitmap_is_refused() -> None:
    mesh, parcel = one_final()
    changed = bytearray(parcel.payload)
    changed[-65] = 1  # of two that are in it
    refuse(mesh, replace(parcel, payload=bytes(changed)), "signed")
    changed[-65] = 4  # of nobody
    with pytest.raises(RemoteError, match="malformed") as caught:
        deliver(mesh.reductions, replace(parcel, payload=bytes(changed)))
    assert caught.value.peer == parcel.sender
    deliver(mesh.reductions, parcel)
    mesh.run(2)
    assert all(reduction.verify() == [] for reduction in mesh.reductions.values())


def test_completion_is_told_again_when_what_was_unsound_has_come_anew() -> None:
    mesh, parcel = one_final()
    mesh.run(2)
    changed = bytearray(parcel.payload)
    changed[0] ^= 1
    events = mesh.events[parcel.to]
    refuse(mesh, replace(parcel, payload=bytes(changed)), "signed")
    assert [event.final for event in events] == [1, 2, 3, 4, 5]
    deliver(mesh.reductions, parcel)
    assert [event.final for event in events] == [1, 2, 3, 4, 5, 5]
    assert mesh.reductions[parcel.to].verify(threads=4) == []


def test_final_signed_over_nan_is_refused() -> None:
    mesh, parcel = one_final()
    encoded, bits = bytearray(parcel.payload[:-65]), parcel.payload[-65:-64]
    encoded[:4] = b"\x00\x00\x80\x7f"
    statement = ChunkStatement.sign(
        identity(0), plan=mesh.plan.hash, chunk=parcel.chunk, bitmap=bits, result=chunk_hash(encoded)
    )
    refuse(mesh, replace(parcel, payload=bytes(encoded) + bits + statement.signature), "NaN, infinity")


def test_final_that_includes_who_does_not_contribute_is_refused() -> None:
    contributions = [encode(0, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [1, 0]), contributions)
    final_format = mesh.reductions[peer(1)].final_format
    for included in ([1], [0, 1]):
        final = final_format.sign(identity(0), 0, np.zeros(5_000, np.float32), included)
        parcel = Parcel(peer(1), peer(0), FrameKind.FINAL, 0, final.payload.tobytes())
        with pytest.raises(RemoteError, match="does not contribute"):
            deliver(mesh.reductions, parcel, 0, len(parcel.payload))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_mean_worked_out_in_a_draft_is_signed_as_any_other(name: str) -> None:
    contributions = [encode(n, name) for n in range(2)]
    final_format = FinalFormat(make_plan(contributions, [1, 2]))
    values = np.linspace(-3, 3, final_format.grid.length(0), dtype=np.float32)
    payload, mean = final_format.draft(0, PayloadPool(0))
    mean[:] = values
    final = final_format.sign(identity(0), 0, mean, [0, 1], payload)
    apart = final_format.sign(identity(0), 0, values, [0, 1])
    assert np.shares_memory(final.payload, payload)
    assert final.payload.tobytes() == apart.payload.tobytes()
    assert np.shares_memory(mean, payload) is (name == "fp32")
    assert final_format.read(0, payload).statement.valid()


def test_final_of_another_plan_is_refused() -> None:
    mesh, parcel = one_final()
    refuse(Mesh(make_plan(mesh.contributions, [1, 2], attempt=1), mesh.contributions), parcel, "signed")


def test_final_of_another_chunk_is_refused() -> None:
    mesh, parcel = one_final()
    refuse(mesh, replace(parcel, chunk=(parcel.chunk + 1) % 3), "signed")


def test_finals_can_be_opened_again_from_kept_payloads() -> None:
    contributions = [encode(n, "bf16") for n in range(3)]
    mesh = Mesh(make_plan(contributions, [1, 2, 3]), contributions)
    mesh.start()
    mesh.run(1)
    finals = mesh.finals()[0]
    payloads = [chunk.payload.tobytes() for chunk in finals.chunks]
    again = Finals.open(mesh.plan, payloads)
    assert again.decoded().tobytes() == finals.decoded().tobytes()
    assert again.bitmaps_root == finals.bitmaps_root
    with pytest.raises(RemoteError):
        Finals.open(mesh.plan, [payloads[1], payloads[0], *payloads[2:]])
    with pytest.raises(RemoteError):
        Finals.open(mesh.plan, payloads[:-1])


def test_finals_are_hashed_when_they_arrive_though_sums_lack() -> None:
    mesh, held = held_back(FrameKind.CONTRIBUTION, sender=0, to=1)
    receiver = mesh.reductions[peer(1)]
    finals = list(receiver._finals.values())
    assert finals
    assert all(vars(final)["result"] == chunk_hash(final.encoded.tobytes()) for final in finals)
    for parcel in held:
        deliver(mesh.reductions, parcel)
    assert receiver.final_chunks == mesh.plan.chunks
    assert receiver.verify() == []
    assert all(final.sound for final in finals)


def test_final_is_hashed_when_it_arrives_and_checked_later() -> None:
    mesh, parcel = one_final()
    receiver = mesh.reductions[parcel.to]
    deliver(mesh.reductions, parcel)
    final = receiver._finals[parcel.chunk]
    assert not final.sound
    assert vars(final)["result"] == chunk_hash(final.encoded.tobytes()), "worked out already"
    assert receiver.verify() == []
    assert final.sound
