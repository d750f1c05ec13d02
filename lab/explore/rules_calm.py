"""Liveness of the model once the network is calm: a decision, in the first view with an honest lead.

Everything that honest members say is then heard, and nobody dies any more; some may be dead already, as long as the
rest is a quorum. Liars are silent or go on: a lead may be shown any ViewChange of theirs, and members far views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.lab.explore.rules_bugs import Bug
from shoal.lab.explore.rules_guards import FREE, Facts, Guards, Mover
from shoal.lab.explore.rules_scope import LYING, Kind, RulesScope, outvotes
from shoal.lab.explore.rules_voter import Memory, Signatures


class Calm:
    """Says why a state does not lead to a decision, with a bug or none."""

    def __init__(self, scope: RulesScope, bug: Bug | None, signatures: Signatures) -> None:
        self.scope = scope
        # The liar need not care for what convicts it: a decision there must be.
        self._guards = Guards(replace(scope, careless=True) if scope.careful else scope, bug)
        self._signatures = signatures
        self._alive: dict[int, list[int]] = {}
        self._stalls: dict[object, str | None] = {}

    def stalled(self, memories: Sequence[Memory], facts: Facts) -> str | None:
        """Return why nothing would be decided if the network were calm from here on; None if something would be.

        memories: of the honest members, in order.
        """
        view = 1 + max(memory.view for memory in memories)
        shown = tuple(self._signatures.shown(memory, view) for memory in memories)
        key = (view, shown, facts.left, tuple(sorted(facts.prepares.items())) if self.scope.liars else ())
        if key not in self._stalls:
            self._stalls[key] = next(self._stalls_of(facts, view, shown), None)
        return self._stalls[key]

    def _stalls_of(self, facts: Facts, view: int, shown: Sequence[int]) -> Iterator[str]:
        for alive in self._alive_sets(facts.left):
            movers = [(1 << m, (code,)) for m, code in zip(self.scope.honest, shown, strict=True) if alive >> m & 1]
            silent = self.scope.members - alive.bit_count()
            calm = next((v for v in range(view, view + silent + 1) if alive >> self.scope.lead(v) & 1), None)
            if calm is None:
                yield "no honest member leads"
            elif self.scope.liars and self._guards.joins_far(self.scope.liar_mask):
                yield f"from view {calm} they follow a liar to a view far ahead"
            else:
                yield from self._stalls_in(facts, calm, movers, alive)

    def _stalls_in(self, facts: Facts, view: int, movers: Sequence[Mover], alive: int) -> Iterator[str]:
        options = self._guards.led(facts, view, movers, self._guards.liar.start)
        if not options:
            yield f"the lead of view {view} finds no quorum"
        for target, _, justified in options:
            value = self._free_value(facts.left) if target == FREE else target
            name, _, leaves = self._guards.values[value]
            members = [m for m in self.scope.honest if alive >> m & 1]
            if not justified or not all(self._guards.accepts(m, value, free=target == FREE) for m in members):
                yield f"{name} is proposed in view {view}, and refused"
            elif not self._guards.is_quorum(alive, leaves):
                yield f"{name} is proposed in view {view}, and finds no quorum"

    def _free_value(self, left: int) -> int:
        """Number of the value that a lead proposes which is free and has heard everybody: nobody refuses it."""
        counted = left if self.scope.quorum != LYING else 0
        return next(
            i for i, (_, kind, leaves) in enumerate(self._guards.values) if kind is Kind.TRUE and leaves == counted
        )

    def _alive_sets(self, left: int) -> list[int]:
        """The sets of honest members that are a quorum without the others: all of them, and each that needs each."""
        if left not in self._alive:
            members = [m for m in self.scope.honest if not left >> m & 1]
            everyone = sum(1 << m for m in members)
            masks = [mask for mask in range(everyone + 1) if mask & ~everyone == 0 and outvotes(self.scope, mask)]
            self._alive[left] = [
                mask
                for mask in masks
                if mask == everyone or not any(outvotes(self.scope, mask & ~(1 << m)) for m in members if mask >> m & 1)
            ]
        return self._alive[left]
