"""Everything that peers say: it survives the wire, is taken for nothing else, and beyond its bounds it is refused.

What the bounds are is in the committed list of the wire (`tests/protocol/wire_list.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import msgspec.inspect as described
import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.wire import canonical, decode
from tests.fuzz.samples import example, example_of_type
from tests.fuzz.targets import HAND_MADE, UNIONS, examples, messages
from tests.protocol.wire_list import said

PEER = PeerId("who delivered it")
BUILTIN = (bytes,)


def test_every_message_comes_back_as_it_was_sent_and_is_taken_for_no_other() -> None:
    kinds = messages()
    tagged = {kind for kind in kinds if kind.__struct_config__.tag is not None}
    sent = {kind: examples(kind, random.Random(1)) for kind in kinds}
    for kind, some in sent.items():
        for one in some:
            data = canonical(one)
            assert decode(data, kind) == one
            assert canonical(decode(data, kind)) == data
        for other in tagged - {kind} if kind in tagged else ():
            with pytest.raises(RemoteError):
                decode(data, other)
    assert len(tagged) > 80


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
def test_what_is_of_no_known_kind_is_refused(union: Any) -> None:
    for plain in ({}, {"type": "nonsense"}, {"type": 1}, []):
        with pytest.raises(RemoteError):
            decode(canonical(plain), union)


def beyond(kind: described.Type, rng: random.Random) -> Iterator[Any]:
    """Values just outside the bounds of a type."""
    match kind:
        case described.Metadata(type=inner):
            yield from beyond(inner, rng)
        case described.UnionType(types=types):
            real = [one for one in types if not isinstance(one, described.NoneType)]
            yield from beyond(real[0], rng) if len(real) == 1 else ()
        case described.IntType() | described.FloatType():
            yield from (bound for bound in (kind.gt, kind.lt) if bound is not None)
            yield from () if kind.ge is None else (kind.ge - 1,)
            yield from () if kind.le is None or kind.le >= 2**64 - 1 else (kind.le + 1,)
        case described.StrType():
            yield from ("a" * length for length in _lengths_beyond(kind))
        case described.BytesType():
            yield from (bytes(length) for length in _lengths_beyond(kind))
        case described.VarTupleType() | described.ListType():
            one = msgspec.to_builtins(example_of_type(kind.item_type, rng), builtin_types=BUILTIN)
            yield from ([one] * length for length in _lengths_beyond(kind))
            yield from ([wrong] * max(1, kind.min_length or 0) for wrong in beyond(kind.item_type, rng))


def _lengths_beyond(kind: Any) -> list[int]:
    least = [kind.min_length - 1] if kind.min_length else []
    return least if kind.max_length is None else [*least, kind.max_length + 1]


def spoiled(struct: type[msgspec.Struct], rng: random.Random) -> Iterator[Any]:
    """A struct as plain values, with one field after the other beyond its bounds, and with one that it has not."""
    info = cast(described.StructType, described.type_info(struct))
    plain = msgspec.to_builtins(example(struct, rng), builtin_types=BUILTIN)
    assert decode(canonical(plain), struct) is not None
    if isinstance(plain, dict) and info.forbid_unknown_fields:
        yield {**plain, "unheard of": 1}
    for place, field in enumerate(info.fields, start=info.tag is not None):
        for value in beyond(field.type, rng):
            if isinstance(plain, dict):
                yield {**plain, field.encode_name: value}
            elif place < len(plain):
                yield [*plain[:place], value, *plain[place + 1 :]]


def test_whatever_is_beyond_its_bounds_is_refused_and_laid_to_who_delivered_it() -> None:
    rng, tried = random.Random(2), 0
    for struct in said():
        for wrong in spoiled(struct, rng) if struct not in HAND_MADE else ():
            with pytest.raises(RemoteError) as caught:
                decode(canonical(wrong), struct, peer=PEER)
            assert caught.value.peer == PEER, struct
            tried += 1
    assert tried > 300
