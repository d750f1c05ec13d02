"""Others' sums recomputed, their work weighed, and proof of lies kept."""
