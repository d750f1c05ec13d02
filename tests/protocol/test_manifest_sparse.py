"""`strategy = "sparse"`: what it implies, what does not go with it, and what a plan calls its codec."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from shoal.collectives.codecs import DENSE
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, parse_manifest, render_manifest
from shoal.protocol.manifest_sync import SyncSection

FOUNDER = Identity.from_seed(bytes(32)).peer_id
BEGIN = f'[swarm]\nname = "x"\nfounders = ["{FOUNDER}"]\n[workload]\nname = "text"\n[sync]\ninner_steps = 30\n'
SPARSE = BEGIN + 'strategy = "sparse"\n'


def implied(manifest: Manifest) -> tuple[object, ...]:
    sync = manifest.sync
    return sync.codec, sync.outer_lr, sync.outer_momentum, sync.error_feedback, sync.norm_clip


def test_sparse_implies_what_it_needs() -> None:
    assert implied(parse_manifest(SPARSE)) == ("topk", 1.0, 0.0, 0.95, True)
    assert implied(parse_manifest(BEGIN)) == ("int8", 0.7, 0.9, 1.0, True)
    assert implied(parse_manifest(BEGIN + 'strategy = "diloco"\n')) == ("int8", 0.7, 0.9, 1.0, True)


def test_what_the_manifest_says_itself_stands() -> None:
    said = (
        "outer_lr = 0.5\nouter_momentum = 0.3\nerror_feedback = 0.9\nnorm_clip = false\ntop_k = 32\nfinal_top_k = 96\n"
    )
    manifest = parse_manifest(SPARSE + said)
    assert implied(manifest) == ("topk", 0.5, 0.3, 0.9, False)
    assert manifest.sync.plan_codec == "topk32-96"


def test_manifest_that_says_what_is_implied_is_the_same_swarm() -> None:
    explicit = 'codec = "topk"\nouter_lr = 1.0\nouter_momentum = 0.0\nerror_feedback = 0.95\nnorm_clip = true\n'
    assert parse_manifest(SPARSE + explicit).swarm_id == parse_manifest(SPARSE).swarm_id
    assert parse_manifest(render_manifest(parse_manifest(SPARSE))) == parse_manifest(SPARSE)


@pytest.mark.parametrize("name", DENSE)
def test_plan_calls_a_dense_codec_by_its_name(name: str) -> None:
    assert parse_manifest(BEGIN + f'codec = "{name}"\n').sync.plan_codec == name


def test_manifest_may_choose_every_codec_that_there_is_and_no_other() -> None:
    assert get_args(get_args(get_type_hints(SyncSection, include_extras=True)["codec"])[0]) == (*DENSE, "topk")


def test_plan_names_the_numbers_of_values() -> None:
    assert parse_manifest(SPARSE).sync.plan_codec == "topk64-256"
    assert SyncSection(inner_steps=1, strategy="sparse", codec="topk", top_k=7, final_top_k=7).plan_codec == "topk7-7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SPARSE + 'codec = "int8"\n', 'strategy = "sparse" and codec = "topk" belong together'),
        (BEGIN + 'codec = "topk"\n', 'strategy = "sparse" and codec = "topk" belong together'),
        (SPARSE + "top_k = 257\n", "final_top_k is 256; it needs room for one contribution, 257"),
        (SPARSE + "top_k = 0\n", "top_k: expected a whole number >= 1"),
        (SPARSE + "top_k = 4097\n", "top_k: expected a whole number <= 4096"),
        (SPARSE + "final_top_k = 4097\n", "final_top_k: expected a whole number <= 4096"),
        (SPARSE + "error_feedback = 1.5\n", "error_feedback: expected a number <= 1"),
        (SPARSE + "norm_clip = 1\n", "norm_clip: expected true or false"),
        (BEGIN + "strategy = 1\n", "strategy: expected a text"),
    ],
)
def test_what_does_not_go_together_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_manifest(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
