"""The benchmark of emulated lines: what it makes of options and of rounds, and one small run of it."""

from __future__ import annotations

import json
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from shoal.lab.bench import wan as bench_wan
from shoal.lab.bench.times import NodeRound
from shoal.lab.bench.wan import NUMEL_LIMITS, REDUCE_S, RoundTally, WanBench, measure_wan
from shoal.lab.bench.wan_streams import receive, send
from shoal.protocol.errors import ConfigError
from shoal.testnet.links.wan_profiles import PROFILES
from tests.testnet.links_lab import needs_namespaces


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"profile": "home"}, {"down_mbit": 100.0, "up_mbit": 20.0, "rtt_s": 0.03, "jitter_s": 0.002, "loss": 0.0}),
        ({"rate": 50.0}, {"down_mbit": 50.0, "up_mbit": 50.0}),
        ({"rtt_ms": 80.0}, {"rtt_s": 0.08, "jitter_s": 0.0}),
        ({"loss": 0.5}, {"loss": 0.005}),
    ],
)
def test_options_stand_in_place_of_what_the_profile_says(given: dict[str, Any], changed: dict[str, float]) -> None:
    profile = WanBench(**given).line
    base = PROFILES["intercontinental"]
    assert {name: getattr(profile, name) for name in base.__struct_fields__} == {
        name: getattr(base, name) for name in base.__struct_fields__
    } | changed


@pytest.mark.parametrize(
    "wrong", [{"rate": 0.0}, {"rtt_ms": -1.0}, {"rtt_ms": 20_000.0}, {"loss": 100.0}, {"profile": "x"}]
)
def test_options_of_no_line_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--"):
        WanBench(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"peers": 1}, {"peers": 17}, {"numel": 100}, {"seconds": 0.5}, {"codec": "int4"}, {"codec": "fp8"}]
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WanBench(profile="home", **wrong)


@pytest.mark.parametrize(("peers", "codec"), [(2, "fp32"), (2, "int8"), (4, "bf16")])
def test_reduction_is_as_large_as_the_line_carries_in_a_few_seconds(peers: int, codec: str) -> None:
    bench = WanBench(profile="mobile", peers=peers, codec=codec)
    assert bench.payload_bytes == pytest.approx(20e6 / 8 * REDUCE_S, rel=0.01)
    assert WanBench(profile="continental").values == NUMEL_LIMITS[1]


def test_payload_is_what_a_peer_sends_of_contributions_and_finals() -> None:
    assert WanBench(profile="home", numel=1_000_000).payload_bytes == 4_000_000  # half of each, and half as finals
    assert WanBench(profile="home", numel=1_000_000, peers=4).payload_bytes == 6_000_000


def node_round(planned_at: float, seconds: float, digest: str = "d", sent_bytes: int = 0) -> NodeRound:
    done = planned_at + seconds
    return NodeRound(
        planned_at=planned_at,
        finals_at=done,
        reduced_at=done + 1,
        voted_at=done + 1,
        certified_at=done + 2,
        digest=digest,
        coverage=1.0,
        contributors=2,
        sent_bytes=sent_bytes,
    )


def test_rate_is_over_reduce_phases_that_began_after_the_warm_up() -> None:
    bench = WanBench(profile="home", numel=1_000_000, seconds=4.0)
    tally = RoundTally(bench)
    tally.add([node_round(100.0, 9.0), node_round(100.1, 9.0)], 1)
    tally.add([node_round(109.9, 1.0), node_round(109.9, 1.0)], 2)
    assert not tally.enough
    tally.add([node_round(110.0, 1.0), node_round(110.5, 1.5)], 3)
    assert not tally.enough
    tally.add([node_round(120.0, 1.9), node_round(120.1, 1.9)], 4)
    assert tally.enough
    assert [round.measured for round in tally.rounds] == [False, False, True, True]
    assert [round.lanes for round in tally.rounds] == [1, 2, 3, 4]
    assert [round.reduce_s for round in tally.rounds] == pytest.approx([9.1, 1.0, 2.0, 2.0])
    assert tally.rounds[2].payload_mbit_s == pytest.approx(32 / 2)
    assert tally.payload_mbit_s == pytest.approx(64 / 4)
    assert tally.with_pauses_mbit_s == pytest.approx(64 / 12)
    assert tally.identical
    tally.add([node_round(130.0, 1.0), node_round(130.0, 1.0, "another")], 4)
    assert not tally.identical


def test_what_is_sent_is_set_against_the_payload_round_by_round() -> None:
    tally = RoundTally(WanBench(profile="home", numel=1_000_000))
    tally.add([node_round(0.0, 1.0, sent_bytes=4_000_000), node_round(0.0, 1.0, sent_bytes=8_000_000)], 1)
    tally.add([node_round(5.0, 1.0, sent_bytes=8_400_000), node_round(5.0, 1.0, sent_bytes=12_400_000)], 1)
    assert [round.sent_ratio for round in tally.rounds] == pytest.approx([1.5, 1.1])


def test_streams_count_what_arrives_until_the_time_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        ways = [threading.Thread(target=send, args=("127.0.0.1", port, 5.0, "reno")) for _ in range(2)]
        for way in ways:
            way.start()
        assert receive(listening, 2, 0.1) > 1_000_000
        for way in ways:  # each ends, since the receiver has closed
            way.join(5.0)
            assert not way.is_alive()


def test_without_root_it_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_wan, "why_not", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match="emulated lines take network namespaces, and network namespaces need root"):
        trio.run(measure_wan, WanBench(profile="home"))


@needs_namespaces
@pytest.mark.long
def test_small_run_over_a_home_line_gives_every_figure(tmp_path: Path) -> None:
    bench = WanBench(profile="home", numel=500_000, seconds=1.0, warm_up_s=1.0, bare_s=1.0)
    result = trio.run(partial(measure_wan, bench, folder=tmp_path))
    printed = json.loads(msgspec.json.encode(result))
    assert printed.keys() >= {"payload_mbit_s", "link_mbit_s", "cubic_mbit_s", "bbr_mbit_s"}
    assert (printed["link_mbit_s"], printed["identical"], printed["values"]) == (20, True, 500_000)
    # No program gets more of a line than full frames have payload.
    for rate in ("payload_mbit_s", "cubic_mbit_s", "bbr_mbit_s", "many_bbr_mbit_s", "with_pauses_mbit_s"):
        assert 0 < printed[rate] < 20 * 1448 / 1514 * 1.15, rate
    assert printed["link_share"] == pytest.approx(printed["payload_mbit_s"] / 20)
    measured = [round for round in printed["rounds"] if round["measured"]]
    paused = printed["with_pauses_mbit_s"]  # between rounds: where the machine is slow one is long enough
    assert paused < printed["payload_mbit_s"] if len(measured) > 1 else paused == printed["payload_mbit_s"]
    assert sum(round["reduce_s"] for round in measured) >= 1.0
    assert all(round["at_s"] >= 1.0 and round["lanes"] >= 1 and round["sent_ratio"] > 1 for round in measured)
    assert not printed["rounds"][0]["measured"]
