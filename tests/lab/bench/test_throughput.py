"""Tokens per second with and without the swarm: what is computed of known numbers, and one small run of real nodes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import trio

from shoal.cli.main import execute
from shoal.lab.bench import throughput as module
from shoal.lab.bench.random_tokens import RandomTokensWorkload
from shoal.lab.bench.throughput_nodes import enough, run_alone, run_together, since, together_of
from shoal.lab.bench.throughput_spec import (
    SIZES,
    WORKLOAD_NAME,
    Alone,
    CpuShare,
    Stretch,
    Throughput,
    ThroughputBench,
    Together,
    step_s,
)
from shoal.node.reporting.events import Certified, Contributed
from shoal.node.workload import Assignment, load_workload
from shoal.protocol.identity import Identity
from shoal.testnet.journal import Journal

TINY = ThroughputBench(
    width=32, layers=1, context=16, batch=4, strategy="diloco", inner_steps=40, rounds=3, repeat=1, nodes=2
)
CPU = CpuShare(trainers=1.5, daemons=0.75)
SHARE = Assignment(seed=1, round=1, member=0, members=2)


def alone(*rates: float) -> Alone:
    """Loops of so many tokens per second, each measured for ten seconds in steps of 0.1 s."""
    loops = [Stretch(tokens=round(10 * rate), steps=100, wall_s=10.0, steps_s=10.0) for rate in rates]
    return Alone(loops=tuple(loops), cpu=CpuShare(trainers=2.0, daemons=0.0), device="cpu")


def together(*rates: float, sound: bool = True) -> Together:
    """Nodes of so many tokens per second, which made steps for 8 of 10 seconds and waited for half a second."""
    nodes = [Stretch(tokens=round(10 * rate), steps=80, wall_s=10.0, steps_s=8.0, blocked_s=0.5) for rate in rates]
    return Together(nodes=tuple(nodes), first_round=3, rounds_s=(2.0, 3.0), cpu=CPU, missed=0, sound=sound)


RESULT = Throughput(
    bench=dataclasses.replace(TINY, strategy="streaming", repeat=3),
    alone=(alone(50, 50), alone(60, 60), alone(40, 40), alone(50, 50)),
    together=(together(50, 49), together(40, 48), together(45, 45)),
)


def test_overhead_is_against_the_loops_before_and_after() -> None:
    assert RESULT.overheads == pytest.approx((1 - 99 / 110, 1 - 88 / 100, 1 - 90 / 90))
    assert RESULT.overhead == pytest.approx(0.1)
    assert RESULT.work_overheads == pytest.approx([1 - 99 / 2.25 / 55, 1 - 88 / 2.25 / 50, 1 - 90 / 2.25 / 45])
    assert RESULT.work_overhead == pytest.approx(0.2)
    assert len(msgspec.structs.replace(RESULT, bench=TINY).rows) == 1, "the strategy has no target"


def test_rate_counts_every_second_and_each_share_says_where_it_went() -> None:
    run = together(30, 50)
    assert run.tokens_per_s == pytest.approx(80)
    assert run.blocked == pytest.approx(0.05)
    assert run.hand_over == pytest.approx(0.15)
    assert step_s(run.nodes) == pytest.approx(0.1)


def _journal(*, last_digest: str = "bb", without: int = 0) -> Journal:
    """Two nodes, rounds 2 to 4; the second node makes twice the steps, and none that counted for round `without`."""
    journal = Journal()
    for node in (0, 1):
        for number in (2, 3, 4):
            made = {"steps": 10 * (1 + node), "seconds": 4.0, "wall_s": 5.0, "blocked_s": 0.25}
            if (node, number) != (1, without):
                journal.add(node, Contributed(at=5.0 * number, round=number, **made))  # type: ignore[arg-type]
            certified = Certified(
                at=5.0 * number + 1 + node,
                term="0.0",
                round=number,
                digest=last_digest if (node, number) == (1, 4) else "bb",
                value="",
                contributors=2,
            )
            journal.add(node, certified)
    return journal


def test_measured_are_the_rounds_asked_for_and_their_steps() -> None:
    found = together_of(_journal(), TINY, range(3, 5), CPU)
    first, second = found.nodes
    assert first == Stretch(tokens=20 * 64, steps=20, wall_s=10.0, steps_s=8.0, blocked_s=0.5)
    assert second == Stretch(tokens=40 * 64, steps=40, wall_s=10.0, steps_s=8.0, blocked_s=0.5)
    assert found.rounds_s == (5.0, 5.0)
    assert found.tokens_per_s == pytest.approx(384)
    assert (found.missed, found.sound) == (0, True)


def test_contribution_that_missed_its_round_is_told_and_two_states_of_a_round_are_not_sound() -> None:
    missing = together_of(_journal(without=3), TINY, range(3, 5), CPU)
    assert (missing.missed, missing.sound) == (1, True)
    assert [node.steps for node in missing.nodes] == [20, 20]
    assert missing.tokens_per_s == pytest.approx(20 * 64 / 10 + 20 * 64 / 5)
    assert not together_of(_journal(last_digest="cc"), TINY, range(3, 5), CPU).sound
    assert not together_of(_journal(), TINY, range(3, 6), CPU).sound  # nobody certified round 5


@pytest.mark.parametrize("size", ["1M", "10M"])
def test_sizes_are_what_they_are_called(size: str) -> None:
    shape = SIZES[size]
    model = RandomTokensWorkload(width=shape.width, layers=shape.layers, heads=shape.heads).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_every_size_is_within_a_tenth_of_its_name_and_can_be_measured() -> None:
    for name, shape in SIZES.items():
        assert shape.parameters == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.1)
        bench = ThroughputBench(parameters=name)
        manifest = bench.manifest([Identity.generate().peer_id for _ in range(2)])
        load_workload(manifest.workload.name, manifest.workload.options, None)


def test_batches_are_of_the_size_asked_for_and_of_this_share_alone() -> None:
    options = {"width": 32, "layers": 1, "heads": 1, "context": 16, "batch": 4}
    workload = load_workload(WORKLOAD_NAME, options, None)
    first, again = (next(iter(workload.batches(SHARE))) for _ in range(2))
    other = next(iter(workload.batches(msgspec.structs.replace(SHARE, member=1))))
    assert first.shape == (4, 17)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert workload.loss(workload.build(), first)[1] == TINY.tokens_per_step == 64


def test_only_stretches_begun_after_the_warm_up_are_measured_and_enough_of_them() -> None:
    made = [Contributed(at=at, round=1, steps=1, wall_s=0.4) for at in (10.0, 10.5, 11.0, 11.5)]
    assert [event.at for event in since(made, 10.1)] == [10.5, 11.0, 11.5]
    assert [event.at for event in since(made, 10.2)] == [11.0, 11.5]
    assert enough(made, 4)
    assert not enough(made, 5)
    assert not enough(made[:2], 2)  # less than a second


def test_device_that_is_not_there_is_the_users_to_correct(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "throughput", "--width", "32", "--layers", "1", "--device", "abacus"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "device 'abacus' is not available here; use auto or one of:" in err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--width", "100", "--width must be a multiple of 64"),
        ("--parameters", "7M", "--parameters must be one of 1M, 10M"),
        ("--strategy", "gossip", "--strategy must be one of diloco, streaming, sparse"),
        ("--dtype", "fp8", "--dtype must be one of auto, bf16, float32"),
        ("--codec", "fp7", "codec"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["bench", "throughput", option, value]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Throughput], None]:
    """Have the command find this result."""

    def give(result: Throughput) -> None:
        async def measure(bench: object, tell: object) -> Throughput:
            return result

        monkeypatch.setattr(module, "_measure", measure)

    return give


def test_command_prints_every_figure_under_a_name(
    measured: Callable[[Throughput], None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(RESULT)
    assert execute(["bench", "throughput", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["alone_tokens_per_s"], found["tokens_per_s"]) == (100, 90)
    assert (found["overhead"], found["overheads"]) == (0.1, [0.1, 0.12, 0.0])
    assert (found["rows"][1]["target"], found["sound"]) == (0.03, True)
    assert (found["blocked_fraction"], found["hand_over_fraction"], found["daemons_cpu"]) == (0.05, 0.15, 0.75)
    assert (found["trainers_cpu"], found["alone_cpu"], found["work_overhead"]) == (1.5, 2.0, 0.2)
    assert (found["alone_step_s"], found["step_s"], found["round_s"]) == (0.1, 0.1, 2.5)
    assert (found["alone_tokens"], found["tokens"]) == ([1000, 1200, 800, 1000], [990, 880, 900])
    assert found["parameters"] == RESULT.bench.shape.parameters


@pytest.mark.parametrize("sound", [True, False])
def test_command_fails_only_where_the_swarm_did(
    sound: bool, measured: Callable[[Throughput], None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(msgspec.structs.replace(RESULT, together=(together(50, 49, sound=sound), *RESULT.together[1:])))
    assert execute(["bench", "throughput"]) == (0 if sound else 1)
    out = capsys.readouterr().out
    assert "tokens per second that the swarm costs, streaming: 0.1 of the loops' alone, wanted at most 0.03" in out
    assert f"runs in which nodes came to different states: {0 if sound else 1}, wanted at most 0" in out


def test_loops_alone_and_a_swarm_of_real_nodes_make_the_tokens_that_they_say(tmp_path: Path) -> None:
    """Under diloco every token of a node is certified, so the daemons' count is that of the steps."""
    (tmp_path / "alone").mkdir()
    loops = trio.run(run_alone, TINY, tmp_path / "alone")
    assert loops.device == "cpu"
    for loop in loops.loops:
        assert loop.steps >= 3 * 40
        assert loop.steps % 40 == 0
        assert loop.tokens == loop.steps * 4 * 16
        assert 0 < loop.steps_s <= loop.wall_s

    (tmp_path / "swarm").mkdir()

    async def swarm() -> Together:
        return await run_together(TINY, tmp_path / "swarm", step_s=step_s(loops.loops))

    found = trio.run(swarm)
    assert found.sound
    assert len(found.rounds_s) == 3
    assert found.cpu.daemons > 0
    assert found.cpu.trainers > 0
    assert loops.cpu.daemons < loops.cpu.trainers
    for node in found.nodes:
        assert node.tokens == node.steps * 4 * 16
        assert 0 < node.steps_s < node.wall_s
        assert 0 <= node.blocked_s < node.wall_s
    assert not (tmp_path / "swarm" / "nodes" / "0" / "rounds").exists()  # which test mode would write
    log = (tmp_path / "swarm" / "nodes" / "0" / "events.jsonl").read_bytes().splitlines()
    certified = {event["round"]: event["tokens"] for event in map(json.loads, log) if event["event"] == "certified"}
    measured = range(found.first_round, found.first_round + 3)
    assert sum(certified[number] for number in measured) == sum(node.tokens for node in found.nodes)
