"""The laboratory's commands, which `shoal` shows where it is installed."""
