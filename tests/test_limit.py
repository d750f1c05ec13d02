"""A test that waits for ever fails, wherever it waits, says where, and others go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests.conftest import *
from tests import conftest

conftest.LIMIT_S = conftest.GRACE_S = 1.0
"""
TESTS = """
import threading
import pytest, trio

def wait_in_a_thread():
    threading.Event().wait()

def test_thread():
    thread = threading.Thread(target=wait_in_a_thread, daemon=True)
    thread.start()
    thread.join()

async def test_task():
    async def wait_in_a_task():
        await trio.sleep_forever()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_in_a_task)

def test_run_of_its_own():
    trio.run(trio.sleep_forever)

async def test_task_that_cannot_be_cancelled():
    await trio.to_thread.run_sync(wait_in_a_thread)

@pytest.mark.virtual_time
async def test_loop_on_a_clock_that_jumps():
    while True:
        await trio.sleep(1)

@pytest.mark.virtual_time
async def test_all_wait_on_a_clock_that_jumps():
    await trio.Event().wait()

@pytest.fixture
def left():
    yield
    wait_in_a_thread()

def test_end(left):
    pass

def test_after_them():
    pass
"""


def test_test_that_waits_for_ever_fails_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_waiting.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120)
    ended = [line.split(" ")[:2] for line in done.stdout.split("\n") if line.startswith(("FAILED ", "ERROR "))]
    assert sorted((how, test.split("::")[1]) for how, test in ended) == [
        ("ERROR", "test_end"),
        ("FAILED", "test_all_wait_on_a_clock_that_jumps"),
        ("FAILED", "test_loop_on_a_clock_that_jumps"),
        ("FAILED", "test_run_of_its_own"),
        ("FAILED", "test_task"),
        ("FAILED", "test_task_that_cannot_be_cancelled"),
        ("FAILED", "test_thread"),
    ], done.stdout
    assert "6 failed, 2 passed" in done.stdout
    assert done.stdout.count("in wait_in_a_thread\n") >= 3
    assert done.stdout.count("in wait_in_a_task\n") == 1
