"""Real nodes that share rollouts: over processes and libp2p, each with an agent of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from shoal.protocol.offer_pace import GRANTED_FIRST, PROBE_S
from shoal.protocol.rollouts import RolloutGroup, decode_group
from tests.node.lab import Event, Node, eventually
from tests.node.sapo.agent_lab import newest_round, origins, sharing_swarm


def groups_on_disk(node: Node) -> dict[str, tuple[int, RolloutGroup]]:
    """Size in bytes, and contents, of the groups that the node holds, by digest."""
    found = (path for path in (node.folder / "rollouts" / "groups").glob("*/*") if not path.name.startswith("."))
    held = {path.name: path.read_bytes() for path in found}
    return {digest: (len(data), decode_group(data)) for digest, data in held.items()}


def rounds_of(node: Node) -> list[Event]:
    return node.events("rollouts")


def is_even(text: str) -> bool:
    return text[:1] != "" and ord(text[0]) % 2 == 0


def took_from(node: Node, *others: Node) -> bool:
    """Whether it trained on groups of each of these, in this life."""
    return all(origins(node)[other.peer_id] for other in others)


def goes_on(node: Node) -> None:
    """It finishes three more rounds."""
    after = newest_round(node) + 3
    eventually(lambda: newest_round(node) >= after, f"{node.folder.name} goes on")


def is_gone(pid: int) -> bool:
    """Whether the process has ended, though perhaps nobody has reaped it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def leave(node: Node) -> None:
    node.ask("leave")
    assert node.wait_exit() == 0


def assert_judged_by_itself(events: list[Event], pulled: list[tuple[int, RolloutGroup]]) -> None:
    """What it pulled is what it trained on, no byte more, and its rewards are those of the task's own scorer."""
    assert len(pulled) == sum(event["external"] for event in events) > 0
    assert sum(event["bytes"] for event in events) == sum(size for size, _ in pulled) == events[-1]["used_bytes"]
    right = sum(is_even(text) for _, group in pulled for text in group.completions)
    rewards = sum(event["external_reward"] * event["external"] * 4 for event in events if event["external"])
    assert rewards == pytest.approx(right)


@pytest.mark.long
def test_nodes_train_on_each_others_groups_and_one_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing_swarm(tmp_path, monkeypatch, nodes=3) as swarm:
        one, other, sampler = swarm.nodes
        one.start()
        other.start(join=[one])
        sampler.start("--rollouts", "sample", join=[one])
        eventually(lambda: one.events("held_out_reward"), "its policy is evaluated")
        first = one.events("held_out_reward")[0]
        assert (first["round"], first["tasks"], first["by_family"]) == (0, 200, {"even": first["reward"]})
        assert not sampler.events("held_out_reward")
        eventually(lambda: took_from(one, other, sampler), "groups of both others are trained on")
        eventually(lambda: took_from(other, one, sampler), "and by the other trainer")

        other.kill()
        held, lived = groups_on_disk(other), newest_round(other)
        goes_on(one)
        after = lived + 100  # some seconds: the others cannot take anything of it when it has ended
        other.start("--rounds", str(after), join=[one])
        began = other.wait("agent_started")
        assert lived <= began["round"] <= lived + 1
        assert lived - 4 <= began["restored"] <= lived + 1
        assert other.wait_exit() == 0
        assert newest_round(other) == after
        eventually(lambda: origins(one)[other.peer_id] > 3, "its groups are trained on again")

        mine = {digest: found for digest, found in groups_on_disk(other).items() if digest not in held}
        assert_judged_by_itself(rounds_of(other), [at for at in mine.values() if at[1].origin != other.peer_id])
        announced = [event["made"] for event in rounds_of(one)]
        status = one.ask("status")
        known = status["rollouts"]
        assert (status["digest"], known["role"], status["round"] > 3) == (None, "train", True)
        assert len(announced) < sum(announced) <= known["made"]
        # Of its three groups, and of those in place of two that nobody brought in time, the ones whose rewards vary.
        assert max(announced) <= 5
        assert 0 < known["taken"] <= known["pulled"]
        leave(one)
        alone = newest_round(sampler)  # whose groups nobody takes: it makes one now and then
        eventually(lambda: newest_round(sampler) > alone, "the sampler goes on")
        leave(sampler)
        events = rounds_of(sampler)
        assert all(event["external"] == event["bytes"] == 0 and event["own"] == 3 for event in events)
        for node in swarm.nodes:
            refused = [set(event["rejected"]) for event in node.all_events() if event["event"] == "rollouts"]
            assert set().union(*refused) <= {"no variance", "stale", "stranger", "unavailable"}
            assert not any(event.get("ignored") for event in node.all_events())


