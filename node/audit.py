"""Test mode: writes what went into every round and what came out, so that anyone can recompute it.

`rounds/<rebases>.<rollbacks>-<round>/` holds `contribution`, `plan`, `finals` (msgpack maps) and `applied` (the decoded
mean update, little-endian fp32). The fields are listed in docs/protocol.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.collectives.finals import Finals
from shoal.node.contributions import Made
from shoal.node.store import disk_errors
from shoal.protocol.messages import Term
from shoal.protocol.wire import canonical


class AuditTrail:
    """The `rounds/` folder; a disabled one writes nothing."""

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        self._folder = folder
        self._enabled = enabled

    def contribution(self, term: Term, made: Made) -> None:
        """Before Ready is announced: this node's encoded contribution."""
        if not self._enabled:
            return
        encoded = made.encoded
        body = {
            "codec": encoded.codec.name,
            "numel": encoded.grid.numel,
            "chunk_values": encoded.grid.chunk_values,
            "tokens": made.tokens,
            "root": encoded.root,
            "chunks": [encoded.encoded(chunk).data for chunk in range(encoded.grid.chunks)],
        }
        self._write(term, made.round, "contribution", msgspec.msgpack.encode(body))

    def applied(self, term: Term, finals: Finals) -> None:
        """After the certificate: the plan, its finals, and the update that this node applied."""
        if not self._enabled:
            return
        plan = finals.plan
        body = {
            "plan": plan.hash,
            "bitmaps": list(finals.bitmaps),
            "chunks": [chunk.encoded.data for chunk in finals.chunks],
        }
        self._write(term, plan.round, "plan", canonical(plan))
        self._write(term, plan.round, "finals", msgspec.msgpack.encode(body))
        self._write(term, plan.round, "applied", finals.decoded().data)

    def _write(self, term: Term, round: int, name: str, data: bytes | memoryview) -> None:
        folder = self._folder / f"{term.rebases}.{term.rollbacks}-{round}"
        with disk_errors(self._folder):
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{name}.partial"
            partial.write_bytes(data)
            partial.replace(folder / name)
