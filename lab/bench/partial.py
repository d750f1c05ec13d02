"""`shoal bench partial`: groups a second where a few completions are much longer than the others.

Not a node, but a node's generator and its policy by themselves, without scoring and training: rounds that each want so
many groups, once with nothing left unfinished and once with more groups under way than are wanted. The model is the
one that `shoal init --strategy rollouts` names, as it is drawn, and computes every token; where a completion ends is
not its choice: lengths are log-normal, half of the variance between tasks and half within one, and cut at the limit.

Seconds are of this process, on one thread, so that what else the machine does counts little.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final

import msgspec
import numpy as np
import torch

from shoal.cli.render import ShowNow
from shoal.lab.bench.machine import Machine, one_thread, this_machine
from shoal.lab.case import Case, LongCaseOptions, Spec
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within
from shoal.node.sapo.char_policy import END, CharModelSettings, CharPolicy
from shoal.node.sapo.generation import GroupGenerator
from shoal.node.sapo.policy import Batch, Rollout, extend_together
from shoal.node.sapo.tasks import Config, Task, TaskFamily
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import OVER_PROVISION_LIMIT
from shoal.protocol.rollouts import assigned_draws
from shoal.protocol.wire import SwarmId

MODEL: Final = CharModelSettings()
SPREAD: Final = 1.0
"""Deviation of the logarithm of a length: one in a hundred is ten times the median."""

FASTER: Final = Target(
    name="generator alone, lengths set, beside the same with nothing left unfinished",
    unit="× groups/s",
    least=1.2,
    aim=1.4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialBench(Spec):
    """Options of `shoal bench partial`."""

    over_provision: Annotated[
        float,
        Option("--over-provision", help="Groups under way ÷ groups wanted.", check=Within(1, OVER_PROVISION_LIMIT)),
    ] = 1.5
    groups: Annotated[int, Option("--groups", help="Wanted in a round.", check=Within(1, 256))] = 4
    group_size: Annotated[int, Option("--group-size", help="Completions of one.", check=Within(2, 64))] = 8
    median_tokens: Annotated[
        int, Option("--median-tokens", help="Of a completion: half are shorter.", check=Within(1, 1024))
    ] = 8
    most_tokens: Annotated[int, Option("--most-tokens", help="Where one is cut.", check=Within(2, 4096))] = 128
    rounds: Annotated[int, Option("--rounds", help="That count.", check=Within(1, 100_000))] = 40
    before: Annotated[
        int,
        Option("--before", help="Rounds before those, by when as much is finished as begun.", check=Within(0, 1000)),
    ] = 10
    seeds: Annotated[int, Option("--seeds", help="Runs, each with lengths of its own.", check=Within(1, 100))] = 3


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the rounds that count.

    steps: of the model, of one token for each completion that was under way; tokens: that were drawn; handed_out:
    tokens of the groups that were done.
    """

    groups: int
    seconds: float
    steps: int
    tokens: int
    handed_out: int


class PartialResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench partial`: a window for each seed, without over-provision and with it."""

    bench: PartialBench
    whole: tuple[Window, ...]
    partial: tuple[Window, ...]
    machine: Machine

    @property
    def rows(self) -> tuple[Row, ...]:
        """Gain of each seed beside its target."""
        return (
            FASTER.row(
                Spread.of(
                    (one.groups / one.seconds) / (other.groups / other.seconds)
                    for one, other in zip(self.partial, self.whole, strict=True)
                )
            ),
        )


class Numbers(TaskFamily):
    """Questions that are all different, and that nobody answers."""

    name = "numbers"
    version = "1"
    scoring = "direct"

    def check(self, config: Config) -> None:
        """See `TaskFamily`."""

    def question(self, config: Config, seed: int, index: int) -> str:
        """See `TaskFamily`."""
        return f"{seed}:{index}"

    def score(self, task: Task, text: str) -> float:
        """See `TaskFamily`."""
        return 0.0


class LengthsPolicy(CharPolicy):
    """The character model, with completions that end where they are told to.

    lengths: of the completions of a prompt. steps: that the model has made.
    """

    def __init__(
        self, settings: CharModelSettings, *, seed: int, lengths: Callable[[Sequence[int]], list[int]]
    ) -> None:
        super().__init__(settings, seed=seed)
        self._lengths_of = lengths
        self._ends: dict[Rollout, int] = {}
        self.steps = 0

    def extend(
        self,
        rollouts: Sequence[Rollout],
        *,
        enough: Callable[[], bool] | None = None,
    ) -> int:
        """See `Policy`."""
        begun = Counter(rollout.prompt for rollout in rollouts if rollout not in self._ends)
        lengths = {prompt: self._lengths_of(prompt)[:count] for prompt, count in begun.items()}
        self._ends = {one: self._ends.get(one) or lengths[one.prompt].pop() for one in rollouts}
        left = [self._ends[one] - len(one.tokens) for one in rollouts if not one.done]
        return extend_together(
            _SetEnds(self, left),
            rollouts,
            limit=self.settings.completion_tokens,
            end=END,
            enough=enough,
        )


class _SetEnds:
    """A `Batch` of which each row ends when nothing is `left` of it."""

    def __init__(self, policy: LengthsPolicy, left: list[int]) -> None:
        self._policy = policy
        self._batch: Batch = policy.batch()
        self._left = torch.tensor(left)

    def read(self, contexts: Sequence[tuple[int, ...]], rows: Sequence[int], *, room: int) -> torch.Tensor:
        return self._ended(self._batch.read(contexts, rows, room=room))

    def go_on(self, tokens: torch.Tensor, kept: Sequence[int] | None) -> torch.Tensor:
        self._left -= 1
        if kept is not None:
            self._left = self._left[torch.tensor(kept)]
        return self._ended(self._batch.go_on(tokens, kept))

    def _ended(self, logs: torch.Tensor) -> torch.Tensor:
        self._policy.steps += 1
        ends = self._left <= 1
        logs[ends] = -math.inf
        logs[:, END] = torch.where(ends, 0.0, -math.inf)
        return logs


def run(bench: PartialBench, tell: ShowNow) -> PartialResult:
    """Measure what it is worth that long completions go on in the next round, where lengths have a heavy tail."""
    found: dict[float, list[Window]] = {1.0: [], bench.over_provision: []}
    for seed in range(bench.seeds):
        for over_provision, windows in found.items():
            tell(f"seed {seed}, over-provision {over_provision:g}")
            with one_thread():
                windows.append(measure(bench, over_provision, seed))
    whole, partial = found[1.0], found[bench.over_provision]
    return PartialResult(bench=bench, whole=tuple(whole), partial=tuple(partial), machine=this_machine())


def measure(bench: PartialBench, over_provision: float, seed: int) -> Window:
    """Make the rounds."""
    family, begun = Numbers(), 0

    def draw() -> Task:
        nonlocal begun
        begun += 1
        return family.make({}, seed, begun)

    settings = replace(MODEL, completion_tokens=bench.most_tokens)
    policy = LengthsPolicy(settings, seed=seed, lengths=lambda prompt: lengths_of(bench, prompt))
    generator = GroupGenerator(
        policy,
        group_size=bench.group_size,
        draws=partial(assigned_draws, SwarmId(seed.to_bytes(32, "big")), PeerId("")),
        over_provision=over_provision,
    )
    groups = tokens = handed_out = steps = 0
    since = 0.0
    for round in range(bench.before + bench.rounds):
        if round == bench.before:
            groups = tokens = handed_out = 0
            steps, since = policy.steps, time.process_time()
        made = generator.collect(bench.groups, draw, round=round, version=round)
        groups, tokens = groups + len(made.groups), tokens + made.tokens
        handed_out += sum(len(rollout.tokens) for group in made.groups for rollout in group.rollouts)
    seconds = time.process_time() - since
    return Window(groups=groups, seconds=seconds, steps=policy.steps - steps, tokens=tokens, handed_out=handed_out)


def lengths_of(bench: PartialBench, prompt: Sequence[int]) -> list[int]:
    """Lengths of a task's completions, the end with them; the same whenever they are asked for."""
    normal = np.random.default_rng(prompt).normal(size=bench.group_size + 1) * SPREAD / math.sqrt(2)
    lengths = np.rint(bench.median_tokens * np.exp(normal[0] + normal[1:]))
    return [int(length) for length in lengths.clip(1, bench.most_tokens)]


def to_lines(result: PartialResult) -> list[str]:
    """The result for people."""
    bench, (row,) = result.bench, result.rows
    return [
        f"over-provision {over_provision:g}, seed {seed}: {one.groups / one.seconds:.2f} groups/s, "
        f"{one.steps / one.groups:.1f} steps and {one.tokens / one.groups:.0f} tokens a group; "
        f"{one.handed_out / one.groups:.0f} tokens in one"
        for over_provision, windows in ((1, result.whole), (bench.over_provision, result.partial))
        for seed, one in enumerate(windows)
    ] + [str(row)]


CASE: Final = Case(spec=PartialBench, run=run, lines=to_lines, options=LongCaseOptions)
