"""Watches for another chain: two certificates for one position, seen by this node, stop it until the authority decides.

    a certificate for a position that is decided here        it is held against the entry here
    a message, or an entry, on a base that is not here        the chain of who sent it is compared with the one here
    two certificates that hold, with two values               on disk (`forks.log`), told to the user and to all peers

Comparing is done beside the rounds, one peer at a time, and each peer not more often than every PERIOD_S.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import trio

from shoal.node.outcome import Notice, Progress
from shoal.node.reporting.round_log import RoundLog
from shoal.node.state.chain_choice import Ask
from shoal.node.state.chain_comparison import difference
from shoal.node.state.store import RecordLog
from shoal.protocol.chain import Chain, Position, next_position
from shoal.protocol.errors import NetworkError, RemoteError, StorageError
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Message, RoundMessage
from shoal.protocol.peering import ChainPart
from shoal.protocol.wire import canonical, decode

LOG_NAME = "forks.log"
PERIOD_S = 10.0
"""Between two comparisons with one peer."""
SUSPECTS_LIMIT = 64
COMPARED_LIMIT_PEERS = 1024
FORKS_LIMIT = 64
"""That are kept, and told of; the first one stops this node."""

logger = logging.getLogger(__name__)


class ForkWatch:
    """One node's watch over its chain: a service of the daemon. on_found: called once a fork stops this node."""

    def __init__(
        self,
        *,
        folder: Path,
        chain: Chain,
        ask: Ask,
        say: Callable[[Certificate], None],
        log: RoundLog,
        tell: Callable[[Progress], None],
    ) -> None:
        """Raises StorageError where what was found before cannot be read."""
        self._path = folder / LOG_NAME
        self._chain = chain
        self._ask = ask
        self._say = say
        self._log = log
        self._tell = tell
        self._forks = self._load()
        self._suspects: dict[PeerId, None] = {}
        self._compared_at: dict[PeerId, float] = {}
        self._suspected = trio.Event()
        self.on_found: Callable[[], None] = lambda: None

    def _load(self) -> list[Fork]:
        if not self._path.exists():
            return []
        log = RecordLog(self._path)
        try:
            return [decode(record, Fork) for record in log.recovered]
        except RemoteError as error:
            raise StorageError(f"{self._path} is damaged ({error}); remove it if the fork is settled") from None
        finally:
            log.close()

    @property
    def fork(self) -> Fork | None:
        """The fork that binds this node to sign nothing more, if there is one."""
        head = self._chain.head
        return next((fork for fork in self._forks if fork.binds(head)), None)

    # -- what the engine hears -------------------------------------------------------------------------------

    def heard(self, peer: PeerId, message: Message, position: Position) -> None:
        """A round message came from `peer`; it may show that another chain goes on. Raises StorageError."""
        chain, current = self._chain, next_position(self._chain.head)
        base = message.value.base if isinstance(message, Certificate) else getattr(message, "base", None)
        if position > current or base is None:
            return  # it is caught up with, or of no round
        if not chain.knows(base):
            self.suspect(peer)
        elif isinstance(message, Certificate):
            self._hold_against(message, peer)
        elif isinstance(message, RoundMessage) and chain.decided(position) is None and base != chain.head.hash:
            self.suspect(peer)

    def suspect(self, peer: PeerId) -> None:
        """Have the chain here compared with that of a peer, which said something that does not go with it."""
        since = self._compared_at.get(peer)
        recently = since is not None and trio.current_time() - since < PERIOD_S
        if not recently and len(self._suspects) < SUSPECTS_LIMIT:
            self._suspects[peer] = None
            self._suspected.set()

    def _hold_against(self, certificate: Certificate, peer: PeerId) -> None:
        try:
            fork = self._chain.fork_with(certificate)
        except RemoteError as error:
            logger.warning("%s: %s", peer, error)
            return
        if fork is not None:
            self._found(fork)

    def _found(self, fork: Fork) -> None:
        if fork in self._forks or len(self._forks) >= FORKS_LIMIT:
            return
        log = RecordLog(self._path)
        try:
            log.append(canonical(fork))
        finally:
            log.close()
        self._forks.append(fork)
        self._log.forked(fork)
        logger.error("%s", fork)
        self._tell(Notice(text=str(fork)))
        self._say(fork.one)
        self._say(fork.other)
        self.on_found()

    # -- the service -----------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compare this node's chain with those of peers that it suspects, until cancelled. Raises StorageError."""
        task_status.started()
        while True:
            await self._suspected.wait()
            self._suspected = trio.Event()
            while self._suspects:
                peer = next(iter(self._suspects))
                del self._suspects[peer]
                self._compared_at[peer] = trio.current_time()
                while len(self._compared_at) > COMPARED_LIMIT_PEERS:
                    del self._compared_at[next(iter(self._compared_at))]
                await self._compare(peer)

    async def _compare(self, peer: PeerId) -> None:
        async def ask(after: int, rebases: int) -> ChainPart:
            return await self._ask(after, peer, rebases)

        try:
            found = await difference(self._chain.entries, ask)
        except (NetworkError, RemoteError) as error:
            logger.info("comparing the chain with that of %s: %s", peer, error)
            return
        if found.parted and isinstance(found.theirs, Certificate):
            self._hold_against(found.theirs, peer)
