"""Manifest: errors that a person can act on, and a SwarmId that moves exactly when what is agreed moves."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import (
    MANIFEST_LIMIT_BYTES,
    InnerSection,
    Manifest,
    NetworkSection,
    RoundSection,
    SwarmSection,
    load_manifest,
    parse_manifest,
    render_manifest,
    validate_manifest,
)
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.manifest_text import render
from shoal.protocol.manifest_withdrawn import WITHDRAWN, is_gone
from shoal.protocol.manifest_workload import WorkloadSection
from shoal.protocol.wire import SwarmId, canonical

FUZZ = settings(derandomize=True)
"""The same examples every time, however busy the machine."""

ALICE = Identity.from_seed(bytes(range(32))).peer_id
BOB = Identity.from_seed(bytes(32)).peer_id

MINIMAL = f"""
[swarm]
name = "test"
founders = ["{ALICE}"]
[workload]
name = "text"
[sync]
inner_steps = 20
"""
STREAMING = MINIMAL + "strategy = 'streaming'\n"
GOLDEN_SWARM_ID = "2abe72594f95f27cc89591ce31b2e7fc23452a925a60b3121688122cc4db3e31"


def minimal() -> Manifest:
    return parse_manifest(MINIMAL)


def test_minimal_manifest_has_the_documented_defaults() -> None:
    manifest = minimal()
    assert manifest.swarm.authority == ALICE
    assert manifest.swarm.admission == "open"
    assert (manifest.sync.strategy, manifest.sync.codec, manifest.sync.inner_steps) == ("diloco", "int8", 20)
    assert (manifest.sync.outer_lr, manifest.sync.outer_momentum) == (0.7, 0.9)
    assert manifest.inner == InnerSection(optimizer="adamw", betas=(0.9, 0.95), warmup_tokens=0)
    assert (manifest.round.chunk_values, manifest.round.staleness_rounds) == (262_144, 3)
    assert (manifest.round.reduce_deadline_s, manifest.round.durability) == (120.0, "disk")
    assert manifest.network.bootstrap == []


def test_swarm_id_golden() -> None:
    assert minimal().swarm_id.hex() == GOLDEN_SWARM_ID
    assert minimal().swarm_id == blake3(minimal().to_canonical()).digest()


CHANGES = [
    ("swarm", {"name": "other"}),
    ("swarm", {"founders": [ALICE, BOB]}),
    ("swarm", {"authority": BOB}),
    ("swarm", {"admission": "allowlist"}),
    ("swarm", {"admission": "allowlist", "allow": [BOB]}),
    ("workload", {"name": "regression"}),
    ("workload", {"seed": 1}),
    ("workload", {"options": {"layers": 2}}),
    ("sync", {"inner_steps": 21}),
    ("sync", {"outer_lr": 0.8}),
    ("sync", {"outer_momentum": 0.8}),
    ("sync", {"codec": "fp32"}),
    ("sync", {"overlap_steps": 1}),
    ("sync", {"late_steps": 1}),
    ("sync", {"strategy": "streaming"}),
    ("sync", {"strategy": "streaming", "fragments": 4}),
    ("sync", {"strategy": "streaming", "mixing": 0.0}),
    ("sync", {"strategy": "sparse", "codec": "topk"}),
    ("sync", {"strategy": "sparse", "codec": "topk", "top_k": 32}),
    ("sync", {"strategy": "sparse", "codec": "topk", "final_top_k": 128}),
    ("sync", {"strategy": "gossip", "codec": "bf16", "norm_clip": False, "outer_momentum": 0.5}),
    ("sync", {"strategy": "gossip", "codec": "bf16", "norm_clip": False, "outer_momentum": 0.5, "gossip_gamma": 0.7}),
    ("sync", {"error_feedback": 0.5}),
    ("sync", {"norm_clip": False}),
    ("sync", {"aggregate": "median"}),
    ("sync", {"aggregate": "trimmed", "trim": 0.1}),
    ("sync", {"balance": False}),
    ("inner", {"lr": 0.1}),
    ("inner", {"weight_decay": 0.0}),
    ("inner", {"betas": (0.9, 0.99)}),
    ("inner", {"warmup_tokens": 1}),
    ("inner", {"clip_norm": 2.0}),
    ("inner", {"schedule": "cosine", "decay_tokens": 1}),
    ("inner", {"schedule": "linear", "decay_tokens": 1}),
    ("inner", {"schedule": "linear", "decay_tokens": 2}),
    ("inner", {"schedule": "linear", "decay_tokens": 1, "min_lr": 1e-4}),
    ("round", {"chunk_values": 4096}),
    ("round", {"grace_s": 1.0}),
    ("round", {"weight_cap": 2.0}),
    ("round", {"staleness_rounds": 0}),
    ("round", {"reduce_deadline_s": 60.0}),
]


def changed(section: str, values: dict[str, object]) -> Manifest:
    manifest = minimal()
    table = msgspec.structs.replace(getattr(manifest, section), **values)
    return msgspec.structs.replace(manifest, **{section: table})


def test_swarm_id_depends_on_every_agreed_field() -> None:
    ids = {changed(section, values).swarm_id for section, values in CHANGES} | {minimal().swarm_id}
    assert len(ids) == len(CHANGES) + 1
    touched = {(section, key) for section, values in CHANGES for key in values}
    untouchable = {("inner", "optimizer")}  # one value is built
    untouchable |= {setting for setting in WITHDRAWN if is_gone(*setting)}
    every = {
        (section.name, key)
        for section in msgspec.structs.fields(Manifest)
        if section.name not in ("network", "rollouts", "audit", "membership", "agreement")
        for key in getattr(minimal(), section.name).__struct_fields__
    }
    assert touched == every - untouchable


def test_swarm_id_ignores_bootstrap_spelling_and_order() -> None:
    network = '[network]\nbootstrap = ["/ip4/192.0.2.1/tcp/4001"]\n'
    explicit = MINIMAL.replace("inner_steps = 20", "outer_lr = 0.70\ninner_steps = 20")
    reordered = "[sync]\ninner_steps = 20\n" + MINIMAL.split("[sync]")[0]
    for text in (MINIMAL + network, explicit, reordered, network + "# comment\n" + MINIMAL):
        assert parse_manifest(text).swarm_id == minimal().swarm_id


def test_swarm_id_does_not_depend_on_how_a_float_was_given() -> None:
    whole = changed("round", {"grace_s": 3})
    assert whole.swarm_id == changed("round", {"grace_s": 3.0}).swarm_id
    assert parse_manifest(render_manifest(whole)).swarm_id == whole.swarm_id


def test_streaming_without_more_is_the_paper_s() -> None:
    """Streaming DiLoCo, arXiv 2501.18512: 4 bits, α = 0.5, some overlap."""
    sync = parse_manifest(STREAMING).sync
    assert (sync.codec, sync.fragments, sync.round_steps, sync.overlap_steps) == ("int4", 4, 5, 2)
    assert sync.late_steps == sync.inner_steps == 20
    assert (sync.mixing, sync.applied_mixing) == (0.5, 0.5)
    assert (minimal().sync.round_steps, minimal().sync.applied_mixing, minimal().sync.late_steps) == (20, None, 0)
    explicit = parse_manifest(
        STREAMING + "fragments = 2\noverlap_steps = 10\nlate_steps = 0\ncodec = 'bf16'\nmixing = 0\n"
    ).sync
    assert explicit.late_steps == 0
    assert (explicit.codec, explicit.round_steps, explicit.overlap_steps) == ("bf16", 10, 10)
    assert explicit.applied_mixing == 0


@pytest.mark.parametrize(("steps", "fragments"), [(20, 4), (30, 3), (25, 5), (22, 2), (7, 1)])
def test_fragments_that_nobody_asked_for_divide_the_steps(steps: int, fragments: int) -> None:
    sync = parse_manifest(STREAMING.replace("inner_steps = 20", f"inner_steps = {steps}")).sync
    assert (sync.fragments, sync.round_steps) == (fragments, steps // fragments)


@pytest.mark.parametrize(("steps", "fragments", "overlap"), [(4, 4, 1), (20, 10, 2), (5, 5, 1), (300, 4, 2)])
def test_overlap_that_nobody_asked_for_is_no_longer_than_a_round(steps: int, fragments: int, overlap: int) -> None:
    sync = parse_manifest(STREAMING.replace("inner_steps = 20", f"inner_steps = {steps}\nfragments = {fragments}")).sync
    assert sync.overlap_steps == overlap
    with pytest.raises(ConfigError, match=f"between two rounds there are only {steps // fragments} steps"):
        parse_manifest(
            STREAMING.replace(
                "inner_steps = 20", f"inner_steps = {steps}\noverlap_steps = {steps}\nfragments = {fragments}"
            )
        )


# --- errors ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "[snyc]\n", "swarm.toml: unknown [snyc]; did you mean 'sync'?"),
        ("sead = 1\n" + MINIMAL, "swarm.toml: unknown key 'sead' outside any section"),
        (MINIMAL + "outer_lrr = 1\n", "swarm.toml: [sync] unknown key 'outer_lrr'; did you mean 'outer_lr'?"),
        (MINIMAL + "zzz = 1\n", "[sync] unknown key 'zzz'; it knows inner_steps, strategy"),
        (MINIMAL + "codec = 'int9'\n", "[sync] codec: 'int9' is none of fp32, bf16, int8"),
        (MINIMAL.replace("= 20", "= '20'"), "[sync] inner_steps: expected a whole number, got a text"),
        (MINIMAL.replace("= 20", "= 2.5"), "[sync] inner_steps: expected a whole number, got a number"),
        (MINIMAL.replace("= 20", "= true"), "[sync] inner_steps: expected a whole number, got true or false"),
        (MINIMAL.replace("= 20", "= 0"), "[sync] inner_steps: expected a whole number >= 1"),
        (MINIMAL.replace("inner_steps = 20", ""), "[sync] needs the key inner_steps. H: optimizer steps"),
        (MINIMAL.split("[sync]")[0], "swarm.toml: the section [sync] is missing"),
        ("sync = 3\n" + MINIMAL.split("[sync]")[0], "[sync] expected a table, got a whole number"),
        (MINIMAL + "outer_lr = nan\n", "[sync] outer_lr: expected a finite number"),
        (MINIMAL + "[inner]\nbetas = [0.9, inf]\n", "[inner] betas: expected a finite number"),
        (MINIMAL + "[inner]\nbetas = [0.9]\n", "[inner] betas: expected a list of length 2, got 1"),
        (MINIMAL + "[inner]\nlr = 0\n", "[inner] lr: expected a number > 0"),
        (MINIMAL + "[round]\nchunk_values = 5000\n", "[round] chunk_values: expected a whole number that's a"),
        (MINIMAL + "[round]\nweight_cap = 0.5\n", "[round] weight_cap: expected a number >= 1"),
        (MINIMAL + "fragments = 4\n", "[sync] fragments and mixing have a meaning with strategy"),
        (MINIMAL + "mixing = 0.2\n", "[sync] fragments and mixing have a meaning with strategy"),
        (STREAMING + "fragments = 3\n", "inner_steps is 20, which 3 fragments do not divide; take inner_steps = 21"),
        (STREAMING + "overlap_steps = 6\n", "overlap_steps is 6; between two rounds there are only 5 steps"),
        (MINIMAL + "overlap_steps = 21\n", "overlap_steps is 21; between two rounds there are only 20 steps"),
        (MINIMAL + "overlap_steps = -1\n", "[sync] overlap_steps: expected a whole number >= 0"),
        (STREAMING + "mixing = 1.5\n", "[sync] mixing: expected a number <= 1"),
        (MINIMAL + "strategy = 'sparse'\noverlap_steps = 1\n", "overlap_steps has a meaning with strategy ="),
        (MINIMAL + "strategy = 'magic'\n", "[sync] strategy: 'magic' is none of diloco, ddp, streaming"),
        (MINIMAL.replace("12D3", "13D3"), "[swarm] founders: '13D3KooW"),
        (MINIMAL.replace(f'"{ALICE}"', ""), "[swarm] founders: expected a list of length >= 1"),
        (MINIMAL.replace(f'"{ALICE}"', f'"{ALICE}", "{ALICE}"'), "[swarm] founders names a peer twice"),
        (MINIMAL.replace("[workload]", "allow = ['x']\n[workload]"), "[swarm] allow: 'x' is not a PeerId"),
        (MINIMAL.replace("[workload]", f"allow = ['{BOB}']\n[workload]"), "allow has a meaning with admission"),
        (MINIMAL.replace('"text"', '"a/b"'), "[workload] name: has characters or a form"),
        (MINIMAL.replace('"text"', "2020-01-01"), "[workload] name: expected a text"),
        (MINIMAL.replace('"text"', '"text"\noptions = {a = [1]}'), "[workload] options: expected a text, a"),
        (MINIMAL.replace('"text"', '"text"\noptions = {"A b" = 1}'), "options: 'A b' is no name"),
        (MINIMAL.replace('"text"', '"text"\noptions = {a = nan}'), "options: a is not a finite number"),
        (MINIMAL.replace('"text"', f'"text"\noptions = {{a = {2**64}}}'), "options: a does not fit 64 bits"),
        (MINIMAL + "[network]\nbootstrap = ['']\n", "[network] bootstrap: expected a text of length >= 1"),
        ("[swarm\n", "swarm.toml: not valid TOML"),
        ("a = " + "[" * 1000, "swarm.toml: nested deeper than 16 tables or lists"),
        ("a = " + "[" * 100_000, "swarm.toml is larger than 16384 bytes"),
        ("", "swarm.toml: the section [swarm] is missing"),
    ],
)
def test_parse_says_in_one_line_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "`int`" not in str(caught.value)


def test_load_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "swarm.toml"
    with pytest.raises(ConfigError, match="shoal init"):
        load_manifest(path)
    path.write_text(MINIMAL)
    assert load_manifest(path) == minimal()
    path.write_text(MINIMAL + "codecc = 1")
    with pytest.raises(ConfigError, match=f"{path}: .sync. unknown key 'codecc'"):
        load_manifest(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_manifest(path)
    path.write_bytes(b"#" * (MANIFEST_LIMIT_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_manifest(path)
    with pytest.raises(ConfigError, match=f"is a folder; give the file that .*, like {path}"):
        load_manifest(tmp_path)
    with pytest.raises(ConfigError, match=f"there is no .*3.toml; did you mean {path}"):
        load_manifest(tmp_path / "swarm3.toml")
    with pytest.raises(ConfigError, match=r"there is no .*other.toml; check the path"):
        load_manifest(tmp_path / "other.toml")


def test_tables_made_in_code_have_their_unknown_keys_named_like_a_file_s() -> None:
    tables = tomllib.loads(MINIMAL)
    tables["sync"]["stratgy"] = "diloco"
    with pytest.raises(ConfigError, match=r"the scenario: .sync. unknown key 'stratgy'; did you mean 'strategy'"):
        validate_manifest(tables, source="the scenario")


# --- writing ---

numbers = st.floats(1e-9, 1.0)
options = st.dictionaries(
    st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z"),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans(),
    max_size=5,
)
manifests = st.builds(
    Manifest,
    swarm=st.builds(
        SwarmSection,
        name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}\Z"),
        founders=st.sampled_from([[ALICE], [ALICE, BOB]]),
        authority=st.sampled_from([ALICE, BOB]),
        admission=st.sampled_from(["open", "allowlist"]),
        allow=st.just([]),
    ),
    workload=st.builds(WorkloadSection, name=st.just("my.package:Class"), seed=st.just(3), options=options),
    sync=st.builds(SyncSection, inner_steps=st.integers(1, 99), strategy=st.just("diloco"), outer_lr=numbers),
    inner=st.builds(InnerSection, lr=numbers, betas=st.tuples(st.just(0.5), numbers.map(lambda x: x / 2))),
    round=st.builds(RoundSection, chunk_values=st.integers(1, 99).map(lambda n: n * 4096), grace_s=numbers),
    network=st.builds(NetworkSection, bootstrap=st.lists(st.text("/ip4.:\"'\\ü", min_size=1, max_size=50), max_size=5)),
)


@given(manifests)
@settings(FUZZ, max_examples=50)
def test_rendered_manifest_parses_back_to_an_equal_one(manifest: Manifest) -> None:
    text = render_manifest(manifest)
    assert parse_manifest(text) == manifest
    assert parse_manifest(text).swarm_id == manifest.swarm_id


def test_rendered_manifest_explains_every_key() -> None:
    lines = render_manifest(minimal()).splitlines()
    assert tomllib.loads("\n".join(lines))
    for before, line in pairwise(["", *lines]):
        if line and not line.startswith("#"):
            assert before.startswith("#"), f"no comment above {line!r}"


def test_render_refuses_a_manifest_out_of_range() -> None:
    with pytest.raises(ConfigError, match="inner_steps"):
        render_manifest(changed("sync", {"inner_steps": 0}))


# --- from peers ---


def test_manifest_from_a_peer_is_accepted_by_its_swarm_id_only() -> None:
    manifest = parse_manifest(MINIMAL + '[network]\nbootstrap = ["/ip4/192.0.2.1/tcp/4001"]\n')
    received = Manifest.from_canonical(manifest.to_canonical(), manifest.swarm_id, peer=BOB)
    assert received == minimal()  # without the addresses
    for section, values in CHANGES:
        with pytest.raises(RemoteError, match="another swarm") as caught:
            Manifest.from_canonical(changed(section, values).to_canonical(), manifest.swarm_id, peer=BOB)
        assert caught.value.peer == BOB


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("sync", {"inner_steps": 0}),
        ("sync", {"strategy": "ddp"}),
        ("sync", {"extra": 1}),
        ("swarm", {"founders": []}),
        ("swarm", {"founders": ["nobody"]}),
        ("swarm", {"founders": [ALICE] * 65}),
        ("workload", {"options": {"a": []}}),
        ("workload", {"name": "os:system; rm"}),
        ("network", {"bootstrap": ["/ip4/192.0.2.1/tcp/4001"]}),
    ],
)
def test_manifest_from_a_peer_is_held_to_the_same_rules(section: str, values: dict[str, object]) -> None:
    tables = msgspec.to_builtins(minimal())
    tables[section] |= values
    data = canonical(tables)
    with pytest.raises(RemoteError):
        Manifest.from_canonical(data, SwarmId(blake3(data).digest()), peer=BOB)


def test_manifest_from_a_peer_cannot_smuggle_in_addresses() -> None:
    tables = msgspec.to_builtins(minimal()) | {"network": {"bootstrap": ["/ip4/192.0.2.1/tcp/4001"]}}
    with pytest.raises(RemoteError, match="nobody vouches for"):
        Manifest.from_canonical(canonical(tables), minimal().swarm_id, peer=BOB)


# --- size ---


def with_allowed(count: int, name_chars: int = 1) -> dict[str, object]:
    """Tables of a manifest that names so many peers."""
    tables: dict[str, dict[str, object]] = msgspec.to_builtins(minimal())
    seeds = [bytes([number % 256, number // 256]) + bytes(30) for number in range(count)]
    allow = [Identity.from_seed(seed).peer_id for seed in seeds]
    tables["swarm"] |= {"admission": "allowlist", "allow": allow, "name": "n" * name_chars}
    return dict(tables)


def test_manifest_leaves_its_comments_out_where_they_have_no_room() -> None:
    manifest = validate_manifest(with_allowed(200), source="it")
    text = render_manifest(manifest)
    assert "#" not in text
    assert len(text.encode()) <= MANIFEST_LIMIT_BYTES < len(render(manifest).encode())
    assert parse_manifest(text) == manifest
    assert Manifest.from_canonical(manifest.to_canonical(), manifest.swarm_id, peer=BOB) == manifest


def test_manifest_that_no_node_could_keep_as_a_file_comes_from_nowhere() -> None:
    fits = max(n for n in range(200, 300) if len(render(_converted(n), commented=False)) <= MANIFEST_LIMIT_BYTES)
    for count in (fits, fits + 1):
        manifest = _converted(count)
        data = manifest.to_canonical()
        assert len(data) < MANIFEST_LIMIT_BYTES  # as canonical bytes both have room
        text = f"[swarm]\nname = 'n'\nfounders = ['{ALICE}']\nadmission = 'allowlist'\nallow = [" + ",".join(
            f"'{peer}'" for peer in manifest.swarm.allow
        )
        text += "]\n[workload]\nname = 'text'\n[sync]\ninner_steps = 20\n"
        assert len(text) < MANIFEST_LIMIT_BYTES
        if count == fits:
            assert parse_manifest(text) == manifest
            assert Manifest.from_canonical(data, manifest.swarm_id, peer=BOB) == manifest
            continue
        with pytest.raises(ConfigError, match="it would be larger than 16384 bytes"):
            parse_manifest(text, source="it")
        with pytest.raises(RemoteError, match="more than 16384 bytes as a file"):
            Manifest.from_canonical(data, manifest.swarm_id, peer=BOB)


def _converted(count: int) -> Manifest:
    return msgspec.convert(with_allowed(count), Manifest)


def test_manifest_of_a_peer_is_no_larger_than_a_file_s() -> None:
    data = minimal().to_canonical()
    with pytest.raises(RemoteError, match="the limit is 16384"):
        Manifest.from_canonical(data + bytes(MANIFEST_LIMIT_BYTES), minimal().swarm_id, peer=BOB)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (".".join("a" * 8000) + " = 1", "nested deeper than 16"),
        ("outer_lr = " + "9" * 5000, "a number has too many digits"),
        ("outer_lr = " + "9" * 4000, "Number out of range"),
        ("outer_lr = 0x" + "f" * 5000, "Number out of range"),
        ("outer_lr = " + "[" * 900 + "]" * 900, "nested deeper than 16"),
    ],
)
def test_manifest_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, more: str, said: str) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text(MINIMAL + more)
    with pytest.raises(ConfigError, match=said) as caught:
        load_manifest(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
