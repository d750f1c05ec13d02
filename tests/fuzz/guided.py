"""The decoders under atheris, which follows the branches that an input reaches: used by `tests.fuzz.campaign`.

The first byte pair of an input chooses the target, the rest is fed to it.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

TARGET_BYTES = 2


def main() -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["shoal"]):
        from tests.fuzz.mutators import mutate
        from tests.fuzz.targets import decoder_targets
    targets = decoder_targets()

    def chosen(data: bytes) -> Any:
        return targets[int.from_bytes(data[:TARGET_BYTES].ljust(TARGET_BYTES, b"\0"), "big") % len(targets)]

    def one(data: bytes) -> None:
        target = chosen(data)
        try:
            target.take(data[TARGET_BYTES:])
        except target.allowed:
            pass
        except Exception:
            print(f"found: {target.name}", file=sys.stderr)
            raise

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if len(data) <= TARGET_BYTES or rng.random() < 0.2:
            number = rng.randrange(len(targets))
            head, body = number.to_bytes(TARGET_BYTES, "big"), rng.choice(targets[number].samples)
        else:
            head, body = data[:TARGET_BYTES], data[TARGET_BYTES:]
        samples = chosen(head).samples
        return (head + mutate(body, samples, rng))[:max_size]

    atheris.Setup(sys.argv, one, custom_mutator=lambda data, size, seed: mutator(data, size, seed))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
