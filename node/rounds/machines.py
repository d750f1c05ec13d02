"""The machine of the round after the head, as its settings, this node's disk and the chain make it."""

from __future__ import annotations

import logging
import secrets

from shoal.collectives.partition import deal
from shoal.node.outcome import Notice
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.solitude import abstaining
from shoal.protocol.chain import next_position
from shoal.protocol.effects import Effect
from shoal.protocol.identity import PeerId
from shoal.protocol.newcomers import Newcomers
from shoal.protocol.planning import RoundSettings
from shoal.protocol.probation import Probation
from shoal.protocol.round import RoundMachine
from shoal.protocol.wire import HASH_BYTES

logger = logging.getLogger(__name__)


def machine_after_head(
    parts: EngineParts,
    settings: RoundSettings,
    *,
    returners: frozenset[PeerId],
    newcomers: Newcomers,
    probation: Probation,
) -> tuple[RoundMachine, list[Effect]]:
    """The machine, bound by what the disk says of its round, and what it still has to do about that; the user is told
    where it abstains."""
    chain, head = parts.custody.chain, parts.custody.head
    machine = RoundMachine(
        identity=parts.identity,
        previous=head,
        state=parts.custody.digest,
        life=secrets.token_bytes(HASH_BYTES),  # of what it signed in this round so far it knows nothing
        settings=settings,
        deal=deal,
        returners=returners,
        in_force=chain.in_force,
        banned=chain.banned,
        leads_back=chain.leads_back,
        may_join=parts.may_join,
    )
    machine.remember(newcomers, probation)
    unfinished = machine.restore(parts.store.bound_in(next_position(head)))
    if machine.agreement.abstains:
        logger.error("%s", abstaining(machine.round))
        parts.on_progress(Notice(text=abstaining(machine.round)))
    return machine, unfinished
