"""Stand-ins for the world outside the machines: signatures made by a hash, and work in one thread.

The machines sign through `Identity` and verify through `shoal.protocol.identity.verify`, which looks up the public key
of a PeerId in one place. Both stay as they are: an `Identity` is built around a `PaperKey`, and while `paper_keys` is
entered, PeerIds of paper keys are looked up among them and all others as ever. Whoever has a PeerId could forge such a
signature; in a simulation nobody does who is not told to, and what is told is in its scenario.

Encoding a contribution and verifying finals ask a pool of threads; here the pool is the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self, cast

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.collectives import contribution as contribution_module
from shoal.collectives import finals as finals_module
from shoal.protocol import identity as identity_module
from shoal.protocol.identity import SIGNATURE_BYTES, Identity
from shoal.protocol.messages import domain_hash

_LOOK_UP = "_public_key"
_POOL = "ThreadPoolExecutor"


class PaperKey:
    """Both halves of a key pair, as far as `Identity` and `verify` use them."""

    def __init__(self, secret: bytes) -> None:
        self._public = domain_hash("paper key", secret)
        self._hasher = blake3(self._public)

    def public_key(self) -> PaperKey:
        """The public half."""
        return self

    def public_bytes_raw(self) -> bytes:
        """The bytes that the PeerId is made of."""
        return self._public

    def sign(self, message: bytes) -> bytes:
        """64 bytes that depend on the key and on every byte of the message."""
        hasher = self._hasher.copy()
        hasher.update(message)
        return hasher.digest(SIGNATURE_BYTES)

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raises InvalidSignature."""
        if signature != self.sign(message):
            raise InvalidSignature


class KeyRing:
    """The identities of a simulation, by number."""

    def __init__(self, seed: int, *, real: bool = False) -> None:
        self._seed = seed
        self._real = real
        self.papers: dict[str, PaperKey] = {}

    def identity(self, number: int) -> Identity:
        """The identity of a peer: the same one for the same seed and number."""
        secret = domain_hash("simulated key", self._seed.to_bytes(8, "little"), number.to_bytes(4, "little"))
        if self._real:
            return Identity.from_seed(secret)
        key = PaperKey(secret)
        identity = Identity(cast(Ed25519PrivateKey, key))
        self.papers[identity.peer_id] = key
        return identity

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the machines take the signatures of paper keys, and start no threads."""
        plain = getattr(identity_module, _LOOK_UP)
        papers = self.papers

        def look_up(peer_id: str) -> Any:
            return papers.get(peer_id) or plain(peer_id)

        rows: list[tuple[ModuleType, str, object]] = [(identity_module, _LOOK_UP, look_up)]
        rows += [(module, _POOL, CallingThread) for module in (contribution_module, finals_module)]
        before = [getattr(module, name) for module, name, _ in rows]
        try:
            for module, name, stand_in in rows:
                setattr(module, name, stand_in)
            yield
        finally:
            for (module, name, _), was in zip(rows, before, strict=True):
                setattr(module, name, was)


class CallingThread:
    """A pool of threads that is the calling one."""

    def __init__(self, threads: int = 1) -> None:
        del threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @staticmethod
    def map(work: Callable[..., Any], *rows: Iterable[Any]) -> list[Any]:
        """As `concurrent.futures.Executor.map`."""
        return list(map(work, *rows))
