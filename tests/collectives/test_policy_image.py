"""The image of a policy in bf16, and changes between two: golden bytes, any pair, and what is no change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives.codecs import F32
from shoal.collectives.policy_image import (
    CHANGES,
    SAME,
    U8,
    WHOLE,
    apply_changes,
    changes_limit_bytes,
    encode_changes,
    image_of,
    put_values,
)
from shoal.collectives.spans import Undecodable

CHUNK = 1 << 16


def image(*patterns: int) -> U8:
    """The image of values of these bf16 patterns."""
    return image_of((np.array(patterns, np.uint32) << 16).view(np.float32))


def stepped(values: F32, rate: float, seed: int = 1) -> F32:
    """The values after one step of AdamW, about: each moves by the rate, up to twice."""
    moves = np.clip(np.random.default_rng(seed).standard_normal(values.size), -2, 2).astype(np.float32)
    return values - np.float32(rate) * moves


def policy(n: int = CHUNK, seed: int = 0) -> F32:
    """Parameters as they are drawn for a model of some hundred columns."""
    return (np.random.default_rng(seed).standard_normal(n) * 0.05).astype(np.float32)


def test_images_are_bf16_to_nearest_even() -> None:
    values = np.array([1.0, -1.0, 1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0], np.float32)
    assert image_of(values).tobytes().hex() == "803f80bf803f823f00000080"


def test_golden_changes() -> None:
    before = image(0x3F80, 0x3F80, 0x3F80, 0xBF80, 0x0000, 0x3F80, 0x3F80, 0x3F80)
    assert encode_changes(before, before, 8).hex() == "00"
    # Value 1 one up, 3 one up from -1, 4 one down from +0 to -0: gaps 1, 1, 0; steps 2, 2, 1.
    after = image(0x3F80, 0x3F81, 0x3F80, 0xBF7F, 0x8000, 0x3F80, 0x3F80, 0x3F80)
    golden = "02 03000000 00 01000000 1a 00 1a".replace(" ", "")
    assert encode_changes(before, after, 8).hex() == golden
    assert np.array_equal(apply_changes(before, bytes.fromhex(golden), 8), after)
    # Everything is another: whole.
    other = image(0x4234, 0xC001, 0x0123, 0x3111, 0x4AAA, 0x0001, 0xBEEF, 0x1234)
    assert encode_changes(before, other, 8).hex() == "01" + other.tobytes().hex()


def test_whatever_a_value_is_it_has_an_image() -> None:
    odd = np.array([np.inf, -np.inf, np.nan, 3.4e38, 1e-45], np.float32)
    odd = np.append(odd, np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32))
    seen = np.empty(odd.size, np.float32)
    put_values(image_of(odd), seen)
    assert seen[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(seen[[2, 5, 6]]).all(), "no number becomes one"
    assert seen[3:5].tolist() == [np.inf, 0.0]


def test_values_of_an_image_have_that_image() -> None:
    image = image_of(policy(300))
    seen = np.empty(300, np.float32)
    put_values(image, seen)
    assert np.array_equal(image_of(seen), image)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changes_lead_from_one_image_to_the_other_and_are_never_longer_than_it(data: st.DataObject) -> None:
    patterns = st.integers(0, 0xFFFF).filter(lambda one: one & 0x7F80 < 0x5C00)  # finite, and within the limit
    before = data.draw(st.lists(patterns, min_size=1, max_size=80))
    after = [data.draw(patterns) if data.draw(st.booleans()) else one for one in before]
    n, old, new = len(before), image(*before), image(*after)
    told = encode_changes(old, new, n)
    assert np.array_equal(apply_changes(old, told, n), new)
    assert len(told) <= changes_limit_bytes(n) == 1 + new.size
    assert np.array_equal(old, image(*before)), "what was before is as it was"


@pytest.mark.parametrize(
    ("rate", "most"), [(1e-3, 0.68), (1e-4, 0.32), (1e-5, 0.075), (1e-6, 1 / 90), (1e-7, 1 / 500), (0.0, 1e-4)]
)
def test_update_of_one_step_costs_this_share_of_the_whole(rate: float, most: float) -> None:
    before = policy()
    old, new = image_of(before), image_of(stepped(before, rate))
    told = encode_changes(old, new, CHUNK)
    assert len(told) <= most * new.size
    assert np.array_equal(apply_changes(old, told, CHUNK), new)


def test_whatever_comes_is_a_change_of_the_chunk_or_refused() -> None:
    before = image_of(policy(300))
    told = encode_changes(before, image_of(stepped(policy(300), 1e-4)), 300)
    assert told[0] == CHANGES
    refused = 0
    for at in range(len(told)):
        for flipped in (told[at] ^ 1, told[at] ^ 0x80, 0xFF):
            bad = told[:at] + bytes([flipped]) + told[at + 1 :]
            try:
                assert apply_changes(before, bad, 300).shape == before.shape
            except Undecodable:
                refused += 1
    assert refused > len(told) / 2


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x03",
        bytes([SAME, 0]),
        bytes([WHOLE]),
        bytes([WHOLE]) + bytes(15),
        bytes([CHANGES]),
        bytes.fromhex("02 00000000 00 01000000 1a 00 1a"),  # of no values
        bytes.fromhex("02 09000000 00 01000000 1a 00 1a"),  # of more than there are
        bytes.fromhex("02 03000000 00 01000000 ff 00 1a"),  # more gaps than values
        bytes.fromhex("02 03000000 00 01000000 1a 00"),  # without steps
        bytes.fromhex("02 03000000 ff 01000000 1a 00 1a"),  # low bits without end
        bytes.fromhex("02 03000000 00 ffffffff 1a 00 1a"),
        bytes.fromhex("02 01000000 00 02000000 0001 00 01"),  # value 8 of 8
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(bad: bytes) -> None:
    before = image(*[0x3F80] * 8)
    with pytest.raises(Undecodable):
        apply_changes(before, bad, 8)
