"""An agent's line to its daemon: which groups go out, and how long it waits for others', by what its own took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shoal.node.sapo import daemon_line, groups
from shoal.node.sapo.agent_messages import WAIT_LIMIT_S, Delivered, Judged, Made, Order, Pulled, Role, Take
from shoal.node.sapo.daemon_line import WORTH_LEAST_S, DaemonSharing, worth_waiting_s
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.sapo.trust import Replayed
from shoal.protocol.rollouts import COMPLETION_LIMIT_BYTES, Drawn, Sampling, decode_group
from tests.node.sapo.offering import SOURCE, SWARM, group_of, offer_of, peer_id
from tests.node.sapo.sums import SUMS, foreign_group, sum_task
from tests.node.sapo.test_agent_process import ME, begin


class Line:
    """A daemon that has no groups of others. heard: what it was told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def send(self, report: object) -> None:
        self.heard.append(report)

    def receive(self) -> Order:
        return Delivered()

    def rest(self) -> None:
        pass


class Clock:
    """A clock that is set by hand."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("count", "drawn", "drawn_s", "worth_s"),
    [
        (4, 4, 8.0, 8.0),
        (2, 4, 8.0, 4.0),
        (4, 4, 0.01, WORTH_LEAST_S),
        (256, 1, 30.0, WAIT_LIMIT_S),
        (4, 0, 8.0, None),
    ],
)
def test_others_groups_are_worth_as_long_as_it_takes_to_draw_as_many(
    count: int, drawn: int, drawn_s: float, worth_s: float | None
) -> None:
    assert worth_waiting_s(count, drawn, drawn_s) == worth_s


def new_sharing(folder: Path, line: Line) -> DaemonSharing:
    source = TaskSource([TaskChoice(family=SUMS, config={})])
    return DaemonSharing(begin(folder), line, source=source, scorer=Scorer(source))  # type: ignore[arg-type]


def test_each_round_is_measured_by_its_own_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, line = Clock(), Line()
    monkeypatch.setattr(daemon_line, "time", clock)
    sharing = new_sharing(tmp_path, line)
    own = [foreign_group(sum_task(0, index), ["1", "2"], origin=ME) for index in range(2)]
    sharing.begin_round()
    clock.now_s += 6.0
    sharing.offer(own)
    clock.now_s += 50.0  # judging, and what else the agent does
    sharing.take(3)
    sharing.begin_round()
    sharing.take(1, wait_s=5.0)
    takes = [report for report in line.heard if isinstance(report, Take)]
    assert takes == [Take(count=3, limit_s=9.0), Take(count=1, wait_s=5.0, limit_s=None)]


class Delivering(Line):
    """A daemon that delivers some groups at first."""

    def __init__(self, *pulled: Pulled) -> None:
        super().__init__()
        self._orders: list[Order] = [*pulled, Delivered()]

    def receive(self) -> Order:
        return self._orders.pop(0) if self._orders else Delivered()


def test_groups_that_the_daemon_wants_replayed_are_of_the_policies_that_are_here(tmp_path: Path) -> None:
    offers = [offer_of(group_of(peer_id(1), index, policy_version=7)) for index in range(2)]
    line = Delivering(*(Pulled(offer=offer, group=data, replay=at == 1) for at, (offer, data) in enumerate(offers)))
    sharing = DaemonSharing(
        msgspec.structs.replace(begin(tmp_path), swarm_id=SWARM),
        line,  # type: ignore[arg-type]
        source=SOURCE,
        scorer=Scorer(SOURCE),
    )
    seen: list[int] = []

    def replay(group: JudgedGroup) -> Replayed:
        seen.append(group.task.ref.index)
        return Replayed(tokens=9, missed=1)

    sharing.replay_by(replay, lambda: (6, 7))
    assert [group.task.ref.index for group in sharing.take(2)] == [0, 1]
    assert seen == [1]
    assert [report.policies for report in line.heard if isinstance(report, Take)] == [(6, 7)]
    (judged,) = [report for report in line.heard if isinstance(report, Judged)]
    assert [verdict.replayed for verdict in judged.verdicts] == [None, Replayed(tokens=9, missed=1)]


@pytest.mark.parametrize("text", ["9" * (COMPLETION_LIMIT_BYTES + 1), "\ud800"])
def test_group_with_a_completion_that_cannot_travel_stays_here_and_the_next_one_goes_out(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line()
    texts = (text, "1"), ("1", "2")
    new_sharing(tmp_path, line).offer([foreign_group(sum_task(0, at), one, origin=ME) for at, one in enumerate(texts)])
    made = [report for report in line.heard if isinstance(report, Made)]
    assert [decode_group(one.group).completions for one in made] == [("1", "2")]
    (record,) = caplog.records
    assert record.getMessage().startswith("a group is not shared: our own group is out of range: ")


@pytest.mark.parametrize(("role", "shared"), [("sample", 0), ("train", 1)])
def test_a_sampler_that_is_held_to_its_tokens_shares_no_group_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, shared: int
) -> None:
    monkeypatch.setattr(groups, "DRAWN_LIMIT_BYTES", 0)
    line, asked = Line(), begin(tmp_path, role)
    section = msgspec.structs.replace(asked.rollouts, images=True, labels=True, replays=True)
    sharing = DaemonSharing(
        msgspec.structs.replace(asked, rollouts=section),
        line,  # type: ignore[arg-type]
        source=SOURCE,
        scorer=Scorer(SOURCE),
    )
    drawn = Sampling(policy="7-x", drawn=(Drawn.of([-1.0], [5]),) * 2)
    sharing.offer([replace(foreign_group(sum_task(0, 0), ["1", "2"], origin=ME), sampling=drawn)])
    assert sum(isinstance(report, Made) for report in line.heard) == shared
