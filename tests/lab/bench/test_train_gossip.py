"""Gossip and replaced nodes in one process: beside a loop written down plainly, and beside what real nodes came to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.schedule import learning_rate
from shoal.lab.bench.train_gossip import GossipSwarm
from shoal.lab.bench.train_local import LocalSwarm, train_locally
from shoal.lab.bench.train_spec import TrainBench, replica_of, workload_of
from shoal.node.training.adamw import AdamW
from shoal.node.training.trainer_messages import Assignment, InnerSettings
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.pairing import pairs
from shoal.protocol.wire import decode
from shoal.testnet.check_gossip import StoredExchange
from tests.node.lab import Node, Swarm
from tests.node.test_gossip_nodes import gossiping

TINY = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 4}
STEP_TOKENS = 64
STEPS = 3
ROUNDS = 2
REAL_ROUNDS_LIMIT = 10
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.6
KEYS = {"round": {"chunk_values": 4096}, "inner": {"lr": 0.01, "warmup_tokens": 0}}


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def tiny(**changes: Any) -> TrainBench:
    fields: dict[str, Any] = {
        "strategy": "gossip", "nodes": 2, "tokens": ROUNDS * 2 * STEPS * STEP_TOKENS, "inner_steps": STEPS,
        "options": TINY, "keys": KEYS,
    }  # fmt: skip
    return TrainBench(**(fields | changes))


def who(count: int) -> list[Identity]:
    return [Identity.from_seed(bytes([number + 1]) * 32) for number in range(count)]


# -- in one process ------------------------------------------------------------------------------------------


def directly(rounds: Sequence[Sequence[tuple[int, int]]]) -> list[F32]:
    """The weights of four nodes after rounds of these pairs, by `collectives.gossip`'s equations without a codec."""
    workload = TextWorkload(**TINY)  # type: ignore[arg-type]
    inner = InnerSettings(lr=0.01, warmup_tokens=0)
    models, optimizers = [], []
    for _ in range(4):
        torch.manual_seed(7)
        models.append(workload.build())
        optimizers.append(AdamW(models[-1].parameters(), betas=inner.betas, weight_decay=inner.weight_decay))
    slow = [torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy() for model in models]
    momentum = [np.zeros_like(one) for one in slow]
    tokens = 0
    for number, paired in enumerate(rounds, start=1):
        for member, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(slow[member].copy()), model.parameters())
            batches = workload.batches(Assignment(seed=7, round=number, member=member, members=4))
            for step in range(STEPS):
                loss, count = workload.loss(model, next(batches))
                model.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
                optimizer.step(learning_rate(inner, tokens + (step + 1) * count))
        tokens += 4 * STEPS * STEP_TOKENS
        fast = [torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy() for model in models]
        delta = [one - base for one, base in zip(fast, slow, strict=True)]
        sent = [BETA * d + GAMMA * base for d, base in zip(delta, slow, strict=True)]
        for me, other in [*paired, *((b, a) for a, b in paired)]:
            momentum[me] = ALPHA * momentum[me] + BETA * delta[me] + (sent[other] - sent[me]) / 2
        slow = [base + m for base, m in zip(slow, momentum, strict=True)]
    return slow


def test_nodes_in_one_process_come_to_what_the_equations_say() -> None:
    nodes = who(4)
    manifest = tiny(codec="fp32", nodes=4).manifest(7, [one.peer_id for one in nodes])
    swarm = GossipSwarm(manifest, nodes)
    places = list(manifest.swarm.founders)
    paired = []
    for number in (1, 2):
        swarm.run_round()
        found = pairs(manifest.swarm_id, number, places)
        paired.append([(places.index(one), places.index(other)) for one, other in found])
    layout = replica_of(manifest, workload_of(manifest)).layout
    names = [name for name, _ in TextWorkload(**TINY).build().named_parameters()]  # type: ignore[arg-type]
    for place, expected in enumerate(directly(paired)):
        anchor = swarm.nodes[places[place]].state.anchor
        mine = dict(zip(layout.names, np.split(anchor, ends(layout.shapes)), strict=True))
        flat = np.concatenate([mine[name] for name in names])  # ours are sorted by name, torch's as they were made
        np.testing.assert_allclose(flat, expected, rtol=0, atol=2e-6)
    anchors = [node.state.anchor for node in swarm.nodes.values()]
    assert np.abs(anchors[0] - np.mean(anchors, axis=0)).max() > 1e-3  # no common state: the above is of each
    assert swarm.tokens == 2 * 4 * STEPS * STEP_TOKENS


def ends(shapes: tuple[tuple[int, ...], ...]) -> Any:
    return np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]


