"""Tasks of several turns: an environment answers what was said so far, and the reward comes at the end.

A dialogue travels as one text, its transcript: what was said and what was answered by turns, with `TURN` between them.
What the environment answers follows from the task and what was said alone, so whoever scores a transcript makes the
answers again, and one in which they stand otherwise is worth 0. A family of your own derives from `Dialogue`:

    class Twenty(Dialogue):
        name = "twenty"
        version = "1"
        scoring = "direct"

        def question(self, config, seed, index): ...
        def reply(self, task, said): ...      # what the environment answers to the newest of `said`; None at the end
        def outcome(self, task, said): ...    # the reward of all that was said, 0 to 1
        def say(self, task, said): ...        # optional: what is right to say next, for an untrained policy

`reply` and `outcome` evaluate nothing, since text of a policy reaches `reply` in the node itself.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeGuard

from shoal.node.sapo.sandbox import TEXT_LIMIT_S
from shoal.node.sapo.sandbox_process import Overdue, limited
from shoal.node.sapo.scorer_faults import PERIOD_S, line_in
from shoal.node.sapo.tasks import Config, Task, TaskFamily
from shoal.protocol.errors import ConfigError

TURN: Final = "\x1e"
"""Between the parts of a transcript: ASCII's record separator. What is said has none."""
TURN_LIMIT: Final = 64
"""Times that a policy says something in one dialogue."""
REPLY_LIMIT_CHARS: Final = 4096

_told_at: dict[str, float] = {}
"""By family, when a fault of its environment was told last."""

logger = logging.getLogger(__name__)


def as_said(text: str) -> str:
    """Return what the environment takes a policy's text for: without anything that ends a turn."""
    return text.replace(TURN, "")


def transcript(said: Sequence[str], replies: Sequence[str]) -> str:
    """Return one text of both by turns. replies: as many as `said`, or one less."""
    parts = [""] * (len(said) + len(replies))
    parts[::2], parts[1::2] = said, replies
    return TURN.join(parts)


def turns_in(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what was said and what was answered in a transcript, which may be a stranger's."""
    parts = text.split(TURN)
    return tuple(parts[::2]), tuple(parts[1::2])


def alternate(said: Sequence[str], replies: Sequence[str]) -> bool:
    """Return whether these are the parts of a transcript: something said comes first and last, and not too often."""
    return len(replies) < len(said) <= TURN_LIMIT


class Dialogue(TaskFamily):
    """Tasks of one kind in which an environment answers. See `TaskFamily` for the rest."""

    scored_by = "outcome"

    @abstractmethod
    def reply(self, task: Task, said: Sequence[str]) -> str | None:
        """Return the environment's answer to the newest of `said`: the same for the same; None where it is over.

        What it raises ends the dialogue, and so does an answer that takes more than `TEXT_LIMIT_S`; whoever scores the
        dialogue makes all of its answers within that time.
        """

    @abstractmethod
    def outcome(self, task: Task, said: Sequence[str]) -> float:
        """The reward of all that was said, in [0, 1], also where it was cut off. What it raises counts as 0."""

    def say(self, task: Task, said: Sequence[str]) -> str | None:
        """Return what is right to say after `said`, which an untrained policy is taught; None where none is known."""
        return None

    def score(self, task: Task, text: str) -> float:
        """The outcome of a transcript; 0 if the environment answers otherwise than it says."""
        said, replies = turns_in(text)
        if not alternate(said, replies):
            return 0.0
        if any(self.reply(task, said[: at + 1]) != reply for at, reply in enumerate(replies)):
            return 0.0
        return self.outcome(task, said)

    def solution(self, task: Task) -> str | None:
        """The transcript of what `say` says."""
        said: list[str] = []
        replies: list[str] = []
        while (text := self.say(task, tuple(said))) is not None:
            if not isinstance(text, str) or TURN in text:
                raise ConfigError(f"say() of family {self.name!r} returned what is no text of one turn; correct it")
            said.append(text)
            reply = self.answered(task, said)
            if reply is None:
                return transcript(said, replies)
            replies.append(reply)
        return None

    def warm_up(self, task: Task) -> None:
        """See `TaskFamily`."""
        for warm in (self.reply, self.outcome):
            with suppress(Exception):  # what it raises for no word at all does not matter
                warm(task, ("",))

    def make(self, config: Config, seed: int, index: int) -> Task:
        """See `TaskFamily`: a task that answers."""
        task = super().make(config, seed, index)
        return replace(task, answering=partial(self.answered, task))

    def answered(self, task: Task, said: Sequence[str]) -> str | None:
        """Return what `reply` does; None, and a word to the log, where that is no answer, or takes too long."""
        if len(said) >= TURN_LIMIT:
            return None
        try:
            with limited(TEXT_LIMIT_S):
                reply: object = self.reply(task, tuple(said))
            if reply is None or _is_answer(reply):
                return reply
            what = "returned what is no answer"
        except Overdue:
            what = f"took more than {TEXT_LIMIT_S:g} s"
        except Exception as error:  # a user's family may raise anything; what it says may have the text in it
            code = type(self).reply.__code__
            line = line_in(code.co_filename, error.__traceback__)
            what = f"raised {type(error).__name__} at {code.co_filename}, line {line}"
        now = time.monotonic()
        if now - _told_at.get(self.name, -math.inf) >= PERIOD_S:
            _told_at[self.name] = now
            logger.error(
                "reply() of family %r %s: its dialogue ends there; correct it, to return None or a text of at most %d "
                "characters",
                self.name,
                what,
                REPLY_LIMIT_CHARS,
            )
        return None


def _is_answer(reply: object) -> TypeGuard[str]:
    if not isinstance(reply, str) or TURN in reply or len(reply) > REPLY_LIMIT_CHARS:
        return False
    return reply.isascii() or not any("\ud800" <= char <= "\udfff" for char in reply)
