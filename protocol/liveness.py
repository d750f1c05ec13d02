"""What a node holds its peers for, what can happen to them, and what the failure detector wants done about it.

    event        what happened                                      ALIVE     SUSPECT   DEAD
    HEARD        the peer itself said something to us               ALIVE     ALIVE     ALIVE
    VOUCHED      one whom we asked got an answer from it            ALIVE     ALIVE     ALIVE
    REFUTED      it signed something newer, and others told us      ALIVE     ALIVE     DEAD, ping now
    ACCUSED      another suspects it                                ALIVE,    SUSPECT   DEAD
                                                                    ping now
    UNANSWERED   neither we nor those we asked reach it             SUSPECT   illegal   illegal
    EXPIRED      a suspect had its time                             illegal   DEAD      illegal
    LOST         its connection broke, and its death is confirmed   DEAD      DEAD      DEAD

A broken connection is confirmed in one of two ways: its machine refuses another, for nobody listens there any more; or
it cannot be re-made, and all those whom we asked gave the peer up or could not re-make theirs either. Not to reach a
peer is no evidence by itself: a firewall may stand between two that everybody else reaches. So a peer to which we have
no link is asked after through others at once, and for as long as they vouch for it it is alive.

The detector itself is `shoal.protocol.membership`, with all of its deadlines; how long a peer may hang in a reduction
is `STALL_S` of `shoal.node.rounds.pace`.
"""

from __future__ import annotations

import enum

import msgspec

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId


class State(enum.Enum):
    """What we hold a peer for. Members are hashed by identity: the table is asked with every message."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"

    __hash__ = object.__hash__


class Event(enum.Enum):
    """What can happen to a peer; see the table above. Hashed as states are."""

    HEARD = "heard"
    VOUCHED = "vouched"
    REFUTED = "refuted"
    ACCUSED = "accused"
    UNANSWERED = "unanswered"
    EXPIRED = "expired"
    LOST = "lost"

    __hash__ = object.__hash__


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.ALIVE: {
        Event.HEARD: State.ALIVE,
        Event.VOUCHED: State.ALIVE,
        Event.REFUTED: State.ALIVE,
        Event.ACCUSED: State.ALIVE,
        Event.UNANSWERED: State.SUSPECT,
        Event.LOST: State.DEAD,
    },
    State.SUSPECT: {
        Event.HEARD: State.ALIVE,
        Event.VOUCHED: State.ALIVE,
        Event.REFUTED: State.ALIVE,
        Event.ACCUSED: State.SUSPECT,
        Event.EXPIRED: State.DEAD,
        Event.LOST: State.DEAD,
    },
    State.DEAD: {
        Event.HEARD: State.ALIVE,
        Event.VOUCHED: State.ALIVE,
        Event.REFUTED: State.DEAD,
        Event.ACCUSED: State.DEAD,
        Event.LOST: State.DEAD,
    },
}


def next_state(state: State, event: Event) -> State:
    """The table. Raises LocalError for what cannot happen in that state."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise LocalError(f"membership: {event.name} cannot happen to a peer that is {state.name}") from None


class SendPing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Send `peer` a Ping with `nonce` and our incarnation."""

    peer: PeerId
    nonce: int


class SendPingRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Ask `via` to ping `target` for us."""

    via: PeerId
    target: PeerId
    nonce: int


class SendAck(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer `peer`: for ourselves, or (`about`) for the one it asked us to ping."""

    peer: PeerId
    nonce: int
    about: PeerId | None = None


class SendNack(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer `peer`, who asked us to ping `target`: we cannot reach it either."""

    peer: PeerId
    target: PeerId
    nonce: int


class Suspected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tell `peer` and the others that it is suspected in this incarnation."""

    peer: PeerId
    incarnation: int


class Died(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`peer` is dead to us."""

    peer: PeerId


class Revived(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`peer` is alive after all, having been suspected or dead (`was`)."""

    peer: PeerId
    was: State


class Refute(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """We are suspected: tell everyone that we live, in this new incarnation."""

    incarnation: int


Effect = SendPing | SendPingRequest | SendAck | SendNack | Suspected | Died | Revived | Refute
