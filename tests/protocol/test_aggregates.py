"""How contributions are combined: what a manifest may say, what plans carry, and what no lead can make of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shoal.collectives.aggregate import Aggregate
from shoal.protocol.amending import InForce, amend, make_amendment
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.manifest import Manifest, parse_manifest
from shoal.protocol.messages import CLIP_UNIT, WEIGHT_LIMIT, Participant, Plan
from shoal.protocol.planning import CONTRIBUTOR, OBSERVER, RoundSettings, capped_tokens, check_plan
from shoal.protocol.wire import canonical, decode
from tests.protocol.test_manifest import MINIMAL
from tests.protocol.test_planning import GOOD, LEAD, PEERS, SETTINGS, START, plan_of

ROBUST = replace(SETTINGS, aggregate="median")


def manifest(text: str = "") -> Manifest:
    return parse_manifest(MINIMAL + text)


def sync(text: str = "") -> tuple[str, bool]:
    section = manifest(text).sync
    return section.plan_aggregate, section.norm_clip


# -- the manifest --------------------------------------------------------------------------------------------


def test_norms_are_clipped_unless_said_otherwise_where_sums_need_not_be_exact_means() -> None:
    assert sync() == sync('strategy = "diloco"\n') == sync('strategy = "streaming"\n') == ("mean", True)
    assert sync('strategy = "sparse"\n') == ("mean", True)
    assert sync("norm_clip = false\n") == ("mean", False)
    for strategy in ("ddp", "gossip"):
        text = MINIMAL.replace("inner_steps = 20", "inner_steps = 1") + f'strategy = "{strategy}"\n'
        assert not parse_manifest(text).sync.norm_clip


@pytest.mark.parametrize(
    ("text", "name", "parameter"),
    [
        ('aggregate = "median"\n', "median", 0),
        ('aggregate = "trimmed"\n', "trimmed", CLIP_UNIT // 4),
        ('aggregate = "trimmed"\ntrim = 0.2\n', "trimmed", 13107),
        ('aggregate = "trimmed"\ntrim = 0\n', "trimmed", 0),
    ],
)
def test_owners_read_what_the_manifest_says(text: str, name: str, parameter: int) -> None:
    settings = RoundSettings.of(manifest(text), 1001)
    plan = plan_of((0, CONTRIBUTOR, 10), settings=replace(SETTINGS, aggregate=settings.aggregate))
    assert Aggregate.of(plan) == Aggregate(name, parameter)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('aggregate = "krum"\n', "is none of mean, median"),
        ('strategy = "gossip"\naggregate = "median"\n', "aggregate has no meaning"),
        ('strategy = "sparse"\naggregate = "median"\n', "use mean"),
        ('strategy = "sparse"\naggregate = "trimmed"\n', "use mean"),
        ("trim = 0.1\n", "trim has a meaning"),
        ('aggregate = "trimmed"\ntrim = 0.5\n', "trim: expected a number < 0.5"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        manifest(text)
    assert "\n" not in str(error.value)


def test_swarm_under_attack_can_amend_how_it_combines() -> None:
    before = manifest()
    in_force = InForce(before, START.hash)
    amendment = make_amendment(in_force, {"sync.aggregate": "trimmed", "sync.trim": 0.4, "sync.norm_clip": False})
    after = amend(before, amendment)
    assert (after.sync.plan_aggregate, after.sync.norm_clip) == ("trimmed26214", False)
    assert after.swarm_id != before.swarm_id  # which stays the first one's


# -- the plan ------------------------------------------------------------------------------------------------


def test_plan_names_no_mean() -> None:
    assert GOOD.aggregate is msgspec.UNSET
    assert b"aggregate" not in canonical(GOOD)
    robust = plan_of((0, CONTRIBUTOR, 10), settings=ROBUST)
    assert decode(canonical(robust), Plan) == robust
    assert robust.hash != msgspec.structs.replace(robust, aggregate=msgspec.UNSET).hash


@pytest.mark.parametrize("planned", [msgspec.UNSET, "mean", "trimmed16384", "krum"])
def test_plan_that_combines_otherwise_than_agreed_is_refused(planned: object) -> None:
    robust = plan_of((0, CONTRIBUTOR, 10), settings=ROBUST)
    check_plan(robust, LEAD, START, ROBUST)
    with pytest.raises(RemoteError, match="combines contributions otherwise") as error:
        check_plan(msgspec.structs.replace(robust, aggregate=planned), LEAD, START, ROBUST)
    assert error.value.peer == LEAD


# -- declared tokens -----------------------------------------------------------------------------------------


def test_tokens_beyond_a_multiple_of_the_median_neither_weigh_nor_count() -> None:
    plan = plan_of((0, CONTRIBUTOR, 10), (1, CONTRIBUTOR, 12), (2, CONTRIBUTOR, WEIGHT_LIMIT), (3, OBSERVER, 9))
    by_peer = {p.peer: p for p in plan.participants}
    assert [by_peer[PEERS[n]].tokens for n in range(4)] == [10, 12, 24, 0]
    assert [by_peer[PEERS[n]].weight for n in range(4)] == [5, 6, 12, 0]
    check_plan(plan, LEAD, START, SETTINGS)


def test_liars_cannot_raise_the_median_beyond_the_honest() -> None:
    honest = {PEERS[n]: 100 for n in range(3)}
    lying = {PEERS[n]: WEIGHT_LIMIT for n in range(3, 5)}
    assert set(capped_tokens(honest | lying, 4.0).values()) == {100, 400}


@pytest.mark.parametrize(
    ("place", "weight", "tokens"),
    [(0, 7, 10), (1, 0, 12), (1, 6, 13), (0, 5, 0), (2, 1, 0), (1, 60, 120), (2, WEIGHT_LIMIT, WEIGHT_LIMIT)],
)
def test_lead_cannot_weigh_but_by_capped_tokens(place: int, weight: int, tokens: int) -> None:
    plan = plan_of((0, CONTRIBUTOR, 10), (1, CONTRIBUTOR, 12), (2, OBSERVER, 0))
    at = plan.number(PEERS[place])
    assert at is not None
    changed = list(plan.participants)
    changed[at] = Participant(PEERS[place], weight, tokens, changed[at].root, life=changed[at].life)
    with pytest.raises(RemoteError, match="weights that do not follow"):
        check_plan(msgspec.structs.replace(plan, participants=tuple(changed)), LEAD, START, SETTINGS)
