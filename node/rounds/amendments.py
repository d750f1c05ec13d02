"""Amendments as one node sees them: what its user ordered, and what the swarm's authority asks of all members.

    its user ordered it (`shoal amend --set …`)              ─► AmendConsent, anew in each round
    another member says that the authority signed it, and    ─► AmendConsent, for as long as it can be decided
    this node's user lets that be enough

An order is on disk (`amend.order`) until it is carried out, withdrawn, or overtaken: it was for the settings that were
in force, and others are. A consent that follows the authority passes its signature on, so that all members hear of it;
of two that the authority signed for the same settings all follow the one of lower hash. Whatever a manifest would
refuse is refused before anybody consents to it (`shoal.protocol.amending`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from shoal.node.outcome import Notice
from shoal.node.rounds.authority import Authority
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.order_file import OrderFile
from shoal.protocol.amending import (
    amended_settings,
    is_the_authoritys,
    make_amendment,
    parse_settings,
    settings_of,
    settings_text,
    stands_on,
)
from shoal.protocol.effects import Effect
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import Amendment
from shoal.protocol.round import RoundMachine

NAME = "amend.order"


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An amendment, and the authority's signature on it or nothing."""

    amendment: Amendment
    authority: bytes = b""


class Amending:
    """What this node does about amendments. All of it runs in the engine's task."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._order = OrderFile(parts.store.folder / NAME, Wanted, again="shoal amend --set")
        self._asked = self._order.read()
        self._signed: Wanted | None = None  # by the authority, as others said
        self._begun = False

    # -- the user's order ------------------------------------------------------------------------------------

    async def order(self, settings: Sequence[str], *, by_authority: bool) -> Amendment:
        """This node's user wants these, each SECTION.KEY=VALUE, in force. On disk when this returns.

        Raises ConfigError where they cannot be, or this node has not the authority's key; StorageError.
        """
        chain = self._p.state_store.chain
        in_force = chain.in_force
        if in_force is None or self._p.identity.peer_id not in chain.head.members:
            raise ConfigError("this node is no member of the next round; only members amend: wait until it has joined")
        amendment = make_amendment(in_force, parse_settings(settings))
        signature = b""
        if by_authority:
            swarm = self._p.config.manifest.swarm
            authority = Authority(self._p.store.folder, authority=swarm.authority, node=self._p.identity)
            signature = await trio.to_thread.run_sync(authority.sign_amendment, chain.head.swarm, amendment)
        wanted = Wanted(amendment=amendment, authority=signature)
        await trio.to_thread.run_sync(self._order.write, wanted)
        self._asked = wanted
        return amendment

    async def withdraw(self) -> None:
        """Its user does not want that any more; what was said in this round stays said. Raises StorageError."""
        self._asked = None
        await trio.to_thread.run_sync(self._order.remove)

    # -- the round -------------------------------------------------------------------------------------------

    async def begin_round(self) -> None:
        """Another round begins: forget what cannot be decided any more. Raises StorageError."""
        if self._signed is not None and not self._can_be(self._signed):
            self._signed = None
        asked, first = self._asked, not self._begun
        self._begun = True
        if asked is None:
            return
        text = settings_text(asked.amendment)
        if self._can_be(asked):
            if first:
                self._p.on_progress(Notice(text=f"still proposing to amend {text}; `shoal amend --withdraw` ends that"))
            return
        await self.withdraw()
        if not self._is_done(asked):
            self._p.on_progress(
                Notice(text=f"other settings are in force than when it was ordered to amend {text}; order it again")
            )

    def _can_be(self, wanted: Wanted) -> bool:
        in_force = self._p.state_store.chain.in_force
        return in_force is not None and stands_on(wanted.amendment, in_force)

    def _is_done(self, wanted: Wanted) -> bool:
        chain, manifest = self._p.state_store.chain, self._p.config.manifest
        now = amended_settings(manifest, chain.amended(chain.head.next_round))
        return settings_of(wanted.amendment).items() <= now.items()

    def advise(self, machine: RoundMachine, now: float) -> list[Effect]:
        """What this node has to say about amendments in this round."""
        if not machine.agreement.member:
            return []
        wanted = self._asked
        if wanted is None and self._p.config.authority_amendments:
            wanted = self._signed = self._heard(machine)
        if wanted is None:
            return []
        return machine.amend(wanted.amendment, asked=wanted is self._asked, authority=wanted.authority, now=now)

    def _heard(self, machine: RoundMachine) -> Wanted | None:
        """What the authority wants, as far as members said so."""
        swarm = self._p.config.manifest.swarm
        signed = {
            Wanted(amendment=consent.amendment, authority=consent.authority)
            for consent in machine.amend_consents().values()
            if is_the_authoritys(consent.amendment, consent.authority, swarm.authority, machine.previous.swarm)
        }
        if self._signed is not None:
            signed.add(self._signed)
        return min(signed, key=lambda wanted: wanted.amendment.hash, default=None)
