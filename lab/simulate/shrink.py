"""Makes a failing scenario short: fewer faults, rounds and peers, shorter faults, while it fails in the same way.

Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE TSE 28, 2002), with one element
removed at a time, which leaves a scenario of which no single part can be taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from shoal.lab.simulate.scenario import FLAT_LIMIT_PEERS, Churn, Fault, Scenario

Fails = Callable[[Scenario], str]
"""The kind of violation that a scenario ends in; empty if in none."""
TRIALS_LIMIT = 400


def shrink(scenario: Scenario, fails: Fails, *, trials: int = TRIALS_LIMIT) -> Scenario:
    """The shortest scenario found that fails in the way that `scenario` does, in at most so many trials."""
    kind = fails(scenario)
    if not kind:
        return scenario
    tried = {scenario}
    progress = True
    while progress:
        progress = False
        for smaller in candidates(scenario):
            if smaller in tried:
                continue
            if len(tried) > trials:
                return scenario
            tried.add(smaller)
            if fails(smaller) == kind:
                scenario, progress = smaller, True
                break
    return scenario


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Valid scenarios that are a step shorter, the greatest steps first."""
    for change in _changes(scenario):
        try:
            smaller = msgspec.structs.replace(scenario, **change)
        except ValueError:
            continue
        yield smaller


