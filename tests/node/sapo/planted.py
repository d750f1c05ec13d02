"""Answers that attack whoever evaluates them, and a check that nothing came of one."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Task


@dataclass
class Trap:
    """A folder in which nothing may appear, and a port to which nobody may connect."""

    folder: Path
    server: socket.socket
    payloads: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        host, port = self.server.getsockname()
        made = str(self.folder / "made")
        garbage = random.Random(7).randbytes(8192).decode("latin-1")
        system = f"__import__('os').system('touch {made}')"
        subclasses = "().__class__.__base__.__subclasses__()"
        self.payloads = {
            "open": f"open({made!r}, 'w').close()",
            "open in a list": f"[open({made!r}, 'w').close()]",
            "system": system,
            "system in a matrix": f"[[{system}]]",
            "system in a formula": f"x + {system}",
            "class": f"[c for c in {subclasses} if c.__name__ == 'Popen'][0](['touch', {made!r}])",
            "builtins": f"[c for c in {subclasses} if '_wrap_close' in c.__name__][0].__init__.__globals__"
            f"['system']('touch {made}')",
            "symbol": f"Symbol('x').__class__.__mro__[-1].__subclasses__() and {system}",
            "connection": f"__import__('socket').create_connection(({host!r}, {port}))",
            "exponents": "9**9**9",
            "exponents in a list": "[9**9**9]",
            "formula": "x**x**x**x + integrate(exp(x**x), x) + factorial(10**9)",
            "brackets": "(" * 8000,
            "lists": "[" * 8000 + "]" * 100,
            "signs": "-" * 8000 + "1",
            "null": "\0\0" + system + "\0",
            "surrogate": "\ud800" + system,
            "garbage": garbage,
            "long": "1," * 16_000,
            "regular": "a" * 4000 + "!" * 4000,
            "empty": "<answer></answer>",
        }

    def nothing_happened(self) -> bool:
        """Whether the folder is empty and no connection arrived."""
        try:
            self.server.accept()
        except BlockingIOError:
            return not list(self.folder.iterdir())
        return False


@contextmanager
def trap(folder: Path) -> Iterator[Trap]:
    """A trap in an empty folder."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield Trap(folder, server)


def plant(scorer: Scorer, task: Task, trap: Trap, text_limit_s: float) -> tuple[float, list[str]]:
    """Score every payload; the highest reward, and what is wrong."""
    began = time.monotonic()
    spoiled = scorer.spoiled
    rewards = scorer.score_each([(task, text) for text in trap.payloads.values()])
    took_s = time.monotonic() - began
    wrong = []
    if not trap.nothing_happened():
        wrong.append(f"{task.ref.family}: a planted answer had an effect")
    if any(not 0.0 <= reward <= 1.0 for reward in rewards):
        wrong.append(f"{task.ref.family}: rewards {rewards}")
    if took_s > (scorer.spoiled - spoiled + 1) * (text_limit_s + 1.0) + 60.0:
        wrong.append(f"{task.ref.family}: {took_s:.1f} s")
    return max(rewards), wrong
