"""Rollout groups and their announcements: one encoding, and no bytes that do more than raise RolloutError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity
from shoal.protocol.rollouts import (
    COMPLETION_LIMIT_BYTES,
    CONFIG_LIMIT_BYTES,
    GROUP_LIMIT_BYTES,
    SEALED_LIMIT_BYTES,
    AnnouncementBatch,
    CatchUpRequest,
    Drawn,
    GroupChunk,
    GroupRequest,
    Reason,
    RolloutError,
    RolloutGroup,
    Sampling,
    TaskRef,
    announce_group,
    assigned_seed,
    check_as_announced,
    decode_group,
    decode_message,
    digest_of,
    encode_batch,
    encode_group,
    is_own_task,
    maker_of,
    open_announcement,
    reward_moments,
    sampling_seed,
    seal_announcement,
)
from shoal.protocol.wire import Sealer, SwarmId, canonical

FUZZ = settings(derandomize=True)
ALICE = Identity.from_seed(bytes(range(32)))
BOB = Identity.from_seed(bytes(32))
SWARM = SwarmId(bytes(range(32)))
OTHER_SWARM = SwarmId(bytes(32))
GOLDEN_SEED = 7326086550012662176
GOLDEN_SAMPLING_SEED = 940285795


def task_of(identity: Identity, *, round_number: int = 3, index: int = 1, config: bytes = b"\x80") -> TaskRef:
    seed = assigned_seed(SWARM, identity.peer_id, round_number, index)
    return TaskRef(family="sums", version="1", config=config, seed=seed, index=index)


def group_of(identity: Identity = ALICE, *texts: str, round_number: int = 3, index: int = 1) -> RolloutGroup:
    task = task_of(identity, round_number=round_number, index=index)
    return RolloutGroup(
        origin=identity.peer_id, round=round_number, policy_version=9, task=task, completions=texts or ("7", "eight")
    )


GROUP = group_of()
DATA = encode_group(GROUP)
ANNOUNCEMENT = announce_group(GROUP, DATA, (1.0, 0.0))
SEALED = seal_announcement(Sealer(ALICE, SWARM, 5), ANNOUNCEMENT)


# --- one encoding ---


def test_group_golden_bytes() -> None:
    assert (
        bytes.fromhex(
            "85"
            "ab636f6d706c6574696f6e73 92a137a56569676874"
            "a66f726967696e d934" + ALICE.peer_id.encode().hex() + "ae706f6c6963795f76657273696f6e 09"
            "a5726f756e64 03"
            "a47461736b 85 a6636f6e666967 c40180 a666616d696c79 a473756d73 a5696e646578 01"
            "a473656564 cf" + f"{GROUP.task.seed:016x}" + "a776657273696f6e a131"
        )
        == DATA
    )


def test_assigned_seed_is_what_it_was() -> None:
    """A change here makes all nodes refuse each other's groups as foreign."""
    assert assigned_seed(SWARM, ALICE.peer_id, 3, 1) == GOLDEN_SEED
    others = {
        assigned_seed(OTHER_SWARM, ALICE.peer_id, 3, 1),
        assigned_seed(SWARM, BOB.peer_id, 3, 1),
        assigned_seed(SWARM, ALICE.peer_id, 4, 1),
        assigned_seed(SWARM, ALICE.peer_id, 3, 2),
    }
    assert len(others | {GOLDEN_SEED}) == 5
    assert all(0 <= seed < 2**63 for seed in others)


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=2, max_size=64)


@FUZZ
@given(texts=texts, round_number=st.integers(0, 2**63 - 1), index=st.integers(0, 2**32 - 1))
def test_group_and_announcement_round_trip(texts: list[str], round_number: int, index: int) -> None:
    group = group_of(BOB, *texts, round_number=round_number, index=index)
    data = encode_group(group)
    assert decode_group(data) == group
    rewards = tuple(float(at % 3) / 2 for at in range(len(texts)))
    announcement = announce_group(group, data, rewards)
    sealer = Sealer(BOB, SWARM, 7)
    sealer.seal("something-else", b"")
    signed = open_announcement(seal_announcement(sealer, announcement), SWARM)
    assert (signed.announcement, signed.origin, signed.boot, signed.sequence) == (announcement, BOB.peer_id, 7, 2)
    assert announcement.digest == digest_of(data)
    assert announcement.size_bytes == len(data)
    check_as_announced(group, announcement, BOB.peer_id)


