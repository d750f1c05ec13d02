"""Health of this node in a few lines, each with a remedy where something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shoal.node.dashboard.facts import NodeFacts
from shoal.node.loops.attendance import WAITS_MARK
from shoal.node.peer_facts import PeerSummary
from shoal.protocol.seats import turn_text
from shoal.protocol.voting import FaultModel, are_enough

DISK_LOW_BYTES = 2 << 30
DISK_OUT_BYTES = 256 << 20
BLOCKED_HIGH = 0.3

State = Literal["ok", "warn", "bad"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line. remedy: what helps; "" where nothing has to be done."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def health_of(node: NodeFacts, peers: PeerSummary) -> list[Check]:
    """The checks, always the same ones in the same order, but for those without a meaning yet."""
    checks = [_company(peers), _links(peers), _training(node), _disk(node)]
    if node.turn_in_rounds is not None:
        checks.insert(0, Check(name="Seat", state="ok", detail=turn_text(node.turn_in_rounds)))
    if node.certifies:
        checks.insert(0, _majority(node))
    return [*map(_alert, node.alerts), *checks]


def _alert(text: str) -> Check:
    what, _, remedy = text.partition(": ")
    return Check(name="Signatures", state="bad", detail=what, remedy=remedy)


def _majority(node: NodeFacts) -> Check:
    here = node.voters - len(node.missing)
    detail = f"{here} of {node.voters} {'voter' if node.voters == 1 else 'voters'} here"
    faults = FaultModel.LYING if node.lying else FaultModel.CRASH
    if node.missing and not are_enough(here, node.voters, faults):
        return Check(
            name="Majority",
            state="bad",
            detail=f"{detail}; rounds wait",
            remedy="start the missing nodes again with their --data-dir" + _if_gone(node.long_missing),
        )
    state: State = "warn" if node.missing else "ok"
    return Check(name="Majority", state=state, detail=f"{detail}; rounds {'go on' if node.missing else 'can end'}")


def _if_gone(long_missing: Sequence[str]) -> str:
    who = " ".join(long_missing)
    return (
        f"; silent for an hour, and if gone for good: shoal rebase --forget {who}, where the authority's key is"
        if who
        else ""
    )


def _company(peers: PeerSummary) -> Check:
    others = sum(peers.reach.get(reach, 0) for reach in ("direct", "detour", "suspect"))
    if others == 0:
        return Check(
            name="Company",
            state="warn",
            detail="no other node is here",
            remedy="type the line that shoal link prints on another machine",
        )
    return Check(name="Company", state="ok", detail=f"{others:,} other {'node' if others == 1 else 'nodes'} alive")


def _links(peers: PeerSummary) -> Check:
    direct, *rest = (peers.reach.get(reach, 0) for reach in ("direct", "detour", "suspect", "unlinked"))
    words = ("through others", "silent", "not reached yet")
    trouble = [f"{count:,} {text}" for count, text in zip(rest, words, strict=True) if count]
    detail = ", ".join([f"{direct:,} direct", *trouble]) if direct or trouble else "none"
    if rest[0] + rest[1] > direct:
        return Check(
            name="Links", state="warn", detail=detail, remedy="look at this machine's network; does it let others in?"
        )
    return Check(name="Links", state="ok", detail=detail)


def _training(node: NodeFacts) -> Check:
    if node.paused:
        detail = f"paused: {node.why_paused}" if node.why_paused else "paused"
        remedy = "" if WAITS_MARK in detail else "go on with Resume, or shoal resume"
        return Check(name="Training", state="warn", detail=detail, remedy=remedy)
    if node.phase == "no quorum":
        return Check(name="Training", state="warn", detail="on alone, until there is a majority")
    if node.phase in ("joining", "leaving"):
        return Check(name="Training", state="ok" if node.phase == "joining" else "warn", detail=node.phase)
    if node.rollouts is not None:
        return Check(name="Training", state="ok", detail=f"{node.rollouts.taken:,} groups of others taken so far")
    blocked = node.blocked_fraction
    detail = "speed not measured yet" if node.tokens_per_s is None else f"{node.tokens_per_s:,.0f} tokens/s"
    if blocked is None:
        return Check(name="Training", state="ok", detail=detail)
    detail += f", waits {blocked:.0%} of its time"
    if blocked > BLOCKED_HIGH:
        return Check(name="Training", state="warn", detail=detail, remedy="more inner steps a round, or a faster link")
    return Check(name="Training", state="ok", detail=detail)


def _disk(node: NodeFacts) -> Check:
    free = node.disk_free_bytes
    detail = f"{free / 2**30:,.1f} GiB free"
    if free < DISK_LOW_BYTES:
        state: State = "bad" if free < DISK_OUT_BYTES else "warn"
        return Check(name="Disk", state=state, detail=detail, remedy="make room, or keep fewer checkpoints")
    return Check(name="Disk", state="ok", detail=detail)
