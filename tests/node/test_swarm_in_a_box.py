from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.simulated_disk import Disks, Fault, Survival
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]


def test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once(
    tmp_path: Path, disks: Disks
) -> None:
    box = Box(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(5)

    box.run(course)
    print(box.story(), box.counted.sum(), len(box.values), [l.disk.operations for l in box.lives])
