"""Models that differ between nodes: the first parameter in which they do is named, however long the lists are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shoal.node.outcome import Notice, Progress
from shoal.node.training.layouts import (
    ENOUGH,
    PART_LIMIT_PARAMETERS,
    RETRY_LIMIT_S,
    RETRY_S,
    GetLayout,
    Layouts,
    first_difference,
    part_of,
)
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.wire import canonical, decode

pytestmark = pytest.mark.virtual_time

PEER = "12D3KooWB"


def layout(**shapes: tuple[int, ...]) -> Layout:
    names = sorted(shapes)
    sizes = [math.prod(shapes[name]) for name in names]
    return Layout(names=tuple(names), shapes=tuple(shapes[name] for name in names), numel=sum(sizes))


class Peer:
    """Stands for the host: every request is answered by a peer that has `layout`."""

    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout
        self.asked = 0

    async def request(self, peer: str, protocol: str, payload: bytes, *, deadline_s: float, limit_bytes: int) -> bytes:
        self.asked += 1
        if self.asked > 100:
            raise NetworkError("asked for ever")
        answer = canonical(part_of(self.layout, decode(payload, GetLayout).after))
        assert len(answer) <= limit_bytes
        return answer


def compared(here: Layout, there: Layout | None) -> tuple[Layouts, Peer, list[Progress]]:
    told: list[Progress] = []
    peer = Peer(there)
    layouts = Layouts(host=peer, linked=lambda: frozenset([PEER]), on_progress=told.append)  # type: ignore[arg-type]
    layouts.know(here)

    async def check() -> None:
        assert await layouts.check(PEER) is (there is not None)  # type: ignore[arg-type]

    trio.run(check)
    return layouts, peer, told


def test_a_shape_that_differs_is_named_with_both() -> None:
    here, there = layout(a=(2,), b=(3, 4)), layout(a=(2,), b=(3, 5))
    layouts, _, told = compared(here, there)
    assert told == [
        Notice(text=f"a peer trains another model: parameter 'b' has shape (3, 5) at {PEER} and (3, 4) here")
    ]
    layouts.accept(here.digest)
    with pytest.raises(ConfigError, match=r"'b' has shape \(3, 5\) at 12D3KooWB and \(3, 4\) here; build the same"):
        layouts.accept(there.digest)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (layout(a=(1,), c=(1,)), layout(a=(1,), b=(7,), c=(1,)), "parameter 'b' of shape (7,) is there and not here"),
        (layout(a=(1,), b=(7,), c=(1,)), layout(a=(1,), c=(1,)), "parameter 'b' of shape (7,) is here and not there"),
        (layout(a=(1,)), layout(a=(1,), b=(2,)), "parameter 'b' of shape (2,) is there and not here"),
        (layout(a=(1,), b=(2,)), layout(a=(1,)), "parameter 'b' of shape (2,) is here and not there"),
    ],
)
def test_a_parameter_that_one_lacks_is_named(here: Layout, there: Layout, words: str) -> None:
    assert first_difference(there, here, "there") == words
    layouts, _, _ = compared(here, there)
    with pytest.raises(ConfigError) as raised:
        layouts.accept(there.digest)
    assert words.replace("there", f"at {PEER}") in str(raised.value)


def test_long_lists_are_compared_in_parts() -> None:
    many = {f"p{number:05}": (number + 1,) for number in range(3 * PART_LIMIT_PARAMETERS)}
    last = f"p{3 * PART_LIMIT_PARAMETERS - 1:05}"
    layouts, peer, _ = compared(layout(**many), layout(**(many | {last: (5,)})))
    assert peer.asked == 3
    with pytest.raises(ConfigError, match=f"'{last}' has shape"):
        layouts.accept(layout(**(many | {last: (5,)})).digest)


def test_equal_models_and_peers_without_one_are_no_difference() -> None:
    same = layout(a=(2,), b=(3, 4))
    _, peer, told = compared(same, same)
    assert (peer.asked, told) == (1, [])
    layouts, _, told = compared(same, None)
    assert told == []
    with pytest.raises(ConfigError, match="differ from those of the model built here"):
        layouts.accept(layout(a=(3,)).digest)


def test_only_a_model_that_was_compared_counts_as_alike_and_one_that_differs_is_named() -> None:
    """What a strategy without a common state goes by."""
    here, both = layout(w=(4, 6)), frozenset([PEER, "12D3KooWC"])
    layouts, _, _ = compared(here, here)
    assert layouts.alike(both) == {PEER}  # type: ignore[arg-type]
    layouts.accept_model_of(PEER)  # type: ignore[arg-type]
    layouts.forget(PEER)  # type: ignore[arg-type]
    assert not layouts.alike(both)  # type: ignore[arg-type]

    layouts, _, _ = compared(here, layout(w=(6, 4)))  # as many values
    assert not layouts.alike(both)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'w' has shape \(6, 4\) at 12D3KooWB and \(4, 6\) here; build the same"):
        layouts.accept_model_of(PEER)  # type: ignore[arg-type]
    layouts, _, _ = compared(here, None)
    layouts.accept_model_of(PEER)  # type: ignore[arg-type]
    assert not layouts.alike(both)  # type: ignore[arg-type]


def test_a_peer_that_asks_has_built_its_model_and_is_asked_again_at_once() -> None:
    class Stream:
        peer = PEER

        async def receive(self, *, deadline_s: float) -> bytes:
            return canonical(GetLayout(after=0))

        async def send(self, data: bytes, *, deadline_s: float) -> None:
            pass

        async def aclose(self) -> None:
            pass

    async def scenario() -> None:
        here, peer = layout(a=(2,)), Peer(None)
        layouts = Layouts(host=peer, linked=lambda: frozenset([PEER]), on_progress=lambda one: None)  # type: ignore[arg-type]
        layouts.know(here)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(layouts.watch, PEER)
            await wait_all_tasks_blocked()
            assert peer.asked == 1
            peer.layout = here
            await layouts.serve(Stream())  # type: ignore[arg-type]
        assert layouts.alike(frozenset([PEER])) == {PEER}  # type: ignore[arg-type]
        assert trio.current_time() - began < RETRY_S

    clock = MockClock(autojump_threshold=0)
    began = clock.current_time()
    trio.run(scenario, clock=clock)


async def test_peers_that_never_answer_are_asked_ever_less_often_and_not_after_their_link_is_lost() -> None:
    """A node can be full of strangers that speak nothing but hello, and would else do little beside asking them."""
    here, peer, linked = layout(a=(2,)), Peer(None), {PEER}
    layouts = Layouts(host=peer, linked=lambda: frozenset(linked), on_progress=lambda one: None)  # type: ignore[arg-type]
    layouts.know(here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(layouts.watch, PEER)
        await trio.sleep(10 * RETRY_LIMIT_S)
        assert 10 <= peer.asked <= 10 + math.log2(RETRY_LIMIT_S / RETRY_S) + 1
        asked, now = peer.asked, trio.current_time()
        linked.clear()
        layouts.forget(PEER)  # type: ignore[arg-type]
    assert (peer.asked, trio.current_time()) == (asked, now)


async def test_where_a_difference_is_only_told_a_few_are_compared_and_others_where_these_do_not_answer() -> None:
    here, others = layout(a=(2,)), [f"12D3KooW{number}" for number in range(5 * ENOUGH)]
    mute = frozenset(others[: 2 * ENOUGH])

    class Others(Peer):
        async def request(self, peer: str, *args: Any, **options: Any) -> bytes:
            data = await super().request(peer, *args, **options)
            if peer in mute:
                raise NetworkError("no answer")
            return data

    peers = Others(here)
    layouts = Layouts(host=peers, linked=lambda: frozenset(others), on_progress=lambda one: None, with_all=False)  # type: ignore[arg-type]
    layouts.know(here)
    with trio.fail_after(10 * RETRY_LIMIT_S):
        async with trio.open_nursery() as nursery:
            for peer in others:
                nursery.start_soon(layouts.watch, peer)
    assert len(layouts.alike(frozenset(others))) == ENOUGH  # type: ignore[arg-type]
    assert ENOUGH <= peers.asked <= 3 * ENOUGH
