"""Classes that a manifest or an entry point names: importing one, and making it; what a user got wrong is one line.

`what` is how errors call it: `workload 'sine:Sine'`. This module does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TypeVar

from shoal.node.own_frames import own_place
from shoal.node.pipe import one_line
from shoal.protocol.errors import ConfigError, did_you_mean

T = TypeVar("T")


class BrokenModule(ConfigError):
    """A module that raises on every machine: a syntax error, or one while it is imported that is no lacking module."""


def import_class(what: str, path: str) -> type:
    """Import the class at `path`, module:Class. Raises ConfigError, with a cause where the module itself raised."""
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"{what} must be of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            remedy = "start this where its file lies, or install it" if "" in sys.path else "install it"
            raise ConfigError(f"{what}: there is no module {error.name!r}; {remedy}") from None
        fault = f"{one_line(error)}{_place(error)}"
        if isinstance(error, ImportError):
            raise ConfigError(f"{what} cannot be imported: {fault}; install what it needs") from error
        raise BrokenModule(f"{what} cannot be imported: {fault}; correct it") from error
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    classes = [key for key, value in vars(module).items() if isinstance(value, type)]
    hint = did_you_mean(class_name, classes, "; correct it")
    raise ConfigError(f"module {module_name!r} has no class {class_name!r}{hint}")


def made(what: str, make: Callable[[], T]) -> T:
    """Return what `make` does. Raises ConfigError, whose cause is what it raised, if it is no such error itself."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{what} cannot be made: {one_line(error)}{_place(error)}; correct its options or its class"
        ) from error


def _place(error: Exception) -> str:
    """Return `, at FILE, line N` of the user's own code that raised; nothing for a SyntaxError, which says it."""
    place = "" if isinstance(error, SyntaxError) else own_place(error.__traceback__)
    return place and f",{place}"