@pytest.mark.long
def test_a_node_goes_on_when_all_others_vanish_and_its_agent_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing_swarm(tmp_path, monkeypatch, nodes=2, staleness_rounds=1000) as swarm:
        node, sampler = swarm.nodes
        node.start("--local-groups", "2", "--group-size", "5")
        sampler.start("--rollouts", "sample", "--local-groups", "1", join=[node])
        first = node.wait("agent_started")
        assert (first["round"], first["restored"]) == (0, None)
        eventually(lambda: origins(node)[sampler.peer_id] >= 4, "others' groups are taken")
        sampler.kill()
        node.wait("died", peer=sampler.peer_id)
        goes_on(node)

        node.ask("pause")
        assert node.ask("status")["phase"] == "paused"
        os.kill(first["pid"], signal.SIGKILL)
        node.wait("agent_died")
        again = eventually(lambda: node.events("agent_started")[1:], "a second agent")[0]
        stood = newest_round(node)
        assert stood <= again["round"] <= stood + 1
        assert max(0, stood - 4) <= again["restored"] <= stood
        node.ask("resume")
        # What the first agent was given, and may have trained on, is not given to the second, however often it asks.
        node.wait("rollouts", round=again["round"] + 20)
        events = rounds_of(node)
        assert all(event["external"] == 0 for event in events if event["round"] > again["round"])
        assert all(event["own"] + event["external"] == 4 for event in events)
        mine = [group for _, group in groups_on_disk(node).values() if group.origin == node.peer_id]
        assert all(len(group.completions) == 5 for group in mine)
        leave(node)


@pytest.mark.long
def test_a_judge_scores_what_others_offer_and_no_agent_outlives_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing_swarm(tmp_path, monkeypatch, nodes=2) as swarm:
        one, judge = swarm.nodes
        one.start()
        judge.start("--rollouts", "judge", join=[one])
        eventually(lambda: origins(judge)[one.peer_id] >= 4, "groups are judged")
        events = rounds_of(judge)
        assert all((event["own"], event["tokens"], event["reward"]) == (0, 0, None) for event in events)
        assert all(event["external_reward"] is not None for event in events if event["external"])
        agent = one.events("agent_started")[0]["pid"]
        assert one.process is not None
        os.kill(one.process.pid, signal.SIGKILL)
        eventually(lambda: is_gone(agent), "the agent ends with its daemon", deadline_s=20.0)
        leave(judge)


@pytest.mark.long
def test_a_sampler_makes_what_is_taken_and_else_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing_swarm(tmp_path, monkeypatch, nodes=2) as swarm:
        sampler, trainer = swarm.nodes

        def known() -> dict[str, int]:
            rollouts: dict[str, int] = sampler.ask("status")["rollouts"]
            return rollouts

        began = time.monotonic()
        sampler.start("--rollouts", "sample")
        sampler.wait("agent_started")
        eventually(lambda: known()["waits"], "nobody takes, and it waits")
        made = known()["made"]
        granted = GRANTED_FIRST + (time.monotonic() - began) / PROBE_S
        assert swarm.manifest.rollouts is not None
        assert GRANTED_FIRST <= made < granted + swarm.manifest.rollouts.local
        assert known()["wanted"] == 0
        assert sampler.ask("status")["tokens_per_s"] > 0, "what it draws"
        offered = [group for _, group in groups_on_disk(sampler).values()]
        assert len(offered) == made
        assert all(len({is_even(text) for text in group.completions}) == 2 for group in offered), "each teaches"
        trainer.start(join=[sampler])
        eventually(lambda: known()["wanted"] >= 4, "its groups are taken")
        eventually(lambda: known()["made"] > made, "and it makes more")
        assert origins(trainer)[sampler.peer_id] > 0
        leave(trainer)
        leave(sampler)
