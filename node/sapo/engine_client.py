"""The client of an engine: a server of OpenAI's completions that draws a sampler's groups.

Every group comes whole from one policy. An engine may take another policy at any time, between two replies too, so each
reply says by which it was drawn, and what came of a group before a change is thrown away.

    no connection, broken off, busy    waited for, with pauses that grow; the user is told why nothing comes
    no answer within the deadline,     a fault; after FAULT_LIMIT of them, or when the deadline is over, the group is
    or one that is no answer           given up: another task may do
    its policy changed                 the group begins anew, CHANGE_LIMIT times
    refuses what not all engines do    asked for one completion at a time, then for no log-probabilities either,
                                       for FORM_KEPT requests

One connection a request, plain HTTP/1.1 by h11. Several threads may draw groups at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import h11
import msgspec

from shoal.node.option import HostPort
from shoal.node.sapo.completions import (
    Completion,
    CompletionsRequest,
    Prompt,
    Reply,
    loaded_in,
    read_reply,
    refusal_in,
    together,
)
from shoal.node.sapo.daemon_line import Stopped
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.rollouts import SAMPLING_SEEDS

CONNECT_DEADLINE_S = 10.0
REQUEST_DEADLINE_S = 600.0
"""From connecting to the last byte, and of a group's replies together: a group on a slow machine must fit, and two
within the time that the daemon waits for a sign of life."""
SLICE_S = 0.25
"""So long a wait on the engine goes before the daemon's wish to stop is looked at."""
PAUSE_S, PAUSE_LIMIT_S = 0.5, 30.0
FAULT_LIMIT = 3
FORM_KEPT = 64
"""Requests for which an engine that refused a form is asked in another, before the first is tried again."""
CHANGE_LIMIT = 3
HEADERS_LIMIT_BYTES = 16 << 10
READ_BYTES = 64 << 10
COMPLETE, LOAD = "/v1/completions", "/v1/load"
LOADED_LIMIT_BYTES = 64 << 10
BUSY: Final = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
UNKNOWING: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)

T = TypeVar("T")


