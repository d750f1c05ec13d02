"""Store of the chain and of the state at its head: from disk, from certificates as they come, and from peers.

A state that this node computed is saved beside the rounds that follow: until it is, an older one and the finals since
lead to it. One that came from elsewhere is on disk before anything follows from it, and so is S(0), which nobody
certifies: what does follow from it, tells whether it is the one.

A node that missed rounds heals by coming to the state at the head, whatever way is shorter
(`shoal.protocol.catching_up`). What it has
learnt meanwhile is no part of that state, and is kept by these rules:

    inner steps since its last contribution     move along: the replica becomes the new anchor plus them
    the contribution of a round e it missed     if C(e)'s plan has it by its root: per chunk, included is counted, the
                                                rest goes into the next contribution; if the plan has it not: all does;
                                                if C(e)'s finals are not to be had: it is taken for counted, for once
                                                is the limit
    what was excluded more often than the       is dropped: it belongs to an anchor long gone
    staleness limit allows

The first is `trainer_messages`, the others are `contributions`; all are differences from an anchor, so none of them
depends on which states the node held or skipped; where seats are few, a contribution has its anchor beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from shoal.collectives.finals import Finals
from shoal.collectives.state import CertifiedState, HeldState, PolicyImage, StateHeader
from shoal.node.holds import Holds
from shoal.node.outcome import Notice, Progress, StateFetched
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.key_use import KeyUse
from shoal.node.state.catchup import CatchUp
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.state_saver import StateSaver
from shoal.node.state.states import StateCache
from shoal.node.state.store import Store
from shoal.protocol.amending import InForce, settings_back, settings_text
from shoal.protocol.bans import named
from shoal.protocol.catching_up import is_state_of, on_branch
from shoal.protocol.chain import Chain
from shoal.protocol.errands import AskEntries, FindEarlier, KeepEarlier, ReplaceChain, TakeEntries, Warn
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Amendment, Entry, Rebase, Value
from shoal.protocol.peering import ChainPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStoreParts:
    """Parts that the state store works with."""

    store: Store
    chain: Chain
    cache: StateCache
    catchup: CatchUp
    earlier: EarlierStates
    key_use: KeyUse
    holds: Holds
    log: RoundLog
    on_progress: Callable[[Progress], None]
    takes_images: bool = False


class StateStore:
    """The chain, and the state that belongs to it. `state` may lag behind the head; `current` says whether it does.

    It is a policy's image alone where this node samples and took that in place of a state (`takes_images`).

    catchup: fetches states and finals; earlier: the states of earlier rounds that are here.
    """

    def __init__(self, parts: StateStoreParts) -> None:
        self._p = parts
        self.chain, self.catchup, self.earlier = parts.chain, parts.catchup, parts.earlier
        parts.catchup.amended = parts.chain.amended
        self._saver = StateSaver(parts.cache)
        self._loading = trio.Lock()
        self._loaded_ahead = self._load_called = False
        self.state: HeldState | None = None
        self.fetched: StateFetched | None = None
        """How far a state is that is being fetched."""
        self.on_current: Callable[[], None] = lambda: None
        """Called when the state of another round is here, mostly that at the head."""

    @property
    def head(self) -> Value:
        """The newest decided value."""
        return self.chain.head

    @property
    def current(self) -> bool:
        """True if the state at the head is here."""
        return self.state is not None and is_state_of(self.chain.standing, self.state)

    @property
    def digest(self) -> bytes:
        """The digest of the state that is here."""
        assert self.state is not None
        return self._p.cache.digest(self.state)

    @property
    def performers(self) -> Mapping[type[Any], Callable[[Any], Awaitable[Any]]]:
        """Functions that carry out an errand's requests about the chain and about states, but where else to look."""
        return {
            **self.catchup.performers(self.on_chunk),
            AskEntries: self._ask_entries,
            TakeEntries: self.take,
            ReplaceChain: self.replace,
            Warn: self._warn,
            FindEarlier: self._find_earlier,
            KeepEarlier: self._keep_earlier,
        }

    def expect(self, codec: str, numel: int, chunk_values: int) -> None:
        """The model is built: plans that are fetched have this shape."""
        self.catchup.shape = (codec, numel, chunk_values)

    async def run(self) -> None:
        """Save states beside the rounds, until cancelled. Raises StorageError.

        Cancellation: the newest state is saved first.
        """
        await self._saver.run()

    async def save(self, state: CertifiedState) -> None:
        """Return when `state`, or one of a later round, is on disk. Raises StorageError."""
        await self._saver.save_unless_newer(state)

    async def load_ahead(self) -> None:
        """Do what `load` does, while the trainer is still being started, for `load` to find it done.

        Raises StorageError.
        """
        async with self._loading:
            if not self._load_called:
                await self._load()
                self._loaded_ahead = True

    async def load(self) -> None:
        """Take up the newest state that the disk has, or leads to, and that a certificate vouches for; and the finals.

        Raises StorageError.
        """
        async with self._loading:
            if not self._loaded_ahead:
                await self._load()
            self._loaded_ahead, self._load_called = False, True
        if self.state is None and not self._p.takes_images:
            await trio.to_thread.run_sync(self.catchup.prepare)

    async def _load(self) -> None:
        cache = self._p.cache
        await trio.to_thread.run_sync(cache.tidy)
        if self._p.takes_images:
            image = await trio.to_thread.run_sync(cache.images.load, self._certified)
            if image is not None:
                self._saver.begin(image.round)
                self.state = image
                return
        for round in cache.saved_rounds():
            saved = await self._saved(round)
            state = None if saved is None else await self.catchup.replay(saved, self.chain, ())
            if saved is not None and state is not None and state.round > 0:
                self._saver.begin(round)
                self._hold(state, await trio.to_thread.run_sync(cache.header, state))
                if state is not saved:
                    await self._saver.save_soon(state)
                break
        await trio.to_thread.run_sync(cache.load_finals)
        if self.state is None:
            await self._take_earlier()

    def _certified(self, round: int) -> bytes:
        return self.chain.digest(round) if round <= self.chain.standing.round else NO_HASH

    async def _take_earlier(self) -> None:
        """Hold the state at the head if it is here as that of an earlier round: the swarm went back to it."""
        state = await self.earlier.find(self.chain.standing.round) if self.chain.height else None
        if state is not None:
            await self.adopt(state)

    async def _saved(self, round: int) -> CertifiedState | None:
        """The state of a round on disk, if it is the certified one. S(0) may be: see what follows from it."""
        if round > self.chain.standing.round:
            return None
        state = await trio.to_thread.run_sync(self._p.cache.load_state, round)
        if state is None or round == 0:
            return state
        header = await trio.to_thread.run_sync(self._p.cache.header, state)
        if header.digest != self.chain.value(round).digest:
            path = self._p.cache.state_file(round)
            logger.warning("%s is not the state that round %d certified and is ignored", path, round)
            return None
        self._p.cache.put(state, header)
        return state

    def _hold(self, state: CertifiedState, header: StateHeader) -> None:
        self.state = state
        self._p.cache.put(state, header)

    async def adopt(self, state: HeldState) -> None:
        """Hold a state that was not computed here from the one before, serve it, and have it on disk; an image in time.

        Raises StorageError.
        """
        if isinstance(state, PolicyImage):
            self.state = state
            self._p.cache.hold_image(state)
            self.on_current()
            await self._saver.save_soon(state)
            return
        self._hold(state, await trio.to_thread.run_sync(self._p.cache.header, state))
        await self._saver.save_now(state)
        await trio.to_thread.run_sync(self.catchup.arrived)
        self.on_current()

    async def follow(self, state: CertifiedState, header: StateHeader) -> None:
        """Hold a state that this node computed from the one before, and serve it; it is saved in time.

        Waits only where the disk is far behind.
        """
        self._hold(state, header)
        self.on_current()
        await self._saver.save_soon(state)

    async def append(self, entry: Entry, *, trusted: bool = False) -> bool:
        """Extend the chain, in memory and on disk; what is abandoned by that is no longer held.

        trusted: as in `Chain.extend`. Returns False for a rebase that is known. Raises RemoteError if it does not
        follow, StorageError.
        """
        before = self.chain.in_force
        if not self.chain.extend(entry, trusted=trusted):
            return False
        self._p.key_use.saw_entry(entry, self._p.store.durable_records())
        await trio.to_thread.run_sync(self._p.store.append_certificate, entry)
        await self._follow_entry(entry, before)
        return True

    async def _follow_entry(self, entry: Entry, before: InForce | None) -> None:
        """The chain, in memory and on disk, has an entry more: what was bound before it binds no more.

        before: the settings that were in force without it, None where that is not known.
        """
        await trio.to_thread.run_sync(self._p.store.decided, entry.value)
        if isinstance(entry, Rebase) or entry.value.rollback:
            self._tell_of_term(entry, before)
            await self._saver.go_back(entry.value.state_round)
        elif entry.value.amended:
            self._tell_of_amendment(entry.value.round, entry.value.amended.amendment)
        if entry.value.bans:
            self._tell_of_bans(entry.value)
        if self.state is not None and not on_branch(self.chain, self.state):
            self.state = None
            await self._take_earlier()

    def _tell_of_amendment(self, round: int, amendment: Amendment) -> None:
        self._p.log.amended(self.head, amendment)
        if self.state is not None:
            text = f"round {round} amended the settings from round {round + 1} on: {settings_text(amendment)}"
            self._p.on_progress(Notice(text=text))

    def _tell_of_bans(self, value: Value) -> None:
        self._p.log.banned(value)
        if self.state is not None:
            peers = ", ".join(ban.peer for ban in named(value))
            text = f"round {value.round} banned {peers}, proven to have lied; see `shoal evidence`"
            self._p.on_progress(Notice(text=text))

    def _tell_of_term(self, entry: Entry, before: InForce | None) -> None:
        """Log that a term ended, whether this node took part in that or hears of it; the user of a newcomer has no
        use for it."""
        value = entry.value
        if isinstance(entry, Rebase):
            self._p.log.rebased(value)
            text = f"the authority rebased the swarm on round {value.round}: going on in term {value.term}"
        else:
            self._p.log.rolled_back(value)
            text = f"round {value.round} decided to go back: going on from round {value.state_round}"
            text += f", term {value.next_term}"
        text += settings_back(before, self.chain.in_force)
        if self.state is not None:
            self._p.on_progress(Notice(text=text))

    async def _ask_entries(self, request: AskEntries) -> ChainPart:
        return await self.catchup.certificates(request.after, request.peer, request.rebases)

    async def _warn(self, request: Warn) -> None:
        logger.warning("%s", request.text)
        self._p.on_progress(Notice(text=request.text))

    async def _find_earlier(self, request: FindEarlier) -> CertifiedState | None:
        return await self.earlier.find(request.round, request.initial)

    async def _keep_earlier(self, request: KeepEarlier) -> bytes:
        assert isinstance(request.state, CertifiedState)
        return await self.earlier.keep(request.state)

    async def take(self, request: TakeEntries) -> int:
        """Extend the chain by what a peer gave; how many were new. Raises RemoteError at the first that does not hold.

        Those before one that does not hold stay. Raises StorageError. Cancellation waits until what is here is on disk.
        """
        new = 0
        with trio.CancelScope(shield=True):
            for entry in request.entries:
                new += entry.value not in self.chain and await self.append(entry, trusted=request.trusted)
        return new

    async def replace(self, request: ReplaceChain) -> None:
        """Go on with another chain, that has a later rebase. Raises StorageError."""
        theirs, height, chain = request.theirs, request.height, self.chain
        if theirs.head.term.rebases <= chain.head.term.rebases:
            return  # it came another way meanwhile
        state_round, entries = theirs.up_to(height).head.state_round, theirs.entries
        for entry in entries[height:]:
            self._p.key_use.saw_entry(entry, self._p.store.durable_records())
        await trio.to_thread.run_sync(self._p.store.replace_chain, entries)
        chain.replace(theirs)
        if self.state is not None and self.state.round > state_round:
            self.state = None  # of what the authority abandoned, though its rounds may have the same numbers
        await self._saver.go_back(state_round)
        for entry in entries[height:]:
            await self._follow_entry(entry, None)

    async def finals(self, round: int, peers: list[PeerId]) -> Finals:
        """The finals that the certificate of `round` names, with who is in which chunk as it was certified.

        Raises NetworkError if neither disk nor peers have them, or what they have names others as included.
        """
        value = self.chain.value(round)
        finals = await self.catchup.finals(value.plan, peers)
        if finals.bitmaps_root != value.bitmaps:  # an owner may sign two, and one digest comes of both
            logger.warning("the finals of round %d here name others as included than its certificate does", round)
            raise NetworkError(f"no finals of round {round} that name those as included whom its certificate does")
        return finals

    async def on_chunk(self, fetched: StateFetched) -> None:
        """Report how much of a state that is fetched is here."""
        done, total = fetched.done_chunks, fetched.total_chunks
        self.fetched = fetched if done < total else None
        self._p.on_progress(fetched)
        await self._p.holds.at(self.head.next_round, "transfer", done / total)
