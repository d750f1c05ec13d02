"""Amendments: what can be one, who decides it, and which settings are in force in every round of a chain."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from shoal.lab import signed
from shoal.lab.signed import change_of, prepared_by, propose_of, report_of
from shoal.protocol.agreement import Agreement, Broadcast
from shoal.protocol.amending import (
    AMENDABLE,
    InForce,
    amended_settings,
    is_the_authoritys,
    make_amend_consent,
    make_amendment,
    parse_settings,
    settings_back,
    settings_of,
    sign_amendment,
    stands_on,
    with_amendment,
)
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Wanted
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.messages import (
    NO_HASH,
    Amended,
    Amendment,
    Certificate,
    Change,
    Prepare,
    PreparedValue,
    Propose,
    Rebase,
    Target,
    Value,
    Vote,
)
from shoal.protocol.round import Effect
from shoal.protocol.terms import check_rebase, make_consent, make_rebase, make_rollback
from shoal.protocol.wire import canonical, decode
from tests.manifests import manifest_of
from tests.protocol.lab import SWARM, plan_hash, value_of
from tests.protocol.round_lab import RoundLab

KEYS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(4)), key=lambda key: key.peer_id)
AUTHORITY = Identity.from_seed(b"a" * 32)
PEERS = [key.peer_id for key in KEYS]


def manifest(**sync: Any) -> Manifest:
    return manifest_of(PEERS[:3], {"sync": {"inner_steps": 100, **sync}}, authority=AUTHORITY.peer_id)


MANIFEST = manifest()
FEWER = {"sync.inner_steps": 60}
SLOWER = {"inner.lr": 5e-4, "sync.codec": "bf16"}


def new_chain(made: Manifest | None = MANIFEST) -> Chain:
    return Chain(genesis(SWARM, PEERS[:3]), AUTHORITY.peer_id, manifest=made)


def in_force(chain: Chain) -> InForce:
    found = chain.in_force
    assert found is not None
    return found


def certified(value: Value, signers: Iterable[Identity] = KEYS[:3]) -> Certificate:
    return signed.certified(value, *signers)


def result(previous: Value, name: str = "") -> Value:
    return value_of(previous, plan_hash(f"{previous.next_term} {previous.next_round} {name}"), PEERS[0])


def amending(previous: Value, amendment: Amendment, consenting: Sequence[Identity] = KEYS[:2], name: str = "") -> Value:
    consents = [(key.peer_id, make_amend_consent(key, previous, amendment, asked=True)) for key in consenting]
    return with_amendment(result(previous, name), consents)


def amend(chain: Chain, wanted: dict[str, Any]) -> Value:
    value = amending(chain.head, make_amendment(in_force(chain), wanted))
    chain.extend(certified(value))
    return value


def go_on(chain: Chain, rounds: int = 1) -> None:
    for _ in range(rounds):
        chain.extend(certified(result(chain.head)))


def go_back(chain: Chain, round: int) -> Value:
    target = Target(round, chain.value(round).hash)
    consents = {key.peer_id: make_consent(key, chain.head, target, asked=True) for key in KEYS[:3]}
    value = make_rollback(chain.head, PEERS[0], target, consents, digest=chain.value(round).digest)
    chain.extend(certified(value))
    return value


def steps(chain: Chain, rounds: Iterable[int]) -> list[int]:
    return [(chain.amended(round) or MANIFEST).sync.inner_steps for round in rounds]


# -- what can be amended -----------------------------------------------------------------------------------------


def test_amendment_has_one_form_however_it_was_written() -> None:
    first = InForce(MANIFEST, NO_HASH)
    written = make_amendment(first, parse_settings(["sync.codec=bf16", "inner.lr=1", "sync.inner_steps = 60"]))
    assert [(c.key, c.value) for c in written.changes] == [
        ("inner.lr", 1.0),
        ("sync.codec", "bf16"),
        ("sync.inner_steps", 60),
    ]
    assert type(written.changes[0].value) is float
    again = make_amendment(first, {"sync.inner_steps": 60, "sync.outer_lr": 0.7, "inner.lr": 1.0, "sync.codec": "bf16"})
    assert canonical(again) == canonical(written)  # a setting that stays what it is, is no change
    assert decode(canonical(written), Amendment) == written


def test_every_setting_that_can_be_amended_is_one_of_the_manifests() -> None:
    tables = msgspec.to_builtins(MANIFEST)
    assert all(name in tables[section] for section, names in AMENDABLE.items() for name in names)


@pytest.mark.parametrize(
    "text",
    [
        "swarm.name=other",
        "swarm.authority=x",
        "workload.seed=1",
        "sync.strategy=gossip",
        "sync.fragments=2",
        "round.chunk_values=4096",
        "round.durability=disk",
        "inner.optimizer=adamw",
        "sync.nonsense=1",
        "inner_steps=60",
    ],
)
def test_what_shapes_state_or_swarm_cannot_be_amended(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be amended; what can: sync"):
        make_amendment(InForce(MANIFEST, NO_HASH), parse_settings([text]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sync.inner_steps=0", "inner_steps"),
        ("sync.inner_steps=many", "inner_steps"),
        ("sync.inner_steps=[60]", "inner_steps"),
        ("sync.overlap_steps=101", "overlap_steps is 101"),
        ("sync.mixing=0.2", "streaming"),
        ("sync.codec=topk", "belong together"),
        ("inner.lr=nan", "finite"),
        ("inner.schedule=cosine", "needs decay_tokens"),
        ("sync.inner_steps=100", "nothing to amend"),
    ],
)
def test_what_a_manifest_would_refuse_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_amendment(InForce(MANIFEST, NO_HASH), parse_settings([text]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["sync.inner_steps", "=60", "sync.inner_steps=", "inner.lr=1\ninner.x=2"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write SECTION"):
        parse_settings([text])


@pytest.mark.parametrize(
    "changes",
    [
        [("inner.lr", 1)],  # an int where the manifest has a float: another hash for the same thing
        [("sync.inner_steps", True)],
        [("sync.inner_steps", 60), ("inner.lr", 5e-4)],
        [("inner.lr", 5e-4), ("inner.lr", 5e-4)],
        [("sync.inner_steps", 100)],
        [("sync.inner_steps", 60), ("sync.outer_lr", 0.7)],
        [("sync.overlap_steps", 101)],
        [("sync.strategy", "gossip")],
    ],
)
def test_amendment_in_another_form_or_of_nothing_stands_on_nothing(changes: list[tuple[str, Any]]) -> None:
    amendment = Amendment(NO_HASH, tuple(Change(key, value) for key, value in changes))
    assert not stands_on(amendment, InForce(MANIFEST, NO_HASH))


def test_word_of_the_authority_is_its_own_about_this_swarm_and_these_changes() -> None:
    fewer, slower = (make_amendment(InForce(MANIFEST, NO_HASH), wanted) for wanted in (FEWER, SLOWER))
    word, peer = sign_amendment(AUTHORITY, SWARM, fewer), AUTHORITY.peer_id
    assert is_the_authoritys(fewer, word, peer, SWARM)
    assert not is_the_authoritys(slower, word, peer, SWARM)
    assert not is_the_authoritys(fewer, word, peer, bytes(32))
    assert not is_the_authoritys(fewer, word, PEERS[0], SWARM)
    assert not is_the_authoritys(fewer, b"", peer, SWARM)


# -- the chain ---------------------------------------------------------------------------------------------------


def test_chain_alone_tells_the_settings_of_every_round() -> None:
    chain = new_chain()
    go_on(chain, 2)
    amend(chain, FEWER)
    assert chain.amended(3) is None
    go_on(chain)
    amend(chain, {"sync.inner_steps": 30, **SLOWER})
    go_on(chain)
    again = new_chain()
    for entry in chain.after(0, 99):
        again.extend(decode(canonical(entry), Certificate))
    for one in (chain, again):
        assert steps(one, range(1, 8)) == [100, 100, 100, 60, 60, 30, 30]
        assert amended_settings(MANIFEST, one.amended(5)) == FEWER
        assert amended_settings(MANIFEST, one.amended(6)) == {"sync.inner_steps": 30, **SLOWER}
        assert in_force(one).manifest.sync.inner_steps == 30
    assert steps(chain.back_to(chain.value(4)), range(1, 6)) == [100, 100, 100, 60, 60]
    assert MANIFEST.swarm_id == manifest().swarm_id


def test_chain_takes_no_amendment_without_a_quorum_or_with_words_about_another() -> None:
    chain = new_chain()
    go_on(chain)
    fewer, slower = (make_amendment(in_force(chain), wanted) for wanted in (FEWER, SLOWER))
    good = amending(chain.head, fewer)
    assert good.amended
    other = amending(chain.head, slower).amended
    assert other
    (one, two), (first, second) = good.amended.consenting, good.amended.signatures

    def with_words(consenting: Sequence[PeerId], *signatures: bytes) -> Value:
        amended = Amended(fewer, tuple(consenting), signatures)
        return msgspec.structs.replace(good, amended=amended)

    forgeries = [
        amending(chain.head, fewer, KEYS[1:2]),
        msgspec.structs.replace(good, amended=msgspec.structs.replace(good.amended, amendment=slower)),
        with_words((one, one), first, first),
        with_words((one, one, two), first, first, second),
        with_words((one, two), first),
        with_words((one, two), first, first),
        msgspec.structs.replace(good, amended=msgspec.structs.replace(good.amended, signatures=other.signatures)),
        amending(chain.head, msgspec.structs.replace(fewer, since=NO_HASH)),
        amending(chain.head, Amendment(fewer.since, (Change("sync.inner_steps", 0),))),
        amending(chain.head, Amendment(fewer.since, (Change("sync.fragments", 2),))),
        amending(chain.head, Amendment(fewer.since, (Change("inner.lr", 1),))),
    ]
    for forged in forgeries:
        with pytest.raises(RemoteError, match="amendment"):
            chain.extend(certified(forged))
    bare = new_chain(None)
    go_on(bare)
    with pytest.raises(RemoteError, match="amendment"):
        bare.extend(certified(good))
    chain.extend(certified(good))
    assert chain.height == 2


def test_consents_of_another_round_amend_nothing() -> None:
    chain = new_chain()
    go_on(chain)
    old = amending(chain.head, make_amendment(in_force(chain), FEWER)).amended
    go_on(chain)
    with pytest.raises(RemoteError, match="amendment"):
        chain.extend(certified(msgspec.structs.replace(result(chain.head), amended=old)))


def test_amendments_hold_in_their_order_and_once_only() -> None:
    chain = new_chain()
    go_on(chain)
    first, second = (make_amendment(in_force(chain), wanted) for wanted in (FEWER, SLOWER))
    chain.extend(certified(amending(chain.head, first)))
    for late in (first, second):  # both are of the settings before
        with pytest.raises(RemoteError, match="amendment"):
            chain.extend(certified(amending(chain.head, late)))
    amend(chain, SLOWER)
    back = make_amendment(in_force(chain), {"sync.inner_steps": 100})
    chain.extend(certified(amending(chain.head, back)))
    with pytest.raises(RemoteError, match="amendment"):  # though it would change something again
        chain.extend(certified(amending(chain.head, first)))
    assert steps(chain, range(1, 6)) == [100, 100, 60, 60, 100]


def test_rollback_brings_back_the_settings_of_its_round_and_ends_what_was_ordered() -> None:
    chain = new_chain()
    go_on(chain, 2)
    amend(chain, FEWER)
    go_on(chain, 2)
    before = in_force(chain)
    go_back(chain, 4)  # after the amendment
    assert steps(chain, [3, 4, 5]) == [100, 60, 60]
    assert in_force(chain).since != before.since
    assert in_force(chain).manifest == before.manifest
    ordered = make_amendment(in_force(chain), SLOWER)
    go_on(chain)
    go_back(chain, 2)  # before it
    assert (steps(chain, [2, 3, 4]), chain.amended(3)) == ([100] * 3, None)
    assert not stands_on(ordered, in_force(chain))
    amend(chain, {"sync.inner_steps": 10})
    assert steps(chain, [3, 4]) == [100, 10]
    again = new_chain()
    for entry in chain.after(0, 99):
        again.extend(entry)
    assert steps(again, range(1, 6)) == steps(chain, range(1, 6))


def test_rebase_brings_back_the_settings_of_its_round() -> None:
    chain = new_chain()
    go_on(chain, 2)
    head = chain.head
    amend(chain, FEWER)
    old = in_force(chain)
    chain.extend(make_rebase(AUTHORITY, head, PEERS[:2]))
    assert (steps(chain, [2, 3]), chain.amended(3)) == ([100, 100], None)
    assert in_force(chain).since == chain.head.hash != old.since


def test_neither_rebase_nor_rollback_carries_an_amendment() -> None:
    chain = new_chain()
    go_on(chain, 2)
    amended = amending(chain.head, make_amendment(in_force(chain), FEWER)).amended
    value = msgspec.structs.replace(make_rebase(AUTHORITY, chain.head, PEERS[:2]).value, amended=amended)
    with pytest.raises(RemoteError, match="does not stand"):
        check_rebase(Rebase(value=value, signature=bytes(64)), chain.head, AUTHORITY.peer_id)
    target = Target(1, chain.value(1).hash)
    consents = {key.peer_id: make_consent(key, chain.head, target, asked=True) for key in KEYS[:3]}
    back = make_rollback(chain.head, PEERS[0], target, consents, digest=chain.value(1).digest)
    with pytest.raises(RemoteError, match="amendment"):
        chain.extend(certified(msgspec.structs.replace(back, amended=amended)))


# -- agreement ---------------------------------------------------------------------------------------------------


def proposed(machine: Agreement, value: Value) -> Propose:
    return propose_of(key_of(machine.lead(0)), 0, value)


def key_of(peer: PeerId) -> Identity:
    return next(key for key in KEYS if key.peer_id == peer)


def prepares(effects: Iterable[object]) -> list[bytes]:
    said = [effect.message for effect in effects if isinstance(effect, Broadcast)]
    return [message.value for message in said if isinstance(message, Prepare)]


def test_member_that_never_consented_votes_for_what_a_quorum_wants_and_for_nothing_less() -> None:
    chain = new_chain()
    go_on(chain)
    settings, head = in_force(chain), chain.head
    members = {key.peer_id: Agreement(identity=key, previous=head, in_force=settings) for key in KEYS[:3]}
    machine = next(one for one in members.values() if not one.leading)
    lead = machine.lead(0)
    wishing = [key for key in KEYS[:3] if members[key.peer_id] is not machine]
    amendment = make_amendment(settings, FEWER)
    impossible = Amendment(settings.since, (Change("sync.inner_steps", 0),))
    good, lone, invalid = (
        msgspec.structs.replace(amending(head, what, consenting), planner=lead)
        for what, consenting in ((amendment, wishing), (amendment, wishing[:1]), (impossible, wishing))
    )
    for wrong in (lone, invalid):
        with pytest.raises(RemoteError, match="proposed an amendment"):
            machine.receive(lead, proposed(machine, wrong))
        carried = PreparedValue(wrong, prepared_by(KEYS[:3], 1, wrong))
        with pytest.raises(RemoteError, match="proposed an amendment"):
            machine.receive(lead, change_of(key_of(lead), head, 2, carried))
        with pytest.raises(RemoteError, match="amendment"):
            machine.receive(lead, certified(wrong))
        with pytest.raises(LocalError):
            members[lead].propose(wrong)
    machine.computed(report_of(good))
    assert prepares(machine.receive(lead, proposed(machine, good))) == [good.hash]
    plain = Agreement(identity=KEYS[0], previous=head)
    with pytest.raises(RemoteError, match="proposed an amendment"):
        plain.receive(lead, proposed(plain, good))


# -- whole rounds ------------------------------------------------------------------------------------------------


def lab_of(nodes: int, seed: int, **options: Any) -> RoundLab:
    return RoundLab(nodes, seed=seed, manifest=MANIFEST, **options)


def reach(lab: RoundLab, height: int) -> None:
    lab.run_until(lab.height_of_all(height), 200)


def amendments(lab: RoundLab) -> list[dict[str, Any]]:
    """What was decided, in order, in the longest chain; every other is a part of it, and every one holds."""
    longest = max((node.values for node in lab.nodes), key=len)
    for node in lab.nodes:
        assert [value.hash for value in node.values] == [value.hash for value in longest[: len(node.values)]]
    chain = Chain(longest[0], manifest=MANIFEST)
    for entry in max((node.chain for node in lab.nodes), key=lambda chain: chain.height).entries:
        chain.extend(entry)
    return [settings_of(value.amended.amendment) for value in longest if value.amended]


@pytest.mark.usefixtures("paper_signatures")
def test_quorum_amends_and_no_round_is_spent_on_it() -> None:
    lab, plain = lab_of(3, 1), lab_of(3, 1)
    reach(lab, 2)
    for number in (0, 1):
        lab.amend(number, FEWER)
    assert lab.run_until(lab.height_of_all(7), 60) - 5 * 3.0 < 5
    reach(plain, 7)
    assert amendments(lab) == [FEWER]
    amended = next(value for value in lab.nodes[2].values if value.amended)
    assert amended.plan != NO_HASH
    assert lab.contributors(amended.round) == {0, 1, 2}
    settings = lab.nodes[2].chain.in_force
    assert settings is not None
    assert settings.manifest.sync.inner_steps == 60
    assert not any(node.blamed for node in lab.nodes)


@pytest.mark.usefixtures("paper_signatures")
def test_who_would_amend_alone_keeps_nobody_waiting() -> None:
    lab, plain = lab_of(3, 2), lab_of(3, 2)
    for one in (lab, plain):
        reach(one, 3)
    lab.amend(1, FEWER)
    took = [one.run_until(one.height_of_all(8), 60) for one in (lab, plain)]
    assert took[0] == pytest.approx(took[1], abs=1)
    assert amendments(lab) == []
    assert all(node.running().amend_consents().keys() == {lab.nodes[1].peer} for node in lab.nodes)


@pytest.mark.usefixtures("paper_signatures")
def test_of_two_that_halve_the_swarm_the_last_planners_is_taken() -> None:
    lab = lab_of(4, 3)
    reach(lab, 3)
    for number, wanted in ((0, FEWER), (1, FEWER), (2, SLOWER), (3, SLOWER)):
        lab.amend(number, wanted)
    reach(lab, 8)
    taken = amendments(lab)
    assert taken in ([FEWER], [SLOWER], [FEWER, SLOWER], [SLOWER, FEWER])
    for at, value in enumerate(lab.nodes[0].values):
        if value.amended:
            assert len(value.amended.consenting) == 2
            assert lab.nodes[0].values[at - 1].planner in value.amended.consenting


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("paper_signatures")
def test_amendment_that_may_be_decided_is_carried_on_by_a_lead_that_wanted_another(seed: int) -> None:
    lab = lab_of(3, seed)
    reach(lab, 3)
    lab.run_for(0.3)
    lead = lab.lead()
    follower, third = (number for number in range(3) if number != lead)

    def mute(number: int, effect: Effect) -> tuple[int, ...] | None:
        return () if isinstance(effect, Broadcast) and isinstance(effect.message, Vote | Certificate) else None

    lab.intercept = mute
    for number in (lead, follower):
        lab.amend(number, FEWER)
    lab.run_until(lambda: any(r.kind == "vote" and r.round == 4 for r in lab.nodes[follower].log), 10)
    (cast,) = (r.value for r in lab.nodes[follower].log if r.kind == "vote" and r.round == 4)
    assert cast is not None
    assert cast.amended
    lab.kill(lead)
    lab.intercept = lambda number, effect: None
    lab.withdraw(follower, Wanted)
    lab.amend(third, SLOWER)
    reach(lab, 4)
    assert lab.nodes[third].values[4].hash == cast.hash
    reach(lab, 6)
    assert amendments(lab) == [FEWER]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12))])
@pytest.mark.usefixtures("paper_signatures")
def test_kills_and_losses_leave_one_value_a_round_whoever_would_amend_what(seed: int) -> None:
    """The lab's ledger watches every message; here also: every chain is one, and holds with its amendments."""
    rng = random.Random(seed)
    lab = lab_of(4, seed, loss=0.05)
    reach(lab, 1)
    for _ in range(6):
        number = rng.randrange(4)
        some, other = ({"sync.inner_steps": steps} for steps in rng.choices((20, 40, 60, 80), k=2))
        for after, wanted in enumerate((some, other, some)):
            lab.amend((number + after) % 4, wanted)
        lab.run_for(rng.uniform(0.5, 4))
        victim = rng.randrange(4)
        lab.kill(victim)
        lab.run_for(rng.uniform(0.1, 4))
        lab.restart(victim)
        lab.run_for(rng.uniform(0.1, 2))
    reach(lab, max(node.height for node in lab.nodes) + 2)
    assert amendments(lab)


def test_step_back_says_which_settings_go_back_with_it() -> None:
    manifest = validate_manifest(back_tables(100), source="the test's manifest")
    other = validate_manifest(back_tables(30), source="the test's manifest")
    first, amended = InForce(manifest, bytes(32)), InForce(other, bytes(32))
    assert settings_back(amended, first) == "; settings go back with it: sync.inner_steps = 100"
    assert settings_back(first, first) == settings_back(None, first) == settings_back(amended, None) == ""


def back_tables(inner_steps: int) -> dict[str, object]:
    peer = Identity.from_seed(bytes(32)).peer_id
    return {
        "swarm": {"name": "x", "founders": [peer], "authority": peer},
        "workload": {"name": "text"},
        "sync": {"strategy": "diloco", "inner_steps": inner_steps},
    }
