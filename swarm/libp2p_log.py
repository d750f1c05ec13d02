"""Where libp2p's log goes: into ours, as debug lines."""

from __future__ import annotations

import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from libp2p.network.connection import swarm_connection

log = logging.getLogger("shoal.libp2p")


class _Demote(logging.Handler):
    """Passes libp2p's warnings and errors on to our log as debug lines: each is ordinary network weather to us."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("%s: %s", record.name, record.getMessage())


def redirect() -> None:
    """Take libp2p's loggers over; to be called once it is imported."""
    logger = logging.getLogger("libp2p")
    if logger.handlers:
        return  # somebody asked libp2p itself to log, with LIBP2P_DEBUG
    logger.propagate = False
    logger.addHandler(_Demote(logging.WARNING))
    # This module logs on the root logger, which sets up a handler on standard error for everybody.
    swarm_connection.logging = logging.getLogger("libp2p.network.connection")
