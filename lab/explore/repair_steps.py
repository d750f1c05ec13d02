"""Possible steps of one member of a round with repairs in one state, given others' messages by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import TYPE_CHECKING

from shoal.collectives.finals import Finals
from shoal.lab.explore.repair_copy import NOW, unhear
from shoal.lab.explore.repair_judge import Parcel
from shoal.lab.explore.repair_run import Passed, Run, Said, WayBack
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Held, Message, Plan

if TYPE_CHECKING:
    from shoal.lab.explore.repair_member import Members

Act = Callable[[Run], None]
Doing = tuple[str, Act]
"""Action of a member: its description, and the function that does it."""


@dataclass(frozen=True, slots=True)
class Voice:
    """Part of a member that others may notice: what it said and posted, the plans it has all finals of, a restart."""

    said: Said
    posted: frozenset[Parcel]
    finals: frozenset[tuple[bytes, bytes]]
    old: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a step. `votes` are (view, value hash); a `violation` ends the search."""

    text: str
    after: int
    crashes: int
    votes: tuple[tuple[int, bytes], ...]
    last_vote: bool
    computed: bool
    violation: str | None


@dataclass(frozen=True, slots=True)
class Step:
    position: int
    number: int
    text: str
    crashes: int = 0


class Context:
    """One member in one state, and what others said by then."""

    def __init__(self, members: Members, position: int, number: int, others: list[tuple[int, Voice]]) -> None:
        self._members = members
        self._position = position
        self._number = number
        self._others = others

    def _run(self) -> Run:
        members = self._members
        peers = members.setup.peers
        helds = {peers[i]: [m for m in voice.said if isinstance(m, Held)] for i, voice in self._others}
        return Run(members.setup, members.components, self._position, members.states[self._number], helds)

    def _step(self, text: str, crashes: int = 0) -> Step:
        return Step(self._position, self._number, text, crashes)

    def plainly(self, doings: Iterable[Doing], interrupting: list[Doing]) -> Iterator[Outcome]:
        """Try each of these; those that interrupt a reduction are noted."""
        for text, act in doings:
            run = _tried(self._run(), act)
            yield from self._members.outcomes(self._step(text), run)
            if run.interrupted:
                interrupting.append((text, act))

    def after_arrivals(self, doings: Iterable[Doing], wanted: tuple[int, ...]) -> Iterator[Outcome]:
        """Try each of these after any part of what is wanted has arrived; of two for one place only one."""
        for arrived in _parts(self._sorted(wanted), all_of_them=False):
            what = ", ".join(map(told_parcel, arrived))
            for text, act in doings:
                run = self._run()
                for parcel in arrived:
                    run.deliver(parcel)
                yield from self._members.outcomes(self._step(f"gets {what}; {text}"), _tried(run, act))

    def _sorted(self, wanted: tuple[int, ...]) -> list[Parcel]:
        parcels = [self._members.parcels[number] for number in wanted]
        return sorted(parcels, key=lambda p: (p.final, p.chunk, p.sender, p.payload))

    # -- what may happen -----------------------------------------------------------------------------------------

    def arrives(self, wanted: tuple[int, ...]) -> Iterator[Outcome]:
        """Payloads come in: one at a time, or, in reduced schedules, as many as it takes to come to something."""
        parcels, before = self._sorted(wanted), self._members.states[self._number].posted
        groups: list[tuple[Parcel, ...]] = [(parcel,) for parcel in parcels]
        if self._members.scope.reduced:
            chunks = sorted({p.chunk for p in parcels if not p.final})
            gathered = [[p for p in parcels if not p.final and p.chunk == chunk] for chunk in chunks]
            gathered.append([p for p in parcels if p.final])
            groups = [arrived for group in gathered for arrived in _parts(group, all_of_them=True)]
        for arrived in groups:
            run = self._run()
            for parcel in arrived:
                run.deliver(parcel)
            if not self._members.scope.reduced or run.posted != before or run.computed or run.violation:
                text = f"gets {', '.join(map(told_parcel, arrived))}"
                yield from self._members.outcomes(self._step(text), run)

    def hears(self, sender: int, message: Message) -> Iterator[Doing]:
        """A message that any member may act on; a plan also with what others hold, and after a partition."""
        text = f"hears member {sender} {self._members.told(message)}"
        yield text, lambda run: run.hear(sender, message)
        state, everyone = self._members.states[self._number], self._members.setup.everyone
        machine, plan = state.machine, state.machine.plan
        if not isinstance(message, Plan) or plan is None or state.over:
            return
        held = [
            (other, word)
            for other, voice in (self._others if machine._closed_off is not None else ())
            for word in voice.said
            if isinstance(word, Held) and word.lineage == message.lineage and word.evicted == message.evicted
        ]

        def knowing(run: Run) -> None:
            for other, word in held:
                run.hear(other, word)
            run.hear(sender, message)

        def parted(run: Run) -> None:
            run.machine.peers_alive([], NOW)
            died = run.machine._planner_died
            unhear(run.machine, everyone, run.readies)
            run.machine._planner_died = died
            run.hear(sender, message)

        if held:
            yield f"{text}, knowing what others hold", knowing
        forgot = self._members.scope.stale or any(voice.old for other, voice in self._others if other == sender)
        if forgot and plan.view == message.view and plan.attempt >= message.attempt and plan != message:
            yield f"{text}, which was away", parted

    def acts(self, quiet: tuple[tuple[int, int], ...]) -> Iterator[Doing]:
        """Let a lead act on any part of what was said to it, any belief about who lives, deadlines passed or not."""
        setup = self._members.setup
        me = setup.peers[self._position]
        others = [peer for peer in setup.peers if peer != me]
        beliefs = [frozenset({me, *some}) for size in range(len(others) + 1) for some in combinations(others, size)]
        words = [(sender, self._members.messages[which]) for sender, which in quiet]
        for heard in _subsets(words):
            for alive in beliefs:
                for passed in Passed:
                    yield self.looks(heard, alive, passed)

    def looks(self, heard: tuple[tuple[int, Message], ...], alive: frozenset[PeerId], passed: Passed) -> Doing:
        """Have the member look, with these words, this belief and this much time passed."""
        setup = self._members.setup
        said = "" if not heard else f"with word from {', '.join(f'member {i}' for i, _ in heard)} "
        dead = ", ".join(setup.name(p) for p in setup.peers if p not in alive) or "nobody"
        return f"{said}finds {dead} dead{passed.value}", partial(_look, heard, alive, passed)

    def fetches(self, known: frozenset[tuple[bytes, bytes]]) -> Iterator[Outcome]:
        """All finals of a proposed plan come from somebody who has them."""
        for which in sorted(known):
            there = self._members.finals[which]
            finals = Finals.open(there.plan, [chunk.payload for chunk in there.chunks])
            run = self._run()
            run.compute(finals)
            yield from self._members.outcomes(self._step("fetches the finals of what is proposed"), run)

    def copies(self, known: frozenset[tuple[bytes, bytes]]) -> Iterator[Outcome]:
        """The finals that lack in the reduction under way come from somebody who has them all."""
        for which in sorted(known):
            run = self._run()
            run.copy(self._members.finals[which])
            yield from self._members.outcomes(self._step("copies the finals that lack"), run)

    def returns(self) -> Iterator[Outcome]:
        """Kill the member, so that it loses what is not on disk, and have it return."""
        for way in self._members.ways_back(self._position, self._members.states[self._number]):
            run = _tried(self._run(), partial(_return, way))
            yield from self._members.outcomes(self._step(f"is killed and {way.value}", crashes=1), run)


