"""What a node keeps of the evidence that others give it, of rounds and peers that there are, and whom it asks."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from shoal.collectives.commitment import MerkleTree, chunk_hash
from shoal.collectives.grid import Grid
from shoal.node.audits import evidence_store
from shoal.node.audits.audit_exchange import ANSWERS_LIMIT, REQUEST_DEADLINE_S, AuditClient, Questions
from shoal.node.audits.auditing import ASKED_AT_ONCE, ASKED_S, NEED_LIMIT_S, Auditing
from shoal.node.outcome import Notice
from shoal.protocol.audit_messages import (
    PART_LIMIT_BYTES,
    AuditAnswer,
    AuditRequest,
    Charge,
    EvidenceHeld,
    GetEvidence,
    GetStatements,
    Part,
    Stated,
    StatementsPart,
)
from shoal.protocol.commitments import COMMITMENT_DOMAIN, Commitment, _preimage, squares_hash
from shoal.protocol.errors import NetworkError
from shoal.protocol.evidence import DoubleVote, UnsoundContribution, digest_of, pack, unpack
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import VOTE_DOMAIN, Ban, Participant, Report, Value, domain_hash, step_preimage
from shoal.protocol.planning import RoundSettings
from shoal.protocol.suspicion import FALSE_EVIDENCE
from shoal.protocol.wire import canonical, decode
from tests.manifests import manifest_of
from tests.node.ledger import Ledger, identity
from tests.protocol.lab import value_of
from tests.round_messages import plan_with

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures("no_threads")]

MEMBER, STRANGER = identity(2), Identity.from_seed(b"s" * 32)
STRANGERS = sorted((Identity.from_seed(bytes([n]) * 32) for n in range(60, 70)), key=lambda one: one.peer_id)
CHUNK_VALUES = 262_144


def auditing_in(
    folder: Path, *linked: PeerId, seen: Callable[[Any], None] = lambda progress: None
) -> tuple[Auditing, Ledger, list[PeerId]]:
    """A node's watch, its chain, and of whom it told its engine. seen: called with what its user sees."""
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
        on_progress=seen,
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
    assert len(auditing._questions) == 1
    assert auditing._job_queue.statistics().current_buffer_used == 0


class Network:
    """A host whose peers answer at once, with what they hold, but for those that take as long as they may.

    slow: what these answer with. asked: how often each was.
    """

    def __init__(self, held: dict[PeerId, bytes], slow: Callable[[Any], AuditAnswer] | None = None) -> None:
        self._held, self._slow = held, slow
        self.asked = Counter[PeerId]()

    async def request(self, peer: PeerId, protocol: str, data: bytes, *, deadline_s: float, limit_bytes: int) -> bytes:
        request: Any = decode(data, AuditRequest)  # type: ignore[arg-type]
        self.asked[peer] += 1
        if peer not in self._held:
            await trio.sleep(deadline_s - 1)
            return canonical(EvidenceHeld(charges=()) if self._slow is None else self._slow(request))
        await trio.lowlevel.checkpoint()
        if not isinstance(request, GetEvidence):
            return canonical(EvidenceHeld(charges=()))
        piece = self._held[peer]
        return canonical(Part(total=len(piece), data=piece[request.offset :][:PART_LIMIT_BYTES]))


def one_byte(request: Any) -> AuditAnswer:
    """What somebody answers who has a megabyte to give, and is in no hurry."""
    if isinstance(request, GetStatements):
        return StatementsPart(statements=(Stated(0, b"", bytes(32), bytes(64)),))
    return Part(total=1 << 20, data=b"x")


def whole_part(request: Any) -> AuditAnswer:
    return Part(total=1 << 27, data=bytes(PART_LIMIT_BYTES))


def with_network(auditing: Auditing, network: Network) -> Network:
    auditing._client = AuditClient(network, auditing._unanswered)  # type: ignore[arg-type]
    return network


