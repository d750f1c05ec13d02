"""Operations that the control socket offers on a running node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from shoal.node.control import Handler, JsonValue, Order
from shoal.node.discovery.link_ops import link_handlers, link_orders
from shoal.node.options import Hold
from shoal.node.parts import Parts
from shoal.node.peer_facts import PeerFacts
from shoal.node.rounds.engine import Engine
from shoal.node.services import UserOrders
from shoal.node.strategies.rounds import Rounds
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId, parse_peer_id
from shoal.protocol.inputs import Amend, GoBack, GoOnWithout, Wanted, Withdraw
from shoal.protocol.messages import Target


def handlers(
    parts: Parts,
    user: UserOrders,
    *,
    status: Callable[[], Mapping[str, JsonValue]],
    peers: Callable[[], Sequence[PeerFacts]],
) -> Mapping[str, Handler]:
    """The ops without arguments. status: what `shoal status` shows; peers: what it shows with `--peers`."""

    async def show() -> Mapping[str, JsonValue]:
        return status()

    async def list_peers() -> Mapping[str, JsonValue]:
        return {"peers": msgspec.to_builtins(peers())}

    async def leave() -> Mapping[str, JsonValue]:
        user.leave()
        return {}

    async def pause() -> Mapping[str, JsonValue]:
        user.pause(True)
        return {}

    async def resume() -> Mapping[str, JsonValue]:
        user.pause(False)
        return {"why_paused": user.why_paused()}

    async def release() -> Mapping[str, JsonValue]:
        parts.holds.release()
        return {}

    async def renew() -> Mapping[str, JsonValue]:
        parts.holds.renew()
        return {}

    ops: dict[str, Handler] = {"status": show, "peers": list_peers, "leave": leave, "pause": pause, "resume": resume}
    ops.update(link_handlers(parts))
    return {**ops, "release": release, "renew": renew} if parts.config.test_mode else ops


def orders(parts: Parts, rounds: Rounds) -> Mapping[str, Order]:
    """The ops with arguments; two are of test mode only: faults that no signal can make."""

    async def rollback(arguments: Sequence[str]) -> Mapping[str, JsonValue]:
        """Order a rollback to a round, or withdraw the order if none is given."""
        engine = _certifying(parts, rounds)
        if not arguments:
            await engine.obey(Withdraw(Target))
            return {}
        round = _round(arguments[0])
        await engine.obey(GoBack(round))
        return {"round": round}

    async def amend(settings: Sequence[str]) -> Mapping[str, JsonValue]:
        """Order an amendment to these settings, or withdraw the order if none are given."""
        engine = _certifying(parts, rounds)
        if not settings:
            await engine.obey(Withdraw(Wanted))
            return {}
        await engine.obey(Amend(tuple(settings)))
        return {}

    async def amend_by_authority(settings: Sequence[str]) -> Mapping[str, JsonValue]:
        await _certifying(parts, rounds).obey(Amend(tuple(settings), by_authority=True))
        return {}

    async def rebase(peers: Sequence[str]) -> Mapping[str, JsonValue]:
        """Rebase without these members."""
        forget = frozenset(_peer(text) for text in peers)
        await _certifying(parts, rounds).obey(GoOnWithout(forget))
        head = parts.chain.head
        return {"term": str(head.next_term), "round": head.state_round, "members": list(head.members)}

    async def limit(caps: Sequence[str]) -> Mapping[str, JsonValue]:
        """Cap what lanes upload and download, in bytes/s; "none" is no cap, and an empty word leaves one as it is."""
        lanes = parts.lanes
        upload, download = (
            now if not cap else None if cap == "none" else _bytes_per_s(cap)
            for now, cap in zip(lanes.caps, (*caps, "", "")[:2], strict=True)
        )
        lanes.cap(upload=upload, download=download)
        parts.members.announce()
        return {"upload": upload, "download": download}

    async def hold(points: Sequence[str]) -> Mapping[str, JsonValue]:
        parts.holds.replace(tuple(Hold.parse(point) for point in points))
        return {}

    async def cut(peers: Sequence[str]) -> Mapping[str, JsonValue]:
        """Break all lanes to these peers; the links stay. Returns the peers that had any."""
        connected = parts.lanes.connected().intersection(peers)
        for peer in connected:
            parts.lanes.drop(peer)
        return {"cut": sorted(connected)}

    ops: dict[str, Order] = {
        "rollback": rollback,
        "rebase": rebase,
        "amend": amend,
        "limit": limit,
        "amend_by_authority": amend_by_authority,
        **link_orders(parts),
    }
    return {**ops, "hold": hold, "cut": cut} if parts.config.test_mode else ops


def _bytes_per_s(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r}: bytes per second must be a whole number, or none") from None


def _certifying(parts: Parts, rounds: Rounds) -> Engine:
    """The engine of a swarm with a common state. Raises ConfigError where there is none."""
    if rounds.certifying is not None:
        return rounds.certifying
    raise ConfigError(
        f"with strategy {parts.config.manifest.strategy.name} there is no common state to go back to or to amend, "
        "and no majority to wait for"
    )


def _round(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ConfigError(f"--to {text!r}: a round is a whole number, as in `shoal status`")
    return int(text)


def _peer(text: str) -> PeerId:
    try:
        return parse_peer_id(text)
    except ValueError:
        raise ConfigError(f"--forget {text!r}: not a PeerId; `shoal status` lists the members'") from None