def test_reward_moments_of_equal_rewards_do_not_vary() -> None:
    assert reward_moments((0.1,) * 7) == (0.1, 0.0)
    assert reward_moments((1.0, 0.0, 0.0, 1.0)) == (0.5, 0.25)


# --- nothing mutated passes ---

mutations = st.tuples(st.integers(0, 10_000), st.integers(0, 2), st.integers(0, 255))


def mutate(data: bytes, at: int, how: int, byte: int) -> bytes:
    at %= len(data)
    if how == 0:
        return data[:at] + bytes([data[at] ^ (byte or 1)]) + data[at + 1 :]
    if how == 1:
        return data[:at]
    return data[:at] + bytes([byte]) + data[at:]


@FUZZ
@given(mutation=mutations)
def test_mutated_announcement_never_passes(mutation: tuple[int, int, int]) -> None:
    with pytest.raises(RolloutError):
        open_announcement(mutate(SEALED, *mutation), SWARM)


@FUZZ
@given(mutation=mutations)
def test_mutated_group_is_another_group_or_none(mutation: tuple[int, int, int]) -> None:
    data = mutate(DATA, *mutation)
    assert digest_of(data) != ANNOUNCEMENT.digest
    try:
        group = decode_group(data)
    except RolloutError:
        return
    assert encode_group(group) == data  # the one encoding of what it says


EMPTY_MAP = b"\x80"
"""All that needs to be said of nothing."""


@FUZZ
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(RolloutError) as caught:
        decode_group(data, peer=BOB.peer_id)
    assert caught.value.peer == BOB.peer_id
    for kind in (AnnouncementBatch, CatchUpRequest, GroupRequest, GroupChunk):
        if data != EMPTY_MAP or kind not in (AnnouncementBatch, CatchUpRequest):
            with pytest.raises(RolloutError) as caught:
                decode_message(data, kind, peer=BOB.peer_id)
            assert caught.value.peer == BOB.peer_id
    with pytest.raises(RolloutError):
        open_announcement(data, SWARM)
    assert maker_of(data) is None


@FUZZ
@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "digest": st.binary(max_size=40),
            "size_bytes": st.integers(-1, 2**21),
            "completions": st.integers(-1, 70),
            "reward_mean": st.floats() | st.text(),
            "reward_variance": st.floats(),
            "policy_version": st.integers(-(2**63), 2**64 - 1) | st.none(),
            "task": st.none() | st.dictionaries(st.text(max_size=8), st.integers(0, 9), max_size=3),
            "extra": st.just(1),
        },
    )
)
def test_signed_announcement_out_of_range_is_refused(changes: dict[str, object]) -> None:
    """What an attacker can sign: right signature, any contents."""
    plain = {**msgspec.to_builtins(ANNOUNCEMENT, builtin_types=(bytes,)), **changes}
    sealed = Sealer(ALICE, SWARM, 5).seal("rollout-announcement", msgspec.msgpack.encode(plain))
    try:
        signed = open_announcement(sealed, SWARM)
    except RolloutError:
        return
    told = signed.announcement
    assert len(told.digest) == 32
    assert 1 <= told.size_bytes <= GROUP_LIMIT_BYTES
    assert 2 <= told.completions <= 64
    assert 0 <= told.reward_mean <= 1
    assert 0 <= told.reward_variance <= 0.25 + 1e-9
    assert is_own_task(SWARM, ALICE.peer_id, told.round, told.task)


# --- what each refusal is called ---


def reason_of(sealed: bytes, swarm: SwarmId = SWARM) -> Reason:
    with pytest.raises(RolloutError) as caught:
        open_announcement(sealed, swarm, peer=BOB.peer_id)
    assert caught.value.peer == BOB.peer_id
    return caught.value.reason


