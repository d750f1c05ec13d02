"""Incoming connections: refused before a task is spent on them, in batches with pauses, and never to the end of us."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
import trio.testing

from shoal.swarm import incoming
from tests.waiting import until


@asynccontextmanager
async def door(lets_in: Callable[[str], bool], handle: incoming.Handler) -> AsyncIterator[int]:
    """A door on loopback; the port."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(incoming.take_in, listeners, lets_in, handle)
        yield int(listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


async def greet(stream: trio.SocketStream, address: str) -> None:
    await stream.send_all(address.encode())


def swallow_reset(handle: incoming.Handler) -> incoming.Handler:
    """As every handler is: it raises nothing when its far end is gone."""

    async def swallowing(stream: trio.SocketStream, address: str) -> None:
        with suppress(trio.BrokenResourceError):
            await handle(stream, address)

    return swallowing


async def connect(port: int, *, source: str = "127.0.0.1") -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port, local_address=source)


async def heard(stream: trio.SocketStream) -> bytes:
    """What comes until the other closes; raises BrokenResourceError for a reset."""
    found = b""
    async with stream:
        while more := await stream.receive_some():
            found += more
    return found


async def test_who_is_let_in_is_served_and_the_rest_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "REFUSED_HANGING_S", 0.05)
    with trio.fail_after(20):
        async with door(lambda address: address != "127.0.0.9", greet) as port:
            assert await heard(await connect(port)) == b"127.0.0.1"
            assert await heard(await connect(port, source="127.0.0.2")) == b"127.0.0.2"
            with pytest.raises((trio.BrokenResourceError, OSError)):  # some hear of it before they are connected
                await heard(await connect(port, source="127.0.0.9"))
            assert await heard(await connect(port)) == b"127.0.0.1"


@pytest.mark.parametrize(("refused", "looked_at"), [(50, 20), (1, 20), (0, 50)])
async def test_after_a_batch_with_a_refusal_the_backlog_waits(
    refused: int, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "BATCH", 20)
    monkeypatch.setattr(incoming, "PAUSE_S", 1e6)
    asked: list[str] = []

    def lets_in(address: str) -> bool:
        asked.append(address)
        return len(asked) > refused

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    callers = [socket.create_connection(listener.socket.getsockname()[:2]) for _ in range(50)]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(incoming.take_in, [listener], lets_in, greet)
            await until(lambda: len(asked) >= looked_at)
            await trio.testing.wait_all_tasks_blocked()
            assert len(asked) == looked_at
            nursery.cancel_scope.cancel()
    for caller in callers:
        caller.close()


async def watch(stream: trio.SocketStream, over: trio.Event) -> None:
    with suppress(trio.BrokenResourceError):
        await heard(stream)
    over.set()


