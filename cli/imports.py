"""Importing much at once, as the commands do that bring up a whole node."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage meanwhile: what importing makes stays, and to look through it over and over takes a tenth."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
