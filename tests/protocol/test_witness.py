"""What a witness makes of what it hears: contradictions in any order, and none that a forged word would hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import msgspec
import pytest

from shoal.lab.signed import change_of, leave_of, prepare_of, prepared_by, propose_of, vote_of
from shoal.protocol.certificate import genesis
from shoal.protocol.commitments import committed
from shoal.protocol.errors import RemoteError
from shoal.protocol.evidence import BrokenLeave, DoubleCommitment, DoubleVote, HiddenPrepare
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Certificate, Message, PreparedValue, Propose, Ready, Value, domain_hash
from shoal.protocol.planning import PlanOrder, RoundSettings, make_plan
from shoal.protocol.view_change import moved
from shoal.protocol.voting import lead
from shoal.protocol.witness import LIVES_LIMIT, PLANS_LIMIT, ROUNDS_KEPT, VALUES_LIMIT, VIEWS_LIMIT, Witness
from tests.protocol.lab import plan_hash, value_of
from tests.protocol.round_node import deal_evenly
from tests.round_messages import ready_with

IDENTITIES = sorted((Identity.from_seed(bytes([n]) * 32) for n in range(3)), key=lambda one: one.peer_id)
LIAR, LEAD = IDENTITIES[0], IDENTITIES[1].peer_id
START = genesis(domain_hash("swarm"), [one.peer_id for one in IDENTITIES])
SETTINGS = RoundSettings(numel=10, chunk_values=5, codec="fp32", grace_s=1, reduce_deadline_s=1, weight_cap=4)
ONE, OTHER = (value_of(START, plan_hash(name), LEAD) for name in ("one", "other"))


def witness(base: Value = START) -> Witness:
    made = Witness()
    made.begin(base, SETTINGS)
    return made


def proposal(value: Value) -> Propose:
    return propose_of(IDENTITIES[1], 0, value)


def announced(root: str, *, life: str = "life", squares: tuple[float, ...] = (1.0, 2.0)) -> Ready:
    ready = ready_with(START, domain_hash(root), squares=squares, life=domain_hash(life))
    return committed(LIAR, ready, SETTINGS)


def test_two_votes_are_proven_once_both_values_are_known_whatever_came_first() -> None:
    seen = witness()
    peer = LIAR.peer_id
    assert seen.hear(peer, vote_of(LIAR, 0, ONE)) == []
    assert seen.hear(peer, vote_of(LIAR, 0, OTHER)) == []
    assert seen.hear(LEAD, proposal(ONE)) == []
    found = seen.hear(LEAD, proposal(OTHER))
    assert [(one.accused, one.step) for one in found if isinstance(one, DoubleVote)] == [
        (peer, "vote"), (LEAD, "propose")
    ]  # fmt: skip
    for evidence in found:
        evidence.check_words()
    assert seen.hear(peer, vote_of(LIAR, 1, OTHER)) == [], "another view"


def test_forged_vote_hides_no_contradiction() -> None:
    seen, peer = witness(), LIAR.peer_id
    for value in (ONE, OTHER):
        seen.hear(LEAD, proposal(value))
        forged = msgspec.structs.replace(vote_of(LIAR, 0, value), signature=bytes(64))
        assert seen.hear(peer, forged) == []
    seen.hear(peer, vote_of(LIAR, 0, ONE))
    (evidence,) = seen.hear(peer, vote_of(LIAR, 0, OTHER))
    assert isinstance(evidence, DoubleVote)
    evidence.check_words()


def test_two_commitments_in_one_life_are_proven_and_in_two_are_not() -> None:
    seen, peer = witness(), LIAR.peer_id
    unsigned = msgspec.structs.replace(announced("hidden behind"), signature=bytes(64))
    assert seen.hear(peer, unsigned) == []
    assert seen.hear(peer, announced("one")) == []
    assert seen.hear(peer, announced("one")) == []
    assert seen.hear(peer, announced("other", life="after a restart")) == []
    (evidence,) = seen.hear(peer, announced("other"))
    assert isinstance(evidence, DoubleCommitment)
    evidence.check_words()
    assert evidence.accused == peer


def test_norms_of_more_chunks_than_there_are_take_no_room() -> None:
    seen = witness()
    assert seen.hear(LIAR.peer_id, announced("one", squares=(1.0,) * (SETTINGS.chunks + 1))) == []
    assert seen.commitments(START.hash) == []
    seen.hear(LIAR.peer_id, announced("one", squares=(1.0,) * SETTINGS.chunks))
    assert len(seen.commitments(START.hash)) == 1


def test_two_norms_of_one_contribution_are_proven_whoever_heard_which() -> None:
    """Who tells some members one norm and others another could have them refuse each other's plans."""
    here, there, peer = witness(), witness(), LIAR.peer_id
    assert here.hear(peer, announced("one")) == []
    assert there.hear(peer, announced("one", squares=(1.0, 5.0))) == []
    (heard,) = there.commitments(START.hash)
    (evidence,) = here.hear_commitments(START.hash, [heard])
    assert isinstance(evidence, DoubleCommitment)
    evidence.check_words()
    assert evidence.accused == peer
    assert here.hear(peer, announced("one", squares=(1.0, 5.0))) == [evidence]
    assert there.hear_commitments(START.hash, there.commitments(START.hash)) == []
    with pytest.raises(RemoteError, match="agree, or in another order"):
        msgspec.structs.replace(evidence, commitments=evidence.commitments[::-1]).check_words()
    with pytest.raises(RemoteError, match="agree, or in another order"):
        msgspec.structs.replace(evidence, commitments=(heard, heard)).check_words()


