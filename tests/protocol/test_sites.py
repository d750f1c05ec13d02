"""Members of one site: who is delegate, how long each waits for the other, and what is said once it is handed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.protocol.effects import Contribute, HandOver, KeepOwn, PassOn, TakeBack, Train
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HandedOver, Offered, SetPaused, Tick, Trained, TrainerRestarted
from shoal.protocol.messages import Delegated, Participant, Plan, Ready
from shoal.protocol.planning import (
    CONTRIBUTOR,
    OBSERVER,
    TRAINING,
    PlanOrder,
    RoundSettings,
    absent_ready,
    check_plan,
    make_plan,
    revise_plan,
)
from shoal.protocol.records import NodeRecord
from shoal.protocol.round import RoundMachine
from shoal.protocol.sites import WAIT_SHARE, capability_of, check_site, is_of_site
from shoal.protocol.wire import SwarmId
from tests.protocol import test_planning as planning
from tests.protocol.round_node import deal_evenly
from tests.protocol.test_member import SETTINGS, Paper, contribution_of, kinds, said
from tests.protocol.test_member import paper as paper_of

WAIT_S = WAIT_SHARE * SETTINGS.grace_s
SWARM = SwarmId(bytes(32))


class Site(Paper):
    """A member of which others are of its site."""

    mates: frozenset[PeerId] = frozenset()

    def site_mates(self) -> frozenset[PeerId]:
        return self.mates


def training(*, first: bool) -> tuple[Site, int]:
    """A member that trains beside one of its site, which trains too and comes after it, or before; and its number."""
    ledger = paper_of().ledger
    order = sorted(range(3), key=lambda number: ledger.founders[number].peer_id)
    me, mate = (order[0], order[1]) if first else (order[1], order[0])
    here = Site(ledger, ledger.founders[me])
    here.mates = frozenset({ledger.founders[mate].peer_id})
    here.peers = frozenset(here.chain.head.members) - {here.me.peer_id}
    here.results[Contribute] = lambda effect: made(here, me)
    here.results[KeepOwn] = lambda effect: contribution_of(here, me)
    here.begin()
    here.feed(Tick())
    here.hear(ledger.founders[mate].peer_id, absent_ready(TRAINING, here.chain.head, here.digest))
    return here, mate


def made(here: Site, me: int) -> Ready:
    here.made = True
    return contribution_of(here, me)


def trained(here: Site) -> list[Any]:
    return here.feed(Trained(here.chain.head.next_round, None))


def mate_of(here: Site) -> PeerId:
    (mate,) = here.mates
    return mate


def contributed(asked: list[Any]) -> list[PeerId | None]:
    """The delegate of each contribution that was asked for."""
    return [effect.delegate for effect in asked if isinstance(effect, Contribute)]


# -- who says of itself that it is of a site -----------------------------------------------------------------


def test_capability_follows_from_name_swarm_and_peer_so_that_nobody_can_copy_it() -> None:
    here, _ = training(first=True)
    me, mate = here.me.peer_id, mate_of(here)
    mine = capability_of("berlin", SWARM, me)
    record = NodeRecord(peer=me, boot=1, capabilities=(mine,))
    assert is_of_site(record, "berlin", SWARM)
    assert not is_of_site(record, "paris", SWARM)
    assert not is_of_site(record, "berlin", SwarmId(bytes([1]) * 32))
    assert not is_of_site(NodeRecord(peer=mate, boot=1, capabilities=(mine,)), "berlin", SWARM)
    assert not is_of_site(None, "berlin", SWARM)


@pytest.mark.parametrize("name", ["", "two words", "x" * 65, "ä"])
def test_what_is_no_name_of_a_site_is_refused(name: str) -> None:
    check_site("Berlin-7!", "--site")
    with pytest.raises(ConfigError, match="--site"):
        check_site(name, "--site")


# -- the delegate ----------------------------------------------------------------------------------------------


def test_delegate_contributes_once_the_other_of_its_site_has_handed_over() -> None:
    here, _ = training(first=True)
    assert contributed(trained(here)) == []
    assert not here.member.rests
    here.now = WAIT_S - 0.1
    assert contributed(here.feed(Tick())) == []
    asked = here.feed(Offered(mate_of(here), here.chain.head.hash))
    assert contributed(asked) == [None]
    assert said(asked) == [CONTRIBUTOR]


def test_delegate_waits_for_nobody_who_handed_over_before_it_was_ready() -> None:
    here, _ = training(first=True)
    here.feed(Offered(mate_of(here), here.chain.head.hash))
    assert contributed(trained(here)) == [None]


def test_delegate_waits_no_longer_than_its_share_of_the_grace() -> None:
    here, _ = training(first=True)
    trained(here)
    here.now = WAIT_S
    asked = here.feed(Tick())
    assert contributed(asked) == [None]
    assert said(asked) == [CONTRIBUTOR]


def test_delegate_waits_less_where_the_grace_runs_already() -> None:
    here, _ = training(first=True)
    assert here.member.machine is not None
    here.member.machine._gathering.half_ready_at = 0.0
    here.now = WAIT_S - 0.5
    assert contributed(trained(here)) == []
    here.now = WAIT_S
    assert contributed(here.feed(Tick())) == [None]


@pytest.mark.parametrize("role", [OBSERVER, "gone"])
def test_delegate_waits_for_nobody_who_trains_no_more(role: str) -> None:
    here, _ = training(first=True)
    if role == OBSERVER:
        here.hear(mate_of(here), absent_ready(OBSERVER, here.chain.head, here.digest))
    else:
        here.mates = frozenset()
    assert contributed(trained(here)) == [None]


def test_nobody_hands_over_to_who_is_done_or_gone_or_left_out_after_disputes() -> None:
    done, gone, out, lied, fit = (PeerId(name) for name in ("done", "gone", "out", "lied", "fit"))
    roles = {peer: SimpleNamespace(role=TRAINING) for peer in (gone, out, lied, fit)}
    readies = {done: SimpleNamespace(role=CONTRIBUTOR), **roles}
    facts = SimpleNamespace(alive=frozenset([done, out, lied, fit]), left_out=lambda: frozenset([out]))
    gathering = SimpleNamespace(get=readies.get, shunned={lied})
    machine: Any = SimpleNamespace(_facts=facts, _gathering=gathering)
    assert RoundMachine.training(machine, readies) == {fit}


def test_delegate_that_pauses_contributes_at_once() -> None:
    here, _ = training(first=True)
    trained(here)
    asked = here.feed(SetPaused(True))
    assert contributed(asked) == [None]
    assert said(asked) == [CONTRIBUTOR]


def test_what_a_trainer_made_that_ended_meanwhile_is_held_no_more() -> None:
    here, _ = training(first=True)
    trained(here)
    assert Train in kinds(here.feed(TrainerRestarted()))
    here.now = 10 * WAIT_S
    assert contributed(here.feed(Tick())) == []


# -- who hands over --------------------------------------------------------------------------------------------


def handed_over() -> Site:
    here, _ = training(first=False)
    asked = trained(here)
    assert contributed(asked) == [mate_of(here)]
    assert said(asked) == []
    assert [effect.delegate for effect in asked if isinstance(effect, HandOver)] == [mate_of(here)]
    assert {record.kind for record in here.records} >= {"ready"}, "else a restart would make it anew"
    return here


def test_who_handed_over_observes_and_names_its_delegate() -> None:
    here = handed_over()
    asked = here.feed(HandedOver(here.chain.head.hash, taken=True))
    assert PassOn in kinds(asked)
    (ready,) = (effect.message for effect in asked if hasattr(effect, "message") and isinstance(effect.message, Ready))
    assert (ready.role, ready.delegate, ready.tokens) == (OBSERVER, mate_of(here), 0)


def test_who_passed_on_its_work_names_its_delegate_also_when_it_pauses() -> None:
    here = handed_over()
    here.results[PassOn] = lambda effect: setattr(here, "made", False)
    here.feed(HandedOver(here.chain.head.hash, taken=True))
    asked = here.feed(SetPaused(True))
    (ready,) = (effect.message for effect in asked if hasattr(effect, "message") and isinstance(effect.message, Ready))
    assert (ready.role, ready.delegate) == (OBSERVER, mate_of(here))


def test_who_is_refused_contributes_by_itself() -> None:
    here = handed_over()
    asked = here.feed(HandedOver(here.chain.head.hash, taken=False))
    assert KeepOwn in kinds(asked)
    assert said(asked) == [CONTRIBUTOR]


def test_an_answer_about_another_round_is_none() -> None:
    here = handed_over()
    assert said(here.feed(HandedOver(bytes(32), taken=True))) == []


def test_what_the_delegate_has_not_answered_in_time_is_taken_back_once() -> None:
    here = handed_over()
    here.now = WAIT_S - 0.1
    assert TakeBack not in kinds(here.feed(Tick()))
    here.now = WAIT_S
    assert TakeBack in kinds(here.feed(Tick()))
    here.now = 2 * WAIT_S
    assert TakeBack not in kinds(here.feed(Tick()))


def test_who_passed_on_its_work_trains_and_contributes_nothing_more_in_the_round() -> None:
    here = handed_over()
    here.results[PassOn] = lambda effect: setattr(here, "made", False)
    here.feed(HandedOver(here.chain.head.hash, taken=True))
    here.feed(Tick())
    before = len(here.asked)
    here.feed(TrainerRestarted())
    here.feed(SetPaused(True))
    here.feed(SetPaused(False))
    trained(here)
    here.peers = here.peers - here.mates  # the delegate is gone, and nobody trains
    for here.now in range(1, 60):
        here.feed(Tick())
    asked = here.asked[before:]
    assert contributed(asked) == []
    assert not [effect for effect in asked if isinstance(effect, Train) and effect.contribute]
    assert set(said(asked)) <= {OBSERVER}


def test_who_comes_after_none_of_its_site_that_trains_hands_over_to_nobody() -> None:
    here, mate = training(first=False)
    here.hear(mate_of(here), contribution_of(here, mate))
    assert contributed(trained(here)) == [None]


# -- plans -----------------------------------------------------------------------------------------------------


SITES = RoundSettings(
    numel=1001, chunk_values=100, codec="int8", grace_s=1.0, reduce_deadline_s=10.0, weight_cap=2.0, sites=True
)
A, B, C, D, _ = planning.PEERS


def readies(**delegates: PeerId) -> dict[PeerId, Ready]:
    """Four peers, of whom those named by `a` to `d` observe, and have that delegate."""
    found = {}
    for name, peer in zip("abcd", (A, B, C, D), strict=True):
        to = delegates.get(name)
        ready = planning.ready(peer, CONTRIBUTOR if to is None else OBSERVER)
        found[peer] = ready if to is None else msgspec.structs.replace(ready, delegate=to)
    return found


def plan(given: dict[PeerId, Ready], settings: RoundSettings = SITES) -> Plan:
    order = PlanOrder(view=0, attempt=0, planner=planning.LEAD, evicted=())
    return make_plan(planning.START, order, given, weightless=(), settings=settings, deal=deal_evenly)


def owners(one: Plan) -> set[PeerId]:
    return {one.participants[owned.owner].peer for owned in one.owners}


def check(one: Plan, settings: RoundSettings = SITES) -> None:
    check_plan(one, planning.LEAD, planning.START, settings)


def test_who_has_a_delegate_owns_nothing_and_is_named_in_the_plan() -> None:
    made = plan(readies(b=A, d=C))
    check(made)
    assert made.delegates == {B: A, D: C}
    assert owners(made) == {A, C}
    assert [one.weight for one in made.participants] == [1, 0, 1, 0]


def test_a_delegate_that_does_not_contribute_is_none() -> None:
    given = readies(b=A)
    given[A] = planning.ready(A, OBSERVER)
    assert plan(given).delegates == {}
    assert plan(readies(b=A), planning.SETTINGS).delegates == {}


@pytest.mark.parametrize(
    "delegated",
    [
        (Delegated(1, 9),),
        (Delegated(9, 1),),
        (Delegated(1, 0), Delegated(1, 2)),
        (Delegated(3, 2), Delegated(1, 0)),
        (Delegated(1, 3),),
        (Delegated(0, 2),),
    ],
    ids=["no delegate", "nobody", "twice", "order", "weightless", "weighs"],
)
def test_plans_with_delegates_that_cannot_be_are_refused(delegated: tuple[Delegated, ...]) -> None:
    made = plan(readies(b=A, d=C))
    with pytest.raises(RemoteError, match="delegate"):
        check(msgspec.structs.replace(made, delegated=delegated))


def test_plans_with_delegates_are_refused_where_sites_are_apart() -> None:
    with pytest.raises(RemoteError, match="which the manifest does not have"):
        check(plan(readies(b=A)), planning.SETTINGS)


def test_a_delegate_that_is_evicted_is_none_any_more_and_chunks_go_to_who_is_left() -> None:
    made = plan(readies(b=A, d=C))
    gone = PlanOrder(view=0, attempt=1, planner=planning.LEAD, evicted=(A,))
    revised = revise_plan(made, gone, {}, deal_evenly)
    check(revised)
    assert revised.delegates == {D: C}
    assert owners(revised) == {B, C}
    both = PlanOrder(view=0, attempt=2, planner=planning.LEAD, evicted=tuple(sorted((A, C))))
    revised = revise_plan(revised, both, {}, deal_evenly)
    check(revised)
    assert revised.delegates == {}
    assert owners(revised) == {B, D}


def test_a_node_follows_no_plan_that_names_a_delegate_for_it_which_it_did_not() -> None:
    here, _ = training(first=False)
    here.feed(HandedOver(here.chain.head.hash, taken=False))
    head, me = here.chain.head, here.me.peer_id
    machine = here.member.machine
    assert machine is not None
    participants = tuple(
        Participant(peer=p, weight=int(p != me), tokens=int(p != me), root=bytes(32)) for p in sorted(head.members)
    )
    places = {one.peer: place for place, one in enumerate(participants)}
    lying = Plan(
        term=head.next_term,
        round=head.next_round,
        base=head.hash,
        view=0,
        attempt=0,
        planner=machine.agreement.lead(0),
        participants=participants,
        owners=(),
        codec="fp32",
        numel=1,
        chunk_values=1,
        delegated=(Delegated(places[me], places[mate_of(here)]),),
    )
    with pytest.raises(RemoteError, match="that this node did not name"):
        machine._adopt(lying, 0.0)
