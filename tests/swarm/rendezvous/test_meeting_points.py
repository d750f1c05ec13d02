"""Meeting points: what holds, where it belongs, how long it is valid, and what a store keeps of many."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.rendezvous import meeting_points as module
from shoal.swarm.rendezvous.meeting_points import (
    POINTS_IN_SLOT,
    SLOTS,
    VALID_LIMIT_S,
    FirstSight,
    MeetingPoint,
    PointStore,
    keys_of,
    open_point,
    pack_points,
    sign_point,
    slot_key,
    slots_of,
    unpack_points,
)

OURS, THEIRS = SwarmId(b"o" * 32), SwarmId(b"t" * 32)


def identity(n: int) -> Identity:
    return Identity.from_seed(n.to_bytes(4, "big") * 8)


def address(n: int, peer: int | None = None) -> str:
    return f"/ip4/192.0.2.1/tcp/{1000 + n}/p2p/{identity(n if peer is None else peer).peer_id}"


def signed(n: int, *, swarm: SwarmId = OURS, sequence: int = 1, valid_s: int = 60, at: Sequence[str] = ()) -> bytes:
    return sign_point(identity(n), swarm, addresses=at or [address(n)], sequence=sequence, valid_s=valid_s)


def repacked(data: bytes, **changes: object) -> bytes:
    """The same point with other fields, and the signature that it had."""
    outer = decode(data, dict)
    said = {**decode(outer["said"], dict), **changes}
    return canonical({**outer, "said": canonical(said)})


def test_point_comes_through_as_it_was_signed() -> None:
    relayed = f"{address(2)}/p2p-circuit/p2p/{identity(1).peer_id}"
    point = open_point(signed(1, sequence=5, at=[address(1), relayed]), swarm=OURS)
    assert point == MeetingPoint(
        swarm=OURS, peer=identity(1).peer_id, addresses=(address(1), relayed), sequence=5, valid_s=60
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 2},
        {"valid_s": 61},
        {"swarm": THEIRS},
        {"addresses": [f"/ip4/192.0.2.9/tcp/1/p2p/{identity(1).peer_id}"]},
        {"peer": identity(2).peer_id, "addresses": [address(2)]},
    ],
)
def test_point_that_was_changed_after_it_was_signed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RemoteError, match="did not sign"):
        open_point(repacked(signed(1), **changes))


@pytest.mark.parametrize(
    "data",
    [
        signed(1, at=[address(1, peer=2)]),
        signed(1, at=[address(1), address(2)]),
        signed(1, at=["/ip4/192.0.2.1/tcp/1"]),
        signed(1, valid_s=VALID_LIMIT_S + 1),
        signed(1, valid_s=0),
        b"",
        b"\x82" + bytes(40),
        bytes(100_000),
    ],
)
def test_point_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteError):
        open_point(data)


def test_point_of_another_swarm_is_refused() -> None:
    with pytest.raises(RemoteError, match="not of ours"):
        open_point(signed(1, swarm=THEIRS), swarm=OURS)


def test_peer_has_two_slots_and_all_peers_together_all_of_them() -> None:
    taken: Counter[int] = Counter()
    for n in range(400):
        slots = slots_of(OURS, identity(n).peer_id)
        assert len(set(slots)) == 2
        taken.update(slots)
    assert set(taken) == set(range(SLOTS))
    assert min(taken.values()) > 60  # 100 expected


def test_liar_with_one_key_displaces_nobody_and_gets_two_places() -> None:
    store = PointStore(THEIRS)
    members = range(1, 9)
    for n in members:
        for key in keys_of(open_point(signed(n))):
            store.put(key, signed(n), 0.0)
    everywhere = [slot_key(OURS, slot) for slot in range(SLOTS)]
    before = {key: set(store.get(key, 0.0)) for key in everywhere}
    for key in everywhere:
        for sequence in (1, 10**9):
            with contextlib.suppress(RemoteError):
                store.put(key, signed(99, sequence=sequence), 0.0)
    taken = {key: set(store.get(key, 0.0)) - before[key] for key in everywhere}
    assert sum(map(len, taken.values())) == 2
    assert all(before[key] <= set(store.get(key, 0.0)) for key in everywhere)


def test_full_slot_keeps_the_same_points_in_whatever_order_they_came() -> None:
    key = slot_key(OURS, 0)
    crowd = [n for n in range(1, 200) if key in keys_of(open_point(signed(n)))]
    assert len(crowd) > 2 * POINTS_IN_SLOT
    kept = []
    for order in (crowd, crowd[::-1]):
        store = PointStore(OURS)
        for n in order:
            store.put(key, signed(n), 0.0)
        kept.append(set(store.get(key, 0.0)))
    assert kept[0] == kept[1]
    assert len(kept[0]) == POINTS_IN_SLOT
    assert set(unpack_points(pack_points(kept[0]))) == kept[0]


def test_made_up_peers_of_least_rank_leave_the_points_of_those_who_come_first_where_they_are() -> None:
    by_key: dict[bytes, list[int]] = {}
    for n in range(400):
        for key in keys_of(open_point(signed(n))):
            by_key.setdefault(key, []).append(n)
    key, made_up = by_key.popitem()
    made_up.sort(key=lambda n: module._rank(open_point(signed(n))))
    member, loser = made_up.pop(), made_up[POINTS_IN_SLOT - 1]
    assert len(made_up) > 2 * POINTS_IN_SLOT

    def kept(*first: int) -> set[bytes]:
        store = PointStore(OURS, {identity(n).peer_id for n in first}.__contains__)
        for n in (member, *reversed(made_up), *made_up):
            store.put(key, signed(n), 0.0)
        return set(store.get(key, 0.0))

    least = {signed(n) for n in made_up[:POINTS_IN_SLOT]}
    assert kept() == least
    assert kept(member) == least - {signed(loser)} | {signed(member)}


def test_point_is_valid_from_first_sight_and_only_a_new_one_prolongs_it() -> None:
    sight = FirstSight()
    first, renewed = open_point(signed(1, sequence=1)), open_point(signed(1, sequence=2))
    assert sight.ends_at(first, 100.0) == 160.0
    assert sight.ends_at(first, 159.0) == 160.0
    assert sight.ends_at(first, 160.0) is None
    assert sight.ends_at(renewed, 160.0) == 220.0
    assert sight.ends_at(first, 161.0) is None
    assert sight.ends_at(open_point(signed(2)), 161.0) == 221.0


def test_store_gives_out_no_point_that_has_expired_and_takes_it_no_more() -> None:
    store, data = PointStore(OURS), signed(1)
    key = keys_of(open_point(data))[0]
    store.put(key, data, 0.0)
    assert store.get(key, 59.0) == (data,)
    assert store.get(key, 60.0) == ()
    store.put(key, data, 61.0)
    assert store.get(key, 61.0) == ()
    again = signed(1, sequence=2)
    store.put(key, again, 62.0)
    assert store.get(key, 62.0) == (again,)
    store.put(key, data, 63.0)
    assert store.get(key, 63.0) == (again,)


def test_store_gives_up_other_swarms_slots_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_LIMIT", 10)
    store, own = PointStore(OURS), signed(1)
    store.put(keys_of(open_point(own))[0], own, 0.0)
    for n in range(30):
        other = signed(1, swarm=SwarmId(bytes([n]) * 32))
        store.put(keys_of(open_point(other))[0], other, 0.0)
    assert len(store) == 10
    assert store.get(keys_of(open_point(own))[0], 0.0) == (own,)


def test_sights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEEN_LIMIT", 3)
    sight = FirstSight()
    for n in range(10):
        sight.ends_at(open_point(signed(n)), 0.0)
    assert len(sight._seen) == 3
