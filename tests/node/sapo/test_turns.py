"""Dialogues in a policy's tokens: what it drew is learnt, and held to it; what its environment said is neither."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.node.sapo.char_policy import ALPHABET, ASK, END, CharModelSettings, CharPolicy
from shoal.node.sapo.dialogue import TURN, TURN_LIMIT, Dialogue, transcript, turns_in
from shoal.node.sapo.generation import GeneratedGroup, GroupGenerator
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.higher_lower import HigherLower
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings
from shoal.node.sapo.past_policies import PastPolicies
from shoal.node.sapo.policy import Rollout, drawn_mask, module_of
from shoal.node.sapo.replay import Replayer
from shoal.node.sapo.tasks import Config, Task
from shoal.node.sapo.turns import begun, context_of, encoded, extend_dialogues, given_in, text_of
from shoal.node.sapo.unfinished import UnfinishedFile
from shoal.node.sapo.updates import Updater, UpdateSettings, external_rows, own_rows
from shoal.node.sapo.warm_up import Lesson, teach
from shoal.node.training.flat_parameters import FlatParameters
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import Drawn, Reason, RolloutError, Sampling, assigned_draws
from shoal.protocol.wire import SwarmId
from tests.node.sapo.draws import assigned

LIMIT = 40
SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=12, completion_tokens=LIMIT, alphabet="ab ok")
SWARM = SwarmId(bytes(range(32)))
ORIGIN = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")


class Counting(Dialogue):
    """Answers how much was said, three times at most; the more of it is `a`, the better."""

    name = "counting"
    version = "1"
    scoring = "direct"

    def question(self, config: Config, seed: int, index: int) -> str:
        return f"{seed}/{index}"

    def reply(self, task: Task, said: Sequence[str]) -> str | None:
        return "ok" * (1 + sum(map(len, said)) % 3) if len(said) < 4 else None

    def outcome(self, task: Task, said: Sequence[str]) -> float:
        text = "".join(said)
        return text.count("a") / max(1, len(text))


COUNTING = Counting()


def task_of(round: int, index: int) -> Task:
    return COUNTING.make({}, round, index)


def score(pairs: Sequence[tuple[Task, str]]) -> list[float]:
    return [COUNTING.score(task, text) for task, text in pairs]


def new_policy(seed: int = 1, *, settings: CharModelSettings = SETTINGS) -> CharPolicy:
    """One that ends turns soon, and often enough goes on to the limit."""
    policy = CharPolicy(settings, seed=seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return policy


def drawn_dialogues(policy: CharPolicy, count: int = 40) -> list[tuple[Task, Rollout]]:
    dialogues = [(task_of(0, at), begun(policy, task_of(0, at))) for at in range(count)]
    for at, (_, rollout) in enumerate(dialogues):
        rollout.draws = assigned(1)(0, at, 0)
    drawn = extend_dialogues(policy, dialogues, version=7)
    assert drawn == sum(rollout.sample.drawn for _, rollout in dialogues)
    return dialogues


def test_environment_is_asked_after_each_turn_and_its_words_come_into_the_completion() -> None:
    policy = new_policy()
    dialogues = drawn_dialogues(policy)
    lengths = set()
    for task, rollout in dialogues:
        assert rollout.done
        assert not rollout.open
        assert len(rollout.tokens) == len(rollout.log_probs) == sum(count for _, count in rollout.versions) <= LIMIT
        said, replies = turns_in(text_of(policy, task, rollout))
        lengths.add(len(said))
        assert len(rollout.given) == len(rollout.replies) == len(replies) == len(said) - 1
        for number, (start, stop) in enumerate(rollout.given):
            assert replies[number] == rollout.replies[number] == COUNTING.reply(task, said[: number + 1])
            assert tuple(rollout.tokens[start:stop]) == policy.encode_reply(replies[number])
            assert rollout.tokens[start - 1] == END
            assert rollout.tokens[stop - 1] == ASK
            assert not any(rollout.log_probs[start:stop])
        assert len(rollout.tokens) == LIMIT or rollout.tokens[-1] == END
        ended = rollout.tokens[-1] == END and len(rollout.tokens) < LIMIT
        if ended and (reply := COUNTING.reply(task, said)) is not None:
            assert len(rollout.tokens) + len(policy.encode_reply(reply)) >= LIMIT, "there was no room for more"
    assert lengths == {2, 3, 4}


def test_each_turn_is_drawn_by_the_policy_after_all_that_came_before() -> None:
    policy = new_policy()
    dialogues = drawn_dialogues(policy)
    found = policy.log_probs([rollout.sample for _, rollout in dialogues]).detach()
    spans = policy.drawn_by([rollout.sample for _, rollout in dialogues])
    mask = drawn_mask([rollout.sample for _, rollout in dialogues])
    for at, (_, rollout) in enumerate(dialogues):
        length = len(rollout.tokens)
        assert torch.allclose(found[at, :length], torch.tensor(rollout.log_probs), atol=1e-4)
        assert not found[at, length:].any()
        numbers = torch.tensor([assigned(1)(0, at, 0)(place) for place in range(length)], dtype=torch.float64)
        inside = (spans[at, :length, 0] - 1e-5 <= numbers) & (numbers < spans[at, :length, 1] + 1e-5)
        assert bool(inside[mask[at, :length]].all())


def test_what_would_end_a_turn_is_no_part_of_what_is_said() -> None:
    policy = new_policy(settings=replace(SETTINGS, alphabet="ab ok" + TURN))
    texts = [text_of(policy, task, rollout) for task, rollout in drawn_dialogues(policy)]
    raw = [policy.decode(rollout.tokens) for _, rollout in drawn_dialogues(policy)]
    assert sum(TURN in text for text in raw) > 5, "the policy writes some"
    rewards = score([(task_of(0, at), text) for at, text in enumerate(texts)])
    said = ["".join(turns_in(text)[0]) for text in texts]
    assert rewards == [one.count("a") / max(1, len(one)) for one in said], "none is taken for forged"


def test_another_reads_the_transcript_into_the_tokens_that_were_drawn() -> None:
    policy = new_policy()
    for task, rollout in drawn_dialogues(policy):
        assert encoded(policy, task, text_of(policy, task, rollout)) == rollout.sample


def test_what_comes_next_is_asked_after_all_that_was_said() -> None:
    policy = new_policy()
    task = task_of(0, 1)
    whole = encoded(policy, task, transcript(["ab", "b", "a"], ["okok", "ok"]))
    assert whole is not None
    context = context_of(policy, task, ["ab", "b"], ["okok", "ok"])
    assert context is not None
    last = policy.encode_completion("a")
    assert last is not None
    assert context + last == whole.prompt + whole.completion
    assert context_of(policy, task, ["é"], ["ok"]) is None


@pytest.mark.parametrize(
    "text",
    [f"a{TURN}ok", "", f"é{TURN}ok{TURN}a", TURN * 2 * TURN_LIMIT, TURN * 2 * (TURN_LIMIT - 1)],
    ids=["ends with an answer", "nothing", "é", "too many turns", "many turns"],
)
def test_transcripts_that_are_none_have_no_tokens(text: str) -> None:
    found = encoded(new_policy(), task_of(0, 0), text)
    assert (found is None) is (text not in ("", TURN * 2 * (TURN_LIMIT - 1)))


def test_long_transcript_is_cut_at_the_limit_in_the_midst_of_an_answer_too() -> None:
    policy = new_policy()
    for length in range(LIMIT - 6, LIMIT + 2):
        found = encoded(policy, task_of(0, 0), transcript(["a" * length, "b"], ["okok"]))
        assert found is not None
        assert len(found.completion) <= LIMIT
        assert all(start < stop <= len(found.completion) for start, stop in found.given)
        room = LIMIT - (length + 1) - len("okok?")  # behind a turn, its end, and what was answered
        assert found.drawn == min(length + 1, LIMIT) + min(max(room, 0), len("b?"))


# --- learning ---


def judged(policy: CharPolicy, group: GeneratedGroup, *, origin: PeerId | None = None) -> JudgedGroup:
    texts = tuple(text_of(policy, group.task, one) for one in group.rollouts)
    return JudgedGroup(
        task=group.task,
        texts=texts,
        rewards=tuple(score([(group.task, text) for text in texts])),
        origin=origin,
        round=group.round,
        policy_version=group.version,
        sampling=group.sampling("char-policy"),
    )


def drawn_groups(policy: CharPolicy, count: int = 6, *, size: int = 4) -> list[GeneratedGroup]:
    made = GroupGenerator(policy, group_size=size, draws=partial(assigned_draws, SWARM, ORIGIN))
    tasks = (task_of(3, at) for at in range(count))
    return list(made.collect(count, lambda: next(tasks), round=3, version=7).groups)


def test_update_is_that_of_the_drawn_tokens_alone() -> None:
    """By the formula, token by token: ratios are 1, so the gradient is that of advantage × log-probability."""
    policy, plain = new_policy(), new_policy()
    groups = drawn_groups(policy)
    rows = [row for group in groups for row in own_rows(group, judged(policy, group).rewards)]
    assert any(row.sample.given for row in rows)
    Updater(policy, UpdateSettings(gradient_limit=1e9)).train(rows)
    loss, tokens = torch.zeros(()), 0
    for row in rows:
        logs = plain.log_probs([row.sample])[0]
        given = {place for start, stop in row.sample.given for place in range(start, stop)}
        drawn = [place for place in range(len(row.sample.completion)) if place not in given]
        tokens += len(drawn)
        loss = loss - row.advantage * logs[drawn].sum()
    (loss / tokens).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(policy.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("terms", ["positive", "tis"])
def test_other_learns_from_a_transcript_as_from_its_own(terms: str) -> None:
    policy = new_policy()
    group = next(one for one in drawn_groups(policy) if any(each.given for each in one.rollouts))
    rows = external_rows(judged(policy, group, origin=ORIGIN), policy)
    assert rows is not None
    assert [row.sample for row in rows] == [one.sample for one in group.rollouts]
    assert [row.drawn for row in rows] == [Drawn.of(one.log_probs, one.tokens).values() for one in group.rollouts], (
        "labels are those of its tokens"
    )
    before = [parameter.clone() for parameter in policy.parameters()]
    update = Updater(policy, UpdateSettings(terms=terms)).train(rows)  # type: ignore[arg-type]
    assert update is not None
    assert np.isfinite(update.gradient_norm)
    assert any(not torch.equal(one, other) for one, other in zip(before, policy.parameters(), strict=True))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in policy.parameters())


def test_groups_of_dialogues_go_on_after_a_restart(tmp_path: Path) -> None:
    policy = new_policy()
    over = GroupGenerator(policy, group_size=3, draws=assigned(1), over_provision=4.0)
    tasks = (task_of(1, at) for at in range(100))
    over.collect(2, lambda: next(tasks), round=1, version=4)
    under_way = over.under_way
    assert any(one.given for group in under_way for one in group.rollouts if not one.done)
    file = UnfinishedFile(folder=tmp_path, policy="p")
    file.save(under_way)
    again = GroupGenerator(policy, group_size=3, draws=assigned(1), over_provision=1.0)
    again.go_on_with(file.restore(policy, task_of))
    wanted = over.collect(6, lambda: next(tasks), round=2, version=5)
    found = again.collect(6, lambda: next(tasks), round=2, version=5)
    assert [_all_of(policy, group) for group in found.groups] == [_all_of(policy, group) for group in wanted.groups]
    for group in found.groups:
        for rollout in group.rollouts:
            said, _ = turns_in(text_of(policy, group.task, rollout))
            reply = COUNTING.reply(group.task, said)
            assert reply is None or len(rollout.tokens) + len(policy.encode_reply(reply)) >= LIMIT, "it is over"


def _all_of(policy: CharPolicy, group: GeneratedGroup) -> tuple[list[str], list[object]]:
    texts = [text_of(policy, group.task, one) for one in group.rollouts]
    return texts, [(one.tokens, one.given, one.versions, one.done, one.open) for one in group.rollouts]


def test_policy_learns_from_dialogues_what_they_reward() -> None:
    policy = new_policy()
    learner = Learner(
        policy,
        LearnerSettings(local=6, group_size=8, updates=UpdateSettings(learning_rate=2e-2)),
        draw=task_of,
        score=score,
        sharing=Alone(),
        draws=assigned(1),
    )
    reports = [learner.run_round() for _ in range(25)]
    rewards = [report.reward for report in reports if report.reward is not None]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    assert all(0 < report.entropy < math.log(6) for report in reports if report.entropy is not None)


def test_label_that_leaves_out_what_the_environment_said_last_is_no_label() -> None:
    """A stranger's: the answer fills the limit, so that of the tokens that count none would be left."""
    policy = new_policy()
    task = task_of(0, 0)
    filling = transcript(["a" * (LIMIT - 5), "a"], ["okok"])
    sample = encoded(policy, task, filling)
    assert sample is not None
    assert sample.given == ((LIMIT - 4, LIMIT),)
    short = transcript(["", "a"], ["o" * LIMIT])
    for text in (filling, short):
        whole = encoded(policy, task, text)
        assert whole is not None
        assert whole.drawn > 0
        tokens = whole.completion[:-1]
        labelled = JudgedGroup(
            task=task,
            texts=(text, "b"),
            rewards=(1.0, 0.0),
            origin=ORIGIN,
            round=0,
            policy_version=0,
            sampling=Sampling(policy="p", drawn=(Drawn.of([-0.5] * len(tokens), tokens), Drawn.of([-0.5], [7]))),
        )
        rows = external_rows(labelled, policy)
        assert rows is not None
        assert rows[0].drawn is None
        assert rows[0].sample == whole
        update = Updater(policy, UpdateSettings()).train(rows[:1])
        assert update is not None
        assert np.isfinite(update.clipped)


