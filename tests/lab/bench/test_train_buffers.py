"""Buffers of a model under every strategy: their mean is certified, evaluated, exported and given to newcomers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shoal.collectives.codecs import F32
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.reference import reference
from shoal.collectives.state import CertifiedState, header_of
from shoal.lab.bench.train_gossip import GossipSwarm
from shoal.lab.bench.train_local import LocalSwarm
from shoal.node.state.checkpoint_export import export_model
from shoal.node.state.checkpoints import LAYOUT, STATE
from shoal.node.state.state_files import write_state
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.messages import Plan
from tests.node.normed import HIDDEN, Normed

CHUNK_VALUES = 4096
IDENTITIES = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 5)]
BUFFERS = ("0.running_mean", "0.running_var", "4.running_mean", "4.running_var")
BUFFER_VALUES = 2 * 16 + 2 * HIDDEN
ROUNDS = 4

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STRATEGIES: dict[str, dict[str, Any]] = {
    "diloco": {"codec": "int8", "inner_steps": 4},
    "diloco, medians": {"strategy": "diloco", "codec": "int8", "inner_steps": 4, "aggregate": "median"},
    "diloco, overlapped": {"strategy": "diloco", "codec": "int8", "inner_steps": 4, "overlap_steps": 2},
    "streaming": {"inner_steps": 4, "fragments": 2},
    "sparse": {"inner_steps": 4},
    "ddp": {"codec": "bf16"},
}


def manifest_of(founders: int, sync: dict[str, Any]) -> Manifest:
    tables: dict[str, object] = {
        "swarm": {"name": "n", "founders": [i.peer_id for i in IDENTITIES[:founders]], "admission": "open"},
        "workload": {"name": "tests.node.normed:Normed"},
        "sync": sync,
        "round": {"chunk_values": CHUNK_VALUES},
    }
    return validate_manifest(tables, source="the test's manifest")


class Watched(LocalSwarm):
    """Keeps what each node contributed to the newest round, and checks its finals."""

    def __init__(self, manifest: Manifest, identities: Sequence[Identity]) -> None:
        self.buffers: list[tuple[int, F32]] = []
        super().__init__(manifest, identities)

    def _reduce(self, plan: Plan) -> Finals:
        made = {peer: node.contributions.made for peer, node in self.nodes.items()}
        self.buffers = [
            (participant.weight, one.values[-BUFFER_VALUES:])
            for participant in plan.participants
            if participant.weight and (one := made[participant.peer]) is not None
        ]
        finals = super()._reduce(plan)
        contributed = {peer: one.encoded.concatenated() for peer, one in made.items() if one is not None}
        assert finals.concatenated() == reference(plan, contributed, finals.bitmaps).finals
        assert not plan.participants or plan.codec.endswith("+buffers1")
        return finals


def replica_at(swarm: LocalSwarm | GossipSwarm, place: int) -> Replica:
    node: Any = swarm.nodes[IDENTITIES[place].peer_id]
    found: Any = node.replica if isinstance(swarm, GossipSwarm) else node._replica
    assert isinstance(found, Replica)
    return found


def calls_of(swarm: LocalSwarm, place: int) -> int:
    return int(replica_at(swarm, place).model.get_buffer("2.calls"))


def buffers_of(model: torch.nn.Module) -> F32:
    return np.concatenate([model.get_buffer(name).numpy() for name in BUFFERS])


def exported(state: CertifiedState, layout: Layout, folder: Path) -> torch.nn.Module:
    """The model that plain torch makes of an exported file; what is not in that stays as built."""
    folder.mkdir()
    header = header_of(state, Grid(state.numel, CHUNK_VALUES))
    write_state(folder / STATE, state, header)
    (folder / LAYOUT).write_bytes(msgspec.json.encode(layout))
    values = load_file(export_model(folder, folder / "out", digest=header.digest.hex()))
    assert {name for name in values if "running" in name} == set(BUFFERS)
    torch.manual_seed(99)
    model = Normed().build()
    missing = model.load_state_dict(values, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["2.calls"], [])
    return model.eval()


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return Normed().evaluate(model)


@pytest.mark.parametrize("name", STRATEGIES)
def test_exported_model_has_the_loss_that_nodes_report(name: str, tmp_path: Path) -> None:
    swarm = Watched(manifest_of(3, {"strategy": name} | STRATEGIES[name]), IDENTITIES[:3])
    layout = replica_at(swarm, 0).layout
    assert layout.buffers == BUFFERS
    assert layout.numel % CHUNK_VALUES == BUFFER_VALUES
    for _ in range(ROUNDS):
        swarm.run_round()
    weights, values = [weight for weight, _ in swarm.buffers], np.stack([part for _, part in swarm.buffers])
    assert len(weights) == 3
    assert (values.max(axis=0) > values.min(axis=0)).all()  # no two nodes have seen the same
    mean = np.average(values.astype(np.float64), axis=0, weights=weights).astype(np.float32)
    if "medians" in name:
        mean = np.median(values, axis=0)
    assert np.array_equal(swarm.state.anchor[-BUFFER_VALUES:], mean)
    assert not swarm.state.momentum[layout.buffers_begin :].any()
    assert swarm.state.momentum[: layout.buffers_begin].any()
    for place in range(3):
        assert np.array_equal(buffers_of(replica_at(swarm, place).model), mean)
        assert replica_at(swarm, place).evaluate() == swarm.evaluate()
        assert np.array_equal(buffers_of(replica_at(swarm, place).model), mean)  # also after the evaluation
    model = exported(swarm.state, layout, tmp_path / "checkpoint")
    assert loss_of(model) == pytest.approx(swarm.evaluate(), abs=1e-4)
    as_built = {key: value for key, value in Normed().build().state_dict().items() if "running" in key}
    model.load_state_dict(as_built, strict=False)
    assert loss_of(model) > 2 * swarm.evaluate()  # the same parameters


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_newcomer_gets_the_buffers_and_has_a_counter_of_its_own(name: str) -> None:
    swarm = LocalSwarm(manifest_of(2, {"strategy": name} | STRATEGIES[name]), IDENTITIES[:2])
    for _ in range(ROUNDS):
        swarm.run_round()
    swarm.add(IDENTITIES[2])
    newcomer = replica_at(swarm, 2)
    assert np.array_equal(buffers_of(newcomer.model), swarm.state.anchor[-BUFFER_VALUES:])
    assert newcomer.evaluate() == swarm.evaluate()
    assert calls_of(swarm, 0) > calls_of(swarm, 2) == 0
    for _ in range(2):  # a joiner's first round is without weight
        swarm.run_round()
    assert calls_of(swarm, 0) > calls_of(swarm, 2) > 0
    assert np.array_equal(buffers_of(newcomer.model), swarm.state.anchor[-BUFFER_VALUES:])


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_partners_take_the_mean_of_their_buffers(codec: str, tmp_path: Path) -> None:
    swarm = GossipSwarm(manifest_of(2, {"strategy": "gossip", "codec": codec, "inner_steps": 4}), IDENTITIES[:2])
    for _ in range(ROUNDS):
        swarm.run_round()
    one, other = swarm.nodes.values()
    before = [node.made.delta[-BUFFER_VALUES:] for node in (one, other)]
    assert (before[0] != before[1]).any()
    mean = (before[0] + before[1]) * np.float32(0.5)
    for place, node in enumerate((one, other)):
        assert np.array_equal(node.state.anchor[-BUFFER_VALUES:], mean)
        assert not node.state.momentum[node.replica.layout.buffers_begin :].any()
        model = exported(node.state, node.replica.layout, tmp_path / str(place))
        assert loss_of(model) == pytest.approx(node.evaluate(), abs=1e-4)
    assert not np.array_equal(one.state.anchor, other.state.anchor)  # each its own parameters
    swarm.run_round({})  # nobody has a partner
    assert np.array_equal(one.state.anchor[-BUFFER_VALUES:], one.made.delta[-BUFFER_VALUES:])
