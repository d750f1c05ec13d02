"""A process that holds a key and crashes leaves no core with the key in it."""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.protocol.identity import Identity
from shoal.protocol.key_file import LEAST_CORE_BYTES
from tests.core_dumps import as_in_a_shell_that_wants_cores, leaves_cores

pytestmark = pytest.mark.skipif(not leaves_cores(), reason="a crash leaves no core in the folder here")

LOAD = "import os, sys; from shoal.protocol.identity import Identity; key = Identity.load(sys.argv[1]);"
GENERATE = "import os; from shoal.protocol.identity import Identity; key = Identity.generate();"
READ = "import os, sys; key = open(sys.argv[1], 'rb').read();"
ALLOW = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2);"
"""What a process could do that wants a core all the same."""
DEADLINE_S = 60.0
FORK = "child = os.fork(); child and os._exit(os.waitpid(child, 0)[1] & 127);"


def cores_of(folder: Path, code: str) -> list[bytes]:
    """The memory in the cores that a program leaves which ends by aborting; it is given a key file."""
    path = folder / "node.key"
    Identity.load_or_create(path)
    command = [sys.executable, "-c", code + "os.abort()", str(path)]
    done = subprocess.run(as_in_a_shell_that_wants_cores(command), cwd=folder, check=False, timeout=DEADLINE_S)
    assert abs(done.returncode) == signal.SIGABRT
    return [memory_in(path.read_bytes()) for path in folder.glob("core*")]


def memory_in(core: bytes) -> bytes:
    """What stands in the loadable segments of an ELF64 file: memory, but no registers."""
    (table,) = struct.unpack_from("<Q", core, 32)
    size, count = struct.unpack_from("<HH", core, 54)
    memory = b""
    for number in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", core, table + number * size)
        memory += core[offset : offset + length] if kind == 1 else b""
    return memory


def has_key(memory: bytes, folder: Path) -> bool:
    """Whether half of the key is in it, as it is or as its file has it."""
    path = folder / "node.key"
    seed, line = Identity.load(path).private_bytes(), path.read_bytes().splitlines()[1]
    return seed[:16] in memory or line[-32:] in memory


def test_core_of_a_process_that_read_the_file_by_itself_has_the_key(tmp_path: Path) -> None:
    """What the others are measured against: where this fails, they could not."""
    (memory,) = cores_of(tmp_path, READ)
    assert has_key(memory, tmp_path)


@pytest.mark.parametrize("code", [LOAD, GENERATE], ids=["read from a file", "made"])
def test_process_that_holds_a_key_leaves_no_core(tmp_path: Path, code: str) -> None:
    assert cores_of(tmp_path, code) == []


@pytest.mark.parametrize("more", ["", FORK], ids=["its own", "of what it forked"])
def test_core_that_is_made_all_the_same_has_no_key(tmp_path: Path, more: str) -> None:
    (memory,) = cores_of(tmp_path, LOAD + "seed = key.private_bytes();" + more + ALLOW)
    assert not has_key(memory, tmp_path)


def test_limit_on_cores_is_the_one_that_pipes_heed_as_well() -> None:
    """A limit of 0 keeps no core from a program that they are piped to; see core(5) and fs/coredump.c."""
    Identity.generate()
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] in (LEAST_CORE_BYTES, 0)
    assert resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 or resource.getrlimit(resource.RLIMIT_CORE)[0] == 1
