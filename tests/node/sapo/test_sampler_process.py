"""A real sampler process, with the test as its daemon and an engine that does as it is told."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from shoal.node.child_process import Child
from shoal.node.pipe import Pause, Resume
from shoal.node.sapo.agent_messages import AgentReport, Asked, Begin, Finished, Made, Ready, RoundReport, Waiting
from shoal.node.sapo.dialogue import turns_in
from shoal.node.sapo.engine import SAMPLER_PROGRAM, running_agent
from shoal.node.sapo.families import load_family
from shoal.node.sapo.higher_lower import HigherLower
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.protocol.manifest_rollouts import TaskEntry
from shoal.protocol.rollouts import Drawn, RolloutGroup, Sampling, decode_group, sampling_seed
from tests.node.sapo.agent_lab import FAMILY, install_family
from tests.node.sapo.scripted_engine import Act, ScriptedEngine, answer, completions, http
from tests.node.sapo.test_agent_process import DEADLINE_S, ME, SWARM, begin
from tests.waiting import until

GROUP = completions("0", "1", "2", "3", policy="7-aa")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskSource:
    """The swarm's tasks, here and in the sampler."""
    install_family(tmp_path / "families", monkeypatch)
    monkeypatch.syspath_prepend(tmp_path / "families")
    return TaskSource([TaskChoice(family=load_family("even"), config="default")])


def orders(folder: Path, engine: ScriptedEngine, *, rounds: int | None = 1, labels: bool = True) -> Begin:
    """Two groups of four a round; each is drawn before the next one is asked for, so that scripts are followed."""
    begun = begin(folder, role="sample", rounds=rounds)
    section = msgspec.structs.replace(begun.rollouts, labels=labels)
    return msgspec.structs.replace(begun, engine=tuple(engine.address), rollouts=section)


def with_sampler(body: Callable[[Child[AgentReport]], Awaitable[None]]) -> int | None:
    """Run `body` beside a sampler; its exit status."""

    async def main() -> int | None:
        with trio.fail_after(DEADLINE_S):
            async with running_agent(1, program=SAMPLER_PROGRAM) as child:
                await body(child)
            return child.process.returncode

    return trio.run(main)


def round_of(folder: Path, engine: ScriptedEngine, *, labels: bool = True) -> tuple[list[Made], list[str], RoundReport]:
    """One round: what it made, why it waited, and how the round ended."""
    made, waited, ended = [], [], []

    async def body(child: Child[AgentReport]) -> None:
        await child.send(orders(folder, engine, labels=labels))
        assert isinstance(await child.receive(), Ready)
        while not isinstance(report := await child.receive(), Finished):
            match report:
                case Made():
                    made.append(report)
                case Waiting():
                    waited.append(report.reason)
                case RoundReport():
                    ended.append(report)
                case other:
                    assert isinstance(other, Asked)

    assert with_sampler(body) == 0
    return made, waited, ended[0]


def groups(made: list[Made]) -> list[RolloutGroup]:
    return sorted((decode_group(one.group) for one in made), key=lambda group: group.task.index)


DRAWN = Drawn.of((-0.5, -1.0), (3, 1))


def test_groups_have_the_label_of_who_drew_them_and_seeds_that_are_assigned(source: TaskSource, tmp_path: Path) -> None:
    with ScriptedEngine([], then=GROUP) as engine:
        made, waited, done = round_of(tmp_path, engine)
    tasks = [source.draw(SWARM, ME, 0, index) for index in range(2)]
    assert [group.task for group in groups(made)] == [task.ref for task in tasks]
    for group in groups(made):
        assert group.completions == ("0", "1", "2", "3")
        assert (group.policy_version, group.round) == (7, 0)
        assert group.sampling == Sampling(policy="7-aa", drawn=(DRAWN,) * 4)
    assert {(one["prompt"], one["seed"]) for one in engine.asked} == {
        (task.question, sampling_seed(SWARM, ME, 0, task.ref.index)) for task in tasks
    }
    assert {one["max_tokens"] for one in engine.asked} == {16}
    assert [one.rewards for one in made] == [(1.0, 0.0, 1.0, 0.0)] * 2
    assert (done.reward, done.local, done.informative, waited) == (0.5, 2, 2, [])


