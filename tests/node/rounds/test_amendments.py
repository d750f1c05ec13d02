"""What a node does about amendments: its user's order, the authority's word, and every round by its own settings."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trio

from shoal.collectives.codecs import F32
from shoal.collectives.finals import Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.outer import OuterSettings
from shoal.collectives.partition import deal
from shoal.collectives.state import HeldState
from shoal.node.rounds.authority import KEY_NAME, Authority
from shoal.node.rounds.order_file import FILES, OrderFiles
from shoal.node.rounds.participation import Participation
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.rounds.state_transition import StateTransition
from shoal.node.rounds.surroundings import NodeSurroundings
from shoal.node.state.contributions import Contributions
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.state_files import write_state
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer import Trainer, TrainerSpec
from shoal.node.training.trainer_messages import Assignment, Command, InnerSettings, Retune, SyncSettings, Train
from shoal.node.training.training_client import TrainingClient
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.agreement import Broadcast
from shoal.protocol.amending import (
    AmendConsent,
    make_amend_consent,
    make_amendment,
    settings_of,
    sign_amendment,
)
from shoal.protocol.amendment_orders import Amending
from shoal.protocol.effects import DropOrder, Effect, KeepOrder, SignAmendment, Steps, Tell
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Loaded, Wanted
from shoal.protocol.manifest import Manifest
from shoal.protocol.planning import RoundSettings
from shoal.protocol.round import RoundMachine
from tests.manifests import manifest_of
from tests.node.donors import World
from tests.node.ledger import AUTHORITY, GRID, Ledger, identity, save_finals, vector
from tests.node.rounds.site_lab import no_site

NAME = FILES[Wanted][0]
FEWER = ["sync.inner_steps=60", "sync.codec=bf16"]
FEWER_SETTINGS: dict[str, Any] = {"sync.codec": "bf16", "sync.inner_steps": 60}
OTHER_OUTER: dict[str, Any] = {"sync.outer_lr": 0.5, "sync.codec": "fp32"}
GOOD = PeerId("good")


def manifest(authority: PeerId = AUTHORITY.peer_id) -> Manifest:
    sections = {"sync": {"inner_steps": 100}, "round": {"chunk_values": 4096}}
    return manifest_of([identity(n).peer_id for n in (1, 2, 3)], sections, authority=authority)


MANIFEST = manifest()


class Bench:
    """A node of three in the round after those that the ledger certified."""

    def __init__(self, folder: Path, *, follows: bool = True, agreed: Manifest = MANIFEST) -> None:
        self.ledger = Ledger(manifest=agreed)
        self.ledger.certify(2)
        self.me, self.other, self.third = self.ledger.founders
        self.folder = folder
        self.notices: list[str] = []
        self.follows = follows
        self.orders = OrderFiles(folder)
        self.authority = Authority(folder, authority=agreed.swarm.authority, node=self.me)
        self.restart()

    def restart(self) -> None:
        """Be a new process over the same folder, in the round after the head."""
        here: Any = SimpleNamespace(chain=self.ledger.chain)
        self.amending = Amending(self.me.peer_id, here, follows=self.follows)
        self.amending.loaded(Loaded(self.orders.read()))
        self.begin()

    def begin(self) -> None:
        head = self.ledger.chain.head
        self.machine = RoundMachine(
            identity=self.me,
            previous=head,
            state=head.digest,
            life=bytes(32),
            settings=RoundSettings.of(self.ledger.chain.amended(head.next_round) or MANIFEST, GRID.numel),
            deal=deal,
            in_force=self.ledger.chain.in_force,
        )
        self._do(self.amending.begin_round())

    def order(self, *settings: str, by_authority: bool = False) -> None:
        self._do(self.amending.order(settings, by_authority=by_authority))

    def withdraw(self) -> None:
        self._do(self.amending.withdraw())

    def _do(self, steps: Steps) -> None:
        """All effects, in order. Raises ConfigError for an order that cannot be."""
        came: Any = None
        while True:
            try:
                effect = steps.send(came)
            except StopIteration:
                return
            match effect:
                case KeepOrder(order):
                    came = self.orders.write(order)
                case DropOrder(kind):
                    came = self.orders.remove(kind)
                case SignAmendment(amendment):
                    came = self.authority.sign_amendment(self.ledger.chain.head.swarm, amendment)
                case Tell(text):
                    came = self.notices.append(text)
                case _:
                    raise AssertionError(effect)

    def says(self) -> list[tuple[dict[str, Any], bool]]:
        effects: Sequence[Effect] = self.amending.advise(self.machine, 0.0)
        said = [effect.message for effect in effects if isinstance(effect, Broadcast)]
        return [(settings_of(m.amendment), m.asked) for m in said if isinstance(m, AmendConsent)]

    def hears(self, wanted: dict[str, Any], *, signer: Identity | None) -> None:
        chain = self.ledger.chain
        assert chain.in_force is not None
        amendment = make_amendment(chain.in_force, wanted)
        word = b"" if signer is None else sign_amendment(signer, chain.head.swarm, amendment)
        consent = make_amend_consent(self.other, chain.head, amendment, asked=True, authority=word)
        self.machine.receive(self.other.peer_id, consent, 0.0)


# -- orders ------------------------------------------------------------------------------------------------------


def test_order_is_said_in_every_round_and_outlives_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.order(*FEWER)
    assert bench.says() == [(FEWER_SETTINGS, True)]
    assert bench.says() == []
    bench.ledger.certify()
    bench.begin()
    assert bench.says() == [(FEWER_SETTINGS, True)]
    bench.restart()
    assert bench.says() == [(FEWER_SETTINGS, True)]
    assert bench.notices == [
        'still proposing to amend sync.codec = "bf16", sync.inner_steps = 60; `shoal amend --withdraw` ends that'
    ]
    bench.withdraw()
    assert not (tmp_path / NAME).exists()
    bench.restart()
    assert bench.says() == []


def test_order_that_is_carried_out_is_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.order(*FEWER)
    bench.ledger.amend(FEWER_SETTINGS)
    bench.begin()
    assert (bench.says(), bench.notices, (tmp_path / NAME).exists()) == ([], [], False)
    bench.restart()
    assert (bench.says(), bench.notices) == ([], [])


@pytest.mark.parametrize("how", ["amended", "rolled back"])
def test_order_of_other_settings_than_those_in_force_is_over_and_told(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path)
    bench.order(*FEWER)
    if how == "amended":
        bench.ledger.amend({"inner.lr": 1e-4})
    else:
        bench.ledger.go_back(1)
    bench.begin()
    assert bench.says() == []
    assert [text.endswith("order it again") for text in bench.notices] == [True]
    assert not (tmp_path / NAME).exists()


def test_order_that_cannot_be_is_refused_and_nothing_is_on_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for settings, words in ((["sync.codec=topk"], "belong together"), (["swarm.name=x"], "cannot be amended")):
        with pytest.raises(ConfigError, match=words):
            bench.order(*settings)
    with pytest.raises(ConfigError, match="signed with the key of"):
        bench.order(*FEWER, by_authority=True)
    assert not (tmp_path / NAME).exists()
    bench.me = identity(50)
    bench.restart()
    with pytest.raises(ConfigError, match="no vote"):
        bench.order(*FEWER)


def test_damaged_order_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).write_bytes(b"no record")
    bench = Bench(tmp_path)
    assert bench.says() == []
    assert "is damaged and is ignored" in caplog.text


# -- the authority -----------------------------------------------------------------------------------------------


def test_authority_signs_with_its_key_and_says_so(tmp_path: Path) -> None:
    key = Identity.load_or_create(tmp_path / KEY_NAME)
    bench = Bench(tmp_path, agreed=manifest(key.peer_id))
    bench.order(*FEWER, by_authority=True)
    bench.restart()
    assert bench.says() == [(FEWER_SETTINGS, True)]
    (consent,) = bench.machine.amend_consents().values()
    assert consent.authority == sign_amendment(key, bench.ledger.chain.head.swarm, consent.amendment)


def test_member_follows_the_authority_and_passes_its_word_on_in_later_rounds(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hears(FEWER_SETTINGS, signer=AUTHORITY)
    assert bench.says() == [(FEWER_SETTINGS, False)]
    bench.ledger.certify()
    bench.begin()  # the others are not heard any more
    assert bench.says() == [(FEWER_SETTINGS, False)]
    assert all(consent.authority for consent in bench.machine.amend_consents().values())
    bench.ledger.amend({"inner.lr": 1e-4})
    bench.begin()
    assert bench.says() == []


@pytest.mark.parametrize(("follows", "signer"), [(True, None), (True, identity(2)), (False, AUTHORITY)])
def test_member_follows_nobody_else_and_not_against_its_users_will(
    tmp_path: Path, follows: bool, signer: Identity | None
) -> None:
    bench = Bench(tmp_path, follows=follows)
    bench.hears(FEWER_SETTINGS, signer=signer)
    assert bench.says() == []


def test_all_follow_the_same_of_two_that_the_authority_signed(tmp_path: Path) -> None:
    orders = [[FEWER_SETTINGS, {"inner.lr": 1e-4}], [{"inner.lr": 1e-4}, FEWER_SETTINGS]]
    ends = []
    for number, wanted in enumerate(orders):
        bench = Bench(tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        for one in wanted:
            bench.hears(one, signer=AUTHORITY)
            bench.says()
        ends.append(settings_of(bench.machine.amend_consents()[bench.me.peer_id].amendment))
    assert ends[0] == ends[1]


# -- every round by its own settings -----------------------------------------------------------------------------


def amended_ledger() -> Ledger:
    """Rounds 1 to 3 by the manifest, 4 to 6 by other outer settings and another codec."""
    ledger = Ledger(manifest=MANIFEST)
    ledger.certify(2)
    ledger.amend(OTHER_OUTER)
    ledger.certify(3)
    assert [ledger.finals[round].plan.codec for round in range(1, 7)] == ["int8"] * 3 + ["fp32"] * 3
    return ledger


@pytest.mark.virtual_time
async def test_replay_over_an_amendment_makes_each_round_by_its_settings(tmp_path: Path) -> None:
    world = World(tmp_path, amended_ledger())
    world.donor(GOOD)
    for begin in (2, 3, 4):
        state = await world.catchup.replay(world.ledger.states[begin], world.ledger.chain, [GOOD])
        assert state.round == 6
        assert state.anchor.tobytes() == world.ledger.states[6].anchor.tobytes()


@pytest.mark.virtual_time
async def test_finals_in_the_codec_of_another_round_are_not_taken(tmp_path: Path) -> None:
    world = World(tmp_path, amended_ledger())
    world.donor(GOOD)
    world.catchup.amended = lambda round: None
    with pytest.raises(NetworkError):
        await world.catchup.finals(world.ledger.chain.value(4).plan, [GOOD])


def test_earlier_state_is_found_over_an_amendment(tmp_path: Path) -> None:
    ledger = amended_ledger()
    cache = World(tmp_path, ledger).cache
    earlier = EarlierStates(tmp_path / "me", chain=ledger.chain, cache=cache, outer=OuterSettings())
    write_state(tmp_path / "me" / "state" / "2.safetensors", ledger.states[2])
    for round in (3, 4, 5):
        save_finals(cache, ledger.finals[round])
    found = trio.run(earlier.find, 5)
    assert found is not None
    assert found.anchor.tobytes() == ledger.states[5].anchor.tobytes()


def test_state_is_worked_out_by_the_settings_of_its_round(tmp_path: Path) -> None:
    ledger = amended_ledger()
    told: list[bytes] = []
    for before in (2, 3, 4):
        chain = ledger.chain_to(before)
        state_store = SimpleNamespace(chain=chain, head=chain.head, state=ledger.states[before])
        parts = SimpleNamespace(
            config=SimpleNamespace(manifest=MANIFEST),
            state_store=state_store,
            cache=World(tmp_path / str(before), ledger).cache,
            reduce=SimpleNamespace(),
            log=SimpleNamespace(reduced=lambda finals, digest, seconds: told.append(digest)),
        )
        transition = StateTransition(parts)  # type: ignore[arg-type]
        transition.begin_round(0.0)
        trio.run(transition.work_out, ledger.finals[before + 1], 0.0)
    assert told == [ledger.chain.value(round).digest for round in (3, 4, 5)]


class Part:
    """A founder's part in the rounds of a ledger; what the trainer is ordered is noted."""

    def __init__(self) -> None:
        self.ledger = Ledger(manifest=MANIFEST)
        self.ledger.certify(2)
        self.orders: list[str | Manifest] = []
        self.state_store = SimpleNamespace(
            chain=self.ledger.chain, state=self.ledger.state, head=self.ledger.chain.head
        )
        parts = SimpleNamespace(
            config=SimpleNamespace(manifest=MANIFEST),
            identity=self.ledger.founders[0],
            state_store=self.state_store,
            training_client=SimpleNamespace(stand_on=self._stand_on, retune=self._retune, paused=False),
            reduce=SimpleNamespace(prepare=lambda: None),
            store=SimpleNamespace(folder=Path(tempfile.gettempdir())),
            resumption=SimpleNamespace(stands_on=lambda value: None),
            site=no_site(),
        )
        self.part = Participation(parts, Fragments(GRID), RoundObserver)  # type: ignore[arg-type]

    async def _stand_on(self, state: HeldState, anchor: F32, *, taken: int, fresh: bool = False) -> None:
        self.orders.append(f"stand on {state.round}")
        await trio.lowlevel.checkpoint()

    async def _retune(self, settings: Manifest) -> None:
        self.orders.append(settings)
        await trio.lowlevel.checkpoint()

    def stand(self) -> None:
        self.state_store.state, self.state_store.head = self.ledger.state, self.ledger.chain.head
        trio.run(self.part.stand_on_head)

    def make(self) -> str:
        """The codec of a contribution to the round under way."""
        head = self.ledger.chain.head
        made = self.part._contributions.make(head.next_round, 1, 100, vector(5), base=head.hash)
        return made.encoded.codec


