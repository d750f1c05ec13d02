"""The control socket between real endpoints on this machine: a trio server, and the blocking client in a thread."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from shoal.node import control
from shoal.node.control import ControlServer, Handler
from shoal.node.control_client import ControlRefused, JsonValue, NodeNotRunning, request, socket_path
from shoal.protocol.errors import ConfigError, NetworkError


@asynccontextmanager
async def serving(data_dir: Path, handlers: Mapping[str, Handler]) -> AsyncIterator[Path]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(ControlServer(data_dir, handlers).run)
        nursery.cancel_scope.cancel()


async def ask(data_dir: Path, op: str, deadline_s: float = 5.0) -> dict[str, JsonValue]:
    return await trio.to_thread.run_sync(partial(request, data_dir, op, deadline_s=deadline_s))


async def say(path: Path, line: bytes) -> bytes:
    """The reply to a raw line, read to the end of the connection."""
    stream = await trio.open_unix_socket(str(path))
    async with stream:
        await stream.send_all(line)
        stream.socket.shutdown(socket.SHUT_WR)
        return b"".join([part async for part in stream])


def answering(**values: JsonValue) -> Handler:
    async def handler() -> Mapping[str, JsonValue]:
        return values

    return handler


async def test_request_returns_what_the_handler_said(tmp_path: Path) -> None:
    status = answering(round=3, loss=float("nan"), members=[{"peer_id": "a"}])
    async with serving(tmp_path, {"status": status}):
        assert await ask(tmp_path, "status") == {"round": 3, "loss": None, "members": [{"peer_id": "a"}]}


def test_request_without_a_node_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NodeNotRunning, match=r"no node is running on .*; start one with `shoal run MANIFEST "):
        request(tmp_path / "none", "status")
    (tmp_path / "swarm.toml").touch()
    with pytest.raises(NodeNotRunning, match=f"start one with `shoal run {tmp_path}/swarm.toml --data-dir {tmp_path}`"):
        request(tmp_path, "status")


async def test_request_of_an_unknown_op_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, {"status": answering(), "leave": answering()}):
        with pytest.raises(ControlRefused, match="unknown op 'dance'; this node knows leave, status"):
            await ask(tmp_path, "dance")


async def test_handler_error_becomes_the_reply(tmp_path: Path) -> None:
    async def pause() -> Mapping[str, JsonValue]:
        raise ConfigError("already paused")

    async with serving(tmp_path, {"pause": pause}):
        with pytest.raises(ControlRefused, match=r"^already paused$"):
            await ask(tmp_path, "pause")


async def test_handler_bug_is_logged_and_the_server_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> Mapping[str, JsonValue]:
        raise ZeroDivisionError("the bug")

    async with serving(tmp_path, {"broken": broken, "status": answering(round=1)}):
        with pytest.raises(ControlRefused, match="a bug in the node"):
            await ask(tmp_path, "broken")
        assert await ask(tmp_path, "status") == {"round": 1}
    assert "ZeroDivisionError: the bug" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"status\n",
        b"[]\n",
        b"{}\n",
        b'{"op":1}\n',
        b'{"op":"\xff"}\n',
        b'{"x":' + b"[" * 4000 + b"\n",
        b"\x00" * 4095 + b"\n",
        b"x" * 8192,
    ],
    ids=["empty", "bare", "list", "no op", "number", "not utf-8", "deep", "zeros", "endless"],
)
async def test_bad_request_is_answered_and_the_server_goes_on(tmp_path: Path, line: bytes) -> None:
    async with serving(tmp_path, {"status": answering(round=1)}) as path:
        reply = await say(path, line)
        assert reply.startswith(b'{"ok":false,"error":"')
        assert reply.count(b"\n") == 1
        assert b"a bug" not in reply
        assert await ask(tmp_path, "status") == {"round": 1}


async def test_connection_carries_several_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, {"status": answering(round=1)}) as path:
        reply = await say(path, b'{"op":"status"}\n{}\n{"op":"status","extra":[1]}\n{"op":')
        first, second, third = reply.splitlines()
        assert first == third == b'{"round":1,"ok":true}'
        assert second.startswith(b'{"ok":false')


async def test_client_that_hangs_up_does_not_end_the_server(tmp_path: Path) -> None:
    answered = trio.Event()

    async def slow() -> Mapping[str, JsonValue]:
        await answered.wait()
        return {"text": "x" * 1_000_000}

    async with serving(tmp_path, {"slow": slow, "status": answering(round=1)}) as path:
        stream = await trio.open_unix_socket(str(path))
        await stream.send_all(b'{"op":"slow"}\n')
        await stream.aclose()
        answered.set()
        assert await ask(tmp_path, "status") == {"round": 1}


async def test_clients_are_answered_at_the_same_time(tmp_path: Path) -> None:
    together = control.CONNECTION_LIMIT
    waiting = 0
    all_here = trio.Event()
    got: list[JsonValue] = []

    async def status() -> Mapping[str, JsonValue]:
        nonlocal waiting
        waiting += 1
        if waiting == together:
            all_here.set()
        await all_here.wait()
        return {"round": 1}

    async def client() -> None:
        got.append((await ask(tmp_path, "status"))["round"])

    async with serving(tmp_path, {"status": status}), trio.open_nursery() as clients:
        for _ in range(together):
            clients.start_soon(client)
    assert got == [1] * together


async def test_connections_beyond_the_limit_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECTION_LIMIT", 1)
    entered = trio.Event()

    async def forever() -> Mapping[str, JsonValue]:
        entered.set()
        await trio.sleep_forever()

    async with serving(tmp_path, {"forever": forever}) as path:
        stream = await trio.open_unix_socket(str(path))
        async with stream:
            await stream.send_all(b'{"op":"forever"}\n')
            await entered.wait()
            assert b"too many requests at once" in await say(path, b"")


async def test_slow_handler_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HANDLER_DEADLINE_S", 0.05)
    async with serving(tmp_path, {"hang": trio.sleep_forever}):
        with pytest.raises(ControlRefused, match=r"did not finish this in 0\.05 s"):
            await ask(tmp_path, "hang")


async def test_idle_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_DEADLINE_S", 0.05)
    async with serving(tmp_path, {}) as path, await trio.open_unix_socket(str(path)) as stream:
        assert await stream.receive_some(1) == b""


def test_request_to_a_silent_node_ends_at_its_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "control.sock"))
        silent.listen()
        with pytest.raises(NetworkError, match=r"gave no answer to .status. in 0\.05 s"):
            request(tmp_path, "status", deadline_s=0.05)


async def test_socket_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    async with serving(tmp_path, {}) as path:
        assert path == tmp_path / "control.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert sorted(os.listdir(tmp_path)) == ["control.sock"]
    assert os.listdir(tmp_path) == []


def test_socket_is_never_open_to_others_however_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens and what can be found are private already when listening begins."""
    modes: list[int] = []

    class Watched(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            modes.append(stat.S_IMODE(os.stat(self.getsockname()).st_mode))
            assert not (tmp_path / "control.sock").exists()
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Watched)
    before = os.umask(0)
    try:
        with control._bound(tmp_path):
            pass
    finally:
        os.umask(before)
    assert modes == [0o600]


