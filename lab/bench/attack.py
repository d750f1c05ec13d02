"""`shoal bench attack`: attack against defence in a swarm in one process, some of whose members attack every round.

The swarm is that of `train_local`, so contributions, plans, clips, sums and signed finals are what nodes make.
The clean run is the same swarm with nobody attacking, no clip and the plain mean. Proofs are found as nodes find them:
each peer recomputes a few chunks of every round, drawn by the lottery of `auditing`, and holds the contributions to
them to what their senders signed; who is proven to have lied is out from the next round on, as after a certified ban.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import torch

from shoal.cli.render import ShowNow
from shoal.collectives.codecs import F32, U8, Undecodable
from shoal.collectives.commitment import bitmap_indices
from shoal.collectives.finals import FinalChunk, FinalFormat, Finals
from shoal.collectives.proofs import is_unsound, is_wrong
from shoal.lab.bench.attack_spec import (
    ATTACKS,
    CLEAN,
    DEFENCES,
    RECOMMENDED,
    UNDEFENDED,
    AttackBench,
    AttackResult,
    Cell,
    peer_identity,
)
from shoal.lab.bench.attackers import WRONG_SUM, Attacker, Knowledge
from shoal.lab.bench.machine import one_thread, this_machine
from shoal.lab.bench.train_local import LocalNode, LocalSwarm
from shoal.lab.bench.train_spec import workload_of
from shoal.lab.case import Case, LongCaseOptions
from shoal.lab.page import table
from shoal.node.audits.useful_work import WorkMeter
from shoal.node.training.trainer_messages import Assignment
from shoal.protocol.auditing import beacon, drawn, ticket
from shoal.protocol.commitments import commitment_of, committed
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Plan, Ready
from shoal.protocol.planning import RoundSettings


class AttackedSwarm(LocalSwarm):
    """A swarm whose last members attack.

    proven: the round after which each liar was proven to be one. bans: whether it is out from then on. weighed: the
    contributions of the newest round as everyone decodes them, by peer.
    """

    def __init__(
        self,
        manifest: Manifest,
        identities: Sequence[Identity],
        *,
        attack: str,
        attackers: int,
        audits: int,
        bans: bool,
        seed: int,
    ) -> None:
        self._attack = attack
        self._attacking = {i.peer_id for i in identities[len(identities) - attackers :]} if attack != CLEAN else set()
        self._audits = audits
        self._bans = bans
        self._seed = seed
        self.proven: dict[PeerId, int] = {}
        self.decoded: dict[PeerId, F32] = {}
        self.readies: dict[PeerId, Ready] = {}
        super().__init__(manifest, identities)

    @property
    def manifest(self) -> Manifest:
        """Manifest that all members agreed on."""
        return self._manifest

    @property
    def attackers(self) -> frozenset[PeerId]:
        """PeerIds of the attackers, banned or not."""
        return frozenset(self._attacking)

    def _add(self, identity: Identity) -> LocalNode:
        if identity.peer_id not in self._attacking:
            return super()._add(identity)
        options: Mapping[str, Any] = self._manifest.workload.options
        node = Attacker(identity, self._manifest, self._workload, attack=self._attack, options=options)
        self.nodes[identity.peer_id] = node
        return node

    def _announce(self) -> dict[PeerId, Ready]:
        head = self.head
        honest = {p: n.train(head, self.state) for p, n in self.nodes.items() if not isinstance(n, Attacker)}
        made = [self.nodes[peer].contributions.made for peer in honest]
        known = Knowledge([one for one in made if one is not None], head.next_round, self._seed)
        others = {p: n.announce(head, self.state, known) for p, n in self.nodes.items() if isinstance(n, Attacker)}
        self.readies = honest | others
        return self.readies

    def _sign(self, final_format: FinalFormat, chunk: int, mean: F32, included: Sequence[int]) -> FinalChunk:
        if self._attack == "wrong_sums" and final_format.owner(chunk) in self._attacking:
            np.multiply(mean, WRONG_SUM, out=mean)
        return super()._sign(final_format, chunk, mean, included)

    def _leave_out(self, chunk: int, peers: Sequence[PeerId]) -> None:
        """Do nothing: they are missing in the bitmap, and the audit looks at the bytes."""

    def _reduce(self, plan: Plan) -> Finals:
        finals = super()._reduce(plan)
        self._audit(plan, finals)
        self.decoded = {}
        for peer, node in self.nodes.items():
            made = node.contributions.made
            if made is not None:
                with contextlib.suppress(Undecodable):
                    self.decoded[peer] = made.encoded.decoded()
            if isinstance(node, Attacker):
                node.forget()
        return finals

    def _audit(self, plan: Plan, finals: Finals) -> None:
        """Note what all auditors of a round prove together."""
        signed = beacon(plan.hash, [(final.result, final.bitmap) for final in finals.chunks])
        tickets = [ticket(node.identity, signed) for node in self.nodes.values()]
        chosen = {chunk for one in tickets for chunk in drawn(one, plan.chunks, self._audits)}
        settings = RoundSettings.of(self._manifest, plan.numel)
        for chunk in sorted(chosen):
            payloads = {place: self._payload(plan, place, chunk) for place in plan.contributors()}
            for place, payload in payloads.items():
                peer = plan.participants[place].peer
                if peer not in self.proven:
                    ready = committed(self.nodes[peer].identity, self.readies[peer], settings)
                    commitment = commitment_of(peer, ready, settings)
                    if commitment is not None and is_unsound(commitment, chunk, payload, ready.squares):
                        self.proven[peer] = plan.round
            final = finals.chunks[chunk]
            included = bitmap_indices(final.bitmap, len(plan.participants))
            if is_wrong(plan, final.statement, {place: payloads[place] for place in included}):
                self.proven.setdefault(final.owner, plan.round)

    def _payload(self, plan: Plan, place: int, chunk: int) -> U8:
        made = self.nodes[plan.participants[place].peer].contributions.made
        assert made is not None
        return np.frombuffer(made.encoded.payload(chunk), np.uint8)

    def run_round(self) -> None:
        """Go from S(e − 1) to S(e), and then remove those who were proven to lie, if there are bans."""
        super().run_round()
        for peer in self.proven if self._bans else ():
            self.nodes.pop(peer, None)


def run_cell(bench: AttackBench, attack: str, defence: str, clean_loss: float | None) -> Cell:
    """One attack under one defence, from the first round to the last."""
    began = time.monotonic()
    swarm = _swarm(bench, attack, defence)
    loss: float | None = None
    with np.errstate(all="ignore"):
        try:
            for _ in range(bench.rounds - 1):
                swarm.run_round()
            anchor, members = swarm.state.anchor, swarm.head.members
            swarm.run_round()
            loss = swarm.evaluate()
        except FloatingPointError:
            loss = None  # the anchor is such that no member's loss is finite any more
    sound = loss is not None and math.isfinite(loss)
    looks = _look(swarm, anchor, members) if sound and attack != CLEAN else {}
    return Cell(
        attack=attack,
        defence=defence,
        val_loss=loss if sound else None,
        ratio=loss / clean_loss if sound and loss is not None and clean_loss else None,
        proven=tuple(swarm.proven.get(peer) for peer in sorted(swarm.attackers)),
        seconds=round(time.monotonic() - began, 1),
        **looks,
    )


def _swarm(bench: AttackBench, attack: str, defence: str) -> AttackedSwarm:
    identities = [peer_identity(bench.seed, index) for index in range(bench.peers)]
    settings = DEFENCES[defence]
    return AttackedSwarm(
        bench.manifest(bench.seed, [identity.peer_id for identity in identities], settings),
        identities,
        attack=attack,
        attackers=bench.attackers,
        audits=bench.audits,
        bans=settings.bans,
        seed=bench.seed,
    )


def _look(swarm: AttackedSwarm, anchor: F32, members: Sequence[PeerId]) -> dict[str, float | None]:
    """Weigh the last round's contributions on their own data: the useless share of attackers' and of honest ones."""
    manifest = swarm.manifest
    meter = WorkMeter(workload_of(manifest), torch.device("cpu"), chunk_values=manifest.round.chunk_values)
    useless: dict[bool, list[bool]] = {True: [], False: []}
    for peer, values in swarm.decoded.items():
        lies = peer in swarm.attackers
        share = Assignment(
            seed=manifest.workload.seed, round=swarm.state.round, member=members.index(peer), members=len(members)
        )
        useless[lies].append(not meter.weigh(anchor, values, share).useful)
    return {
        "useless": sum(useless[True]) / len(useless[True]) if useless[True] else None,
        "honest_useless": sum(useless[False]) / len(useless[False]) if useless[False] else None,
    }


def run(bench: AttackBench, tell: ShowNow) -> AttackResult:
    """Train a small model among attackers, in one process: final loss by attack and defence, and what is proven."""
    with one_thread():
        return _measure(bench, tell)


def _measure(bench: AttackBench, tell: ShowNow) -> AttackResult:
    """The clean run, then every attack under every defence, one after the other. Seconds to a minute each."""
    swarm = _swarm(bench, CLEAN, UNDEFENDED)
    first_loss, parameters = swarm.evaluate(), swarm.state.numel
    clean = run_cell(bench, CLEAN, UNDEFENDED, None)
    assert clean.val_loss is not None
    tell(f"clean: loss {clean.val_loss:.4f} after {clean.seconds:.0f} s")
    cells = []
    for attack, defence in product(bench.attacks, bench.defences):
        cell = run_cell(bench, attack, defence, clean.val_loss)
        tell(f"{attack} against {defence}: {_number(cell.ratio)} of the clean loss, {cell.seconds:.0f} s")
        cells.append(cell)
    return AttackResult(
        peers=bench.peers,
        attackers=bench.attackers,
        rounds=bench.rounds,
        inner_steps=bench.inner_steps,
        audits=bench.audits,
        parameters=parameters,
        seed=bench.seed,
        first_val_loss=first_loss,
        clean_val_loss=clean.val_loss,
        recommended=RECOMMENDED,
        cells=tuple(cells),
        machine=this_machine(),
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def to_lines(result: AttackResult) -> list[str]:
    """A table in Markdown, the attacks and the defences."""
    defences = list(dict.fromkeys(cell.defence for cell in result.cells))
    by_name = {(cell.attack, cell.defence): cell for cell in result.cells}
    attacks = list(dict.fromkeys(cell.attack for cell in result.cells))
    lines = [
        f"{result.peers} peers, of which {result.attackers} attack in every one of {result.rounds} rounds of "
        f"{result.inner_steps} steps; {result.parameters:,} parameters, seed {result.seed}. Final held-out loss ÷ that "
        f"of the clean run, {result.clean_val_loss:.4f} bits per byte ({result.first_val_loss:.0f} before "
        f"training), all peers honest and the mean plain. The recommended setting is {result.recommended}.",
        "",
        table(("attack", *defences, "proven after rounds"), (_row(by_name, attack, defences) for attack in attacks)),
        "What the attacks are:",
        "",
    ]
    lines += [f"* {attack}: {ATTACKS[attack]}" for attack in attacks]
    lines += ["", "What the defences are:", ""]
    lines += [f"* {defence}: {DEFENCES[defence].says}" for defence in defences]
    return lines


def _row(by_name: Mapping[tuple[str, str], Cell], attack: str, defences: Sequence[str]) -> tuple[str, ...]:
    cells = [by_name.get((attack, defence)) for defence in defences]
    return attack, *map(_shown, cells), _proven([cell for cell in cells if cell is not None])


def _shown(cell: Cell | None) -> str:
    return "" if cell is None else "lost" if cell.ratio is None else f"{cell.ratio:.3f}"


def _proven(cells: Sequence[Cell]) -> str:
    """Rounds in which an attacker was proven to be one, the first and the last over all cells."""
    rounds = [round for cell in cells for round in cell.proven]
    found = [round for round in rounds if round is not None]
    if not found:
        return "cannot be" if rounds else ""
    missed = "" if len(found) == len(rounds) else f", {len(rounds) - len(found)} of {len(rounds)} never"
    span = f"{min(found)}" if min(found) == max(found) else f"{min(found)} to {max(found)}"
    return span + missed


CASE: Final = Case(spec=AttackBench, run=run, lines=to_lines, options=LongCaseOptions)
