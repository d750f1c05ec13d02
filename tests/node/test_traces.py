"""Nodes do, to the letter and in the same order, what they did when their traces were recorded (`box_trace`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.box_trace import COURSES, FILE

DEADLINE_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
RECORDED = FILE.read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", list(COURSES))
def test_nodes_do_what_they_did(name: str) -> None:
    again = [sys.executable, "-m", "tests.node.box_trace", "--only", name]
    done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.splitlines() == [line for line in RECORDED if line.startswith(name)]
