"""Bytes on disk that a node takes, by kind, for a model of so many parameters: one rule, for whoever asks beforehand.

At the most, with a state s of 8 bytes a parameter, the optimizer's moments m, a contribution of 4, and a round's finals
f. What is written anew is beside what it replaces until it is whole and synced; so the most of each kind is:

    states              S(0), whose momentum is zeros and takes no room; those held or on disk, and the next
    finals              as many of the last as are no more than half a state (`states.FINALS_DISK_BYTES`)
    work under way      m + 4 of one round; then of the next, or amid a round the same in place and being written
    contributions       4 of this round and the last, where they are not on disk, and as they were encoded, for audits
    checkpoints         s each: files of above under a second name, until the first goes
    logs                events and the agreement's

With `streaming`, whose replicas keep a part of their own values, a round's work has 8 more, the replica and what it
learnt, and 4 more of residuals are in place of memory. Where seats are few each contribution has 4 more, the anchor.

`shoal bench memory --optimizer adamw` measures the sum. Finals since the newest state on disk stay whatever they take:
where rounds are shorter than ten times what a state takes to write, there are more (`state_saver.LAG_LIMIT_ROUNDS`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.node.audits.auditing import CONTRIBUTIONS_KEPT
from shoal.node.reporting.event_files import EVENT_LOG_LIMIT_BYTES
from shoal.node.state.states import FINALS_DISK_BYTES, FINALS_KEPT, FINALS_MIN, STATES_KEPT
from shoal.node.state.store import AGREEMENT_LOG_LIMIT_BYTES
from shoal.node.training.memory_need import MOMENT_BYTES
from shoal.protocol.manifest import Manifest, OptimizerName
from shoal.protocol.seats import are_few

STATE_BYTES: Final = 8
"""Of a value in a certified state: the parameter and the outer optimizer's momentum in fp32."""
INITIAL_BYTES: Final = 4
"""Of S(0)."""
CONTRIBUTION_BYTES: Final = 4
"""In fp32, as it was before it was encoded."""
FINAL_BYTES: Final = {"fp32": 4, "bf16": 2}
"""Of a round's reduced values as they travel; one or less with the other codecs."""
MIXED_BYTES: Final = 8
"""More in a round's work where anchors are mixed into replicas."""
ANCHOR_BYTES: Final = 4
"""Beside a contribution, where seats are few."""
RESIDUAL_BYTES: Final = 4
"""Of the fragments that a round is not of, where there are any."""
WORK_FILES: Final = 3
"""Moments with a contribution, or with what was learnt since: of a round, in place amid the next, and being written."""


BLOCK_BYTES: Final = 512
"""Of `st_blocks`, whatever the file system's own are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes that a node will take. parts: at the most, by kind. there: so many its folder takes; free: of its disk."""

    parts: dict[str, int]
    there: int
    free: int

    remedy = "make room, choose another --data-dir, or keep fewer checkpoints"

    @property
    def more(self) -> int:
        """Bytes beside those that are there."""
        return max(sum(self.parts.values()) - self.there, 0)

    @property
    def fits(self) -> bool:
        """True if there is room for all of it."""
        return self.free >= self.more

    @property
    def text(self) -> str:
        """Room that is free and that is needed, told to the user."""
        shown = ", ".join(f"{megabytes(size)} {name}" for name, size in self.parts.items())
        needed = f"up to {megabytes(self.more)} more needed ({shown}; {megabytes(self.there)} are there already)"
        return f"{megabytes(self.free)} free, {needed}"


def disk_need(folder: Path, manifest: Manifest, numel: int, checkpoints: int) -> DiskNeed:
    """Bytes that a node on a data folder, which need not be there, takes of its disk with a model of `numel` values."""
    mixes, few_seats = manifest.sync.applied_mixing is not None, are_few(manifest.seats)
    return DiskNeed(
        parts=bytes_on_disk(
            numel, manifest.sync.codec, checkpoints, manifest.inner.optimizer, mixes=mixes, few_seats=few_seats
        ),
        there=_bytes_under(folder),
        free=shutil.disk_usage(existing_parent(folder)).free,
    )


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))


def megabytes(size: int) -> str:
    """`1,234 MB`."""
    return f"{size / 1e6:,.0f} MB"


def _bytes_under(folder: Path) -> int:
    """Bytes that files take of the disk there, each once whatever its number of names."""
    sizes = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a running node removes files
                known = os.lstat(os.path.join(place, name))
                sizes[known.st_ino] = known.st_blocks * BLOCK_BYTES
    return sum(sizes.values())


def bytes_at_least(numel: int, codec: str) -> int:
    """Bytes without which no round passes, whatever else is kept: states and contributions."""
    parts = bytes_on_disk(numel, codec, 0)
    return parts["states"] + parts["contributions"]


def bytes_on_disk(
    numel: int,
    codec: str,
    checkpoints: int,
    optimizer: OptimizerName = "adamw",
    *,
    mixes: bool = False,
    few_seats: bool = False,
) -> dict[str, int]:
    """Bytes on a node's disk at the most, by kind: of a model of `numel` values, with so many checkpoints.

    mixes: anchors of fragments are mixed into replicas, as with `streaming`. few_seats: members take turns.
    """
    state, final = numel * STATE_BYTES, numel * FINAL_BYTES.get(codec, 1)
    made = CONTRIBUTION_BYTES + few_seats * ANCHOR_BYTES
    work = round(numel * (MOMENT_BYTES[optimizer] + made + mixes * MIXED_BYTES))
    contributions = 2 * numel * made + CONTRIBUTIONS_KEPT * final
    return {
        "states": (STATES_KEPT + 1) * state + numel * INITIAL_BYTES,
        "finals": max(FINALS_MIN * final, min(FINALS_KEPT * final, max(FINALS_DISK_BYTES, state // 2))),
        "work under way": WORK_FILES * work,
        "contributions": contributions + mixes * numel * RESIDUAL_BYTES,
        "checkpoints": checkpoints * state,
        "logs": 2 * EVENT_LOG_LIMIT_BYTES + AGREEMENT_LOG_LIMIT_BYTES,
    }
