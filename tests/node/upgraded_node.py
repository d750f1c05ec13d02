"""A node of another version, for tests: its software, or its wire version, is the one that the environment names."""

from __future__ import annotations

import importlib.metadata
import os
import sys

VERSION, WIRE = "UPGRADED_VERSION", "UPGRADED_WIRE"

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: os.environ[VERSION] if name == "shoal" else version(name)
    from shoal.protocol import wire

    wire.WIRE_VERSION = int(os.environ.get(WIRE, wire.WIRE_VERSION))
    from shoal.cli.main import main

    sys.exit(main())
