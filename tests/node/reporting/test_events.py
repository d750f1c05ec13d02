"""The event log on a disk without room."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.reporting.events import EventLog

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which is Linux's")
def test_a_full_disk_stops_neither_events_nor_their_end() -> None:
    log, heard = EventLog(FULL), list[object]()
    log.listen(lambda record: heard.append(record["event"]))
    log.write("certified", round=1)
    log.write("left", reason="asked")
    assert heard == ["certified", "left"]
    log.close()
    log.write("late")
    with pytest.raises(OSError, match="No space left"), FULL.open("w") as file:
        file.write("this is what a full disk does")
