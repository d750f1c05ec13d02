"""History of a node as its event log tells it, in bounded memory: rounds, curves, samples, and what it gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Final, Literal

from shoal.node.dashboard.curves import Curve
from shoal.node.dashboard.rounds import Rounds
from shoal.node.gave import Gave
from shoal.node.outcome import is_held_out
from shoal.node.reporting import events
from shoal.node.reporting.events import Event

NAMED_LIMIT: Final = 8
"""Peers of whom most groups were taken, as they are told."""
SOURCE_LIMIT: Final = 4096
"""Peers of whom is counted how many groups were taken."""

Name = Literal["train", "held_out", "reward", "others_reward"]


class History:
    """Sums over the events of one log, oldest first. metric: what the held-out curve is in."""

    def __init__(self) -> None:
        self.rounds = Rounds()
        self.curves: dict[Name, Curve] = {
            "train": Curve(),
            "held_out": Curve(),
            "reward": Curve(),
            "others_reward": Curve(),
        }
        self.gave = Gave()
        self.metric = self.device = ""
        self.samples: tuple[events.Sampled, ...] = ()
        """The first that are known, and the newest."""
        self._sources: Counter[str] = Counter()

    @property
    def sources(self) -> list[tuple[str, int]]:
        """Of whom most groups were taken, and how many."""
        return self._sources.most_common(NAMED_LIMIT)

    @property
    def held_out(self) -> float | None:
        """The newest held-out loss that stands."""
        points = self.curves["held_out"].points
        return points[-1][1] if points else None

    def hear(self, event: Event) -> None:
        """Take one event."""
        self.rounds.hear(event)
        self.gave.hear(event)
        match event:
            case events.Contributed():
                self._measure("train", event.round, event.loss)
            case events.Evaluated() if is_held_out(event.metric):
                self.metric = event.metric
                self._measure("held_out", event.round, event.loss)
            case events.Sampled():
                self.samples = (*self.samples[:1], event)
            case events.TrainerStarted():
                self.device = event.device
            case events.Rollouts():
                self._measure("reward", event.round, event.reward)
                self._measure("others_reward", event.round, event.external_reward)
                self._count_sources(event.origins)
            case events.RolledBack():
                for curve in self.curves.values():
                    curve.rewind(event.to)
                self.samples = tuple(known for known in self.samples if known.round <= event.to)

    def _count_sources(self, origins: Mapping[str, int]) -> None:
        self._sources.update(origins)
        if len(self._sources) > SOURCE_LIMIT:
            self._sources = Counter(dict(self._sources.most_common(SOURCE_LIMIT // 2)))

    def _measure(self, curve: Name, round: int, value: float | None) -> None:
        if value is not None and isfinite(value):
            self.curves[curve].add(round, value)
