"""Final payloads: nothing but what their owner signed, over values that decode and of who contributes, is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.finals import Finals
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import ChunkStatement
from shoal.swarm.frame import FrameKind
from tests.collectives.reduce_lab import Mesh, Parcel, check_exact, deliver, encode, identity, make_plan, peer


def one_final() -> tuple[Mesh, Parcel]:
    """A mesh of two where everything has arrived but node 0's finals at node 1; and the first of these."""
    contributions = [encode(n, "fp32") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    mesh.start()
    held: list[Parcel] = []

    def hold(parcel: Parcel) -> bool:
        keep = parcel.kind is FrameKind.FINAL and parcel.sender == peer(0)
        held.extend([parcel] * keep)
        return keep

    mesh.run(1, drop=hold)
    mesh.parcels += held[1:]
    return mesh, held[0]


@pytest.mark.parametrize("at", [0, 100, -1, -64, -65])  # value, value, signature twice, bitmap
def test_final_that_was_tampered_with_is_refused_and_still_wanted(at: int) -> None:
    mesh, parcel = one_final()
    changed = bytearray(parcel.payload)
    changed[at] ^= 1
    with pytest.raises(RemoteError, match="signed") as caught:
        deliver(mesh.reductions, replace(parcel, payload=bytes(changed)), 0, len(changed))
    assert caught.value.peer == peer(0)
    receiver = mesh.reductions[parcel.to]
    assert peer(0) in receiver.waiting_for().finals
    deliver(mesh.reductions, parcel, 0, len(parcel.payload))
    mesh.run(2)
    check_exact(mesh)


def test_final_signed_over_nan_is_refused() -> None:
    mesh, parcel = one_final()
    encoded, bits = bytearray(parcel.payload[:-65]), parcel.payload[-65:-64]
    encoded[:4] = b"\x00\x00\x80\x7f"
    statement = ChunkStatement.sign(
        identity(0), plan=mesh.plan.hash, chunk=parcel.chunk, bitmap=bits, result=chunk_hash(encoded)
    )
    data = bytes(encoded) + bits + statement.signature
    with pytest.raises(RemoteError, match="NaN, infinity") as caught:
        deliver(mesh.reductions, replace(parcel, payload=data), 0, len(data))
    assert caught.value.peer == peer(0)


def test_final_that_includes_who_does_not_contribute_is_refused() -> None:
    contributions = [encode(0, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [1, 0]), contributions)
    form = mesh.reductions[peer(1)].form
    for included in ([1], [0, 1]):
        final = form.sign(identity(0), 0, np.zeros(5_000, np.float32), included)
        parcel = Parcel(peer(1), peer(0), FrameKind.FINAL, 0, final.payload.tobytes())
        with pytest.raises(RemoteError, match="does not contribute"):
            deliver(mesh.reductions, parcel, 0, len(parcel.payload))


def test_final_of_another_plan_or_chunk_is_refused() -> None:
    mesh, parcel = one_final()
    other = make_plan(mesh.contributions, [1, 2], attempt=1)
    stale = Mesh(other, mesh.contributions)
    with pytest.raises(RemoteError, match="signed"):
        deliver(stale.reductions, parcel, 0, len(parcel.payload))
    with pytest.raises(RemoteError, match="signed"):
        deliver(mesh.reductions, replace(parcel, chunk=(parcel.chunk + 1) % 3), 0, len(parcel.payload))


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
