"""Test mode: a record of each round's inputs and outputs on disk, so that anyone can recompute it.

`rounds/<rebases>.<rollbacks>-<round>/` holds `contribution`, also by its root, `input-…` (what that was made of),
`plan`, `finals` (msgpack maps) and `applied` (the decoded mean update, little-endian fp32). Under the strategy gossip
they are `vector-…` and `exchange` (msgpack maps), `delta`, `stepped` and `began` (little-endian fp32), the last two
also by their hashes. Their fields are listed, and what they hold is checked, in testnet/check.py,
testnet/check_inputs.py and testnet/check_gossip.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import chunk_hash
from shoal.collectives.finals import Finals
from shoal.collectives.gossip import GossipVector
from shoal.collectives.state import CertifiedState
from shoal.node.state.contributions import Made
from shoal.node.state.store import disk_errors
from shoal.protocol.gossip_messages import Offer
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from shoal.protocol.wire import canonical

INPUT_LIMIT_VALUES = 1 << 22
"""Of larger contributions it is not kept what they were made of: it is eight bytes a value."""


class AuditTrail:
    """The `rounds/` folder; a disabled one writes nothing."""

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        self._folder = folder
        self._enabled = enabled

    def contribution(self, term: Term, made: Made) -> None:
        """Write this node's encoded contribution, before Ready is announced.

        Also by its root: a node whose folder was put back may make another of a round in which the first was counted.
        """
        if not self._enabled:
            return
        encoded = made.encoded
        body = {
            "codec": encoded.codec,
            "numel": encoded.grid.numel,
            "chunk_values": encoded.grid.chunk_values,
            "tokens": made.tokens,
            "root": encoded.root,
            "chunks": [encoded.encoded(chunk).data for chunk in range(encoded.grid.chunks)],
        }
        kept = self._write(term, made.round, _known_by("contribution", encoded.root), msgspec.msgpack.encode(body))
        self._link(kept, "contribution")

    def made_of(self, term: Term, made: Made, learnt: F32) -> None:
        """Write what a contribution was made of: what was learnt ``(numel,)``, and the values that were encoded.

        Of one that is made once more, by a node whose folder was put back, it stays known when it was made first.
        """
        root = made.encoded.root
        is_there = self._folder_of(term, made.round).joinpath(f"input-{root.hex()[:16]}").exists()
        if not self._enabled or learnt.size > INPUT_LIMIT_VALUES or is_there:
            return
        body = {"root": root, "base": made.base, "learnt": learnt.tobytes(), "values": made.values.tobytes()}
        self._write(term, made.round, f"input-{root.hex()[:16]}", msgspec.msgpack.encode(body))

    def applied(self, term: Term, finals: Finals) -> float:
        """Write the plan, its finals and the applied update, after the certificate. Returns the seconds that took."""
        if not self._enabled:
            return 0.0
        began, plan = time.perf_counter(), finals.plan
        body = {
            "plan": plan.hash,
            "bitmaps": list(finals.bitmaps),
            "chunks": [chunk.encoded.data for chunk in finals.chunks],
        }
        self._write(term, plan.round, "plan", canonical(plan))
        self._write(term, plan.round, "finals", msgspec.msgpack.encode(body))
        self._write(term, plan.round, "applied", finals.decoded().data)
        return time.perf_counter() - began

    def vector(self, vector: GossipVector, delta: F32) -> None:
        """Write this node's vector, and the Δ ``(numel,) float32`` that is in it, before a gossip offer."""
        if not self._enabled:
            return
        offer = vector.offer
        body = {
            "codec": offer.codec,
            "numel": offer.numel,
            "chunk_values": offer.chunk_values,
            "root": offer.root,
            "chunks": [chunk.data for chunk in vector.chunks],
        }
        self._write(Term(), offer.round, f"vector-{offer.root.hex()[:16]}", msgspec.msgpack.encode(body))
        self._write(Term(), offer.round, "delta", delta.data)

    def began(self, state: CertifiedState) -> None:
        """Write φ and δ on which a gossip node begins, in the folder of their round."""
        if self._enabled:
            self._write_state(state, "began")

    def stepped(
        self,
        before: CertifiedState,
        state: CertifiedState,
        made: Offer,
        *,
        partner: PeerId | None,
        offered: Offer | None,
    ) -> None:
        """Write the vectors in a gossip step, this node's and its partner's, and φ and δ after it."""
        if not self._enabled:
            return
        body = {
            "base_round": before.round,
            "base": chunk_hash(before.anchor.tobytes() + before.momentum.tobytes()),
            "root": made.root,
            "partner": partner,
            "partner_round": 0 if offered is None else offered.round,
            "partner_root": b"" if offered is None else offered.root,
        }
        self._write(state.term, state.round, "exchange", msgspec.msgpack.encode(body))
        self._write_state(state, "stepped")

    def _write_state(self, state: CertifiedState, name: str) -> None:
        """Write φ and δ: also by their hash, since who goes back to an older state makes its rounds once more."""
        data = state.anchor.tobytes() + state.momentum.tobytes()
        self._link(self._write(state.term, state.round, _known_by(name, chunk_hash(data)), data), name)

    def _link(self, kept: Path, name: str) -> None:
        """Give what was written this name too, which the next takes over."""
        with disk_errors(self._folder):
            partial = kept.with_name(f"{name}.partial")
            partial.unlink(missing_ok=True)
            partial.hardlink_to(kept)
            partial.replace(kept.with_name(name))

    def _folder_of(self, term: Term, round: int) -> Path:
        return self._folder / f"{term.rebases}.{term.rollbacks}-{round}"

    def _write(self, term: Term, round: int, name: str, data: bytes | memoryview) -> Path:
        folder = self._folder_of(term, round)
        with disk_errors(self._folder):
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{name}.partial"
            partial.write_bytes(data)
            return partial.replace(folder / name)


def _known_by(name: str, digest: bytes) -> str:
    return f"{name}-{digest.hex()[:16]}"
