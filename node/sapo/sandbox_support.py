"""The test whether this machine can lock a process away, and the environment that such a process gets."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from shoal.node.sapo import sandbox_filter

SELF_TEST_LIMIT_S = 30.0

_KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH",)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""One thread, so that the process can be forked and can leave its namespaces; the same order of sets everywhere."""


@functools.cache
def missing_sandbox() -> str | None:
    """Return why text from peers cannot be scored in a sandbox here, None where it can. Tries it out, once."""
    try:
        outcome = subprocess.run(
            [sys.executable, "-P", "-s", sandbox_filter.__file__],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SELF_TEST_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its test does not run: {error}"
    answer = outcome.stdout.decode(errors="replace").strip()
    return None if answer == "locked" else answer or "its test ended without a result"


def environment() -> dict[str, str]:
    """Return all that a scoring process knows of its surroundings."""
    return _ENVIRONMENT | {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