def test_engine_without_log_probabilities_gives_groups_that_say_so(source: TaskSource, tmp_path: Path) -> None:
    with ScriptedEngine([], then=completions("0", "1", policy="org/model", log_probs=False)) as engine:
        made, _, _ = round_of(tmp_path, engine)
    for group in groups(made):
        assert group.completions == ("0", "1", "0", "1")
        assert (group.policy_version, group.sampling) == (0, Sampling(policy="org/model"))


def test_swarm_that_asks_for_no_labels_gets_groups_as_every_node_knows_them(source: TaskSource, tmp_path: Path) -> None:
    with ScriptedEngine([], then=GROUP) as engine:
        made, _, _ = round_of(tmp_path, engine, labels=False)
    assert [(group.policy_version, group.sampling) for group in groups(made)] == [(7, msgspec.UNSET)] * 2


def test_tasks_that_cannot_be_made_are_skipped(source: TaskSource, tmp_path: Path) -> None:
    fails = FAMILY.replace("return f", 'if index in (0, 2, 3):\n            raise LocalError("odd")\n        return f')
    imports = "from shoal.protocol.errors import LocalError\n"
    (tmp_path / "families" / "even_tasks.py").write_text(fails.replace("\n\n\nclass", f"\n{imports}\n\nclass"))
    with ScriptedEngine([], then=GROUP) as engine:
        made, _, done = round_of(tmp_path, engine)
    assert [group.task for group in groups(made)] == [source.draw(SWARM, ME, 0, index).ref for index in (1, 4)]
    assert done.local == 2


def test_engine_that_gives_nothing_costs_groups_and_the_round_ends(source: TaskSource, tmp_path: Path) -> None:
    with ScriptedEngine([], then=answer({"error": "kaput"}, 500)) as engine:
        made, waited, done = round_of(tmp_path, engine)
    assert (made, done.local, done.reward) == ([], 0, None)
    assert len(waited) == 6
    assert all("it answers 500, kaput" in reason for reason in waited)


def test_sampler_rests_and_ends_when_told_though_its_engine_answers_nothing(source: TaskSource, tmp_path: Path) -> None:
    with ScriptedEngine([], then=GROUP) as engine:
        engine.then = engine.hang

        async def body(child: Child[AgentReport]) -> None:
            await child.send(orders(tmp_path, engine, rounds=None))
            assert isinstance(await child.receive(), Ready)
            await child.send(Pause())
            await child.send(Resume())
            await until(lambda: engine.asked)

        assert with_sampler(body) == 0


# --- dialogues ---


