"""Families for tests of the sandbox. The first does what no scorer may: it executes the text."""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

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

    def score(self, task: Task, text: str) -> float:
        Path(str(task.config["begun"])).touch()
        while True:
            time.sleep(60)