def test_what_others_heard_of_a_contributor_is_not_taken_for_what_it_said_here() -> None:
    here, there = witness(), witness()
    there.hear(LIAR.peer_id, announced("one"))
    assert here.hear_commitments(START.hash, there.commitments(START.hash)) == []
    assert here.commitments(START.hash) == []


def test_plan_that_clips_otherwise_than_was_heard_is_disputed() -> None:
    clipping = replace(SETTINGS, norm_clip=True)
    seen = Witness()
    seen.begin(START, clipping)
    readies = {}
    for number, one in enumerate(IDENTITIES):
        ready = announced(str(number), squares=(4.0**number, 0.0))
        readies[one.peer_id] = committed(one, ready, clipping)
        seen.hear(one.peer_id, readies[one.peer_id])
    plan_order = PlanOrder(view=0, attempt=0, planner=LEAD, evicted=())
    plan = make_plan(START, plan_order, readies, weightless=(), settings=clipping, deal=deal_evenly)
    assert plan.clips == (65536, 65536, 32768)
    assert not seen.disputes(plan)
    assert seen.disputes(msgspec.structs.replace(plan, clips=(65536, 65536, 65536)))
    assert not seen.disputes(msgspec.structs.replace(plan, base=domain_hash("another round"), clips=(1, 65536, 1)))


def test_one_root_of_two_peers_is_noticed() -> None:
    seen = witness()
    assert seen.alike(START.hash) == {}
    seen.hear(LIAR.peer_id, announced("same"))
    assert seen.alike(START.hash) == {}
    seen.hear(IDENTITIES[2].peer_id, committed(IDENTITIES[2], announced("same"), SETTINGS))
    (alike,) = seen.alike(START.hash).values()
    assert {one.peer for one in alike} == {LIAR.peer_id, IDENTITIES[2].peer_id}


def test_what_is_remembered_is_bounded() -> None:
    seen = witness()
    for number in range(2 * VALUES_LIMIT):
        seen.hear(LEAD, proposal(value_of(START, plan_hash(str(number)), LEAD)))
    about = seen._rounds[START.hash]
    assert len(about.values) == VALUES_LIMIT
    for view in range(VIEWS_LIMIT + 3):
        seen.hear(LIAR.peer_id, vote_of(LIAR, view, ONE))
    assert len([voter for step, voter, _ in about.votes if step == "vote"]) == VIEWS_LIMIT
    for life in range(LIVES_LIMIT + 3):
        seen.hear(LIAR.peer_id, announced("root", life=str(life)))
    assert len(about.commitments[LIAR.peer_id]) == LIVES_LIMIT
    base = START
    for _ in range(ROUNDS_KEPT):
        base = value_of(base, plan_hash("next"), LEAD)
        seen.begin(base, SETTINGS)
    assert START.hash not in seen._rounds
    assert len(seen._rounds) == ROUNDS_KEPT
    assert seen.hear(LIAR.peer_id, vote_of(LIAR, 0, OTHER)) == []


