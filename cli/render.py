"""Output for people: tables and a live line on a terminal, plain lines everywhere else.

Results go to stdout. Progress goes the way of the log, to stderr, so that the two can never write into each other; on
a terminal one more line below it, redrawn in place, says what goes on right now.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.cli import logs
from shoal.cli.peer_lines import PeerLines
from shoal.cli.text import count, escaped, figure, in_one_line, quantity, who_contributed
from shoal.node.control_client import GroupStatus, MemberStatus, Status
from shoal.node.outcome import (
    HELD_OUT_LOSS,
    TRAINING_LOSS,
    HeldOut,
    Notice,
    Outcome,
    PeerChanged,
    PhaseChanged,
    Progress,
    Progressed,
    RoundCertified,
    RoundShared,
    RoundStepped,
    StateFetched,
    StepsMade,
    TakesPart,
    TrainerTraceback,
    is_held_out,
)
from shoal.node.peer_facts import ABSENT, Outlier, PeerFacts, PeerSummary
from shoal.node.reporting.events import TaskRewards
from shoal.node.text import fetched_text
from shoal.protocol.names import THIS_NODE, by_name, short, with_id

if TYPE_CHECKING:
    from rich.console import Console

TRACEBACK_LIMIT_LINES = 200
SHARED_S = 30.0
"""A sampler ends several rounds a second."""
SHOWN_LIMIT = 24
"""Lines of one kind in a status, members among them."""
REACHED = {
    "public": "public: from outside",
    "relayed": "relayed: through members that others reach",
    "unknown": "unknown whether from outside",
}
MEMBER_REACHED = {"self": "this node", "direct": "directly", "gone": "missing"}
"""How this node reaches a member, for people; other words are the node's own."""
TROUBLE = ("gone", "silent")
"""How a member is reached that a user should know of."""
ALL_PEERS = "`shoal status --peers` lists all that this node knows"

log = logging.getLogger(logs.FOR_USER)

LONG_ROUND_S = 60.0
LONG_FETCH_S = 10.0
"""A round, or a fetch, of which nothing was logged for so long has a line that says how far it is."""
PHASES = ("train", "plan", "reduce", "certify")
"""Of a round, in order."""


class ShowNow(Protocol):
    """Changes the line that says what goes on right now."""

    def __call__(self, text: str, share: float | None = None, *, of: str = "") -> None:
        """Say `text`, of which `share`, in 0..1, is done; None where that is not known. of: what is timed beside it."""


@contextlib.contextmanager
def progress_display(*, log_format: str, log_level: str) -> Iterator[ShowNow]:
    """Set up logging and, where stderr is a terminal, a live line below it; yields what changes that line.

    With JSON logs, or into a file, there is no live line and setting it does nothing.
    """
    if log_format == "json" or not sys.stderr.isatty():
        logs.configure(log_format=log_format, level=log_level, console=None)
        yield _show_nothing
        return
    from rich.console import Console

    from shoal.cli.live_line import live_line

    console = Console(stderr=True)
    logs.configure(log_format=log_format, level=log_level, console=console)
    with live_line(console) as show_now:
        yield show_now


def _show_nothing(text: str, share: float | None = None, *, of: str = "") -> None:
    """Show nothing: without a terminal, the log says enough."""


