"""Checks of a node: what its user should know, and what helps, worked out once for the page, `status` and `watch`.

What stands in the way comes first. See `Check` for what may stand in the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from shoal.node.control_client import Check, Status
from shoal.node.loops.attendance import AWAY, WAITS_MARK
from shoal.node.text import count, fetched_text
from shoal.protocol.amending import Setting, told_settings
from shoal.protocol.names import called, short
from shoal.protocol.no_quorum import forgetting
from shoal.protocol.seats import turn_text
from shoal.protocol.voting import VOTERS, FaultModel, are_enough

DISK_LOW_BYTES = 2 << 30
DISK_OUT_BYTES = 256 << 20
BLOCKED_HIGH = 0.3
CONNECT: Final = "connect this machine to a network; this node then links again by itself"
NAMED: Final = 3
"""Peers that a text names; of more, the others are counted."""


def checked(status: Status) -> Status:
    """The status with what follows from it: its checks, and what the node does, in words."""
    status = msgspec.structs.replace(status, doing=_doing(status))
    return msgspec.structs.replace(status, checks=_checks(status))


def _doing(status: Status) -> str:
    """`train, step 40 of 100`, or how much of the state is here: the phase, and how far it is where that is known."""
    if status.phase == "train" and status.step is not None and status.steps is not None:
        return f"{status.phase}, step {status.step} of {status.steps}"
    if status.fetched_bytes is not None and status.state_bytes is not None:
        return f"{status.phase}, {fetched_text(status.fetched_bytes, status.state_bytes)}"
    if status.phase == "no quorum" and status.missing:
        return f"{status.phase}, without {_listed([called(one, status.names) for one in status.missing])}"
    if status.unready:
        return f"{status.phase}, waits for the work of {_listed([called(one, status.names) for one in status.unready])}"
    return status.phase


def _checks(status: Status) -> list[Check]:
    signing = [*status.alerts, *([] if status.abstains is None else [status.abstains])]
    checks = [
        *_bans(status),
        *(Check(name="Alert", state="bad", detail=text) for text in dict.fromkeys(signing)),
        *(_quorum(status) if status.node.certifies and status.voters else ()),
        *_proposals(status),
        *_place(status),
        *_company(status),
        _training(status),
        *_disk(status),
    ]
    return sorted(checks, key=lambda check: not check.above and check.state != "bad")


def _bans(status: Status) -> list[Check]:
    others = [ban for ban in status.bans if ban.peer_id != status.peer_id]
    found = []
    for ban in status.bans:
        until = "for ever" if ban.until is None else f"until round {ban.until}"
        if ban.peer_id == status.peer_id:
            why = (
                "most often one key ran in two places, or an old copy of a data folder was put back; the proof lies in "
                "`evidence/` of the others' data folders, and `shoal evidence` checks it; ask whoever holds the "
                "authority's key"
            )
            what = f"the swarm banned this node {until} and does without it"
            found.append(Check(name="Banned", state="bad", detail=what, remedy=why))
        elif ban in others[:NAMED]:
            found.append(
                Check(name="Banned", state="warn", detail=f"{ban.peer_id} is banned {until}, by round {ban.round}")
            )
    return found


def _quorum(status: Status) -> list[Check]:
    missing, voters = status.missing, len(status.voters)
    here, lying = voters - len(missing), status.faults == "lying"
    paused = [member for member in status.members if member.phase == "paused" and status.paused]
    gone = sum(member.reach == "gone" for member in status.members)
    others_train = status.peers is not None and status.peers.states.get("training", 0) > 0
    if paused and not others_train and len(status.members) > 1 and len(paused) + gone == len(status.members):
        whom = f"all {len(paused)} members here are paused" if len(paused) > 1 else "the only member here is paused"
        return [
            Check(
                name="Majority",
                state="warn",
                detail=f"rounds stand: {whom}",
                remedy="`shoal resume` at any of them goes on",
                above=True,
            )
        ]
    if not missing:
        return [Check(name="Majority", state="ok", detail=f"{here} of {count(voters, 'voter')} here; rounds can end")]
    lost = [peer for peer in missing if peer not in status.revoked]
    one = len(lost) == 1
    remedy = f"start {'the missing one' if one else 'those that are missing'} again where {'it' if one else 'they'} ran"
    ways = [CONNECT if status.cut_off else remedy] if lost else []
    of_voters, who = f"{here} of {count(voters, 'voter')}", _listed(missing)
    if are_enough(here, voters, FaultModel(status.faults)):
        detail = f"rounds go on with {of_voters}, without {who}"
        return [Check(name="Majority", state="warn", detail=detail, remedy="; ".join(ways))]
    wait = "may wait" if 2 * here == voters and not lying else "wait"  # of two halves, one has the casting vote
    quorum = "more than two thirds" if lying else "a majority"
    silent = [peer for peer in status.long_missing if peer in lost]
    if silent:
        ways.append(f"silent for an hour, and if gone for good: {forgetting([*status.revoked, *silent])}")
    if status.revoked:
        ways.insert(0, f"revoked, and still counted: {forgetting(status.revoked)}")
    meanwhile = "trains on alone meanwhile" if status.trains_alone else "trains nothing until then"
    detail = f"rounds {wait} for {quorum}, {of_voters} here, without {who}; this node {meanwhile}"
    return [Check(name="Majority", state="bad", detail=detail, remedy="; ".join(ways))]


def _listed(peers: Sequence[str]) -> str:
    more = len(peers) - NAMED
    return ", ".join(peers[:NAMED]) + (f" and {count(more, 'other')}" if more > 0 else "")


def _proposals(status: Status) -> list[Check]:
    """Proposals of other members' users, with the command to agree; those of an authority or a policy need none."""
    wishes = [
        *((wish.peer_id, wish.asked, f"amend {told_settings(wish.settings)}", _amending(wish.settings))
          for wish in status.amendments),
        *((wish.peer_id, wish.asked, f"go back to round {wish.round}", f"rollback --to {wish.round}")
          for wish in status.rollbacks),
    ]  # fmt: skip
    agreed: dict[tuple[str, str], list[str]] = {}
    for peer, asked, what, command in wishes:
        if asked:
            agreed.setdefault((what, command), []).append(peer)
    return [
        Check(
            name="Proposal",
            state="warn",
            detail=f"{len(peers)} of {count(len(status.voters), 'voter')} would {what}: {_listed(peers)}",
            remedy=f"to agree: `shoal {command}`",
            above=True,
        )
        for (what, command), peers in agreed.items()
        if status.peer_id not in peers and status.peer_id in status.voters
    ]


