"""A sampler by an engine that follows: which policies it takes, and that a group is of the policy that was loaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.node.option import HostPort
from shoal.node.sapo import engine_follower
from shoal.node.sapo.completions import Completion, Reply
from shoal.node.sapo.dialogue import Dialogue, transcript
from shoal.node.sapo.engine_follower import FollowingSampler
from shoal.node.sapo.policies import PolicyLimits
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Config, Task, TaskChoice, TaskSource
from shoal.node.workloads.causal_lm_model import EXPORT_FOLDER
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from tests.node.sapo.sums import SUMS, sum_task
from tests.node.sapo.test_agent_process import begin
from tests.node.sapo.test_daemon_line import Line

SOURCE = TaskSource([TaskChoice(family=SUMS, config={})])


class Written:
    """A policy whose file says how often it was written. Its tokens are characters' codes, 0 the end token."""

    completion_limit = 16
    drawn_by = None

    def __init__(self) -> None:
        self.times = 0

    def export(self, folder: Path) -> None:
        self.times += 1
        (folder / EXPORT_FOLDER).mkdir()
        (folder / EXPORT_FOLDER / "times").write_text(str(self.times))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_completion(self, text: str) -> tuple[int, ...]:
        return (*map(ord, text), 0)

    def encode_reply(self, text: str) -> tuple[int, ...]:
        return (*map(ord, text), 1)


class Engine:
    """What a client says to an engine: loaded, and asked for."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.asked: list[object] = []
        self.policy = "0-began"
        self.limits: list[int | None] = []

    def load(self, model: Path, version: int) -> str:
        self.loaded.append(((model / "times").read_text(), version))
        self.policy = f"{version}-{len(self.loaded)}"
        return self.policy

    def group(self, prompt: object, count: int, seed: int, *, max_tokens: int | None = None) -> Reply:
        self.asked.append(prompt)
        self.limits.append(max_tokens)
        return Reply(policy=self.policy, completions=(Completion(text="1", drawn=None),) * count, tokens=count)


class StoppableLine(Line):
    def __init__(self) -> None:
        super().__init__()
        self.stopping = threading.Event()


class Factory:
    warm_up = None

    def build(self, limits: PolicyLimits) -> Any:
        return Written()


def sampler(folder: Path) -> FollowingSampler:
    asked = msgspec.structs.replace(begin(folder), averages=str(folder), engine=HostPort("127.0.0.1", 1), role="sample")
    return FollowingSampler(asked, StoppableLine(), source=SOURCE, scorer=Scorer(SOURCE))  # type: ignore[arg-type]


def test_policy_that_no_engine_reads_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the policy 'char-policy' has no format that an engine reads"):
        sampler(tmp_path)


def test_engine_is_handed_what_is_new_and_what_another_policy_drew_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_follower, "load_policy", lambda name, options: Factory())
    one, engine, task = sampler(tmp_path), Engine(), sum_task(0, 0)
    one._client = engine  # type: ignore[assignment]
    with Scorer(SOURCE) as scorer:
        one._scorer = scorer
        one._hand_over()
        assert engine.loaded == [], "there is no policy yet"
        for version in (4, 4, 7):
            one._held.version = version
            one._hand_over()
        assert engine.loaded == [("1", 4), ("2", 7)]
        drawn = one._draw(task)
        assert engine.asked == [tuple(map(ord, task.question))], "the prompt that trainers have"
        assert drawn is not None
        group = one._scored(task, drawn)
        assert group is not None
        assert group.policy_version == 7
        engine.policy = "7-began"  # it was started again, and calls its own so
        other = one._draw(task)
        assert other is not None
        assert one._scored(task, other) is None
        one._hand_over()
        assert engine.loaded[2:] == [("3", 7)], "the newest is loaded anew"
        one._forget_loaded()  # there was a rollback, and round 7 again
        one._hand_over()
        assert engine.loaded[3:] == [("4", 7)], "of the same number, and another policy"
        again = one._draw(task)
        assert again is not None
        assert one._scored(task, again) is not None
    assert [path.name for path in (tmp_path / "agent" / engine_follower.FOLDER).iterdir()] == ["7"]


def test_engine_that_refuses_a_policy_is_given_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_follower, "load_policy", lambda name, options: Factory())
    one, engine = sampler(tmp_path), Engine()
    one._client = engine  # type: ignore[assignment]
    taken, errors = engine.load, [NetworkError("away"), RemoteError("damaged"), RemoteError("damaged")]

    def load(model: Path, version: int) -> str:
        policy = taken(model, version)
        if errors:
            raise errors.pop(0)
        return policy

    engine.load = load  # type: ignore[method-assign]
    one._held.version = 7
    assert [one._hand_over() for _ in range(2)] == [False, False]
    assert engine.loaded == [("1", 7), ("1", 7)], "what lies there whole is not written again"
    one._held.version = 8
    assert [one._hand_over() for _ in range(2)] == [False, True]
    assert engine.loaded[2:] == [("2", 8), ("3", 8)], "what was refused may be damaged"
    assert one._hand_over()
    assert len(engine.loaded) == 4


class Parrot(Dialogue):
    """Answers with what was said, and a mark."""

    name = "parrot"
    version = "1"
    scoring = "direct"

    def question(self, config: Config, seed: int, index: int) -> str:
        return "?"

    def reply(self, task: Task, said: Sequence[str]) -> str | None:
        return f"{said[-1]}!"

    def outcome(self, task: Task, said: Sequence[str]) -> float:
        return 1.0


def test_dialogue_goes_on_in_the_policys_own_tokens_for_as_long_as_these_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_follower, "load_policy", lambda name, options: Factory())
    one, engine, task = sampler(tmp_path), Engine(), Parrot().make({}, 0, 0)
    one._client = engine  # type: ignore[assignment]
    first = one._draw(task)
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        drawn = one._go_on(pool, task, first)
    assert drawn is not None
    turn = (ord("1"), 0, ord("1"), ord("!"), 1)  # said, its end, the answer and what asks for more
    prompts = [(ord("?"), *turn * turns) for turns in range(4)]
    assert set(engine.asked) == set(prompts)
    assert set(zip(engine.asked, engine.limits, strict=True)) == set(zip(prompts, [None, 11, 6, 1], strict=True))
    assert {one.text for one in drawn.completions} == {transcript(["1"] * 4, ["1!"] * 3)}
