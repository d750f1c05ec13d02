"""What nodes do while their trainers train: next to nothing, and yet a round ends as soon as it can."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import trio

from shoal.protocol.effects import MemberEffect
from shoal.protocol.inputs import Input, Tick
from shoal.protocol.timeouts import RESTING_TICK_S
from tests.node.box_life import Life
from tests.node.box_trainer import TRAIN_S
from tests.node.simulated_disk import Disks
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]

TRAINS_S = 100.0
QUIET_S = 60.0
ROUND_END_S = 1.0
"""More than it takes from the last contribution to the certificate, in the box's time."""


def count_ticks(life: Life, ticks: Counter[int]) -> None:
    take = life.engine.member.take

    def counted(event: Input, now: float) -> MemberEffect | None:
        ticks[life.number] += isinstance(event, Tick)
        return take(event, now)

    life.engine.member.take = counted  # type: ignore[method-assign]


def test_engines_tick_once_a_second_while_trainers_train_and_end_the_round_at_once(
    tmp_path: Path, disks: Disks
) -> None:
    box, ticks = Box(tmp_path, disks), Counter[int]()

    def slow(life: Life) -> None:
        life.trainer.pace = TRAINS_S / TRAIN_S

    async def course(box: Box) -> None:
        box.adjust_trainer = slow
        box.start_all()
        await trio.sleep(TRAINS_S / 10)
        for number in range(3):
            count_ticks(box.node(number), ticks)
        await trio.sleep(QUIET_S)
        quiet = dict(ticks)
        assert all(0 < quiet[number] <= QUIET_S / RESTING_TICK_S + 1 for number in range(3)), quiet
        began = trio.current_time()
        await box.until_round(1)
        assert trio.current_time() - began <= TRAINS_S - TRAINS_S / 10 - QUIET_S + ROUND_END_S

    box.run(course)
