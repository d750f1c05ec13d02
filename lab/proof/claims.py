"""The table of claims: for each the command that proves it, what has to come of it, and the code that it is about."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.lab.bench.hostile_spec import KINDS as HOSTILE_KINDS
from shoal.lab.targets import Target

MINUTES_LIMIT: Final = 20.0
"""No claim of `make proof` takes longer; those of `make proof-full` do."""

ROUNDS: Final = ("protocol", "swarm", "collectives", "node/rounds", "node/state", "node/training")
"""Code that every certified round goes through."""
NODE: Final = ("protocol", "swarm", "collectives", "node")
ROLLOUTS: Final = ("protocol", "swarm", "node/sapo", "node/strategies", "node/training")


@dataclass(frozen=True, slots=True, kw_only=True)
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


CAMPAIGN: Final = _none(
    wrong_values="wrong values",
    forks="forks",
    broken_votes="broken votes",
    late_rounds="late rounds",
    unverified="not verified",
    unrecovered="not recovered",
    evicted_survivors="survivors evicted",
    unaffected_absent="unaffected absent",
)
CHAOS: Final = _none(
    wrong_values="wrong values",
    forks="forks",
    broken_votes="broken votes",
    late_rounds="late rounds",
    unverified="not verified",
)
SOAK: Final = _none(wrong_values="wrong values", forks="forks", broken_votes="broken votes", unverified="not verified")
FUZZED: Final = _none(findings="what no handler caught")
EXPLORED: Final = _none(violations="violations")
SHORT_TRAINING: Final = "shoal bench train --nodes 4 --tokens 819200"
WIRE: Final = (*ROUNDS, "lab/bench/train.py", "lab/bench/train_swarm.py")

CLAIMS: Final[tuple[Claim, ...]] = (
    Claim(name="a kill in mid-reduce", command="shoal bench allreduce --peers 4 --fault sigkill", code=ROUNDS),
    Claim(name="a stop in mid-reduce", command="shoal bench allreduce --peers 4 --fault sigstop", code=ROUNDS),
    Claim(
        name="one lane",
        command="shoal bench lane",
        code=("swarm/lanes", "lab/bench/lane.py"),
        why="through sockets a chunk takes some 500 calls of Python at its receiver",
    ),
    Claim(
        name="a line between continents",
        command="shoal bench wan --profile intercontinental",
        code=ROUNDS,
        why="BBR takes a fifth of the time measured to find the line's rate",
    ),
    Claim(name="a line across a continent", command="shoal bench wan --profile continental", code=ROUNDS),
    Claim(name="faults by the dozen", command="shoal campaign --runs 64", code=NODE, wanted=CAMPAIGN),
    Claim(name="faults by the hundred", command="shoal campaign --runs 300", code=NODE, wanted=CAMPAIGN, full=True),
    Claim(name="chaos", command="shoal chaos --minutes 15", code=NODE, wanted=CHAOS),
    Claim(name="two hours of chaos", command="shoal chaos --minutes 120", code=NODE, wanted=CHAOS, full=True),
    Claim(name="two hours with a fault a minute", command="shoal soak", code=NODE, wanted=SOAK, full=True),
    Claim(
        name="failures by Poisson",
        command="shoal bench goodput --minutes 3",
        code=NODE,
        why="steps of a trainer that is killed are lost up to its last snapshot, and all stand still at a round's end",
    ),
    *(
        Claim(
            name=f"an attacker: {kind}",
            command=f"shoal bench hostile --kind {kind}",
            code=(*NODE, "lab/bench/hostile_member.py", "lab/bench/hostile_stranger.py", "lab/bench/hostile_silent.py"),
        )
        for kind in HOSTILE_KINDS
    ),
    Claim(
        name="16 nodes that train",
        command="shoal bench scale --nodes 16 --trainers regression --rounds 6",
        code=NODE,
    ),
    Claim(
        name="32 nodes that train",
        command="shoal bench scale --nodes 32 --trainers regression --rounds 6",
        code=NODE,
        why="two cores",
    ),
    Claim(name="half of 12 nodes stopped", command="shoal bench scale --nodes 12 --stopped 6 --seconds 30", code=NODE),
    Claim(name="one of 12 held to a twentieth", command="shoal bench scale --nodes 12 --held 1", code=NODE),
    Claim(name="two and two apart", command="shoal bench scale --nodes 4 --apart 2 --seconds 30", code=NODE),
    Claim(name="64 daemons that share rollouts", command="shoal bench crowd --nodes 64 --minutes 5", code=ROLLOUTS),
    Claim(name="128 daemons that share rollouts", command="shoal bench crowd", code=ROLLOUTS),
    Claim(name="a daemon's memory", command="shoal bench memory", code=NODE),
    Claim(name="a node's memory, AdamW", command="shoal bench memory --optimizer adamw", code=NODE),
    Claim(name="a node's memory, moments in 8 bits", command="shoal bench memory --optimizer adamw8bit", code=NODE),
    Claim(name="a newcomer's state", command="shoal bench join", code=NODE),
    Claim(name="the page among 1,000", command="shoal bench dashboard", code=("node/dashboard",)),
    Claim(
        name="training beside the exchange",
        command="shoal bench throughput",
        code=NODE,
        why="on two cores daemon and trainer share what the loop alone has to itself",
    ),
    Claim(name="bytes of diloco", command=f"{SHORT_TRAINING} --strategy diloco --inner-steps 10", code=WIRE),
    Claim(name="bytes of 2 bits", command=f"{SHORT_TRAINING} --codec 2bit --inner-steps 10", code=WIRE),
    Claim(name="bytes of streaming", command=f"{SHORT_TRAINING} --strategy streaming --inner-steps 20", code=WIRE),
    Claim(name="bytes of sparse", command=f"{SHORT_TRAINING} --strategy sparse --inner-steps 10", code=WIRE),
    Claim(name="the reward of rollouts", command="shoal bench rollouts", code=ROLLOUTS),
    Claim(
        name="the reward of rollouts, from 0.05",
        command="shoal bench rollouts --warm-up-reward 0.05",
        code=ROLLOUTS,
    ),
    Claim(
        name="groups that wait for no long one",
        command="shoal bench partial",
        code=("node/sapo",),
        why="what is half done when a round ends is kept, but its cache is made again",
    ),
    Claim(name="samplers beside trainers", command="shoal bench samplers", code=ROLLOUTS),
    Claim(name="samplers that cheat", command="shoal bench hostile-samplers", code=ROLLOUTS),
    Claim(
        name="sharing, as functions call one another",
        command="shoal bench sapo --rounds 100 --settings 8/0,4/4 --seeds 1",
        code=("node/sapo",),
        full=True,
    ),
    Claim(
        name="agreement, all schedules of four",
        command="shoal explore agreement --members 4 --crashes 0 --plans 1",
        code=("protocol",),
        wanted=EXPLORED,
    ),
    Claim(
        name="agreement, voters changed",
        command="shoal explore agreement --members 4 --strangers 1 --crashes 0 --changing",
        code=("protocol",),
        wanted=EXPLORED,
    ),
    Claim(
        name="agreement beside a liar",
        command="shoal explore agreement --quorum lying --members 4 --views 2 --plans 1 --crashes 0 --liars 1 --liar 1",
        code=("protocol",),
        wanted=EXPLORED,
    ),
    Claim(
        name="simulated swarms",
        command="python -m shoal.lab.simulate.many --seeds 1000",
        code=("protocol", "lab/simulate"),
        wanted=EXPLORED,
    ),
    Claim(
        name="simulated swarms, by the thousand",
        command="python -m shoal.lab.simulate.many --seeds 20000",
        code=("protocol", "lab/simulate"),
        wanted=EXPLORED,
        full=True,
    ),
    Claim(
        name="mutated messages",
        command="python -m tests.fuzz.campaign --count 100000",
        code=NODE,
        wanted=FUZZED,
    ),
    Claim(
        name="mutated messages, a million",
        command="python -m tests.fuzz.campaign --count 1000000",
        code=NODE,
        wanted=FUZZED,
        full=True,
    ),
    Claim(
        name="planted bugs, each seen by its test",
        command="python -m tests.planted",
        code=(*NODE, "testnet", "tests/planted"),
        full=True,
    ),
)