def test_of_an_odd_number_one_steps_alone_and_sends_nothing() -> None:
    nodes = who(3)
    swarm = GossipSwarm(tiny(nodes=3).manifest(7, [one.peer_id for one in nodes]), nodes)
    before = {peer: node.state.anchor for peer, node in swarm.nodes.items()}
    numel = next(iter(before.values())).size
    swarm.run_round()
    ((one, other),) = pairs(swarm._manifest.swarm_id, 1, list(before))
    assert swarm.wire_bytes == 2 * sum(-(-2 * length // 4) * 4 for length in (4096, 4096, numel - 8192))
    alone = next(peer for peer in before if peer not in (one, other))
    node = swarm.nodes[alone]
    expected = before[alone] + np.float32(BETA) * node.made.delta
    np.testing.assert_allclose(node.state.anchor, expected, rtol=0, atol=1e-7)


def test_bytes_of_a_node_do_not_depend_on_the_number_of_nodes() -> None:
    of_two, of_four = (train_locally(tiny(nodes=n, tokens=n * STEPS * STEP_TOKENS), 1)[-1] for n in (2, 4))
    assert of_two.round == of_four.round == 1
    assert of_two.wire_bytes / 2 == of_four.wire_bytes / 4 > 0


def test_a_newcomer_begins_on_a_snapshot_and_shares_no_batches_with_founders() -> None:
    nodes = who(3)
    swarm = GossipSwarm(tiny().manifest(7, [one.peer_id for one in nodes[:2]]), nodes[:2])
    swarm.run_round()
    stays = swarm.nodes[nodes[1].peer_id]
    swarm.replace(nodes[0].peer_id, nodes[2])
    comes = swarm.nodes[nodes[2].peer_id]
    assert comes.state is stays.state
    swarm.run_round()
    assert (comes.state.round, comes.state.tokens) == (2, 2 * 2 * STEPS * STEP_TOKENS)
    assert np.abs(comes.made.delta - stays.made.delta).max() > 1e-4


# -- beside real nodes ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_real_gossiping_nodes_come_to_the_weights_of_those_in_one_process(tmp_path: Path) -> None:
    """Both begin each exchange when both have trained. On a busy machine one may be late for the other and step alone;
    rounds go on until ROUNDS are done, and in one of them the two were partners.
    """
    rounds = range(1, REAL_ROUNDS_LIMIT + 1)
    with gossiping(tmp_path, nodes=2, founders=2) as swarm:
        swarm.start_together(holds=[f"{number}:plan" for number in rounds])
        identities = [Identity.load_or_create(node.folder / "node.key") for node in swarm.nodes]
        local, paired = GossipSwarm(swarm.manifest, identities), 0
        for number in rounds:
            for node in swarm.nodes:
                node.hold(f"{number}:plan")
            for node in swarm.nodes:
                node.release()
            for node in swarm.nodes:
                node.wait("stepped", round=number)
            kept = {PeerId(node.peer_id): node.folder / "rounds" / f"0.0-{number}" for node in swarm.nodes}
            exchanges = {peer: decode((path / "exchange").read_bytes(), StoredExchange) for peer, path in kept.items()}
            partners = {peer: PeerId(e.partner) for peer, e in exchanges.items() if e.partner is not None}
            local.run_round(partners)
            for peer, path in kept.items():
                state = local.nodes[peer].state
                stepped = np.fromfile(path / "stepped", np.uint32)
                assert np.array_equal(stepped, np.concatenate([state.anchor, state.momentum]).view(np.uint32)), number
            paired += len(partners)
            if number >= ROUNDS and paired:
                break
        assert paired


@pytest.mark.long
def test_real_nodes_that_are_replaced_certify_what_those_in_one_process_do(tmp_path: Path) -> None:
    """One is killed in round 3 and another comes; since when it is there, and with what weight, real plans say."""
    with Swarm(tmp_path, nodes=3) as swarm:
        gone, stays, _ = swarm.nodes
        swarm.start_together(holds=["3:train"])
        for node in swarm.nodes:
            node.hold("3:train")
        gone.kill()
        for node in swarm.nodes[1:]:
            node.release()
        newcomer = Node(tmp_path / "newcomer", swarm.manifest_path, tmp_path)
        swarm.nodes.append(newcomer)
        newcomer.start(join=[stays])
        last = newcomer.wait("contributed")["round"]
        digests = {number: stays.certified(number)["digest"] for number in range(1, last + 1)}
        for node in swarm.nodes:
            node.end()
        plans = [decode((stays.folder / "rounds" / f"0.0-{number}" / "plan").read_bytes(), Plan) for number in digests]
        identities = [Identity.load_or_create(node.folder / "node.key") for node in swarm.nodes]
    local = LocalSwarm(swarm.manifest, identities[:3])
    comes = identities[3]
    for number, plan in enumerate(plans, start=1):
        there = {participant.peer: participant.weight for participant in plan.participants}
        for peer in local.nodes.keys() - there.keys():
            del local.nodes[peer]
        if comes.peer_id in there and comes.peer_id not in local.nodes:
            assert there[comes.peer_id] == 0  # it has nothing to contribute to its first round
            local.add(comes)
        local.run_round()
        assert local.header is not None
        assert digests[number] == local.header.digest.hex(), number
    assert there.get(comes.peer_id)
    assert identities[0].peer_id not in there
