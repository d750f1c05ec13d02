"""Samples of what a model says, taken after evaluations for people to read, within a share of the evaluations' time.

A workload may have prompts and a way to go on from them (`SamplingWorkload`). What it yields is text of a model, which
may hold anything: here it becomes a bounded number of characters that can be printed. Whoever shows it escapes it all
the same.

A sample is taken whole, and later ones wait until the share of the evaluations since has paid for it: so it is as long
on a machine whose evaluations are quick, and there are fewer of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.node.own_frames import own_place
from shoal.node.pipe import one_line
from shoal.node.training.trainer_messages import PROMPT_LIMIT_CHARS, SAMPLE_LIMIT, SAMPLE_LIMIT_CHARS, Sample
from shoal.node.workload import SamplingWorkload, Workload
from shoal.protocol.names import printable

if TYPE_CHECKING:
    import torch

TIME_SHARE: Final = 0.25
"""Of the time of all evaluations, for samples."""
TIME_LIMIT_S: Final = 2.0
"""Of one sampling: a model of which a token takes long says less."""

logger = logging.getLogger(__name__)


class Sampler:
    """Takes samples of a workload's model where it has any, as often as the share of time allows. clock: in seconds."""

    def __init__(self, workload: Workload, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._workload = workload if isinstance(workload, SamplingWorkload) else None
        self._clock = clock
        self._owed_s = 0.0
        self._samples: tuple[Sample, ...] = ()

    def take(self) -> tuple[Sample, ...]:
        """The samples since the last call, of the last evaluation; empty where none were taken."""
        taken, self._samples = self._samples, ()
        return taken

    def sample(self, model: torch.nn.Module, *, evaluated_s: float) -> None:
        """Take samples after an evaluation that took so long, unless those before have not been paid for.

        A workload that raises is asked no more: what people would have read is no reason to stop training.
        """
        if self._workload is None:
            return
        self._owed_s -= TIME_SHARE * evaluated_s
        if self._owed_s > 0:
            return
        began = self._clock()
        try:
            self._samples = self._taken(self._workload, model, ends_at=began + TIME_LIMIT_S)
        except Exception as error:  # the user's code may raise anything
            logger.warning("no more samples: %s%s; correct it", one_line(error), own_place(error.__traceback__))
            self._workload = None
        self._owed_s = self._clock() - began

    def _taken(self, workload: SamplingWorkload, model: torch.nn.Module, *, ends_at: float) -> tuple[Sample, ...]:
        prompts = tuple(workload.prompts)[:SAMPLE_LIMIT]
        texts: Sequence[str] = ()
        for texts in workload.continuations(model, prompts):
            if self._clock() >= ends_at or all(len(text) >= SAMPLE_LIMIT_CHARS for text in texts):
                break
        return tuple(
            Sample(prompt=printable(prompt)[:PROMPT_LIMIT_CHARS], text=printable(text)[:SAMPLE_LIMIT_CHARS])
            for prompt, text in zip(prompts, texts, strict=False)
        )
