"""Waiting for what the nodes of a benchmark log, and the last words of one that ended before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from shoal.protocol.errors import NetworkError, ShoalError
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import NodeProcess

LOG_SHOWN_CHARS: Final = 600


def ended_early(node: NodeProcess) -> ShoalError:
    """What it means that a node ended by itself."""
    return NetworkError(f"node {node.index} ended: …{_last_words(node)}")


async def until_logged(
    condition: Callable[[], bool],
    what: str,
    *,
    nodes: Sequence[NodeProcess],
    journal: Journal,
    deadline_s: float,
    error_of: Callable[[NodeProcess], ShoalError] = ended_early,
) -> None:
    """Wait for what the nodes' logs, all in `journal`, must show; `what` says it in words.

    Raises NetworkError at the deadline, or `error_of` a node as soon as that one ended, and no fault explains it.
    """

    def met() -> bool:
        for node in nodes:
            if node.lives and not node.alive and node.struck is None:
                raise error_of(node)
        return condition()

    with trio.move_on_after(deadline_s) as scope:
        await journal.until(met)
    if scope.cancelled_caught:
        words = "; ".join(f"node {node.index}: …{_last_words(node)}" for node in nodes)
        raise NetworkError(f"{what}: not within {deadline_s:.0f} s. {words}")


def output_of(node: NodeProcess) -> str:
    """All that its processes have printed."""
    path = node.folder / "log.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def _last_words(node: NodeProcess) -> str:
    """The end of that, on one line."""
    return " ".join(output_of(node)[-LOG_SHOWN_CHARS:].split())
