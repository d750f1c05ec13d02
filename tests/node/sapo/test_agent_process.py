"""A real agent process, with the test as its daemon: what it makes, what it believes, and how it rests and ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio
from msgspec import structs

from shoal.node.child_process import Child, ChildRaised
from shoal.node.pipe import Pause, Resume
from shoal.node.sapo.agent_messages import (
    AgentReport,
    Asked,
    Begin,
    Delivered,
    Done,
    Finished,
    Judged,
    Made,
    Probed,
    Pulled,
    Ready,
    Role,
    Saved,
    Take,
)
from shoal.node.sapo.engine import running_agent
from shoal.node.sapo.families import load_family
from shoal.node.sapo.selection import Verdict
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest_rollouts import RolloutsSection, TaskEntry
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, RolloutGroup, announce_group, decode_group, encode_group
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
) -> tuple[list[Made], list[Verdict], Done]:
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
            case Done() as done:
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


def test_agent_makes_as_many_rounds_as_it_is_told_and_a_sampler_asks_for_nothing(
    source: TaskSource, tmp_path: Path
) -> None:
    async def body(child: Child[AgentReport]) -> None:
        await child.send(begin(tmp_path, role="sample", rounds=2))
        kinds: list[type] = []
        while not {Finished, Take} & set(kinds):
            kinds.append(type(await child.receive()))
        round = [Made, Asked, Made, Asked, Done]
        assert kinds == [Ready, Saved, *round, *round, Saved, Finished]

    assert with_agent(body) == 0


def test_a_trainer_is_evaluated_before_the_first_round_and_after_the_last_and_tells_of_each_round(
    source: TaskSource, tmp_path: Path
) -> None:
    order = structs.replace(begin(tmp_path, rounds=3), evaluate_rounds=2)

    async def body(child: Child[AgentReport]) -> None:
        await child.send(order)
        probed, done = list[Probed](), list[Done]()
        while True:
            match await child.receive():
                case Probed() as one:
                    probed.append(one)
                case Done() as one:
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


def test_agent_without_its_tasks_says_why_in_one_line(tmp_path: Path) -> None:
    async def body(child: Child[AgentReport]) -> None:
        await child.send(begin(tmp_path))
        with pytest.raises(ChildRaised, match="unknown task family 'even'") as caught:
            await child.receive()
        assert caught.value.failed.configuration

    with_agent(body)
