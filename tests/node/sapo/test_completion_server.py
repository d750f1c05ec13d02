"""A real `shoal engine`: what it draws and says of it, what it refuses, and that no reply is of two policies."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.node.sapo.completion_server import BODY_LIMIT_BYTES, CompletionServer, Served
from shoal.node.sapo.engine_client import EngineClient
from tests.node.lab import shoal
from tests.node.sapo.engine_lab import Engine, Judge, save_model

pytestmark = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("peft")), reason="the extra shoal[hf] is not installed"
)

PROMPT = "1+2="
ASKED = {"prompt": PROMPT, "max_tokens": 6, "n": 4, "seed": 3, "logprobs": 1, "return_token_ids": True}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    pytest.importorskip("transformers")  # which warns


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "one")
    save_model(folder / "two", shift=0.02)
    return folder


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Engine]:
    with Engine(models / "one", "--version", "3") as running:
        yield running


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(one=0.0, two=0.02)


def drawn_by(judge: Judge, choice: Any) -> list[str]:
    return judge.names(PROMPT, tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


def test_completions_are_the_model_s_with_its_log_probabilities_and_equal_under_one_seed(
    engine: Engine, models: Path, judge: Judge
) -> None:
    policy = engine.load(models / "one", version=3)
    status, reply = engine.ask("/v1/completions", ASKED)
    assert status == 200
    assert reply["metadata"] == {"weight_version": policy, "vocabulary": 9}
    assert policy == engine.policy
    assert (reply["model"], len(reply["choices"])) == ("one", 4)
    for choice in reply["choices"]:
        assert drawn_by(judge, choice) == ["one"]
        assert choice["text"] == judge.text(choice["token_ids"])
        assert choice["finish_reason"] == ("length" if choice["token_ids"][-1] != 1 else "stop")
        assert len(choice["token_ids"]) == 6 or choice["finish_reason"] == "stop"
    assert len({choice["text"] for choice in reply["choices"]}) > 1
    assert engine.ask("/v1/completions", ASKED)[1]["choices"] == reply["choices"]
    assert engine.ask("/v1/completions", {**ASKED, "seed": 4})[1]["choices"] != reply["choices"]
    by_tokens = engine.ask("/v1/completions", {**ASKED, "prompt": [3, 7, 4, 8]})
    assert by_tokens[1]["choices"] == reply["choices"]
    bare = engine.ask("/v1/completions", {"prompt": PROMPT})[1]["choices"][0]
    assert bare["logprobs"] is None
    assert "token_ids" not in bare


def test_log_probabilities_are_at_the_temperature_that_was_asked_for(engine: Engine) -> None:
    coldest = engine.ask("/v1/completions", {**ASKED, "temperature": 0.01})[1]["choices"]
    assert len({choice["text"] for choice in coldest}) == 1
    assert all(value == pytest.approx(0, abs=0.2) for value in coldest[0]["logprobs"]["token_logprobs"])
    hot = engine.ask("/v1/completions", {**ASKED, "temperature": 10})[1]["choices"]
    values = [value for choice in hot for value in choice["logprobs"]["token_logprobs"]]
    assert all(value == pytest.approx(-math.log(9), abs=1) for value in values)


def test_completion_ends_before_a_stop_and_counts_the_tokens_up_to_it(engine: Engine) -> None:
    free = engine.ask("/v1/completions", ASKED)[1]["choices"]
    stop = max((choice["text"] for choice in free), key=len)[2]
    stopped = engine.ask("/v1/completions", {**ASKED, "stop": ["no such", stop]})[1]["choices"]
    for whole, cut in zip(free, stopped, strict=True):
        text, found, _ = whole["text"].partition(stop)
        assert cut["text"] == text
        if found:
            assert cut["finish_reason"] == "stop"
            count = len(cut["token_ids"])
            assert count == len(text) + 1 + whole["token_ids"][: len(text) + 1].count(0)
            assert cut["token_ids"] == whole["token_ids"][:count]
            assert cut["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][:count]


def test_every_reply_and_every_group_is_of_the_policy_that_it_names_while_the_engine_loads(
    engine: Engine, models: Path, judge: Judge
) -> None:
    names = {engine.load(models / name): name for name in ("two", "one")}
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            for version in ("two", "one"):
                names[engine.load(models / version)] = version

    client = EngineClient(
        engine.address, max_tokens=6, temperature=1.0, stopping=over, rest=lambda: None, told=lambda text: None
    )
    with ThreadPoolExecutor(4) as pool:
        loading = pool.submit(load)
        try:
            groups = list(pool.map(lambda seed: client.group(PROMPT, 4, seed), range(24)))
        finally:
            over.set()
        loading.result(60)
    found = set()
    for group in groups:
        assert group is not None
        assert len(group.completions) == 4
        for one in group.completions:
            assert one.drawn is not None
            assert judge.names(PROMPT, one.drawn.ids(), one.drawn.values()) == [names[group.policy]]
        found.add(names[group.policy])
    assert found == {"one", "two"}
    digests = {name: {policy.partition("-")[2] for policy in names if names[policy] == name} for name in found}
    assert [len(some) for some in digests.values()] == [1, 1]
    assert digests["one"] != digests["two"]


@pytest.mark.parametrize(
    ("change", "status", "why"),
    [
        ({"max_tokens": 29}, 400, "the model reads 32 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 65}, 400, "`$.n`"),
        ({"temperature": 0}, 400, "temperature"),
        ({"seed": -1}, 400, "seed"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [9]}, 400, "the vocabulary has 9 tokens"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"logprobs": 5}, 400, "logprobs"),
        ({"stream": True}, 400, "stream"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"best_of": 2}, 400, "best_of"),
    ],
)
def test_what_it_cannot_do_it_refuses_in_words(engine: Engine, change: dict[str, Any], status: int, why: str) -> None:
    answered, refusal = engine.ask("/v1/completions", {**ASKED, **change})
    assert answered == status
    assert why in refusal["error"]["message"]


def test_what_is_no_request_of_this_machine_s_user_is_refused(engine: Engine, tmp_path: Path) -> None:
    asked = {"content-type": "text/plain"}
    assert engine.ask("/v1/completions", ASKED, headers=asked)[0] == 415
    assert engine.ask("/v1/load", {"model": str(tmp_path)}, headers={"host": "example.org"})[0] == 421
    assert engine.ask("/v1/completions", b"{")[0] == 400
    assert engine.ask("/v1/completions", b" " * (BODY_LIMIT_BYTES + 1))[0] == 413
    assert engine.ask("/v1/models", method="GET")[1]["data"][0]["vocabulary"] == 9
    with socket.create_connection(engine.address) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
        assert engine.ask("/health", method="GET") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("host", "client", "status"),
    [
        ("page.example.org:8000", "127.0.0.1", 403),  # a name that its owner points here now, in a browser here
        ("192.168.7.2:8000", "127.0.0.1", 403),
        ("[", "127.0.0.1", 403),
        ("127.0.0.1:8000", "192.168.7.3", 403),
        ("127.0.0.1:8000", "127.0.0.1", 400),  # it is listened to: there is no such folder
    ],
)
async def test_engine_that_others_reach_takes_models_from_its_own_machine_alone(
    tmp_path: Path, host: str, client: str, status: int
) -> None:
    served = Served(name="one", version=1, policy="1-one", model=None, tokenizer=None, room=8)
    server = CompletionServer(served, device=torch.device("cpu"), loopback=False)
    body = msgspec.json.encode({"model": str(tmp_path / "nowhere")})
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/load",
        "query_string": b"",
        "headers": [(b"host", host.encode()), (b"content-type", b"application/json")],
        "client": (client, 40_000),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await server.app(scope, receive, send)
    assert sent[0]["status"] == status


def test_model_that_cannot_be_loaded_leaves_the_one_that_is_there(engine: Engine, models: Path, tmp_path: Path) -> None:
    policy = engine.load(models / "one", version=3)
    (tmp_path / "config.json").write_text("{}")
    for folder, why in ((tmp_path / "nowhere", "there is no folder"), (tmp_path, "cannot be loaded")):
        status, refusal = engine.ask("/v1/load", {"model": str(folder)})
        assert (status, why in refusal["error"]["message"]) == (400, True)
    assert engine.ask("/v1/completions", ASKED)[1]["metadata"]["weight_version"] == policy
    assert engine.load(models / "one") == policy.replace("3-", "4-", 1)


def test_engine_says_in_one_line_what_is_wrong_and_ends_when_interrupted(engine: Engine, models: Path) -> None:
    taken = shoal("engine", "--model", str(models / "one"), "--port", str(engine.address.port))
    assert (taken.returncode, taken.stderr.count("\n")) == (2, 1)
    assert "choose another --port" in taken.stderr
    none = shoal("engine", "--model", str(models), "--port", "0")
    assert none.returncode == 2
    assert none.stderr.splitlines()[-1].startswith("shoal: the model in ")
    with Engine(models / "one") as other:
        assert other.interrupt() == 130