@pytest.mark.parametrize("hanging_s", [1e6, 0.05])
@pytest.mark.parametrize(("address", "kind"), [("127.0.0.9", "SPENT_HANGING_S"), ("127.0.0.8", "REFUSED_HANGING_S")])
async def test_who_is_refused_hangs_for_a_while(
    hanging_s: float, address: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest give way to newer ones, the others are closed in time, and nobody who is let in waits for that."""
    monkeypatch.setattr(incoming, "HANGING_LIMIT", 3)
    monkeypatch.setattr(incoming, "SPENT_HANGING_S", 1e6)
    monkeypatch.setattr(incoming, kind, hanging_s)
    monkeypatch.setattr(incoming, "PAUSE_S", 0.0)
    ended = [trio.Event() for _ in range(5)]
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listener.socket.getsockname()[1])
    take_in = partial(incoming.take_in, is_spent=lambda address: address == "127.0.0.9")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(take_in, [listener], lambda address: address == "127.0.0.1", greet)
            for over in ended:
                nursery.start_soon(watch, await connect(port, source=address), over)
            assert await heard(await connect(port)) == b"127.0.0.1"
            closed = ended[:2] if hanging_s > 1 else ended
            for over in closed:
                await over.wait()
            assert [over.is_set() for over in ended] == [over in closed for over in ended]
            nursery.cancel_scope.cancel()


async def test_those_who_spent_their_allowance_do_not_push_out_who_is_refused_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incoming, "HANGING_LIMIT", 1)
    monkeypatch.setattr(incoming, "REFUSED_HANGING_S", 1e6)
    first, spent = trio.Event(), [trio.Event() for _ in range(3)]
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listener.socket.getsockname()[1])
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            take_in = partial(incoming.take_in, is_spent=lambda address: address == "127.0.0.9")
            await nursery.start(take_in, [listener], lambda address: False, greet)
            nursery.start_soon(watch, await connect(port, source="127.0.0.8"), first)
            for over in spent:
                nursery.start_soon(watch, await connect(port, source="127.0.0.9"), over)
            for over in spent[:2]:
                await over.wait()
            assert not first.is_set()
            assert not spent[2].is_set()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("address", "seconds"), [("127.0.0.8", 2.0), ("127.0.0.9", 30.0)])
def test_who_is_refused_is_told_soon_and_who_has_spent_its_allowance_late(address: str, seconds: float) -> None:
    """In virtual time: nothing but the door's own timers moves it."""

    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        target = listener.socket.getsockname()[:2]
        async with trio.open_nursery() as nursery:
            take_in = partial(incoming.take_in, is_spent=lambda address: address == "127.0.0.9")
            await nursery.start(take_in, [listener], lambda address: False, greet)
            caller = socket.create_connection(target, source_address=(address, 0))
            began = trio.current_time()
            with pytest.raises(trio.BrokenResourceError):
                await heard(trio.SocketStream(trio.socket.from_stdlib_socket(caller)))
            assert trio.current_time() - began == pytest.approx(seconds, abs=2 * incoming.PAUSE_S)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


async def test_what_hangs_at_all_listeners_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "HANGING_LIMIT", 2)
    monkeypatch.setattr(incoming, "REFUSED_HANGING_S", 1e6)
    monkeypatch.setattr(incoming, "PAUSE_S", 0.0)
    listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(2)]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(incoming.take_in, listeners, lambda address: False, greet)
            for listener in listeners:
                ended = [trio.Event(), trio.Event()]
                for over in ended:
                    nursery.start_soon(watch, await connect(listener.socket.getsockname()[1]), over)
                await ended[0].wait()
                assert not ended[1].is_set()
            nursery.cancel_scope.cancel()


async def test_what_hangs_is_closed_when_the_door_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "REFUSED_HANGING_S", 1e6)
    monkeypatch.setattr(incoming, "SPENT_HANGING_S", 1e6)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    target = listener.socket.getsockname()[:2]
    callers = [socket.create_connection(target, source_address=(f"127.0.0.{n}", 0)) for n in (8, 9)]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            take_in = partial(incoming.take_in, is_spent=lambda address: address == "127.0.0.9")
            await nursery.start(take_in, [listener], lambda address: False, greet)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        for caller in callers:
            with pytest.raises(trio.BrokenResourceError):  # and is reset: the system keeps nothing of it
                await heard(trio.SocketStream(trio.socket.from_stdlib_socket(caller)))


async def test_what_hangs_is_closed_when_there_are_no_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "REFUSED_HANGING_S", 1e6)
    monkeypatch.setattr(incoming, "PAUSE_S", 0.0)
    accept = socket.socket.accept
    calls = iter([False, False, True])

    def troubled(self: socket.socket) -> object:
        if next(calls, False):
            raise OSError(errno.EMFILE, "too many files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", troubled)
    with trio.fail_after(20):
        async with door(lambda address: address != "127.0.0.9", greet) as port, trio.open_nursery() as nursery:
            over = trio.Event()
            nursery.start_soon(watch, await connect(port, source="127.0.0.9"), over)
            await trio.testing.wait_all_tasks_blocked()
            assert not over.is_set()
            assert await heard(await connect(port)) == b"127.0.0.1"
            await over.wait()


async def test_address_of_ipv4_in_ipv6_is_told_plain() -> None:
    asked: list[str] = []

    def lets_in(address: str) -> bool:
        asked.append(address)
        return True

    both = trio.socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    await both.bind(("::", 0))
    both.listen()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(incoming.take_in, [trio.SocketListener(both)], lets_in, greet)
            assert await heard(await connect(both.getsockname()[1])) == b"127.0.0.1"
            nursery.cancel_scope.cancel()
    assert asked == ["127.0.0.1"]


