"""Sinks of the event log's numbers: TensorBoard event files, and Weights & Biases.

Both are extras. What is missing is said in one line before the node starts; neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any, Protocol

from shoal.protocol.errors import ConfigError

NAME_LIMIT_CHARS = 128


class ScalarSink(Protocol):
    """Sink of numbers by name and round. Used by one thread; may block, and may raise whatever its library does."""

    def scalar(self, name: str, value: float, *, round: int, at: float) -> None:
        """Take one number of a round, written at the wall-clock time `at`."""

    def close(self) -> None:
        """Make what was taken durable."""


def check_installed(*, tensorboard: bool, wandb: bool) -> None:
    """Raise ConfigError for a library that was asked for and is not here."""
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs the package tensorboard: pip install 'shoal[tensorboard]'")
    if wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--wandb needs the package wandb: pip install wandb, then `wandb login`")


class TensorBoardSink:
    """Event files in a folder, as `tensorboard --logdir` reads them."""

    def __init__(self, folder: Path) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer: Any = writer.EventFileWriter(str(folder))

    def scalar(self, name: str, value: float, *, round: int, at: float) -> None:
        """Write one number of a round."""
        summary = self._summaries.Summary(value=[self._summaries.Summary.Value(tag=name, simple_value=value)])
        self._writer.add_event(self._events.Event(wall_time=at, step=round, summary=summary))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, whose axis is the round: numbers of one round may come in any order."""

    def __init__(self, project: str, *, name: str, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(project=project, name=name[:NAME_LIMIT_CHARS], dir=str(folder))
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def scalar(self, name: str, value: float, *, round: int, at: float) -> None:
        """Send one number of a round."""
        if math.isfinite(value):
            self._run.log({"round": round, name: value})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
