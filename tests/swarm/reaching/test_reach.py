"""What is tried to reach a peer, in which order, and how soon again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from shoal.protocol.identity import PeerId
from shoal.swarm.reaching import reach as reach_module
from shoal.swarm.reaching.reach import ALONE_ATTEMPTS, ASK_S, PUNCHES_BURST, REST_S, Everywhere, Reach, Step

pytestmark = pytest.mark.virtual_time

LOWER, HIGHER, THIRD = (PeerId(f"12D3KooW{name}") for name in ("a", "b", "c"))


class Facts(Everywhere):
    """A node that can be dialled or cannot, with these members that relay."""

    def __init__(self, *, reached: bool, relays: Sequence[PeerId] = ()) -> None:
        self.reached, self.third = reached, relays

    def is_reached(self) -> bool:
        return self.reached

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        return self.third


def steps(facts: Facts, *, me: PeerId = LOWER, direct: bool = True, asked: bool = False) -> list[str]:
    """All that is tried where everything is in vain."""
    reach = Reach(me, facts, is_direct=lambda peer: direct)
    tried: list[Step] = []
    peer = HIGHER if me == LOWER else LOWER
    while (step := reach.next_step(peer, tried[-1] if tried else None, asked=asked)) is not None:
        tried.append(step)
    return [step.value for step in tried]


def test_whoever_can_be_dialled_asks_for_it_before_a_third_is_troubled() -> None:
    assert steps(Facts(reached=True, relays=[THIRD])) == ["dial", "ask", "relay"]
    assert steps(Facts(reached=True)) == ["dial", "ask"]
    assert steps(Facts(reached=False, relays=[THIRD])) == ["dial", "relay"]


def test_two_that_nobody_reaches_and_nobody_relays_for_make_a_hole_which_the_lower_begins() -> None:
    nobody = Facts(reached=False)
    assert steps(nobody) == ["dial", "punch"]
    assert steps(nobody, me=HIGHER) == ["dial", "ask"]
    assert steps(nobody, direct=False) == ["dial", "relay"], "what fails then says what is missing"


def test_who_was_asked_asks_for_nothing_in_turn() -> None:
    assert steps(Facts(reached=True, relays=[THIRD]), asked=True) == ["dial"]
    assert steps(Facts(reached=False), asked=True) == ["dial", "punch"]
    assert steps(Facts(reached=False), me=HIGHER, asked=True) == ["dial"]


def test_peer_that_was_asked_has_little_time_where_there_is_another_way() -> None:
    assert Reach(LOWER, Facts(reached=True, relays=[THIRD])).ask_s(HIGHER) == ASK_S
    assert Reach(LOWER, Facts(reached=True)).ask_s(HIGHER) == math.inf


async def test_hole_that_failed_is_left_alone_for_a_while_with_that_peer() -> None:
    reach = Reach(LOWER, Facts(reached=False, relays=[THIRD]))
    assert reach.onlooker(HIGHER) == THIRD
    reach.failed(HIGHER)
    await trio.sleep(REST_S - 1)
    assert [reach.onlooker(HIGHER), reach.onlooker(THIRD)] == [None, THIRD]
    await trio.sleep(1)
    assert reach.onlooker(HIGHER) == THIRD


async def test_holes_with_one_peer_are_bounded_and_take_little_from_others() -> None:
    reach = Reach(LOWER, Facts(reached=False, relays=[THIRD]))
    tried = [reach.may_punch(HIGHER) for _ in range(100)]
    assert tried == [True] * int(PUNCHES_BURST) + [False] * (100 - int(PUNCHES_BURST))
    assert reach.onlooker(HIGHER) is None
    assert reach.onlooker(THIRD) == THIRD


def test_two_are_parted_after_some_holes_in_a_row_that_failed_and_no_more_once_one_is_found() -> None:
    parted: list[PeerId] = []
    reach = Reach(LOWER, Facts(reached=False), is_direct=lambda peer: True)
    reach.parted = parted.append
    for _ in range(ALONE_ATTEMPTS - 1):
        reach.failed_alone(HIGHER)
    reach.found_alone(HIGHER)
    for _ in range(ALONE_ATTEMPTS - 1):
        reach.failed_alone(HIGHER)
    assert parted == []
    reach.failed_alone(HIGHER)
    assert parted == [HIGHER]


@pytest.mark.virtual_time
async def test_few_peers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_module, "KEY_LIMIT", 2)
    reach = Reach(LOWER, Facts(reached=False, relays=[THIRD]))
    for number in range(5):
        reach.failed(PeerId(f"peer {number}"))
    assert [reach.rests(PeerId(f"peer {number}")) for number in range(5)] == [False] * 3 + [True] * 2
