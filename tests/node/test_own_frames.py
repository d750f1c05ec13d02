"""Of an error's traceback what is told is its user's own code, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from shoal.node.own_frames import own_place, own_traceback, without_shoal
from shoal.node.pipe import SUMMARY_LIMIT_CHARS, describe
from shoal.node.workload import load_workload
from shoal.protocol.errors import ConfigError, LocalError

OWN = """
import json

class Own:
    metric = "loss"
    build = batches = loss = evaluate = None

    def read(self):
        return json.loads("no json")

    def speak(self):
        raise ValueError("x" * 1000)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_frames_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_frames_of_a_test", raising=False)
    return tmp_path / "own_frames_of_a_test.py"


def error_of(call: str) -> Exception:
    import importlib

    made = importlib.import_module("own_frames_of_a_test").Own()
    space = {"__package__": "shoal.node", "made": made}
    try:
        exec(compile(f"made.{call}()", "node/engine.py", "exec"), space)  # a caller of Shoal's
    except Exception as error:
        return error
    raise AssertionError(call)


def test_frames_of_shoal_of_this_test_aside_and_of_python_are_left_out(own: Path) -> None:
    error = error_of("read")
    assert own_place(error.__traceback__) == f" at {own}, line 9"
    lines = own_traceback(error).splitlines()
    first, last = (line for line in lines if line.startswith("  File"))
    assert first.startswith(f'  File "{__file__}", line ')
    assert last == f'  File "{own}", line 9, in read'
    assert lines[-1] == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_users_error_is_one_line_with_its_place_and_what_to_do(own: Path) -> None:
    failed = describe(error_of("speak"))
    assert len(failed.summary) == SUMMARY_LIMIT_CHARS
    assert failed.summary.startswith("ValueError: xxx")
    assert failed.summary.endswith(
        f"x at {own}, line 12; correct it, and start this node again: it goes on where it was"
    )
    assert not failed.configuration


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken_of_a_test:Own", "SyntaxError: expected ':' (broken_of_a_test.py, line 2); correct it"),
        (
            "demanding_of_a_test:Own",
            "missing a required argument: 'width'; give it in [workload.options], or a ",
        ),
    ],
)
def test_error_of_configuration_has_no_frames_of_shoal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    (tmp_path / "broken_of_a_test.py").write_text("\nclass Own\n    pass\n")
    (tmp_path / "demanding_of_a_test.py").write_text(
        OWN.replace("= None", "= print") + "    def __init__(self, width): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_workload(name, {}, None)
    failed = describe(caught.value)
    assert said in failed.summary
    assert (failed.traceback, failed.configuration) == ("", True)


def test_bug_of_shoals_has_its_whole_traceback() -> None:
    try:
        exec(compile("raise error", "node/engine.py", "exec"), {"__package__": "shoal.node", "error": LocalError("no")})
    except LocalError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this test's own frame
        failed = describe(error)
    assert failed.summary == "LocalError: no"
    assert 'File "node/engine.py"' in failed.traceback


def names(error: Exception) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(without_shoal(error))]


def raised_in_shoal(error: Exception) -> Exception:
    space = {"__package__": "shoal.node", "error": error}
    try:
        exec(compile("raise error", "node/engine.py", "exec"), space)
    except Exception as caught:
        return caught
    raise AssertionError


def test_frames_of_shoal_are_left_out_of_what_a_script_prints_and_those_that_its_user_called_stay(own: Path) -> None:
    assert names(error_of("read"))[:2] == ["error_of", "read"]
    assert names(error_of("read"))[-1] == "raw_decode"  # of a library, which its user called
    for meant in (ConfigError("change it"), FloatingPointError("not finite")):
        assert names(raised_in_shoal(meant)) == ["raised_in_shoal"]


def test_fault_of_shoal_s_own_is_printed_whole() -> None:
    for fault in (LocalError("a bug"), KeyError("a bug")):
        assert names(raised_in_shoal(fault)) == ["raised_in_shoal", "<module>"]


def test_script_whose_join_fails_ends_with_its_own_frame_alone(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom shoal.node.own_loop import join\nmodel = torch.nn.Linear(2, 1)\n"
        "with join(model, torch.optim.SGD(model.parameters(), lr=0.1), 'none.toml', data_dir='n'):\n    pass\n"
    )
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 1
    assert [line for line in run.stderr.splitlines() if line.startswith("  File")] == [
        f'  File "{script}", line 4, in <module>'
    ]
