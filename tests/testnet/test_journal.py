"""Event logs: lines become typed events, however they arrive."""

from __future__ import annotations

from pathlib import Path

from shoal.testnet.journal import Certified, Entry, Event, Holding, Journal, Listening, LogTail, parse_event

HOLDING = b'{"at":1.5,"event":"holding","round":3,"phase":"reduce","progress":0.4}'


def test_parse_event_reads_events_it_knows_and_the_head_of_others() -> None:
    assert parse_event(HOLDING) == Holding(at=1.5, event="holding", round=3, phase="reduce", progress=0.4)
    assert parse_event(b'{"at":2,"event":"news","of":[1]}') == Event(at=2.0, event="news")


def test_parse_event_steps_over_what_is_not_one() -> None:
    for line in (b"", HOLDING[:20], HOLDING[:20] + HOLDING, b"\xff", b'{"at":1,"event":"holding"}', b"[]"):
        assert parse_event(line) is None


def test_tail_reads_each_completed_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = LogTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(HOLDING[:30])
        assert tail.read() == []
        file.write(HOLDING[30:] + b"\n" + HOLDING + b"\n" + HOLDING[:9])
        assert len(tail.read()) == 2
        # The node was killed in the middle of a line, and a new one goes on after it.
        file.write(b'{"at":3,"event":"started"}\n' + HOLDING + b"\n")
        assert [event.event for event in tail.read()] == ["holding"]
    assert tail.skipped == 1
    assert tail.read() == []


def test_events_keep_their_fields() -> None:
    line = b'{"at":1,"event":"certified","term":"0.0","round":2,"digest":"ab","value":"cd","members":["x"],"view":0}'
    event = parse_event(line)
    assert isinstance(event, Certified)
    assert (event.term, event.round, event.digest, event.members) == ("0.0", 2, "ab", ("x",))


def test_journal_first_finds_what_was_and_waits_for_what_comes() -> None:
    async def main() -> None:
        journal = Journal()
        old = Listening(at=1, event="listening", addresses=("/a",))
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

    import trio.testing

    trio.run(main)
