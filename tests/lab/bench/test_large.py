"""`shoal bench large`: what is refused, how two curves are compared, and one small run of each kind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.cli.init import InitOptions, found
from shoal.cli.main import execute
from shoal.lab.bench.large_spec import LargeBench, LargeRun
from shoal.lab.bench.train_spec import NOBODY, Point
from shoal.protocol.identity import Identity

SMALL = ["--parameters", "1M", "--context", "32", "--batch", "1", "--nodes", "2", "--device", "cpu"]


def curve(*losses: float) -> tuple[Point, ...]:
    """A point each 100 tokens."""
    return tuple(
        Point(round=number, tokens=100 * number, wire_bytes=0, val_loss=loss) for number, loss in enumerate(losses)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "gossip"], "--strategy must be one of diloco"),
        (["--parameters", "7B"], "--parameters must be one of 1M"),
        (["--dtype", "fp8"], "--dtype must be one of auto"),
        (["--lr", "0"], "--lr is a learning rate above 0"),
        (["--within", "0"], "--within is a number of seconds above 0"),
        (["--beside", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert execute(["bench", "large", *options]) in (1, 2)
    assert said in capsys.readouterr().err


def test_efficiency_is_of_the_tokens_that_the_run_itself_took() -> None:
    run = LargeRun(
        bench=LargeBench(strategy="streaming"),
        device="cpu",
        torch="",
        points=curve(9, 9, 9, 9, 9, 5.5, 5.5, 5.5, 5.5, 5.5),
        tokens_per_s=1,
        wall_s=1,
        beside=curve(8, 7, 6, 5, 4, 3, 2),
    )
    assert run.ending is not None
    assert run.loss == run.ending.val_loss == 5.5
    assert run.ending.sync_tokens == 250
    assert run.ending.efficiency == 250 / 700
    assert [row.met for row in run.rows] == [True, False]
    alone = msgspec.structs.replace(run, beside=())
    assert [row.name for row in alone.rows] == ["rounds in which nodes came to different states"]


def test_a_run_ends_at_its_tokens_or_at_its_time() -> None:
    bench = LargeBench(tokens=10, within_s=5)
    assert bench.goes_on(9, 4)
    assert not bench.goes_on(10, 4)
    assert not bench.goes_on(9, 5)
    assert LargeBench(tokens=10).goes_on(9, 1e9)


@pytest.mark.parametrize("strategy", ["diloco", "streaming"])
def test_all_but_the_model_is_as_init_writes_it(strategy: str, tmp_path: Path) -> None:
    node = Identity.generate()
    written = found(InitOptions(data_dir=tmp_path, strategy=strategy), node, node)
    measured = LargeBench(strategy=strategy).manifest([NOBODY])
    for section in ("sync", "inner", "round"):
        small = msgspec.structs.replace(written.inner, lr=measured.inner.lr)  # that of the default model
        assert getattr(measured, section) == (small if section == "inner" else getattr(written, section)), section


def test_a_small_model_is_trained_both_ways_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synchronous, swarm = tmp_path / "synchronous.json", tmp_path / "streaming.json"
    options = [*SMALL, "--inner-steps", "4", "--text", str(tmp_path / "text")]
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text("a shoal of fish swims as one. " * 300)
    assert execute(["bench", "large", *options, "--tokens", "4000", "--out", str(synchronous)]) == 0
    streaming = ["--strategy", "streaming", "--tokens", "2000", "--beside", str(synchronous), "--out", str(swarm)]
    assert execute(["bench", "large", *options, *streaming]) == 0, capsys.readouterr().err
    alone, together = (msgspec.json.decode(path.read_bytes()) for path in (synchronous, swarm))
    assert alone["points"][-1]["tokens"] >= 4000
    assert alone["points"][0]["val_loss"] == pytest.approx(8, abs=1e-3)
    assert alone["points"][-1]["val_loss"] < 5
    assert together["points"][0] == alone["points"][0]
    assert together["points"][-1]["tokens"] > 1000, "of the last round of a cycle of fragments, or later"
    assert together["points"][-1]["val_loss"] < 6
    assert together["unequal"] == 0
    assert together["beside"] == alone["points"]
    other = ["--seed", "2", "--strategy", "streaming", "--beside", str(synchronous)]
    assert execute(["bench", "large", *options, *other]) == 2
    assert "give a synchronous run of the same model" in capsys.readouterr().err
