"""A dialogue that comes with Shoal: guess a number in a few turns, told each time whether it is higher or lower."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from shoal.node.sapo.dialogue import TURN_LIMIT, Dialogue
from shoal.node.sapo.tasks import Config, Task, answer_in, check_options

FIRST_BELOW = 80
"""The least number of a task is below it."""
DIGITS = 9
"""Of a guess: what is longer is no number."""


class _Secret(NamedTuple):
    """The number, and those among which it is."""

    number: int
    lowest: int
    highest: int


class HigherLower(Dialogue):
    """Guess a number among `numbers` within `turns` guesses: the reward is 1 where it was found."""

    name = "higher_lower"
    version = "1"
    scoring = "direct"

    def check(self, config: Config) -> None:
        """See `TaskFamily`."""
        check_options(self.name, config, {"numbers": range(2, 10_001), "turns": range(1, TURN_LIMIT + 1)})

    def question(self, config: Config, seed: int, index: int) -> str:
        """See `TaskFamily`."""
        secret = _secret(config, seed, index)
        return f"Guess a number from {secret.lowest} to {secret.highest}, in {config.get('turns', 4)} turns. "

    def reply(self, task: Task, said: Sequence[str]) -> str | None:
        """See `Dialogue`."""
        secret = _secret_of(task)
        guess = _number(said[-1])
        if guess == secret.number or len(said) >= _turns(task):
            return None
        if guess is None:
            return "no number"
        return "higher" if secret.number > guess else "lower"

    def outcome(self, task: Task, said: Sequence[str]) -> float:
        """See `Dialogue`: what is said after the last turn does not count."""
        secret = _secret_of(task)
        return float(any(_number(text) == secret.number for text in said[: _turns(task)]))

    def say(self, task: Task, said: Sequence[str]) -> str | None:
        """The middle of what the number may still be."""
        secret = _secret_of(task)
        lowest, highest = secret.lowest, secret.highest
        for guess in map(_number, said):
            if guess is not None and guess < secret.number:
                lowest = max(lowest, guess + 1)
            elif guess is not None:
                highest = min(highest, guess - 1)
        return str((lowest + highest) // 2)


def _turns(task: Task) -> int:
    turns = task.config.get("turns", 4)
    assert isinstance(turns, int)
    return turns


def _secret_of(task: Task) -> _Secret:
    return _secret(task.config, task.ref.seed, task.ref.index)


def _secret(config: Config, seed: int, index: int) -> _Secret:
    numbers = config.get("numbers", 15)
    assert isinstance(numbers, int)
    chance = random.Random(f"{seed}/{index}")
    lowest = chance.randrange(FIRST_BELOW)
    return _Secret(lowest + chance.randrange(numbers), lowest, lowest + numbers - 1)


def _number(text: str) -> int | None:
    guess = answer_in(text)
    return int(guess) if len(guess) <= DIGITS and guess.isascii() and guess.isdigit() else None