def test_part_in_a_round_is_by_its_settings_from_the_anchor_on(tmp_path: Path) -> None:
    here = Part()
    here.stand()
    assert here.make() == "int8"
    here.ledger.amend({**FEWER_SETTINGS, "round.staleness_rounds": 0})
    here.stand()
    amended = here.ledger.chain.amended(4)
    assert here.orders == ["stand on 2", "stand on 3", amended]
    assert here.make() == "bf16"
    surroundings = NodeSurroundings(here.part._p)
    surroundings.begin(here.part, Fragments(GRID))
    assert [surroundings.rules(round).staleness_rounds for round in (3, 4)] == [3, 0]
    here.ledger.certify()
    here.stand()
    assert here.orders[3:] == ["stand on 4"]
    here.ledger.go_back(2)
    here.stand()
    assert here.orders[4:] == ["stand on 2", MANIFEST]
    assert here.make() == "int8"


def test_work_of_before_an_amendment_is_made_again_in_the_codec_of_its_round() -> None:
    plain = Contributions(Fragments(GRID), "int8", 3, sender=PeerId("me"))
    made = plain.make(3, 1, 100, vector(5), base=bytes(32))
    here = Part()
    here.ledger.amend(FEWER_SETTINGS)
    here.state_store.head = here.ledger.chain.head
    trio.run(here.part._keep_to, 4)
    contributions = here.part._contributions
    contributions._sender = PeerId("me")
    work = plain.saved(made, here.ledger.chain.head.term)
    assert not contributions.make_again(work)
    trio.run(here.part._keep_to, 3)
    assert contributions.make_again(work)
    trio.run(here.part._keep_to, 4)
    assert contributions.made is not None
    contributions.settle(3, None)
    assert here.make() == "bf16"


