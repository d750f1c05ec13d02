"""A strategy of the test's own, added by its line in the table alone: a swarm runs rounds with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import parse_manifest, render_manifest
from shoal.protocol.strategies.strategy import Nesterov, OuterStep, Strategy, Sync
from shoal.protocol.strategies.table import STRATEGIES
from tests.node.simulated_disk import Disks
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]


class Halving(Strategy):
    """Half of the mean update is taken, without momentum."""

    name = "halving"
    summary = "of the mean update one half."
    settings = frozenset({"late_steps"})

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`."""
        return {"codec": "fp32"}

    def check(self, sync: Sync) -> None:
        """See `Strategy`."""
        if sync.norm_clip:
            raise ValueError("norm_clip has no meaning here: take halves")

    def outer_step(self, sync: Sync) -> OuterStep:
        """See `Strategy`."""
        return Nesterov(lr=0.5, momentum=0.0)


@pytest.fixture
def halving(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its name, by which manifests find it."""
    monkeypatch.setitem(STRATEGIES, Halving.name, Halving())
    return Halving.name


def test_a_swarm_runs_rounds_by_a_strategy_that_the_table_alone_knows(
    tmp_path: Path, disks: Disks, halving: str
) -> None:
    box = Box(tmp_path, disks, strategy=halving)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(3)
        anchors = [box.node(number).state_store.state for number in range(3)]
        assert all(state is not None and state.round >= 3 for state in anchors)

    box.run(course)  # which computes every certified state again, by the outer step of the manifest's strategy
    assert box.counted.sum() == 3 * len(box.values) == 9

    begun = box.initial_state().anchor
    after = box.node(0).state_store.state
    assert after is not None
    moved = begun - after.anchor
    assert np.isclose(moved.sum(), 0.5 * len(box.values), atol=1e-3)  # of each round's three stretches the mean is 1/3


def test_a_manifest_has_its_defaults_and_checks_and_its_words(halving: str) -> None:
    founder = "12D3KooWCRscMgHgEo3ojm8ovzheydpvTEqsDtq7Vby38cMHrYjt"
    begin = f'[swarm]\nname = "s"\nfounders = ["{founder}"]\n[workload]\nname = "text"\n[sync]\ninner_steps = 4\n'
    text = begin + f'strategy = "{halving}"\n'
    manifest = parse_manifest(text)
    assert manifest.strategy.name == halving
    assert (manifest.sync.codec, manifest.sync.balances, manifest.sync.applied_mixing) == ("fp32", False, None)
    assert parse_manifest(render_manifest(manifest)) == manifest
    parse_manifest(text + "late_steps = 1\n")
    with pytest.raises(ConfigError, match=r"\[sync\] norm_clip has no meaning here: take halves"):
        parse_manifest(text + "norm_clip = true\n")
    with pytest.raises(ConfigError, match='overlap_steps has a meaning with strategy = "diloco" or "streaming" only'):
        parse_manifest(text + "overlap_steps = 1\n")
    with pytest.raises(ConfigError, match='late_steps has a meaning with strategy = "diloco" or "streaming" or "halv'):
        parse_manifest(begin + 'strategy = "ddp"\nlate_steps = 1\n')
