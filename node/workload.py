"""Interface of a training task, and how a manifest's name becomes one.

A workload is one small class. The manifest names it, by an entry point of the group `shoal.workloads` or as
``module:Class`` (the current directory can be imported from), and gives the constructor's keyword arguments
in a table of scalars. Where the data lie is a local setting and arrives as the keyword `data`, which no
manifest can set: a swarm must not choose which files of yours are read.

This module does not import torch: the daemon can use it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from shoal.node.named_code import import_class, made
from shoal.node.single_number import single_number, tokens_of_step
from shoal.node.training.trainer_messages import Assignment, Scalar
from shoal.protocol.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = [
    "BATCH_LIMIT",
    "Assignment",
    "ComparableWorkload",
    "ExportingWorkload",
    "OneUnitWorkload",
    "SamplingWorkload",
    "Scalar",
    "SeekableWorkload",
    "Workload",
    "WorkloadError",
    "batches_from",
    "check_whole",
    "installed_workloads",
    "load_workload",
    "loss_of",
]

GROUP = "shoal.workloads"
BATCH_LIMIT = 1 << 16
"""Rows of a batch of the installed workloads, at most."""
METHODS = ("build", "batches", "loss", "evaluate")
"""Methods of every workload; others are optional: see the protocols after `Workload`."""


class Workload(Protocol):
    """Training task. Options arrive as keyword arguments of `__init__`, and `data` if it takes that."""

    @property
    def metric(self) -> str:
        """Name of the value that `evaluate` returns, as a person reads it: ``bits per byte``; lower is better."""

    def build(self) -> torch.nn.Module:
        """Make the model. Called once, after `torch.manual_seed`, so that equal seeds give equal models.

        Its floating parameters must be float32; they are what the swarm trains in common. Floating buffers that its
        `state_dict` has (running means) have the mean of all nodes' after each round. Other buffers stay each node's
        own: tables that were registered with ``persistent=False``, and counters.
        """

    def batches(self, assignment: Assignment) -> Iterator[Any]:
        """Yield batches of this member's share of the round, for as long as steps are asked for.

        Shares of different members in one round must not overlap. Tensors in tuples, lists and dicts are
        moved to the trainer's device. An iterator that ends, ends the stretch early. Equal assignments give equal
        batches, also in another process: that is how a node goes on after a restart as if there had been none.
        """

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """Return the scalar mean loss of `batch` and how many tokens (or samples) it weighs."""

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return `metric` on held-out data, always the same. Called without gradients, in eval mode."""


@runtime_checkable
class OneUnitWorkload(Protocol):
    """A workload whose training loss can be told in the unit of its `metric`, to stand beside it."""

    @property
    def metric_per_loss(self) -> float:
        """Factor by which a value of `loss` is in `metric`: 1 / ln 2 from nats to bits, 1 if they are one."""


@runtime_checkable
class SeekableWorkload(Protocol):
    """A workload that finds its place without drawing what comes before."""

    def batches_after(self, assignment: Assignment, drawn: int) -> Iterator[Any]:
        """Yield what `batches(assignment)` yields after its first `drawn` batches."""