def test_work_of_the_round_that_amended_is_taken_up_by_its_settings_after_a_restart() -> None:
    here = Part()
    chain, me = here.ledger.chain, here.ledger.founders[0].peer_id
    plain = Contributions(Fragments(GRID), "int8", 3, sender=me)
    work = plain.saved(plain.make(3, 1, 100, vector(5), base=chain.head.hash), chain.head.term)
    here.ledger.amend(FEWER_SETTINGS)
    here.state_store.head = chain.head
    told: list[str] = []

    async def no_finals(round: int, peers: list[PeerId]) -> Finals:
        await trio.lowlevel.checkpoint()
        raise NetworkError(f"no finals of round {round}")

    async def restore(found: object, *, spent: bool) -> None:
        await trio.lowlevel.checkpoint()
        assert here.orders == []  # what the trainer knew is of the settings before, and so is the anchor to come
        told.append("restored")

    here.state_store.finals = no_finals
    parts = here.part._p
    found = SimpleNamespace(work=work, position=(chain.head.term, 3))
    parts.resumption = SimpleNamespace(  # type: ignore[misc]
        find=lambda chain, *, countable, staleness_rounds: found,
        restore_trainer=restore,
        stands_on=lambda value: None,
    )
    assert not trio.run(partial(here.part.find_work, countable=True))
    trio.run(here.part.resume_work)
    assert told == ["restored"]
    here.stand()
    assert here.orders == ["stand on 3", chain.amended(4)]
    # What its codec had lost of it comes with the next, as if there had been no restart.
    plain.settle(3, (True,) * GRID.chunks)
    plain.retune("bf16", 3, mixing=None)
    uninterrupted = plain.make(4, 2, 100, vector(6), base=chain.head.hash)
    assert here.part._contributions.make(4, 2, 100, vector(6), base=chain.head.hash).encoded.root == (
        uninterrupted.encoded.root
    )


