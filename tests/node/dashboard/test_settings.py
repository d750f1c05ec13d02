"""What the page says of settings and of joining: values in force, a secret only to who asks, a code that decodes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from starlette.types import ASGIApp

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.settings import (
    QR_BORDER,
    VALUE_LIMIT_CHARS,
    QrCode,
    SettingFacts,
    join_facts,
    qr_code,
    settings_of,
)
from shoal.node.options import NodeConfig
from shoal.protocol.identity import Identity
from shoal.protocol.invites import make_invite
from shoal.protocol.manifest import Manifest
from shoal.protocol.swarm_link import LinkInvite, SwarmLink, parse_link
from tests.node.dashboard.lab import HOST, NOW, ask, site_of

TOKEN = "an-unguessable-token-of-a-test"
AUTHORITY = Identity.from_seed(bytes(32))
ORDER = {"x-shoal-order": "1", "origin": f"http://{HOST}"}
KEY = {"authorization": f"Bearer {TOKEN}"}


def manifest_of(**workload: object) -> Manifest:
    me = AUTHORITY.peer_id
    return msgspec.convert(
        {
            "swarm": {"name": "reef", "founders": [me], "authority": me, "admission": "invite"},
            "workload": {"name": "text", **workload},
            "sync": {"inner_steps": 5},
        },
        Manifest,
    )


def invited(manifest: Manifest) -> SwarmLink:
    """A link that holds a secret."""
    bearer = Identity.from_seed(bytes([1] * 32))
    invite = make_invite(AUTHORITY, manifest.swarm_id, holder=bearer.peer_id, bearer=True, expires=2_000_000_000)
    return SwarmLink(swarm=manifest.swarm_id, invite=LinkInvite(invite=invite, key=bearer))


def drawn(code: QrCode, path: Path, *, scale: int = 4) -> None:
    """The code as a picture, as a browser fills its path."""
    dark = [[False] * code.size for _ in range(code.size)]
    for x, y, width, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", code.path):
        assert width == back
        dark[int(y)][int(x) : int(x) + int(width)] = [True] * int(width)
    rows = [bytes(0 if module else 255 for module in row for _ in range(scale)) for row in dark for _ in range(scale)]
    path.write_bytes(b"P5 %d %d 255\n" % (code.size * scale, code.size * scale) + b"".join(rows))


def read_code(path: Path) -> str:
    """What a camera would read; skips the test where there is none to try it with."""
    if shutil.which("zbarimg") is None:
        pytest.skip("there is no zbarimg (Debian: zbar-tools)")
    done = subprocess.run(["zbarimg", "--raw", "-q", str(path)], capture_output=True, check=True, timeout=60)
    return done.stdout.decode().removesuffix("\n")


# -- the line ------------------------------------------------------------------------------------------------------


def test_a_secret_is_shown_to_who_asks_for_it_alone() -> None:
    manifest = manifest_of()
    link = invited(manifest)
    hidden = join_facts(link, manifest, secret=False, data=False)
    assert (hidden.line, hidden.secret, hidden.admits) == (None, True, True)
    shown = join_facts(link, manifest, secret=True, data=False)
    assert shown.line is not None
    held = parse_link(shown.line.removeprefix("shoal run '").removesuffix("'")).invite
    assert held is not None
    assert link.invite is not None
    assert held.invite == link.invite.invite


def test_a_line_without_a_secret_is_shown_and_says_what_it_allows() -> None:
    manifest = manifest_of(name="sine:Sine")
    facts = join_facts(SwarmLink(swarm=manifest.swarm_id), manifest, secret=False, data=False)
    assert facts.line is not None
    assert facts.line.endswith("' --allow-workload sine:Sine")
    assert (facts.secret, facts.admits, facts.admission) == (False, False, "invite")


@pytest.mark.parametrize("length", [20, 700, 2953])
def test_a_code_holds_the_whole_line(tmp_path: Path, length: int) -> None:
    line = ("shoal run 'shoal:" + "aZ09-_" * 500)[: length - 1] + "'"
    code = qr_code(line)
    assert code is not None
    drawn(code, tmp_path / "code.pgm")
    assert read_code(tmp_path / "code.pgm") == line


def test_a_code_has_its_finders_where_a_border_ends() -> None:
    code = qr_code("shoal run 'shoal:x'")
    assert code is not None
    assert code.path.startswith(f"M{QR_BORDER} {QR_BORDER}h7v1h-7z")
    assert f"M{code.size - QR_BORDER - 7} {QR_BORDER}h7v1h-7z" in code.path


def test_a_line_too_long_for_a_code_has_none() -> None:
    assert qr_code("x" * 2954) is None


# -- settings ------------------------------------------------------------------------------------------------------


def test_settings_are_those_in_force_by_the_names_that_users_give_them(tmp_path: Path) -> None:
    manifest = manifest_of(options={"width": 64})
    config = NodeConfig(manifest=manifest, data_dir=tmp_path, mdns=False, threads=2, join=("/ip4/192.0.2.1/tcp/1",))
    amended = msgspec.structs.replace(manifest, sync=msgspec.structs.replace(manifest.sync, inner_steps=7))
    found = settings_of(config, caps=(5_000_000, None), in_force=amended, amended=["sync.inner_steps"])
    node = {one.name: one for one in found.node}
    assert node["--threads"] == SettingFacts(name="--threads", value="2", changed=True)
    assert node["--no-mdns"].changed
    assert "--mdns" not in node
    assert node["--take-over"] == SettingFacts(name="--take-over", value="no")
    assert node["--forget-promises"] == SettingFacts(name="--forget-promises", value="no")
    assert node["--relay"] == SettingFacts(name="--relay", value="")
    assert node["--max-upload"] == SettingFacts(name="--max-upload", value="5,000,000 B/s", changed=True)
    assert node["--max-download"] == SettingFacts(name="--max-download", value="–")
    assert (node["--dashboard"].value, node["--lane-listen"].value) == ("127.0.0.1:8420", "0.0.0.0:0")
    assert node["--join"].value == "/ip4/192.0.2.1/tcp/1"
    assert node["--data-dir"].value == str(tmp_path)
    assert not {"--hold", "--test-mode"} & set(node)
    swarm = {one.name: one for one in found.swarm}
    assert swarm["sync.inner_steps"] == SettingFacts(name="sync.inner_steps", value="7", changed=True)
    assert swarm["workload.options.width"] == SettingFacts(name="workload.options.width", value="64")
    assert swarm["swarm.admission"].value == '"invite"'
    assert not any(one.changed for name, one in swarm.items() if name != "sync.inner_steps")


def test_long_values_are_cut(tmp_path: Path) -> None:
    config = NodeConfig(manifest=manifest_of(), data_dir=tmp_path / ("x" * 400))
    found = settings_of(config, caps=(None, None), in_force=config.manifest, amended=())
    assert max(len(one.value) for one in (*found.node, *found.swarm)) == VALUE_LIMIT_CHARS + 1


# -- to whom -------------------------------------------------------------------------------------------------------


def app_of(swarm: SyntheticSwarm, host: str = "127.0.0.1") -> ASGIApp:
    return site_of(swarm).app(token=TOKEN, host=host)


async def test_who_may_look_sees_settings_and_an_open_swarms_line_with_its_code() -> None:
    app = app_of(SyntheticSwarm(peers=1, now=NOW, rounds=1))
    found = (await ask(app, "/api/joining")).json()
    assert found["line"].startswith("shoal run 'shoal:A")
    assert found["qr"] == msgspec.to_builtins(qr_code(found["line"]))
    settings = (await ask(app, "/api/settings")).json()
    assert settings["swarm"] == [{"name": "sync.codec", "value": '"int8"', "changed": True}]


async def test_a_line_with_a_secret_takes_the_token_even_on_loopback() -> None:
    app = app_of(SyntheticSwarm(peers=1, now=NOW, rounds=1, invites=True))
    hidden = (await ask(app, "/api/joining")).json()
    assert (hidden["line"], hidden["qr"], hidden["secret"]) == (None, None, True)
    assert (await ask(app, "/api/joining", headers=KEY)).json()["line"] is None
    for headers in (ORDER, KEY, {**ORDER, "authorization": "Bearer another"}):
        answer = await ask(app, "/api/joining", method="POST", headers=headers)
        assert answer.status in (401, 403)
        assert b"shoal:A" not in answer.body
    shown = await ask(app, "/api/joining", method="POST", headers={**ORDER, **KEY})
    assert shown.json()["line"].startswith("shoal run 'shoal:A")
    assert shown.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/api/joining", "/api/settings"])
async def test_beyond_this_machine_neither_is_told_without_the_token(path: str) -> None:
    app = app_of(SyntheticSwarm(peers=1, now=NOW, rounds=1), host="192.0.2.7")
    assert (await ask(app, path)).status == 401
    assert (await ask(app, path, headers=KEY)).status == 200
