"""Audits: others' sums recomputed, their work weighed, and proofs of lies kept."""
