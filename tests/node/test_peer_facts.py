"""What the rows of many peers come to, by value."""

from __future__ import annotations

import pytest

from shoal.node.peer_facts import ABSENT, OTHER, SOFTWARE_LIMIT, Outlier, PeerFacts, Reach, State, behind_of, summary_of


def peer(name: str, *, phase: str = "training", reach: Reach = "direct", **more: object) -> PeerFacts:
    given = {"member": True, "round": 10, "tokens_per_s": 100.0, "software": "shoal 1", **more}
    return PeerFacts(peer=name, phase=phase, reach=reach, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "reach", "state", "speed"),
    [
        ("training", "direct", "training", 100.0),
        ("training", "unlinked", "unreached", 0.0),
        ("joining", "unlinked", "unreached", 0.0),
        ("leaving", "unlinked", "left", 0.0),
        ("training", "suspect", "silent", 100.0),
        ("training", "gone", "gone", 0.0),
        ("leaving", "gone", "left", 0.0),
        ("leaving", "direct", "left", 0.0),
        ("paused", "detour", "paused", 0.0),
        ("starting", "direct", "joining", 100.0),
        ("unknown", "direct", "joining", 100.0),
    ],
)
def test_a_peers_state_is_its_phase_unless_how_it_is_reached_says_more(
    phase: str, reach: Reach, state: State, speed: float
) -> None:
    known = peer("a", phase=phase, reach=reach)
    assert (known.state, known.speed) == (state, speed)


def test_a_summary_counts_everybody_and_names_the_worst_few() -> None:
    crowd = [peer(f"p{place:03}", tokens_per_s=float(place), reach="detour") for place in range(1, 101)]
    found = summary_of(
        [
            peer("me", reach="self", tokens_per_s=50.0),
            *crowd,
            peer("follower", member=False, phase="joining", tokens_per_s=0.0, software="shoal 2"),
            peer("by record", member=False, reach="unlinked", round=7),
            peer("late", round=4),
            peer("silent", reach="suspect", round=2),
            peer("dead", reach="gone", round=1, software="shoal 0"),
            peer("left", reach="gone", phase="leaving", member=False),
        ]
    )
    assert (found.known, found.alive, found.members, found.following) == (107, 104, 104, 1)
    assert found.states == {"training": 102, "joining": 1, "silent": 1, "left": 1, "gone": 1, "unreached": 1}
    assert sum(number for state, number in found.states.items() if state not in ABSENT) == found.alive
    assert found.reach == {"self": 1, "detour": 100, "direct": 2, "unlinked": 1, "suspect": 1, "gone": 2}
    assert found.software == {"shoal 1": 103, "shoal 2": 1}, "of those that are here"
    assert found.tokens_per_s == sum(range(1, 101)) + 50 + 2 * 100
    assert found.speeds == (11.0, 51.0, 91.0)
    assert found.slowest == [Outlier(peer=f"p{place:03}", value=float(place)) for place in range(1, 6)]
    worst = [("silent", 8), ("late", 6)]
    assert found.most_behind == [Outlier(peer=name, value=rounds) for name, rounds in worst]
    assert found.behind == 2


def test_nobody_is_behind_where_no_round_is_common_and_no_node_is_behind_itself() -> None:
    rows = [peer("me", reach="self", round=1), peer("late", round=4), peer("a"), peer("b"), peer("c")]
    assert [(outlier.peer, outlier.value) for outlier in summary_of(rows).most_behind] == [("late", 6)]
    alone = summary_of(rows, in_step=False)
    assert (alone.behind, alone.most_behind, alone.alive) == (0, [], 5)


def test_of_nobody_there_is_a_summary_too() -> None:
    found = summary_of([])
    assert (found.known, found.states, found.speeds, found.slowest) == (0, {}, None, [])


def test_who_claims_a_round_far_ahead_makes_nobody_late() -> None:
    rows = [peer("liar", round=10**9), peer("a"), peer("b", round=9), peer("c"), peer("d", round=8)]
    assert behind_of(rows) == {"d": 2}
    assert behind_of([peer("a", phase="joining", round=0), peer("b")]) == {}


def test_versions_beyond_a_few_are_counted_together() -> None:
    rows = [peer(f"p{place}", software=f"v{place % 10}") for place in range(105)]
    found = summary_of(rows).software
    assert list(found.items()) == [*((f"v{place}", 11) for place in range(5)), ("v5", 10), (OTHER, 40)]
    assert len(found) == SOFTWARE_LIMIT + 1


def test_speeds_are_of_those_that_measured_one_and_the_gone_are_named() -> None:
    crowd = [peer(name, tokens_per_s=speed) for name, speed in (("a", 0.0), ("b", 100.0), ("c", 300.0))]
    found = summary_of([*crowd, peer("d", reach="gone"), peer("e", reach="gone", phase="leaving")])
    assert found.speeds == (100.0, 300.0, 300.0)
    assert found.slowest[0] == Outlier(peer="b", value=100.0)
    assert found.gone == ["d"]
