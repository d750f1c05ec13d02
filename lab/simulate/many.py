"""Many small swarms, each under faults of its seed's own: `python -m shoal.lab.simulate.many --seeds 5000`.

Every run ends with its rounds certified or with a violation; a seed that fails is shrunk and printed as a test.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.scenario import Scenario, random_scenario, with_few_seats, with_named_voters, with_sites
from shoal.lab.simulate.shrink import as_test, shrink
from shoal.lab.simulate.simulation import run_scenario

TOLD_EVERY_S = 30.0


def violation_of(scenario: Scenario, components: Components | None = None) -> str:
    """The kind of violation that a scenario ends in; empty if in none."""
    return run_scenario(scenario, components).violation


def simulate_many(
    first: int,
    seeds: int,
    *,
    rounds: int,
    limit_s: float,
    named: bool = False,
    seated: bool = False,
    in_sites: bool = False,
) -> dict[str, object]:
    """Run the scenarios of `seeds` seeds from `first` on, for at most `limit_s` of real time.

    named: with voters. seated: with few seats. in_sites: with peers in sites.
    """
    began = told_at = time.monotonic()
    faults: Counter[str] = Counter()
    met: Counter[str] = Counter()
    failures: list[dict[str, object]] = []
    done = events = certified = states = 0
    virtual_s = 0.0
    for seed in range(first, first + seeds):
        if time.monotonic() - began > limit_s:
            break
        scenario = random_scenario(seed, rounds=rounds)
        if named:
            scenario = with_named_voters(scenario)
        if seated:
            scenario = with_few_seats(scenario)
        if in_sites:
            scenario = with_sites(scenario)
        outcome = run_scenario(scenario)
        done += 1
        events += outcome.events
        certified += outcome.rounds_certified
        virtual_s += outcome.virtual_s
        states += outcome.states_fetched
        faults.update(fault.kind for fault in scenario.fault)
        met.update(outcome.met.keys())
        if outcome.violation:
            smallest = shrink(scenario, violation_of)
            failures.append({"seed": seed, "violation": outcome.violation, "detail": outcome.detail})
            print(f"seed {seed}: {outcome.violation}: {outcome.detail}\n", file=sys.stderr)
            print(as_test(smallest, outcome.violation), file=sys.stderr)
        if time.monotonic() - told_at > TOLD_EVERY_S:
            told_at = time.monotonic()
            print(f"{done} seeds, {len(failures)} with violations", file=sys.stderr)
    return {
        "first": first,
        "seeds": done,
        "violations": len(failures),
        "failures": failures,
        "rounds_certified": certified,
        "states_fetched": states,
        "faults": dict(sorted(faults.items())),
        "runs_that_met": dict(sorted(met.items())),
        "events": events,
        "virtual_s": round(virtual_s, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exits 1 if any seed ended in a violation."""
    parser = argparse.ArgumentParser(prog="simulate_many", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no seed after so much real time")
    parser.add_argument("--named", action="store_true", help="only some of the peers, who are named, vote")
    parser.add_argument("--seated", action="store_true", help="fewer contribute to a round than there are peers")
    parser.add_argument("--sites", action="store_true", help="peers are in sites, and contribute together")
    asked = parser.parse_args(arguments)
    report = simulate_many(
        asked.first,
        asked.seeds,
        rounds=asked.rounds,
        limit_s=asked.limit_s,
        named=asked.named,
        seated=asked.seated,
        in_sites=asked.sites,
    )
    print(json.dumps(report, indent=1))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
