"""Measuring a language model by lm-evaluation-harness, with tasks of its user's own.

The harness is the package `lm-eval`. It reads a model as `transformers` saved it, and a task as a YAML file of
`its format <https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md>`_.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.protocol.errors import ConfigError

BATCH = 8
NEEDED = ("lm_eval", "transformers", "accelerate")
"""Modules without which it does not read a model; `lm-eval` installs none but itself."""

Scores = dict[str, dict[str, float]]
"""By task and metric."""


def check_harness() -> None:
    """Raise ConfigError where the harness, or what it reads a model with, is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--task lacks {', '.join(missing)} here: pip install lm-eval 'shoal[hf]'")


def evaluate_by_harness(model: Path, tasks: Sequence[Path], *, device: str) -> Scores:
    """Return what the harness measures by these task files of the model in a folder.

    No task that comes with the harness is read. What a file has it fetch or run, it does: the file is its user's. A
    metric that is no number, as one of a single example's deviation, is left out. Raises ConfigError for a file that is
    no task, and where a task runs code that a model writes; whatever else the harness raises passes through.
    """
    check_harness()
    harness: Any = importlib.import_module("lm_eval")
    managing: Any = importlib.import_module("lm_eval.tasks")
    manager = managing.TaskManager(include_defaults=False)
    measured = []
    for path in tasks:
        try:
            measured.append(next(iter(manager.load([str(path.resolve())])["tasks"].values())))
        except (KeyError, StopIteration, TypeError, ValueError) as error:
            raise ConfigError(f"--task: {path} is no task of lm-evaluation-harness ({error}); see its guide") from None
    told: Any = harness.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=measured,
        task_manager=manager,
        device=device,
        batch_size=BATCH,
        log_samples=False,
        bootstrap_iters=0,
    )
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in scores.items()
            if "," in name and isinstance(value, int | float) and math.isfinite(value)
        }
        for task, scores in told["results"].items()
    }