@pytest.mark.parametrize(("step", "say"), [("prepare", prepare_of), ("vote", vote_of)])
def test_two_of_anything_that_is_signed_once_in_a_view_are_evidence(step: str, say: Callable[..., Message]) -> None:
    seen = witness()
    for value in (ONE, OTHER):
        seen.hear(LEAD, proposal(value))
    assert seen.hear(LIAR.peer_id, say(LIAR, 0, ONE)) == []
    assert seen.hear(LIAR.peer_id, say(LIAR, 1, OTHER)) == [], "another view"
    (evidence,) = seen.hear(LIAR.peer_id, say(LIAR, 0, OTHER))
    assert isinstance(evidence, DoubleVote)
    assert (evidence.accused, evidence.step) == (LIAR.peer_id, step)
    evidence.check_words()
    for other in {"prepare", "vote", "propose", "sleep"} - {step}:
        with pytest.raises(RemoteError):
            msgspec.structs.replace(evidence, step=other).check_words()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_view_change_that_hides_what_its_sender_voted_for_is_evidence(order: tuple[int, ...]) -> None:
    seen = witness()
    heard = [(LEAD, proposal(ONE)), (LIAR.peer_id, vote_of(LIAR, 1, ONE)), (LIAR.peer_id, change_of(LIAR, START, 3))]
    *before, (evidence,) = [seen.hear(*heard[place]) for place in order]
    assert before == [[], []]
    assert isinstance(evidence, HiddenPrepare)
    evidence.check_words()
    assert (evidence.accused, evidence.view, evidence.later) == (LIAR.peer_id, 1, 3)
    for changed in ({"later": 2}, {"view": 2}, {"view": 3}, {"value": OTHER}, {"vote": bytes(64)}):
        with pytest.raises(RemoteError):
            msgspec.structs.replace(evidence, **changed).check_words()


def test_view_change_that_carries_the_certificate_or_comes_before_the_vote_is_none() -> None:
    seen = witness()
    seen.hear(LEAD, proposal(ONE))
    carried = PreparedValue(ONE, prepared_by(IDENTITIES, 1, ONE))
    for message in (vote_of(LIAR, 1, ONE), change_of(LIAR, START, 2, carried), change_of(LIAR, START, 1)):
        assert seen.hear(LIAR.peer_id, message) == []
    forged = msgspec.structs.replace(change_of(LIAR, START, 3), signature=bytes(64))
    assert seen.hear(LIAR.peer_id, forged) == []
    assert seen.hear(LIAR.peer_id, vote_of(LIAR, 3, ONE)) == []


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_signature_of_somebody_that_promised_to_leave_is_evidence(order: tuple[int, ...]) -> None:
    seen = witness()
    heard = [(LEAD, proposal(ONE)), (LIAR.peer_id, prepare_of(LIAR, 2, ONE)), (LIAR.peer_id, leave_of(LIAR, START))]
    *before, (evidence,) = [seen.hear(*heard[place]) for place in order]
    assert before == [[], []]
    assert isinstance(evidence, BrokenLeave)
    evidence.check_words()
    assert (evidence.accused, evidence.step, evidence.view) == (LIAR.peer_id, "prepare", 2)
    move = moved(LIAR.peer_id, change_of(LIAR, START, 2))
    wrong: list[dict[str, object]] = [{"step": "vote"}, {"step": "sleep"}, {"view": 1}, {"leave": bytes(64)}]
    for changed in [*wrong, {"value": OTHER}, {"value": None}, {"peer": LEAD}, {"move": move}]:
        with pytest.raises(RemoteError):
            msgspec.structs.replace(evidence, **changed).check_words()


@pytest.mark.parametrize("leaves_first", [False, True])
def test_move_of_somebody_that_promised_to_leave_is_evidence(leaves_first: bool) -> None:
    seen = witness()
    said = [leave_of(LIAR, START), change_of(LIAR, START, 2)]
    first, last = said if leaves_first else said[::-1]
    assert seen.hear(LIAR.peer_id, first) == []
    (evidence,) = seen.hear(LIAR.peer_id, last)
    assert isinstance(evidence, BrokenLeave)
    evidence.check_words()
    assert evidence.accused == LIAR.peer_id
    others = moved(LEAD, change_of(IDENTITIES[1], START, 2))
    for changed in ({"view": 3}, {"move": others}, {"move": None}, {"peer": LEAD}):
        with pytest.raises(RemoteError):
            msgspec.structs.replace(evidence, **changed).check_words()