def test_what_hangs_has_a_bounded_part_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(files: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (files, 1 << 30)}.__getitem__)
        return incoming._hanging_limit()

    assert [limit(files) for files in (256, 1024, 1 << 20, resource.RLIM_INFINITY)] == [32, 128, 1024, 1024]


async def test_what_hangs_may_send_next_to_nothing_into_this_machines_memory() -> None:
    """Each byte that the system takes before it says no more."""
    taken: list[int] = []
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listener.socket.getsockname()[1])
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(incoming.take_in, [listener], lambda address: False, greet)
            sender = socket.create_connection(("127.0.0.1", port))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            sender.setblocking(False)
            with sender, trio.move_on_after(1.0):
                sent = 0
                while sent < 1 << 20:
                    with suppress(BlockingIOError):
                        sent += sender.send(b"x" * 65536)
                    taken[:] = [sent]
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert taken[0] < 128 << 10


async def test_noise_costs_no_task_and_whoever_has_not_spoken_is_heard() -> None:
    """Of what had come when it was taken the handler finds every byte."""
    asked: list[bytes] = []

    def is_noise(first: bytes) -> bool:
        asked.append(first)
        return first.startswith(b"noise")

    async def echo(stream: trio.SocketStream, address: str) -> None:
        await stream.send_all(b"heard " + await stream.receive_some())

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listener.socket.getsockname()[1])
    said = [b"noise and more of it", b"a word, longer than what is looked at", b""]
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in said]
    for caller, words in zip(callers, said, strict=True):
        caller.sendall(words)
    noisy, talker, late = (trio.SocketStream(trio.socket.from_stdlib_socket(caller)) for caller in callers)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            take_in = partial(incoming.take_in, is_noise=is_noise)
            await nursery.start(take_in, [listener], lambda address: True, echo)
            with pytest.raises(trio.BrokenResourceError):
                await heard(noisy)
            assert await heard(talker) == b"heard " + said[1]
            await late.send_all(b"at last")
            assert await heard(late) == b"heard at last"
            nursery.cancel_scope.cancel()
    assert asked == [one[: incoming.FIRST_BYTES] for one in said]


async def test_noise_is_a_refusal_after_which_the_backlog_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "BATCH", 1)
    monkeypatch.setattr(incoming, "PAUSE_S", 1e6)
    asked: list[bytes] = []

    def is_noise(first: bytes) -> bool:
        asked.append(first)
        return True

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    callers = [socket.create_connection(listener.socket.getsockname()[:2]) for _ in range(2)]
    for caller in callers:
        caller.sendall(b"noise")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            take_in = partial(incoming.take_in, is_noise=is_noise)
            await nursery.start(take_in, [listener], lambda address: True, greet)
            await until(lambda: asked)
            await trio.testing.wait_all_tasks_blocked()
            assert asked == [b"noise"]
            nursery.cancel_scope.cancel()
    for caller in callers:
        caller.close()


async def test_caller_that_resets_before_it_is_looked_at_ends_nothing() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    target = listener.socket.getsockname()[:2]
    gone, caller = socket.create_connection(target), socket.create_connection(target)
    incoming.turn_away(gone)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            take_in = partial(incoming.take_in, is_noise=lambda first: False)
            await nursery.start(take_in, [listener], lambda address: True, swallow_reset(greet))
            assert await heard(trio.SocketStream(trio.socket.from_stdlib_socket(caller))) == b"127.0.0.1"
            nursery.cancel_scope.cancel()


async def test_running_out_of_files_and_callers_that_hang_up_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "OUT_OF_FILES_S", 0.0)
    trouble: list[OSError] = [OSError(errno.EMFILE, "too many files"), ConnectionAbortedError()]
    accept = socket.socket.accept

    def troubled(self: socket.socket) -> object:
        if trouble:
            raise trouble.pop(0)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", troubled)
    with trio.fail_after(20):
        async with door(lambda address: True, greet) as port:
            assert await heard(await connect(port)) == b"127.0.0.1"
    assert not trouble


async def test_connections_are_closed_when_their_handler_returns_or_the_door_ends() -> None:
    async def wait(stream: trio.SocketStream, address: str) -> None:
        await stream.send_all(b"in")
        await trio.sleep_forever()

    with trio.fail_after(20):
        async with door(lambda address: True, wait) as port:
            stream = await connect(port)
            assert await stream.receive_some() == b"in"
        assert await heard(stream) == b""
