"""Tasks of several turns: what an environment answers is made again by whoever scores, and the reward is of what was
said."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

import pytest

from shoal.node.sapo import dialogue
from shoal.node.sapo.dialogue import REPLY_LIMIT_CHARS, TURN, TURN_LIMIT, Dialogue, transcript, turns_in
from shoal.node.sapo.families import check_name, load_choices, load_family
from shoal.node.sapo.higher_lower import HigherLower
from shoal.node.sapo.judge import COPY_LEAST_BYTES, Judge
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Config, Task, TaskChoice, TaskSource
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import TaskEntry
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, RolloutGroup, announce_group, encode_group
from tests.node.sapo.offering import SWARM, peer_id

GAME = HigherLower()


def guessing(seed: int, **config: int) -> tuple[Task, int]:
    """A task, and the number that it hides, found from outside: the one guess that nothing is answered to."""
    task = GAME.make(config, seed, 0)
    lowest = int(task.question.split(" from ")[1].split()[0])
    (number,) = (
        guess
        for guess in range(lowest, lowest + config.get("numbers", 15))
        if config.get("turns", 4) > 1 and GAME.reply(task, (str(guess),)) is None
    )
    return task, number


def test_environment_answers_what_is_true_until_the_number_is_found_or_the_turns_are_over() -> None:
    for seed in range(40):
        task, number = guessing(seed)
        assert task.answering is not None
        assert task.answering([str(number - 1)]) == "higher"
        assert task.answering([str(number + 1)]) == "lower"
        assert task.answering(["what?"]) == "no number"
        assert task.answering([str(number - 1), str(number)]) is None
        assert task.answering([str(number - 1)] * 3) == "higher"
        assert task.answering([str(number - 1)] * 4) is None, "four turns"


def test_reward_is_for_who_finds_the_number_in_time() -> None:
    task, number = guessing(3)
    wrong = str(number + 1)
    assert GAME.score(task, str(number)) == 1.0
    assert GAME.score(task, wrong) == 0.0
    assert GAME.score(task, transcript([wrong, f"It is <answer> {number}</answer>"], ["lower"])) == 1.0
    assert GAME.score(task, transcript([wrong] * 4, ["lower"] * 3)) == 0.0


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(lambda wrong, right: transcript([wrong, right], ["higher"]), id="another answer"),
        pytest.param(lambda wrong, right: transcript([wrong, right], [""]), id="no answer"),
        pytest.param(lambda wrong, right: transcript([right, right], ["lower"]), id="an answer after the end"),
        pytest.param(lambda wrong, right: transcript([wrong] * 4 + [right], ["lower"] * 4), id="a fifth turn"),
        pytest.param(lambda wrong, right: transcript([right], []) + TURN + "lower", id="an answer that comes last"),
        pytest.param(lambda wrong, right: TURN.join([wrong] * 300 + [right]), id="parts without end"),
    ],
)
def test_transcript_whose_answers_are_not_the_environments_is_worth_nothing(forged) -> None:  # type: ignore[no-untyped-def]
    task, number = guessing(5)
    assert GAME.score(task, forged(str(number + 1), str(number))) == 0.0


def test_solution_is_a_transcript_that_earns_everything_wherever_the_turns_suffice() -> None:
    for seed, numbers in itertools.product(range(60), (2, 7, 15)):
        task, number = guessing(seed, numbers=numbers)
        solution = GAME.answer(task)
        assert solution is not None
        assert GAME.score(task, solution) == 1.0
        said, _ = turns_in(solution)
        assert said[-1] == str(number)
    lost = [seed for seed in range(60) if not GAME.score(task := guessing(seed, turns=2)[0], GAME.answer(task) or "")]
    assert 30 < len(lost) < 60, "three numbers of fifteen are found in two turns"


def test_transcripts_go_apart_into_what_made_them() -> None:
    for count in range(1, 6):
        said, replies = tuple("abcde"[:count]), tuple("vwxyz"[: count - 1])
        assert turns_in(transcript(said, replies)) == (said, replies)
    assert turns_in("") == (("",), ())


class Odd(Dialogue):
    """An environment that answers what `answers` has, whatever is said; calls what can be called."""

    name = "odd"
    version = "1"
    scoring = "direct"
    answers: Sequence[object] = ()
    says: object = "?"

    def question(self, config: Config, seed: int, index: int) -> str:
        return "?"

    def reply(self, task: Task, said: Sequence[str]) -> str | None:
        answer = self.answers[(len(said) - 1) % len(self.answers)]
        return answer() if callable(answer) else answer  # type: ignore[return-value]

    def outcome(self, task: Task, said: Sequence[str]) -> float:
        return 1 / len(said)

    def say(self, task: Task, said: Sequence[str]) -> str | None:
        return self.says  # type: ignore[return-value]


@pytest.mark.parametrize(
    "answer",
    [lambda: 1 / 0, 7, b"bytes", f"a{TURN}b", "x" * (REPLY_LIMIT_CHARS + 1), "\ud800", lambda: time.sleep(20)],
    ids=["raises", "a number", "bytes", "ends a turn", "too long", "no Unicode", "takes too long"],
)
def test_dialogue_ends_where_its_environment_gives_no_answer_and_the_log_has_it(
    answer: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogue, "TEXT_LIMIT_S", 0.2)
    monkeypatch.setattr(dialogue, "_told_at", {})
    family = Odd()
    family.answers = ["x" * REPLY_LIMIT_CHARS, answer]
    task = family.make({}, 0, 0)
    assert task.answering is not None
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "shoal.node.sapo.dialogue"):
        assert task.answering(["one"]) == "x" * REPLY_LIMIT_CHARS
        assert not caplog.records
        assert task.answering(["one", "two"]) is None
        assert task.answering(["one", "two"]) is None
    assert time.monotonic() - began < 15
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("reply() of family 'odd' "), "once a minute"


def test_dialogue_has_a_last_turn_whatever_its_environment_says() -> None:
    family = Odd()
    family.answers = ["on"]
    task = family.make({}, 0, 0)
    assert task.answering is not None
    assert task.answering(["?"] * (TURN_LIMIT - 1)) == "on"
    assert task.answering(["?"] * TURN_LIMIT) is None
    longest = transcript(["?"] * TURN_LIMIT, ["on"] * (TURN_LIMIT - 1))
    assert family.score(task, longest) == 1 / TURN_LIMIT
    assert family.solution(task) == longest
    assert family.score(task, longest + f"{TURN}on{TURN}?") == 0.0


@pytest.mark.parametrize("says", [7, f"a{TURN}b"])
def test_teacher_that_says_no_text_is_told_of(says: object) -> None:
    family = Odd()
    family.answers, family.says = ["on"], says
    with pytest.raises(ConfigError, match=r"say\(\) of family 'odd'"):
        family.answer(family.make({}, 0, 0))


def test_family_without_a_teacher_has_no_solution() -> None:
    family = Odd()
    family.answers, family.says = ["on"], None
    assert family.answer(family.make({}, 0, 0)) is None


def test_dialogue_comes_by_its_name_and_says_what_a_config_may_have() -> None:
    check_name("higher_lower")
    (choice,) = load_choices([TaskEntry(family="higher_lower", config={"numbers": 7, "turns": 3})])
    assert isinstance(choice.family, HigherLower)
    with pytest.raises(ConfigError, match="did you mean 'higher_lower'"):
        load_family("higher_lowr")
    wrong = ({"numbers": 1}, {"turns": 0}, {"turns": TURN_LIMIT + 1}, {"rounds": 3}, {"numbers": 15.0}, {"turns": True})
    for config in wrong:
        with pytest.raises(ConfigError, match="higher_lower"):
            TaskChoice(family=HigherLower(), config=config)


class Locked(HigherLower):
    """The same, scored where nothing but computing is possible."""

    name = "locked"
    scoring = "sandbox"


@pytest.mark.parametrize("family", [HigherLower(), Locked()], ids=lambda one: str(one.scoring))
def test_strangers_transcripts_are_scored_as_ones_own(family: HigherLower) -> None:
    source = TaskSource([TaskChoice(family=family, config="default")])
    with Scorer(source) as scorer:
        for seed in range(3):
            task = source.task(source.table.of_kind(source.table.kinds[0], seed=seed, index=0))
            right = family.answer(task)
            assert right is not None
            forged = right.replace("er", "est") if TURN in right else f"{right}{TURN}lower{TURN}{right}"
            assert scorer.score_each([(task, right), (task, forged), (task, "")]) == [1.0, 0.0, 0.0]


# --- from strangers ---

NUMBERS = TaskSource([TaskChoice(family=GAME, config="default")])
ALICE, BOB = peer_id(1), peer_id(2)


def offered(
    origin: PeerId, index: int, texts: Sequence[str], told: Sequence[float], order: int = 0
) -> tuple[Offer, bytes]:
    task = NUMBERS.draw(SWARM, origin, 0, index)
    group = RolloutGroup(origin=origin, round=0, policy_version=0, task=task.ref, completions=tuple(texts))
    data = encode_group(group)
    announcement = announce_group(group, data, tuple(told))
    offer = Offer(announcement=announcement, origin=origin, boot=1, sequence=1, arrived=0, order=order)
    return offer, data


def by_game() -> Judge:
    return Judge(swarm_id=SWARM, source=NUMBERS, score=lambda pairs: [GAME.score(task, text) for task, text in pairs])


def dialogues_of(origin: PeerId, index: int, said: Sequence[Sequence[str]]) -> tuple[list[str], list[float]]:
    """Transcripts in which the environment answers what it does, and what they are worth."""
    task = NUMBERS.draw(SWARM, origin, 0, index)
    texts = []
    for turns in said:
        replies = [GAME.reply(task, turns[: at + 1]) or "" for at in range(len(turns) - 1)]
        texts.append(transcript(turns, replies))
    return texts, [GAME.score(task, text) for text in texts]


def numbers_of(origin: PeerId, index: int) -> tuple[str, str]:
    """The number of a task, and one beside it."""
    task = NUMBERS.draw(SWARM, origin, 0, index)
    solution = GAME.answer(task)
    assert solution is not None
    number = turns_in(solution)[0][-1]
    return number, str(int(number) + 1)


def test_who_puts_words_into_the_environments_mouth_is_a_liar() -> None:
    number, wrong = numbers_of(ALICE, 0)
    honest, rewards = dialogues_of(ALICE, 0, [[wrong, number], [wrong, wrong], [number], [wrong]])
    assert rewards == [1.0, 0.0, 1.0, 0.0]
    (found,) = by_game().judge([offered(ALICE, 0, honest, rewards)])
    assert found.group is not None
    assert found.group.rewards == tuple(rewards)
    forged = [text.replace("lower", "higher") for text in honest]
    (found,) = by_game().judge([offered(ALICE, 0, forged, rewards)])
    assert found.verdict.refused is Reason.HINT


def test_copies_are_known_by_what_was_said_whatever_was_answered() -> None:
    index = next(at for at in range(20) if abs(int(numbers_of(ALICE, at)[0]) - int(numbers_of(BOB, at)[0])) > 1)
    between = (int(numbers_of(ALICE, index)[0]) + int(numbers_of(BOB, index)[0])) // 2
    said = [[f"{letter * 60} <answer>{between}</answer>", letter] for letter in "abcd"]
    judge = by_game()
    for origin, order, refused in ((ALICE, 0, None), (BOB, 1, Reason.COPIED)):
        number, _ = numbers_of(origin, index)
        own, rewards = dialogues_of(origin, index, [*said, [number]])
        (found,) = judge.judge([offered(origin, index, own, rewards, order)])
        assert found.verdict.refused is refused


@pytest.mark.parametrize("turns", [2, 4])
def test_short_guesses_are_nobodys_though_there_are_many(turns: int) -> None:
    judge = by_game()
    for origin, order in ((ALICE, 0), (BOB, 1)):
        number, _ = numbers_of(origin, 0)
        said = [[f"{letter * 20} {at}" for at in range(turns)] for letter in "abc"]
        own, rewards = dialogues_of(origin, 0, [*said, [number]])
        assert len(own[0]) >= COPY_LEAST_BYTES
        (found,) = judge.judge([offered(origin, 0, own, rewards, order)])
        assert found.group is not None
