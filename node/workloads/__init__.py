"""Workloads that come with Shoal."""
