"""A node with few places for links, for tests; PLACES says how many."""

from __future__ import annotations

import os

from shoal.cli.main import main
from shoal.swarm import links

if __name__ == "__main__":
    links.LINK_LIMIT = int(os.environ["PLACES"])
    main()