class RunProgress:
    """Tells how a run of a node goes on: what is worth keeping in the log, what passes in the live line."""

    def __init__(self, show_now: ShowNow, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._show_now = show_now
        self._clock = clock
        self._logged_at = clock()
        self._counts = False
        self._phase = ""
        self._certified = ""
        self._peers = PeerLines()
        self._shared = SharedRounds()

    def __call__(self, event: Progress) -> None:
        """Take one event; never blocks for long, never raises."""
        match event:
            case PhaseChanged():
                self._phase = event.phase
                self._show_phase(event.round)
                self._log_after(LONG_ROUND_S, f"round {event.round}: {event.phase}")
            case StateFetched():
                text = fetched_text(event.done_bytes, event.total_bytes)
                self._show_now(text, event.done_bytes / max(event.total_bytes, 1), of="the fetch")
                self._log_after(LONG_FETCH_S, text)
            case StepsMade() if self._phase != "paused":  # what its trainer said last comes after the pause
                text = f"round {event.round}: step {event.step} of {event.steps}"
                self._show_now(f"{text}{self._certified}", event.step / event.steps, of=f"round {event.round}")
                self._log_after(LONG_ROUND_S, text)
            case TakesPart():
                self._tell_of_part(event)
            case RoundCertified():
                self._logged_at = self._clock()
                self._certified = f" · round {event.round} was certified{_losses_of(event)}"
                logs.context.round = event.round
                for line in (*self._peers.late(time.monotonic()), certified_line(event)):
                    log.info("%s", line)
                self._show_phase(event.round + 1)  # a node that is alone begins it in the phase in which it was
            case RoundStepped():
                self._logged_at = self._clock()
                log.info("%s", stepped_line(event))
            case RoundShared():
                for line in self._shared.take(event, time.monotonic()):
                    log.info("%s", line)
            case Notice():
                log.warning("%s", event.text)
            case Progressed():
                log.info("%s", event.text)
            case PeerChanged():
                self._tell_of_peer(event)
            case TrainerTraceback():
                log.error("the workload failed: %s", event.summary)
                for line in event.traceback.splitlines()[-TRACEBACK_LIMIT_LINES:]:
                    log.error("  %s", line)

    def _log_after(self, seconds: float, text: str) -> None:
        """Have a line in the log where none of its kind came for so long: nobody shall take a node for stuck."""
        if self._clock() >= self._logged_at + seconds:
            self._logged_at = self._clock()
            log.info("%s", text)

    def _tell_of_part(self, event: TakesPart) -> None:
        """Say in which round the work of a node begins to count, as long as it does not."""
        self._logged_at = self._clock()
        if event.counts_from > event.round:
            log.info("new in round %d: this node's work counts from round %d on", event.round, event.counts_from)
        elif not self._counts:
            log.info("this node's work counts from round %d on", event.round)
        self._counts = event.counts_from == event.round

    def _tell_of_peer(self, event: PeerChanged) -> None:
        if event.kind == "self":  # before it is known, so that its PeerId stands beside the name
            log.info("this node is %s", f"{event.name} ({event.peer})" if event.name else event.peer)
            logs.known.own = event.peer
        logs.known.note(event.peer, event.name)
        for line in self._peers.take(event, time.monotonic()):
            log.info("%s", line)

    def end(self, outcome: Outcome, command: str) -> None:
        """Say how it ended, and by what command it goes on; a failure has said so."""
        for line in self._shared.rest():
            log.info("%s", line)
        if outcome is Outcome.DONE:
            log.info("done; `%s`, with its options, goes on, `shoal export` takes the model away", command)
        elif outcome in (Outcome.LEFT, Outcome.INTERRUPTED):
            log.info("left the swarm; `%s`, with its options, comes back to it", command)

    def _show_phase(self, round: int) -> None:
        """The phase in the live line, and in JSON records."""
        if self._phase:
            logs.context.round, logs.context.phase = round, self._phase
            share = PHASES.index(self._phase) / len(PHASES) if self._phase in PHASES else None
            self._show_now(f"round {round}: {self._phase}{self._certified}", share, of=f"round {round}")


def certified_line(event: RoundCertified) -> str:
    """`round 3 certified: 4 of 5 contributed, without m3, training loss 1.235, held-out 1.302 (round 2), 8.1 s`."""
    who = who_contributed(event.contributors, event.members, event.missing)
    return f"round {event.round} certified: {who}{_losses_of(event)}, {event.seconds:.1f} s"


def _losses_of(event: RoundCertified) -> str:
    return losses(event.loss, event.held_out, event.loss_metric)


def losses(training: float | None, held_out: HeldOut | None = None, loss_metric: str = "") -> str:
    """The losses that are known, each by its own word, behind a comma. loss_metric: what that of training is in."""
    unit = "" if held_out is None else own_unit(loss_metric, held_out.metric)
    parts = [] if training is None else [f"training loss {figure(training)}{unit}"]
    if held_out is not None:
        parts.append(f"held-out {figure(held_out.value)} (round {held_out.round})")
    return "".join(f", {part}" for part in parts)


def stepped_line(event: RoundStepped) -> str:
    """`round 3 done: with 12D3KooW…, training loss 1.235, 8.1 s`, or with nobody and why."""
    who = f"with {event.partner}" if event.partner is not None else f"without a partner ({in_one_line(event.why)})"
    return f"round {event.round} done: {who}{losses(event.loss)}, {event.seconds:.1f} s"


class SharedRounds:
    """Lines about an agent's rounds: one at once, then one each SHARED_S for all that ended meanwhile."""

    def __init__(self) -> None:
        self._untold: list[RoundShared] = []
        self._told_at = -math.inf

    def take(self, event: RoundShared, now: float) -> list[str]:
        """The lines that this round makes; now: seconds of one clock."""
        self._untold.append(event)
        if now - self._told_at < SHARED_S:
            return []
        self._told_at = now
        return self.rest()

    def rest(self) -> list[str]:
        """The line for what was not told yet, if there is anything."""
        untold, self._untold = self._untold, []
        return [shared_line(untold)] if untold else []


def shared_line(events: Sequence[RoundShared]) -> str:
    """`rounds 3 to 9 done: reward 0.231, 28 own groups and 4 of others, 31.2 s`; the reward is the mean of the own."""
    own, seconds = sum(event.own for event in events), sum(event.seconds for event in events)
    earned = math.fsum(event.own * event.reward for event in events if event.reward is not None)
    reward = f"reward {earned / own:.3f}, " if own else ""
    groups = f"{count(own, 'own group')} and {sum(event.external for event in events)} of others"
    first, last = events[0].round, events[-1].round
    which = f"round {last}" if first == last else f"rounds {first} to {last}"
    return f"{which} done: {reward}{groups}, {seconds:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One member, as texts that are safe to show. name: marked where it is this node; may be nothing."""

    peer: str
    name: str
    phase: str
    speed: str
    reach: str


def print_status(status: Status) -> None:
    """A node's status on stdout: a table of the members on a terminal, plain lines into a file.

    However large the swarm, it is some dozens of lines.
    """
    for line in status_lines(status):
        print(line)
    shown, more = notable_members(status)
    if sys.stdout.isatty():
        heads = ("member", "id", "phase", "tokens/s")
        print_table(heads, [(row.name, short(row.peer), row.phase, row.speed) for row in shown])
    else:
        for row in shown:
            print(f"member     {row.peer} {row.phase} {row.speed} tokens/s {row.name}".rstrip())
    if more:
        print(f"member     and {more:,} more; {ALL_PEERS}")


def print_peers(peers: Sequence[PeerFacts]) -> None:
    """All peers that a node knows on stdout, one a line, its fields apart by blanks: for people, grep and sort."""
    for known in peers:
        role = "member" if known.member else "no member"
        facts = [
            *(known.peer, known.state, role, known.reach, f"round {known.round}", f"{known.speed:.1f} tokens/s"),
            *(known.software, known.address, known.name),
        ]
        print(in_one_line("  ".join(facts)))


def notable_members(status: Status) -> tuple[list[MemberRow], int]:
    """The members to show, and how many more there are: all of a few, else those that are missing or silent first."""
    more = len(status.members) - SHOWN_LIMIT
    shown = status.members
    if more > 0:  # the order is kept otherwise
        shown = sorted(shown, key=lambda member: member.reach != "self" and 1 + (member.reach not in TROUBLE))
    return [_member_row(member, status) for member in shown[:SHOWN_LIMIT]], max(more, 0)


def _member_row(member: MemberStatus, status: Status) -> MemberRow:
    return MemberRow(
        peer=in_one_line(member.peer_id),
        name=in_one_line(marked(member.peer_id, status)),
        phase=in_one_line(member.phase),
        speed=figure(member.tokens_per_s),
        reach=in_one_line(MEMBER_REACHED.get(member.reach, member.reach)) or "–",
    )


def status_lines(status: Status) -> list[str]:
    """All of a status but its members, a fact a line."""
    own_name = status.names.get(status.peer_id)
    facts = [
        *(() if own_name is None else (("name", own_name),)),
        ("peer id", status.peer_id),
        ("swarm", status.swarm_id),
        *(("address", address) for address in status.addresses),
        ("reached", REACHED.get(status.reachability, status.reachability)),
        *(() if status.dashboard is None else (("page", status.dashboard_link or status.dashboard),)),
        ("phase", status.doing or status.phase),
        *(("seat", text) for text in seat_told(status)),
        *(("alert" if bad else "help", text) for bad, text in advice(status)),
        ("round", f"{status.round} (term {status.term}), digest {status.digest or '–'}"),
        ("loss", losses_told(status) or "–"),
        ("speed", _speed(status)),
        ("bytes", f"{quantity(status.bytes.sent, 'B')} sent, {quantity(status.bytes.received, 'B')} received"),
        *(("fetched", told) for told in filter(None, [fetched_told(status)])),
        *(("caps", caps) for caps in filter(None, [caps_told(status)])),
    ]
    lines = [f"{name:<10} {in_one_line(value)}" for name, value in facts] + rollout_lines(status)
    lines += sample_lines(status) + peer_lines(status)
    lines += voter_lines(status) + settings_lines(status) + ban_lines(status)
    lines += rollback_lines(status)
    return lines + _few([f"missing    {_who(peer, status)}" for peer in status.missing])


def advice(status: Status) -> list[tuple[bool, str]]:
    """List what stands in the way and what helps, as the page has it, the worst first; True before what is bad."""
    found = [check for check in status.checks if check.state != "ok"]
    return [(check.state == "bad", by_name(check.text, status.names, own=status.peer_id)) for check in found]


def seat_told(status: Status) -> list[str]:
    """When it is this node's turn, and from when on its work counts, as the page has it."""
    return [check.detail for check in status.checks if check.name == "Seat"]


def fetched_told(status: Status) -> str:
    """States and finals, images of policies and their changes, that came from others, in words; empty without any."""
    found = sorted(status.fetched.items())
    return ", ".join(f"{what} {one.times} ({quantity(one.bytes, 'B')})" for what, one in found)


def caps_told(status: Status) -> str:
    """Caps of the node's upload and download, in words; empty without any cap."""
    caps = (("up", status.max_upload), ("down", status.max_download))
    return ", ".join(f"{quantity(cap, 'B/s')} {way} at most" for way, cap in caps if cap)


def peer_lines(status: Status) -> list[str]:
    """Sum up all peers that the node knows, members or not; nothing of a node that does not say."""
    known = status.peers
    if known is None:
        return []
    lines = [f"peers      {peer_counts(known)}"]
    if len(known.software) > 1:
        versions = [f"{in_one_line(name)}: {number:,}" for name, number in known.software.items()]
        lines.append(f"software   {', '.join(versions)}")
    if known.known > SHOWN_LIMIT:
        lines += [f"{name:<10} {text}" for name, text in _speed_texts(known, status)]
    if known.most_behind:
        lines.append(f"behind     {_named(known.most_behind, 'rounds', status)}")
    return lines + [f"gone       {_who(peer, status)}" for peer in known.gone if peer not in status.missing]


def peer_counts(known: PeerSummary) -> str:
    """`1,001 known, 971 alive: 940 training, 31 joining; 30 gone; 32 not members, 23 behind`: the alive sum to that."""
    absent = {state: number for state, number in known.states.items() if state in ABSENT}
    states = ", ".join(f"{number:,} {state}" for state, number in known.states.items() if state not in absent)
    others = ", ".join(f"{number:,} {state}" for state, number in absent.items())
    ways = [(known.following, "not members" if known.following != 1 else "not a member"), (known.behind, "behind")]
    more = ", ".join(f"{number:,} {what}" for number, what in ways if number)
    return f"{known.known:,} known, {known.alive:,} alive: {'; '.join(filter(None, (states, others, more)))}"


def _speed_texts(known: PeerSummary, status: Status) -> list[tuple[str, str]]:
    if known.speeds is None:
        return []
    low, middle, high = (quantity(speed, "tokens/s") for speed in known.speeds)
    return [
        ("together", f"{quantity(known.tokens_per_s, 'tokens/s')}, as they say"),
        ("a node", f"{middle} in the middle; one in ten below {low}, one in ten above {high}"),
        ("slowest", _named(known.slowest, "tokens/s", status)),
    ]


def _named(outliers: Sequence[Outlier], unit: str, status: Status) -> str:
    return ", ".join(f"{_who(known.peer, status)} ({known.value:.0f} {unit})" for known in outliers)


def _who(peer: str, status: Status) -> str:
    """A peer as its name and whole PeerId, which commands take; safe to print."""
    return in_one_line(with_id(peer, status.names, own=status.peer_id))


def marked(peer: str, status: Status) -> str:
    """The name of a peer whose PeerId stands beside it, and whether it is this node; may be nothing."""
    return status.names.get(peer, "") + (THIS_NODE if peer == status.peer_id else "")


def ban_lines(status: Status) -> list[str]:
    """List the banned peers, since when and for how long."""
    return _few(
        [
            f"banned     {_who(ban.peer_id, status)} by round {ban.round}, "
            + ("for ever" if ban.until is None else f"until round {ban.until}")
            for ban in status.bans
        ]
    )


def _few(lines: Sequence[str]) -> list[str]:
    """The first lines of a kind, and how many more there are."""
    more = len(lines) - SHOWN_LIMIT
    if more <= 0:
        return list(lines)
    return [*lines[:SHOWN_LIMIT], f"{lines[0][:10]} and {more:,} more; `shoal status --json` has them all"]


def _speed(status: Status) -> str:
    blocked = "" if status.blocked_fraction is None else f", {status.blocked_fraction:.1%} of the time blocked"
    return f"{speed_told(status).removeprefix('speed ')}{blocked}"


def speed_told(status: Status) -> str:
    """`1,235 tokens/s`; a node that has measured none does not say 0, and an agent says what it wrote in all."""
    if status.tokens_per_s is not None:
        return f"{figure(status.tokens_per_s)} tokens/s"
    if status.rollouts is not None:
        return f"{status.rollouts.generated_tokens:,} tokens generated"
    return "speed not measured yet"


def losses_told(status: Status) -> str:
    """`held-out 1.235 bits per byte; training 1.302`: which of the two a number is, is said. Empty if none is known."""
    parts = []
    if status.loss is not None and is_held_out(status.metric):
        parts.append(f"held-out {figure(status.loss)} {status.metric.removeprefix(HELD_OUT_LOSS)}".rstrip())
    if status.train_loss is not None:
        named = "" if status.train_metric in (TRAINING_LOSS, HELD_OUT_LOSS) else f" {status.train_metric}".rstrip()
        unit = own_unit(status.train_metric, status.metric) if parts else named
        parts.append(f"training {figure(status.train_loss)}{unit}")
    return "; ".join(parts)


def own_unit(loss_metric: str, metric: str) -> str:
    """Note behind a training loss that stands beside a held-out one of another unit: nobody shall compare the two."""
    return "" if loss_metric == metric else " (own unit)"


def rollout_lines(status: Status) -> list[str]:
    """Summarise the rollouts that a node made, took and refused; nothing where it shares none."""
    known = status.rollouts
    if known is None:
        return []
    reasons = ", ".join(f"{in_one_line(reason)} {times}" for reason, times in sorted(known.rejected.items()))
    pulled = f"{known.pulled} pulled ({quantity(known.pulled_bytes, 'B')}), {known.taken} taken"
    if known.role == "sample":  # it pulls none
        pulled = f"{known.wanted} taken by others{', waits until they take more' if known.waits else ''}"
    held_out = (
        ""
        if known.held_out_reward is None
        else f"; greedy {figure(known.held_out_reward)} on {known.held_out_tasks} held-out tasks "
        f"after {count(known.held_out_round, 'round')}"
    )
    return [
        *([f"agent      {in_one_line(known.teaching)}"] if known.teaching else []),
        f"reward     {figure(known.reward)} ({known.role}){held_out}",
        f"groups     {known.made} made, {pulled}",
        f"refused    {reasons or 'nothing'}",
        *(_task_line(family, rewards) for family, rewards in sorted(known.tasks.items())),
    ]


def _task_line(family: str, rewards: TaskRewards) -> str:
    kinds = (("own", rewards.own, rewards.reward), ("others'", rewards.external, rewards.external_reward))
    told = ", ".join(f"{whose} {figure(mean)} in {count(groups, 'group')}" for whose, groups, mean in kinds if groups)
    return f"task       {in_one_line(family)}: {told or '–'}"


def group_lines(status: Status) -> list[str]:
    """The newest groups of rollouts, newest first: of whom, how old, by which policy, the reward claimed."""
    known = status.rollouts
    return [_group_line(group, status) for group in reversed(known.groups if known is not None else ())]


def _group_line(group: GroupStatus, status: Status) -> str:
    policy = "" if group.policy == group.round else f", policy of round {group.policy}"
    return in_one_line(
        f"{group.family}: {_who(group.peer_id, status)}, round {group.round}{policy}, {_rounds_ago(group.age)}: "
        f"reward {figure(group.reward)} of {count(group.completions, 'answer')}"
    )


def _rounds_ago(rounds: int) -> str:
    return "in this round" if rounds <= 0 else f"{count(rounds, 'round')} ago"


def sample_lines(status: Status) -> list[str]:
    """Texts of the certified model, a prompt a line; nothing where it was not asked."""
    known = status.samples
    if known is None:
        return []
    return [f"sample     {sample_text(prompt, text)} (round {known.round})" for prompt, text in known.texts.items()]


def sample_text(prompt: str, text: str) -> str:
    """`"The " → "cat\\nsat"`: what a model said after a prompt, in one line that no terminal takes for a command."""
    return f'"{escaped(prompt)}" → "{escaped(text)}"'


def voter_lines(status: Status) -> list[str]:
    """List the voters, in one word where they are all of the members and nobody else."""
    if sorted(status.voters) == sorted(member.peer_id for member in status.members):
        return [f"voters     {'the member' if len(status.voters) == 1 else 'all members'}"] if status.voters else []
    return _few([f"voter      {_who(peer, status)}" for peer in status.voters])


def settings_lines(status: Status) -> list[str]:
    """List the settings that were amended, and the amendments that members ask for, each with its reason."""
    lines = [f"setting    {_setting(key, value)}, amended" for key, value in status.settings.items()]
    reasons = {True: "ordered there", False: "as the authority asks"}
    for wish in status.amendments:
        what = ", ".join(_setting(key, value) for key, value in wish.settings.items())
        lines.append(f"amendment  {_who(wish.peer_id, status)} would amend {what}, {reasons[wish.asked]}")
    return lines


def _setting(key: str, value: object) -> str:
    return in_one_line(f"{key} = {json.dumps(value)}")


def rollback_lines(status: Status) -> list[str]:
    """List the members that would go back, each with its round and reason."""
    reasons = {True: "its user's order", False: "its policy"}
    return [
        f"rollback   {_who(wish.peer_id, status)} would go back to round {wish.round}, {reasons[wish.asked]}"
        for wish in status.rollbacks
    ]


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, console: Console | None = None) -> None:
    """A table on the terminal; the cells are text, not markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    (console or Console()).print(table)
