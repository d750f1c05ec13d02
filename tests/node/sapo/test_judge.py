"""The judge: what it makes of a peer's text, and by which name it refuses what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.sapo import judge as judge_module
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.judge import COPY_LEAST_BYTES, Judge
from shoal.node.sapo.sandbox import NotBegun
from shoal.node.sapo.selection import Verdict
from shoal.node.sapo.tasks import INDEX_LIMIT, Config, Task, TaskChoice, TaskSource
from shoal.node.sapo.trust import WEIGHTS, Replayed
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT, OVER_PROVISION_LIMIT
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import (
    Reason,
    RolloutError,
    RolloutGroup,
    TaskRef,
    assigned_seed,
    digest_of,
)
from tests.node.sapo.offering import (
    SOURCE,
    SWARM,
    group_of,
    new_judge,
    offer_of,
    peer_id,
    right_answer,
)
from tests.node.sapo.sums import SUMS, Sums, score

ALICE, BOB = peer_id(1), peer_id(2)


def judged(judge: Judge, offer: Offer, data: bytes) -> tuple[Verdict, JudgedGroup | None]:
    (found,) = judge.judge([(offer, data)])
    return found.verdict, found.group


def refusal(judge: Judge, offer: Offer, data: bytes, *, blamed: bool = True) -> Reason | None:
    verdict, group = judged(judge, offer, data)
    assert group is None
    assert verdict == Verdict(refused=verdict.refused, blamed=blamed)
    return verdict.refused


def accepts(judge: Judge, offer: Offer, data: bytes) -> bool:
    verdict, group = judged(judge, offer, data)
    assert verdict == Verdict(rewards=() if group is None else group.rewards, refused=verdict.refused)
    return group is not None


def with_task(group: RolloutGroup, **changes: object) -> RolloutGroup:
    return msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, **changes))


def test_honest_group_is_judged_by_own_scores() -> None:
    group = group_of(ALICE, 3, round_number=7, rewards=(1.0, 0.0, 0.0), policy_version=5)
    verdict, one = judged(new_judge(), *offer_of(group))
    assert one is not None
    assert one.rewards == verdict.rewards == (1.0, 0.0, 0.0)
    assert verdict.refused is None
    assert one.texts == group.completions
    assert one.task == SOURCE.draw(SWARM, ALICE, 7, 3)
    assert (one.origin, one.round, one.policy_version) == (ALICE, 7, 5)


def test_groups_are_judged_each_on_its_own() -> None:
    judge = new_judge()
    good = [offer_of(group_of(ALICE, index)) for index in range(2)]
    lie = offer_of(group_of(BOB, rewards=(0.0, 0.0)), (1.0, 0.0))
    found = judge.judge([good[0], lie, good[1]])
    assert [one.group is not None for one in found] == [True, False, True]
    assert [one.verdict.refused for one in found] == [None, Reason.HINT, None]
    assert found[2].verdict.rewards == (1.0, 0.0, 1.0, 0.0)


def test_wrong_answers_announced_as_right_are_refused_and_blamed() -> None:
    judge = new_judge()
    assert refusal(judge, *offer_of(group_of(ALICE, rewards=(0.0, 0.0, 0.0)), (1.0, 1.0, 0.0))) == Reason.HINT
    assert refusal(judge, *offer_of(group_of(ALICE, 1, rewards=(1.0, 0.0, 0.0)), (1.0, 1.0, 0.0))) == Reason.HINT


def test_groups_that_are_to_be_replayed_are_refused_on_proof_and_else_weighed_with_what_was_found() -> None:
    groups = [offer_of(group_of(ALICE, index)) for index in range(4)]
    digests = [offer.digest for offer, _ in groups]
    found = {0: Replayed(tokens=30, missed=1), 1: Replayed(tokens=30, missed=20)}
    seen: list[int] = []

    def replay(group: JudgedGroup) -> Replayed:
        seen.append(group.task.ref.index)
        if group.task.ref.index == 2:
            raise RolloutError("no tokens", reason=Reason.MISLABELLED, peer=ALICE)
        return found[group.task.ref.index]

    judge = new_judge()
    judge.replay = replay
    judgements = judge.judge(groups, to_replay=digests[:3])
    assert seen == [0, 1, 2], "who trains is not gone through"
    assert [one.group is not None for one in judgements] == [True, False, False, True]
    assert judgements[0].verdict == Verdict(rewards=(1.0, 0.0, 1.0, 0.0), replayed=found[0])
    assert judgements[1].verdict == Verdict(refused=Reason.OTHER_POLICY, blamed=False, replayed=found[1])
    assert judgements[2].verdict == Verdict(refused=Reason.MISLABELLED)
    assert judgements[3].verdict.replayed is None


def test_a_group_that_is_refused_anyway_is_not_gone_through() -> None:
    judge = new_judge()
    judge.replay = lambda group: pytest.fail("it teaches nothing")
    lie = offer_of(group_of(BOB, rewards=(0.0, 0.0)), (1.0, 0.0))
    (one,) = judge.judge([lie], to_replay={lie[0].digest})
    assert one.verdict.refused is Reason.HINT


def test_rewards_that_do_not_vary_teach_nothing_and_are_no_fault() -> None:
    assert refusal(new_judge(), *offer_of(group_of(ALICE, rewards=(1.0, 1.0)))) == Reason.NO_VARIANCE
    assert Reason.NO_VARIANCE not in WEIGHTS


def test_chosen_seed_or_family_is_a_foreign_task() -> None:
    judge, group = new_judge(), group_of(ALICE)
    configs = (group_of(ALICE, index).task.config for index in range(1, 99))
    another_config = next(config for config in configs if config != group.task.config)
    for changed in (
        with_task(group, seed=group.task.seed ^ 1),
        with_task(group, index=1),
        with_task(group, family="other"),
        with_task(group, version="2"),
        with_task(group, config=b"\x80"),
        with_task(group, config=another_config),
        msgspec.structs.replace(group, round=1),
    ):
        assert refusal(judge, *offer_of(changed, (1.0, 0.0, 1.0, 0.0))) == Reason.FOREIGN_TASK


def test_task_beyond_what_a_round_comes_to_is_foreign() -> None:
    """Among 2^32 indices whoever wants a task that takes long to make finds one."""
    judge = new_judge()
    assert accepts(judge, *offer_of(group_of(ALICE, INDEX_LIMIT - 1)))
    assert refusal(judge, *offer_of(group_of(ALICE, INDEX_LIMIT))) == Reason.FOREIGN_TASK
    assert INDEX_LIMIT == 2 * (GROUPS_LIMIT + GROUPS_LIMIT) * OVER_PROVISION_LIMIT


def test_copy_of_anothers_group_is_never_worth_anything() -> None:
    judge, original = new_judge(), group_of(ALICE)
    assert accepts(judge, *offer_of(original))
    # The very bytes, announced as one's own; the same under one's own name; and under one's own task.
    assert refusal(judge, *offer_of(original, by=BOB)) == Reason.MISLABELLED
    renamed = msgspec.structs.replace(original, origin=BOB)
    assert refusal(judge, *offer_of(renamed)) == Reason.FOREIGN_TASK
    moved = group_of(BOB, 5, texts=original.completions)
    assert refusal(judge, *offer_of(moved, (1.0, 0.0, 1.0, 0.0))) == Reason.HINT


def test_long_texts_of_somebody_else_are_copies_even_where_they_are_right() -> None:
    """Two tasks with the same answer: short answers may coincide, a page of reasoning does not."""
    judge = Judge(swarm_id=SWARM, source=SOURCE, score=lambda pairs: [float("right" in text) for _, text in pairs])
    pages = [f"{'right' if at % 2 else 'wrong'}: " + f"{at} " * COPY_LEAST_BYTES for at in range(4)]
    rewards = (0.0, 1.0, 0.0, 1.0)
    assert accepts(judge, *offer_of(group_of(ALICE, texts=pages), rewards))
    assert accepts(judge, *offer_of(group_of(ALICE, 1, texts=pages), rewards))  # its own again
    assert refusal(judge, *offer_of(group_of(BOB, texts=[*pages[:3], "right, of my own"]), rewards)) == Reason.COPIED
    assert WEIGHTS[Reason.COPIED] == 1.0
    assert accepts(judge, *offer_of(group_of(BOB, 1, texts=["right", "wrong"]), (1.0, 0.0)))
    assert accepts(judge, *offer_of(group_of(ALICE, 2, texts=["right", "wrong"]), (1.0, 0.0)))


@pytest.mark.parametrize(("missed", "refused"), [(0, None), (1, None), (6, Reason.COPIED), (200, Reason.OTHER_POLICY)])
def test_who_drew_what_another_announced_first_has_copied_nobody(missed: int, refused: Reason | None) -> None:
    """What an honest one is going to draw can be foretold: a liar announced it, and is refused itself or not."""
    judge = by_length()
    judge.replay = lambda group: Replayed(tokens=400, missed=missed if group.origin == BOB else 0)
    assert accepts(judge, *offer_of(group_of(ALICE, texts=LONG_TEXTS), (1.0, 0.0)))
    verdict, _ = judged(judge, *offer_of(group_of(BOB, texts=LONG_TEXTS), (1.0, 0.0), order=10))
    assert verdict.refused == refused


def test_texts_of_a_refused_group_are_nobodys() -> None:
    judge = by_length()
    judge.replay = lambda group: Replayed(tokens=400, missed=200)
    offer = offer_of(group_of(ALICE, texts=LONG_TEXTS), (1.0, 0.0))
    (lie,) = judge.judge([offer], to_replay={offer[0].digest})
    assert lie.verdict.refused == Reason.OTHER_POLICY
    judge.replay = None
    assert accepts(judge, *offer_of(group_of(BOB, texts=LONG_TEXTS), (1.0, 0.0), order=10))


def test_group_that_there_is_no_memory_to_go_through_is_nobodys_fault_and_ends_no_judge() -> None:
    def replay(group: JudgedGroup) -> Replayed:
        raise RuntimeError("can't allocate memory")

    judge = new_judge()
    judge.replay = replay
    offer = offer_of(group_of(ALICE))
    (one,) = judge.judge([offer], to_replay={offer[0].digest})
    assert (one.group, one.verdict) == (None, Verdict(refused=Reason.UNSCORED, blamed=False))


LONG_TEXTS = ["a" * 101, "b" * 102]
SHORT_TEXTS = ["-", "no", "yes", "odd!", "fifth"]


def by_length() -> Judge:
    """A judge to whom texts of an odd length are right, whatever the task."""
    return Judge(swarm_id=SWARM, source=SOURCE, score=lambda pairs: [len(text) % 2 for _, text in pairs])


def test_copies_of_own_texts_are_known() -> None:
    judge = by_length()
    judge.note_own(SOURCE.draw(SWARM, BOB, 0, 0), LONG_TEXTS)
    assert refusal(judge, *offer_of(group_of(BOB, texts=LONG_TEXTS), (1.0, 0.0))) == Reason.COPIED


def test_group_is_a_copy_if_most_of_its_texts_are_different_ones_of_somebody_else() -> None:
    """Two models say one sentence, or repeat one token to the end, now and then."""
    judge = by_length()
    common = [letter * 101 for letter in "abcde"]
    assert accepts(judge, *offer_of(group_of(ALICE, texts=[*common, "--"]), (1.0,) * 5 + (0.0,)))
    offered = {
        (*SHORT_TEXTS[:2], common[0]): None,
        (*SHORT_TEXTS[:4], *common[:2]): None,
        (*SHORT_TEXTS[:3], *common[:3]): None,
        ("no", *common[:1] * 5): None,
        (*SHORT_TEXTS[:3], *common[:2] * 2): Reason.COPIED,
        (*SHORT_TEXTS, *common): None,
        (*SHORT_TEXTS[:4], *common): Reason.COPIED,
    }
    for index, (texts, refused) in enumerate(offered.items()):
        rewards = [len(text) % 2 for text in texts]
        verdict, _ = judged(judge, *offer_of(group_of(BOB, index, texts=texts), rewards))
        assert verdict.refused is refused, texts


def test_original_that_was_heard_first_is_no_copy_though_its_copy_was_judged_first() -> None:
    """Groups are judged in the order of a draw; nobody announces a copy of what was not announced."""
    judge = by_length()
    original, copy = group_of(ALICE, texts=LONG_TEXTS), group_of(BOB, texts=LONG_TEXTS)
    assert accepts(judge, *offer_of(copy, (1.0, 0.0), order=8))
    assert accepts(judge, *offer_of(original, (1.0, 0.0), order=7))
    assert accepts(judge, *offer_of(group_of(ALICE, 1, texts=LONG_TEXTS), (1.0, 0.0), order=9))
    assert refusal(judge, *offer_of(group_of(BOB, 1, texts=LONG_TEXTS), (1.0, 0.0), order=10)) == Reason.COPIED


def test_short_answers_of_somebody_else_are_worth_what_they_are_for_ones_own_task() -> None:
    judge, original = new_judge(), group_of(ALICE)
    assert accepts(judge, *offer_of(original))
    right, wrong = (
        next(
            index
            for index in range(1000)
            if (right_answer(SOURCE.draw(SWARM, BOB, 0, index)) in original.completions) is coincides
        )
        for coincides in (True, False)
    )
    verdict, one = judged(judge, *offer_of(group_of(BOB, right, texts=original.completions), (1.0, 0.0, 1.0, 0.0)))
    assert one is not None
    assert one.rewards == verdict.rewards == (1.0, 0.0, 1.0, 0.0)
    copy = group_of(BOB, wrong, texts=original.completions)
    assert refusal(judge, *offer_of(copy, (1.0, 0.0, 1.0, 0.0))) == Reason.HINT


def test_second_group_of_a_task_is_a_duplicate() -> None:
    judge = new_judge()
    offer, data = offer_of(group_of(ALICE))
    assert accepts(judge, offer, data)
    assert refusal(judge, offer, data) == Reason.DUPLICATE
    assert refusal(judge, *offer_of(group_of(ALICE, rewards=(1.0, 1.0, 0.0)))) == Reason.DUPLICATE


def test_memory_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "SEEN_LIMIT", 8)
    judge = new_judge()
    for index in range(40):
        assert accepts(judge, *offer_of(group_of(ALICE, index)))
    assert len(judge._seen._owners) == len(judge._texts._owners) + 8 == 8


def test_group_other_than_announced_is_refused() -> None:
    judge = new_judge()
    (offer, _), (_, other) = offer_of(group_of(ALICE)), offer_of(group_of(ALICE, 1))
    assert refusal(judge, offer, other) == Reason.FORGED
    relabelled = msgspec.structs.replace(offer.announcement, policy_version=99)
    plain = offer_of(group_of(ALICE, 2))
    assert refusal(judge, replace(offer, announcement=relabelled), offer_of(group_of(ALICE))[1]) == Reason.MISLABELLED
    assert accepts(judge, *plain)


class Unlocked(Sums):
    """A family that asks for a sandbox, which this machine does not have."""

    name = "unlocked"

    @property
    def peer_safe(self) -> bool:
        return False


def test_family_that_cannot_be_scored_safely_is_refused_by_name() -> None:
    source = TaskSource([TaskChoice(family=Unlocked(), config={"most": 9})])

    def never(pairs: object) -> list[float]:
        raise AssertionError("a peer's text was scored")

    judge = Judge(swarm_id=SWARM, source=source, score=never)
    task = source.draw(SWARM, ALICE, 0, 0)
    group = RolloutGroup(origin=ALICE, round=0, policy_version=0, task=task.ref, completions=("1", "2"))
    assert source.scorable == frozenset()
    assert refusal(judge, *first_right(group)) == Reason.UNSAFE_FAMILY


def first_right(group: RolloutGroup) -> tuple[Offer, bytes]:
    """An offer of the group with the first completion as the only right one."""
    return offer_of(group, [float(at == 0) for at in range(len(group.completions))])


class Broken(Sums):
    """A generator that fails for some seeds."""

    name = "broken"

    def question(self, config: object, seed: int, index: int) -> str:
        raise ZeroDivisionError("no question")


def test_generator_that_fails_is_an_unknown_task() -> None:
    source = TaskSource([TaskChoice(family=Broken(), config={"most": 9})])
    judge = Judge(swarm_id=SWARM, source=source, score=score)
    ref = source.table.assigned(SWARM, ALICE, 0, 0)
    group = RolloutGroup(origin=ALICE, round=0, policy_version=0, task=ref, completions=("1", "2"))
    assert refusal(judge, *first_right(group)) == Reason.UNKNOWN_TASK


class Slow(Sums):
    """A generator that does not come to an end for some seeds."""

    name = "slow"

    def question(self, config: Config, seed: int, index: int) -> str:
        if index:
            threading.Event().wait(5)
        return super().question(config, seed, index)


def test_task_that_takes_too_long_to_make_is_refused_as_one_that_is_not_scored_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge_module, "TASK_LIMIT_S", 0.05, raising=False)
    source = TaskSource([TaskChoice(family=Slow(), config={"most": 9})])
    judge = Judge(swarm_id=SWARM, source=source, score=lambda pairs: [float(text == "1") for _, text in pairs])

    def group(index: int) -> RolloutGroup:
        ref = source.table.assigned(SWARM, ALICE, 0, index)
        return RolloutGroup(origin=ALICE, round=0, policy_version=0, task=ref, completions=("1", "2"))

    found = judge.judge([first_right(group(1)), first_right(group(0))])
    assert [one.verdict for one in found] == [Verdict(refused=Reason.UNSCORED), Verdict(rewards=(1.0, 0.0))]


def test_a_text_that_is_not_scored_in_time_is_no_wrong_hint() -> None:
    def late(pairs: Sequence[tuple[Task, str]]) -> list[float | None]:
        return [*score(pairs)[:-1], None]

    judge = Judge(swarm_id=SWARM, source=SOURCE, score=late)
    assert refusal(judge, *offer_of(group_of(ALICE))) == Reason.UNSCORED
    assert 0 < WEIGHTS[Reason.UNSCORED] < 0.5 * WEIGHTS[Reason.HINT]  # not for nothing, since it costs time


def test_scorer_that_fails_is_nobodys_fault() -> None:
    def fail(pairs: object) -> list[float]:
        raise ConfigError("no scoring process starts; install one")

    judge = Judge(swarm_id=SWARM, source=SOURCE, score=fail)
    assert refusal(judge, *offer_of(group_of(ALICE)), blamed=False) == Reason.UNSCORED


def test_group_whose_scoring_does_not_begin_costs_its_maker_nothing_and_others_are_judged() -> None:
    def begin_later(pairs: Sequence[tuple[Task, str]]) -> list[float]:
        if pairs[0][0].ref.index == 0:
            raise NotBegun("its warm_up() took more than 15 s to begin")
        return score(pairs)

    judge = Judge(swarm_id=SWARM, source=SOURCE, score=begin_later)
    cold, warm = judge.judge([offer_of(group_of(ALICE, index)) for index in range(2)])
    assert cold.verdict == Verdict(refused=Reason.UNSCORED, blamed=False)
    assert warm.group is not None


@settings(derandomize=True)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=2, max_size=6),
    index=st.integers(0, 2**32 - 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    family=st.sampled_from(["sums", "other"]),
    config=st.none() | st.binary(max_size=20),
    cut=st.none() | st.integers(0, 200),
)
def test_nothing_that_a_peer_sends_raises(
    texts: list[str], index: int, seed: int | None, family: str, config: bytes | None, cut: int | None
) -> None:
    seed = assigned_seed(SWARM, ALICE, 0, index) if seed is None else seed
    config = SUMS.make({"most": 9}, 0, 0).ref.config if config is None else config
    ref = TaskRef(family=family, version="1", config=config, seed=seed, index=index)
    group = RolloutGroup(origin=ALICE, round=0, policy_version=0, task=ref, completions=tuple(texts))
    offer, whole = first_right(group)
    data = whole[:cut]
    announcement = msgspec.structs.replace(offer.announcement, digest=digest_of(data))
    verdict, one = judged(new_judge(), replace(offer, announcement=announcement), data)
    assert (one is None) == (verdict.refused is not None)
