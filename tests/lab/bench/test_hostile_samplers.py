"""Samplers that cheat: how their kinds are told, what counts, and that their agents are what they are said to be."""

from __future__ import annotations

from pathlib import Path

from shoal.lab.bench.hostile_sampler import KINDS, MODULE
from shoal.lab.bench.hostile_samplers import HostileSamplersBench, HostileSamplersSwarm, HostileWindow, command_of
from shoal.node.reporting.events import CaughtUp, Rollouts
from shoal.testnet.nodes import Launch


def rounds(swarm: HostileSamplersSwarm, index: int, at: float, **said: object) -> None:
    swarm.journal.add(index, Rollouts(at=at, round=1, **said))  # type: ignore[arg-type]


def test_rounds_are_counted_from_the_first_group_of_a_cheat_to_when_both_trainers_ignore_it(tmp_path: Path) -> None:
    swarm = HostileSamplersSwarm(HostileSamplersBench(trainers=2, samplers=1), ("other", "stale"), tmp_path)
    names = [node.peer_id for node in swarm.nodes]
    assert swarm.cheats == {3: "other", 4: "stale"}
    rounds(swarm, 3, 1.0)
    rounds(swarm, 0, 2.0, reward=0.5)  # before it offered anything
    rounds(swarm, 3, 3.0, made=2)
    rounds(swarm, 4, 3.0, made=1)
    for at in (2.5, 6.0):
        swarm.journal.add(4, CaughtUp(at=at, round=1))
    rounds(swarm, 4, 6.2, made=1)
    rounds(swarm, 0, 4.0, reward=0.25, origins={names[3]: 2, names[2]: 1, names[1]: 1})
    rounds(swarm, 0, 5.0, reward=0.25, ignored=(names[3],), rejected={"other policy": 2})
    for at in (4.5, 5.5, 6.5):
        rounds(swarm, 1, at, ignored=(names[4], names[3], names[2]) if at > 6 else ())
    rounds(swarm, 0, 7.0, ignored=(names[4],))
    assert swarm.account(3.5) == HostileWindow(
        kinds=("other", "stale"),
        reward=0.5,
        rounds=6,
        found={"other": 3, "stale": 1},
        struck=1,
        taken={"other": 2, "sampler": 1, "trainer": 1},
        refused={"other policy": 2},
    )


def test_cheats_are_started_by_their_kind_and_all_others_as_they_ship(tmp_path: Path) -> None:
    cheats = dict(enumerate(KINDS, start=2))
    launches = [Launch(manifest=tmp_path / "swarm.toml", data_dir=tmp_path / str(index)) for index in range(6)]
    commands = [command_of(1, cheats, launch) for launch in launches]
    assert [MODULE in command for command in commands] == [False, False, True, True, True, True]
    assert [command[command.index(MODULE) + 1] for command in commands[2:]] == [*KINDS]
    assert ["--rollouts" in command for command in commands] == [False, True, True, True, True, True]
