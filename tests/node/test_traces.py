"""Nodes do, to the letter and in the same order, what they did when their traces were recorded (`box_trace`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.box_trace import COURSES, FILE, FIXED_ORDER

DEADLINE_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
RECORDED = FILE.read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of today, all by one process, whose sets have the order of those that were recorded."""
    again = [sys.executable, "-m", "tests.node.box_trace", "--into", str(tmp_path_factory.mktemp("traces"))]
    done = subprocess.run(
        again, cwd=ROOT, env=FIXED_ORDER, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", list(COURSES))
def test_nodes_do_what_they_did(made: list[str], name: str) -> None:
    assert [line for line in made if line.startswith(name)] == [line for line in RECORDED if line.startswith(name)]
