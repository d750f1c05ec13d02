"""Who draws from the policy that it names is never doubted, and who does not is found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from shoal.node.sapo import replay as replay_module
from shoal.node.sapo.char_policy import END, CharModelSettings, CharPolicy
from shoal.node.sapo.generation import GroupGenerator
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.past_policies import KEPT, PastPolicies
from shoal.node.sapo.policy import Sample, module_of
from shoal.node.sapo.replay import Replayer
from shoal.node.sapo.trust import IGNORED_AT, Replayed, Trust
from shoal.node.training.flat_parameters import FlatParameters
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import Drawn, Reason, RolloutError, Sampling, assigned_draws
from shoal.protocol.wire import SwarmId
from tests.node.sapo.sums import sum_task

SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=8, completion_tokens=8, alphabet="0123456789+=")
SWARM = SwarmId(b"s" * 32)
ORIGIN = PeerId("sampler")
SIZE = 8


class Side:
    """One node's policy with what it keeps of the swarm's; all begin alike, and are far from uniform."""

    def __init__(self, settings: CharModelSettings = SETTINGS) -> None:
        self.policy = CharPolicy(settings, seed=1)
        flat = FlatParameters(module_of(self.policy), frozen=False)
        self.past = PastPolicies(lambda: flat)
        self.flat = flat
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter *= 3

    def values(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return self.flat.gather(self.flat.new_vector()).numpy()

    def move(self, size: float, *, seed: int) -> None:
        """Let the policy move as rounds move it."""
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += size * torch.randn(parameter.shape, generator=chance)

    def draw(self, version: int, *, numbers: int = 6, begin: int = 0, name: int | None = None) -> list[JudgedGroup]:
        """Groups by the image of a version, which are said to be of the version `name`."""
        made = GroupGenerator(self.policy, group_size=SIZE, draws=partial(assigned_draws, SWARM, ORIGIN))
        tasks = (sum_task(3, begin + number) for number in range(numbers))
        with self.past.standing_on(version):
            drawn = made.collect(numbers, lambda: next(tasks), round=3, version=version if name is None else name)
        return [
            JudgedGroup(
                task=group.task,
                texts=tuple(self.policy.decode(one.tokens) for one in group.rollouts),
                rewards=(0.5,) * SIZE,
                origin=ORIGIN,
                round=3,
                policy_version=group.version,
                sampling=group.sampling("char-policy"),
            )
            for group in drawn.groups
        ]


def replayer(side: Side, *, seed: int = 1, together: int = SIZE) -> Replayer:
    return Replayer(
        side.policy,
        side.past,
        swarm_id=SWARM,
        together=together,
        chance=random.Random(seed),
    )


def two_sides() -> tuple[Side, Side]:
    """A sampler and a trainer, with the policies of rounds 7 and 8; the trainer's own has moved on."""
    sampler, trainer = Side(), Side()
    for version in (7, 8):
        for side in (sampler, trainer):
            side.past.note(version, side.values())
            side.move(0.05, seed=version)
    return sampler, trainer


def found_of(groups: Sequence[JudgedGroup], of: Replayer) -> Replayed:
    found = [of.replay(group) for group in groups]
    return Replayed(tokens=sum(one.tokens for one in found), missed=sum(one.missed for one in found))


@pytest.mark.parametrize("version", [7, 8])
def test_who_draws_from_the_policy_that_it_names_misses_nothing(version: int) -> None:
    sampler, trainer = two_sides()
    own = trainer.values()
    found = found_of(sampler.draw(version, numbers=40), replayer(trainer))
    assert found.tokens > 200
    assert found.missed == 0
    assert np.array_equal(trainer.values(), own), "the trainer's own policy is as it was"


def test_no_number_is_gone_through_in_vain() -> None:
    """Were the wrong completion's numbers compared, or those of another place, most tokens would be missed."""
    sampler, trainer = two_sides()
    groups = sampler.draw(7, numbers=10)
    moved = [replace(group, round=4) for group in groups]
    found = found_of(moved, replayer(trainer))
    assert found.missed > found.tokens / 3
    assert found.is_proof


def test_the_policy_of_the_round_before_is_told_from_that_of_the_round() -> None:
    sampler, trainer = two_sides()
    sampler.move(0.5, seed=9)
    sampler.past.note(8, sampler.values())
    found = found_of(sampler.draw(8, numbers=20), replayer(trainer))
    assert found.is_proof


def test_another_temperature_is_found() -> None:
    _, trainer = two_sides()
    hot = Side(replace(SETTINGS, temperature=2.0))
    hot.past.note(7, hot.values())
    assert found_of(hot.draw(7, numbers=20), replayer(trainer)).is_proof


def test_completions_that_were_chosen_among_more_are_found() -> None:
    """The best of many is drawn from the policy, but not by the numbers that were assigned."""
    sampler, trainer = two_sides()
    groups, others = sampler.draw(7, numbers=12), sampler.draw(7, numbers=12, begin=50)
    chosen = [
        replace(group, texts=other.texts, sampling=other.sampling) for group, other in zip(groups, others, strict=True)
    ]
    assert found_of(chosen, replayer(trainer)).is_proof


def test_written_completions_are_found_group_by_group() -> None:
    sampler, trainer = two_sides()
    tokens = tuple(trainer.policy.encode_completion("=1=2=3+") or ())
    written = Sampling(policy="7-x", drawn=(Drawn.of([-1.0] * len(tokens), tokens),) * SIZE)
    for group in sampler.draw(7):
        assert replayer(trainer).replay(replace(group, texts=("=1=2=3+",) * SIZE, sampling=written)).is_proof


