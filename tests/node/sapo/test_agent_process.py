"""A real agent process, with the test as its daemon: what it makes, what it believes, and how it rests and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio
from msgspec import structs

from shoal.node.child_process import Child, ChildRaised
from shoal.node.pipe import Pause, Resume
from shoal.node.sapo import engine
from shoal.node.sapo.agent_messages import (
    AgentReport,
    Asked,
    Begin,
    Delivered,
    Finished,
    Judged,
    Made,
    Probed,
    Pulled,
    Ready,
    Role,
    RoundReport,
    Saved,
    Take,
)
from shoal.node.sapo.agent_process import lessons_seed
from shoal.node.sapo.engine import running_agent
from shoal.node.sapo.families import load_family
from shoal.node.sapo.selection import Verdict
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.sapo.unfinished import NAME
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest_rollouts import RolloutsSection, TaskEntry
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, RolloutGroup, Sampling, announce_group, decode_group, encode_group
from shoal.protocol.wire import SwarmId
from tests.node.sapo.agent_lab import TINY_POLICY, install_family

SWARM = SwarmId(bytes(range(32)))
ME, HONEST, LIAR, THIEF = (Identity.generate().peer_id for _ in range(4))
DEADLINE_S = 240.0
"""Far more than it takes on an idle machine: it bounds a test that fails, not one that passes."""
EVEN, ODD = "0 is even", "1 is odd"
HALVES = (EVEN, ODD, EVEN, ODD)


def begin(folder: Path, role: Role = "train", rounds: int | None = None, announced: int = 0) -> Begin:
    return Begin(
        policy="char-policy",
        options=TINY_POLICY,
        seed=0,
        swarm_id=SWARM,
        me=ME,
        folder=str(folder / "agent"),
        role=role,
        rollouts=RolloutsSection(
            tasks=[TaskEntry(family="even")], local=2, external=2, group_size=4, completion_tokens=16
        ),
        learning_rate=1e-3,
        clip_norm=1.0,
        device="cpu",
        threads=1,
        announced=announced,
        rounds=rounds,
    )


def test_each_agent_is_taught_lessons_of_its_own_unless_all_are_to_begin_with_one_policy(tmp_path: Path) -> None:
    seeds = [lessons_seed(structs.replace(begin(tmp_path), me=peer)) for peer in (ME, HONEST, ME)]
    assert seeds[0] == seeds[2] != seeds[1], "the same again after a restart"
    assert lessons_seed(structs.replace(begin(tmp_path), seed=1)) not in seeds
    averaged = [lessons_seed(structs.replace(begin(tmp_path), me=peer, averages="node")) for peer in (ME, HONEST)]
    assert averaged == [0, 0]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskSource:
    """The swarm's tasks, here and in the agent."""
    install_family(tmp_path / "families", monkeypatch)
    monkeypatch.syspath_prepend(tmp_path / "families")
    return TaskSource([TaskChoice(family=load_family("even"), config="default")])


def offered(
    source: TaskSource, peer: PeerId, texts: Sequence[str], *, told: tuple[float, ...], index: int = 0, owner: PeerId
) -> tuple[Offer, bytes]:
    """What `peer` offers as its answer to the task of `owner`, and what it says that is worth."""
    task = source.draw(SWARM, owner, 0, index).ref
    group = RolloutGroup(origin=peer, round=0, policy_version=0, task=task, completions=tuple(texts))
    data = encode_group(group)
    return Offer(
        announcement=announce_group(group, data, told), origin=peer, boot=1, sequence=1, arrived=7, order=7
    ), data


async def deliver(child: Child[AgentReport], groups: Sequence[tuple[Offer, bytes]]) -> None:
    for offer, data in groups:
        await child.send(Pulled(offer=offer, group=data))
    await child.send(Delivered())


async def answer_until_done(
    child: Child[AgentReport],
    *deliveries: Sequence[tuple[Offer, bytes]],
    questions: dict[bytes, str] | None = None,
) -> tuple[list[Made], list[Verdict], RoundReport]:
    """Be the daemon for a round: what the agent made, what it found of these deliveries, and how the round ended.

    questions: what it says that groups answer, by their digests, is put there.
    """
    made, verdicts, left = [], list[Verdict](), list(deliveries)
    questions = {} if questions is None else questions
    while True:
        match await child.receive():
            case Made() as one:
                made.append(one)
            case Asked() as asked:
                questions[asked.digest] = asked.question
            case Take():
                await deliver(child, left.pop(0) if left else [])
            case Judged() as judged:
                verdicts += judged.verdicts
                if any(verdict.refused for verdict in judged.verdicts):
                    await deliver(child, left.pop(0) if left else [])
            case RoundReport() as done:
                assert not left
                return made, verdicts, done
            case Saved():
                pass
            case other:
                raise AssertionError(other)


