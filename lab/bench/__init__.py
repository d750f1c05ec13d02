"""Benchmarks of `shoal bench`."""
