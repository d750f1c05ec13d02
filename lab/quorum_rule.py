"""The rule of quorums, in other words than the protocol's: by it explorers, simulator and tests judge certificates."""

from __future__ import annotations

from collections.abc import Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value


def outweighs(
    previous: Value,
    supporters: Collection[PeerId],
    leaves: Collection[PeerId] = (),
    *,
    voters: Collection[PeerId] = (),
    lying: bool = False,
) -> bool:
    """More than half of those who vote after `previous`, or exactly half and the last planner among them.

    lying: those who are missing are fewer than a third. voters: of a swarm that names them.
    """
    everyone = set(voters or previous.members)
    if lying:
        return 3 * len(everyone - set(supporters)) < len(everyone)
    electorate = everyone - set(leaves)
    inside = electorate & set(supporters)
    return 2 * len(inside) > len(electorate) or (
        bool(inside) and 2 * len(inside) == len(electorate) and previous.planner in inside
    )
