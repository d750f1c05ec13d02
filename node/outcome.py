"""Progress of a node's run while it goes on, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """Reason for which a node stopped: its rounds are done, it was told to leave, was interrupted, or failed."""

    DONE = "done"
    LEFT = "left"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged:
    """Change of the node to another phase of this round."""

    phase: str
    round: int


TRAINING_LOSS: Final = "training loss"
HELD_OUT_LOSS: Final = "held-out loss"
"""The metrics of a loop of the user's own, without an evaluation and with one. More words may follow."""


def is_held_out(metric: str) -> bool:
    """True if what a trainer reports as this metric was measured on held-out data, and not what it trained at."""
    return not metric.startswith(TRAINING_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A held-out loss. round: after which it was measured; metric: what it is measured in."""

    round: int
    value: float
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCertified:
    """Certificate of a round. `loss` is the training loss, None if nobody told; `seconds` the whole round.

    loss_metric: what the loss is measured in, in the words of `HeldOut.metric`; empty where nobody knows.
    held_out: the newest evaluation, None if there was none, or none that is another loss than that of training.
    missing: the PeerIds of members that did not contribute.
    """

    round: int
    members: int
    contributors: int
    loss: float | None
    seconds: float
    held_out: HeldOut | None = None
    loss_metric: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStepped:
    """End of a gossip round, with a partner, or alone, and then `why`; the rest as above."""

    round: int
    partner: str | None
    why: str
    loss: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShared:
    """End of a round under the strategy rollouts.

    reward: mean over the node's own completions, in 0..1, None where it makes none. own, external: groups.
    """

    round: int
    reward: float | None
    own: int
    external: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """Progress of fetching the certified state from peers: what is here of it, and what there is."""

    done_chunks: int
    total_chunks: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakesPart:
    """Beginning of this node's part in a round. counts_from: the round from which its work counts, this or the next."""

    round: int
    counts_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsMade:
    """Progress of the inner steps of a round, about once a second."""

    round: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One line that the user should see, such as a quorum that is missing."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """One line that says how far something is that takes long, such as a warm-up."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChanged:
    """Change of a peer, of a kind that `shoal.swarm.members.Change` names; or "left", of one that took its leave.

    kind "self" tells of this node itself, once. name: as it is to be shown, empty where none is known.
    """

    kind: str
    peer: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTraceback:
    """Error of the workload in the trainer: one line, and the whole traceback."""

    summary: str
    traceback: str


Progress = (
    PhaseChanged
    | RoundCertified
    | RoundStepped
    | RoundShared
    | StateFetched
    | TakesPart
    | StepsMade
    | Notice
    | Progressed
    | PeerChanged
    | TrainerTraceback
)