async def reports_until_silent(child: Child[AgentReport]) -> int:
    """How much an agent still says, its questions answered, before it is silent for a second; at most 100 are heard."""
    for heard in range(100):
        with trio.move_on_after(1.0):
            if isinstance(await child.receive(), Take):
                await child.send(Delivered())
            continue
        return heard
    return 100


def with_agent(body: Callable[[Child[AgentReport]], Awaitable[None]]) -> int | None:
    """Run `body` beside an agent; the agent's exit status."""

    async def main() -> int | None:
        with trio.fail_after(DEADLINE_S):
            async with running_agent(1) as child:
                await body(child)
            return child.process.returncode

    return trio.run(main)


def test_agent_trains_on_what_it_judged_itself_and_rests_and_ends_when_told(source: TaskSource, tmp_path: Path) -> None:
    honest = offered(source, HONEST, HALVES, told=(1.0, 0.0, 1.0, 0.0), owner=HONEST)
    wrong = offered(source, LIAR, (ODD, ODD, ODD, ODD), told=(1.0, 1.0, 1.0, 0.0), owner=LIAR)
    stolen = offered(source, THIEF, HALVES, told=(1.0, 0.0, 1.0, 0.0), owner=HONEST)
    late = offered(source, HONEST, HALVES, told=(1.0, 0.0, 1.0, 0.0), owner=HONEST, index=1)

    async def body(child: Child[AgentReport]) -> None:
        await child.send(begin(tmp_path, announced=7))
        ready = await child.receive()
        assert isinstance(ready, Ready)
        assert (ready.round, ready.restored, ready.reward) == (7, None, None)
        assert await child.receive() == Saved(round=7)
        assert [(kind.family, kind.version, kind.weight) for kind in ready.tasks] == [("even", "1", 1)]
        assert ready.scorable == ("even",)
        questions: dict[bytes, str] = {}
        made, verdicts, done = await answer_until_done(child, [wrong, stolen], [late, honest], questions=questions)
        assert verdicts == [
            Verdict(refused=Reason.HINT),
            Verdict(refused=Reason.FOREIGN_TASK),
            Verdict(rewards=(1.0, 0.0, 1.0, 0.0)),
            Verdict(rewards=(1.0, 0.0, 1.0, 0.0)),
        ]
        assert (done.round, done.local, done.external, done.unencodable) == (7, 2, 2, 0)
        for index, one in enumerate(made):
            group = decode_group(one.group)
            assert (group.origin, group.round, group.task) == (ME, 7, source.table.assigned(SWARM, ME, 7, index))
            assert one.announcement == announce_group(group, one.group, one.rewards)
            assert one.rewards == tuple(float(t[:1] != "" and ord(t[0]) % 2 == 0) for t in group.completions)
        groups = {one.announcement.digest: one.group for one in made}
        groups |= {offer.digest: data for offer, data in (wrong, late, honest)}  # but for the one that was not opened
        assert questions == {digest: source.task(decode_group(data).task).question for digest, data in groups.items()}
        assert done.reward == sum(sum(one.rewards) for one in made) / (4 * len(made))

        await child.send(Pause())
        assert await reports_until_silent(child) < 2 * 4  # no more than the round that it was in
        await child.send(Resume())
        _, _, done = await answer_until_done(child)
        assert (done.external, done.local) == (0, 4)

    assert with_agent(body) == 0
    assert [path.name for path in (tmp_path / "agent").iterdir() if int(path.stem) > 7]


def test_groups_that_were_begun_go_on_after_a_kill_and_none_is_made_twice(source: TaskSource, tmp_path: Path) -> None:
    lives: list[list[Made]] = []

    async def body(child: Child[AgentReport]) -> None:
        announced = 1 + max((one.announcement.round for life in lives for one in life), default=-1)
        order = begin(tmp_path, announced=announced)
        partial = structs.replace(order.rollouts, external=0, completion_tokens=64, over_provision=4.0, labels=True)
        me, digits = Identity.from_seed(bytes(32)).peer_id, TINY_POLICY | {"alphabet": "0123456789"}
        await child.send(structs.replace(order, me=me, options=digits, rollouts=partial))
        ready = await child.receive()
        assert isinstance(ready, Ready)
        assert not ready.refused
        lives.append([])
        for _ in range(3):
            made, _, _ = await answer_until_done(child)
            lives[-1] += made
        child.process.kill()  # in a round

    assert [with_agent(body) for _ in range(3)] == [-signal.SIGKILL] * 3
    made = [one for life in lives for one in life]
    assert len({one.announcement.task for one in made}) == len(made) == 3 * 3 * 2
    newest = max(one.announcement.round for one in lives[0])
    groups = [decode_group(one.group) for life in lives[1:] for one in life if one.announcement.round <= newest]
    assert groups, "of those that were begun before"
    labels = [group.sampling for group in groups]
    assert all(
        isinstance(label, Sampling) and label.policy == f"{group.policy_version}-char-policy"
        for label, group in zip(labels, groups, strict=True)
    )
    runs = [one.versions for label in labels if label for one in label.drawn if one.versions]
    assert any(len(one) > 1 and one[0][0] <= newest < one[-1][0] for one in runs), "tokens of policies of two lives"


