"""Carries out the commands of claims, one after the other, and writes down what came of each: `make proof`.

A claim whose result is there, of the code as it is now, is not proven again; so what was begun goes on where it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.lab.bench.machine import this_machine
from shoal.lab.proof.claims import Claim
from shoal.lab.proof.results import Result, changed, commit_of
from shoal.lab.targets import Row, Target
from shoal.protocol.errors import ConfigError

FULL_MINUTES: Final = 180.0
"""What a claim of `make proof-full` may take."""
SHOWN_CHARS: Final = 300
ENDED: Final = Target(name="exit code", most=0)
"""All that is wanted of a command that has no document."""


def prove(claim: Claim, root: Path) -> Result:
    """Carry out a claim's command, and judge it. Blocks until it ends, or has taken its time and is killed.

    Raises ConfigError where the code in question is not committed, since the result could not name it.
    """
    if files := changed(root, claim):
        file = files[0].split()[-1]
        raise ConfigError(f"{file} is not committed, and a result names the commit of its code; run it once that is")
    commit, machine, began = commit_of(root), this_machine(), time.monotonic()
    limit_s = 60 * (FULL_MINUTES if claim.full else claim.minutes)
    with tempfile.TemporaryDirectory(prefix="shoal-proof-") as folder:
        place = root if claim.arguments[0] == "python" else Path(folder)  # modules of the tests are there alone
        code, said, errors = _carried_out(arguments_of(claim), place, limit_s)
    rows, trouble = _judged(claim, code, said, errors, limit_s)
    return Result(
        claim=claim.name,
        command=claim.command,
        commit=commit,
        machine=machine,
        seconds=round(time.monotonic() - began, 1),
        rows=tuple(rows),
        trouble=trouble,
    )


def arguments_of(claim: Claim) -> list[str]:
    """The command line, by this interpreter; what is of `shoal` tells its result as JSON."""
    program, *rest = claim.arguments
    if program == "python":
        return [sys.executable, *rest]
    return [str(Path(sys.executable).with_name(program)), *rest, "--json"]


def _carried_out(command: Sequence[str], folder: Path, limit_s: float) -> tuple[int | None, str, str]:
    """(exit code, stdout, stderr) of a command in a session of its own; no code where it took too long."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=limit_s)
        return process.returncode, said, errors
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        if process.poll() is None:  # it took too long, or we are interrupted
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask a command to end, which ends what it started, and kill it if it does not."""
    process.terminate()
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _judged(claim: Claim, code: int | None, said: str, errors: str, limit_s: float) -> tuple[list[Row], str]:
    """(rows, trouble) of a command that ended."""
    if code is None:
        return [], f"not done within {limit_s / 60:.0f} minutes"
    documents = list(documents_in(said))
    rows = [row for document in documents for row in _rows_of(claim, document)]
    if not documents and not claim.wanted:
        rows = [ENDED.row(code)]
    if not rows:
        return [], f"ended with {code} and without a result: {_last(errors)}"
    wrong = code != 0 and all(row.met is not False for row in rows)
    return rows, f"ended with {code}: {_last(errors)}" if wrong else ""


def documents_in(said: str) -> Iterator[dict[str, Any]]:
    """The JSON documents that a command printed: one, or one a line."""
    try:
        found = [json.loads(said)]
    except ValueError:
        found = [_parsed(line) for line in said.splitlines()]
    yield from (document for document in found if isinstance(document, dict))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _rows_of(claim: Claim, document: dict[str, Any]) -> Iterator[Row]:
    """Rows that a benchmark's document has, or those that the claim makes of its fields."""
    yield from msgspec.convert(document.get("rows", []), list[Row])
    for key, target in claim.wanted.items():
        value = document.get(key)
        yield target.row(float(len(value)) if isinstance(value, list) else value)


def _last(text: str) -> str:
    """The end of what it said, on one line."""
    return " ".join(text[-SHOWN_CHARS:].split()) or "it said nothing"
