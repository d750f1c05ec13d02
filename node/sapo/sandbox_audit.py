"""Ends a process that is about to execute a stranger's text as Python, before the first instruction of it runs.

A scorer that executes the text shares its memory with it, so no channel could be kept from such text: it would reach
whatever writes its reward. Python tells its audit hooks of every program that it is about to compile or execute, and
no code can take a hook away again. So the child that reports rewards executes no text, whatever the family does.

Source: https://docs.python.org/3/library/audit_events.html, PEP 578
"""

from __future__ import annotations

import ast
import os
import sys

__all__ = ["refuse_execution"]

_MAKES_CODE = frozenset(("exec", "compile", "code.__new__", "marshal.loads", "pickle.find_class"))
"""Events of making or running code, or calling what a text names. Calls of libraries through ctypes need one first."""


def refuse_execution() -> None:
    """End this process without a word, from now on, where anything compiles or executes a program.

    `ast.parse` and `ast.literal_eval`, which execute nothing, go on working.
    """
    parse = ast.parse.__code__

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _MAKES_CODE and not (event == "compile" and sys._getframe(1).f_code is parse):
            os._exit(0)

    sys.addaudithook(hook)
