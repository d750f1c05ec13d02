"""A client beside an engine that does as the test says: every group is whole and of one policy, or there is none."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.node.option import HostPort
from shoal.node.sapo import completions as completions_module
from shoal.node.sapo import engine_client
from shoal.node.sapo.completions import (
    REPLY_BASE_BYTES,
    REPLY_LIMIT_BYTES,
    TOKEN_REPLY_BYTES,
    CompletionsRequest,
    together,
)
from shoal.node.sapo.daemon_line import Stopped
from shoal.node.sapo.engine_client import CHANGE_LIMIT, FAULT_LIMIT, EngineClient
from shoal.protocol.errors import RemoteError
from shoal.protocol.manifest_rollouts import COMPLETION_TOKENS_LIMIT
from tests.node.sapo.scripted_engine import Act, ScriptedEngine, answer, completions, http, raw

TWO = completions("a", "b")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for nobody: no pause is due."""
    monkeypatch.setattr(engine_client, "PAUSE_S", 0.0)
    monkeypatch.setattr(engine_client, "PAUSE_LIMIT_S", 0.0)


class Lab:
    """A client of an engine, and what it told."""

    def __init__(self, address: HostPort, *, deadline_s: float = 60.0) -> None:
        self.told: list[str] = []
        self.has_told = threading.Event()
        self.stopping = threading.Event()
        self.client = EngineClient(
            address,
            max_tokens=4,
            temperature=0.5,
            stopping=self.stopping,
            rest=lambda: None,
            told=self._tell,
            deadline_s=deadline_s,
        )

    def _tell(self, text: str) -> None:
        self.told.append(text)
        self.has_told.set()


def test_group_is_drawn_with_a_seed_and_has_tokens_texts_and_policy() -> None:
    with ScriptedEngine([TWO], then=TWO) as engine:
        lab = Lab(engine.address)
        group = lab.client.group("1+2=", 2, 99)
    assert group is not None
    assert (group.policy, [one.text for one in group.completions]) == ("1", ["a", "b"])
    assert [one.drawn.ids() for one in group.completions if one.drawn] == [(3, 1), (3, 1)]
    sent = {"prompt": "1+2=", "max_tokens": 4, "temperature": 0.5, "top_p": 1.0, "n": 2, "seed": 99, "logprobs": 1}
    assert engine.asked == [{**sent, "return_token_ids": True}]
    assert lab.told == []


def test_engine_that_was_asked_to_load_says_what_it_has_or_why_it_has_not() -> None:
    busy, unknown = answer({}, 503), answer({"error": {"message": "no such folder"}}, 400)
    script = [busy, unknown, answer({"id": "tiny"}), answer([]), answer({"weight_version": "7-3f"})]
    with ScriptedEngine(script, then=TWO) as engine:
        lab = Lab(engine.address)
        for error in (RemoteError, RemoteError, RemoteError, RemoteError):
            with pytest.raises(error):
                lab.client.load(Path("/models/7"), 7)
        assert lab.client.load(Path("/models/7"), 7) == "7-3f"
    assert engine.asked == [{"model": "/models/7", "version": 7}] * 5
    said = [text.partition(": ")[2] for text in lab.told]
    assert said[:2] == [
        "it does not take the swarm's policy: 503",
        "it does not take the swarm's policy: 400 no such folder",
    ]
    assert said[2] == "it does not say which policy it has loaded"
    assert said[3].startswith("its answer is none: ")
    assert len(said) == 4


def test_who_waits_for_a_load_ends_when_nothing_is_wanted_any_more() -> None:
    with ScriptedEngine([], then=answer({}, 503)) as engine:
        lab = Lab(engine.address)
        lab.stopping.set()
        with pytest.raises(Stopped):
            lab.client.load(Path("/models/7"), 7)


def test_engine_that_gives_fewer_is_asked_for_the_rest_with_the_seeds_that_follow() -> None:
    with ScriptedEngine([], then=completions("a")) as engine:
        group = Lab(engine.address).client.group("?", 3, 2**31 - 2)
    assert group is not None
    assert [one.text for one in group.completions] == ["a", "a", "a"]
    assert [(asked.get("n", 1), asked["seed"]) for asked in engine.asked] == [(3, 2**31 - 2), (2, 2**31 - 1), (1, 0)]


def test_no_reply_is_asked_for_that_takes_more_memory_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = CompletionsRequest(
        prompt="?",
        max_tokens=COMPLETION_TOKENS_LIMIT,
        temperature=1,
        top_p=1,
        seed=0,
        n=together(COMPLETION_TOKENS_LIMIT),
    )
    assert (largest.n, largest.reply_limit_bytes <= REPLY_LIMIT_BYTES) == (3, True)
    monkeypatch.setattr(completions_module, "REPLY_LIMIT_BYTES", REPLY_BASE_BYTES + 2 * 4 * TOKEN_REPLY_BYTES)
    with ScriptedEngine([], then=completions(*"abc")) as engine:
        group = Lab(engine.address).client.group("?", 5, 7)
    assert group is not None
    assert [one.text for one in group.completions] == ["a", "b", "a", "b", "a"]
    assert [(asked.get("n", 1), asked["seed"]) for asked in engine.asked] == [(2, 7), (2, 9), (1, 11)]