async def asking(auditing: Auditing, nursery: trio.Nursery) -> None:
    for queue in (auditing._job_queue, auditing._need_queue):
        nursery.start_soon(auditing._work, queue)
    for _ in range(ASKED_AT_ONCE):
        nursery.start_soon(auditing._questions.ask, auditing._attempt)
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("slow", [one_byte, whole_part])
async def test_evidence_of_a_ban_is_had_although_strangers_come_first_and_are_slow(
    tmp_path: Path, slow: Callable[[Any], AuditAnswer]
) -> None:
    *others, honest = [one.peer_id for one in STRANGERS]
    auditing, ledger, proven = auditing_in(tmp_path)
    linked = dict.fromkeys([*others, honest])
    auditing._links.linked = linked.keys  # type: ignore[method-assign, assignment]
    head = ledger.chain.head
    liars = (identity(3), MEMBER, identity(4))
    pieces = [double_vote(liar, head) for liar in liars]

    async def find(number: int, network: Network) -> float:
        bans = (Ban(liars[number].peer_id, digest_of(pieces[number])),)
        began = trio.current_time()
        with_network(auditing, network)
        await auditing._find(msgspec.structs.replace(value_of(head, domain_hash("p"), head.planner), bans=bans))
        assert proven[number:] == [liars[number].peer_id]
        return trio.current_time() - began

    assert ASKED_S < await find(0, Network({honest: pieces[0]}, slow)) < NEED_LIMIT_S, "it is the last of ten"
    assert await find(1, Network({honest: pieces[1]}, slow)) < 1, "it alone answered before"
    linked[MEMBER.peer_id] = None
    auditing._unanswered(MEMBER.peer_id)
    network = Network({MEMBER.peer_id: pieces[2]}, slow)
    assert await find(2, network) < 1
    assert network.asked[MEMBER.peer_id] == 1, "members come first all the same"


async def test_peer_that_claims_much_and_gives_nothing_holds_up_no_other(tmp_path: Path) -> None:
    slow, honest = STRANGERS[0].peer_id, STRANGERS[-1].peer_id
    auditing, ledger, proven = auditing_in(tmp_path, slow, honest)
    head, data = ledger.chain.head, double_vote(MEMBER, ledger.chain.head)
    network = with_network(auditing, Network({honest: data}, whole_part))
    charge = partial(Charge, term=head.next_term, round=head.next_round)
    async with trio.open_nursery() as nursery:
        await asking(auditing, nursery)
        auditing._charged(slow, [charge(bytes([n, 1]) * 16, STRANGERS[1].peer_id) for n in range(200)] * 2)
        auditing._charged(honest, [charge(digest_of(data), MEMBER.peer_id)])
        assert len(auditing._questions) < 300, "no more than it says at once"
        await trio.sleep(1)
        assert proven == [MEMBER.peer_id]
        assert network.asked[slow] == 1, "it is asked one thing at a time"
        nursery.cancel_scope.cancel()


async def test_statements_that_drip_are_given_up_and_hold_up_nothing_that_was_found_here(tmp_path: Path) -> None:
    auditing, ledger, proven = auditing_in(tmp_path, STRANGER.peer_id)
    network = with_network(auditing, Network({}, one_byte))
    head = ledger.chain.head
    plan = plan_with((Participant(MEMBER.peer_id, 1, 1, bytes(32)),), Grid(4000 * 4096, 4096), after=head)
    about = Report(
        term=head.next_term, round=head.next_round, base=head.hash, plan=plan.hash, digest=bytes(32), bitmaps=bytes(32)
    )
    auditing.reduced(SimpleNamespace(plan=plan, chunks=()), about)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await asking(auditing, nursery)
        auditing.said(STRANGER.peer_id, msgspec.structs.replace(about, digest=b"\1" * 32))
        await trio.sleep(1)
        assert network.asked[STRANGER.peer_id] == 1
        auditing._charge(unpack(double_vote(MEMBER, head))[0])
        await trio.sleep(1)
        assert proven == [MEMBER.peer_id]
        await trio.sleep(3600)
        nursery.cancel_scope.cancel()
    assert network.asked[STRANGER.peer_id] < 5
    assert auditing.suspicion.of(STRANGER.peer_id, trio.current_time()) > 0