@runtime_checkable
class SamplingWorkload(Protocol):
    """A workload whose model says something that people can read: they see it after evaluations."""

    @property
    def prompts(self) -> Sequence[str]:
        """Fixed beginnings, a few short ones, that the model goes on from."""

    def continuations(self, model: torch.nn.Module, prompts: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield what the model has said so far after each prompt, a little more every time.

        No more is drawn from it once there is enough to read, or it took too long. Called as `evaluate` is. Whoever
        draws at random does so with a generator of its own: training must not depend on what was sampled.
        """


@runtime_checkable
class ComparableWorkload(Protocol):
    """A workload that can tell whether two nodes evaluate on the same data."""

    def held_out_digest(self) -> bytes:
        """A hash of the data that `evaluate` reads, of up to 32 bytes. Called after the first evaluation."""


@runtime_checkable
class ExportingWorkload(Protocol):
    """A workload that has a format of its own for a trained model."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Write `model`, which holds the certified parameters, into `folder`, beside `model.safetensors`."""


def batches_from(workload: Workload, assignment: Assignment, drawn: int) -> tuple[Iterator[Any], int]:
    """The batches of a share after its first `drawn`, and how many are to be drawn and dropped before that: `drawn`
    where the workload cannot seek, which may take as long as the steps on them did.
    """
    if drawn and isinstance(workload, SeekableWorkload):
        return iter(workload.batches_after(assignment, drawn)), 0
    return iter(workload.batches(assignment)), drawn


def loss_of(workload: Workload, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the mean loss of a batch, and what it weighs. Raises ConfigError where `loss` returns something else."""
    found: object = workload.loss(model, batch)
    if isinstance(found, tuple) and len(found) == 2 and getattr(found[0], "numel", int)() == 1:
        tokens = tokens_of_step(found[1])
        if tokens is not None:
            return found[0], tokens
    parts = found if isinstance(found, tuple) else (found,)
    parts = tuple(str(part) if isinstance(part, int | float) else type(part).__name__ for part in parts)
    raise ConfigError(
        f"{type(workload).__name__}.loss() returned {' and '.join(parts)}; correct it, to return the mean loss, a "
        "tensor of one value, and how many tokens or samples it weighs"
    )


def value_of(workload: Workload, model: torch.nn.Module) -> float:
    """Return the workload's metric of a model. Raises ConfigError where `evaluate` returns no number."""
    found: object = workload.evaluate(model)
    number = single_number(found)
    if number is not None:
        return number
    raise ConfigError(
        f"{type(workload).__name__}.evaluate() returned {type(found).__name__}; correct it, to return one number"
    )


def check_whole(what: str, options: object, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Check options, which are attributes, against the least and the most that each may be. Raises ConfigError.

    A manifest may come from anybody, and memory for a model of any size ends whoever asks for it.
    """
    for option, (least, most) in ranges.items():
        value = getattr(options, option)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{what}: {option} is {value!r}, expected a whole number from {least} to {most}")


class WorkloadError(ConfigError):
    """The workload raised: `str()` is one line, `traceback` the whole text."""

    def __init__(self, summary: str, traceback: str) -> None:
        super().__init__(summary)
        self.traceback = traceback


def installed_workloads() -> tuple[str, ...]:
    """Name the workloads of the entry-point group: those a manifest from a peer may ask for."""
    return tuple(sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)}))


def load_workload(name: str, options: Mapping[str, Scalar], data: str | None) -> Workload:
    """Import and construct the workload called `name`.

    Raises `ConfigError`, one line each: unknown name, module that cannot be imported, no such class, a
    method missing, an option it does not take, a constructor that raises (that exception is the cause). A class that
    is no workload is not called.
    """
    factory = class_of(name)
    for method in METHODS:
        if not callable(getattr(factory, method, None)):
            raise ConfigError(f"workload {name!r} has no method {method}(); a workload must have {', '.join(METHODS)}")
    arguments = _check_options(name, factory, options, data)
    workload = made(f"workload {name!r}", lambda: factory(**arguments))
    if not isinstance(getattr(workload, "metric", None), str):
        raise ConfigError(f"workload {name!r} has no text `metric` that says what evaluate() returns")
    return cast(Workload, workload)


def class_of(name: str) -> Callable[..., object]:
    """Import the class of the workload called `name`. Raises ConfigError as `load_workload`."""
    if "" not in sys.path:
        sys.path.append("")  # at the end: a file of the user's must not shadow the standard library
    return import_class(f"workload {name!r}", name if ":" in name else _installed(name))


def missing_module(name: str) -> str | None:
    """Name the module of module:Class that is not to be found from here; None if it may be. Imports nothing."""
    module, separator, _ = name.partition(":")
    top = module.partition(".")[0]
    if not separator or not top:
        return None
    path = sys.path if "" in sys.path else [*sys.path, ""]
    return None if BuiltinImporter.find_spec(top) or PathFinder.find_spec(top, path) else top


def _installed(name: str) -> str:
    known = installed_workloads()
    if name not in known:
        raise ConfigError(
            f"unknown workload {name!r}{did_you_mean(name, known)}; installed are {', '.join(known)}, "
            "and your own is named module:Class"
        )
    (point, *_) = importlib.metadata.entry_points(group=GROUP, name=name)
    return point.value


def _check_options(
    name: str, factory: Callable[..., object], options: Mapping[str, Scalar], data: str | None
) -> dict[str, Scalar]:
    if "data" in options:
        raise ConfigError("a manifest cannot say where data lie; give the path with --data on each node")
    signature = inspect.signature(factory)
    parameters = signature.parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [key for key in parameters if key != "data"]
    for key in options:
        if key not in parameters and not open_ended:
            hint = did_you_mean(key, known, "; remove it")
            raise ConfigError(f"workload {name!r} has no option {key!r}{hint}")
    arguments = dict(options)
    if "data" in parameters:
        if data is not None:
            arguments["data"] = data
        elif parameters["data"].default is inspect.Parameter.empty:
            raise ConfigError(f"workload {name!r} reads data; give their path with --data")
    elif data is not None:
        raise ConfigError(f"workload {name!r} reads no data; leave --data out")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"workload {name!r}: {error}; give it in [workload.options], or a default in __init__"
        ) from None
    return arguments