def test_completions_of_two_policies_are_never_in_one_group() -> None:
    old, new = completions("a", policy="1-aa"), completions("b", policy="2-bb")
    with ScriptedEngine([old, new], then=new) as engine:
        group = Lab(engine.address).client.group("?", 2, 5)
    assert group is not None
    assert (group.policy, [one.text for one in group.completions]) == ("2-bb", ["b", "b"])
    assert [asked["seed"] for asked in engine.asked] == [5, 6, 5, 6]


def test_group_of_an_engine_that_has_another_policy_each_time_is_given_up() -> None:
    flickering = [completions("a", policy=str(at % 2)) for at in range(100)]
    with ScriptedEngine(flickering, then=TWO) as engine:
        lab = Lab(engine.address)
        assert lab.client.group("?", 3, 0) is None
        assert len(engine.asked) == 2 * (CHANGE_LIMIT + 1)
    (told,) = lab.told
    assert told.endswith(f": it named another policy {CHANGE_LIMIT + 1} times amid a group")


UNFINISHED = {"index": 0, "text": "a", "finish_reason": None}


@pytest.mark.parametrize(
    "act",
    [
        answer({"choices": [UNFINISHED]}),
        answer({"choices": [{**UNFINISHED, "finish_reason": "abort"}]}),
        answer({"error": "out of memory"}, 500),
        answer({"error": "no such path"}, 404),
        raw(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
        raw(http(b"a" * (1 << 20))),
        raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17)),
    ],
)
def test_answer_that_is_none_is_asked_for_again_and_after_some_faults_the_group_is_given_up(act: Act) -> None:
    with ScriptedEngine([act], then=TWO) as engine:
        lab = Lab(engine.address)
        group = lab.client.group("?", 2, 0)
        assert group is not None
        assert [one.text for one in group.completions] == ["a", "b"]
        assert len(lab.told) == 1
    with ScriptedEngine([], then=act) as engine:
        assert Lab(engine.address).client.group("?", 2, 0) is None
        assert len(engine.asked) == FAULT_LIMIT


@pytest.mark.parametrize(
    "act",
    [
        raw(b""),
        raw(http(b'{"choices": []}')[:-4]),
        raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc"),
        answer({"error": "loading"}, 503),
        answer({"error": "slow down"}, 429),
    ],
)
def test_engine_that_breaks_off_or_is_busy_is_waited_for_however_often(act: Act) -> None:
    with ScriptedEngine([act] * 3 * FAULT_LIMIT, then=TWO) as engine:
        lab = Lab(engine.address)
        group = lab.client.group("?", 2, 0)
    assert group is not None
    assert [one.text for one in group.completions] == ["a", "b"]
    assert len(lab.told) == 3 * FAULT_LIMIT


def test_engine_that_is_not_there_is_waited_for_until_it_is_or_nothing_is_wanted() -> None:
    with ScriptedEngine([], then=TWO) as engine:
        address = engine.address
    lab = Lab(address)
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(lab.client.group, "?", 2, 0)
        assert lab.has_told.wait(60)
        lab.stopping.set()
        with pytest.raises(Stopped):
            drawing.result(60)


def test_slow_engine_costs_the_group_and_one_that_trickles_does_too() -> None:
    def trickle(stream: object, asked: object) -> None:
        while not engine.released.wait(0.05):
            stream.sendall(b"H")  # type: ignore[attr-defined]

    with ScriptedEngine([], then=TWO) as engine:
        engine.then = engine.hang
        lab = Lab(engine.address, deadline_s=0.3)
        assert lab.client.group("?", 2, 0) is None
        *slow, last = lab.told
        assert all("no answer within 0.3 s" in text for text in slow)
        assert last.endswith(": a group took it more than 0.3 s; let it be faster, or draw fewer tokens")
    with ScriptedEngine([], then=TWO) as engine:
        engine.then = lambda stream, asked: trickle(stream, asked)
        lab = Lab(engine.address, deadline_s=0.3)
        assert lab.client.group("?", 2, 0) is None
        assert lab.told


def test_who_waits_for_an_answer_ends_when_nothing_is_wanted_any_more() -> None:
    with ScriptedEngine([], then=TWO) as engine, ThreadPoolExecutor(1) as pool:
        asked = threading.Event()

        def hang(stream: object, request: object) -> None:
            asked.set()
            engine.released.wait(60)

        engine.then = hang
        lab = Lab(engine.address)
        drawing = pool.submit(lab.client.group, "?", 2, 0)
        assert asked.wait(60)
        lab.stopping.set()
        with pytest.raises(Stopped):
            drawing.result(60)


