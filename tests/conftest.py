"""What every test finds, and leaves behind, as it was: commands that run inside a test set up the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "shoal", "libp2p")]
    levels, handlers = [logger.level for logger in loggers], loggers[0].handlers[:]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
