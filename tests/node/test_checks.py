"""Checks of a node: what they tell its user and advise, for whoever shows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from shoal.node.checks import CONNECT, checked
from shoal.node.control_client import (
    AmendStatus,
    BanStatus,
    BytesStatus,
    Check,
    MemberStatus,
    NodeFacts,
    RollbackStatus,
    Status,
)
from shoal.node.peer_facts import PeerSummary

STATUS = Status(
    peer_id="A",
    swarm_id="ab",
    addresses=[],
    phase="train",
    term="0.0",
    round=7,
    digest="c0ffee",
    members=[MemberStatus(peer_id=peer, phase="training", tokens_per_s=1.0, reach="direct") for peer in "ABC"],
    voters=["A", "B", "C"],
    missing=[],
    loss=None,
    tokens_per_s=1234.0,
    bytes=BytesStatus(sent=0, received=0),
)


NOBODY = PeerSummary(
    known=3, alive=1, members=3, following=0, behind=0, states={}, reach={"gone": 2}, software={}, tokens_per_s=0.0
)


def checks_of(**changes: Any) -> dict[str, Check]:
    return {check.name: check for check in checked(msgspec.structs.replace(STATUS, **changes)).checks}


def test_whom_a_round_waits_for_is_named_and_who_makes_no_step_is_told_so() -> None:
    status = checked(
        msgspec.structs.replace(
            STATUS, phase="plan", unready=["B", "C"], names={"B": "elm"}, tokens_per_s=9.0, blocked_fraction=0.5
        )
    )
    assert status.doing == "plan, waits for the work of elm, …C"
    training = {check.name: check for check in status.checks}["Training"]
    assert (training.state, training.remedy) == ("warn", "see what holds up elm, …C")
    for changes, remedy in (
        ({"without": ["A", "C"]}, "see what holds up …C"),
        ({"without": ["A"]}, "more inner steps a round, or a faster link"),
    ):
        assert checks_of(blocked_fraction=0.5, **changes)["Training"].remedy == remedy
    alone = checked(msgspec.structs.replace(STATUS, phase="no quorum", missing=["B"], names={"B": "elm"}))
    assert alone.doing == "no quorum, without elm"
    stuck = checks_of(stuck=True)["Training"]
    assert stuck.detail == "no step for minutes: no round waits for this node until its trainer makes one"
    assert stuck.above


def test_a_machine_without_a_network_is_told_to_connect_and_blames_nobody() -> None:
    for phase, missing in (("no quorum", ["B", "C"]), ("train", ["B"])):
        found = checks_of(phase=phase, missing=missing, peers=NOBODY, cut_off=True)
        assert {found[name].remedy for name in ("Majority", "Company")} == {CONNECT}
        assert CONNECT not in {check.remedy for check in checks_of(missing=missing, peers=NOBODY).values()}


def test_who_is_alone_is_told_of_the_members_that_are_away_and_else_of_the_link() -> None:
    remedies = {
        members: checks_of(peers=NOBODY, members=STATUS.members[:members])["Company"].remedy for members in (1, 3)
    }
    line = "type the line that `shoal link` prints on another machine"
    assert remedies == {1: line, 3: f"start the other members again, or {line}"}


@pytest.mark.parametrize(
    ("voters", "missing", "faults", "effect"),
    [
        ("ABC", "BC", "crash", "rounds wait for a majority, 1 of 3 voters here, without B, C;"),
        ("BCDE", "BCDE", "crash", "rounds wait for a majority, 0 of 4 voters here, without B, C, D and 1 other;"),
        ("ABCD", "CD", "crash", "rounds may wait for a majority, 2 of 4 voters here, without C, D;"),
        ("ABCD", "CD", "lying", "rounds wait for more than two thirds, 2 of 4 voters here, without C, D;"),
        ("DEFGHI", "HI", "lying", "rounds wait for more than two thirds, 4 of 6 voters here, without H, I;"),
    ],
)
def test_missing_quorum_is_explained(voters: str, missing: str, faults: str, effect: str) -> None:
    check = checks_of(voters=list(voters), missing=list(missing), faults=faults, trains_alone=True)["Majority"]
    assert check.state == "bad"
    assert check.detail == f"{effect} this node trains on alone meanwhile"
    assert check.remedy == "start those that are missing again where they ran", "any may have been heard of just now"


def test_rounds_that_go_on_without_somebody_say_so_and_ask_for_nothing_grave() -> None:
    check = checks_of(missing=["B"], long_missing=["B"])["Majority"]
    assert (check.state, check.above) == ("warn", False)
    assert check.text == "rounds go on with 2 of 3 voters, without B; start the missing one again where it ran"
    assert checks_of()["Majority"] == Check(name="Majority", state="ok", detail="3 of 3 voters here; rounds can end")
    assert "Majority" not in checks_of(node=NodeFacts(certifies=False), missing=["B"])
    assert "Majority" not in checks_of(voters=[], members=[], phase="joining"), "it knows of none yet"


def test_who_was_revoked_is_to_be_forgotten_at_once_and_never_started_again() -> None:
    key = "at the node with the authority's key"
    check = checks_of(missing=["B", "C"], revoked=["B", "C"])["Majority"]
    assert check.remedy == f"revoked, and still counted: to go on without: `shoal rebase --forget B C` {key}"
    check = checks_of(missing=["B", "C"], revoked=["B"], long_missing=["B", "C"])["Majority"]
    assert check.remedy == (
        f"revoked, and still counted: to go on without: `shoal rebase --forget B` {key}; start the missing one again "
        f"where it ran; silent for an hour, and if gone for good: to go on without: `shoal rebase --forget B C` {key}"
    )
    assert checks_of(missing=["B"], revoked=["B"])["Majority"].remedy == "", "the others go on, and drop it"


def test_a_node_that_waits_without_a_majority_does_not_say_that_it_trains() -> None:
    for trains, detail in ((True, "trains on alone"), (False, "trains nothing")):
        checks = checks_of(missing=["B", "C"], phase="no quorum", trains_alone=trains)
        assert checks["Training"].detail == f"{detail} until there is a majority"
        assert ("trains on alone" in checks["Majority"].detail) == trains


def test_a_voter_whose_state_is_lost_and_that_has_nobody_is_told_what_there_is_to_do() -> None:
    lost = partial(checks_of, phase="joining", digest=None)
    check = lost(peers=NOBODY)["Training"]
    assert (check.state, check.above) == ("warn", True)
    assert check.text == (
        "the state of round 7 is not here, nor anybody who may have it; "
        "start a node that has it, or restore this data folder from a backup"
    )
    assert lost(peers=msgspec.structs.replace(NOBODY, reach={"direct": 1}))["Training"].state == "ok", (
        "it comes from there"
    )
    assert lost(peers=NOBODY, round=0)["Training"].state == "ok", "there is no state yet"


def test_only_members_silent_for_an_hour_are_said_to_be_forgettable() -> None:
    remedy = checks_of(missing=["B", "C"], long_missing=["C"])["Majority"].remedy
    assert remedy.endswith(
        "silent for an hour, and if gone for good: to go on without: `shoal rebase --forget C` at the node with the "
        "authority's key"
    )


def test_rounds_that_stand_since_all_are_paused_do_not_ask_for_who_has_left() -> None:
    paused = [MemberStatus(peer_id=peer, phase="paused", tokens_per_s=None, reach="direct") for peer in "ABC"]
    gone = MemberStatus(peer_id="D", phase="missing", tokens_per_s=None, reach="gone")
    here = partial(checks_of, phase="paused")
    check = here(members=[*paused, gone], voters=list("ABCD"), missing=["D"])["Majority"]
    assert check.text == "rounds stand: all 3 members here are paused; `shoal resume` at any of them goes on"
    assert check.above
    one = checks_of(members=[*paused[:2], STATUS.members[2]])["Majority"]
    assert one.state == "ok"
    newcomer = checks_of(members=[*paused, gone], voters=list("ABCD"), missing=["D"])["Majority"]
    assert newcomer.detail == "rounds go on with 3 of 4 voters, without D", "it contributes, and paused members vote"
    left_alone = here(members=[paused[0], gone], voters=["A", "D"], missing=["D"])["Majority"]
    assert left_alone.detail == "rounds stand: the only member here is paused"
    assert here(members=paused[:1], voters=["A"])["Majority"].state == "ok", "its own pause is told anyway"


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("its user paused it", "go on with `shoal resume`"),
        ("no training loop is attached", "start your script again"),
        ("its user paused it; no training loop is attached", "go on with `shoal resume`"),
        ("the machine is on its battery (--only-when)", ""),
    ],
)
def test_a_paused_node_says_why_and_what_ends_that(why: str, remedy: str) -> None:
    check = checks_of(phase="paused", why_paused=why)["Training"]
    assert check.detail == f"paused: {why}; it votes and keeps the state, and trains nothing"
    assert (check.state, check.remedy, check.above) == ("warn", remedy, True)


def test_a_proposal_of_other_users_comes_with_the_command_to_agree() -> None:
    settings = {"sync.inner_steps": 30, "sync.codec": "int8", "sync.damped": True, "voters.D": True, "voters.C": False}
    wish = AmendStatus(peer_id="B", settings=settings, asked=True)
    check = checks_of(amendments=[wish])["Proposal"]
    assert check.detail.startswith("1 of 3 voters would amend sync.inner_steps = 30, sync.codec = ")
    assert check.detail.endswith(": B")
    assert check.remedy == (
        "to agree: `shoal amend --set sync.inner_steps=30 --set sync.codec=int8 --set sync.damped=true "
        "--add-voter D --remove-voter C`"
    )
    back = [RollbackStatus(peer_id=peer, round=3, asked=True) for peer in "BC"]
    check = checks_of(rollbacks=back)["Proposal"]
    assert check.text == "2 of 3 voters would go back to round 3: B, C; to agree: `shoal rollback --to 3`"
    assert (check.state, check.above) == ("warn", True)
    own = [*back, RollbackStatus(peer_id="A", round=3, asked=True)]
    by_policy = [RollbackStatus(peer_id="B", round=3, asked=False)]
    for changes in ({"rollbacks": own}, {"rollbacks": by_policy}, {"rollbacks": back, "voters": ["B", "C"]}):
        assert "Proposal" not in checks_of(**changes), "it agrees, no user asks, or it has no vote"


def test_what_stands_in_the_way_comes_first() -> None:
    ban = BanStatus(peer_id="A", term="0.0", round=5, until=None, evidence="ab")
    other = BanStatus(peer_id="C", term="0.0", round=5, until=9, evidence="ab")
    status = msgspec.structs.replace(
        STATUS, bans=[other, ban], alerts=["two nodes have one key"], abstains="two nodes have one key", missing=["B"]
    )
    assert [(check.name, check.state) for check in checked(status).checks] == [
        ("Banned", "bad"),
        ("Alert", "bad"),
        ("Banned", "warn"),
        ("Majority", "warn"),
        ("Training", "ok"),
    ]
    texts = [check.detail for check in checked(status).checks if check.name == "Banned"]
    assert texts == ["the swarm banned this node for ever and does without it", "C is banned until round 9, by round 5"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"phase": "train", "step": 40, "steps": 100}, "train, step 40 of 100"),
        ({"phase": "plan", "step": 40, "steps": 100}, "plan"),
        (
            {"phase": "joining", "fetched_bytes": 2_100_000, "state_bytes": 6_800_000},
            "joining, fetching the swarm's state: 2.1 MB of 6.8 MB",
        ),
    ],
)
def test_a_node_says_how_far_it_is(changes: dict[str, Any], told: str) -> None:
    assert checked(msgspec.structs.replace(STATUS, **changes)).doing == told


def test_a_newcomer_says_from_which_round_on_its_work_counts() -> None:
    check = checks_of(counts_from=9)["Seat"]
    assert check.detail == "watches round 8, and its work counts from round 9 on"
    assert "Seat" not in checks_of(counts_from=8)
    for rounds, told in ((0, "has a seat in this round"), (3, "waits for its seat, about 3 rounds")):
        assert checks_of(turn_in_rounds=rounds)["Seat"].detail == told


def test_who_is_of_a_site_is_told_with_whom_it_contributes() -> None:
    assert checks_of(site=[])["Seat"].detail == "nobody else of its site is here: it contributes by itself"
    assert checks_of(site=["12D3KooA"], names={"12D3KooA": "attic"})["Seat"].detail == "contributes together with attic"
    assert "Seat" not in checks_of()


def test_a_disk_that_fills_up_is_said_to_do_so() -> None:
    for free, state in ((183 << 30, "ok"), (1 << 30, "warn"), (100 << 20, "bad")):
        assert checks_of(node=NodeFacts(disk_free_bytes=free))["Disk"].state == state