def test_trainer_gets_steps_and_settings_and_a_new_process_too() -> None:
    sections = {"sync": {"inner_steps": 60, "overlap_steps": 2}, "inner": {"lr": 2e-4, "weight_decay": 0.0}}
    amended = manifest_of(MANIFEST.swarm.founders, sections, authority=AUTHORITY.peer_id)
    trainer = Trainer(TrainerSpec(workload="regression"))
    sent: list[Command] = []
    send = trainer.send

    async def note(command: Command) -> None:
        sent.append(command)
        await send(command)

    trainer.send = note  # type: ignore[method-assign]
    bench = TrainingClient(trainer, seed=0, inner_steps=100)
    trio.run(bench.retune, amended)
    previous = Ledger().chain.head
    trio.run(bench.train, previous, previous.members[0], 0)
    wanted = Retune(inner=InnerSettings.of(amended), sync=SyncSettings.of(amended))
    assert sent[0] == wanted
    assert isinstance(sent[1], Train)
    assert sent[1].steps == 60
    assert (trainer._in_force.inner, trainer._in_force.sync) == (wanted.inner, wanted.sync)


def test_replica_goes_on_with_its_moments_under_amended_settings() -> None:
    def replica(lr: float, decay: float) -> Replica:
        inner = InnerSettings(lr=lr, weight_decay=decay)
        made = Replica(RegressionWorkload(inputs=8, outputs=4), seed=1, inner=inner, device=torch.device("cpu"))
        made.apply(np.zeros(made.layout.numel, np.float32))
        made.begin(Train(round=1, steps=100, assignment=Assignment(seed=1, round=1, member=0, members=1)))
        return made

    changed, plain = replica(1e-2, 0.1), replica(1e-2, 0.1)
    out = np.zeros(plain.layout.numel, np.float32)
    for one in (changed, plain):
        for _ in range(3):
            one.step(out)
    before = [tensor.clone() for _, tensor in changed.inner_state_tensors()]
    local = changed.accounts.local()
    changed.retune(InnerSettings(lr=1e-3, weight_decay=0.0), SyncSettings(overlap_steps=3))
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, changed.inner_state_tensors(), strict=True))
    assert torch.equal(local, changed.accounts.local())
    for one in (changed, plain):
        one.step(out)
    for (name, mine), (_, theirs) in zip(changed.inner_state_tensors(), plain.inner_state_tensors(), strict=True):
        assert torch.equal(mine, theirs), name  # the same gradient, and the same moments
    moved, plainly = changed.accounts.local() - local, plain.accounts.local() - local
    decayed = plainly + 1e-2 * 0.1 * local
    assert torch.allclose(moved, decayed / 10, rtol=1e-3, atol=1e-8)
    assert changed.accounts.overlap_steps == 3  # type: ignore[union-attr]
