"""Sites: options that are refused, rows of a result, and a run of real nodes in two places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab.bench import sites
from shoal.lab.bench.sites import Kill, SitesBench, SitesResult, SitesRun, sites_manifest
from shoal.lab.shipped import not_default
from shoal.lab.targets import Spread, missed
from shoal.protocol.identity import Identity
from tests.testnet.links_lab import needs_namespaces

APART = SitesRun(
    uplink_bytes=(20e6, 22e6, 24e6),
    round_s=Spread.of([2.0, 2.5]),
    rounds=7,
    certified=7,
    wrong_values=0,
    forks=0,
    unverified=(),
    missed={},
    evictions=0,
    uncounted=0,
)
KILLED = Kill(node=1, delegate=True, round=8, left=(0,), took_s=2.5, tokens=4, without=0)
TOGETHER = msgspec.structs.replace(APART, uplink_bytes=(10e6, 11e6, 12e6), rounds=13, certified=13, kills=(KILLED,))


def result(**together: Any) -> SitesResult:
    return SitesResult(
        bench=SitesBench(),
        not_default=(),
        load=0.5,
        apart=APART,
        together=msgspec.structs.replace(TOGETHER, **together),
    )


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--places", "1", "--places: 1 is not in 2..8"), ("--nodes", "1", "--nodes: 1 is not in 2..8")],
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["bench", "sites", option, value]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_namespaces_it_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sites, "why_not", lambda: "there is no root here")
    assert execute(["bench", "sites"]) == 2
    assert "uplinks take network namespaces, and there is no root here" in " ".join(capsys.readouterr().err.split())


def test_places_share_no_node_and_leave_none_out() -> None:
    uplinks = SitesBench(places=3, nodes=2, rate=100).uplinks
    assert [(uplink.nodes, uplink.rates_mbit) for uplink in uplinks] == [
        ((0, 1), (100, 100)),
        ((2, 3), (100, 100)),
        ((4, 5), (100, 100)),
    ]


def test_together_and_apart_differ_in_nothing_else() -> None:
    bench, founders = SitesBench(), [Identity.generate().peer_id for _ in range(6)]
    apart, together = (sites_manifest(bench, how, founders) for how in ("apart", "together"))
    assert msgspec.structs.replace(together, membership=None) == apart
    assert (together.sites_together, apart.sites_together, apart.membership) == (True, False, None)
    settings = [text.partition(" =")[0] for text in not_default(apart)]
    assert settings == ["sync.balance", "sync.inner_steps", "workload.name", "workload.options", "workload.seed"]


def test_bytes_of_all_uplinks_are_set_against_those_of_nodes_apart() -> None:
    row = result().rows[0]
    assert row.measured == Spread.of([33 / 66])
    assert (row.met, row.aim_met) == (True, True)
    assert row.name == (
        "one drawn step of 4,000,000 values a round, 3 places of 2: bytes over the uplinks a round, together to apart"
    )
    assert result(uplink_bytes=(14e6, 14e6, 12e6)).rows[0].met is False


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"certified": 12}, "rounds that were not certified"),
        ({"kills": (msgspec.structs.replace(KILLED, without=1),)}, sites.WENT_ON.name),
        ({"uncounted": 1}, sites.NOT_COUNTED.name),
        ({"wrong_values": 1}, "wrong values"),
        ({"forks": 1}, "forks, and states that differ"),
        ({"unverified": ("round 3: …",)}, "what could not be verified"),
        ({"missed": {0: (3,)}}, "founders that nothing struck and that missed rounds"),
        ({"evictions": 1}, "evictions of the living after the first round"),
    ],
)
def test_what_is_wrong_is_missed_whatever_was_saved(change: dict[str, Any], name: str) -> None:
    assert missed(result().rows) == []
    assert [row.name for row in missed(result(**change).rows)] == [name]


@needs_namespaces
@pytest.mark.long
def test_two_places_save_half_and_lose_no_round_to_kills(tmp_path: Path) -> None:
    found = sites.run(SitesBench(places=2, rounds=2), lambda text, share=None, *, of="": None)
    assert missed(found.rows) == []
    delegate, other = found.together.kills
    assert (delegate.delegate, delegate.left, other.delegate, other.left) == (
        True,
        (1 - delegate.node,),
        False,
        (5 - other.node,),
    )
    assert delegate.tokens in (2, 4)
    assert other.tokens == 3
