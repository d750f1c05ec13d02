"""Names of nodes for people, beside the PeerIds by which everything is decided.

A node says its name in its record, as the capability `name.NAME`: of small letters, digits, `.`, `_` and `-`, so that
none can turn a line around, look like another alphabet's, or be taken for markup by a terminal or a page. It is a claim
like all else in a record, and two nodes may make the same. So whoever shows a name adds the end of the PeerId where
another of that name is known; the `…` between them is in no name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PEER_ID_CHARS

PREFIX: Final = "name."
NAME_LIMIT_CHARS: Final = 27
"""So that it is a capability of 32 characters."""
SHORT_CHARS: Final = 6
UNNAMED: Final = "node"
"""Of a machine whose own name has none of the characters."""
THIS_NODE: Final = " (this node)"
UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"

_NAME: Final = re.compile(rf"[a-z0-9][a-z0-9_.-]{{0,{NAME_LIMIT_CHARS - 1}}}", re.ASCII)
_ALONE: Final = re.compile(rf"`[^`]*`|(?<![/\w])12D3Koo\w{{{PEER_ID_CHARS - 7}}}(?!\w)", re.ASCII)
"""Text to type, between backquotes, and any PeerId that is not part of an address."""


def is_name(text: str) -> bool:
    """True for what a node may be called."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str, option: str) -> None:
    """Raise ConfigError for what is no name."""
    if not is_name(text):
        raise ConfigError(
            f"{option}: {text!r} is no name; write up to {NAME_LIMIT_CHARS} of a-z, 0-9, '.', '_' and '-', "
            "a letter or digit first"
        )


def name_of_host(host: str) -> str:
    """The name of a node that was given none: its machine's, without the domain, as far as a name can say it."""
    kept = re.sub(r"[^a-z0-9_-]+", "-", host.partition(".")[0].lower()).strip("-_")
    return kept[:NAME_LIMIT_CHARS].rstrip("-_") or UNNAMED


def capability_of(name: str) -> str:
    """The capability by which a record says a name."""
    return PREFIX + name


def claimed_name(capabilities: Iterable[str]) -> str:
    """The name that a record's capabilities say; empty if they say none, or what is none."""
    said = (known.removeprefix(PREFIX) for known in capabilities if known.startswith(PREFIX))
    return next(filter(_NAME.fullmatch, said), "")


def printable(text: str) -> str:
    """Text of others for people to read: but for line breaks and tabs, what cannot be seen is replaced by a sign."""
    return "".join(c if c.isprintable() or c in "\n\t" else UNPRINTABLE for c in text)


def short(peer: str) -> str:
    """The end of a PeerId, by which people tell nodes apart."""
    return f"…{peer[-SHORT_CHARS:]}"


class Names:
    """The names of peers as they are to be shown: each one's own where that is unique, else with the end of its PeerId.

    claim_of: the name that a peer claims at this moment, empty where none is known.
    """

    def __init__(self, claim_of: Callable[[str], str], *, limit: int) -> None:
        self._claim_of = claim_of
        self._limit = limit
        self._claims: dict[str, str] = {}
        self._holders: dict[str, int] = {}

    def of(self, peer: str) -> str:
        """The name of a peer; empty where none is known. Among those asked for, no two are the same."""
        claim = self._claim_of(peer)
        self._note(peer, claim)
        return self._shown(peer, claim)

    def _shown(self, peer: str, claim: str) -> str:
        return f"{claim}{short(peer)}" if claim and self._holders[claim] > 1 else claim

    def of_all(self, peers: Iterable[str]) -> dict[str, str]:
        """The names of these peers, who are all that there are, without those that have none."""
        self._claims.clear()
        self._holders.clear()
        claims = {peer: self._claim_of(peer) for peer in peers}
        for peer, claim in claims.items():  # all first: a name that two have is nobody's alone
            self._note(peer, claim)
        return {peer: self._shown(peer, claim) for peer, claim in claims.items() if claim}

    def _note(self, peer: str, claim: str) -> None:
        before = self._claims.pop(peer, "")
        if before:
            self._holders[before] -= 1
            if not self._holders[before]:
                del self._holders[before]
        if claim:
            if len(self._claims) >= self._limit:  # whoever was asked for the longest ago
                oldest = next(iter(self._claims))
                self._note(oldest, "")
            self._claims[peer] = claim
            self._holders[claim] = self._holders.get(claim, 0) + 1


def called(peer: str, names: Mapping[str, str], *, own: str = "") -> str:
    """Name that people call a peer: its own, or the end of its PeerId; `own` is marked as this node."""
    return (names.get(peer) or short(peer)) + (THIS_NODE if peer == own else "")


def with_id(peer: str, names: Mapping[str, str], *, own: str = "") -> str:
    """A peer's name with its PeerId behind it, or that alone; `own` is marked as this node."""
    name, mark = names.get(peer), ", this node" if peer == own else ""
    return f"{name} ({peer}{mark})" if name else peer + (THIS_NODE if mark else "")


def by_name(text: str, names: Mapping[str, str], *, own: str = "", whole: bool = False) -> str:
    """`text` with each PeerId that stands alone as `called` has it. Addresses, and what is to be typed, stay.

    whole: the PeerId stays, with the name behind it.
    """

    def shown(found: re.Match[str]) -> str:
        peer = found[0]
        if peer.startswith("`"):
            return peer
        if not whole:
            return called(peer, names, own=own)
        known = [*filter(None, [names.get(peer)]), *(["this node"] if peer == own else [])]
        return f"{peer} ({', '.join(known)})" if known else peer

    return _ALONE.sub(shown, text)
