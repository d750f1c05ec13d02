"""The laboratory: what measures, strikes and simulates nodes. A distribution of its own; no node needs it."""
