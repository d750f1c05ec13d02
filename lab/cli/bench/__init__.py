"""The `shoal bench` group, one file per command."""