class EngineClient:
    """Draws groups from one engine.

    stopping: set once nothing is wanted any more, which raises Stopped in whoever draws. rest: returns when the user
    wants no pause. told: takes why nothing comes, a line.
    """

    def __init__(
        self,
        address: HostPort,
        *,
        max_tokens: int,
        temperature: float,
        stopping: threading.Event,
        rest: Callable[[], None],
        told: Callable[[str], None],
        deadline_s: float = REQUEST_DEADLINE_S,
    ) -> None:
        self._address = address
        self._max_tokens, self._temperature = max_tokens, temperature
        self._stopping, self._rest, self._told = stopping, rest, told
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._pauses = Backoff(PAUSE_S, PAUSE_LIMIT_S)
        self._form = self._asked = self._resets = 0
        """The form in which it is asked; how many replies came in it; how often that was begun anew."""

    def group(self, prompt: Prompt, count: int, seed: int, *, max_tokens: int | None = None) -> Reply | None:
        """Draw `count` completions of `prompt`, all by one policy; None if the engine does not manage. Raises Stopped.

        seed: of the first completion; the others' follow it. max_tokens: of each, if fewer than usual.
        """
        most = self._max_tokens if max_tokens is None else max_tokens
        came: list[Completion] = []
        policy, tokens, faults, changes = "", 0, 0, 0
        asked_s = 0.0
        while len(came) < count:
            self._rest()
            if changes > CHANGE_LIMIT:
                self._tell(f"it named another policy {changes} times amid a group")
                return None
            if asked_s > self._deadline_s:
                self._tell(f"a group took it more than {self._deadline_s:g} s; let it be faster, or draw fewer tokens")
                return None
            if faults == FAULT_LIMIT:
                return None  # each was told of
            began = time.monotonic()
            try:
                wanted = min(count - len(came), together(most))
                reply = self._ask(prompt, wanted, (seed + len(came)) % SAMPLING_SEEDS, most)
            except NetworkError as error:
                self._pause(error)
                continue
            except RemoteError as error:
                faults += 1
                asked_s += time.monotonic() - began
                self._pause(error)
                continue
            asked_s += time.monotonic() - began
            with self._lock:
                self._pauses.reset()
            if came and reply.policy != policy:
                changes += 1
                came, tokens = [], 0
                continue
            policy = reply.policy
            came += reply.completions
            tokens += reply.tokens
        return Reply(policy=policy, completions=tuple(came), tokens=tokens)

    def load(self, model: Path, version: int) -> str:
        """Have the engine take the model in a folder from now on, and return how it names that policy.

        Raises, after a pause in which there may have come a newer one, NetworkError if it is away, RemoteError if it
        refuses; Stopped. It is asked as `shoal engine` is, which reads what lies on its own machine.
        """
        body = msgspec.json.encode({"model": str(model), "version": version})
        self._rest()
        try:
            status, answer = self._post(body, target=LOAD, limit_bytes=LOADED_LIMIT_BYTES)
            if status != HTTPStatus.OK:
                raise RemoteError(f"it does not take the swarm's policy: {status} {refusal_in(answer)}".rstrip())
            policy = loaded_in(answer)
        except (NetworkError, RemoteError) as error:
            self._pause(error)
            raise
        with self._lock:
            self._pauses.reset()
        return policy

    def _tell(self, why: object) -> None:
        self._told(f"the engine at http://{self._address}: {why}")

    def _pause(self, error: Exception) -> None:
        """Say why nothing came, and wait before the next try. Raises Stopped."""
        with self._lock:
            pause_s = self._pauses.next_s()
        self._tell(error)
        if self._stopping.wait(pause_s):
            raise Stopped

    def _ask(self, prompt: Prompt, count: int, seed: int, max_tokens: int) -> Reply:
        """Ask once. Raises NetworkError where it is worth asking again, RemoteError where the answer is no good."""
        request = CompletionsRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=self._temperature,
            top_p=1.0,
            seed=seed,
            n=count,
            logprobs=1,
            return_token_ids=True,
        )
        forms = (request, request.single(), request.plain())
        with self._lock:
            first, resets = self._form, self._resets
        for form in range(first, len(forms)):
            if form > first and forms[form] == forms[form - 1]:
                continue
            try:
                reply = self._exchange(forms[form])
            except _NotKnown as error:
                refused = error
                continue
            self._keep_to(form, first, resets)
            return reply
        raise refused  # its plainest form too, so it was not for what it does not know

    def _keep_to(self, form: int, first: int, resets: int) -> None:
        """Ask in this form from now on, for a while: it may have been for a prompt that the others were refused.

        first: the form in which that prompt was asked first, of which nothing was learnt unless it was refused.
        """
        with self._lock:
            if resets != self._resets:
                return
            if form > first:
                self._form, self._asked = form, 0
            elif form == self._form:
                self._asked += 1
                if self._asked >= FORM_KEPT:
                    self._form = self._asked = 0

    def _ask_anew(self) -> None:
        """Another engine may come up in its place."""
        with self._lock:
            self._form, self._asked, self._resets = 0, 0, self._resets + 1

    def _exchange(self, request: CompletionsRequest) -> Reply:
        try:
            status, body = self._post(
                msgspec.json.encode(request), target=COMPLETE, limit_bytes=request.reply_limit_bytes
            )
        except NetworkError:
            self._ask_anew()
            raise
        if status == HTTPStatus.OK:
            return read_reply(body, request)
        said = refusal_in(body)
        text = f"it answers {status}" + (f", {said}" if said else "")
        if status in BUSY:
            if status != HTTPStatus.TOO_MANY_REQUESTS:
                self._ask_anew()
            raise NetworkError(text)
        raise _NotKnown(text) if status in UNKNOWING else RemoteError(text)

    def _post(self, body: bytes, *, target: str, limit_bytes: int) -> tuple[int, bytes]:
        """Send a request over a connection of its own; returns the status and the whole body of the answer."""
        ends_at = time.monotonic() + self._deadline_s
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADERS_LIMIT_BYTES)
        head = h11.Request(
            method="POST",
            target=target,
            headers=[
                ("host", str(self._address)),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ],
        )
        asked = [http.send(head), http.send(h11.Data(data=body)), http.send(h11.EndOfMessage())]
        try:
            with socket.create_connection(self._address, timeout=CONNECT_DEADLINE_S) as stream:
                stream.settimeout(SLICE_S)
                self._send(stream, b"".join(part or b"" for part in asked), ends_at)
                return self._receive(stream, http, ends_at, limit_bytes)
        except OSError as error:
            raise NetworkError(error.strerror or str(error)) from None
        except UnicodeError:
            raise NetworkError("no machine can have this name") from None

    def _send(self, stream: socket.socket, data: bytes, ends_at: float) -> None:
        left = memoryview(data)
        while left:
            left = left[self._waiting(lambda left=left: stream.send(left), ends_at) :]  # type: ignore[misc]

    def _receive(
        self, stream: socket.socket, http: h11.Connection, ends_at: float, limit_bytes: int
    ) -> tuple[int, bytes]:
        status, body, ended = 0, bytearray(), False
        while True:
            try:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    data = self._waiting(lambda: stream.recv(READ_BYTES), ends_at)
                    ended = not data
                    http.receive_data(data)
                    continue
            except h11.RemoteProtocolError as error:
                if ended:
                    raise NetworkError("it broke off in the middle of an answer") from None
                raise RemoteError(f"it speaks no HTTP: {error}") from None
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > limit_bytes:
                    raise RemoteError(f"its reply is larger than {limit_bytes} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(body)
            elif isinstance(event, h11.ConnectionClosed):
                raise NetworkError("it closed the connection")

    def _waiting(self, call: Callable[[], T], ends_at: float) -> T:
        """The result of a call on the socket, tried again until the deadline. Raises Stopped, RemoteError."""
        while True:
            if self._stopping.is_set():
                raise Stopped
            if time.monotonic() > ends_at:
                raise RemoteError(f"no answer within {self._deadline_s:g} s")
            try:
                return call()
            except TimeoutError:
                continue


class _NotKnown(RemoteError):
    """A refusal that may be about a field that this engine does not know."""