def test_agent_whose_begun_groups_cannot_be_written_says_so_and_goes_on(source: TaskSource, tmp_path: Path) -> None:
    (tmp_path / "agent" / NAME / "full").mkdir(parents=True)

    async def body(child: Child[AgentReport]) -> None:
        order = begin(tmp_path, role="sample", rounds=2)
        await child.send(structs.replace(order, rollouts=structs.replace(order.rollouts, over_provision=2.0)))
        ready = await child.receive()
        assert isinstance(ready, Ready)
        assert NAME in ready.refused
        reports: list[AgentReport] = []
        while not any(isinstance(one, Finished) for one in reports):
            reports.append(await child.receive())
            if isinstance(reports[-1], RoundReport):
                await child.send(Resume())
        failures = [one.failure for one in reports if isinstance(one, Saved) and one.failure]
        assert len(failures) >= 2  # one a round at least
        assert all(one.startswith("groups that are begun would not go on after a restart: ") for one in failures)
        assert sum(isinstance(one, Made) for one in reports) == 4

    with_agent(body)


def test_agent_makes_as_many_rounds_as_it_is_told_and_a_sampler_asks_for_nothing(
    source: TaskSource, tmp_path: Path
) -> None:
    async def body(child: Child[AgentReport]) -> None:
        await child.send(begin(tmp_path, role="sample", rounds=2))
        kinds: list[type] = []
        while not {Finished, Take} & set(kinds):
            kinds.append(type(await child.receive()))
            if kinds.count(RoundReport) == 1 and kinds[-1] is RoundReport:
                with trio.move_on_after(0.5):
                    pytest.fail(f"it made {await child.receive()} without being told to go on")
                await child.send(Resume())
        round = [Made, Asked, Made, Asked, RoundReport]
        assert kinds == [Ready, Saved, *round, *round, Saved, Finished]

    assert with_agent(body) == 0


def test_a_trainer_is_evaluated_before_the_first_round_and_after_the_last_and_tells_of_each_round(
    source: TaskSource, tmp_path: Path
) -> None:
    order = structs.replace(begin(tmp_path, rounds=3), evaluate_rounds=2)

    async def body(child: Child[AgentReport]) -> None:
        await child.send(order)
        probed, done = list[Probed](), list[RoundReport]()
        while True:
            match await child.receive():
                case Probed() as one:
                    probed.append(one)
                case RoundReport() as one:
                    done.append(one)
                case Take():
                    await child.send(Delivered())
                case Finished():
                    break
        assert (probed[0].round, probed[-1].round, probed[0].tasks) == (0, 3, 200)
        assert all(one.by_family == {"even": one.reward} for one in probed)
        assert probed[0].reward * 200 == pytest.approx(round(probed[0].reward * 200))
        for one in done:
            assert one.length is not None
            assert one.distinct is not None
            assert one.generated_tokens == pytest.approx(one.length * 4 * one.local)
            assert 0.25 <= one.distinct <= 1.0
            assert (one.gradient_norm is not None) == (one.informative > 0)

    assert with_agent(body) == 0


@pytest.mark.parametrize("endless", ["while True: pass", "re.match('(a+)+$', 64 * 'a' + '!')"])  # this holds the lock
def test_agent_whose_direct_scorer_never_answers_ends_when_its_node_leaves(
    endless: str, source: TaskSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    module = tmp_path / "families" / "even_tasks.py"
    body_at = "    def score(self, task, text):\n"
    begins = f"        import re\n        open({str(asked)!r}, 'w').close()\n        {endless}\n"
    module.write_text(module.read_text().replace(body_at, body_at + begins))
    monkeypatch.setattr(engine, "STOP_DEADLINE_S", 0.2)

    async def body(child: Child[AgentReport]) -> None:
        await child.send(begin(tmp_path))
        await trio.to_thread.run_sync(asked.read_text)

    assert with_agent(body) == -signal.SIGKILL


def test_agent_without_its_tasks_says_why_in_one_line(tmp_path: Path) -> None:
    async def body(child: Child[AgentReport]) -> None:
        await child.send(begin(tmp_path))
        with pytest.raises(ChildRaised, match="unknown task family 'even'") as caught:
            await child.receive()
        assert caught.value.failed.configuration

    with_agent(body)
