"""What a node's user hears of what other users propose: once, and with the command that agrees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.protocol.amendment_orders import Amending
from shoal.protocol.effects import Tell
from shoal.protocol.going_back import GoingBack
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Amendment, Change, Target

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")
AMENDMENT = Amendment(since=bytes(32), changes=(Change(key="sync.inner_steps", value=30),))
TARGET = Target(40, bytes(32))
HERE: Any = SimpleNamespace()


def machine(*, votes: bool = True, **consents: Any) -> Any:
    given = {PeerId(peer): consent for peer, consent in consents.items()}
    return SimpleNamespace(
        agreement=SimpleNamespace(votes=votes), consents=lambda: given, amend_consents=lambda: given, me=ME
    )


def amend(*, asked: bool = True, authority: bytes = b"") -> Any:
    return SimpleNamespace(amendment=AMENDMENT, asked=asked, authority=authority)


def back(*, asked: bool = True) -> Any:
    return SimpleNamespace(target=TARGET, asked=asked)


def test_amendment_that_another_ordered_is_told_once_with_how_to_agree() -> None:
    amending = Amending(ME, HERE, follows=True)
    assert list(amending.proposed(machine(a=amend(), me=amend(), b=amend(asked=False)))) == [
        Tell(
            "a proposes to amend sync.inner_steps = 30; `shoal status` shows who would, and the same "
            "`shoal amend --set …` here agrees"
        )
    ]
    assert list(amending.proposed(machine(a=amend()))) == []
    assert len(list(amending.proposed(machine(a=amend(), b=amend())))) == 1, "of b there was no word yet"


def test_amendment_that_this_node_follows_or_has_no_vote_on_is_not_told() -> None:
    signed = amend(authority=b"signed")
    assert list(Amending(ME, HERE, follows=True).proposed(machine(a=signed))) == []
    assert len(list(Amending(ME, HERE, follows=False).proposed(machine(a=signed)))) == 1
    assert list(Amending(ME, HERE, follows=True).proposed(machine(votes=False, a=amend()))) == []


def test_rollback_that_another_ordered_is_told_once_with_how_to_agree() -> None:
    going_back = GoingBack(ME, HERE, HERE, "never")
    consents = machine(a=back(), b=back(asked=False), me=back())
    assert list(going_back.proposed(consents)) == [
        Tell("a proposes to go back to round 40; `shoal rollback --to 40` here agrees")
    ]
    assert list(going_back.proposed(consents)) == []
    assert list(going_back.proposed(machine(votes=False, b=back()))) == []
