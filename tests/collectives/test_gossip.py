"""The outer step of two partners: against a reference of a few lines, in what it keeps, and where it contracts."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.collectives.codecs import F32, Undecodable, codec
from shoal.collectives.commitment import chunk_hash
from shoal.collectives.gossip import (
    GossipSettings,
    GossipVector,
    decode_vector,
    dither_of,
    encode_vector,
    outer_step,
)
from shoal.collectives.grid import Grid
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.pairing import pairs
from shoal.protocol.wire import SwarmId

SWARM = SwarmId(bytes(range(32)))
NODES = [PeerId(f"node{i}") for i in range(4)]
SETTINGS = GossipSettings(momentum=0.5, lr=0.7, gamma=0.6)
GRID = Grid(10_001, 4096)  # three chunks, the last of an odd number of values


def drawn(seed: int, scale: float = 1.0, numel: int = GRID.numel) -> F32:
    return (scale * np.random.default_rng(seed).standard_normal(numel)).astype(np.float32)


def vector(
    anchor: F32, delta: F32, *, sender: PeerId = NODES[0], round: int = 1, name: str = "bf16", grid: Grid = GRID
) -> GossipVector:
    dither = dither_of(SWARM, round, sender)
    return encode_vector(anchor, delta, SETTINGS, grid=grid, codec_name=name, round=round, dither=dither)


def decoded(one: GossipVector) -> F32:
    return decode_vector(one.chunks, one.grid, one.offer.codec)


def stepped(anchor: F32, momentum: F32, delta: F32, exchanged: tuple[F32, F32] | None) -> tuple[F32, F32]:
    out = np.empty_like(anchor), np.empty_like(anchor)
    outer_step(anchor, momentum, delta, SETTINGS, exchanged=exchanged, out=out)
    return out


def test_four_nodes_follow_the_equation_over_rounds() -> None:
    """δ ← α·δ + (β/2)(Δi + Δj) − γ·(φi − (φi + φj)/2) and φ ← φ + δ, in float64, with what everyone learns drawn."""
    alpha, beta, gamma = SETTINGS.momentum, SETTINGS.lr, SETTINGS.gamma
    state = {node: (drawn(i), np.zeros(GRID.numel, np.float32)) for i, node in enumerate(NODES)}
    truth = {node: (phi.astype(np.float64), momentum.astype(np.float64)) for node, (phi, momentum) in state.items()}
    for round in range(1, 9):
        deltas = {node: drawn(100 * round + i, 0.1) for i, node in enumerate(NODES)}
        members = NODES if round % 4 else NODES[:3]  # now and then one is left over, and goes alone
        sent = {
            node: decoded(vector(state[node][0], deltas[node], sender=node, round=round, name="fp32")) for node in NODES
        }
        partner = {one: other for pair in pairs(SWARM, round, members) for one, other in (pair, pair[::-1])}
        after, expected = {}, {}
        for node in NODES:
            phi, momentum = truth[node]
            other = partner.get(node)
            if other is None:
                update = alpha * momentum + beta * deltas[node]
                exchanged = None
            else:
                mean = (phi + truth[other][0]) / 2
                update = alpha * momentum + beta / 2 * (deltas[node] + deltas[other]) - gamma * (phi - mean)
                exchanged = (sent[node], sent[other])
            expected[node] = (phi + update, update)
            after[node] = stepped(*state[node], deltas[node], exchanged)
        state, truth = after, expected
        for node in NODES:
            for ours, theirs in zip(state[node], truth[node], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_encoding_moves_no_pairs_mean() -> None:
    phi, delta = (drawn(1), drawn(2)), (drawn(3, 0.1), drawn(4, 0.1))
    zero = np.zeros(GRID.numel, np.float32)
    sent = [decoded(vector(phi[i], delta[i], sender=NODES[i])) for i in (0, 1)]
    exact = [0.7 * delta[i].astype(np.float64) + 0.6 * phi[i] for i in (0, 1)]
    assert max(np.abs(sent[i] - exact[i]).max() for i in (0, 1)) > 1e-3  # there is an error to cancel
    updates = [stepped(phi[i], zero, delta[i], (sent[i], sent[1 - i]))[1] for i in (0, 1)]
    mean = np.mean(np.array(updates, np.float64), axis=0)
    np.testing.assert_allclose(mean, 0.7 * np.mean(np.array(delta, np.float64), axis=0), atol=1e-6)


def test_bf16_is_rounded_without_bias_to_one_of_the_two_neighbours() -> None:
    grid = Grid(4096, 4096)
    value = np.float32(1.0 + 0.3 * 2.0**-7)  # three tenths of the way from one bf16 to the next
    anchor = np.full(4096, value / np.float32(0.6), np.float32)
    means = []
    for round in range(1, 65):
        values = decoded(vector(anchor, np.zeros(4096, np.float32), round=round, grid=grid))
        assert set(values.tolist()) == {1.0, 1.0 + 2.0**-7}
        means.append(float(values.mean()))
    share = (np.mean(means) - 1.0) * 2**7
    assert abs(share - 0.3) < 5 * np.sqrt(0.3 * 0.7 / (64 * 4096))


def test_a_vector_is_the_same_however_often_it_is_made_and_another_for_others() -> None:
    phi, delta = drawn(1), drawn(2, 0.1)
    again, other = vector(phi, delta), vector(phi, delta, sender=NODES[1])
    assert vector(phi, delta).offer == again.offer != other.offer
    assert vector(phi, delta, round=2).offer.hashes != again.offer.hashes
    assert [chunk_hash(chunk.data) for chunk in again.chunks] == [again.offer.chunk_hash(i) for i in range(3)]


def test_two_bytes_a_parameter_are_ninety_times_less_than_fp32_at_each_of_30_steps() -> None:
    grid = Grid(1 << 20, 1 << 18)
    made = vector(drawn(1, numel=1 << 20), drawn(2, numel=1 << 20), grid=grid)
    sent = sum(chunk.nbytes for chunk in made.chunks)
    ring_of_four = 30 * 2 * 3 / 4 * 4 * grid.numel  # what each node sends
    assert ring_of_four / sent == 90


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_travel(bad: float) -> None:
    phi = drawn(1)
    phi[5000] = bad
    for name in ("bf16", "fp32"):
        with pytest.raises(LocalError):
            vector(phi, drawn(2), name=name)


def test_bytes_that_no_encoder_writes_are_refused() -> None:
    chunks = [chunk.copy() for chunk in vector(drawn(1), drawn(2)).chunks]
    with pytest.raises(Undecodable):
        decode_vector(chunks[:2], GRID, "bf16")
    with pytest.raises(Undecodable):
        decode_vector([*chunks[:2], chunks[2][:-4]], GRID, "bf16")
    chunks[0][:2].view("<u2")[0] = 0x7FC0  # NaN
    with pytest.raises(Undecodable):
        decode_vector(chunks, GRID, "bf16")
    assert codec("bf16").encoded_bytes(GRID.length(2)) == chunks[2].nbytes


# --- where nodes do not drift apart ---


def contraction(alpha: float, gamma: float) -> float:
    """By how much the second moments of (x, δ) grow a round: the largest eigenvalue of their recurrence.

    x' = x + δ', δ' = α·δ − (γ/2)(x − y), with y the partner's, of the same distribution and independent.
    """
    half = gamma / 2
    dd = np.array([2 * half**2, -2 * alpha * half, alpha**2])  # E δ'² by (E x², E xδ, E δ²)
    xd = np.array([-half, alpha, 0.0])  # E xδ'
    rows = [np.array([1.0, 0.0, 0.0]) + 2 * xd + dd, xd + dd, dd]
    return float(max(abs(np.linalg.eigvals(np.array(rows)))))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_the_manifests_bound_on_gamma_is_where_members_begin_to_drift_apart(alpha: float) -> None:
    bound = 2 * (1 - alpha**2)
    assert all(contraction(alpha, share * bound) < 1 for share in np.linspace(0.01, 0.99, 50))
    assert all(contraction(alpha, share * bound) > 1 for share in np.linspace(1.01, 1.5, 20))


def spread_after(rounds: int, settings: GossipSettings) -> float:
    """How far 64 nodes that learn nothing are apart after so many rounds, at first by 1 each."""
    peers = [PeerId(f"{i:02}") for i in range(64)]
    phi = {peer: drawn(i, numel=64) for i, peer in enumerate(peers)}
    momentum = {peer: np.zeros(64, np.float32) for peer in peers}
    zero = np.zeros(64, np.float32)
    for round in range(rounds):
        for one, other in pairs(SWARM, round, peers):
            sent = {peer: phi[peer] * np.float32(settings.gamma) for peer in (one, other)}
            for me, you in ((one, other), (other, one)):
                out = np.empty(64, np.float32), np.empty(64, np.float32)
                outer_step(phi[me], momentum[me], zero, settings, exchanged=(sent[me], sent[you]), out=out)
                phi[me], momentum[me] = out
    return float(np.std(np.array(list(phi.values())), axis=0).mean())


def test_nodes_come_together_below_the_bound_and_drift_apart_above_it() -> None:
    assert spread_after(40, GossipSettings(momentum=0.5, lr=0.7, gamma=0.6)) < 1e-2
    assert spread_after(40, GossipSettings(momentum=0.5, lr=0.7, gamma=1.4)) < 1
    assert spread_after(40, GossipSettings(momentum=0.5, lr=0.7, gamma=1.9)) > 10
