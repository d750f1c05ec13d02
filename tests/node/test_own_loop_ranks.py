"""Several ranks of torch.distributed as one node: what they contribute together, and how each takes an anchor."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

from shoal.node import own_loop
from shoal.node.loops.external_trainer import Detached
from shoal.node.pipe import Pause, Resume, Stop
from shoal.node.training.trainer import Restarted
from shoal.node.training.trainer_messages import Evaluate, Evaluated, SyncSettings
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import render_manifest
from tests.node.lab import manifest_of
from tests.node.loop_ends import DaemonEnd, Ends, StandIn
from tests.node.rank_lab import DEADLINE_S, Ranks, flat_of

CHUNK = 4096
PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

TRAINS = """
from torch.distributed import checkpoint

torch.manual_seed(rank)  # the first state is what rank 0 has, of what all have
bare = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
bare[2].bias.requires_grad_(kind != "ddp")  # what is not trained does not travel
model = wrapped(bare)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def evaluate(model):
    value = rank + float(whole(model)["0.weight"][0, 0])
    model(torch.ones(2, 5))  # leaves whole parameters in a model that is cut
    return value


def spoken():
    with torch.no_grad():
        return model(torch.ones(2, 5)).tolist()  # leaves whole parameters, as evaluate does


with join(model, optimizer, "swarm.toml", data_dir=folder, evaluate=evaluate) as swarm:
    note("start", whole(model))
    number = 0
    while True:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = mse_loss(model(x)[:, 0], x.sum(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(f"learnt {number}", whole(model))
        note(f"loss {number}", float(loss.detach()))
        there = swarm.step(tokens=10 + rank, loss=loss)
        note(f"stood {number}", whole(model))
        number += 1
        if number == 4:
            model.eval()
            said = [spoken()]
            with swarm.at_anchor():
                note("anchored", whole(model))
                if kind != "ddp":
                    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint")
                said.append(spoken())
            said.append(spoken())
            model.train()
            note("said", said)
            note("back", whole(model))
        if not there:
            break
    note("end", (swarm.round, swarm.over, swarm.held_out, swarm.seed, number))
distributed.destroy_process_group()
"""


def model_of(values: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model.load_state_dict(values)
    return model


def loss_of(values: dict[str, torch.Tensor], number: int, rank: int) -> float:
    """The loss of a rank in step `number` with these parameters."""
    model = model_of(values)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    return float(torch.nn.functional.mse_loss(model(x)[:, 0], x.sum(1)).detach())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    manifest = manifest_of([PEER], "own-loop", {})
    manifest = msgspec.structs.replace(manifest, round=msgspec.structs.replace(manifest.round, chunk_values=CHUNK))
    (tmp_path / "swarm.toml").write_text(render_manifest(manifest))
    return tmp_path


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.long)])
def test_ranks_contribute_once_what_they_learnt_together_and_all_stand_on_the_anchor(
    folder: Path, kind: str, size: int
) -> None:
    frozen = {"2.bias"} if kind == "ddp" else set()
    anchors, contributed = [], []

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        anchors.append(anchor)
        await end.apply(anchor, 0, fresh=True)
        for round in (1, 2, 3):
            await end.train(round, steps=2)
            if round == 2:
                await end.send(Pause())
                await end.send(Resume())
            event, delta = await end.contribution()
            contributed.append((event.number, event.steps, event.tokens, event.loss, delta))
            # That of round 2 is not taken; every value of an anchor differs from its neighbours'.
            noise = np.random.default_rng(round).normal(size=len(anchor)).astype(np.float32)
            anchor = np.where(np.arange(len(anchor)) < CHUNK, anchor - np.float32(0.7) * delta, delta) + noise
            anchor[values:CHUNK] = 0
            anchors.append(anchor)
            await end.apply(anchor, round, taken=event.number if round != 2 else 1)
            if round == 3:
                break
            await end.send(Evaluate(round=round))
            measured = await end.expect(Evaluated)
            assert measured.value == pytest.approx(anchor[3] + (size - 1) / 2)
        await end.send(Stop())

    values = 5 * 3 + 3 + 3 + 3 + 3 + 1 - len(frozen)
    ranks = Ranks(folder, TRAINS, kind, size=size)
    with Ends(folder, daemon, sync=SyncSettings(chunk_values=CHUNK)), ranks:
        codes = ranks.ended()
        assert codes == [0] * size, ranks.said()

        def seen(name: str) -> list[np.ndarray]:
            return [
                flat_of({key: value for key, value in found.items() if key not in frozen}, chunk_values=CHUNK)
                for found in ranks.noted(name)
            ]

        for found in seen("start"):
            assert np.array_equal(found, anchors[0])
        learnt = [seen(f"learnt {number}") for number in range(6)]
        for rounds in learnt:  # buffers apart, which differ until an anchor comes
            assert all(np.array_equal(one[:CHUNK], rounds[0][:CHUNK]) for one in rounds)
        numbers, steps, tokens, losses, deltas = zip(*contributed, strict=True)
        of_a_step = sum(10 + rank for rank in range(size))
        assert (numbers, steps, tokens) == ((1, 2, 3), (2, 2, 2), (2 * of_a_step, 2 * of_a_step, 4 * of_a_step))
        lost = [np.mean([ranks.noted(f"loss {2 * round + step}") for step in (0, 1)]) for round in range(3)]
        assert np.allclose(losses, lost, rtol=1e-6)
        for round, last in enumerate((1, 3, 5)):
            base, local = anchors[round], learnt[last][0]
            assert np.array_equal(deltas[round][:CHUNK], base[:CHUNK] - local[:CHUNK])
            assert np.array_equal(deltas[round][CHUNK:], local[CHUNK:])  # of rank 0
        for number in range(6):
            for rank, found in enumerate(ranks.noted(f"stood {number - 1}" if number else "start")):
                assert ranks.noted(f"loss {number}")[rank] == pytest.approx(loss_of(found, number, rank), rel=1e-4)
        carried = (learnt[3][0] - anchors[1]) + anchors[2]
        carried[CHUNK:] = anchors[2][CHUNK:]
        for name, wanted in (
            ("stood 1", anchors[1]),
            ("stood 3", carried),
            ("anchored", anchors[2]),
            ("back", carried),
            ("stood 5", anchors[3]),
        ):
            for rank, found in enumerate(seen(name)):
                assert np.array_equal(found, wanted), (name, rank)
        before, anchored, after = ranks.noted("said")[0]  # of rank 0, whose buffers count
        assert before == after != anchored
        if kind != "ddp":
            model = model_of(ranks.noted("start")[0])
            saved = {"model": model.state_dict()}
            with pytest.warns(UserWarning, match="in a single process"):
                checkpoint.load(saved, checkpoint_id=folder / "checkpoint", no_dist=True)
            assert np.array_equal(flat_of(saved["model"], chunk_values=CHUNK), anchors[2])
        assert len({str(end) for end in ranks.noted("end")}) == 1
        assert ranks.noted("end")[0][0::4] == (3, 6)
        assert ranks.noted("end")[0][1]


ERRORS = """
import functools, signal
from shoal.node.loops import other_rank, rank_group


def made(width):
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def joined(width):
    return join(*made(width), "swarm.toml", data_dir=folder).__enter__()


def error_of(job):
    try:
        job()
    except Exception as error:
        return type(error).__name__, str(error)


note("models", error_of(lambda: joined(3 + rank)))
own_loop.RankGroup = other_rank.RankGroup = functools.partial(rank_group.RankGroup, timeout_s=2)
swarm = joined(3)
swarm.step(tokens=1)  # no step of the optimizer, and all the same a call
note("calls", error_of(lambda: swarm.at_anchor().__enter__() if rank else swarm.step(tokens=1)))
swarm.close()
swarm = joined(3)
if rank:
    note("late", None)
    signal.pause()  # comes to no call, until the test ends it
note("late", error_of(lambda: swarm.step(tokens=1)))
os._exit(0)
"""


def test_ranks_that_are_not_at_one_or_late_all_end_with_an_error(folder: Path) -> None:
    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        for life in range(2):
            if life:
                await end.expect(Restarted)
            await end.apply(anchor, 0, fresh=True)
            await end.train(1, steps=2)
            await end.expect(Detached)

    ranks = Ranks(folder, ERRORS, "fsdp")
    with Ends(folder, daemon), ranks:
        assert ranks.ranks[0].wait(DEADLINE_S) == 0, ranks.said()
        models, calls, late = (ranks.noted(name) for name in ("models", "calls", "late"))
    assert models == [("ConfigError", "rank 1 has a model of other parameters than rank 0; build the same in all")] * 2
    words = "rank 1 is in 'at_anchor' and rank 0 in 'step'; make the same calls in all ranks"
    assert calls == [("ConfigError", words)] * 2
    assert late[0][0] == "NetworkError"
    assert late[0][1].startswith("rank 1 of this node's 2 processes is gone, or late: ")


MISTAKES = """
import functools
from shoal.node.loops import other_rank, rank_group

own_loop.RankGroup = other_rank.RankGroup = functools.partial(rank_group.RankGroup, timeout_s=10)


def evaluate(model):
    return [1.0, "none"][rank == 0]


def error_of(width):
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(5, width)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with join(model, optimizer, "swarm.toml", data_dir=folder, evaluate=evaluate):
            pass
    except Exception as error:
        return type(error).__name__, str(error)


note("models", error_of(3 + (rank == 1)))
note("evaluation", error_of(3))
os._exit(0)
"""


def test_an_error_of_rank_0_reaches_ranks_whose_answers_it_has_not_taken(folder: Path) -> None:
    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.send(Evaluate(round=0))
        await end.expect(Detached)

    ranks = Ranks(folder, MISTAKES, "fsdp", size=3)
    with Ends(folder, daemon), ranks:
        assert ranks.ended() == [0] * 3, ranks.said()
    words = "rank 1 has a model of other parameters than rank 0; build the same in all"
    assert ranks.noted("models") == [("ConfigError", words)] * 3
    words = "evaluate= returned str, not a number; have it return the held-out loss"
    assert ranks.noted("evaluation") == [("ConfigError", words)] * 3


def test_a_rank_that_dies_ends_the_others_at_once(folder: Path) -> None:
    """With the timeout of ten minutes."""

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        await end.expect(Detached)

    script = """
model = wrapped(torch.nn.Sequential(torch.nn.Linear(5, 3)))
with join(model, torch.optim.SGD(model.parameters(), lr=0.1), "swarm.toml", data_dir=folder) as swarm:
    if rank:
        os.kill(os.getpid(), 9)
    swarm.step(tokens=1)
"""
    ranks = Ranks(folder, script, "ddp")
    with Ends(folder, daemon), ranks:
        assert ranks.ended() == [1, -9], ranks.said()
    assert "NetworkError: rank 1 of this node's 2 processes is gone, or late: " in ranks.said()


class Told(StandIn):
    """Notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []

    def adopt(self) -> None:
        self.asked.append("adopt")

    def ask_to_leave(self) -> None:
        self.asked.append("leave")


@pytest.mark.parametrize(
    ("restarts", "error", "asked"),
    [
        ("0", ValueError, []),  # of one: torchrun starts the loop again
        ("1", ValueError, ["adopt", "leave"]),  # the last life
        ("0", KeyboardInterrupt, ["leave"]),
        ("0", None, ["leave"]),
    ],
)
def test_a_daemon_is_left_to_the_loop_that_torchrun_starts_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, error: type[BaseException] | None, asked: list[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    told = Told(folder)
    monkeypatch.setattr(own_loop, "found_or_started", lambda *args, **settings: told)
    model = torch.nn.Linear(2, 1)

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        await end.expect(Detached)

    with Ends(folder, daemon, timeout_s=600.0), nullcontext() if error is None else pytest.raises(error):  # noqa: SIM117
        with own_loop.join(model, torch.optim.SGD(model.parameters(), lr=0.1), "swarm.toml", data_dir=folder):
            if error is not None:
                raise error
    assert told.asked == asked


def test_ranks_of_torchrun_that_have_not_met_are_told_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        ConfigError, match="torchrun started 2 processes of this loop, and they have not met; before join, call"
    ):
        own_loop.join(model, torch.optim.SGD(model.parameters(), lr=0.1), "swarm.toml", data_dir=folder)
