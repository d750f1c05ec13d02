"""The comparison of ways to take a mean: its figures follow from what is summed, and its table names all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.lab.simulate.compare import Conditions, compare, line_of, main

CALM = Conditions(rounds=2, loss=0.0, churn=0.0, model_bytes=1e6)


def test_ways_send_what_their_sums_take() -> None:
    flat, grid, gossip = (*compare(CALM, [8], ["flat"]), *compare(CALM, [64], ["two-level", "gossip"]))
    assert (flat.way, grid.way, gossip.way) == ("flat", "two-level", "gossip")
    assert not flat.violation + grid.violation
    assert flat.sent_mb == pytest.approx(2 * (1 - 1 / 8), rel=0.02)
    assert grid.sent_mb == pytest.approx(2 * (1 - 1 / 64), rel=0.05)
    assert gossip.sent_mb < 1.1
    assert flat.signers >= 4  # half of eight, if the last planner is among them
    assert 2 <= grid.signers <= 4  # of the four heads
    assert flat.left is None
    assert gossip.left is not None
    assert 0 < gossip.left[10] < gossip.left[1] < 1
    assert flat.control_bytes_per_s > grid.control_bytes_per_s > grid.head_control_bytes_per_s / 16
    assert grid.head_control_bytes_per_s > 100


def test_sizes_for_which_a_way_is_not_made_are_left_out() -> None:
    assert not list(compare(CALM, [65], ["flat"]))
    assert not list(compare(CALM, [32], ["two-level"]))


def test_losses_are_crashes_of_different_peers_each_with_a_newcomer() -> None:
    conditions = Conditions(churn=0.5)
    found = conditions.losses(8, 60.0)
    crashed = [fault.peer for fault in found if fault.kind == "crash"]
    assert len(set(crashed)) == len(crashed) == sum(fault.kind == "join" for fault in found) > 2
    assert len(crashed) <= 4
    assert not Conditions(churn=0.0).losses(8, 60.0)


def test_command_prints_a_row_of_the_table_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "8", "--ways", "flat,gossip", "--rounds", "1", "--model-mb", "0.1", "--churn", "0"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4
    assert told[0].count("|") == told[2].count("|") == told[3].count("|")
    assert "signatures" in told[2]
    assert "with a partner" in told[3]
    assert told[2].startswith("| 8 | flat |")


def test_line_tells_a_violation() -> None:
    (one,) = compare(Conditions(rounds=1, churn=0.0, model_bytes=1e5), [8], ["flat"])
    assert "**no fork somewhere**" in line_of(replace(one, violation="no fork somewhere"))
