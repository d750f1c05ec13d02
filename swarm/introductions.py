"""What a hello has to say for its sender to be let in, whoever it is."""

from __future__ import annotations

import trio

from shoal.protocol.admission import Admission
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import Hello
from shoal.protocol.records import NodeRecord, open_record
from shoal.protocol.wire import WIRE_VERSION, SwarmId


def own_record(peer: PeerId, data: bytes, swarm_id: SwarmId) -> NodeRecord:
    """The record in `data`. Raises RemoteError unless it is of `peer` itself."""
    record = open_record(data, swarm_id, trio.current_time(), peer=peer).record
    if record.peer != peer:
        raise RemoteError(f"introduces itself with the record of {record.peer}", peer=peer)
    return record


def reason_to_refuse(peer: PeerId, hello: Hello, swarm_id: SwarmId, admission: Admission) -> str | None:
    """Why who says this hello is not let in, for its user to read; None if it is."""
    if hello.wire != WIRE_VERSION:
        return f"this node speaks wire version {WIRE_VERSION}, yours {hello.wire}; install the same version of Shoal"
    if hello.swarm != swarm_id:
        return (
            f"this node is in swarm {swarm_id.hex()[:16]}…, yours is {hello.swarm.hex()[:16]}…; use the same swarm.toml"
        )
    try:
        record = own_record(peer, hello.record, swarm_id)
    except RemoteError as error:
        return f"your record does not hold: {error}"
    return admission.reason_not_to_join(record)
