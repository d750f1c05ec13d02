"""Every benchmark's targets: met at their edge, missed beyond it, and what `--check` makes of that."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec
import pytest
import typer
from typer.main import get_command

from shoal.cli.commands import app_of
from shoal.cli.render import ShowNow
from shoal.lab.bench.allreduce import MIB, Allreduce, FaultResult
from shoal.lab.bench.crowd import CrowdBench, CrowdResult
from shoal.lab.bench.dashboard import DashboardBench, DashboardCost
from shoal.lab.bench.hostile_samplers import HostileSamplersBench, HostileSamplersResult, HostileWindow
from shoal.lab.bench.train import SeedRun, Settings, TrainResult
from shoal.lab.bench.wan import Wan
from shoal.lab.case import Case, CaseOptions, LongCaseOptions, Numbers, Spec, parse_numbers
from shoal.lab.cli.bench import COMMANDS, load
from shoal.lab.targets import Row, Spread, Target, missed
from shoal.node.option import Option, Within, options_of
from shoal.protocol.errors import ConfigError
from shoal.testnet.lane_rate import LaneSpeed

_NOTHING = {int: 0, float: 0.0, str: "", bool: True, tuple: (), dict: {}}


def made(kind: type[Any], **known: Any) -> Any:
    """An instance of a struct or dataclass with these fields, and nothing in all others that have no default."""
    needed: dict[str, Any] = {}
    if issubclass(kind, msgspec.Struct):
        needed = {one.name: one.type for one in msgspec.structs.fields(kind) if one.required}
    else:
        hints, absent = get_type_hints(kind), dataclasses.MISSING
        fields = (one for one in dataclasses.fields(kind) if one.default is absent and one.default_factory is absent)
        needed = {one.name: hints[one.name] for one in fields}
    return kind(**{name: _nothing(hint) for name, hint in needed.items() if name not in known}, **known)


def _nothing(hint: Any) -> Any:
    return _NOTHING.get(get_origin(hint) or hint)


def spread(median: float) -> Spread:
    return Spread.of([median])


def allreduce(
    beyond_s: float, peak: float = 0, *, kind: str = "none", delay_s: float = 0.0, wrong: bool = False
) -> Any:
    fault = FaultResult(kind=kind, delay_s=delay_s, delays_s=(delay_s,), exact=not wrong)  # type: ignore[arg-type]
    return made(
        Allreduce, peers=4, numel=1 << 20, codec="fp32", median_s=1.0, beyond_reduce_s=beyond_s, fault=fault,
        peak_extra_bytes=int(peak * MIB),
    )  # fmt: skip


def crowd(least_heard: float, largest_mb: float, most_links: int = 17) -> Any:
    one = spread(1.0)
    return made(
        CrowdResult, bench=CrowdBench(nodes=3, minutes=1), least_heard=least_heard, most_links=most_links,
        memory_mb=Spread.of([largest_mb / 2, largest_mb]), links=one, control_kb_s=one, cpu=one,
    )  # fmt: skip


def dashboard(painted_ms: float = 0, shown_ms: float = 0, viewer: float = 0) -> Any:
    return made(
        DashboardCost, bench=DashboardBench(), first_paint_ms=spread(painted_ms), shown_ms=spread(shown_ms),
        cpu_share=0.01 + viewer, idle_cpu_share=0.01,
    )  # fmt: skip


STALE_FOUND = "a sampler of the kind 'stale' is ignored"


def hostile_samplers(beside: float, *, found: int | None = 20, struck: int = 0) -> Any:
    without = made(HostileWindow, reward=100.0, struck=0, found={})
    cheated = made(HostileWindow, reward=beside, struck=struck, found={"stale": found})
    return made(HostileSamplersResult, bench=HostileSamplersBench(), without=without, beside=(cheated,))


def train(strategy: str, efficiency: float, fewer: float, *, sound: bool = True, slow: float = 1.0) -> Any:
    return made(
        TrainResult, strategy=strategy, nodes=4, efficiency=spread(efficiency), byte_ratio=spread(fewer),
        settings=made(Settings, inner_steps=100, codec="int4", slow=slow, sync={"balance": True}), rate_ratio=fewer,
        sync_tokens=1.0,
        seeds=(made(SeedRun, seed=1, in_process=False, sound=sound),),
    )  # fmt: skip


def lane(shared: float, sockets: float) -> Any:
    return LaneSpeed(encrypted=(sockets,), shared=(shared,), plaintext=(1.0,))


EDGES: list[tuple[str, Any, Any, str]] = [
    ("allreduce", allreduce(1.0), allreduce(1.01), "the round beyond the reduce"),
    ("allreduce", allreduce(0.5, 4.0), allreduce(0.5, 4.1), "peak memory"),
    ("allreduce", allreduce(0.5, kind="sigkill", delay_s=2), allreduce(0.5, kind="sigkill", delay_s=2.1), "SIGKILL"),
    ("allreduce", allreduce(0.5, kind="sigstop", delay_s=6), allreduce(0.5, kind="sigstop", delay_s=6.1), "SIGSTOP"),
    ("allreduce", allreduce(0.5), allreduce(0.5, wrong=True), "what was checked and is wrong"),
    ("dashboard", dashboard(1500), dashboard(1501), "first paint"),
    ("dashboard", dashboard(shown_ms=1500), dashboard(shown_ms=1501), "the swarm is on the screen"),
    ("dashboard", dashboard(viewer=0.0199), dashboard(viewer=0.0201), "a viewer's processor time"),
    ("lane", lane(0.8, 0.8), lane(0.79, 0.8), "one encrypted lane beside plaintext"),
    ("lane", lane(0.8, 0.8), lane(0.8, 0.79), "one encrypted lane, sockets"),
    ("wan", made(Wan, link_share=0.85), made(Wan, link_share=0.84), "payload of reductions"),
    ("wan", made(Wan, link_share=0.85), made(Wan, link_share=0.85, identical=False), "rounds after which nodes hold"),
    ("crowd", crowd(0.99, 120), crowd(0.98, 120), "of the group heard by fewest"),
    ("crowd", crowd(0.99, 120), crowd(0.99, 121), "memory of the largest daemon"),
    ("crowd", crowd(0.99, 120), crowd(0.99, 120, 18), "links of a node"),
    ("train", train("streaming", 0.9, 600), train("streaming", 0.899, 600), "token efficiency"),
    ("train", train("diloco", 0.9, 300), train("diloco", 0.9, 299), "times fewer bytes"),
    ("train", train("sparse", 0.75, 4000), train("sparse", 0.75, 3999), "times fewer bytes"),
    ("train", train("diloco", 0.9, 0.9, slow=4.0), train("diloco", 0.9, 0.89, slow=4.0), "speed with a slow node"),
    ("hostile-samplers", hostile_samplers(95), hostile_samplers(94.9), "least reward of the trainers beside cheats"),
    ("hostile-samplers", hostile_samplers(95), hostile_samplers(95, struck=1), "nodes ignored that did not cheat"),
    ("hostile-samplers", hostile_samplers(95), hostile_samplers(95, found=21), STALE_FOUND),
    ("hostile-samplers", hostile_samplers(95), hostile_samplers(95, found=None), STALE_FOUND),
    ("train", train("ddp", 9.0, 0), train("ddp", 1.0, 1, sound=False), "runs with wrong values"),
]


@pytest.mark.parametrize(("name", "good", "bad", "said"), EDGES, ids=[f"{one[0]}: {one[3]}" for one in EDGES])
def test_a_target_is_met_at_its_edge_and_missed_beyond_it(name: str, good: Any, bad: Any, said: str) -> None:
    rows = load(name).rows
    assert missed(rows(good)) == []
    (one,) = missed(rows(bad))
    assert one.name.startswith(said)
    assert any(row.met for row in rows(good))


def test_every_benchmark_has_targets_and_can_be_checked() -> None:
    # Those with tests of their own.
    by_themselves = {
        "compare", "faults", "goodput", "hostile", "join", "memory", "partial", "rollouts", "samplers", "sapo",
        "sapo-table", "scale", "sites", "throughput", "train-table",
    }  # fmt: skip
    assert {name for name, *_ in EDGES} | by_themselves == set(COMMANDS)
    bench = get_command(app_of()).commands["bench"]  # type: ignore[attr-defined]
    assert [n for n, one in bench.commands.items() if "--check" not in {o for p in one.params for o in p.opts}] == []


def test_every_option_with_a_range_is_refused_beyond_it_by_its_name() -> None:
    required: dict[str, dict[str, Any]] = {"hostile": {"kind": "ahead"}}
    refused = 0
    for name in COMMANDS:
        case = load(name)
        for field, option in options_of(case.spec).items():
            if isinstance(option.check, Within):
                for beyond in (option.check.least - 1, option.check.most + 1):
                    with pytest.raises(ConfigError, match=f"^{option.name}: "):
                        case.spec(**{**required.get(name, {}), field: beyond})
                    refused += 1
    assert refused > 100


# -- what a command makes of them ----------------------------------------------------------------------------


class Found(msgspec.Struct):
    """What a benchmark found."""

    seconds: float
    wrong: int = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        return DELAY.row(self.seconds), Target(name="wrong values", most=0).row(self.wrong)


TWO_AND_FOUR = Numbers((2, 4))
DELAY = Target(name="delay", unit="s", most=2.0)


def case_of(found: Found, options: type[Any] = CaseOptions, **changes: Any) -> Case[Any]:
    def run(spec: Any, tell: ShowNow) -> Found:
        """Measure nothing."""
        tell("half way", 0.5)
        return found

    return Case(spec=Spec, run=run, lines=lambda found: [f"took {found.seconds:g} s"], options=options, **changes)


def outcome(case: Case[Any], capsys: pytest.CaptureFixture[str], **options: bool) -> tuple[int, str, list[str]]:
    code = 0
    try:
        case(case.spec(), case.options(**options))
    except typer.Exit as ended:
        code = ended.exit_code
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_check_ends_with_1_and_a_line_for_each_target_that_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    late = case_of(Found(seconds=2.5, wrong=3))
    lines = ["missed: delay: 2.5 s, wanted at most 2", "missed: wrong values: 3, wanted at most 0"]
    assert outcome(late, capsys) == (0, "took 2.5 s\n", ["half way"])
    assert outcome(late, capsys, check=True) == (1, "took 2.5 s\n", ["half way", *lines])
    code, out, err = outcome(late, capsys, check=True, as_json=True)
    document = json.loads(out)
    assert [(row["name"], row["measured"]["median"], row["target"]) for row in document.pop("rows")] == [
        ("delay", 2.5, 2.0), ("wrong values", 3.0, 0.0)
    ]  # fmt: skip
    assert (code, document, err[1:]) == (1, {"seconds": 2.5, "wrong": 3}, lines)
    assert outcome(case_of(Found(seconds=2.0)), capsys, check=True) == (0, "took 2 s\n", ["half way"])


def test_what_is_wrong_ends_with_1_unchecked_too(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = case_of(Found(seconds=1.0, wrong=1), sound=lambda found: not found.wrong)
    assert outcome(wrong, capsys)[0] == 1
    assert outcome(wrong, capsys, as_json=True)[0] == 1


def test_check_says_where_nothing_was_measured_that_has_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    unmeasured = case_of(Found(seconds=1.0), rows=lambda _: [DELAY.row(None)])
    assert outcome(unmeasured, capsys, check=True) == (
        0, "took 1 s\n", ["half way", "nothing was measured that has a target"]
    )  # fmt: skip


def test_progress_goes_the_way_of_the_log_where_a_benchmark_has_options_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert outcome(case_of(Found(seconds=1.0), LongCaseOptions), capsys) == (0, "took 1 s\n", [])


def test_the_help_of_a_command_is_what_its_measurement_says_of_itself() -> None:
    assert case_of(Found(seconds=1.0)).command().__doc__ == "Measure nothing."


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0), ()])
def test_a_result_in_parts_is_one_document_however_many_there_are(
    parts: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(spec: Any, tell: ShowNow) -> Iterator[Found]:
        return (Found(seconds=seconds) for seconds in parts)

    case: Case[Any] = Case(
        spec=Spec,
        run=run,
        lines=lambda found: [str(len(found))],
        rows=lambda found: [DELAY.row(one.seconds) for one in found],
        in_parts=True,
    )
    case(Spec(), CaseOptions(as_json=True))
    document = json.loads(capsys.readouterr().out)
    assert [row["measured"]["median"] for row in document["rows"]] == list(parts)
    cases = [document] if len(parts) == 1 else document["cases"]
    assert [(one["seconds"], one["rows"][0]["measured"]["median"]) for one in cases] == [(at, at) for at in parts]
    case(Spec())
    assert capsys.readouterr().out == f"{len(parts)}\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Two(Spec):
    """One option that is a text, and a field that is none of the user's."""

    peers: Annotated[Numbers, Option("--peers", help="x", parse=parse_numbers)] = TWO_AND_FOUR
    hidden: int = 3