def _changes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Fields that are another in what is a step shorter."""
    for rounds in sorted({1, scenario.rounds // 2, scenario.rounds - 1}):
        if 0 < rounds < scenario.rounds:
            yield {"rounds": rounds}
    for place in range(len(scenario.fault)):
        yield {"fault": _without_fault(scenario, place)}
    if not scenario.is_flat:  # faults name none of so many, so only their number counts
        removed = scenario.peers // 2
        while removed:
            yield {"peers": scenario.peers - removed}
            removed //= 2
    elif scenario.peers > 1:
        for peer in reversed(range(scenario.peers)):
            faults = _without_peer(scenario, peer)
            voters = scenario.voters - (peer < scenario.voters)
            if faults is not None and bool(voters) == bool(scenario.voters):
                yield {"peers": scenario.peers - 1, "fault": faults, "voters": voters}
    if scenario.voters:
        yield {"voters": 0, "lying": False, "outside": False}
    if scenario.lying:
        yield {"lying": False}
    if scenario.outside:
        yield {"outside": False}
    if scenario.seats < FLAT_LIMIT_PEERS:
        yield {"seats": FLAT_LIMIT_PEERS}
    if scenario.site > 1:
        yield {"site": 1}
    if scenario.loss:
        yield {"loss": 0.0}
    if scenario.fragments > 1:
        yield {"fragments": 1}
    if scenario.calm_rounds:
        yield {"calm_rounds": 0}
    if scenario.rebases:
        yield {"rebases": False}
    if scenario.sparse:
        yield {"sparse": False}
    if scenario.churn != Churn():
        yield {"churn": Churn()}
    for place, fault in enumerate(scenario.fault):
        for easier in _easier(fault):
            yield {"fault": (*scenario.fault[:place], easier, *scenario.fault[place + 1 :])}


def _without_fault(scenario: Scenario, place: int) -> tuple[Fault, ...]:
    """Without one fault. With a join goes what befalls its newcomer, and later newcomers move up."""
    rest = scenario.fault[:place] + scenario.fault[place + 1 :]
    gone = scenario.fault[place]
    if gone.kind != "join":
        return rest
    joins = [other for other in range(len(scenario.fault)) if scenario.fault[other].kind == "join"]
    joins.sort(key=lambda other: scenario.fault[other].at_s)
    newcomer = scenario.peers + joins.index(place)
    moved = (None if fault.peer == newcomer else _without_number(fault, newcomer) for fault in rest)
    return tuple(fault for fault in moved if fault is not None)


def _without_peer(scenario: Scenario, peer: int) -> tuple[Fault, ...] | None:
    """The faults without one peer, those after it moved up; None if a fault is about it."""
    moved = [None if fault.peer == peer else _without_number(fault, peer) for fault in scenario.fault]
    faults = tuple(fault for fault in moved if fault is not None)
    return faults if len(faults) == len(moved) else None


def _without_number(fault: Fault, peer: int) -> Fault | None:
    """A fault of others, when those after `peer` have moved up; None if nothing is left of it."""
    groups = tuple(tuple(i - (i > peer) for i in group if i != peer) for group in fault.groups)
    if not all(groups) or peer in (fault.adds, fault.removes):
        return None
    named = {name: getattr(fault, name) for name in ("peer", "adds", "removes")}
    moved = {name: None if i is None else i - (i > peer) for name, i in named.items()}
    return msgspec.structs.replace(fault, groups=groups, **moved)


def _easier(fault: Fault) -> Iterator[Fault]:
    if fault.duration_s is not None and fault.duration_s > 1.0:
        yield msgspec.structs.replace(fault, duration_s=round(fault.duration_s / 2, 2))
    if fault.at_s >= 1.0:
        yield msgspec.structs.replace(fault, at_s=float(int(fault.at_s / 2)))
    if fault.phase is not None:
        yield msgspec.structs.replace(fault, phase=None, into_s=0.0)
    if fault.forgets:
        yield msgspec.structs.replace(fault, forgets=False)
    if fault.torn is not None:
        yield msgspec.structs.replace(fault, torn=None)
    if fault.one_way:
        yield msgspec.structs.replace(fault, one_way=False)


def as_test(scenario: Scenario, kind: str) -> str:
    """The source of a test that fails as long as the scenario does."""
    faults = "".join(f"        {_told(fault)},\n" for fault in scenario.fault)
    name = kind.replace(" ", "_")
    flat = scenario.is_flat
    run = "run_scenario" if flat else "run_crowd"
    share = scenario.churn.share_per_round
    churn = f", churn=Churn(share_per_round={share})" if share else ""
    needed = [name for name, there in (("Churn", share), ("Fault", scenario.fault), ("Scenario", True)) if there]
    shape = ", sparse=True" if scenario.sparse else ""
    shape += f", fragments={scenario.fragments}" if scenario.fragments > 1 else ""
    shape += ", rebases=True" if scenario.rebases else ""
    shape += f", calm_rounds={scenario.calm_rounds}" if scenario.calm_rounds else ""
    shape += f", voters={scenario.voters}" if scenario.voters else ""
    shape += ", lying=True" if scenario.lying else ""
    shape += f", seats={scenario.seats}" if scenario.seats < FLAT_LIMIT_PEERS else ""
    shape += ", outside=True" if scenario.outside else ""
    shape += f", site={scenario.site}" if scenario.site > 1 else ""
    keys = ", real_keys=True" if scenario.real_keys else ""
    lines = [
        f"from shoal.lab.simulate.{'simulation' if flat else 'crowd'} import {run}",
        f"from shoal.lab.simulate.scenario import {', '.join(needed)}",
        "",
        "",
        f"def test_seed_{scenario.seed}_keeps_{name}() -> None:",
        "    faults = (",
        faults + "    )" if faults else "    )",
        f"    scenario = Scenario(peers={scenario.peers}, rounds={scenario.rounds}, seed={scenario.seed}, "
        f"loss={scenario.loss}, fault=faults{churn}{shape}{keys})",
        f'    assert {run}(scenario).violation == ""',
    ]
    return "\n".join(lines).replace("    faults = (\n    )", "    faults = ()")


def _told(fault: Fault) -> str:
    said = ", ".join(
        f"{name}={value!r}"
        for name, value in ((name, getattr(fault, name)) for name in fault.__struct_fields__)
        if value != _DEFAULTS.get(name)
    )
    return f"Fault({said})"


_DEFAULTS = {
    "into_s": 0.0,
    "setting": "",
    "back": 1,
    "forgets": False,
    "torn": None,
    "factor": 1.0,
    "share": 0.0,
    "groups": (),
    "one_way": False,
}
