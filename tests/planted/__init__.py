"""Bugs that were planted once, and the test that sees each: a baseline, so that what is caught today stays caught.

`python -m tests.planted` plants one after the other in a copy of the tree and runs the test that is named, which must
fail there; for those of a member that is the simulator, which must see a violation with the seed that is named. Where
the product has moved on, a bug that cannot be planted any more says so: plant it anew.
"""

from __future__ import annotations

from tests.planted.audits import AUDITS
from tests.planted.bugs import Bug
from tests.planted.collectives import COLLECTIVES
from tests.planted.lanes import LANES
from tests.planted.member import MEMBER
from tests.planted.page import PAGE
from tests.planted.protocol import PROTOCOL
from tests.planted.sapo import SAPO
from tests.planted.shell import SHELL
from tests.planted.sites import SITES
from tests.planted.state import STATE
from tests.planted.swarm import SWARM
from tests.planted.testnet import TESTNET
from tests.planted.training import TRAINING

BUGS: dict[str, tuple[Bug, ...]] = {
    "protocol": PROTOCOL,
    "member": MEMBER,
    "sites": SITES,
    "collectives": COLLECTIVES,
    "lanes": LANES,
    "state": STATE,
    "shell": SHELL,
    "swarm": SWARM,
    "audits": AUDITS,
    "training": TRAINING,
    "sapo": SAPO,
    "page": PAGE,
    "testnet": TESTNET,
}
"""By area."""
