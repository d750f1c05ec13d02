"""Fixtures of the tests of the protocol."""

from __future__ import annotations

from tests.protocol.lab import paper_signatures

__all__ = ["paper_signatures"]
