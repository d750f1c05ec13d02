"""Orders of the user's: carried out between two inputs of the engine, and waited for by who gave them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from shoal.node.rounds.inbox import Ordered
from shoal.protocol.errors import ConfigError


async def obeyed(put: Callable[[Ordered], None], order: Callable[[], Awaitable[None]]) -> None:
    """Have the engine behind `put` carry out `order`, and wait for that. Raises ConfigError where it cannot be.

    Cancellation: it may be carried out all the same.
    """
    done, refused = trio.Event(), list[ConfigError]()

    async def carry_out() -> None:
        try:
            await order()
        except ConfigError as error:
            refused.append(error)
        finally:
            done.set()

    put(Ordered(carry_out))
    await done.wait()
    if refused:
        raise refused[0]
