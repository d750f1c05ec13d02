"""The authority's word, where its key is: `shoal rebase`, `shoal amend --by-authority`.

    authority.key    made by `shoal init`; where the manifest names no other, the first founder's node.key
    rebases.log      every rebase that was signed here, on disk before anyone heard of it

Two rebases of one term would split the swarm in two, and both would be the authority's: so one is signed per term, and
what was signed is given out again rather than anything else. A copy of the key elsewhere knows nothing of this log.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shoal.node.state.store import RecordLog
from shoal.protocol.amending import sign_amendment
from shoal.protocol.errors import ConfigError, RemoteError, StorageError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Amendment, Rebase, Value
from shoal.protocol.terms import make_rebase
from shoal.protocol.wire import canonical, decode

KEY_NAME = "authority.key"
LOG_NAME = "rebases.log"


class Authority:
    """Signs rebases and amendments for the node whose data folder this is. All methods block."""

    def __init__(self, folder: Path, *, authority: PeerId, node: Identity) -> None:
        self._folder = folder
        self._authority = authority
        self._node = node

    def rebase(
        self, head: Value, voters: Collection[PeerId], forget: Collection[PeerId], alive: Collection[PeerId]
    ) -> Rebase:
        """The rebase after `head` with its voters less those in `forget`, durably the one of its term.

        Raises ConfigError where that makes no sense, or was done otherwise before; StorageError, as of a damaged log.
        """
        key = self._key()
        rebase = make_rebase(key, head, self._electorate(head, voters, forget, alive))
        path, term = self._folder / LOG_NAME, rebase.value.term
        log = RecordLog(path)
        try:
            for record in log.recovered:
                before = decode(record, Rebase)
                if before.value.term == term:
                    return self._again(before, rebase)
            if log.damaged:
                raise RemoteError("there is a record that does not hold")
            log.append(canonical(rebase))
        except RemoteError as error:
            raise StorageError(
                f"{path} is damaged ({error}); put a copy of it back, or remove it if no rebase to term {term} was "
                "signed here"
            ) from None
        finally:
            log.close()
        return rebase

    def sign_amendment(self, swarm: bytes, amendment: Amendment) -> bytes:
        """The word that members may consent to `amendment` by themselves. Raises ConfigError without the key."""
        return sign_amendment(self._key(), swarm, amendment)

    def _electorate(
        self, head: Value, voters: Collection[PeerId], forget: Collection[PeerId], alive: Collection[PeerId]
    ) -> set[PeerId]:
        forgotten = set(forget)
        strangers = sorted(forgotten.difference(voters))
        if strangers:
            raise ConfigError(
                f"{strangers[0]} has no vote in round {head.next_round}, so that nothing waits for it; "
                "`shoal status --json` lists the voters"
            )
        if self._node.peer_id in forgotten:
            raise ConfigError("this node cannot forget itself; use `shoal rebase` at a node that stays")
        here = sorted(forgotten.intersection(alive))
        if here:
            raise ConfigError(f"{here[0]} is here; stop it, or let it leave with `shoal leave`")
        return set(voters) - forgotten

    def _key(self) -> Identity:
        path = self._folder / KEY_NAME
        if path.exists():
            key = Identity.load(path)
            if key.peer_id == self._authority:
                return key
        if self._node.peer_id == self._authority:
            return self._node
        raise ConfigError(
            f"this is signed with the key of {self._authority}, and {path} is not it; "
            "do it at the founder's node, or put that key there"
        )

    @staticmethod
    def _again(before: Rebase, rebase: Rebase) -> Rebase:
        if before.value.hash == rebase.value.hash:
            return before
        who = ", ".join(before.value.members)
        raise ConfigError(
            f"a rebase to term {before.value.term} was signed here before, on round {before.value.round} and with the "
            f"members {who}; there can be no other: start those members"
        )
