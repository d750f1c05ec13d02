"""Faults by the hundred: seeded campaigns, chaos and soak."""
