"""The journal of a swarm: what was and what comes, in the order in which it is seen."""

from __future__ import annotations

from shoal.node.reporting.events import AgentStarted, Certified, Listening, Rollouts, RoundStarted
from shoal.testnet.journal import Entry, Journal, round_begun


def test_round_begun_is_the_one_that_comes_after() -> None:
    assert round_begun(RoundStarted(round=3)) == 3
    assert round_begun(AgentStarted(round=3)) == round_begun(Rollouts(round=3)) == 4
    assert round_begun(Certified(round=3, digest="aa")) is None


async def test_journal_first_finds_what_was_and_waits_for_what_comes() -> None:
    import trio.testing

    journal = Journal()
    old = Listening(at=1, addresses=("/a",))
    journal.add(0, old)
    assert await journal.first(lambda entry: entry.node == 0) == Entry(0, old)
    found: list[Entry] = []

    async def wait() -> None:
        found.append(await journal.first(lambda entry: entry.node == 1))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            journal.add(2, old)
            await trio.testing.wait_all_tasks_blocked()
            assert found == []
            journal.add(1, old)
    assert found == [Entry(1, old)]
    assert journal.of(Listening, 1) == [old]
