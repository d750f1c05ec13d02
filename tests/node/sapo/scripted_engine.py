"""An engine that does as it is told, connection by connection: for what a real one does only when it is ill."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from shoal.node.option import HostPort

Act = Callable[[socket.socket, dict[str, Any]], None]
"""What is done on a connection with the request that came, before it is closed."""
READ_DEADLINE_S = 60.0


def answer(reply: object, status: int = 200) -> Act:
    """A whole answer."""

    def act(stream: socket.socket, asked: dict[str, Any]) -> None:
        stream.sendall(http(json.dumps(reply).encode(), status))

    return act


def completions(*texts: str, policy: str = "1", log_probs: bool = True, **more: object) -> Act:
    """One completion of each text, by this policy; as many as were asked for, if they are more."""

    def act(stream: socket.socket, asked: dict[str, Any]) -> None:
        drawn = {"logprobs": {"token_logprobs": [-0.5, -1.0]}, "token_ids": [3, 1]} if log_probs else {}
        choices = [{"index": at, "text": text, "finish_reason": "stop", **drawn} for at, text in enumerate(texts)]
        reply = {"choices": choices[: asked.get("n", 1)], "metadata": {"weight_version": policy}, **more}
        stream.sendall(http(json.dumps(reply).encode()))

    return act


def raw(data: bytes) -> Act:
    """Some bytes, and then the end."""
    return lambda stream, asked: stream.sendall(data)


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d Some\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class ScriptedEngine:
    """A context manager. asked: the requests that came. then: what it does, for ever, when the script is over."""

    def __init__(self, script: Sequence[Act], *, then: Act) -> None:
        self.asked: list[dict[str, Any]] = []
        self.then = then
        self._script = list(script)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.released = threading.Event()

    @property
    def address(self) -> HostPort:
        return HostPort(*self._listening.getsockname()[:2])

    def hang(self, stream: socket.socket, asked: dict[str, Any]) -> None:
        """Answer nothing until the test is over."""
        self.released.wait(READ_DEADLINE_S)

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # whoever accepts sees it
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                stream, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(stream,), daemon=True).start()

    def _answer(self, stream: socket.socket) -> None:
        with stream:
            stream.settimeout(READ_DEADLINE_S)
            try:
                asked = _request(stream)
                self.asked.append(asked)
                act = self._script.pop(0) if self._script else self.then
                act(stream, asked)
            except OSError:
                return


def _request(stream: socket.socket) -> dict[str, Any]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(stream)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += _more(stream)
    found: dict[str, Any] = json.loads(body)
    return found


def _more(stream: socket.socket) -> bytes:
    data = stream.recv(65536)
    if not data:
        raise ConnectionError("who asked is gone")
    return data