def bisecting(*, policies: Callable[[int], str] = lambda asked: "7-aa") -> Act:
    """An engine that guesses the middle of what the prompt leaves, told by what was answered there."""
    seen = itertools.count()

    def act(stream: socket.socket, asked: dict[str, Any]) -> None:
        question, *turns = asked["prompt"].split("\n")
        low, high = (int(word) for word in re.findall(r"\d+", question)[:2])
        for guess, reply in zip(turns[0::3], turns[1::3], strict=False):
            assert reply in ("higher", "lower")
            low, high = (int(guess) + 1, high) if reply == "higher" else (low, int(guess) - 1)
        choices = [{"text": str((low + high) // 2), "finish_reason": "stop"}] * asked.get("n", 1)
        usage = {"completion_tokens": 3 * len(choices)}
        reply = {"choices": choices, "metadata": {"weight_version": policies(next(seen))}, "usage": usage}
        stream.sendall(http(json.dumps(reply).encode()))

    return act


def dialogue_round(
    folder: Path, engine: ScriptedEngine, *, config: dict[str, int] | None = None, **section: Any
) -> tuple[list[Made], RoundReport]:
    """A round of two groups, each of four dialogues."""
    made, ended = [], []
    order = orders(folder, engine)
    tasks = [TaskEntry(family="higher_lower", config=config or {"numbers": 7, "turns": 3})]
    limited = {"completion_tokens": 48, **section}
    order = msgspec.structs.replace(order, rollouts=msgspec.structs.replace(order.rollouts, tasks=tasks, **limited))

    async def body(child: Child[AgentReport]) -> None:
        await child.send(order)
        assert isinstance(await child.receive(), Ready)
        while not isinstance(report := await child.receive(), Finished):
            if isinstance(report, Made):
                made.append(report)
            if isinstance(report, RoundReport):
                ended.append(report)

    assert with_sampler(body) == 0
    return made, ended[0]


def test_engine_goes_on_after_each_answer_until_its_dialogues_are_over(tmp_path: Path) -> None:
    with ScriptedEngine([], then=bisecting()) as engine:
        made, done = dialogue_round(tmp_path, engine)
    assert done.reward == 1.0, "whoever halves seven numbers three times has the one"
    family = HigherLower()
    source = TaskSource([TaskChoice(family=family, config={"numbers": 7, "turns": 3})])
    for group in groups(made):
        task = source.task(group.task)
        assert group.completions == (family.solution(task),) * 4
        assert group.sampling == Sampling(policy="7-aa"), "no labels by token"
    seeds = [one["seed"] for one in engine.asked]
    assert len(set(seeds)) == len(seeds), "no two turns are drawn by the same chance"
    limits = {len(re.findall("higher|lower", one["prompt"])): one["max_tokens"] for one in engine.asked}
    assert limits[0] == 48
    assert all(limits[turn] <= limits[turn - 1] - 3 for turn in range(1, len(limits)))


@pytest.mark.parametrize(
    ("limit", "text", "more", "turns"),
    [
        pytest.param(8, "3", {}, 2, id="each turn a token at least, each answer three"),
        pytest.param(16, "x" * 60, {}, 1, id="by its characters, where nobody says how many tokens it has"),
        pytest.param(48, "3", {"finish_reason": "length"}, 1, id="cut off"),
        pytest.param(24, "3", {"logprobs": {"token_logprobs": [-0.5] * 20}}, 2, id="by its log-probabilities"),
    ],
)
def test_engines_dialogue_is_no_longer_than_a_completion_may_be(
    tmp_path: Path, limit: int, text: str, more: dict[str, Any], turns: int
) -> None:
    """The guesses are wrong, so that only the limit ends it; the third case is what a turn may have without `usage`."""

    def act(stream: socket.socket, asked: dict[str, Any]) -> None:
        choice = {"text": f"-{text}", "finish_reason": "stop", **(more if asked["max_tokens"] == limit else {})}
        reply = {"choices": [choice] * asked.get("n", 1), "metadata": {"weight_version": "7-aa"}}
        stream.sendall(http(json.dumps(reply).encode()))

    config = {"numbers": 7, "turns": 64}
    with ScriptedEngine([], then=act) as engine:
        made, _ = dialogue_round(tmp_path, engine, config=config, completion_tokens=limit)
    assert {one["max_tokens"] for one in engine.asked} > {limit} if turns > 1 else {limit}
    assert all(one["max_tokens"] >= 1 for one in engine.asked)
    for group in groups(made):
        for text in group.completions:
            said, replies = turns_in(text)
            assert len(said) == len(replies) + 1 == turns


def test_group_whose_policy_changed_between_two_turns_is_given_up(tmp_path: Path) -> None:
    with ScriptedEngine([], then=bisecting(policies=lambda asked: f"{asked}-aa")) as engine:
        made, done = dialogue_round(tmp_path, engine, config={"numbers": 10_000, "turns": 3})
    assert (made, done.local) == ([], 0), "nobody finds one of so many numbers in the first turn"