class Whole(msgspec.Struct):
    """What a benchmark found, of every form."""

    settings: Two
    took_s: Spread
    runs_s: tuple[float, ...]
    by_name: dict[str, int]
    why: str | None
    curve: tuple[dict[str, int], ...]
    nodes: tuple[dict[str, int], ...]
    rows: tuple[Row, ...] = (DELAY.row(2.5),)


def test_a_result_is_told_by_all_of_its_document_and_its_rows() -> None:
    case: Case[Any] = Case(spec=Spec, run=lambda spec, tell: None)
    many = tuple({"at": at} for at in range(9))
    found = Whole(
        settings=Two(), took_s=Spread.of([1.0, 2.0, 4.0]), runs_s=tuple(map(float, range(9))), by_name={"a": 1},
        why="two\nlines", curve=many, nodes=many[:2],
    )  # fmt: skip
    told = [" ".join(line.split()) for line in case.told(found)]
    assert told[-1] == "delay: 2.5 s, wanted at most 2"
    assert told[:-1] == [
        "settings.peers 2, 4", "settings.hidden 3", "took_s 2 (1 to 4)", "runs_s 9, 0 to 8", "by_name.a 1",
        "why two lines", "curve 9, see --json", "nodes.0.at 0", "nodes.1.at 1",
    ]  # fmt: skip
    assert "why                               none" in case.told(msgspec.structs.replace(found, why=None))


def test_options_of_a_spec_and_of_how_it_is_told_are_one_commands(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Two] = []

    def run(spec: Two, tell: ShowNow) -> Found:
        """Measure nothing."""
        seen.append(spec)
        return Found(seconds=float(spec.peers[0]))

    command = Case(spec=Two, run=run, lines=lambda found: ["x"]).command()
    assert list(inspect.signature(command).parameters) == ["peers", "as_json", "check"]
    assert inspect.signature(command).parameters["peers"].default == "2,4"
    command(peers="1,3", as_json=True, check=False)
    assert seen == [Two(peers=Numbers((1, 3)))]
    assert json.loads(capsys.readouterr().out)["seconds"] == 1
    with pytest.raises(ConfigError, match=r"--peers: 'two' is not a list of numbers"):
        command(peers="two", as_json=False, check=False)
