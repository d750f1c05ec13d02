"""What a node keeps of the evidence that others give it: of rounds and peers that there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.node.audits.auditing import Auditing
from shoal.protocol.errors import NetworkError
from shoal.protocol.evidence import DoubleVote, pack
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import VOTE_DOMAIN, Value, domain_hash, step_preimage
from tests.manifests import manifest_of
from tests.node.ledger import Ledger, identity
from tests.protocol.lab import value_of
from tests.round_messages import plan_with

MEMBER, STRANGER = identity(2), Identity.from_seed(b"s" * 32)


def auditing_in(folder: Path, *linked: PeerId) -> tuple[Auditing, Ledger, list[PeerId]]:
    """A node's watch, its chain, and of whom it told its engine."""
    ledger, proven = Ledger(), list[PeerId]()
    ledger.certify(2)
    daemon: Any = SimpleNamespace(
        config=SimpleNamespace(manifest=manifest_of([identity(1).peer_id], admission="open")),
        identity=identity(1),
        links=SimpleNamespace(linked=lambda: frozenset(linked)),
        store=SimpleNamespace(folder=folder),
        swarm_id=ledger.chain.head.swarm,
        host=None,
        chunks=None,
        lanes=None,
        reduce=SimpleNamespace(),
        chain=ledger.chain,
        events=SimpleNamespace(write=lambda event: None),
        on_progress=lambda progress: None,
    )
    engine: Any = SimpleNamespace(put=lambda event: proven.append(event.accused))
    return Auditing(daemon, engine), ledger, proven


def double_vote(liar: Identity, base: Value) -> bytes:
    both = sorted((value_of(base, domain_hash(name), base.planner) for name in "ab"), key=lambda value: value.hash)
    one, other = (liar.sign(VOTE_DOMAIN, step_preimage(0, value.hash)) for value in both)
    return pack(DoubleVote(base=base, peer=liar.peer_id, view=0, values=(both[0], both[1]), signatures=(one, other)))


async def test_evidence_is_kept_against_who_takes_part_or_did_in_rounds_that_there_were(tmp_path: Path) -> None:
    """Anybody can make keys, and have them lie, and invent the rounds in which they did."""

    (tmp_path / "linked").mkdir()
    auditing, ledger, proven = auditing_in(tmp_path)
    head = ledger.chain.head
    never = msgspec.structs.replace(head, round=10**6, members=(MEMBER.peer_id, STRANGER.peer_id))
    for liar, base in ((STRANGER, head), (MEMBER, never), (STRANGER, never)):
        with pytest.raises(NetworkError):
            await auditing._keep(double_vote(liar, base))
    assert (auditing.evidence_store.verdicts, proven) == ((), [])
    await auditing._keep(double_vote(MEMBER, head))
    assert proven == [MEMBER.peer_id]
    linked, ledger, proven = auditing_in(tmp_path / "linked", STRANGER.peer_id)
    await linked._keep(double_vote(STRANGER, ledger.chain.head))
    assert proven == [STRANGER.peer_id], "it may be planned"


def test_disputed_plans_of_one_lead_are_one_job_and_leave_room_for_evidence(tmp_path: Path) -> None:
    auditing, ledger, _ = auditing_in(tmp_path, MEMBER.peer_id)
    head = ledger.chain.head
    auditing._witness.disputes = lambda plan: True  # type: ignore[method-assign]
    for attempt in range(1000):
        plan = plan_with((), after=head, attempt=attempt, planner=MEMBER.peer_id, owners=())
        auditing.said(MEMBER.peer_id, plan)
    assert auditing._job_queue.statistics().current_buffer_used == 1
