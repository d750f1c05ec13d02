"""Amendments as one member sees them: what its user ordered, and what the swarm's authority asks of all members.

    its user ordered it (`shoal amend --set …`)              ─► AmendConsent, anew in each round
    another member says that the authority signed it, and    ─► AmendConsent, for as long as it can be decided
    this node's user lets that be enough

An order is on disk until it is carried out, withdrawn, or overtaken: it was for the settings that were in force, and
others are. A consent that follows the authority passes its signature on, so that all members hear of it; of two that
the authority signed for the same settings all follow the one of lower hash. Whatever a manifest would refuse is refused
before anybody consents to it (amending.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shoal.protocol.amending import (
    InForce,
    is_done,
    is_the_authoritys,
    make_amendment,
    parse_settings,
    settings_text,
    stands_on,
)
from shoal.protocol.effects import DropOrder, Effect, KeepOrder, SignAmendment, Steps, Tell
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Loaded, Wanted
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Surroundings
from shoal.protocol.voting import voter_changes

TOLD_LIMIT: Final = 1024
HOW_TO_AGREE: Final = "`shoal status` shows who would, and the same `shoal amend --set …` here agrees"


class Amending:
    """Amendments as one member handles them, in whose hands it is. follows: it consents to the authority's, too."""

    def __init__(self, me: PeerId, here: Surroundings, *, follows: bool) -> None:
        self._me = me
        self._here = here
        self._follows = follows
        self._asked: Wanted | None = None
        self._signed: Wanted | None = None  # by the authority, as others said
        self._told: set[tuple[PeerId, bytes]] = set()  # who proposed what, as this node's user was told
        self._begun = False

    @property
    def _in_force(self) -> InForce | None:
        return self._here.chain.in_force

    def loaded(self, event: Loaded) -> None:
        """Take up what was ordered in earlier lives."""
        self._asked = next((order for order in event.orders if isinstance(order, Wanted)), None)

    # -- the user's order ------------------------------------------------------------------------------------

    def order(self, settings: Sequence[str], *, by_authority: bool) -> Steps:
        """Its user wants these, each SECTION.KEY=VALUE, in force. On disk when this is over.

        Raises ConfigError where they cannot be, or this node has not the authority's key.
        """
        in_force = self._in_force
        if in_force is None or self._me not in self._here.chain.voters:
            raise ConfigError("this node has no vote in the next round: do it at one of the voters, see `shoal status`")
        amendment = make_amendment(in_force, parse_settings(settings))
        for peer, votes in voter_changes(amendment).items():
            if votes and peer not in self._here.chain.head.members:
                raise ConfigError(f"{peer} is no member; have its node join first, `shoal run`, and order it then")
        signature: bytes = (yield SignAmendment(amendment)) if by_authority else b""
        wanted = Wanted(amendment=amendment, authority=signature)
        yield KeepOrder(wanted)
        self._asked = wanted

    def withdraw(self) -> Steps:
        """Its user does not want that any more; what was said in this round stays said."""
        self._asked = None
        yield DropOrder(Wanted)

    @property
    def has_order(self) -> bool:
        """True if its user wants other settings: that may be said to the others with the next tick."""
        return self._asked is not None

    # -- the round -------------------------------------------------------------------------------------------

    def begin_round(self) -> Steps:
        """Another round begins: forget what cannot be decided any more."""
        if self._signed is not None and not self._can_be(self._signed):
            self._signed = None
        asked, first = self._asked, not self._begun
        self._begun = True
        if asked is None:
            return
        text = settings_text(asked.amendment)
        if self._can_be(asked):
            if first:
                yield Tell(f"still proposing to amend {text}; `shoal amend --withdraw` ends that")
            return
        yield from self.withdraw()
        if self._in_force is None or not is_done(asked.amendment, self._in_force):
            yield Tell(f"other settings are in force than when it was ordered to amend {text}; order it again")

    def _can_be(self, wanted: Wanted) -> bool:
        in_force = self._in_force
        return in_force is not None and stands_on(wanted.amendment, in_force)

    def advise(self, machine: RoundMachine, now: float) -> Sequence[Effect]:
        """Consent to the amendment that this node's user or, if it follows it, the authority wants in this round."""
        if not machine.agreement.votes:
            return ()
        wanted = self._asked
        if wanted is None and self._follows:
            wanted = self._signed = self._heard(machine)
        if wanted is None:
            return ()
        return machine.amend(wanted.amendment, asked=wanted is self._asked, authority=wanted.authority, now=now)

    def proposed(self, machine: RoundMachine) -> Steps:
        """Tell this node's user once what another's ordered, and how to agree."""
        if not machine.agreement.votes:
            return
        for peer, consent in sorted(machine.amend_consents().items()):
            key = peer, consent.amendment.hash
            agreed = self._asked is not None and self._asked.amendment == consent.amendment
            agreed |= self._follows and bool(consent.authority)
            if peer == self._me or not consent.asked or agreed or key in self._told:
                continue
            if len(self._told) >= TOLD_LIMIT:
                self._told.clear()
            self._told.add(key)
            yield Tell(f"{peer} proposes to amend {settings_text(consent.amendment)}; {HOW_TO_AGREE}")

    def _heard(self, machine: RoundMachine) -> Wanted | None:
        """Amendment that the authority signed, as members' consents show; of several the one of the least hash."""
        in_force = self._in_force
        if in_force is None:
            return None
        authority = in_force.manifest.swarm.authority
        signed = {
            Wanted(amendment=consent.amendment, authority=consent.authority)
            for consent in machine.amend_consents().values()
            if is_the_authoritys(consent.amendment, consent.authority, authority, machine.previous.swarm)
        }
        if self._signed is not None:
            signed.add(self._signed)
        return min(signed, key=lambda wanted: wanted.amendment.hash, default=None)
