"""Profiles of lines, and what they are to namespaces, `tc` and scenarios."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.errors import ConfigError
from shoal.testnet.links.namespaces import Uplink, netem
from shoal.testnet.links.wan_profiles import PROFILES, Profile, profile_of, uplinks_of, with_profile
from shoal.testnet.scenario import DEMO, Scenario


@pytest.mark.parametrize(
    ("name", "down", "up", "rtt_s", "loss"),
    [
        ("home", 100, 20, 0.03, 0.0),
        ("continental", 1000, 1000, 0.04, 0.0),
        ("intercontinental", 300, 300, 0.15, 0.001),
        ("mobile", 20, 20, 0.08, 0.01),
    ],
)
def test_profiles_are_those_that_are_documented(name: str, down: int, up: int, rtt_s: float, loss: float) -> None:
    profile = profile_of(name)
    assert (profile.down_mbit, profile.up_mbit, profile.rtt_s, profile.loss) == (down, up, rtt_s, loss)
    assert profile.link_mbit == up


def test_unknown_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'moon'; choose of home, continental, intercontinental, mobile"):
        profile_of("moon")


@pytest.mark.parametrize("wrong", [{"down_mbit": 0}, {"rtt_s": 11}, {"loss": 1}, {"jitter_s": 0.021}])
def test_profile_that_no_line_has_is_refused(wrong: dict[str, float]) -> None:
    right = {"down_mbit": 1.0, "up_mbit": 1.0, "rtt_s": 0.04, "jitter_s": 0.02}
    msgspec.convert(right, Profile)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(right | wrong, Profile)


@pytest.mark.parametrize("name", PROFILES)
def test_two_nodes_have_the_whole_profile_between_them(name: str) -> None:
    profile = PROFILES[name]
    (line,) = uplinks_of(profile, 2)
    assert (line.nodes, line.rates_mbit) == ((1,), (profile.link_mbit, profile.link_mbit))
    assert (2 * line.delay_s, line.jitter_s, line.loss) == (profile.rtt_s, profile.jitter_s, profile.loss)


@pytest.mark.parametrize("name", PROFILES)
def test_more_nodes_have_a_line_each_and_two_of_them_make_the_profile(name: str) -> None:
    profile = PROFILES[name]
    lines = uplinks_of(profile, 5)
    assert [line.nodes for line in lines] == [(0,), (1,), (2,), (3,), (4,)]
    one, other = lines[0], lines[3]
    assert one.rates_mbit == (profile.down_mbit, profile.up_mbit)
    assert 2 * (one.delay_s + other.delay_s) == pytest.approx(profile.rtt_s)
    assert one.jitter_s + other.jitter_s == pytest.approx(profile.jitter_s)
    assert 1 - (1 - one.loss) * (1 - other.loss) == pytest.approx(profile.loss)


def test_netem_is_told_rate_delay_jitter_and_loss_and_holds_what_is_on_its_way() -> None:
    line = Uplink(nodes=(0,), rate_mbit=100, up_mbit=20, delay_s=0.04, jitter_s=0.01, loss=0.001)
    limit = int(0.25 * 20e6 / 8 / 1514) + 1
    expected = f"netem limit {limit} delay 40000us 10000us loss 0.1% rate 20000kbit"
    assert " ".join(netem(line, 20)) == expected
    assert " ".join(netem(Uplink(nodes=(0,), rate_mbit=0.1, delay_s=0.001), 0.1)) == (
        "netem limit 64 delay 1000us rate 100kbit"
    )


def test_uplink_whose_jitter_is_more_than_its_delay_is_refused() -> None:
    with pytest.raises(ValueError, match="jitter_s is at most its delay_s"):
        Uplink(nodes=(0,), rate_mbit=1, delay_s=0.01, jitter_s=0.02)


def test_scenario_with_a_profile_has_a_line_for_every_node_and_for_those_that_join() -> None:
    scenario = with_profile(DEMO, "mobile")
    assert [line.nodes for line in scenario.uplinks] == [(index,) for index in range(DEMO.places)]
    assert (scenario.places, scenario.faults, scenario.needs_namespaces) == (5, DEMO.faults, True)


@pytest.mark.parametrize("own", [{"uplinks": (Uplink(nodes=(1,), rate_mbit=1),)}, {"behind_routers": (1,)}])
def test_scenario_with_lines_of_its_own_takes_no_profile(own: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--profile: the scenario has lines of its own"):
        with_profile(Scenario(**own), "home")  # type: ignore[arg-type]
