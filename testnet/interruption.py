"""The signals by which a user ends a run early."""

from __future__ import annotations

import signal
import threading

import trio


async def until_interrupted() -> None:
    """Wait for SIGINT or SIGTERM; for ever outside the main thread, where no signal can be received.

    Cancellation: the signals do again what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        await trio.sleep_forever()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as arrived:
        async for _ in arrived:
            return
