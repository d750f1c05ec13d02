"""This node's part in a round: its role, the training it orders, its contribution, and what became of that.

role ─► train ─► contribute (encode, commit, note on disk) ─► Ready ─► certificate ─► settle
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.fragments import Fragments
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.state.contributions import Contributions, Made
from shoal.node.training.trainer_messages import Contribution
from shoal.protocol.chain import next_position
from shoal.protocol.durable import BINDING, DurableRecord
from shoal.protocol.errors import LocalError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Ready, Rebase, Value
from shoal.protocol.planning import CONTRIBUTOR, JOINER, OBSERVER, TRAINING, absent_ready

logger = logging.getLogger(__name__)


class Participation:
    """What this node gives to the round after the head, whose state is here. It runs in the engine's task, but
    `look_up`, which waits for peers."""

    def __init__(self, parts: EngineParts, fragments: Fragments) -> None:
        manifest = parts.config.manifest
        self._p = parts
        self._me = parts.identity.peer_id
        self._custody = parts.custody
        self._desk = parts.desk
        self._manifest = manifest
        """The settings that contributions and trainer keep to."""
        self._stood_on: Value | None = None
        self._contributions = Contributions(
            fragments,
            manifest.sync.plan_codec,
            manifest.round.staleness_rounds,
            sender=self._me,
            error_feedback=manifest.sync.error_feedback,
            mixing=manifest.sync.applied_mixing,
            gradients=manifest.sync.exchanges_gradients,
        )

    @property
    def made(self) -> Made | None:
        """This node's contribution to the round under way, once it is made."""
        return self._contributions.made

    @property
    def encoded(self) -> EncodedContribution | None:
        """What of it goes to the others."""
        return None if self.made is None else self.made.encoded

    def recent_members(self) -> frozenset[PeerId]:
        """Who may come back as a contributor: the members of the last rounds."""
        chain = self._custody.chain
        amended = chain.amended(chain.head.next_round)
        return chain.recent_members((amended or self._p.config.manifest).round.staleness_rounds)

    def role(self, *, finished: bool) -> str:
        """As what it takes part in the round under way. finished: the rounds asked for are done."""
        # A contribution that was announced before a restart, and is not on disk, is not announced as another.
        lost = self.made is None and (self._bound or (self._announced and not self._alone))
        if lost or self._desk.paused or finished:
            return OBSERVER
        if self.made is not None:
            return CONTRIBUTOR
        return TRAINING if self._me in self.recent_members() else JOINER

    @property
    def _announced(self) -> bool:
        """Whether a contribution to the round under way was announced, in this life or an earlier one."""
        return "ready" in self._kinds()

    @property
    def _bound(self) -> bool:
        """Whether this node proposed or voted for a value of the round under way, or may have: it may have what was
        contributed."""
        return not self._kinds().isdisjoint(BINDING)

    def _kinds(self) -> set[str]:
        """Of what is on disk about the round under way."""
        return {record.kind for record in self._p.store.bound_in(next_position(self._custody.head))}

    @property
    def _alone(self) -> bool:
        """Whether nobody else can have heard what this node announced."""
        return self._custody.head.members == (self._me,)

    async def resume(self) -> None:
        """Take up what this node had learnt and made before a restart, once the state at the head is here.

        Raises StorageError.
        """
        chain, resumption = self._custody.chain, self._p.resumption
        position = next_position(chain.head)
        # What was announced after the newest work on disk may have taken the residual of that work along.
        countable = not self._bound and (self._alone or not self._announced)
        found = await trio.to_thread.run_sync(lambda: resumption.find(chain, countable=countable))
        if found is None:
            return
        if found.work is not None:
            await self._keep_to(found.work.account.round)  # its codec is that of its own round
        again = found.work is not None and await trio.to_thread.run_sync(self._contributions.make_again, found.work)
        if not again and found.files.position == position:
            return  # what the trainer knows is ahead of what is going to be made
        if found.files.position == position:
            await self._mark_announced()  # the node may have died between the two files
        await self.settle()
        spent = not countable and found.files.position != position
        await resumption.restore_trainer(found, spent=spent)

    def announcement(self, role: str) -> Ready:
        """What to say as the round begins: the contribution of before a restart again, or that there is none yet."""
        return self._ready(self.made) if self.made is not None and role == CONTRIBUTOR else self.absent(role)

    def absent(self, role: str) -> Ready:
        """The announcement that there is no contribution, or none yet."""
        return absent_ready(role, self._custody.head, self._custody.digest)

    async def stand_on_head(self) -> None:
        """Give the trainer the state at the head; what it learnt on one that was abandoned is dropped."""
        self._p.reduce.prepare()
        state, chain = self._custody.state, self._custody.chain
        assert state is not None
        fresh = self._stood_on is not None and not chain.on_branch(self._stood_on)
        if fresh:
            self._contributions.drop()
        self._stood_on = chain.standing
        await self._desk.stand_on(state, taken=self._contributions.taken, fresh=fresh)
        await self._keep_to(chain.head.next_round)  # after the anchor, which was made under the settings before

    async def _keep_to(self, round: int) -> None:
        """Go on by the settings in force in `round`."""
        manifest = self._custody.chain.amended(round) or self._p.config.manifest
        if manifest is self._manifest:
            return
        sync = manifest.sync
        self._contributions.retune(sync.plan_codec, manifest.round.staleness_rounds, mixing=sync.applied_mixing)
        await self._desk.retune(manifest)
        self._manifest = manifest

    async def train(self, *, contribute: bool = True) -> None:
        """Have the trainer make this round's inner steps."""
        state = self._custody.state
        assert state is not None
        await self._desk.train(self._custody.head, self._me, state.tokens, contribute=contribute)

    async def contribute(self, event: Contribution) -> Ready | None:
        """Encode what the trainer made for this round, commit to it, and note on disk that it is about to be announced.

        Returns the announcement, None if this is not what was waited for. Raises StorageError.
        """
        if self.made is not None or not self._desk.is_current(event):
            return None
        try:
            made = await trio.to_thread.run_sync(self._make, event)
        except LocalError as error:
            logger.error("round %d: this node contributes nothing: %s", event.round, error)
            return self.absent(OBSERVER)
        head = self._custody.head
        await self._p.resumption.made(self._contributions.saved(made, head.next_term), alone=self._alone)
        await trio.to_thread.run_sync(self._p.audit.contribution, head.next_term, made)
        await self._mark_announced()
        self._p.log.contributed(event, made.tokens)
        return self._ready(made)

    async def _mark_announced(self) -> None:
        """Have it on disk that a contribution to the round under way is announced. Raises StorageError."""
        head = self._custody.head
        if not self._announced:
            mark = DurableRecord(kind="ready", term=head.next_term, round=head.next_round)
            await trio.to_thread.run_sync(self._p.store.persist, mark)

    def _ready(self, made: Made) -> Ready:
        return made.ready(
            self._custody.head,
            self._custody.digest,
            sender=self._me,
            upload=_at_most(self._p.config.max_upload, self._p.reduce.rates[0]),
            download=_at_most(self._p.config.max_download, self._p.reduce.rates[1]),
            reaches=self._p.links.linked() - self._p.reduce.unreachable,
        )

    def _make(self, event: Contribution) -> Made:
        if not event.tokens:
            raise LocalError("its inner steps counted no tokens; every loss may have been infinite or not a number")
        fragment, base = self._contributions.fragment(event.round), self._custody.head.hash
        values = self._desk.pseudo_gradient(fragment.numel)
        return self._contributions.make(event.round, event.number, event.tokens, values, base=base)

    async def look_up(self, peers: Sequence[PeerId]) -> None:
        """Have the finals here by which `settle` counts, as far as `peers` can help. Runs beside the engine."""
        made, chain = self.made, self._custody.chain
        entry = None if made is None else chain.after_base(made.base)
        if made is None or entry is None or isinstance(entry, Rebase) or not chain.on_branch(entry.value):
            return
        try:
            await self._custody.finals(made.round, list(peers))
        except NetworkError as error:
            logger.info("whether this node's work of round %d was counted: %s", made.round, error)

    async def settle(self) -> None:
        """Count this node's contribution as the chain says, by finals that are here.

        Nothing happens while its round is under way. It is kept whole where a rebase ended its round undecided, and
        dropped where the state on which it stands was abandoned.
        """
        made, chain = self.made, self._custody.chain
        if made is None or made.base == chain.head.hash:
            return
        entry = chain.after_base(made.base)
        if isinstance(entry, Rebase):
            await trio.to_thread.run_sync(self._contributions.settle, made.round, None)
        elif entry is not None and chain.on_branch(entry.value):
            await self._settle(made)
        else:
            self._contributions.drop()

    async def _settle(self, made: Made) -> None:
        try:
            finals = await self._custody.finals(made.round, [])
        except NetworkError:
            # Nobody can say whether it was counted; once is the limit, so it was.
            included: tuple[bool, ...] | None = (True,) * made.encoded.grid.chunks
        else:
            place = finals.plan.number(self._me)
            # A plan may name what this node announced before a restart; what it made since is not in it.
            same = place is not None and finals.plan.participants[place].root == made.encoded.root
            included = finals.included(place) if place is not None and same else None
        rounds = max(1, self._custody.chain.standing.round - made.round + 1)
        await trio.to_thread.run_sync(partial(self._contributions.settle, made.round, included, rounds=rounds))


def _at_most(cap: int | None, measured: int) -> int:
    """A rate for others to plan with, in bytes/s: what was measured, under the cap; 0 if nothing is known."""
    return min((rate for rate in (cap, measured) if rate), default=0)
