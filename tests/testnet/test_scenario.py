"""Scenario files: what they mean, and how the wrong ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from shoal.node.options import HOLD_PHASES
from shoal.node.reporting.events import Holding
from shoal.protocol.errors import ConfigError
from shoal.testnet.faults import LATER_ROUNDS, FaultRecord, _is_moment, holds_for
from shoal.testnet.journal import Entry
from shoal.testnet.links.namespaces import Uplink
from shoal.testnet.scenario import (
    COPY_ROUNDS,
    DEMO,
    SLOW_RATE_MBIT,
    THROTTLED_SHARE,
    Fault,
    Phase,
    Scenario,
    choose_scenario,
    load_scenario,
    parse_scenario,
)

KILL = '[[fault]]\nkind = "kill"\nnode = 2\nround = 3\nphase = "reduce"\nprogress = 0.4\n'
RESTORE = '[[fault]]\nkind = "restore"\nnode = 2\nround = 5\n'
PARTITION = '[[fault]]\nkind = "partition"\ngroups = [[0, 1], [2, 3]]\nround = 2\n'


def test_parse_scenario_reads_the_documented_file() -> None:
    text = 'nodes = 4\nrounds = 8\nseed = 1\nstrategy = "diloco"\ncodec = "int8"\n' + KILL + "duration_s = 10\n"
    assert parse_scenario(text) == Scenario(
        codec="int8", faults=(Fault(kind="kill", node=2, round=3, phase="reduce", progress=0.4),)
    )


def test_a_slow_of_which_no_rate_is_said_narrows_the_link() -> None:
    text = '[[fault]]\nkind = "slow"\nnode = 1\nround = 3\nduration_s = 10\n'
    (slow,) = parse_scenario(text).faults
    assert (slow.struck, slow.rate_mbit, slow.duration_s) == ((1,), SLOW_RATE_MBIT, 10)


def test_a_throttle_of_which_no_share_is_said_leaves_a_twentieth_of_a_core() -> None:
    text = '[[fault]]\nkind = "throttle"\nnode = 1\nround = 3\nduration_s = 10\n'
    (throttle,) = parse_scenario(text).faults
    assert (throttle.struck, throttle.cpu_share, throttle.duration_s) == ((1,), THROTTLED_SHARE, 10)
    assert parse_scenario(text + "cpu_share = 0.5\n").faults[0].cpu_share == 0.5
    assert not parse_scenario(text).needs_namespaces


def test_a_restore_of_which_no_round_is_said_is_of_a_copy_from_two_rounds_before() -> None:
    (restore,) = parse_scenario(RESTORE).faults
    assert (restore.struck, restore.from_round) == ((2,), 5 - COPY_ROUNDS)
    assert parse_scenario(RESTORE.replace("5", "1")).faults[0].from_round == 1
    assert parse_scenario(RESTORE + "from_round = 2\n").faults[0].from_round == 2


def test_clocks_are_of_their_own_where_one_is_to_be_set_only() -> None:
    text = '[[fault]]\nkind = "clock"\nnode = 1\nround = 2\nahead_s = -3600\n'
    assert parse_scenario(text).sets_clocks
    assert not parse_scenario(KILL + RESTORE).sets_clocks


def test_parse_scenario_of_nothing_has_no_faults() -> None:
    assert parse_scenario("") == Scenario(nodes=4, rounds=8, seed=1, strategy="diloco", codec=None, faults=())


def test_demo_kills_node_2_and_lets_node_4_join() -> None:
    assert (DEMO.nodes, DEMO.rounds, DEMO.seed, DEMO.codec, DEMO.workload) == (4, 8, 1, None, "text")
    assert [(f.kind, f.node, f.round, f.phase, f.progress) for f in DEMO.faults] == [
        ("kill", 2, 3, "reduce", 0.4),
        ("join", 4, 5, None, None),
    ]


def test_phases_are_those_at_which_a_node_can_hold() -> None:
    assert get_args(Phase) == HOLD_PHASES


def test_joins_take_free_indices_in_the_order_of_their_rounds() -> None:
    text = "nodes = 2\n" + "".join(f'[[fault]]\nkind = "join"\nround = {r}\n' for r in (6, 2))
    text += '[[fault]]\nkind = "join"\nnode = 2\nround = 8\n'
    assert [fault.node for fault in parse_scenario(text).faults] == [4, 3, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node = 4\n", "unknown key 'node'; did you mean 'nodes'?"),
        ("xyzzy = 4\n", "unknown key 'xyzzy'; it knows agreement, behind_routers, codec, fault, "),
        (KILL + "durations = 3\n", "fault 1: unknown key 'durations'; did you mean 'duration_s'?"),
        (PARTITION.replace("[[0, 1], [2, 3]]", "[[0, 1]]"), "a partition needs groups such as [[0, 1], [2, 3]]"),
        (PARTITION.replace("[[0, 1], [2, 3]]", "[[0, 1], [1, 3]]"), "and no node in two of them"),
        (PARTITION.replace("[[0, 1], [2, 3]]", "[[0, 1], []]"), "a partition needs groups"),
        (PARTITION.replace("[2, 3]", "[2, 4]"), "there is no node 4 in round 2"),
        (PARTITION + "node = 1\n", "a partition has no node"),
        (PARTITION + 'traffic = "tensors"\n', "Invalid enum value 'tensors'"),
        (PARTITION + "rate_mbit = 3\n", "a partition has no rate_mbit; a slow has"),
        (KILL + "groups = [[0], [1]]\n", "a kill has no groups and no traffic"),
        ('[[fault]]\nkind = "slow"\nnode = 1\nround = 1\nrate_mbit = 0\n', "`float` > 0"),
        (KILL + "cpu_share = 0.5\n", "a kill has no cpu_share; a throttle has"),
        ('[[fault]]\nkind = "throttle"\nnode = 1\nround = 1\ncpu_share = 1.5\n', "`float` <= 1"),
        ('[[fault]]\nkind = "heal"\nround = 1\n' + PARTITION, "no partition and no slow to heal before it"),
        ('[[fault]]\nkind = "corrupt"\nround = 1\n', "a corrupt needs the node it strikes"),
        ("[[uplink]]\nnodes = [0]\nrate = 3\n", "uplink 1: unknown key 'rate'; did you mean 'rate_mbit'?"),
        ("[[uplink]]\nnodes = [0, 4]\nrate_mbit = 3\n", "uplinks are of nodes that there are"),
        ('sites = "together"\n', "needs an [[uplink]] for each site"),
        ('sites = "near"\n', "Invalid enum value 'near'"),
        ("[[uplink]]\nnodes = [0, 0]\nrate_mbit = 3\n", "and each of its own"),
        (KILL.replace("kill", "murder"), "Invalid enum value 'murder'"),
        (KILL.replace("0.4", "1.5"), "`float` <= 1"),
        (KILL.replace("round = 3", "round = 9"), "fault 1 is in round 9 of 8"),
        (KILL.replace("node = 2", "node = 4"), "there is no node 4 in round 3"),
        (KILL.replace("node = 2\n", ""), "a kill needs the node it strikes"),
        (KILL.replace('phase = "reduce"\n', ""), "progress needs a phase"),
        ('[[fault]]\nkind = "join"\nnode = 1\nround = 2\n', "a join's node is a new one"),
        ('[[fault]]\nkind = "clock"\nnode = 1\nround = 2\n', "a clock has ahead_s, in seconds, and no other kind has"),
        (KILL + "ahead_s = 99\n", "a clock has ahead_s, in seconds, and no other kind has"),
        ('[[fault]]\nkind = "clock"\nnode = 1\nround = 2\nahead_s = -9\n', "ahead_s is 0, or 30 s and more either way"),
        ('[[fault]]\nkind = "clock"\nnode = 1\nround = 2\nahead_s = 1e9\n', "`float` <= 7776000.0"),
        (KILL + "from_round = 2\n", "a kill has no from_round; a restore has"),
        (RESTORE + "from_round = 6\n", "from_round is the round of the restore, or one before it"),
        ("nodes = 0\n", "`int` >= 1"),
        ('nodes = "4"\n', "Expected `int`, got `str`"),
        ("nodes = \n", "not valid TOML"),
    ],
)
def test_parse_scenario_refuses_with_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text, source="s.toml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("s.toml: ")
    assert "\n" not in str(caught.value)


def test_a_joined_node_can_be_struck_once_it_is_there() -> None:
    join = '[[fault]]\nkind = "join"\nround = 3\n'
    assert parse_scenario(join + '[[fault]]\nkind = "kill"\nnode = 4\nround = 4\n').faults[1].target == 4
    with pytest.raises(ConfigError, match="there is no node 4 in round 2"):
        parse_scenario(join + '[[fault]]\nkind = "kill"\nnode = 4\nround = 2\n')
    with pytest.raises(ConfigError, match="there is no node 4 in round 2"):
        parse_scenario(join + '[[fault]]\nkind = "restore"\nnode = 4\nround = 4\n')
    assert parse_scenario(join + '[[fault]]\nkind = "restore"\nnode = 4\nround = 6\n').faults[1].from_round == 4


def test_scenario_that_does_something_to_links_needs_namespaces() -> None:
    text = (
        PARTITION + "duration_s = 10\n[[fault]]\nkind = 'slow'\nnode = 1\nround = 3\nrate_mbit = 2.5\nduration_s = 4\n"
    )
    text += "[[fault]]\nkind = 'heal'\nround = 4\n[[fault]]\nkind = 'join'\nround = 5\n"
    scenario = parse_scenario(text)
    partition, slow, heal, join = scenario.faults
    assert (partition.groups, partition.traffic, partition.duration_s) == (((0, 1), (2, 3)), "all", 10)
    assert (slow.rate_mbit, heal.struck, join.target) == (2.5, (), 4)
    assert (scenario.needs_namespaces, scenario.places) == (True, 5)
    uplink = parse_scenario("[[uplink]]\nnodes = [0, 2]\nrate_mbit = 20\ndelay_s = 0.04\nloss = 0.001\n")
    assert uplink.uplinks == (Uplink(nodes=(0, 2), rate_mbit=20, delay_s=0.04, loss=0.001),)
    assert uplink.needs_namespaces
    assert not DEMO.needs_namespaces
    assert not parse_scenario('[[fault]]\nkind = "cut"\nnode = 1\nround = 1\n').needs_namespaces


def test_nobody_who_is_struck_holds_for_what_strikes_no_running_node() -> None:
    kill, corrupt = Fault(kind="kill", node=0, round=1), Fault(kind="corrupt", node=0, round=2, phase="train")
    partition = Fault(kind="partition", groups=((0,), (1,)), round=2, phase="train")
    slow = Fault(kind="slow", node=3, round=2, phase="reduce", rate_mbit=1)
    scenario = Scenario(faults=(kill, corrupt, partition, slow))
    assert [scenario.held_node(fault) for fault in scenario.faults] == [None, 1, 1, 3]


def test_load_scenario_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no scenario"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "s.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_scenario(tmp_path / "s.toml")


def test_choose_scenario_without_options_is_the_demo() -> None:
    assert choose_scenario() == DEMO
    assert choose_scenario(nodes=4, rounds=8, seed=7, codec="bf16").faults == DEMO.faults


def test_choose_scenario_of_another_size_has_no_faults() -> None:
    assert choose_scenario(nodes=2, rounds=3) == Scenario(nodes=2, rounds=3)


def test_choose_scenario_puts_options_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("nodes = 3\nrounds = 4\n" + KILL)
    chosen = choose_scenario(path, rounds=5, codec="fp32")
    assert (chosen.nodes, chosen.rounds, chosen.codec, len(chosen.faults)) == (3, 5, "fp32", 1)
    with pytest.raises(ConfigError, match="fault 1 is in round 3 of 2"):
        choose_scenario(path, rounds=2)


def test_held_node_is_the_target_or_one_that_no_fault_ended() -> None:
    faults = (
        Fault(kind="kill", node=0, round=2, phase="plan"),
        Fault(kind="join", round=3, phase="reduce", progress=0.5),
        Fault(kind="stop", node=3, round=4),
    )
    scenario = Scenario(faults=faults)
    assert [scenario.held_node(fault) for fault in scenario.faults] == [0, 1, None]


def test_who_is_paused_holds_for_nothing_since_it_may_come_to_no_round() -> None:
    faults = (
        Fault(kind="pause", node=0, round=2, phase="train"),
        Fault(kind="resume", node=0, round=4, phase="reduce", progress=0.5),
    )
    scenario = Scenario(faults=faults)
    assert [scenario.held_node(fault) for fault in scenario.faults] == [0, 1]


@pytest.mark.parametrize(("strategy", "later"), [("gossip", True), ("diloco", False)])
def test_where_nodes_skip_rounds_a_fault_may_come_in_a_later_one_and_nowhere_else(strategy: str, later: bool) -> None:
    faults = (Fault(kind="kill", node=1, round=5, phase="train"), Fault(kind="kill", node=1, round=9, phase="transfer"))
    scenario = Scenario(rounds=9, strategy=strategy, codec="fp32", faults=faults)
    records = [FaultRecord(fault=fault) for fault in faults]
    holds = holds_for(scenario, 1, records)
    rounds = [hold.round for hold in holds if hold.phase == "train"]
    assert rounds == list(range(5, 5 + (LATER_ROUNDS if later else 1)))

    def begins(round: int) -> Entry:
        return Entry(1, Holding(at=0.0, round=round, phase="train", progress=0.0))

    assert not _is_moment(faults[0], 1, begins(4), later=scenario.may_come_later(faults[0]))
    assert _is_moment(faults[0], 1, begins(5), later=scenario.may_come_later(faults[0]))
    assert _is_moment(faults[0], 1, begins(6), later=scenario.may_come_later(faults[0])) == later
    assert scenario.may_come_later(faults[1])


def test_scenario_survives_its_own_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(DEMO), type=Scenario) == DEMO
