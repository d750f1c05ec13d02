"""A key in two places: what shows it, what does not, and when a node that took over its key signs again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from shoal.node.rounds.key_use import NAME, KeyUse
from shoal.protocol.durable import DurableRecord
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import Certificate, Term, Value
from shoal.protocol.records import NodeRecord
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, Ledger, certificate_of, identity

ME = identity(2)


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger()
    ledger.certify(rounds)
    return ledger


def entry_of(round: int, *signers: int, view: int = 0) -> Certificate:
    return certificate_of(ledger_of(round).chain.head, [identity(n) for n in signers], view=view)


def record_of(kind: str, value: Value, *, view: int = 0) -> DurableRecord:
    return DurableRecord(kind=kind, term=value.term, round=value.round, view=view, value=value)


def use_of(folder: Path, *records: DurableRecord, take_over: bool = False) -> KeyUse:
    use = KeyUse(folder, ME.peer_id, records, take_over=take_over)
    use.started(5)
    return use


def text_of(use: KeyUse) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        trio.run(_run, use)
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    return str(error)


async def _run(use: KeyUse) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(use.run)


def test_record_of_a_later_life_ends_this_one_and_says_which_may_go_on(tmp_path: Path) -> None:
    use = use_of(tmp_path)
    assert not use.ends
    use.saw_record(NodeRecord(peer=ME.peer_id, boot=7, term=(0, 1), round=30))
    assert use.ends
    assert use.abstains(ledger_of(1).chain.head)
    text = text_of(use)
    for part in (f"the key in {tmp_path} is in use elsewhere", "7 times, this one 5", "remove this one", "--take-over"):
        assert part in text
    with pytest.raises(ConfigError, match="in use elsewhere"):
        use_of(tmp_path)
    over = use_of(tmp_path, take_over=True)
    assert over.other_boot == 7
    assert over.sighting is not None
    assert over.sighting.position == (Term(0, 1), 31)
    assert use_of(tmp_path).other_boot == 7  # said once, it holds for later starts too


def test_vote_that_the_log_lacks_is_somebody_elses(tmp_path: Path) -> None:
    entry = entry_of(3, 1, 2)
    use = use_of(tmp_path, record_of("vote", ledger_of(2).chain.head))
    use.saw_entry(entry, [])
    assert use.ends
    assert "it signed in round 3, of which this folder knows nothing" in text_of(use)


@pytest.mark.parametrize("other", ["value", "view"])
def test_vote_that_the_log_contradicts_is_somebody_elses(tmp_path: Path, other: str) -> None:
    entry = entry_of(3, 1, 2, view=1)
    mine = entry.value if other == "view" else msgspec.structs.replace(entry.value, tokens=1)
    record = record_of("vote", mine, view=0 if other == "view" else 1)
    use = use_of(tmp_path, record)
    use.saw_entry(entry, [record])
    assert use.ends


def test_own_votes_of_this_life_or_an_earlier_one_are_no_sign(tmp_path: Path) -> None:
    entry = entry_of(3, 1, 2, view=2)
    records = [
        record_of("promise", entry.value, view=1),
        record_of("vote", msgspec.structs.replace(entry.value, tokens=1)),
        record_of("vote", entry.value, view=2),
    ]
    use = use_of(tmp_path, *records)
    use.saw_entry(entry, records)
    use.saw_entry(entry_of(4, 1, 3), [])  # not signed by this key
    assert not use.ends
    assert not (tmp_path / NAME).exists()


def test_votes_of_rounds_that_the_log_has_dropped_are_no_sign(tmp_path: Path) -> None:
    """Its user removed `chain.log`, as Shoal says where that is damaged, and the log was cut meanwhile."""
    newest = ledger_of(9).chain.head
    use = use_of(tmp_path, record_of("vote", newest))
    for round in range(1, 9):
        use.saw_entry(entry_of(round, 1, 2), [])
    assert not use.ends
    use.saw_entry(entry_of(10, 1, 2), [])
    assert use.ends


def test_node_that_took_over_abstains_until_its_key_has_no_vote(tmp_path: Path) -> None:
    use_of(tmp_path).saw_record(NodeRecord(peer=ME.peer_id, boot=7, term=(0, 0), round=2))
    use = use_of(tmp_path, take_over=True)
    head = ledger_of(3).chain.head
    without = msgspec.structs.replace(head, members=tuple(p for p in head.members if p != ME.peer_id))
    assert use.abstains(head)
    use.saw_entry(entry_of(5, 1, 2), [])  # what its key signed elsewhere is no news now, but has to be over
    assert not use.ends
    assert use.abstains(without)
    assert not use.abstains(msgspec.structs.replace(without, round=5))
    assert not (tmp_path / NAME).exists()
    assert not use.abstains(head)
    use.saw_entry(entry_of(6, 1, 2), [])
    assert use.ends


def test_node_that_took_over_signs_again_in_a_term_of_the_authoritys(tmp_path: Path) -> None:
    use_of(tmp_path).saw_record(NodeRecord(peer=ME.peer_id, boot=7, term=(0, 0), round=9))
    use = use_of(tmp_path, take_over=True)
    chain = ledger_of(3).chain
    assert use.abstains(chain.head)
    chain.extend(make_rebase(AUTHORITY, chain.head, chain.head.members))
    assert not use.abstains(chain.head)


def test_damaged_file_stops_a_node_as_one_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xc1")
    with pytest.raises(ConfigError, match="in use elsewhere"):
        use_of(tmp_path)
