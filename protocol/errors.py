"""Every error Shoal raises, sorted by whose fault it is.

The type answers the one question that decides what happens next:

* `LocalError`    — ours: a bug or an illegal transition. Loud; never blamed on a peer.
* `RemoteError`   — a peer broke the protocol. Carries the peer; feeds scoring; ends that exchange only.
* `NetworkError`  — the world: a broken connection, a passed deadline. Retried or routed around.
* `ConfigError`   — the user's input. Its text is one line that says what is wrong and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(Exception):
    """Base of all errors raised on purpose."""


class LocalError(ShoalError):
    """A bug of ours, such as an illegal transition of a state machine."""


class RemoteError(ShoalError):
    """A peer sent something that breaks the protocol.

    `peer` is its PeerId, or None where the connection was not yet bound to an identity.
    """

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message if peer is None else f"{message} (from {peer})")
        self.peer = peer


class NetworkError(ShoalError):
    """A connection broke or a deadline passed; nobody is to blame."""


class ConfigError(ShoalError):
    """User input that cannot be used; the text says what to do about it."""


class StorageError(ConfigError):
    """The data directory cannot be read or written (full disk, wrong owner); the text says what to do."""


class DiskFull(StorageError):
    """A disk has no room left: it may have some later, so a run that ends with it is worth another start."""


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Return the one of `known` that may be meant by `given`, or None; cutoff: how alike they are at least, 0 to 1."""
    named = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given.lower(), named, n=1, cutoff=cutoff)
    return named[found[0]] if found else None


def did_you_mean(given: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `; did you mean 'NAME'?` for the end of an error, or `otherwise` where no name is near."""
    near = nearest(given, known)
    return otherwise if near is None else f"; did you mean {near!r}?"
