"""`shoal simulate`: the protocol machines of many nodes in virtual time, and whether what must hold held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.options import AsJson
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.simulate.outcome import Outcome
    from shoal.lab.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `shoal simulate`."""

    peers: Annotated[int, Option("--peers", help="How many nodes there are at the start.")] = 8
    rounds: Annotated[int, Option("--rounds", help="How many rounds are to be certified.")] = 20
    faults: Annotated[
        Path | None, Option("--faults", help="A TOML file of what befalls them: loss, churn, faults.", metavar="FILE")
    ] = None
    churn: Annotated[
        float, Option("--churn", help="Share of the followers that die, and of newcomers, in a round's time.")
    ] = 0.0
    loss: Annotated[float, Option("--loss", help="Share of control messages that the network loses.")] = 0.0
    seed: Annotated[int, Option("--seed", help="Of everything random; the same seed gives the same trace.")] = 1
    voters: Annotated[
        int,
        Option("--voters", help="So many of them found the swarm and are its named voters; 0: whoever contributes."),
    ] = 0
    lying: Annotated[bool, Option("--lying", help="The quorum is that of voters of whom some may lie.")] = False
    seats: Annotated[
        int, Option("--seats", help="So many contribute to a round at most; beyond 64 peers, so many are members.")
    ] = 64
    outside: Annotated[
        bool, Option("--outside", help="With named voters: who has no seat follows, until the chain calls it.")
    ] = False
    site: Annotated[
        int, Option("--site", help="So many peers are of one site, and contribute together; 1: each apart.")
    ] = 1
    real_keys: Annotated[bool, Option("--real-keys", help="Sign by Ed25519 instead of a stand-in.")] = False
    shrink: Annotated[bool, Option("--shrink", help="Print the shortest scenario that fails alike, as a test.")] = False
    as_json: AsJson = False


def simulate(options: SimulateOptions) -> None:
    """Run the protocol machines of many nodes in virtual time over a modelled network, and judge what they do."""
    from shoal.lab.simulate.shrink import as_test, shrink

    scenario = scenario_of(options)
    outcome = _outcome(scenario)
    typer.echo(to_json(outcome) if options.as_json else "\n".join(lines_of(outcome)))
    if outcome.violation and options.shrink:
        smallest = shrink(scenario, lambda shorter: _outcome(shorter).violation)
        typer.echo(as_test(smallest, outcome.violation), err=True)
    failed = bool(outcome.violation) or outcome.rounds_certified < scenario.rounds
    raise typer.Exit(1 if failed else 0)


def scenario_of(options: SimulateOptions) -> Scenario:
    """Build the scenario to simulate. Raises ConfigError."""
    from shoal.lab.simulate.scenario import Churn, FaultFile, Scenario, load_faults
    from shoal.testnet.ranges import check_option

    check_option("--peers", options.peers, Scenario, "peers")
    check_option("--rounds", options.rounds, Scenario, "rounds")
    check_option("--seats", options.seats, Scenario, "seats")
    check_option("--site", options.site, Scenario, "site")
    check_option("--seed", options.seed, Scenario, "seed")
    check_option("--loss", options.loss, Scenario, "loss")
    check_option("--churn", options.churn, Churn, "share_per_round")
    found = FaultFile() if options.faults is None else load_faults(options.faults)
    churn = msgspec.structs.replace(found.churn, share_per_round=options.churn or found.churn.share_per_round)
    try:
        return msgspec.convert(
            msgspec.to_builtins(
                Scenario(
                    peers=options.peers,
                    rounds=options.rounds,
                    seed=options.seed,
                    loss=options.loss or found.loss,
                    churn=Churn() if churn == Churn() else churn,
                    fault=found.fault,
                    voters=options.voters,
                    lying=options.lying,
                    seats=options.seats,
                    outside=options.outside,
                    site=options.site,
                    real_keys=options.real_keys,
                )
            ),
            Scenario,
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{error}; see `shoal simulate --help`") from None


def _outcome(scenario: Scenario) -> Outcome:
    from shoal.lab.simulate.crowd import run_crowd
    from shoal.lab.simulate.simulation import run_scenario

    return (run_scenario if scenario.is_flat else run_crowd)(scenario)


def to_json(outcome: Outcome) -> str:
    """All figures as one object."""
    return msgspec.json.format(msgspec.json.encode(asdict(outcome))).decode()


def lines_of(outcome: Outcome) -> Iterator[str]:
    """The same for people."""
    yield f"peers      {outcome.peers:,}, {outcome.virtual_s:,.1f} s of virtual time in {outcome.wall_s:,.1f} s"
    yield f"rounds     {outcome.rounds_certified} certified, {outcome.stalled_rounds} stalled, {outcome.forks} forks"
    yield f"values     {outcome.wrong_values} wrong"
    yield (
        f"detector   {outcome.deaths_found:,} deaths found, 99 of 100 within {outcome.detect_s_p99} s; "
        f"{outcome.false_evictions} living peers given up"
    )
    if outcome.states_fetched:
        yield f"transfers  {outcome.states_fetched} states fetched"
    if outcome.waited_limit_rounds:
        yield (
            f"outside    {outcome.followers} have no vote, {outcome.followers_died} died, and at most "
            f"{outcome.most_links_outside} links while they follow; nobody waited for more than "
            f"{outcome.waited_rounds} rounds of {outcome.waited_limit_rounds} in the line, "
            f"or {outcome.turn_rounds} in all; work became too old {outcome.work_lost} times; "
            f"control {outcome.control_bytes_per_follower_per_s:,.0f} bytes/s each"
        )
    elif outcome.followers:
        yield (
            f"followers  {outcome.followers:,}, {outcome.followers_died:,} died; half of the states are there "
            f"{outcome.followed_s_p50} s after the certificate, 99 of 100 after {outcome.followed_s_p99} s; "
            f"nobody gave to more than {outcome.most_served}; "
            f"control {outcome.control_bytes_per_follower_per_s:,.0f} bytes/s each"
        )
    whom = "member" if outcome.most_served else "peer"
    yield f"control    {outcome.control_bytes_per_peer_per_s:,.0f} bytes/s per {whom}"
    yield f"trace      {outcome.events:,} events, {outcome.trace_digest}"
    yield f"violations {f'{outcome.violation}: {outcome.detail}' if outcome.violation else 'none'}"
