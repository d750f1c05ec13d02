"""Settings that earlier releases had: a manifest that does without them is what it was, another says what to do."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3

from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.manifest import Manifest, parse_manifest, render_manifest, validate_manifest
from shoal.protocol.manifest_withdrawn import WITHDRAWN, is_gone
from shoal.protocol.wire import SwarmId, canonical
from tests.protocol.test_manifest import GOLDEN_SWARM_ID, MINIMAL

TASKS = MINIMAL + "[rollouts]\ntasks = [{family = 'bf'}]\n"
TASKS_SWARM_ID = "5d49032cfcbedbf6b4b53d7103bb4735c83eb190ab1ce703190d50fa4312960b"

WITHOUT = {
    ("sync", "clip_radius"): (MINIMAL + "clip_radius = 1.0\n", GOLDEN_SWARM_ID),
    ("round", "durability"): (MINIMAL + '[round]\ndurability = "disk"\n', GOLDEN_SWARM_ID),
    ("rollouts", "adaptive"): (TASKS + "adaptive = false\n", TASKS_SWARM_ID),
    ("rollouts", "sampling"): (TASKS + "sampling = 'uniform'\n", TASKS_SWARM_ID),
}
"""Manifests of earlier releases that name keys which are gone and do without them, and the swarms that they named."""

REFUSED = [
    ("sync", "aggregate", "centred_clip", 'take "trimmed"'),
    ("sync", "clip_radius", 2.0, 'the rule "centred_clip" is gone; leave the key out'),
    ("round", "durability", "memory", "results wait for their certificate on disk; leave the key out"),
    ("rollouts", "adaptive", True, "a node takes as many groups of others as `external` says; leave the key out"),
    (
        "rollouts",
        "sampling",
        "weighted",
        "groups are drawn uniformly from those whose rewards vary; leave the key out",
    ),
    ("rollouts", "external_terms", "damped", 'take "positive", which did better'),
]


def test_every_withdrawn_setting_has_a_case_here() -> None:
    assert set(WITHOUT) == {setting for setting in WITHDRAWN if is_gone(*setting)}
    assert {(section, key) for section, key, _, _ in REFUSED} == set(WITHDRAWN)


@pytest.mark.parametrize("setting", WITHOUT)
def test_manifest_that_does_without_is_read_and_names_the_same_swarm(setting: tuple[str, str]) -> None:
    text, swarm_id = WITHOUT[setting]
    manifest = parse_manifest(text)
    assert manifest.swarm_id.hex() == swarm_id
    assert f"{setting[1]} = " not in render_manifest(manifest)
    assert parse_manifest(render_manifest(manifest)) == manifest
    assert Manifest.from_canonical(manifest.to_canonical(), manifest.swarm_id) == manifest


@pytest.mark.parametrize(("section", "key", "value", "advice"), REFUSED)
def test_manifest_that_needs_it_is_refused_in_one_line(section: str, key: str, value: object, advice: str) -> None:
    tables = msgspec.to_builtins(parse_manifest(TASKS))
    tables[section][key] = value
    said = f"[{section}] {key}: {value!r} is no longer there: {advice}."
    with pytest.raises(ConfigError) as caught:
        validate_manifest(tables, source="swarm.toml")
    assert str(caught.value).startswith(f"swarm.toml: {said}")
    assert "\n" not in str(caught.value)
    data = canonical(tables)
    with pytest.raises(RemoteError) as refused:
        Manifest.from_canonical(data, SwarmId(blake3(data).digest()))
    assert f"{value!r} is no longer there: {advice} - at `$.{section}.{key}`" in str(refused.value)


def test_peer_cannot_say_what_is_gone_at_any_length() -> None:
    tables = msgspec.to_builtins(parse_manifest(MINIMAL))
    tables["sync"]["clip_radius"] = 500 * "x` - at `$.nowhere.y"
    data = canonical(tables)
    with pytest.raises(RemoteError) as refused:
        Manifest.from_canonical(data, SwarmId(blake3(data).digest()))
    assert len(str(refused.value)) < 300


def test_who_mistypes_a_key_is_not_sent_to_one_that_is_gone() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(MINIMAL + "[round]\ndurabilty = 'disk'\n")
    assert "durability" not in str(caught.value)


def test_value_that_reads_like_the_end_of_an_error_misleads_nobody() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(MINIMAL + "clip_radius = 'x` - at `$.nowhere.y`'\n")
    assert str(caught.value).startswith("swarm.toml: [sync] clip_radius: ")
