"""The event log on a disk without room."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.events import CaughtUp, Left

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which is Linux's")
def test_a_full_disk_stops_neither_events_nor_their_end() -> None:
    log, heard = EventLog(FULL), list[object]()
    log.listen(lambda event: heard.append(event.name))
    log.write(CaughtUp(round=1))
    log.write(Left(reason="asked"))
    assert heard == ["caught_up", "left"]
    log.close()
    log.write(Left(reason="late"))
    with pytest.raises(OSError, match="No space left"), FULL.open("w") as file:
        file.write("this is what a full disk does")
