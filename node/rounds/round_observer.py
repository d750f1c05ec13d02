"""Observer of a node's rounds: what the engine tells whoever watches over them; without a watcher, nobody."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.collectives.finals import Finals
from shoal.node.state.contributions import Made
from shoal.protocol.chain import Chain
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Message, Plan, Report, Value
from shoal.protocol.planning import RoundSettings


class RoundObserver:
    """Hears of the rounds of one node; called in the engine's task, and returns at once."""

    def began(self, base: Value, settings: RoundSettings) -> None:
        """The round after `base` begins."""

    def said(self, peer: PeerId, message: Message) -> None:
        """A round message came from `peer`, who signed it."""

    def planned(self, plan: Plan) -> None:
        """A plan is followed here."""

    def contributed(self, made: Made) -> None:
        """This node's contribution is announced."""

    def reduced(self, finals: Finals, report: Report) -> None:
        """The finals of a plan are here, and lead to what `report` says."""

    def certified(self, certificate: Certificate) -> None:
        """A round that was under way here is decided."""

    def need(self, value: Value) -> None:
        """A value is proposed that bans on evidence which is not here."""

    def proven(self, chain: Chain) -> Mapping[bytes, PeerId]:
        """The accused by the digest of evidence that is here and that no ban of `chain` covers."""
        return {}