# --- is it the policy? ---


def side(seed: int = 1) -> tuple[CharPolicy, PastPolicies]:
    policy = new_policy(seed)
    flat = FlatParameters(module_of(policy), frozen=False)
    past = PastPolicies(lambda: flat)
    past.note(7, flat.gather(flat.new_vector()).numpy())
    return policy, past


def replayer(policy: CharPolicy, past: PastPolicies) -> Replayer:
    return Replayer(policy, past, swarm_id=SWARM, chance=random.Random(1))


def of_image(policy: CharPolicy, past: PastPolicies) -> list[JudgedGroup]:
    with past.standing_on(7):
        return [judged(policy, group, origin=ORIGIN) for group in drawn_groups(policy)]


def test_dialogues_that_the_policy_drew_are_found_to_be_its_own() -> None:
    found = [replayer(*side()).replay(group) for group in of_image(*side())]
    assert sum(one.tokens for one in found) > 100
    assert [one.missed for one in found] == [0] * len(found)


def test_dialogues_of_another_policy_are_found_out() -> None:
    found = [replayer(*side()).replay(group) for group in of_image(*side(seed=2))]
    assert sum(one.missed for one in found) > 0.2 * sum(one.tokens for one in found)


@pytest.mark.parametrize("other", ["ko", ""], ids=["of the same length", "shorter"])
def test_tokens_that_say_another_answer_than_the_transcript_are_mislabelled(other: str) -> None:
    policy, past = side()
    groups = [group for group in of_image(policy, past) if all(TURN in text for text in group.texts)]
    assert groups
    for group in groups:
        texts = tuple(text.replace(f"{TURN}ok", f"{TURN}{other}", 1) for text in group.texts)
        with pytest.raises(RolloutError) as caught:
            replayer(policy, past).replay(replace(group, texts=texts))
        assert caught.value.reason is Reason.MISLABELLED


