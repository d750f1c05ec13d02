"""Imports of much at once, as the commands make that bring up a whole node."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import without collecting garbage: what importing makes stays, and looking through it again takes a tenth."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