async def test_statements_have_a_deadline_over_all_their_parts() -> None:
    def full(request: Any) -> AuditAnswer:
        return StatementsPart(statements=(Stated(0, b"", bytes(32), bytes(64)),) * 2048)

    blamed: list[PeerId] = []
    client = AuditClient(Network({}, full), blamed.append)  # type: ignore[arg-type]
    plan: Any = SimpleNamespace(
        hash=bytes(32), lineage=bytes(32), chunks=1 << 20, participants=[SimpleNamespace(peer=MEMBER.peer_id)]
    )
    with pytest.raises(NetworkError, match="within 120 s"):
        await client.statements(STRANGER.peer_id, plan)
    assert trio.current_time() == pytest.approx(120, abs=1)
    assert blamed == [STRANGER.peer_id]


async def test_whoever_is_slow_for_long_is_asked_last_and_is_not_taken_for_a_giver_of_false_evidence(
    tmp_path: Path,
) -> None:
    auditing, _, _ = auditing_in(tmp_path)
    for _ in range(100):
        auditing._unanswered(MEMBER.peer_id)
    assert 0 < auditing.suspicion.of(MEMBER.peer_id, trio.current_time()) < FALSE_EVIDENCE
    auditing.suspicion.add(MEMBER.peer_id, FALSE_EVIDENCE, trio.current_time())
    auditing._unanswered(MEMBER.peer_id)
    assert auditing.suspicion.of(MEMBER.peer_id, trio.current_time()) >= FALSE_EVIDENCE, "nor does it make good"


async def test_questions_wait_in_turn_and_go_when_their_peer_does() -> None:
    questions, asked = Questions(lambda peer: (peer == "c", 0.0)), list[str]()

    async def ask(peer: str) -> None:
        asked.append(peer)
        await trio.sleep(1)

    for peer in ("c", "a", "a", "b", "b", "d"):
        questions.put(PeerId(peer), partial(ask, peer))
    questions.forget(PeerId("d"))

    async def attempt(job: Any) -> None:
        await job()

    with trio.move_on_after(100):
        await questions.ask(attempt)
    assert "".join(asked) == "ababc"
    assert len(questions) == 0


class Stream:
    """One request of a peer that takes the answer, or leaves it where it is."""

    def __init__(self, peer: PeerId, *, reads: bool) -> None:
        self.peer, self._reads = peer, reads

    async def receive(self, *, deadline_s: float) -> bytes:
        await trio.lowlevel.checkpoint()
        return canonical(EvidenceHeld(charges=()))

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        if not self._reads:
            await trio.sleep(deadline_s)
            raise NetworkError("it does not take the answer")

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_peers_that_take_no_answers_have_one_place_each_and_strangers_none_of_members(tmp_path: Path) -> None:
    strangers = [one.peer_id for one in STRANGERS]
    auditing, _, _ = auditing_in(tmp_path, MEMBER.peer_id, identity(3).peer_id, STRANGER.peer_id, *strangers)
    ended: list[Stream] = []

    async def serve(stream: Any) -> None:
        try:
            await auditing._server.serve(stream)
        except NetworkError:
            ended.append(stream)

    async def asks(*, of: list[PeerId], times: int, nursery: trio.Nursery) -> None:
        for peer in of * times:
            nursery.start_soon(serve, Stream(peer, reads=False))
        await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        await asks(of=[strangers[0], MEMBER.peer_id], times=50, nursery=nursery)
        for peer in (STRANGER.peer_id, identity(3).peer_id):
            with trio.fail_after(1):
                await auditing._server.serve(Stream(peer, reads=True))  # type: ignore[arg-type]
        await asks(of=strangers[: ANSWERS_LIMIT + 1], times=1, nursery=nursery)
        with trio.fail_after(1):
            await auditing._server.serve(Stream(identity(3).peer_id, reads=True))  # type: ignore[arg-type]
        assert ended == []
        await trio.sleep(REQUEST_DEADLINE_S + 1)
        assert len(ended) == 2 * 50 + ANSWERS_LIMIT + 1, "who waited is sent away"


