"""The service of a node that trains only when its user wants it to: it looks, and has training wait or go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from shoal.node.when import Rule

LOOK_S: Final = 5.0


class OnlyWhen:
    """Has a node train only when its user wants it to. A service of it. wait: takes why it is not to, or nothing."""

    def __init__(self, rule: Rule, wait: Callable[[str], None]) -> None:
        self._rule, self._wait = rule, wait

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look every LOOK_S until cancelled; started once it has looked."""
        said = ""
        while True:
            why_not = await trio.to_thread.run_sync(self._rule.why_not, trio.current_time())
            if why_not != said:
                said = why_not
                self._wait(why_not)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            await trio.sleep(LOOK_S)
