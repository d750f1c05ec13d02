"""The frames of a traceback that are of its user's own code: neither of Shoal, nor of a library, nor of Python's own.

Code of a package that is installed is the user's where an entry point of Shoal's groups names it. This module does not
import torch.
"""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

from shoal.protocol.errors import LocalError, ShoalError

GROUPS = ("shoal.workloads", "shoal.policies", "shoal.tasks")
STANDARD = sysconfig.get_path("stdlib")


def own_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return the user's own frames of a traceback, the outermost first."""
    named = _named_modules()
    kept = [(frame, line) for frame, line in traceback.walk_tb(trace) if _is_own(frame, named)]
    return list(traceback.StackSummary.extract(iter(kept)))


def own_place(trace: TracebackType | None) -> str:
    """Return ` at FILE, line N` of the innermost of the user's own frames; empty where there is none."""
    frames = own_frames(trace)
    return f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def own_traceback(error: BaseException) -> str:
    """Return what Python prints of an error, with the user's own frames alone; empty where there is none."""
    frames = own_frames(error.__traceback__)
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return "".join(["Traceback (most recent call last):\n", *lines]) if frames else ""


def print_without_shoal() -> None:
    """Have what ends a program printed without frames of Shoal's, where it is no fault of Shoal's and sets no hook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    kept = without_shoal(error)
    sys.__excepthook__(kind, error.with_traceback(kept), kept)


def without_shoal(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without the frames of Shoal, and of libraries that it called.

    Whole, where code of Shoal's raised what is no error that it means for its user.
    """
    named, of_shoal, kept = _named_modules(), False, []
    trace = error.__traceback__
    while trace is not None:
        if _top(trace.tb_frame) == "shoal":
            of_shoal = True
        elif _is_own(trace.tb_frame, named):
            of_shoal = False
        if not of_shoal:
            kept.append(trace)
        trace = trace.tb_next
    meant = isinstance(error, ShoalError | FloatingPointError) and not isinstance(error, LocalError)
    if of_shoal and not meant:
        return error.__traceback__
    for one in reversed(kept):
        trace = TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trace


def _top(frame: FrameType) -> str:
    return (frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or "").partition(".")[0]


def _is_own(frame: FrameType, named: frozenset[str]) -> bool:
    top = _top(frame)
    file = frame.f_code.co_filename
    library = file.startswith(("<", STANDARD)) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return top in named or not (top == "shoal" or library)


def _named_modules() -> frozenset[str]:
    """Top modules that entry points of these groups name, but for its own."""
    points = [point for group in GROUPS for point in importlib.metadata.entry_points(group=group)]
    return frozenset(point.value.partition(":")[0].partition(".")[0] for point in points) - {"shoal"}