def unsound(liar: Identity, base: Value, *, codec: str = "fp32", values: int = 64) -> bytes:
    """Evidence that a node made against itself: a vector that is not finite."""
    payload = np.full(values, np.nan, "<f4").tobytes()
    made = Commitment(
        peer=liar.peer_id,
        base=base.hash,
        life=bytes(32),
        root=MerkleTree([chunk_hash(payload)]).root,
        seal=bytes(32),
        squares=squares_hash(()),
        codec=codec,
        numel=values,
        chunk_values=CHUNK_VALUES if values <= CHUNK_VALUES else values,
        signature=bytes(64),
    )
    signed = msgspec.structs.replace(made, signature=liar.sign(COMMITMENT_DOMAIN, _preimage(made)))
    return pack(UnsoundContribution(base=base, commitment=signed, chunk=0), payload)


async def test_evidence_about_vectors_that_no_round_has_is_kept_only_if_a_value_names_it(tmp_path: Path) -> None:
    auditing, ledger, proven = auditing_in(tmp_path, STRANGER.peer_id)
    auditing._p.config.manifest = manifest_of(  # type: ignore[misc]
        [identity(1).peer_id], {"sync": {"inner_steps": 1, "codec": "fp32"}}, admission="open"
    )
    head = ledger.chain.head
    with pytest.raises(NetworkError):
        await auditing._keep(unsound(STRANGER, head, values=2 * CHUNK_VALUES))
    settings = RoundSettings.of(auditing._p.config.manifest, numel=64)
    auditing.began(head, settings)
    for odd in (unsound(STRANGER, head, values=65), unsound(STRANGER, head, codec="fp32+buffers1")):
        with pytest.raises(NetworkError):
            await auditing._keep(odd)
    assert auditing.evidence_store.verdicts == ()
    await auditing._keep(unsound(STRANGER, head))
    assert proven == [STRANGER.peer_id]
    named = unsound(STRANGER, head, values=65)
    await auditing._keep(named, by_name=True)
    assert auditing.evidence_store.proves(digest_of(named)) is not None


async def test_evidence_of_a_ban_for_which_there_is_no_room_is_fetched_seldom_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [one.peer_id for one in STRANGERS[:6]]
    auditing, ledger, proven = auditing_in(tmp_path, *holders)
    piece, head = double_vote(MEMBER, ledger.chain.head), ledger.chain.head
    network = with_network(auditing, Network(dict.fromkeys(holders, piece)))
    bans = (Ban(MEMBER.peer_id, digest_of(piece)),)
    value = msgspec.structs.replace(value_of(head, domain_hash("p"), head.planner), bans=bans)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as disk:
        disk.setattr(evidence_store, "write_atomically", full)
        await auditing._find(value)
        assert trio.current_time() == pytest.approx(NEED_LIMIT_S)
        goes = 8
        assert goes <= network.asked.total() <= goes * ASKED_AT_ONCE
        assert proven == []
    network.asked.clear()
    await auditing._find(value)
    assert proven == [MEMBER.peer_id]
    assert network.asked.total() <= ASKED_AT_ONCE


async def test_disk_that_takes_no_evidence_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    auditing, ledger, proven = auditing_in(tmp_path, STRANGER.peer_id, seen=told.append)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as disk:
        disk.setattr(evidence_store, "write_atomically", full)
        for liar in (MEMBER, STRANGER):
            await auditing._attempt(partial(auditing._keep, double_vote(liar, ledger.chain.head)))
    (line,) = told
    assert isinstance(line, Notice)
    assert "evidence" in line.text
    assert "free some space" in line.text
    assert auditing.evidence_store.verdicts == ()
    await auditing._attempt(partial(auditing._keep, double_vote(MEMBER, ledger.chain.head)))
    assert proven == [MEMBER.peer_id]
