"""Families for tests of the sandbox. The first does what no scorer may: it executes the text."""

from __future__ import annotations

import ast
import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.node.sapo.dialogue import Dialogue
from shoal.node.sapo.tasks import Config, Task, TaskFamily, check_options


class Executes(TaskFamily):
    """Runs the text as a program; the reward is what it leaves in `reward`."""

    name = "executes"
    version = "1"
    executes_text = True

    def check(self, config: Config) -> None:
        check_options(self.name, config, {"kind": range(10)})

    def question(self, config: Config, seed: int, index: int) -> str:
        return f"Say 1 for {seed}/{index}"

    def score(self, task: Task, text: str) -> float:
        names = {"reward": 0.0}
        exec(text, names)
        return names["reward"]


class Returns(Executes):
    """Returns the text as a number."""

    name = "returns"
    executes_text = False
    scoring = "direct"

    def score(self, task: Task, text: str) -> float:
        return float(text)

    def solution(self, task: Task) -> str | None:
        return "1"


class Stalls(Returns):
    """Returns the text as a number, and where it is none takes long, in the way that it names."""

    name = "stalls"
    WAYS = ("computes", "sleeps", "matches", "catches")
    LONG_S = 20.0

    def score(self, task: Task, text: str) -> float:
        ends_at = time.monotonic() + self.LONG_S
        if text == "matches":  # in C, which holds Python's lock
            re.match("(a+)+$", 30 * "a" + "!")
        if text == "sleeps":
            threading.Event().wait(self.LONG_S)
        while text == "computes" and time.monotonic() < ends_at:
            pass
        if text == "catches":
            with suppress(BaseException):
                threading.Event().wait(self.LONG_S)
            threading.Event().wait(self.LONG_S)
        return float(text)


class ReturnsInSandbox(Returns):
    """The same, where peers' texts are scored."""

    name = "returns-in-sandbox"
    scoring = "sandbox"


class ExecutesUnsaid(Executes):
    """Says nothing of executing what is no number in Python's notation."""

    name = "executes-unsaid"
    executes_text = False

    def score(self, task: Task, text: str) -> float:
        try:
            return float(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return super().score(task, text)


class ImportsLate(Executes):
    """Imports a module when it scores, as libraries do."""

    name = "imports-late"
    executes_text = False

    def score(self, task: Task, text: str) -> float:
        import colorsys

        return colorsys.rgb_to_hsv(0.5, 0.5, 0.5)[2]


class WarmsUp(Executes):
    """Warms up until the file `ready` of its config is there, or catches that this takes too long; else it raises."""

    name = "warms-up"
    executes_text = False
    warm = False

    def check(self, config: Config) -> None:
        """Takes any."""

    def warm_up(self, task: Task) -> None:
        with suppress(*[BaseException] * bool(task.config["catches"])):
            while not Path(str(task.config["ready"])).exists():
                pass
            self.warm = True

    def score(self, task: Task, text: str) -> float:
        if not self.warm:
            raise ImportError
        return float(text)


class Unmakeable(Executes):
    """Cannot make its task where it is scored, though it can here."""

    name = "unmakeable"
    executes_text = False

    def question(self, config: Config, seed: int, index: int) -> str:
        if "pytest" not in sys.modules:
            raise RuntimeError("no data file")
        return super().question(config, seed, index)


class Hangs(Executes):
    """Never answers, from the first time on that it is asked; the file `begun` of its config says that it is asked."""

    name = "hangs"
    executes_text = False

    def check(self, config: Config) -> None:
        """Takes any."""

    def score(self, task: Task, text: str) -> float:
        with suppress(OSError):  # where there are no files it is asked as well
            Path(str(task.config["begun"])).touch()
        while True:
            with suppress(OSError):  # a locked process may not even sleep
                time.sleep(60)


class AnswersLate(Dialogue):
    """An environment that imports what it answers with when it is first asked, and knows no right word."""

    name = "answers-late"
    version = "1"

    def question(self, config: Config, seed: int, index: int) -> str:
        return "Say something"

    def reply(self, task: Task, said: Sequence[str]) -> str | None:
        import colorsys  # of what nothing else imports

        return str(colorsys.rgb_to_hsv(0, 0, 1)[2]) if len(said) < 2 else None

    def outcome(self, task: Task, said: Sequence[str]) -> float:
        import wave  # another of that kind

        return len(said) / 2 + 0 * len(wave.__all__)
