"""When a node trains: what its user wrote, what the machine says of itself, and what of that makes it wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.node import only_when
from shoal.node.machine_readings import Machine, is_on_mains, since_input_s
from shoal.node.only_when import LOOK_S, OnlyWhen
from shoal.node.when import BUSY_S, BUSY_SHARE, IDLE_S, WHENS_LIMIT, Rule, check_whens, parse_when
from shoal.protocol.errors import ConfigError
from tests.waiting import running, until

IN_USE, ON_BATTERY = "the machine is in use", "the machine is on its battery"


class Reading:
    """A machine of which a test says what is read."""

    def __init__(self) -> None:
        self.mains, self.share, self.typed_s, self.minute = True, 0.0, 1e6, 12 * 60
        self.asked: list[str] = []

    def is_on_mains(self) -> bool:
        self.asked.append("mains")
        return self.mains

    def others_share(self) -> float:
        self.asked.append("share")
        return self.share

    def since_input_s(self) -> float | None:
        return self.typed_s

    def minute_of_day(self) -> int:
        self.asked.append("time")
        return self.minute


def rule(machine: Reading, *texts: str) -> Rule:
    return Rule([parse_when(text, "--only-when") for text in texts], machine)


@pytest.mark.parametrize("text", ["", "Idle", "9:00-10:00", "24:00-01:00", "10:60-11:00", "08:00-08:00", "08:00"])
def test_what_is_no_condition_is_said_to_its_user(text: str) -> None:
    with pytest.raises(ConfigError, match="--only-when: "):
        parse_when(text, "--only-when")


def test_conditions_are_bounded_and_read_as_they_were_written() -> None:
    night = parse_when("22:00-07:30", "--only-when")
    assert (str(night), night.begins, night.ends) == ("22:00-07:30", 1320, 450)
    check_whens([night] * WHENS_LIMIT, "--only-when")
    with pytest.raises(ConfigError, match="at most 16"):
        check_whens([night] * (WHENS_LIMIT + 1), "--only-when")


@pytest.mark.parametrize(
    ("minute", "trains"),
    [(0, True), (449, True), (450, False), (719, False), (720, True), (779, True), (780, False), (1320, True)],
)
def test_one_of_several_times_of_day_is_enough_and_one_may_go_over_midnight(minute: int, trains: bool) -> None:
    machine = Reading()
    machine.minute = minute
    found = rule(machine, "22:00-07:30", "12:00-13:00").why_not(0.0)
    assert found == ("" if trains else "it is not 22:00-07:30 or 12:00-13:00")
    assert machine.asked.count("mains") == machine.asked.count("share") == 0, "nobody asked for those"


def test_all_kinds_have_to_hold_and_each_that_does_not_is_named() -> None:
    machine = Reading()
    both = rule(machine, "mains", "08:00-18:00")
    assert both.why_not(0.0) == ""
    machine.mains = False
    assert both.why_not(1.0) == ON_BATTERY
    machine.minute = 0
    assert both.why_not(2.0) == f"{ON_BATTERY} and it is not 08:00-18:00"


def test_machine_is_idle_after_a_while_of_quiet_and_in_use_soon_after_it_ends() -> None:
    machine = Reading()
    idle, now = rule(machine, "idle"), 0.0

    def says(share: float, seconds: float) -> list[bool]:
        """For so long others use so much; at each look, whether this node trains."""
        nonlocal now
        machine.share, found = share, []
        for _ in range(int(seconds / LOOK_S)):
            found.append(idle.why_not(now) == "")
            now += LOOK_S
        return found

    quiet, busy = BUSY_SHARE / 2, BUSY_SHARE
    assert not any(says(quiet, IDLE_S)), "nobody knows yet"
    assert all(says(quiet, 60))
    assert all(says(busy, BUSY_S)), "a moment is none"
    assert all(says(quiet, 60))
    assert says(busy, 60) == [True, True, *[False] * 10]
    assert not any(says(quiet, IDLE_S))
    assert all(says(quiet, 60))
    machine.typed_s = IDLE_S - 1
    assert not any(says(quiet, 60)), "somebody types"
    machine.typed_s = IDLE_S
    assert all(says(quiet, 60)), "it was quiet all the while"


async def test_node_is_told_once_for_each_change_and_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(only_when, "LOOK_S", 0.001)
    machine, told = Reading(), list[str]()
    machine.mains = False
    service = OnlyWhen(rule(machine, "mains"), told.append)
    async with running(service):
        assert told == [ON_BATTERY]
        for mains, expected in [(False, 1), (True, 2), (True, 2), (False, 3)]:
            machine.mains = mains
            enough = len(machine.asked) + 3
            await until(lambda enough=enough: len(machine.asked) >= enough)  # type: ignore[misc]
            assert len(told) == expected
    assert told == [ON_BATTERY, "", ON_BATTERY]


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("supplies", "mains"),
    [
        ({}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Charging"}}, True),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, False),
        ({"BAT1": {"type": "Battery", "status": "Discharging"}}, False),
        ({"BAT1": {"type": "Battery", "status": "Not charging"}}, True),
        ({"usb": {"type": "USB", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, True),
    ],
)
def test_machine_is_on_its_battery_where_that_discharges(
    tmp_path: Path, supplies: dict[str, dict[str, str]], mains: bool
) -> None:
    for name, files in supplies.items():
        supply(tmp_path, name, **files)
    assert is_on_mains(tmp_path) is mains
    assert is_on_mains(tmp_path / "none")


def test_who_typed_last_is_known_by_the_terminals(tmp_path: Path) -> None:
    for name, at in {"0": 100.0, "7": 160.0, "ptmx": 190.0, "tty1": 130.0, "tty0": 195.0, "ttyS0": 199.0}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, 300.0))
    assert since_input_s((tmp_path,), lambda: 200.0) == 40.0
    assert since_input_s((tmp_path / "none",)) is None


def test_own_processes_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    looks = iter(
        [
            (100.0, 50.0, {(1, 0.0): 10.0}),
            (120.0, 60.0, {(1, 0.0): 16.0, (2, 5.0): 2.0}),
            (140.0, 70.0, {(1, 0.0): 16.0}),
            (140.0, 70.0, {}),
        ]
    )
    monkeypatch.setattr(machine, "_look", lambda: next(looks))
    machine._seen = machine._look()
    assert machine.others_share() == pytest.approx((10 - 6 - 2) / 20)
    assert machine.others_share() == pytest.approx(0.5)
    assert machine.others_share() == 0.0


def test_this_machine_can_be_read() -> None:
    machine = Machine()
    assert 0 <= machine.others_share() <= 1
    assert 0 <= machine.minute_of_day() < 24 * 60
    assert machine.is_on_mains() in (True, False)
