"""`torch.compile` of a workload's model: for training alone, and a line in place of a trace where it cannot be."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

from shoal.protocol.errors import ConfigError


def as_it_is(compiled: bool) -> AbstractContextManager[object]:
    """Compute without the compiler within: evaluation has other shapes, which would be compiled as well."""
    import torch

    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()  # imports the compiler, so only then


@cache
def check_compiler(device: str) -> None:
    """Raise ConfigError unless there is what `torch.compile` has its code built by, for a kind of device such as cpu.

    That is a C++ compiler for the processor, and a C compiler for CUDA; the headers of Python for both.
    """
    if device not in ("cpu", "cuda"):
        return
    language, variable, known = ("C++", "CXX", ("g++",)) if device == "cpu" else ("C", "CC", ("gcc", "clang"))
    if device == "cpu" and sys.platform == "darwin":
        known = ("clang++",)
    wanted = (os.environ[variable],) if os.environ.get(variable) else known
    if not any(shutil.which(name) for name in wanted):
        raise ConfigError(
            f"compile = true needs a {language} compiler, and there is no {' or '.join(wanted)} here; install one, "
            f"name it by {variable}, or leave compile out"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise ConfigError(
            "compile = true needs the headers of Python, and there are none here; install them (python3-dev), or leave "
            "compile out"
        )
