"""`strategy = "gossip"`: what it implies, and what does not go with it."""

from __future__ import annotations

import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import parse_manifest, render_manifest
from tests.protocol.test_manifest import MINIMAL

GOSSIP = MINIMAL + "strategy = 'gossip'\n"


def test_gossip_implies_bf16_and_settings_under_which_members_stay_together() -> None:
    manifest = parse_manifest(GOSSIP)
    sync = manifest.sync
    assert (sync.codec, sync.outer_lr, sync.outer_momentum, sync.gossip_gamma) == ("bf16", 0.7, 0.5, 0.6)
    assert parse_manifest(render_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOSSIP + "codec = 'int8'\n", "use codec bf16 or fp32"),
        (GOSSIP + "gossip_gamma = 1.5\n", "gossip_gamma is 1.5; with this outer_momentum it must be < 1.5"),
        (GOSSIP + "outer_momentum = 0.9\n", "gossip_gamma is 0.6; with this outer_momentum it must be < 0.38"),
        (GOSSIP + "gossip_gamma = 0.0\n", "[sync] gossip_gamma: expected a number > 0"),
        (GOSSIP + "overlap_steps = 1\n", "overlap_steps has a meaning with strategy ="),
        (GOSSIP + "fragments = 2\n", "fragments and mixing have a meaning with strategy"),
        (GOSSIP + "norm_clip = true\n", "norm_clip and error_feedback have no meaning with strategy"),
        (GOSSIP + "error_feedback = 0.5\n", "norm_clip and error_feedback have no meaning with strategy"),
        (MINIMAL + "gossip_gamma = 0.7\n", 'gossip_gamma has a meaning with strategy = "gossip" only'),
    ],
)
def test_what_does_not_go_with_it_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert reason in str(caught.value)


def test_gamma_just_below_the_bound_is_accepted() -> None:
    assert parse_manifest(GOSSIP + "gossip_gamma = 1.499\n").sync.gossip_gamma == 1.499
    assert parse_manifest(GOSSIP + "outer_momentum = 0.9\ngossip_gamma = 0.37\n").sync.outer_momentum == 0.9
