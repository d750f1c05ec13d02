"""The table of claims: for each the command that proves it, what has to come of it, and the code that it is about."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from shoal.lab.bench.hostile_spec import KINDS as HOSTILE_KINDS
from shoal.lab.bench.hostile_spec import LIARS
from shoal.lab.targets import Target

MINUTES_LIMIT: Final = 20.0
"""No claim of `make proof` takes longer; those of `make proof-full` do."""

ROUNDS: Final = ("protocol", "swarm", "collectives", "node/rounds", "node/state", "node/training")
"""Code that every certified round goes through."""
NODE: Final = ("protocol", "swarm", "collectives", "node")
ROLLOUTS: Final = ("protocol", "swarm", "node/sapo", "node/strategies", "node/training", "node/workloads")


@dataclass(frozen=True, slots=True)
class Claim:
    """One command and what is claimed of it.

    command: as a user types it; it prints JSON when asked to by --json, with `rows` beside their targets where it is a
    benchmark. wanted: targets of fields of its document, where it has no rows. code: folders and files that it is
    about: as long as none changes, nor does its result. why: where a target is known to be missed, why. full: only
    before a release, since it takes long.
    """

    name: str
    command: str
    code: tuple[str, ...]
    _: KW_ONLY
    wanted: Mapping[str, Target] = field(default_factory=dict)
    minutes: float = MINUTES_LIMIT
    why: str = ""
    full: bool = False

    @property
    def arguments(self) -> list[str]:
        """The command, split as a shell does."""
        return shlex.split(self.command)


def _none(**named: str) -> dict[str, Target]:
    """Targets of fields that have to be zero."""
    return {key: Target(name=name, most=0) for key, name in named.items()}


SOAK: Final = _none(wrong_values="wrong values", forks="forks", broken_votes="broken votes", unverified="not verified")
CHAOS: Final = SOAK | _none(late_rounds="late rounds")
CAMPAIGN: Final = CHAOS | _none(
    unrecovered="not recovered", evicted_survivors="survivors evicted", unaffected_absent="unaffected absent"
)
FUZZED: Final = _none(findings="what no handler caught")
EXPLORED: Final = _none(violations="violations")
CROWD: Final = _none(stalled_rounds="rounds that stalled", forks="forks", wrong_values="wrong values")
DISK_WAIT: Final = "whoever changes a page waits for the disk once a tenth of the memory is to be written"
SHORT_RUN: Final = "0.8 M tokens are too few for it; results.md has that of 24.6 M, missed too"
SIMULATED: Final = "python -m shoal.lab.simulate.many --seeds"
MUTATED: Final = "python -m tests.fuzz.campaign --count"
SHORT_TRAINING: Final = "shoal bench train --nodes 4 --tokens 819200"
SHORT_OF_EIGHT: Final = "shoal bench train --nodes 8 --tokens 819200"
WIRE: Final = (*ROUNDS, "lab/bench/train.py", "lab/bench/train_swarm.py")

CLAIMS: Final[tuple[Claim, ...]] = (
    Claim("reductions that nothing disturbs", "shoal bench allreduce --peers 4", ROUNDS, why=DISK_WAIT),
    Claim("a kill in mid-reduce", "shoal bench allreduce --peers 4 --fault sigkill", ROUNDS, why=DISK_WAIT),
    Claim("a stop in mid-reduce", "shoal bench allreduce --peers 4 --fault sigstop", ROUNDS, why=DISK_WAIT),
    Claim("the same faults in others", "shoal bench faults --watch 20", ROUNDS),
    Claim(
        "one lane",
        "shoal bench lane",
        ("swarm/lanes", "lab/bench/lane.py"),
        why="through sockets a chunk takes some 500 calls of Python at its receiver",
    ),
    Claim(
        "a line between continents",
        "shoal bench wan --profile intercontinental",
        ROUNDS,
        why="BBR takes a fifth of the time measured to find the line's rate",
    ),
    Claim("a line across a continent", "shoal bench wan --profile continental", ROUNDS),
    Claim("faults by the dozen", "shoal campaign --runs 64", NODE, wanted=CAMPAIGN),
    Claim("faults by the hundred", "shoal campaign --runs 300", NODE, wanted=CAMPAIGN, full=True),
    Claim("chaos", "shoal chaos --minutes 15", NODE, wanted=CHAOS),
    Claim("two hours of chaos", "shoal chaos --minutes 120", NODE, wanted=CHAOS, full=True),
    Claim("two hours with a fault a minute", "shoal soak", NODE, wanted=SOAK, full=True),
    Claim(
        "failures by Poisson",
        "shoal bench goodput --minutes 5",
        NODE,
        why="steps of a trainer that is killed are lost up to its last snapshot, and all stand still at a round's end",
    ),
    *(
        Claim(
            f"an attacker: {kind}",
            f"shoal bench hostile --kind {kind}",
            (*NODE, "lab/bench/hostile_member.py", "lab/bench/hostile_stranger.py", "lab/bench/hostile_silent.py"),
        )
        for kind in HOSTILE_KINDS
    ),
    *(
        Claim(
            f"one of four voters lies: {kind}",
            f"shoal bench hostile --kind {kind} --faults lying --round-s 60",
            (*NODE, "lab/bench/hostile_member.py"),
            full=True,
        )
        for kind in sorted(LIARS)
    ),
    Claim("16 nodes that train", "shoal bench scale --nodes 16 --trainers regression --rounds 6", NODE),
    Claim(
        "32 nodes that train", "shoal bench scale --nodes 32 --trainers regression --rounds 6", NODE, why="two cores"
    ),
    Claim(
        "16 nodes that train beside two endless loops",
        "shoal bench scale --nodes 16 --trainers regression --rounds 6 --beside-loops 2",
        NODE,
    ),
    Claim("16 nodes whose trainers wait", "shoal bench scale --nodes 16 --rounds 10", NODE),
    Claim("half of 12 nodes stopped", "shoal bench scale --nodes 12 --stopped 6 --seconds 30", NODE),
    Claim("one of 12 held to a twentieth", "shoal bench scale --nodes 12 --held 1", NODE),
    Claim("four of 12 held to a twentieth", "shoal bench scale --nodes 12 --held 4", NODE),
    Claim("two and two apart", "shoal bench scale --nodes 4 --apart 2 --seconds 30", NODE),
    Claim("places whose nodes contribute together", "shoal bench sites", NODE),
    Claim("64 daemons that share rollouts", "shoal bench crowd --nodes 64 --minutes 5", ROLLOUTS),
    Claim("128 daemons that share rollouts", "shoal bench crowd", ROLLOUTS),
    Claim("a daemon's memory", "shoal bench memory", NODE),
    Claim("a node's memory, AdamW", "shoal bench memory --optimizer adamw", NODE),
    Claim("a node's memory, moments in 8 bits", "shoal bench memory --optimizer adamw8bit", NODE),
    Claim("a newcomer's state", "shoal bench join", NODE),
    Claim("the page among 1,000", "shoal bench dashboard", ("node/dashboard",)),
    Claim(
        "training beside the exchange",
        "shoal bench throughput",
        NODE,
        why="on two cores daemon and trainer share what the loop alone has to itself",
    ),
    Claim("bytes of diloco", f"{SHORT_TRAINING} --strategy diloco --inner-steps 10", WIRE, why=SHORT_RUN),
    Claim("bytes of 2 bits", f"{SHORT_TRAINING} --codec 2bit --inner-steps 10", WIRE, why=SHORT_RUN),
    Claim("bytes of streaming", f"{SHORT_TRAINING} --strategy streaming --inner-steps 20", WIRE, why=SHORT_RUN),
    Claim("bytes of sparse", f"{SHORT_TRAINING} --strategy sparse --inner-steps 10", WIRE, why=SHORT_RUN),
    Claim("bytes of diloco, eight nodes", f"{SHORT_OF_EIGHT} --strategy diloco --inner-steps 10", WIRE, why=SHORT_RUN),
    Claim(
        "bytes of streaming, eight nodes",
        f"{SHORT_OF_EIGHT} --strategy streaming --inner-steps 20",
        WIRE,
        why=SHORT_RUN,
    ),
    Claim("bytes of sparse, eight nodes", f"{SHORT_OF_EIGHT} --strategy sparse --inner-steps 10", WIRE, why=SHORT_RUN),
    Claim("the reward of rollouts", "shoal bench rollouts", ROLLOUTS),
    Claim("the reward of rollouts, from 0.05", "shoal bench rollouts --warm-up-reward 0.05", ROLLOUTS),
    Claim(
        "groups that wait for no long one",
        "shoal bench partial",
        ("node/sapo", "node/workloads"),
        why="what is half done when a round ends is kept, but its cache is made again",
    ),
    Claim("samplers beside trainers", "shoal bench samplers --minutes 5", ROLLOUTS),
    Claim("samplers that cheat", "shoal bench hostile-samplers", ROLLOUTS),
    Claim(
        "sharing, as functions call one another",
        "shoal bench sapo --rounds 100 --settings 8/0,4/4 --seeds 1",
        ("node/sapo",),
        full=True,
    ),
    Claim(
        "agreement, all schedules of four",
        "shoal explore agreement --members 4 --crashes 0 --plans 1",
        ("protocol",),
        wanted=EXPLORED,
    ),
    Claim(
        "agreement, voters changed",
        "shoal explore agreement --members 4 --strangers 1 --crashes 0 --changing",
        ("protocol",),
        wanted=EXPLORED,
    ),
    Claim(
        "agreement beside a liar",
        "shoal explore agreement --quorum lying --members 4 --views 2 --plans 1 --crashes 0 --liars 1 --liar 1",
        ("protocol",),
        wanted=EXPLORED,
    ),
    Claim("simulated swarms", f"{SIMULATED} 1000", ("protocol", "lab/simulate"), wanted=EXPLORED),
    Claim(
        "simulated swarms, by the thousand",
        f"{SIMULATED} 20000",
        ("protocol", "lab/simulate"),
        wanted=EXPLORED,
        full=True,
    ),
    Claim(
        "1,000 peers, most of them followers",
        "shoal simulate --peers 1000 --rounds 20",
        ("protocol", "lab/simulate"),
        wanted=CROWD,
    ),
    Claim(
        "10,000 peers, most of them followers",
        "shoal simulate --peers 10000 --rounds 10",
        ("protocol", "lab/simulate"),
        wanted=CROWD,
        full=True,
    ),
    Claim(
        "who waits outside for a seat",
        "shoal simulate --peers 64 --voters 4 --seats 8 --rounds 14 --loss 0.01 --outside",
        ("protocol", "lab/simulate"),
        wanted=CROWD | _none(work_lost="work too old when it was its turn"),
    ),
    Claim("mutated messages", f"{MUTATED} 100000", NODE, wanted=FUZZED),
    Claim("mutated messages, a million", f"{MUTATED} 1000000", NODE, wanted=FUZZED, full=True),
    Claim(
        "planted bugs, each seen by its test", "python -m tests.planted", (*NODE, "testnet", "tests/planted"), full=True
    ),
)
