"""A node whose parts are made and wired, and that does not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.node.node import Node
from shoal.node.options import NodeConfig
from shoal.node.reporting.event_log import EventLog
from shoal.node.state.store import Store
from shoal.protocol.identity import Identity
from tests.manifests import manifest_of

PEER = Identity.from_seed(bytes([7]) * 32)
"""The other member of its swarm."""


@contextmanager
def unstarted_node(folder: Path) -> Iterator[Node]:
    """A node that is made and not running."""
    config = NodeConfig(manifest=manifest_of([PEER.peer_id], admission="open"), data_dir=folder)
    with Store(folder) as store:
        log = EventLog(folder / "events.jsonl")
        try:
            yield Node(config, store, log, lambda _: None)
        finally:
            log.close()