def test_announcement_refusals_are_named() -> None:
    envelope = msgspec.msgpack.decode(SEALED)
    envelope[3] = BOB.peer_id
    assert reason_of(msgspec.msgpack.encode(envelope)) == Reason.FORGED
    assert reason_of(SEALED, OTHER_SWARM) == Reason.FORGED
    assert reason_of(SEALED + bytes(SEALED_LIMIT_BYTES)) == Reason.TOO_LARGE
    assert reason_of(Sealer(ALICE, SWARM, 5).seal("node-record", canonical(ANNOUNCEMENT))) == Reason.MALFORMED
    assert reason_of(seal_announcement(Sealer(BOB, SWARM, 5), ANNOUNCEMENT)) == Reason.FOREIGN_TASK
    chosen = msgspec.structs.replace(GROUP.task, seed=GROUP.task.seed ^ 1)
    own = seal_announcement(Sealer(ALICE, SWARM, 5), msgspec.structs.replace(ANNOUNCEMENT, task=chosen))
    assert reason_of(own) == Reason.FOREIGN_TASK


def test_group_in_another_encoding_is_refused() -> None:
    plain = msgspec.msgpack.decode(DATA)
    for data in (
        msgspec.msgpack.encode(dict(reversed(plain.items()))),
        DATA.replace(b"\xa5round\x03", b"\xa5round\xcc\x03"),
        msgspec.msgpack.encode({**plain, "extra": 1}),
    ):
        with pytest.raises(RolloutError) as caught:
            decode_group(data)
        assert caught.value.reason == Reason.MALFORMED


def test_group_limits_hold_on_both_sides() -> None:
    long = "x" * (COMPLETION_LIMIT_BYTES + 1)
    plain = msgspec.msgpack.decode(DATA)
    for completions in (["one"], ["x"] * 65, ["x", long], ["x", 3]):
        with pytest.raises(RolloutError):
            decode_group(msgspec.msgpack.encode({**plain, "completions": completions}))
    with pytest.raises(RolloutError) as caught:
        decode_group(bytes(GROUP_LIMIT_BYTES + 1))
    assert caught.value.reason == Reason.TOO_LARGE
    full = group_of(ALICE, *["x" * COMPLETION_LIMIT_BYTES] * 33)
    with pytest.raises(LocalError, match="limit"):
        encode_group(full)
    with pytest.raises(LocalError, match=r"no canonical form|out of range"):
        encode_group(unchecked(GROUP, ("a", "\ud800")))


def unchecked(group: RolloutGroup, completions: tuple[str, ...]) -> RolloutGroup:
    """`group` with completions that its constructor would refuse."""
    made = msgspec.structs.replace(group, completions=("a", "b"))
    msgspec.structs.force_setattr(made, "completions", completions)
    return made


def test_maker_of_a_group_is_whom_it_names_whatever_else_it_says() -> None:
    assert maker_of(encode_group(group_of(ALICE))) == ALICE.peer_id
    assert maker_of(encode_group(group_of(BOB))) == BOB.peer_id
    assert maker_of(canonical({"origin": "nobody", "more": [1]})) == "nobody"
    for data in (b"", b"\x81" * 10_000, canonical({"origin": 7}), canonical(["origin"]), b"\x81\xa6origin\xa1\xff"):
        assert maker_of(data) is None


def test_group_other_than_announced_is_mislabelled() -> None:
    for group in (
        group_of(ALICE, "7", "eight", "9"),
        group_of(ALICE, index=2),
        group_of(BOB),
        msgspec.structs.replace(GROUP, policy_version=8),
    ):
        with pytest.raises(RolloutError) as caught:
            check_as_announced(group, ANNOUNCEMENT, ALICE.peer_id)
        assert caught.value.reason == Reason.MISLABELLED


def test_rewards_out_of_range_are_our_own_fault() -> None:
    for rewards in ((1.0,), (1.0, 1.5), (1.0, float("nan"))):
        with pytest.raises(LocalError):
            announce_group(GROUP, DATA, rewards)
    with pytest.raises(LocalError):
        seal_announcement(
            Sealer(ALICE, SWARM, 5),
            msgspec.structs.replace(ANNOUNCEMENT, task=task_of(ALICE, config=bytes(CONFIG_LIMIT_BYTES + 1))),
        )


