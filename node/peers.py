"""Rows of all peers that a running node knows, read off it at once."""

from __future__ import annotations

from shoal.node.parts import SOFTWARE, Parts
from shoal.node.peer_facts import PeerFacts, Reach
from shoal.node.strategies.rounds import Rounds
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import State
from shoal.protocol.records import Phase

UNKNOWN_PHASE = "unknown"
"""Of a peer without a record."""


def peer_rows(parts: Parts, rounds: Rounds, phase: Phase) -> list[PeerFacts]:
    """Members and voters first, then by PeerId; this node among them. phase: that of this node's record.

    As many as there are records and watched peers, which are bounded; for each a few look-ups. A record is older than
    the chain here by up to a round or two: of a peer that the newest certificate names, the round is no earlier.
    """
    members, machine, me = parts.members, parts.members.machine, parts.identity.peer_id
    standing, own_round = rounds.standing(), rounds.position[1]
    certified = 0 if rounds.certifying is None else own_round
    counted = frozenset(standing.members)
    first = counted.union(standing.voters)
    alive, linked = members.present(), members.links.linked()
    suspected, dead = members.suspected(), frozenset(machine.in_state(State.DEAD))
    records = {record.peer: record for record in members.book.records()}

    def announced(peer: PeerId) -> int:
        return 0 if rounds.sharing is None or rounds.certifying is not None else rounds.sharing.newest_round(peer)

    def reach_of(peer: PeerId) -> Reach:
        if peer == me:
            return "self"
        if peer in suspected:
            return "suspect"
        if peer in alive:
            return "direct" if peer in linked else "detour"
        return "unlinked" if peer in records and peer not in dead else "gone"

    def row(peer: PeerId) -> PeerFacts:
        record, moved, mine = records.get(peer), parts.lanes.moved(peer), peer == me
        if mine or record is None:
            return PeerFacts(
                peer=peer,
                phase=phase if mine else UNKNOWN_PHASE,
                reach=reach_of(peer),
                member=peer in counted,
                round=own_round if mine else certified if peer in counted else 0,
                tokens_per_s=parts.training_client.tokens_per_s if mine else 0.0,
                sent=moved.taken,
                received=moved.received,
                software=SOFTWARE if mine else "",
                address=next(iter(parts.host.addresses), "") if mine else "",
                name=names.get(peer, ""),
            )
        return PeerFacts(
            peer=peer,
            phase=record.phase,
            reach=reach_of(peer),
            member=peer in counted,
            round=max(record.round, certified if peer in counted else 0, announced(peer)),
            tokens_per_s=record.tokens_per_s,
            sent=moved.taken,
            received=moved.received,
            software=record.software,
            address=next(iter(record.control_addresses), ""),
            name=names.get(peer, ""),
        )

    everyone: set[PeerId] = {*records, *first, *alive, me}
    names = parts.names.of_all(everyone)
    return [row(peer) for peer in sorted(everyone, key=lambda peer: (peer not in first, peer))]
