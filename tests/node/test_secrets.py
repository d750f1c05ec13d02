"""No secret leaves its file: not into logs, events, status, reports, nor any other file of a real node's run."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import base58
import psutil  # type: ignore[import-untyped]
import pytest

from shoal.node.control_client import request
from shoal.node.dashboard.token import TOKEN_NAME
from shoal.node.discovery.credentials import keep_invite
from shoal.protocol.identity import Identity
from shoal.protocol.invites import make_invite
from shoal.protocol.manifest import load_manifest
from shoal.protocol.swarm_link import LinkInvite
from tests.core_dumps import as_in_a_shell_that_wants_cores, leaves_cores
from tests.node.forks import start_copy
from tests.node.lab import command, environment, eventually, shoal

LATER = 2**33
SECRET_FILES = ("node.key", "authority.key", "invite", TOKEN_NAME)
LEAST_BYTES = 16
"""Half of a key is a secret as well."""


def spellings(secret: bytes) -> Iterator[bytes]:
    """A secret as it could be written, whole or half."""
    for part in (secret, secret[:LEAST_BYTES], secret[-LEAST_BYTES:]):
        yield part
        yield part.hex().encode()
        yield part.hex().upper().encode()
        yield base58.b58encode(part)
        for offset in range(3):  # base64 of something longer has one of three alignments
            whole = base64.b64encode(bytes(offset) + part)
            yield whole[4 : len(whole) // 4 * 4 - 4]
            yield base64.urlsafe_b64encode(bytes(offset) + part)[4 : len(whole) // 4 * 4 - 4]
        yield repr(part)[2:-1].encode()
        yield ", ".join(map(str, part)).encode()


def leaks(data: bytes, secrets: dict[str, bytes]) -> list[str]:
    return [name for name, secret in secrets.items() if any(text in data for text in spellings(secret))]


def test_search_finds_every_spelling() -> None:
    secret = Identity.generate().private_bytes()
    for text in (
        secret,
        b"key=" + secret.hex().encode() + b".",
        base58.b58encode(secret),
        base64.b64encode(b"xyz12" + secret + b"tail"),
        base64.urlsafe_b64encode(b"x" + secret + b"tail of it"),
        repr({"key": secret}).encode(),
        json.dumps(list(secret)).encode(),
    ):
        assert leaks(b"before " + text + b" after", {"key": secret}) == ["key"]
    assert leaks(Identity.generate().private_bytes() * 100, {"key": secret}) == []


@pytest.mark.long
def test_run_of_a_real_node_writes_no_secret_anywhere(tmp_path: Path) -> None:
    folder, manifest = tmp_path / "node", tmp_path / "swarm.toml"
    made = shoal(
        "init", "-o", str(manifest), "--data-dir", str(folder), "--workload", "regression", "--admission", "invite"
    )
    assert made.returncode == 0, made.stderr
    swarm = load_manifest(manifest)
    authority, node = Identity.load(folder / "authority.key"), Identity.load(folder / "node.key")
    bearer = Identity.generate()
    invite = make_invite(authority, swarm.swarm_id, holder=bearer.peer_id, bearer=True, expires=LATER)
    keep_invite(folder, swarm.swarm_id, LinkInvite(invite=invite, key=bearer))
    secrets = {
        "node": node.private_bytes(),
        "authority": authority.private_bytes(),
        "bearer": bearer.private_bytes(),
    }
    arguments = ["run", str(manifest), "--data-dir", str(folder), "--no-mdns", "--threads", "1", "--log-level", "debug"]
    arguments += [
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--lane-listen",
        "127.0.0.1:0",
        "--test-mode",
        "--dashboard",
        "127.0.0.1:0",
    ]
    process = start_copy(command(*arguments), tmp_path / "output", tmp_path)
    assert process is not None
    try:
        events = folder / "events.jsonl"
        eventually(lambda: events.exists() and b'"certified"' in events.read_bytes(), "a round is certified")
        eventually(lambda: b"the page of this node" in (tmp_path / "output").read_bytes(), "the page is served")
        secrets["page"] = (folder / TOKEN_NAME).read_bytes().strip()
        status = json.dumps(request(folder, "status")).encode()
        left = shoal("leave", "--data-dir", str(folder)).stdout.encode()
        process.wait(60)
    finally:
        process.send_signal(signal.SIGKILL)
    searched = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"output", "events.jsonl", "swarm.toml", "agreement.log"} <= {path.name for path in searched}
    assert {path.name for path in searched} >= set(SECRET_FILES)
    for path in searched:
        if path.name not in SECRET_FILES:
            assert leaks(path.read_bytes(), secrets) == [], path
        else:
            assert path.stat().st_mode & 0o777 == 0o600, path
    assert leaks(left, secrets) == []
    assert leaks(status, secrets) == ["page"]  # for who may speak to the node over its socket, and so may order it


@pytest.mark.skipif(not leaves_cores(), reason="a crash leaves no core in the folder here")
def test_real_node_that_crashes_leaves_no_core_nor_does_its_trainer(tmp_path: Path) -> None:
    folder, manifest = tmp_path / "node", tmp_path / "swarm.toml"
    arguments = ["--data-dir", str(folder)]
    made = shoal("init", "-o", str(manifest), *arguments, "--workload", "regression")
    assert made.returncode == 0, made.stderr
    arguments += ["--listen", "/ip4/127.0.0.1/tcp/0", "--lane-listen", "127.0.0.1:0", "--no-mdns", "--dashboard", "off"]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            as_in_a_shell_that_wants_cores(command("run", str(manifest), *arguments, "--threads", "1")),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
            cwd=tmp_path,
        )
    try:
        events = folder / "events.jsonl"
        eventually(lambda: events.exists() and b'"certified"' in events.read_bytes(), "a round is certified")
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(signal.SIGSTOP)  # it starts no other trainer, and none of them ends by itself
        for child in family:
            child.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == -signal.SIGABRT
        psutil.wait_procs(family, 60)
    finally:
        process.kill()
        process.wait()
    assert [path for path in tmp_path.rglob("core*") if path.is_file()] == []
