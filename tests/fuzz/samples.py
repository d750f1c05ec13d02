"""Valid examples of any message, made from its type alone: whoever adds a message has it fuzzed from then on."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import msgspec.inspect as described

from shoal.protocol.identity import PEER_ID_CHARS, Identity

TRIES = 400
ITEMS_LIMIT = 3
DEPTH_LIMIT = 6


@lru_cache
def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n + 1]) * 32)


class CannotMake(Exception):
    """A type that no example was found of; give one in `HAND_MADE` of `tests.fuzz.targets`."""


def example(of: Any, rng: random.Random) -> Any:
    """A value that a decoder for `of` takes. Raises CannotMake."""
    decoder = msgspec.msgpack.Decoder(of)
    return _accepted(described.type_info(of), rng, lambda made: decoder.decode(msgspec.msgpack.encode(made)))


def example_of_type(kind: described.Type, rng: random.Random) -> Any:
    """A value of a type as msgspec describes it. Raises CannotMake."""
    return _accepted(kind, rng, lambda made: made)


def _accepted(kind: described.Type, rng: random.Random, accept: Callable[[Any], Any]) -> Any:
    for _ in range(TRIES):
        try:
            return accept(_make(kind, rng, 0))
        except (ValueError, msgspec.ValidationError):
            continue
    raise CannotMake(str(kind))


def _make(kind: described.Type, rng: random.Random, depth: int) -> Any:
    made = _scalar(kind, rng)
    if made is not NotImplemented:
        return made
    match kind:
        case described.UnionType(types=types):
            return _make(_shallow(types, depth) or rng.choice(types), rng, depth)
        case described.TupleType(item_types=types):
            return tuple(_make(one, rng, depth + 1) for one in types)
        case described.VarTupleType() | described.ListType() | described.SetType() | described.CollectionType():
            least, most = kind.min_length or 0, kind.max_length
            few = least if depth > DEPTH_LIMIT else least + rng.randrange(ITEMS_LIMIT)
            count = few if most is None else min(few, most)
            return [_make(kind.item_type, rng, depth + 1) for _ in range(count)]
        case described.DictType(key_type=key, value_type=value):
            return {_make(key, rng, depth + 1): _make(value, rng, depth + 1) for _ in range(rng.randrange(ITEMS_LIMIT))}
        case described.StructType():
            return _struct(kind, rng, depth)
        case described.Metadata(type=inner) | described.CustomType(cls=inner):
            return _make(inner, rng, depth)  # type: ignore[arg-type]
        case described.DataclassType(cls=cls, fields=fields):
            return cls(**{field.name: _make(field.type, rng, depth + 1) for field in fields if field.required})
        case described.AnyType():
            return rng.choice([None, 1, "text"])
    raise CannotMake(repr(kind))


def _struct(kind: described.StructType, rng: random.Random, depth: int) -> Any:
    values = {
        field.name: _make(field.type, rng, depth + 1)
        for field in kind.fields
        if field.required or (rng.random() < 0.5 and depth <= DEPTH_LIMIT)
    }
    return kind.cls(**values)


def _shallow(types: tuple[described.Type, ...], depth: int) -> described.Type | None:
    if depth <= DEPTH_LIMIT:
        return None
    return next((one for one in types if isinstance(one, described.NoneType)), None)


def _scalar(kind: described.Type, rng: random.Random) -> Any:
    match kind:
        case described.NoneType():
            return None
        case described.BoolType():
            return rng.random() < 0.5
        case described.IntType():
            least = kind.ge if kind.ge is not None else (kind.gt or -1) + 1
            return rng.choice([least, least + 1, _most(kind, least)])
        case described.FloatType():
            least = kind.ge if kind.ge is not None else (kind.gt or 0.0) + 0.25
            return float(least) + rng.choice([0.0, 0.25, 0.5])
        case described.StrType():
            return _text(kind, rng)
        case described.BytesType() | described.ByteArrayType() | described.MemoryViewType():
            least, most = kind.min_length or 0, kind.max_length
            size = least + rng.choice([0, 0, 1, 32])
            return rng.randbytes(size if most is None else min(size, most))
        case described.LiteralType(values=values):
            return rng.choice(values)
        case described.EnumType(cls=cls):
            return rng.choice(list(cls))
    return NotImplemented


def _most(kind: described.IntType, least: int) -> int:
    if kind.le is not None:
        return kind.le
    return kind.lt - 1 if kind.lt is not None else least + 7


def _text(kind: described.StrType, rng: random.Random) -> str:
    if kind.min_length == PEER_ID_CHARS == kind.max_length:
        return identity(rng.randrange(4)).peer_id
    least, most = kind.min_length or 0, kind.max_length
    size = max(least, rng.choice([1, 4, 9]))
    return "abcdefghij"[:1] * (size if most is None else min(size, most))