def unless_plain(status: int) -> Act:
    """An engine that refuses the fields that not all know, and gives one text at a time."""

    def act(stream: object, asked: dict[str, object]) -> None:
        known = {"prompt", "max_tokens", "temperature", "top_p", "seed"}
        made = completions("a", log_probs=False) if asked.keys() <= known else answer({"detail": "unexpected"}, status)
        made(stream, asked)  # type: ignore[arg-type]

    return act


@pytest.mark.parametrize("status", [400, 422])
def test_engine_that_does_not_know_all_fields_is_asked_plainly_and_gives_text_alone(status: int) -> None:
    with ScriptedEngine([], then=unless_plain(status)) as engine:
        lab = Lab(engine.address)
        for _ in range(2):
            group = lab.client.group("?", 2, 0)
            assert group is not None
            assert [(one.text, one.drawn) for one in group.completions] == [("a", None), ("a", None)]
        assert len(engine.asked) == 2 + 4
        assert lab.told == []


def unless_single(stream: socket.socket, asked: dict[str, Any]) -> None:
    """What an engine does that draws one completion at a time, and knows all else."""
    made = completions("a", log_probs="logprobs" in asked)
    if asked.get("n", 1) > 1:
        made = answer({"error": {"message": "n is 1 at the most"}}, 400)
    made(stream, asked)


def test_engine_that_draws_one_at_a_time_gives_log_probabilities_all_the_same() -> None:
    with ScriptedEngine([], then=unless_single) as engine:
        lab = Lab(engine.address)
        for wanted in (2, 1, 2):
            group = lab.client.group("?", wanted, 0)
            assert group is not None
            assert [one.drawn.ids() for one in group.completions if one.drawn] == [(3, 1)] * wanted
        assert len(engine.asked) == 1 + 5
        assert lab.told == []


def test_form_that_was_refused_for_one_prompt_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "FORM_KEPT", 3)

    def unless_bad(stream: socket.socket, asked: dict[str, Any]) -> None:
        refuses = asked["prompt"] == "bad" and "logprobs" in asked
        made = answer({"error": {"message": "out of range"}}, 400) if refuses else TWO
        made(stream, asked)

    with ScriptedEngine([], then=unless_bad) as engine:
        lab = Lab(engine.address)
        assert lab.client.group("bad", 1, 0) is not None
        for _ in range(4):
            assert lab.client.group("good", 1, 0) is not None
    assert ["logprobs" in asked for asked in engine.asked] == [True, False, False, False, False, True]


def test_requests_under_way_do_not_keep_to_a_form_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "FORM_KEPT", 2)
    begun, ended = threading.Event(), threading.Event()

    def late(stream: socket.socket, asked: dict[str, Any]) -> None:
        begun.set()
        assert ended.wait(60)
        TWO(stream, asked)

    with ScriptedEngine([answer({}, 400), TWO, late], then=TWO) as engine, ThreadPoolExecutor() as pool:
        client = Lab(engine.address).client
        assert client.group("refused", 1, 0) is not None
        slow = pool.submit(client.group, "slow", 1, 0)
        assert begun.wait(60)
        for _ in range(3):
            assert client.group("?", 1, 0) is not None
        ended.set()
        assert slow.result(60) is not None
        assert client.group("?", 1, 0) is not None
    assert ["logprobs" in asked for asked in engine.asked] == [True, False, False, False, False, True, True]


@pytest.mark.parametrize(("status", "anew"), [(503, True), (502, True), (429, False)])
def test_engine_that_comes_up_in_another_s_place_is_asked_for_all_again(status: int, anew: bool) -> None:
    busy = answer({}, status)
    with ScriptedEngine([answer({}, 400), TWO, busy], then=TWO) as engine:
        lab = Lab(engine.address)
        for _ in range(2):
            assert lab.client.group("?", 1, 0) is not None
    assert ["logprobs" in asked for asked in engine.asked] == [True, False, False, anew]


def test_refusal_of_one_prompt_is_no_reason_to_do_without_log_probabilities() -> None:
    too_long = answer({"error": {"message": "too long"}}, 400)
    with ScriptedEngine([too_long] * 3 * FAULT_LIMIT, then=TWO) as engine:
        lab = Lab(engine.address)
        assert lab.client.group("?", 2, 0) is None
        assert len(engine.asked) == 3 * FAULT_LIMIT
        assert "too long" in lab.told[0]
        group = lab.client.group("?", 2, 0)
    assert group is not None
    assert all(one.drawn is not None for one in group.completions)
