"""Makes a failing scenario short: fewer faults, rounds and peers, shorter faults, while it fails in the same way.

Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE TSE 28, 2002), with one element
removed at a time, which leaves a scenario of which no single part can be taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from shoal.testnet.simulate.scenario import FLAT_LIMIT_PEERS, Churn, Fault, Scenario

Fails = Callable[[Scenario], str]
"""The kind of violation that a scenario ends in; empty if in none."""
TRIALS_LIMIT = 400


def shrink(scenario: Scenario, fails: Fails, *, trials: int = TRIALS_LIMIT) -> Scenario:
    """The shortest scenario found that fails in the way that `scenario` does, in at most so many trials."""
    kind = fails(scenario)
    if not kind:
        return scenario
    left = trials
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(scenario):
            if left == 0:
                return scenario
            left -= 1
            if fails(smaller) == kind:
                scenario, progress = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """What is a step shorter, the greatest steps first."""
    for rounds in sorted({1, scenario.rounds // 2, scenario.rounds - 1}):
        if 0 < rounds < scenario.rounds:
            yield msgspec.structs.replace(scenario, rounds=rounds)
    for place in range(len(scenario.fault)):
        yield msgspec.structs.replace(scenario, fault=scenario.fault[:place] + scenario.fault[place + 1 :])
    for peer in reversed(range(scenario.peers)):
        fewer = _without(scenario, peer)
        if fewer is not None:
            yield fewer
    if scenario.loss:
        yield msgspec.structs.replace(scenario, loss=0.0)
    if scenario.churn != Churn():
        yield msgspec.structs.replace(scenario, churn=Churn())
    for place, fault in enumerate(scenario.fault):
        for easier in _easier(fault):
            yield msgspec.structs.replace(
                scenario, fault=(*scenario.fault[:place], easier, *scenario.fault[place + 1 :])
            )


def _without(scenario: Scenario, peer: int) -> Scenario | None:
    """Without one peer, those after it moved up; None if a fault is about it, or if it is the only one."""
    if scenario.peers == 1 or any(fault.peer == peer for fault in scenario.fault):
        return None
    faults = []
    for fault in scenario.fault:
        groups = tuple(tuple(i - (i > peer) for i in group if i != peer) for group in fault.groups)
        if not all(groups):
            return None
        moved = None if fault.peer is None else fault.peer - (fault.peer > peer)
        faults.append(msgspec.structs.replace(fault, peer=moved, groups=groups))
    return msgspec.structs.replace(scenario, peers=scenario.peers - 1, fault=tuple(faults))


def _easier(fault: Fault) -> Iterator[Fault]:
    if fault.duration_s is not None and fault.duration_s > 1.0:
        yield msgspec.structs.replace(fault, duration_s=round(fault.duration_s / 2, 2))
    if fault.at_s >= 1.0:
        yield msgspec.structs.replace(fault, at_s=float(int(fault.at_s / 2)))
    if fault.forgets:
        yield msgspec.structs.replace(fault, forgets=False)
    if fault.one_way:
        yield msgspec.structs.replace(fault, one_way=False)


def as_test(scenario: Scenario, kind: str) -> str:
    """The source of a test that fails as long as the scenario does."""
    faults = "".join(f"        {_told(fault)},\n" for fault in scenario.fault)
    name = kind.replace(" ", "_")
    flat = scenario.peers <= FLAT_LIMIT_PEERS
    run = "run_scenario(scenario)" if flat else "Crowd(scenario).run()"
    churn = "" if flat else f", churn=Churn(share_per_round={scenario.churn.share_per_round})"
    rollouts = ", rollouts=True" if scenario.rollouts else ""
    lines = [
        f"from shoal.testnet.{'simulate.simulation import run_scenario' if flat else 'simulate.cells import Crowd'}",
        f"from shoal.testnet.simulate.scenario import {'Fault' if flat else 'Churn'}, Scenario",
        "",
        "",
        f"def test_seed_{scenario.seed}_keeps_{name}() -> None:",
        "    faults = (",
        faults + "    )" if faults else "    )",
        f"    scenario = Scenario(peers={scenario.peers}, rounds={scenario.rounds}, seed={scenario.seed}, "
        f"loss={scenario.loss}, fault=faults{churn}{rollouts})",
        f'    assert {run}.violation == ""',
    ]
    return "\n".join(lines).replace("    faults = (\n    )", "    faults = ()")


def _told(fault: Fault) -> str:
    said = ", ".join(
        f"{name}={value!r}"
        for name, value in ((name, getattr(fault, name)) for name in fault.__struct_fields__)
        if value != _DEFAULTS.get(name)
    )
    return f"Fault({said})"


_DEFAULTS = {"forgets": False, "factor": 1.0, "share": 0.0, "groups": (), "one_way": False}
