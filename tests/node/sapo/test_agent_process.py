"""A real agent process, with the test as its daemon: what it makes, what it believes, and how it rests and ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio

from shoal.node.sapo.agent_child import AgentChild, ChildRaised, running_agent
from shoal.node.sapo.agent_messages import (
    Ask,
    Begin,
    Delivered,
    Done,
    Finished,
    Made,
    Offered,
    Pulled,
    Ready,
    Role,
    Saved,
    Want,
)
from shoal.node.sapo.families import load_family
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.training.trainer_messages import Pause, Resume
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest_rollouts import RolloutsSection, TaskEntry
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, RolloutGroup, announce_group, decode_group, encode_group
from shoal.protocol.wire import SwarmId
from tests.node.sapo.agent_lab import TINY_POLICY, install_family

SWARM = SwarmId(bytes(range(32)))
ME, HONEST, LIAR, THIEF, VANDAL = (Identity.generate().peer_id for _ in range(5))
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
    return Offer(announcement=announce_group(group, data, told), origin=peer, boot=1, sequence=1, arrived=7), data


async def answer_until_done(child: AgentChild, answer: Offered, groups: dict[bytes, bytes]) -> tuple[list[Made], Done]:
    """Be the daemon for a round: what the agent made, and how the round ended."""
    made = []
    while True:
        match await child.report():
            case Made() as one:
                made.append(one)
            case Ask():
                await child.order(answer)
                answer = Offered(offers=())
            case Want() as want:
                for digest in want.digests:
                    if digest in groups:
                        await child.order(Pulled(digest=digest, group=groups[digest]))
                await child.order(Delivered())
            case Done() as done:
                return made, done
            case Saved():
                pass
            case other:
                raise AssertionError(other)


async def reports_until_silent(child: AgentChild) -> int:
    """How much an agent still says, its questions answered, before it is silent for a second; at most 100 are heard."""
    for heard in range(100):
        with trio.move_on_after(1.0):
            if isinstance(await child.report(), Ask):
                await child.order(Offered(offers=()))
            continue
        return heard
    return 100


def with_agent(body: Callable[[AgentChild], Awaitable[None]]) -> int | None:
    """Run `body` beside an agent; the agent's exit status."""

    async def main() -> int | None:
        with trio.fail_after(DEADLINE_S):
            async with running_agent(threads=1) as child:
                await body(child)
            return child.process.returncode

    return trio.run(main)


def test_agent_trains_on_what_it_judged_itself_and_rests_and_ends_when_told(source: TaskSource, tmp_path: Path) -> None:
    honest = offered(source, HONEST, HALVES, told=(1.0, 0.0, 1.0, 0.0), owner=HONEST)
    wrong = offered(source, LIAR, (ODD, ODD, ODD, ODD), told=(1.0, 1.0, 1.0, 0.0), owner=LIAR)
    stolen = offered(source, THIEF, HALVES, told=(1.0, 0.0, 1.0, 0.0), owner=HONEST)
    offers = [honest, wrong, stolen]
    answer = Offered(offers=tuple(offer for offer, _ in offers), faults=((VANDAL, Reason.FORGED),) * 2)

    async def body(child: AgentChild) -> None:
        await child.order(begin(tmp_path, announced=7))
        ready = await child.report()
        assert isinstance(ready, Ready)
        assert (ready.round, ready.restored, ready.reward) == (7, None, None)
        assert await child.report() == Saved(round=7)
        made, done = await answer_until_done(child, answer, {offer.digest: data for offer, data in offers})
        assert (done.round, done.local, done.external) == (7, 3, 1)
        assert (done.origins, done.external_reward) == ({HONEST: 1}, 0.5)
        assert {Reason(reason) for reason in done.rejected} == {Reason.FOREIGN_TASK, Reason.HINT}
        assert done.ignored == (VANDAL,)
        assert done.used_bytes == len(honest[1])
        for index, one in enumerate(made):
            group = decode_group(one.group)
            assert (group.origin, group.round, group.task) == (ME, 7, source.assigned(SWARM, ME, 7, index))
            assert one.rewards == tuple(float(t[:1] != "" and ord(t[0]) % 2 == 0) for t in group.completions)
        assert done.reward == sum(sum(one.rewards) for one in made) / (4 * len(made))

        await child.order(Pause())
        assert await reports_until_silent(child) < 2 * 4  # no more than the round that it was in
        await child.order(Resume())
        _, done = await answer_until_done(child, Offered(offers=()), {})
        assert (done.external, done.local) == (0, 4)

    assert with_agent(body) == 0
    assert [path.name for path in (tmp_path / "agent").iterdir() if int(path.stem) > 7]


def test_agent_makes_as_many_rounds_as_it_is_told_and_a_sampler_asks_for_nothing(
    source: TaskSource, tmp_path: Path
) -> None:
    async def body(child: AgentChild) -> None:
        await child.order(begin(tmp_path, role="sample", rounds=2))
        kinds: list[type] = []
        while not {Finished, Ask} & set(kinds):
            kinds.append(type(await child.report()))
        assert kinds == [Ready, Saved, Made, Made, Done, Made, Made, Done, Saved, Finished]

    assert with_agent(body) == 0


def test_agent_without_its_tasks_says_why_in_one_line(tmp_path: Path) -> None:
    async def body(child: AgentChild) -> None:
        await child.order(begin(tmp_path))
        with pytest.raises(ChildRaised, match="unknown task family 'even'") as caught:
            await child.report()
        assert caught.value.failed.configuration

    with_agent(body)
