"""Every error Shoal raises, sorted by whose fault it is.

The type answers the one question that decides what happens next:

* `LocalError`    — ours: a bug or an illegal transition. Loud; never blamed on a peer.
* `RemoteError`   — a peer broke the protocol. Carries the peer; feeds scoring; ends that exchange only.
* `NetworkError`  — the world: a broken connection, a passed deadline. Retried or routed around.
* `ConfigError`   — the user's input. Its text is one line that says what is wrong and what to do.
"""

from __future__ import annotations


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