def _amending(settings: dict[str, Setting]) -> str:
    options = []
    for key, value in settings.items():
        section, _, peer = key.partition(".")
        if section == VOTERS:
            options.append(f"--{'add' if value else 'remove'}-voter {peer}")
        else:
            options.append(f"--set {key}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(("amend", *options))


def _place(status: Status) -> list[Check]:
    """Where in the rounds this node is: its seat, and from which round on its work counts."""
    found = []
    if status.turn_in_rounds is not None:
        found.append(turn_text(status.turn_in_rounds))
    if status.outside is not None:
        found.append(str(status.outside))
    if status.site is not None:
        found.append(_site(status.site, status.names))
    if status.counts_from is not None and status.counts_from > status.round + 1:
        found.append(f"watches round {status.round + 1}, and its work counts from round {status.counts_from} on")
    return [Check(name="Seat", state="ok", detail=text) for text in found]


def _site(mates: Sequence[str], names: Mapping[str, str]) -> str:
    if not mates:
        return "nobody else of its site is here: it contributes by itself"
    return f"contributes together with {', '.join(names.get(peer, short(peer)) for peer in mates)}"


def _alive(status: Status) -> int:
    """How many other nodes are, for all that is known."""
    reach = {} if status.peers is None else status.peers.reach
    return sum(reach.get(way, 0) for way in ("direct", "detour", "suspect"))


def _company(status: Status) -> list[Check]:
    if status.peers is None:
        return []
    reach = status.peers.reach
    direct, detour, silent, unlinked = (reach.get(way, 0) for way in ("direct", "detour", "suspect", "unlinked"))
    alive = _alive(status)
    company = Check(name="Company", state="ok", detail=f"{count(alive, 'other node')} alive")
    if alive == 0:
        remedy = "type the line that `shoal link` prints on another machine"
        if len(status.members) > 1:
            remedy = f"start the other members again, or {remedy}"
        remedy = CONNECT if status.cut_off else remedy
        company = Check(name="Company", state="warn", detail="no other node is here", remedy=remedy)
    ways = [(direct, "direct"), (detour, "through others"), (silent, "silent"), (unlinked, "not reached yet")]
    detail = ", ".join(f"{number:,} {text}" for number, text in ways if number) or "none"
    links = Check(name="Links", state="ok", detail=detail)
    if detour + silent > direct:
        remedy = "look at this machine's network: does it let others in?"
        links = Check(name="Links", state="warn", detail=f"links: {detail}", remedy=remedy)
    return [company, links]


def _training(status: Status) -> Check:
    def check(detail: str, remedy: str = "", *, state: Literal["ok", "warn"] = "ok", above: bool = False) -> Check:
        return Check(name="Training", state=state, detail=detail, remedy=remedy, above=above)

    if status.paused:
        why = f"paused: {status.why_paused}" if status.why_paused else "paused"
        remedy = "start your script again" if status.why_paused == AWAY else "go on with `shoal resume`"
        remedy = "" if WAITS_MARK in why else remedy
        return check(f"{why}; it votes and keeps the state, and trains nothing", remedy, state="warn", above=True)
    if status.phase == "no quorum":
        doing = "trains on alone" if status.trains_alone else "trains nothing"
        return check(f"{doing} until there is a majority", state="warn")
    if status.phase == "joining" and status.round and status.digest is None and not _alive(status):
        detail = f"the state of round {status.round} is not here, nor anybody who may have it"
        remedy = "start a node that has it, or restore this data folder from a backup"
        return check(detail, remedy, state="warn", above=True)
    if status.phase in ("joining", "leaving"):
        return check(status.doing)
    if status.rollouts is not None:
        return check(f"{status.rollouts.taken:,} groups of others taken so far")
    if status.stuck:
        detail = "no step for minutes: no round waits for this node until its trainer makes one"
        return check(detail, "see what holds it up", state="warn", above=True)
    if status.tokens_per_s is None:
        return check("speed not measured yet")
    detail = f"{status.tokens_per_s:,.0f} tokens/s"
    if status.blocked_fraction is None:
        return check(detail)
    detail += f", waits {status.blocked_fraction:.0%} of its time"
    if status.blocked_fraction > BLOCKED_HIGH:
        late = [called(peer, status.names) for peer in status.unready or status.without if peer != status.peer_id]
        remedy = f"see what holds up {_listed(late)}" if late else "more inner steps a round, or a faster link"
        return check(detail, remedy, state="warn")
    return check(detail)


def _disk(status: Status) -> list[Check]:
    free = status.node.disk_free_bytes
    if free is None:
        return []
    detail = f"{free / 2**30:,.1f} GiB free"
    if free >= DISK_LOW_BYTES:
        return [Check(name="Disk", state="ok", detail=detail)]
    state: Literal["warn", "bad"] = "bad" if free < DISK_OUT_BYTES else "warn"
    return [Check(name="Disk", state=state, detail=f"disk: {detail}", remedy="make room, or keep fewer checkpoints")]
