"""Components that go into a simulation beside its scenario, and the outcome of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.collectives.reduce import Reduction
from shoal.lab.simulate.donations import Donations
from shoal.lab.simulate.judge import Judge
from shoal.node.state.chunk_requests import Transfer
from shoal.protocol.round import RoundMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Work of a round: bytes of an encoded contribution, in so many chunks, and the time that training takes.

    reduce_deadline_s: as in a manifest. state_bytes: of a whole state; one who is behind by up to `replayed_rounds`
    replays them instead.
    """

    chunks: int = 5
    model_bytes: float = 1e6
    train_s: tuple[float, float] = (0.8, 2.4)
    reduce_deadline_s: float = 20.0
    state_bytes: float = 20e6
    replayed_rounds: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Machines that peers are made of; tests put some with a bug in here."""

    work: Workload = Workload()
    machine: Callable[..., RoundMachine] = RoundMachine
    reduction: Callable[..., Reduction] = Reduction
    transfer: Callable[..., Transfer] = Transfer
    judge: type[Judge] = Judge
    donations: type[Donations] = Donations


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a run. `violation` is empty if nothing was violated; see `judge` for the names.

    met: how often it came to what a scenario can only make likely, by name. Of followers (`crowd`): how many there are
    at the end, how many died, seconds from a certificate to its state at them, and to how many one peer gave at most;
    the control of a peer is that of a member then.
    Where who has no seat waits outside: how many have no vote, for how many rounds somebody stood in the line, was not
    counted at all, and for how many nobody may stand there; how often work had become too old when it was its turn; and
    the most links of one while it followed.
    """

    peers: int
    rounds_certified: int
    forks: int
    wrong_values: int
    stalled_rounds: int
    detect_s_p99: float
    control_bytes_per_peer_per_s: float
    events: int
    wall_s: float
    trace_digest: str
    virtual_s: float
    deaths_found: int
    false_evictions: int
    blamed: int
    states_fetched: int = 0
    followers: int = 0
    followers_died: int = 0
    followed_s_p50: float = 0.0
    followed_s_p99: float = 0.0
    most_served: int = 0
    control_bytes_per_follower_per_s: float = 0.0
    waited_rounds: int = 0
    turn_rounds: int = 0
    work_lost: int = 0
    waited_limit_rounds: int = 0
    most_links_outside: int = 0
    met: dict[str, int] = field(default_factory=dict)
    violation: str = ""
    detail: str = ""
