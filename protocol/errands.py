"""Errands: what a member seeks beside its rounds, as one request after the other.

A driver carries a request out, however long that takes, and tells the errand what came of it, for the next; which it
is, is decided by who made the errand (catching_up.py). A request that brings nothing comes to nothing, and is no error,
but for those that say that they fail: of these the errand is told why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shoal.protocol.agreement import Broadcast
from shoal.protocol.chain import Chain
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import OfState
from shoal.protocol.messages import Entry, Value

HEADER_TIMEOUT_S: Final = 0.5
"""After the first answer to what peers hold, the others have this long to be counted; who is later may still give."""


class OfHeader(OfState, Protocol):
    """The header of a state, as whoever fetches states knows it: everything of it but its values."""

    @property
    def digest(self) -> bytes:
        """Certified digest of the state."""
        ...


@dataclass(frozen=True, slots=True)
class InTurn:
    """Carry out an errand for each of these peers: the next when one is over, or has taken `apart_s`; the others go on.

    Each errand comes to how many seconds from then on the others are still worth waiting for, None if that is open.
    What is under way after that is given up.
    """

    peers: tuple[PeerId, ...]
    errand: Callable[[PeerId], Errand]
    apart_s: float


@dataclass(frozen=True, slots=True)
class AskEntries:
    """Ask a peer for entries of the chain after the first `after`, or from the first rebase on that is not known to who
    knows of so many.

    Comes to a `ChainPart`, of which nothing is checked. Fails with a NetworkError or RemoteError.
    """

    peer: PeerId
    after: int
    rebases: int


@dataclass(frozen=True, slots=True)
class AwaitEntries:
    """Ask a peer for the same as `AskEntries`, to be answered once it has them, with their state (followers.py).

    Comes to a `ChainPart`, of which nothing is checked; without entries after AWAIT_S. Fails with a NetworkError or
    RemoteError.
    """

    peer: PeerId
    after: int
    rebases: int


@dataclass(frozen=True, slots=True)
class TakeEntries:
    """Extend the chain by these, and have them on disk. Comes to how many were new.

    trusted: they lead to the checkpoint of this node's link, which was checked. Fails with a RemoteError at the first
    that does not follow or does not hold; those before it stay.
    """

    entries: tuple[Entry, ...]
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class ReplaceChain:
    """Go on with `theirs`, which has the first `height` entries in common with the chain here, and a later rebase.

    Nothing is done where that rebase came another way meanwhile.
    """

    theirs: Chain
    height: int


@dataclass(frozen=True, slots=True)
class AwaitLinks:
    """Wait for peers that are known and not linked yet, so many seconds at most."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class LookElsewhere:
    """Fetch what a peer serves at each of the places that the user named for it, if there are several.

    Comes to chains that go on from `base`, by place.
    """

    peer: PeerId
    base: Chain


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class FindBegun:
    """Look which states came in part, in this process or an earlier one. Comes to the round and digest of each, the
    one of this process first."""


@dataclass(frozen=True, slots=True)
class CountLacking:
    """Comes to how many of these plans there are no finals of on disk."""

    plans: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AskHolders:
    """Ask all of these at once for the header of the state that `value` led to. Comes to `Holders`.

    certified: the digest that it has to have, NO_HASH if any is right. Once one has answered, the others have
    HEADER_TIMEOUT_S.
    """

    value: Value
    certified: bytes
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Holders:
    """Peers that hold a state, with its header; and those that said that they do not."""

    found: Mapping[PeerId, OfHeader]
    others: Sequence[PeerId]


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch the state of a header whole, from all peers that hold it; `holders` are known to.

    base: a state that is here, of which it may have chunks. Comes to the state, None if it was not to be had.
    """

    value: Value
    certified: bytes
    header: OfHeader
    holders: frozenset[PeerId]
    base: OfState | None
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay rounds of a chain from a state on, as far as their finals are to be had.

    Comes to the last state, which is `state` itself if there was nothing to replay by.
    """

    state: OfState
    chain: Chain
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class TakeImage:
    """Have the policy's image after `value`, by what changed in it since the state that is here, or whole.

    certified: the digest that `value` has. before: that of the state whose changes are asked for, the one that is here
    or, without one, the last before. cheapest: not if finals are fewer bytes. Comes to the image, None if it is not to
    be had.
    """

    value: Value
    certified: bytes
    before: bytes
    held: OfState | None
    peers: tuple[PeerId, ...]
    cheapest: bool


@dataclass(frozen=True, slots=True)
class FindEarlier:
    """Look on disk for the state of an earlier round, or for finals that lead to it. Comes to it, None without it.

    initial: the digest that S(0) has to have; NO_HASH if any is right.
    """

    round: int
    initial: bytes


@dataclass(frozen=True, slots=True)
class KeepEarlier:
    """Have the state of an earlier round on disk until it is forgotten (`ForgetEarlier`), and serve it.

    Comes to its digest.
    """

    state: OfState


@dataclass(frozen=True, slots=True)
class LookUp:
    """The state at the head is to be had: look from these peers for what this node's own contribution is settled by."""

    peers: tuple[PeerId, ...]


Request = (
    InTurn
    | AskEntries
    | AwaitEntries
    | TakeEntries
    | ReplaceChain
    | AwaitLinks
    | LookElsewhere
    | Warn
    | FindBegun
    | CountLacking
    | AskHolders
    | FetchState
    | Replay
    | TakeImage
    | FindEarlier
    | KeepEarlier
    | LookUp
    | Broadcast
)
"""All that a driver of errands does, beside the rounds. One that it does not know is an error."""

Steps = Generator[Request, Any, Any]
"""Requests, one after the other; each comes to what its class says."""


class Clock:
    """The time, as an errand was told it last."""

    now = 0.0


class Errand:
    """Something that is sought beside the rounds. `outcome`: what came of it, once it is over."""

    def __init__(self, steps: Steps, clock: Clock) -> None:
        self._steps = steps
        self._clock = clock
        self.outcome: Any = None

    def go_on(self, came: Any, now: float) -> Request | None:
        """The last request came to that, the first time None; the next request, None if the errand is over.

        A NetworkError or RemoteError is why the request failed. Raises what the errand does not take, ConfigError where
        the user has to decide.
        """
        self._clock.now = now
        failed = isinstance(came, NetworkError | RemoteError)
        try:
            return self._steps.throw(came) if failed else self._steps.send(came)
        except StopIteration as over:
            self.outcome = over.value
            return None
