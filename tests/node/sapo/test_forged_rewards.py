"""Texts that try to set a reward, in every family that is offered and in one that executes what it is given."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.node.sapo.families import load_choices
from shoal.node.sapo.gym_families import OFFERED
from shoal.node.sapo.sandbox_support import missing_sandbox
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Task, TaskChoice, TaskSource
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest_rollouts import TaskEntry
from tests.node.sapo.hostile_family import Executes, ExecutesUnsaid

pytestmark = [
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra shoal[rl] is not installed"),
    pytest.mark.skipif(missing_sandbox() is not None, reason=f"no sandbox: {missing_sandbox()}"),
]

ROOT = Path(__file__).resolve().parents[3]
WORTHLESS = 0.1
"""What scorers give to any text that is no answer, at most."""
LENIENT = {"spell_backward": 0.4}
"""It counts letters that are right by chance."""

_OS, _LIBC = "__import__('os')", "__import__('ctypes').CDLL(None)"
_ONES = "__import__('struct').pack('<dI', 1.0, 0) * 64"
_REPLY = "__import__('shoal.node.sapo.sandbox_process', fromlist=['x'])"
_FRAME = f"[(lambda body: {_REPLY}.LENGTH.pack(len(body)) + body)({_REPLY}.encode({_REPLY}.Scored([(1.0, 0)] * 8, 0)))]"
FORGERIES = {
    "the descriptor of the result": f"{_OS}.write(3, {_ONES})",
    "and then its end": f"[{_OS}.write(3, {_ONES}), {_OS}._exit(0)]",
    "every descriptor": f"[{_LIBC}.write(fd, {_ONES}, 512) for fd in range(256)]",
    "every descriptor, and then its end": f"[[{_LIBC}.write(fd, {_ONES}, 512) for fd in range(256)], {_OS}._exit(0)]",
    "a framed answer": f"[{_LIBC}.write(fd, data, len(data)) for data in {_FRAME} for fd in range(256)]",
    "descriptors by name": f"[open('/proc/self/fd/%d' % fd, 'wb', 0).write({_ONES}) for fd in (3, 4, 1)]",
    "another descriptor for the result": f"[{_OS}.dup2(3, fd) for fd in range(256)]",
    "an exit with a code": f"{_OS}._exit(1)",
    "an exit with a value": "__import__('sys').exit(1.0)",
    "an exception with a value": "(_ for _ in ()).throw(SystemExit(1.0))",
    "the caller's reward": f"setattr({_REPLY}, '_score_one', lambda *given: (1.0, 0))",
    "a compiled program": f"type(lambda: 0)(compile(\"{_OS}.write(3, b'1' * 512)\", '', 'eval'), globals())()",
}


@pytest.fixture(scope="module")
def source() -> TaskSource:
    return TaskSource(load_choices(TaskEntry(family=name) for name in OFFERED))


@pytest.fixture(scope="module")
def scorer(source: TaskSource) -> Iterator[Scorer]:
    with Scorer(source) as scorer:
        yield scorer


@pytest.mark.parametrize("name", OFFERED)
def test_forgery_earns_no_more_than_any_text_and_touches_no_other_score(
    name: str, source: TaskSource, scorer: Scorer
) -> None:
    family = source.families[name]
    task, other = family.make({}, 7, 0), family.make({}, 8, 0)
    right = family.solution(other)
    honest = [(other, right or "7"), (other, "7")]
    alone = scorer.score_each(honest)
    assert right is None or alone[0] == 1.0
    together = scorer.score_each([*((task, text) for text in FORGERIES.values()), *honest])
    assert together[-2:] == alone
    forged = dict(zip(FORGERIES, together, strict=False))
    assert scorer.spoiled == 0  # all are read as answers, none is executed
    assert {title: reward for title, reward in forged.items() if (reward or 0.0) > LENIENT.get(name, WORTHLESS)} == {}


PROGRAMS = (
    *FORGERIES.values(),
    "reward = 1.0",
    "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_locals.update(number=1.0); frame = frame.f_back",
    "import atexit, os\natexit.register(os.write, 3, b'1' * 512)\nreward = 1.0",
)
"""The same, and what only a program can say."""


def test_forgery_earns_nothing_where_the_family_executes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    family = ExecutesUnsaid()
    task, other = (family.make({}, seed, 0) for seed in range(2))
    with Scorer(TaskSource([TaskChoice(family=family, config={})])) as scorer:
        pairs: list[tuple[Task, str]] = [(task, text) for text in PROGRAMS]
        assert scorer.score_each([*pairs, (other, "0.75")]) == [0.0] * len(pairs) + [0.75]
        assert scorer.spoiled == len(pairs)


def test_executed_text_of_a_peer_is_refused_where_the_family_says_so() -> None:
    source = TaskSource([TaskChoice(family=Executes(), config={})])
    assert "executes" not in source.scorable
    with Scorer(source) as scorer, pytest.raises(LocalError, match="'executes', which executes it"):
        scorer.score_each([(source.families["executes"].make({}, 0, 0), "reward = 1.0")])
