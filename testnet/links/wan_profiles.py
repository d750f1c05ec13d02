"""Lines to the rest of the world, as benchmarks and testnets emulate them.

A profile is of a peer's own line. What lies between two peers of it: the narrower of the one's way up and the other's
way down, and a round trip of `rtt_s`, of which each line has half.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shoal.protocol.errors import ConfigError
from shoal.testnet.links.namespaces import RateMbit, Uplink
from shoal.testnet.scenario import Scenario

RTT_LIMIT_S: Final = 10.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Line of a peer. down_mbit, up_mbit: its rates. rtt_s: between two. jitter_s: by how much one way differs.

    loss: the share of packets lost on the way from one to another.
    """

    down_mbit: RateMbit
    up_mbit: RateMbit
    rtt_s: Annotated[float, Meta(ge=0, le=RTT_LIMIT_S)]
    jitter_s: Annotated[float, Meta(ge=0)] = 0.0
    loss: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.jitter_s > self.rtt_s / 2:
            raise ValueError("jitter_s is at most half of rtt_s")

    @property
    def link_mbit(self) -> float:
        """Bandwidth from one peer to another, in one direction."""
        return min(self.down_mbit, self.up_mbit)


PROFILES: Final = {
    "home": Profile(down_mbit=100, up_mbit=20, rtt_s=0.03, jitter_s=0.002),
    "continental": Profile(down_mbit=1000, up_mbit=1000, rtt_s=0.04, jitter_s=0.001),
    "intercontinental": Profile(down_mbit=300, up_mbit=300, rtt_s=0.15, jitter_s=0.002, loss=0.001),
    "mobile": Profile(down_mbit=20, up_mbit=20, rtt_s=0.08, jitter_s=0.01, loss=0.01),
}


def profile_of(name: str) -> Profile:
    """Return the profile of that name. Raises ConfigError, naming the profiles there are."""
    if name not in PROFILES:
        raise ConfigError(f"--profile: there is no {name!r}; choose of {', '.join(PROFILES)}")
    return PROFILES[name]


def uplinks_of(profile: Profile, places: int) -> tuple[Uplink, ...]:
    """Give every node its own line, so that two of them have the profile's delay and loss between them.

    Of two nodes only the second has one, which stands for both lines and costs half as much to emulate.
    """
    if places == 2:
        return (
            Uplink(
                nodes=(1,),
                rate_mbit=profile.link_mbit,
                delay_s=profile.rtt_s / 2,
                jitter_s=profile.jitter_s,
                loss=profile.loss,
            ),
        )
    return tuple(
        Uplink(
            nodes=(index,),
            rate_mbit=profile.down_mbit,
            up_mbit=profile.up_mbit,
            delay_s=profile.rtt_s / 4,
            jitter_s=profile.jitter_s / 2,
            loss=1 - math.sqrt(1 - profile.loss),
        )
        for index in range(places)
    )


def with_profile(scenario: Scenario, name: str) -> Scenario:
    """The scenario with every node, those that join too, at the end of such a line. Raises ConfigError."""
    profile = profile_of(name)
    if scenario.uplinks or scenario.behind_routers:
        raise ConfigError(
            "--profile: the scenario has lines of its own; leave out its uplinks and routers, or --profile"
        )
    return msgspec.structs.replace(scenario, uplinks=uplinks_of(profile, scenario.places))