def _tried(run: Run, act: Act) -> Run:
    try:
        act(run)
    except LocalError as error:
        run.violation = run.violation or f"a machine failed: {error}"
    return run


def _return(way: WayBack, run: Run) -> None:
    run.restart(way)


def _look(heard: tuple[tuple[int, Message], ...], alive: frozenset[PeerId], passed: Passed, run: Run) -> None:
    for sender, message in heard:
        run.hear(sender, message)
    run.believe(alive, passed)


def _parts(parcels: list[Parcel], *, all_of_them: bool) -> Iterator[tuple[Parcel, ...]]:
    """Every set of payloads, one for each place, or, unless it must be all, none; but not the empty one."""
    places: dict[tuple[int, bool, int], list[Parcel | None]] = {}
    for parcel in parcels:
        places.setdefault((parcel.sender, parcel.final, parcel.chunk), [] if all_of_them else [None]).append(parcel)
    for choice in product(*places.values()):
        arrived = tuple(parcel for parcel in choice if parcel is not None)
        if arrived:
            yield arrived


def _subsets(words: list[tuple[int, Message]]) -> Iterator[tuple[tuple[int, Message], ...]]:
    """One word of each kind from each sender, or none."""
    kinds: dict[tuple[int, type], list[tuple[int, Message] | None]] = {}
    for sender, message in words:
        kinds.setdefault((sender, type(message)), [None]).append((sender, message))
    for choice in product(*kinds.values()):
        yield tuple(one for one in choice if one is not None)


def told_parcel(parcel: Parcel) -> str:
    what = "final" if parcel.final else "contribution to"
    return f"{what} {parcel.chunk} of member {parcel.sender}"