def test_batch_of_the_largest_announcements_fits_a_gossip_message() -> None:
    config = bytes(CONFIG_LIMIT_BYTES)
    task = msgspec.structs.replace(task_of(ALICE, config=config), family="f" * 64, version="v" * 32)
    sealed = seal_announcement(Sealer(ALICE, SWARM, 5), msgspec.structs.replace(ANNOUNCEMENT, task=task))
    assert len(sealed) <= SEALED_LIMIT_BYTES
    batch = AnnouncementBatch(announcements=(sealed.ljust(SEALED_LIMIT_BYTES),) * 64, held=(bytes(32),) * 512)
    assert decode_message(encode_batch(batch), AnnouncementBatch) == batch


SAMPLING = Sampling(policy="7-3f2a", drawn=(Drawn.of((-0.5, -1.25), (3, 2**32 - 1)), Drawn.of((0.0,), ())))
LABELLED = msgspec.structs.replace(GROUP, sampling=SAMPLING)


def test_group_says_how_it_was_drawn_and_without_that_it_is_what_it_was() -> None:
    decoded = decode_group(encode_group(LABELLED))
    assert decoded == LABELLED
    assert decoded.sampling is not msgspec.UNSET
    first, second = decoded.sampling.drawn
    assert (first.values(), first.ids()) == ((-0.5, -1.25), (3, 2**32 - 1))
    assert (second.values(), second.ids()) == ((0.0,), ())
    bare = msgspec.structs.replace(LABELLED, sampling=Sampling(policy="7-3f2a"))
    assert decode_group(encode_group(bare)).sampling == Sampling(policy="7-3f2a")
    assert b"sampling" not in encode_group(GROUP)
    several = Sampling(
        policy="7-3f2a", drawn=(Drawn.of((-0.5, -1.25, -2.0), (3, 4, 5), [(6, 1), (7, 2)]), Drawn.of((0.0,), ()))
    )
    decoded = decode_group(encode_group(msgspec.structs.replace(LABELLED, sampling=several)))
    assert decoded.sampling == several
    assert several.drawn[0].versions == ((6, 1), (7, 2))
    assert b"versions" not in encode_group(LABELLED)
    assert len({digest_of(encode_group(one)) for one in (GROUP, LABELLED, bare, decoded)}) == 4


FLOAT_NAN, FLOAT_INFINITE, FLOAT_ONE = bytes.fromhex("0000c07f"), bytes.fromhex("000080ff"), bytes.fromhex("0000803f")


@pytest.mark.parametrize(
    "sampling",
    [
        {"policy": ""},
        {"policy": "p" * 129},
        {"policy": "p", "drawn": [{"log_probs": bytes(4)}]},
        {"policy": "p", "drawn": [{"log_probs": bytes(4)}] * 3},
        {"policy": "p", "drawn": [{"log_probs": b""}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(5), "tokens": b""}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(8), "tokens": bytes(4)}] * 2},
        {"policy": "p", "drawn": [{"log_probs": FLOAT_NAN, "tokens": b""}] * 2},
        {"policy": "p", "drawn": [{"log_probs": FLOAT_INFINITE, "tokens": b""}] * 2},
        {"policy": "p", "drawn": [{"log_probs": FLOAT_ONE, "tokens": b""}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(4 * 32_769), "tokens": b""}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(8), "versions": [[3, 1]]}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(8), "versions": [[3, 1], [4, 2]]}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(8), "versions": [[3, 2], [4, 0]]}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(8), "versions": [[-1, 2]]}] * 2},
        {"policy": "p", "drawn": [{"log_probs": bytes(8), "versions": []}] * 2},
        {"policy": "p", "drawn": [], "seed": 1},
    ],
)
def test_label_out_of_range_is_malformed(sampling: dict[str, object]) -> None:
    plain = msgspec.to_builtins(GROUP, builtin_types=(bytes,))
    with pytest.raises(RolloutError) as caught:
        decode_group(canonical({**plain, "sampling": sampling}))
    assert caught.value.reason is Reason.MALFORMED


def test_sampling_seed_is_assigned_and_what_it_was() -> None:
    seeds = {
        sampling_seed(swarm, who.peer_id, round_number, index)
        for swarm in (SWARM, OTHER_SWARM)
        for who in (ALICE, BOB)
        for round_number in (3, 4)
        for index in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(SWARM, ALICE.peer_id, 3, 1) == GOLDEN_SAMPLING_SEED != GOLDEN_SEED % 2**31
