"""`strategy = "ddp"`: what it implies, and what does not go with it."""

from __future__ import annotations

import pytest

from shoal.cli.init import InitOptions, found
from shoal.collectives.outer import OuterSettings
from shoal.collectives.state import ADAMW_KINDS, NESTEROV_KINDS
from shoal.node.training.trainer_messages import SyncSettings
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import parse_manifest, render_manifest
from shoal.testnet.scenario import parse_scenario
from shoal.testnet.swarm import testnet_manifest as manifest_of

FOUNDER = Identity.from_seed(bytes(32)).peer_id
BEGIN = f'[swarm]\nname = "x"\nfounders = ["{FOUNDER}"]\n[workload]\nname = "text"\n[sync]\n'
DDP = BEGIN + 'strategy = "ddp"\n'


def test_ddp_implies_one_step_exactly_summed() -> None:
    manifest = parse_manifest(DDP)
    sync = manifest.sync
    assert (sync.inner_steps, sync.round_steps, sync.codec, sync.balances) == (1, 1, "fp32", False)
    assert parse_manifest(render_manifest(manifest)) == manifest
    assert parse_manifest(DDP + 'inner_steps = 1\ncodec = "fp32"\n').swarm_id == manifest.swarm_id
    assert parse_manifest(DDP + 'codec = "bf16"\n').sync.plan_codec == "bf16"


def test_outer_step_and_trainer_follow_the_strategy() -> None:
    ddp, diloco = parse_manifest(DDP + "[inner]\nlr = 0.5\n"), parse_manifest(BEGIN + "inner_steps = 1\n")
    assert OuterSettings.of(ddp).adamw == ddp.inner
    assert OuterSettings.of(ddp).kinds == ADAMW_KINDS
    assert SyncSettings.of(ddp).gradients
    assert OuterSettings.of(diloco).adamw is None
    assert OuterSettings.of(diloco).kinds == NESTEROV_KINDS
    assert not SyncSettings.of(diloco).gradients


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DDP + "inner_steps = 2\n", 'inner_steps is 2; with strategy = "ddp" it is 1, or left out'),
        (DDP + "outer_lr = 0.5\n", "outer_lr and outer_momentum have no meaning"),
        (DDP + '[inner]\noptimizer = "muon"\n', 'optimizer = "muon" goes with a strategy of inner steps'),
        (DDP + "outer_momentum = 0.5\n", "outer_lr and outer_momentum have no meaning"),
        (DDP + "overlap_steps = 1\n", "overlap_steps has a meaning with"),
        (DDP + "late_steps = 1\n", "late_steps has a meaning with"),
        (DDP + "fragments = 2\n", "fragments and mixing have a meaning with"),
        (DDP + 'codec = "topk"\n', "belong together"),
    ],
)
def test_what_does_not_go_with_ddp_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_init_and_testnet_leave_the_steps_to_the_strategy() -> None:
    key = Identity.from_seed(bytes(32))
    assert found(InitOptions(strategy="ddp"), key, key).sync.inner_steps == 1
    assert found(InitOptions(), key, key).sync.inner_steps == 100
    assert manifest_of(parse_scenario('strategy = "ddp"\n'), [FOUNDER]).sync.inner_steps == 1
    assert manifest_of(parse_scenario(""), [FOUNDER]).sync.inner_steps == 20
    with pytest.raises(ConfigError, match="inner_steps is 3"):
        manifest_of(parse_scenario('strategy = "ddp"\ninner_steps = 3\n'), [FOUNDER])
