"""Catching up where each round is of one fragment of the parameters."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.outer import OuterSettings
from shoal.node.state.catchup import replay_limit_rounds
from shoal.protocol.errors import NetworkError
from shoal.protocol.peering import FinalsAnswer, GetFinals
from tests.node.donors import World
from tests.node.ledger import GRID, Ledger, finals_of, plan_of
from tests.node.state.catchup_lab import BAD, GOOD, Watch

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures("no_threads")]


REPLAY_LIMIT = replay_limit_rounds("int8", GRID.numel, GRID.chunk_values)


@pytest.mark.parametrize("missed", [1, 2, 3 * REPLAY_LIMIT])
async def test_missed_rounds_of_fragments_are_replayed_each_on_its_own_chunks(tmp_path: Path, missed: int) -> None:
    """Three fragments: three times as many rounds are as many bytes."""
    ledger = Ledger(outer=OuterSettings(fragments=3))
    ledger.certify(missed)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    state = await world.advance(ledger.states[0], ledger.chain, [GOOD], Watch())
    assert state.anchor.tobytes() == ledger.state.anchor.tobytes()
    assert world.cache.digest(state) == ledger.chain.value(missed).digest
    assert [type(request) for request in donor.asked] == [GetFinals] * missed
    for before, after in pairwise(ledger.states):
        for chunk in range(GRID.chunks):
            at = slice(*GRID.span(chunk))
            moved = not np.array_equal(before.anchor[at], after.anchor[at])
            assert moved == (chunk % 3 == after.round % 3)


async def test_plan_of_another_round_s_fragment_is_not_taken(tmp_path: Path) -> None:
    """A lead may have named any plan: one of the first chunk in the round of the second, which is as long."""
    ledger = Ledger(outer=OuterSettings(fragments=3))
    ledger.certify()
    world = World(tmp_path, ledger)
    donor = world.donor(BAD)
    whole = plan_of(ledger.founders, ledger.chain.value(0))
    other = finals_of(whole, ledger.founders, seed=1)
    donor.answer = lambda request: FinalsAnswer(plan=other.plan)
    with pytest.raises(NetworkError):
        await world.catchup.finals(other.plan.hash, [BAD])
    assert world.catchup._shape_of(1) == ("int8", 4096, 4096)
    assert world.catchup._shape_of(2) == ("int8", 10_000 - 2 * 4096, 4096)
