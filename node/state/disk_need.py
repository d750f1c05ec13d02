"""Bytes on disk that a node takes, by kind, for a model of so many parameters: one rule, for whoever asks beforehand.

At the most, with a state s of 8 bytes a parameter, the optimizer's moments m, a contribution of 4, and a round's finals
f. What is written anew is beside what it replaces until it is whole and synced; so the most of each kind is:

    states              S(0), whose momentum is zeros and takes no room; the last, and the one being written
    finals              as many of the last as are no more than a state (`states.FINALS_DISK_BYTES`)
    work under way      m + 4 of one round; then of the next, or amid a round the same in place and being written
    in place of memory  nameless files: the states that are served and the next one, two contributions of 4, and those
                        that were encoded, for audits
    checkpoints         s each, and m + 4 of the newest: files of above under a second name, until the first goes
    logs                events and the agreement's

With `streaming`, whose replicas keep a part of their own values, a round's work has 8 more, the replica and what it
learnt, and 4 more of residuals are in place of memory.

`shoal bench memory --optimizer adamw` measures the sum. Finals since the newest state on disk stay whatever they take:
where rounds are shorter than ten times what a state takes to write, there are more (`state_saver.LAG_LIMIT_ROUNDS`).
"""

from __future__ import annotations

from typing import Final

from shoal.node.audits.auditing import CONTRIBUTIONS_KEPT
from shoal.node.reporting.event_files import EVENT_LOG_LIMIT_BYTES
from shoal.node.state.states import FINALS_DISK_BYTES, FINALS_KEPT, FINALS_MIN, STATES_KEPT
from shoal.node.state.store import AGREEMENT_LOG_LIMIT_BYTES
from shoal.node.training.memory_need import MOMENT_BYTES
from shoal.protocol.manifest import OptimizerName

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
RESIDUAL_BYTES: Final = 4
"""Of the fragments that a round is not of, where there are any."""
WORK_FILES: Final = 3
"""Moments with a contribution, or with what was learnt since: of a round, in place amid the next, and being written."""


def bytes_at_least(numel: int, codec: str) -> int:
    """Bytes without which no round passes, whatever was kept before it: in place of memory, and the state to save."""
    return bytes_on_disk(numel, codec, 0)["in place of memory"] + numel * STATE_BYTES


def bytes_on_disk(
    numel: int, codec: str, checkpoints: int, optimizer: OptimizerName = "adamw", *, mixes: bool = False
) -> dict[str, int]:
    """Bytes on a node's disk at the most, by kind: of a model of `numel` values, with so many checkpoints.

    mixes: anchors of fragments are mixed into replicas, as with `streaming`.
    """
    state, final = numel * STATE_BYTES, numel * FINAL_BYTES.get(codec, 1)
    work = round(numel * (MOMENT_BYTES[optimizer] + CONTRIBUTION_BYTES + mixes * MIXED_BYTES))
    in_files = (STATES_KEPT + 1) * state + 2 * numel * CONTRIBUTION_BYTES + CONTRIBUTIONS_KEPT * final
    in_files += mixes * numel * RESIDUAL_BYTES
    return {
        "states": STATES_KEPT * state + numel * INITIAL_BYTES,
        "finals": max(FINALS_MIN * final, min(FINALS_KEPT * final, max(FINALS_DISK_BYTES, state))),
        "work under way": WORK_FILES * work,
        "in place of memory": in_files,
        "checkpoints": checkpoints * state + min(checkpoints, 1) * work,
        "logs": 2 * EVENT_LOG_LIMIT_BYTES + AGREEMENT_LOG_LIMIT_BYTES,
    }