async def test_socket_of_a_dead_node_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "control.sock"))
        dead.listen()
    with pytest.raises(NodeNotRunning):
        await ask(tmp_path, "status")
    async with serving(tmp_path, {"status": answering(round=1)}):
        assert await ask(tmp_path, "status") == {"round": 1}


async def test_socket_of_a_living_node_is_left_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, {"status": answering(round=1)}):
        with pytest.raises(ConfigError, match="already running on"):
            await ControlServer(tmp_path, {}).run()
        assert await ask(tmp_path, "status") == {"round": 1}


async def test_long_data_dir_gets_a_socket_in_a_private_folder(tmp_path: Path) -> None:
    data_dir = tmp_path / ("d" * 120)
    left_behind: list[Path] = []
    async with serving(data_dir, {"status": answering(round=1)}) as path:
        assert socket_path(data_dir) == path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await ask(data_dir, "status") == {"round": 1}
        left_behind.append(path)
    assert os.listdir(data_dir) == []
    assert not left_behind[0].parent.exists()
    with pytest.raises(NodeNotRunning):
        request(data_dir, "status")


async def test_long_data_dir_of_a_dead_node_is_taken_over(tmp_path: Path) -> None:
    data_dir = tmp_path / ("d" * 120)
    old_folder = tmp_path / "shoal-old"
    old_folder.mkdir()
    data_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(old_folder / "control.sock"))
    (data_dir / "control.path").write_text(str(old_folder / "control.sock"))
    async with serving(data_dir, {"status": answering(round=1)}):
        assert await ask(data_dir, "status") == {"round": 1}
    assert not old_folder.exists()


async def test_socket_in_a_folder_that_another_may_have_made_meanwhile_is_not_the_nodes(tmp_path: Path) -> None:
    data_dir, folder = tmp_path / "data", tmp_path / "shoal-old"
    data_dir.mkdir()
    folder.mkdir()
    folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as others:
        others.bind(str(folder / "control.sock"))
        others.listen()
        (data_dir / "control.path").write_text(str(folder / "control.sock"))
        with pytest.raises(NodeNotRunning):
            request(data_dir, "status", deadline_s=1.0)
        async with serving(data_dir, {"status": answering(round=1)}):
            assert await ask(data_dir, "status") == {"round": 1}
    assert (folder / "control.sock").exists()


async def test_pointer_to_anything_else_removes_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "shoal-precious" / "file"
    precious.parent.mkdir()
    precious.write_text("kept")
    (tmp_path / "control.path").write_text(str(precious))
    async with serving(tmp_path, {"status": answering(round=1)}):
        assert await ask(tmp_path, "status") == {"round": 1}
    assert precious.read_text() == "kept"