def test_leave_that_a_value_counts_is_a_promise_too() -> None:
    staying = [one.peer_id for one in IDENTITIES if one is not LIAR]
    counting = value_of(START, plan_hash("without"), LEAD, staying, [LIAR.peer_id], signing=IDENTITIES)
    unsigned = msgspec.structs.replace(counting, leave_signatures=(bytes(64),))
    for value, accused in ((counting, [LIAR.peer_id]), (unsigned, [])):
        seen = witness()
        seen.hear(LEAD, proposal(ONE))
        seen.hear(LIAR.peer_id, vote_of(LIAR, 0, ONE))
        found = seen.hear(LEAD, propose_of(IDENTITIES[1], 1, value))
        assert [one.accused for one in found if isinstance(one, BrokenLeave)] == accused


def test_values_that_nobody_signed_take_the_room_of_none_that_others_bring() -> None:
    seen, stranger = witness(), Identity.from_seed(bytes([99]) * 32).peer_id
    for number in range(5 * VALUES_LIMIT):
        garbage = value_of(START, plan_hash(f"garbage {number}"), LEAD)
        nothing = Certificate(value=garbage, view=0, signers=(), signatures=())
        for bringing in (LIAR.peer_id, stranger):
            assert seen.hear(bringing, nothing) == []
    assert len(seen._rounds[START.hash].values) <= 2 * VALUES_LIMIT
    for value in (ONE, OTHER):
        seen.hear(LEAD, proposal(value))
    seen.hear(LIAR.peer_id, vote_of(LIAR, 0, ONE))
    (evidence,) = seen.hear(LIAR.peer_id, vote_of(LIAR, 0, OTHER))
    assert isinstance(evidence, DoubleVote)
    assert evidence.accused == LIAR.peer_id


@pytest.mark.parametrize("garbage_first", [0, 1, 2])
def test_votes_for_what_there_is_not_hide_no_two_votes(garbage_first: int) -> None:
    seen = witness()
    for value in (ONE, OTHER):
        seen.hear(LEAD, proposal(value))
    votes = [vote_of(LIAR, 0, value) for value in (ONE, OTHER)]
    for number in range(2):
        garbage = vote_of(LIAR, 0, value_of(START, plan_hash(f"garbage {number}"), LEAD))
        votes.insert(min(garbage_first + number, len(votes)) if garbage_first < 2 else 1 + number, garbage)
    found = [evidence for vote in votes for evidence in seen.hear(LIAR.peer_id, vote)]
    assert [(one.accused, one.step) for one in found if isinstance(one, DoubleVote)] == [(LIAR.peer_id, "vote")]
    assert len(seen._rounds[START.hash].votes["vote", LIAR.peer_id, 0]) == 2


def test_view_change_with_an_invented_certificate_hides_no_other_one() -> None:
    """A lead takes only one of the two, and it is the one that hides the vote."""
    seen = witness()
    seen.hear(LEAD, proposal(ONE))
    seen.hear(LIAR.peer_id, vote_of(LIAR, 1, ONE))
    invented = PreparedValue(OTHER, prepared_by([LIAR], 2, OTHER))
    assert seen.hear(LIAR.peer_id, change_of(LIAR, START, 3, invented)) == []
    (evidence,) = seen.hear(LIAR.peer_id, change_of(LIAR, START, 3))
    assert isinstance(evidence, HiddenPrepare)
    evidence.check_words()


def test_plans_that_are_remembered_are_of_leads_and_begin_a_reduction() -> None:
    seen = witness()
    lead_of = {lead(START, view): view for view in range(3)}
    mine = {one.peer_id: one for one in IDENTITIES}
    made = {
        peer: make_plan(
            START,
            PlanOrder(view=view, attempt=0, planner=peer, evicted=()),
            {one: announced("root") for one in mine},
            weightless=(),
            settings=SETTINGS,
            deal=deal_evenly,
        )
        for peer, view in lead_of.items()
    }
    liar = LIAR.peer_id
    for attempt in range(3 * PLANS_LIMIT):
        seen.hear(liar, msgspec.structs.replace(made[liar], attempt=attempt))
        seen.hear(liar, msgspec.structs.replace(made[LEAD], attempt=1 + attempt))
        seen.hear(liar, msgspec.structs.replace(made[liar], attempt=attempt, origin=made[liar].hash))
    seen.hear(LEAD, made[LEAD])
    about = seen._rounds[START.hash]
    assert len(about.plans) == PLANS_LIMIT + 1
    revised = msgspec.structs.replace(made[LEAD], attempt=4, origin=made[LEAD].hash)
    assert seen.origin(revised) == made[LEAD]