def _cut(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens[:-1]


def _without_end(tokens: tuple[int, ...]) -> tuple[int, ...]:
    at = tokens.index(END)
    return tokens[:at] + tokens[at + 1 :]


def _unasked(tokens: tuple[int, ...]) -> tuple[int, ...]:
    at = tokens.index(ASK)
    return tokens[:at] + tokens[at + 1 :]


@pytest.mark.parametrize("change", [_cut, _without_end, _unasked, lambda tokens: ()])
def test_tokens_that_are_no_whole_dialogue_are_told_from_one(
    change: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> None:
    policy = new_policy()
    checked = 0
    for task, rollout in drawn_dialogues(policy):
        text, tokens = text_of(policy, task, rollout), tuple(rollout.tokens)
        assert given_in(policy, task, text, tokens, end=END) == tuple(rollout.given)
        if rollout.given and tokens[-1] == END and len(tokens) < LIMIT:
            assert given_in(policy, task, text, change(tokens), end=END) is None
            checked += 1
    assert checked > 5


def test_teaching_a_dialogue_makes_its_turns_likelier_and_not_its_answers() -> None:
    family = HigherLower()
    policy = CharPolicy(replace(SETTINGS, alphabet=ALPHABET), seed=3)
    task = family.make({}, 4, 0)
    answer = family.answer(task)
    assert answer is not None
    sample = encoded(policy, task, answer)
    assert sample is not None
    before = float(policy.log_probs([sample]).detach().sum())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for _ in range(5):
        teach(policy, [Lesson(task=task, answer=answer)], step=optimizer.step)
    assert float(policy.log_probs([sample]).detach().sum()) > before + 1
    assert all(bool(torch.isfinite(parameter).all()) for parameter in policy.parameters())
