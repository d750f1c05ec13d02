"""What a peer may say when it is asked for an image: nothing that does not hold is fetched, and who says it is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from shoal.collectives.policy_image import encode_changes, image_of
from shoal.collectives.state import ImageHeader, frozen, header_of, image_of_chunk
from shoal.node.state.image_exchange import ImageExchange
from shoal.node.state.policy_images import changes_scope
from shoal.node.state.states import StateCache
from shoal.protocol.donors import DonorScores
from shoal.protocol.errands import TakeImage
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Message
from shoal.protocol.peering import GetImage, ImageAnswer, Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from tests.node.ledger import GRID, identity, state_of

PEER, OTHER = identity(1).peer_id, identity(2).peer_id
BEFORE = replace(state_of(1, seed=1), imaged=True)
_moved = BEFORE.anchor.copy()
_moved[::50] += np.float32(0.5)
AFTER = replace(state_of(2, seed=2), imaged=True, anchor=frozen(_moved))
"""Some values of each chunk are others."""


def header(state: Any = AFTER) -> ImageHeader:
    found = header_of(state, GRID).of_image
    assert found is not None
    return found


class Asked:
    """One node, which asks; peers answer by `answers`. `jobs`: what it would fetch, and does not come."""

    def __init__(self, folder: Path, answers: dict[PeerId, Message]) -> None:
        for name in ("state", "finals"):
            (folder / name).mkdir()
        self.answers, self.questions, self.jobs = answers, list[GetImage](), list[str]()
        self.scores, self.came = DonorScores(), list[tuple[str, int]]()
        self.gives: Callable[[ChunkRef], bytes] | None = None
        cache = self.cache = StateCache(folder, GRID.chunk_values)
        cache.put(BEFORE, header_of(BEFORE, GRID))
        host: Any = SimpleNamespace(serve=self._serves, request=self._request)
        self.catchup: Any = SimpleNamespace(
            scores=self.scores, finals_bytes=1e9, fetcher=SimpleNamespace(fetch=self._fetch), came=self._came
        )
        self.exchange = ImageExchange(host, cache, self.catchup, lambda: (PEER, OTHER))

    def _serves(self, protocol: str, handler: Any, *, limit_bytes: int) -> None:
        self.serve = handler

    async def _request(self, peer: PeerId, protocol: str, payload: bytes, **_: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        self.questions.append(decode(payload, GetImage))
        return canonical(self.answers[peer])

    async def _fetch(self, job: Any, donors: Any) -> dict[PeerId, int]:
        await trio.lowlevel.checkpoint()
        self.jobs.append(f"{job.what} from {len(donors)}")
        if self.gives is None:
            raise NetworkError("nobody is there")
        given = [(ref, self.gives(ref)) for ref, _ in job.wanted]
        try:
            for ref, data in given:
                job.accept(ref, memoryview(data), None)
        except RemoteError:
            raise NetworkError("nobody is left") from None
        return {PEER: sum(len(data) for _, data in given)}

    def _came(self, way: str, donated: dict[PeerId, int]) -> None:
        self.came.append((way, sum(donated.values())))

    def take(self, *, cheapest: bool = True, **changed: Any) -> Any:
        request = TakeImage(
            value=SimpleNamespace(round=2),  # type: ignore[arg-type]
            certified=header().digest,
            before=header(BEFORE).digest,
            held=BEFORE,
            peers=tuple(self.answers),
            cheapest=cheapest,
        )
        return trio.run(self.exchange.performers[TakeImage], replace(request, **changed))


def sizes(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def answer(changes: bytes, of: ImageHeader | None = None) -> ImageAnswer:
    return ImageAnswer(header=canonical(of or header()), changes=changes)


def changed(chunk: int, after: Any = AFTER, before: Any = BEFORE) -> bytes:
    return encode_changes(*(image_of_chunk(one, GRID, chunk) for one in (before, after)), GRID.length(chunk))


def test_what_changed_makes_the_image_and_is_kept_for_others(tmp_path: Path) -> None:
    told = [changed(chunk) for chunk in range(GRID.chunks)]
    node = Asked(tmp_path, {PEER: answer(sizes(*map(len, told)))})
    node.gives = lambda ref: told[ref.chunk]
    node.catchup.finals_bytes = math.inf
    image = node.take()
    assert image.header == header()
    assert image.halves.tobytes() == image_of(AFTER.anchor).tobytes()
    assert not image.halves.flags.writeable
    assert node.came == [("changes", sum(map(len, told)))]
    ref = ChunkRef(ChunkSpace.CHANGES, changes_scope(header(BEFORE).digest, header().digest), 0)
    assert node.cache.lookup(ref) == told[0]


@pytest.mark.parametrize("lie", [b"\x00", b"\x07", changed(0, BEFORE, AFTER), bytes(2 * GRID.length(0))])
def test_what_leads_to_another_image_is_not_taken(tmp_path: Path, lie: bytes) -> None:
    node = Asked(tmp_path, {PEER: answer(SMALL)})
    node.gives = lambda ref: changed(ref.chunk) if ref.chunk else lie
    if len(lie) == 2 * GRID.length(0):  # of a whole image
        node.answers[PEER] = answer(b"")
        node.gives = lambda ref: image_of_chunk(AFTER, GRID, ref.chunk).tobytes() if ref.chunk else lie
    assert node.take() is None
    assert node.jobs
    assert node.came == []


NOT_HELD = Refusal(reason="not held here")
SMALL = sizes(*[30] * GRID.chunks)
LARGEST = [1 + 2 * GRID.length(chunk) for chunk in range(GRID.chunks)]


@pytest.mark.parametrize(
    "lie",
    [
        answer(SMALL, header(BEFORE)),
        answer(SMALL, msgspec.structs.replace(header(), image=header().image[::-1])),
        answer(SMALL[:-4]),
        answer(SMALL + b"\0"),
        answer(sizes(0, *[30] * (GRID.chunks - 1))),
        answer(sizes(LARGEST[0] + 1, *[30] * (GRID.chunks - 1))),
        answer(sizes(*[0xFFFFFFFF] * GRID.chunks)),
        ImageAnswer(header=b"\xc1", changes=SMALL),
    ],
)
def test_answer_that_does_not_hold_is_left_and_so_is_who_gave_it(tmp_path: Path, lie: ImageAnswer) -> None:
    node = Asked(tmp_path, {PEER: lie})
    assert node.take() is None
    assert node.jobs == []
    assert node.scores.banned(PEER, 0.0) or node.scores.resting(PEER, 0.0)


@dataclass
class Stream:
    """A question of `peer`, and what it is told."""

    peer: PeerId
    question: bytes
    told: bytes = b""

    async def receive(self, *, deadline_s: float) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.question

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.told = data

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def test_who_is_not_linked_is_told_nothing(tmp_path: Path) -> None:
    node = Asked(tmp_path, {})
    for digest, told in ((header(BEFORE).digest, answer(b"", header(BEFORE))), (bytes(32), NOT_HELD)):
        question = canonical(GetImage(state=digest, since=NO_HASH))
        stream, stranger = Stream(PEER, question), Stream(identity(3).peer_id, question)
        trio.run(node.serve, stream)
        assert decode(stream.told, ImageAnswer | Refusal) == told  # type: ignore[arg-type]
        with pytest.raises(RemoteError, match="admitted"):
            trio.run(node.serve, stranger)
        assert stranger.told == b""


def test_who_has_it_not_is_blamed_for_nothing(tmp_path: Path) -> None:
    node = Asked(tmp_path, {PEER: NOT_HELD})
    assert node.take() is None
    assert not node.scores.resting(PEER, 0.0)


@pytest.mark.parametrize(
    ("finals", "told", "jobs"),
    [
        (0, sizes(*LARGEST), []),
        (1, sizes(*LARGEST), ["the image of round 2 from 1"]),
        (-1, SMALL, ["the changes of round 2 from 1"]),
    ],
)
def test_the_cheapest_of_changes_finals_and_the_whole_is_taken(
    tmp_path: Path, finals: int, told: bytes, jobs: list[str]
) -> None:
    """finals: bytes more than the whole image has."""
    node = Asked(tmp_path, {PEER: answer(told)})
    node.catchup.finals_bytes = 2 * GRID.numel + finals
    assert node.take() is None, "finals, now or because nothing came"
    assert node.jobs == jobs


def test_where_finals_help_no_more_changes_and_then_the_whole_are_tried(tmp_path: Path) -> None:
    node = Asked(tmp_path, {PEER: answer(SMALL)})
    assert node.take(cheapest=False) is None
    assert node.jobs == ["the changes of round 2 from 1", "the image of round 2 from 1"]


def test_a_newcomer_takes_the_image_where_changes_are_cheaper_than_finals(tmp_path: Path) -> None:
    node = Asked(tmp_path, {PEER: answer(SMALL)})
    for finals, jobs in ((0, []), (1, ["the image of round 2 from 1"])):
        node.catchup.finals_bytes = 30 * GRID.chunks + finals
        node.take(held=None)
        assert node.jobs == jobs
    assert {question.since for question in node.questions} == {header(BEFORE).digest}


def test_changes_are_asked_for_since_the_state_that_is_here_and_no_other(tmp_path: Path) -> None:
    node = Asked(tmp_path, {PEER: answer(b"")})
    node.take(held=replace(state_of(1, seed=9), imaged=True), cheapest=False)
    assert [question.since for question in node.questions] == [NO_HASH]
    assert node.jobs == ["the image of round 2 from 1"]


def test_who_has_changes_is_asked_before_the_whole_is_taken(tmp_path: Path) -> None:
    node = Asked(tmp_path, {PEER: answer(b""), OTHER: answer(SMALL)})
    node.take()
    assert node.jobs == ["the changes of round 2 from 1"]
    assert len(node.questions) == 2
