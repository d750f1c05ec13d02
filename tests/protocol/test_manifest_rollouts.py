"""`strategy = "rollouts"`: its section, what does not go with it, and that all of it is agreed."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest, parse_manifest, render_manifest
from shoal.protocol.manifest_rollouts import RolloutsSection, TaskEntry
from shoal.protocol.manifest_withdrawn import is_gone
from tests.protocol.test_manifest import MINIMAL

SHARING = MINIMAL.replace("inner_steps = 20\n", "strategy = 'rollouts'\n")
TASKS = "[rollouts]\ntasks = [{family = 'bf'}]\n"


def test_section_is_rendered_read_and_hashed_alike() -> None:
    tasks = (
        "[[rollouts.tasks]]\nfamily = 'bf'\nconfig = {difficulty = 1, words = ['a', 'b c'], share = 0.5, on = true}\n"
    )
    more = "[[rollouts.tasks]]\nfamily = 'basic_arithmetic'\nconfig = 'easy'\nweight = 3\n"
    manifest = parse_manifest(SHARING + tasks + more)
    section = manifest.rollouts
    assert section is not None
    assert section.tasks[0].config == {"difficulty": 1, "words": ["a", "b c"], "share": 0.5, "on": True}
    assert (section.tasks[1].config, section.tasks[1].weight, section.local, section.external) == ("easy", 3, 4, 4)
    assert parse_manifest(render_manifest(manifest)) == manifest
    assert Manifest.from_canonical(manifest.to_canonical(), manifest.swarm_id) == manifest


def test_swarms_without_rollouts_have_no_such_section() -> None:
    manifest = parse_manifest(MINIMAL)
    assert manifest.rollouts is None
    assert b"rollouts" not in manifest.to_canonical()
    assert "\n[rollouts]\n" not in render_manifest(manifest)


def test_with_diloco_the_section_means_both_and_sync_is_free() -> None:
    manifest = parse_manifest(MINIMAL + "outer_lr = 0.5\n" + TASKS)
    assert (manifest.sync.strategy, manifest.sync.outer_lr) == ("diloco", 0.5)
    assert manifest.rollouts is not None
    assert parse_manifest(render_manifest(manifest)) == manifest
    assert manifest.swarm_id != parse_manifest(MINIMAL + "outer_lr = 0.5\n").swarm_id


CHANGES: list[dict[str, object]] = [
    {"tasks": [TaskEntry(family="bf", weight=2)]},
    {"tasks": [TaskEntry(family="bf", config="easy")]},
    {"tasks": [TaskEntry(family="bf", config={"difficulty": 1})]},
    {"tasks": [TaskEntry(family="arc_1d")]},
    {"local": 8},
    {"external": 0},
    {"group_size": 4},
    {"temperature": 0.5},
    {"completion_tokens": 100},
    {"staleness_rounds": 0},
    {"external_terms": "naive"},
    {"labels": True},
    {"over_provision": 1.5},
    {"images": True},
    {"images": True, "labels": True, "replays": True},
]


def test_every_key_of_the_section_is_agreed() -> None:
    manifest = parse_manifest(MINIMAL + TASKS)
    assert manifest.rollouts is not None
    changed = [
        msgspec.structs.replace(manifest, rollouts=msgspec.structs.replace(manifest.rollouts, **change))
        for change in CHANGES
    ]
    assert len({one.swarm_id for one in (manifest, *changed)}) == len(CHANGES) + 1
    every = {key for key in RolloutsSection.__struct_fields__ if not is_gone("rollouts", key)}
    assert {key for change in CHANGES for key in change} == every


def test_what_earlier_releases_have_no_key_for_is_not_in_the_hash_until_it_is_used() -> None:
    manifest = parse_manifest(SHARING + TASKS)
    assert b"over_provision" not in manifest.to_canonical()
    assert b"labels" not in manifest.to_canonical()
    assert b"images" not in manifest.to_canonical()
    assert b"replays" not in manifest.to_canonical()
    assert (
        parse_manifest(
            SHARING + TASKS + "over_provision = 1\nlabels = false\nimages = false\nreplays = false\n"
        ).swarm_id
        == manifest.swarm_id
    )
    used = parse_manifest(SHARING + TASKS + "over_provision = 2\nlabels = true\nexternal_terms = 'tis'\n")
    assert used.rollouts is not None
    assert (used.rollouts.over_provision, used.rollouts.external_terms) == (2.0, "tis")
    assert Manifest.from_canonical(used.to_canonical(), used.swarm_id) == used


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SHARING, 'strategy = "rollouts" needs a section [rollouts]'),
        (
            MINIMAL + 'strategy = "gossip"\n' + TASKS,
            '[rollouts] has a meaning with strategy = "rollouts", or "diloco" to average the policies too',
        ),
        (SHARING + "codec = 'int4'\n" + TASKS, 'codec has no meaning with strategy = "rollouts"'),
        (SHARING + "inner_steps = 2\n" + TASKS, 'inner_steps has no meaning with strategy = "rollouts"'),
        (SHARING + "norm_clip = true\n" + TASKS, 'norm_clip has no meaning with strategy = "rollouts"'),
        (SHARING + "[rollouts]\n", "[rollouts] needs the key tasks"),
        (SHARING + "[rollouts]\ntasks = []\n", "[rollouts] tasks: "),
        (SHARING + "[rollouts]\ntasks = [{famly = 'bf'}]\n", "famly"),
        (
            SHARING + "[rollouts]\ntasks = [{family = 'Bigger'}]\n",
            "[rollouts] tasks: 'Bigger' is no name of a family: give small letters, digits, and _ . - only",
        ),
        (SHARING + "[rollouts]\ntasks = [{family = 'bf', weight = 0}]\n", "[rollouts] tasks: expected a whole number"),
        (SHARING + "[rollouts]\ntasks = [{family = 'bf', config = {a = nan}}]\n", "a is not a finite number"),
        (SHARING + "[rollouts]\ntasks = [{family = 'bf', config = {a = [inf]}}]\n", "a is not a finite number"),
        (SHARING + "[rollouts]\ntasks = [{family = 'bf', config = {a = {b = 1}}}]\n", "[rollouts] tasks: "),
        (SHARING + "[rollouts]\ntasks = [{family = 'bf', config = {'a b' = 1}}]\n", "'a b' is no name of a setting"),
        (SHARING + TASKS + "locl = 2\n", "[rollouts] unknown key 'locl'; did you mean 'local'?"),
        (SHARING + TASKS + "temperature = nan\n", "[rollouts] temperature: expected a finite number"),
        (SHARING + TASKS + "group_size = 1\n", "[rollouts] group_size: expected a whole number >= 2"),
        (SHARING + TASKS + "external_terms = 'best'\n", "'best' is none of naive, positive, tis"),
        (SHARING + TASKS + "external_terms = 'tis'\n", "write labels = true beside it"),
        (SHARING + TASKS + "over_provision = 0.5\n", "[rollouts] over_provision: expected a number >= 1"),
        (SHARING + TASKS + "images = true\n", 'images has no meaning with strategy = "rollouts"; leave it out'),
        (SHARING + TASKS + "replays = true\n", "write images = true, labels = true beside it"),
        (
            SHARING + TASKS + "replays = true\nimages = true\nlabels = true\nover_provision = 2.0\n",
            "replays needs completions of one policy; write over_provision = 1.0, or replays = false",
        ),
        (SHARING + TASKS + "over_provision = 5.0\n", "[rollouts] over_provision: expected a number <= 4"),
    ],
)
def test_what_does_not_go_is_said_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