def labelled(tokens: Sequence[int], text: str) -> dict[str, object]:
    drawn = Drawn.of([-1.0] * len(tokens), tokens)
    return {"texts": (text,) * SIZE, "sampling": Sampling(policy="7-x", drawn=(drawn,) * SIZE)}


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ((5, 6), "12"),  # cut short: neither at its end nor at the limit
        ((5, END, 6, END), "12"),  # goes on behind its end
        ((5, 6, END), "21"),  # other text
        ((5, 4096, END), "1"),  # beyond the vocabulary
        ((5,) * 8 + (END,), "1" * 8),  # beyond the limit
    ],
)
def test_tokens_that_no_drawing_ends_with_are_refused(tokens: Sequence[int], text: str) -> None:
    sampler, trainer = two_sides()
    group = replace(sampler.draw(7, numbers=1)[0], **labelled(tokens, text))  # type: ignore[arg-type]
    with pytest.raises(RolloutError) as caught:
        replayer(trainer).replay(group)
    assert caught.value.reason is Reason.MISLABELLED


def test_a_group_without_its_tokens_is_refused() -> None:
    sampler, trainer = two_sides()
    with pytest.raises(RolloutError) as caught:
        replayer(trainer).replay(replace(sampler.draw(7, numbers=1)[0], sampling=Sampling(policy="7-x")))
    assert caught.value.reason is Reason.MISLABELLED


def test_a_policy_that_is_not_here_is_stale() -> None:
    sampler, trainer = two_sides()
    for version in (6, 9):
        with pytest.raises(RolloutError) as caught:
            replayer(trainer).replay(sampler.draw(7, numbers=1, name=version)[0])
        assert caught.value.reason is Reason.STALE


def test_after_a_rollback_who_drew_from_the_abandoned_policy_is_no_liar_for_as_long_as_its_number_lasts() -> None:
    sampler, trainer = two_sides()
    abandoned = sampler.draw(8, numbers=20)
    for round in (7, 8, 9):
        trainer.move(0.5, seed=10 + round)
        for side in (sampler, trainer):
            side.past.note(round, trainer.values())
        if round == 8:
            for group in abandoned:
                with pytest.raises(RolloutError) as caught:
                    replayer(trainer).replay(group)
                assert caught.value.reason is Reason.STALE
            assert found_of(sampler.draw(8), replayer(trainer)).missed == 0
    assert found_of(sampler.draw(8, numbers=20, name=9), replayer(trainer)).is_proof


def test_the_newest_policies_are_kept_and_a_round_that_is_made_again_replaces_them() -> None:
    side = Side()
    assert side.past.rounds == ()
    for version in range(5):
        side.past.note(version, side.values())
    assert side.past.rounds == (3, 4)
    assert len(side.past.rounds) == KEPT
    side.move(1.0, seed=1)
    side.past.note(3, side.values())
    assert side.past.rounds == (3,), "after a rollback the later ones are no policies of the swarm's"
    assert side.past.made_again_to == 4
    side.past.note(3, side.values())  # the same once more, as of a daemon that was started again
    side.past.note(5, side.values())
    assert side.past.rounds == (3, 5)
    assert side.past.made_again_to == 4
    with side.past.standing_on(3):
        rounded = side.values()
    assert np.array_equal(rounded, torch.from_numpy(side.values()).bfloat16().float().numpy())


def test_doubt_adds_up_to_a_fault_and_honesty_saves_nothing_up() -> None:
    blamed: list[tuple[PeerId, Reason]] = []
    trust = Trust(lambda peer, reason: blamed.append((peer, reason)))
    for _ in range(1000):
        trust.replayed(ORIGIN, Replayed(tokens=30, missed=0))
        trust.replayed(PeerId("unlucky"), Replayed(tokens=1000, missed=1))
    assert blamed == []
    for groups in (1, 2, 3):
        trust.replayed(ORIGIN, Replayed(tokens=30, missed=3))
        assert bool(blamed) is (groups == 3), "20.7 of doubt, of which each group gives 8.5"
    assert blamed == [(ORIGIN, Reason.OTHER_POLICY)]
    assert trust.demerits(ORIGIN) == IGNORED_AT
    assert not trust.ignored(PeerId("unlucky"))


def test_doubt_is_the_logarithm_of_how_much_more_probable_another_policy_is() -> None:
    # 0.02^2 · 0.98^3 beside 0.001^2 · 0.999^3.
    assert Replayed(tokens=5, missed=2).doubt == pytest.approx(np.log(0.02**2 * 0.98**3 / (0.001**2 * 0.999**3)))
    assert not Replayed(tokens=5, missed=5).is_proof
    assert Replayed(tokens=10, missed=10).is_proof


def test_no_more_completions_are_in_memory_than_a_node_wants_and_as_many_tokens_are_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, trainer = two_sides()
    groups = sampler.draw(7, name=8)
    found = [replayer(trainer).replay(group) for group in groups]
    assert any(one.missed for one in found)
    drawn_by, passes = trainer.policy.drawn_by, list[int]()

    def counting(samples: Sequence[Sample]) -> torch.Tensor:
        passes.append(len(samples))
        return drawn_by(samples)

    monkeypatch.setattr(trainer.policy, "drawn_by", counting)
    assert [replayer(trainer, together=3).replay(group) for group in groups] == found
    assert passes == [3, 1] * len(groups)
    passes.clear()
    monkeypatch.setattr(replay_module, "VALUES_AT_ONCE", 1)
    assert [replayer(trainer).replay(group) for group in groups] == found
    assert passes == [1] * 4 * len(groups), "however many its origin has in a group, and however long"
