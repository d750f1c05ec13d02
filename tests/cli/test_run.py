"""`shoal run`: from arguments to a NodeConfig, from an Outcome to an exit code. The daemon itself is a fake."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import run
from shoal.cli.main import execute
from shoal.node.option import HostPort
from shoal.node.options import DEFAULT_DATA_DIR, Hold, NodeConfig
from shoal.node.outcome import HeldOut, Outcome, Progress, RoundCertified, TrainerTraceback
from shoal.node.state.store import frame_batch
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import load_manifest


class FakeDaemon:
    """Keeps the configuration it is started with, tells `events`, and ends with `outcome`."""

    def __init__(self) -> None:
        self.config: NodeConfig | None = None
        self.events: list[Progress] = []
        self.outcome = Outcome.DONE

    def __call__(self, config: NodeConfig, on_progress: Callable[[Progress], None]) -> Outcome:
        self.config = config
        for event in self.events:
            on_progress(event)
        return self.outcome


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    fake = FakeDaemon()
    monkeypatch.setattr(run, "run_to_end", fake)
    return fake


@pytest.fixture
def manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "swarm.toml"
    assert execute(["init", "--data-dir", str(tmp_path / "node"), "-o", str(path)]) == 0
    capsys.readouterr()
    return path


def test_run_with_no_options_takes_the_defaults(daemon: FakeDaemon, manifest: Path) -> None:
    assert execute(["run", str(manifest)]) == 0
    assert daemon.config == NodeConfig(manifest=load_manifest(manifest), data_dir=DEFAULT_DATA_DIR)


def test_run_hands_every_option_on(daemon: FakeDaemon, manifest: Path, tmp_path: Path) -> None:
    first, second = (
        f"/ip4/192.0.2.1/tcp/{port}/p2p/{Identity.from_seed(bytes([port] * 32)).peer_id}" for port in (1, 2)
    )
    arguments = f"""--data-dir {tmp_path / "node"} --join {first} --join {second} --listen /ip4/127.0.0.1/tcp/4001
        --lane-listen 127.0.0.1:4100 --device cuda:1 --threads 3 --accumulate 4 --data {tmp_path} --rounds 7
        --dashboard off
        --max-upload 5MiB/s --max-download 80Mbit --no-mdns --test-mode --hold 3:reduce:0.4 --hold 4:train"""
    assert execute(["run", str(manifest), *arguments.split()]) == 0
    assert daemon.config == NodeConfig(
        manifest=load_manifest(manifest),
        data_dir=tmp_path / "node",
        join=(first, second),
        listen=("/ip4/127.0.0.1/tcp/4001",),
        lane_listen=HostPort("127.0.0.1", 4100),
        device="cuda:1",
        threads=3,
        accumulate=4,
        data=str(tmp_path),
        rounds=7,
        max_upload=5 * 2**20,
        max_download=10_000_000,
        mdns=False,
        dashboard=None,
        test_mode=True,
        holds=(Hold(round=3, phase="reduce", progress=0.4), Hold(round=4, phase="train")),
    )


def test_run_hands_on_how_many_processes_hold_the_model(daemon: FakeDaemon, manifest: Path) -> None:
    assert execute(["run", str(manifest), "--processes", "8", "--device", "cuda"]) == 0
    assert daemon.config is not None
    assert (daemon.config.processes, daemon.config.device) == (8, "cuda")


def test_run_takes_options_from_the_environment(
    daemon: FakeDaemon, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "ROUNDS": "3",
        "MAX_UPLOAD": "1M",
        "MDNS": "false",
        "LISTEN": "/ip4/127.0.0.1/tcp/1 /ip6/::1/tcp/2",
    }.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)
    monkeypatch.setenv("SHOAL_RUN_THREADS", "9")
    assert execute(["run", str(manifest), "--rounds", "4"]) == 0
    assert daemon.config is not None
    assert daemon.config.rounds == 4
    assert daemon.config.max_upload == 1_000_000
    assert daemon.config.mdns is False
    assert daemon.config.listen == ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/2")
    assert daemon.config.threads == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "--device: 'tpu' is none of auto, cpu, cuda, cuda:N, mps"),
        (["--threads", "-1"], "--threads: -1 is not in 0.."),
        (["--accumulate", "0"], "--accumulate: 0 is not in 1.."),
        (["--processes", "0"], "--processes: 0 is not in 1.."),
        (["--processes", "2", "--device", "cuda:1"], "--processes 2: each has a device of its own; give --device"),
        (["--rounds", "0"], "--rounds: 0 is no number of rounds"),
        (["--dashboard", "8080"], "--dashboard: '8080' is not HOST:PORT; write"),
        (
            ["--max-upload", "fast"],
            "--max-upload: 'fast' is not a rate; write 10M or 10MB/s for bytes, 80Mbit for bits",
        ),
        (["--data", "/no/such/data"], "--data: there is no /no/such/data"),
        (["--join", "somewhere"], "'somewhere' is not the address of a node; it looks like /ip4/"),
        (["--join", "/ip4/127.0.0.1/tcp/4001"], "'/ip4/127.0.0.1/tcp/4001' is not the address of a node; it"),
        (["--listen", "0.0.0.0:4001"], "cannot listen on '0.0.0.0:4001'"),
        (["--lane-listen", "4100"], "--lane-listen: '4100' is not HOST:PORT"),
        (["--hold", "3:reduce"], "--hold works with --test-mode only"),
        (["--test-mode", "--hold", "3:lunch"], "a hold's phase is one of"),
    ],
)
def test_run_refuses_in_one_line_before_it_starts(
    daemon: FakeDaemon, manifest: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert execute(["run", str(manifest), *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"shoal: {said}")
    assert err.count("\n") == 1
    assert out == ""
    assert daemon.config is None


def test_run_refuses_a_workload_that_is_not_installed(
    daemon: FakeDaemon, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write_text(manifest.read_text().replace('name = "text"', 'name = "poetry"'))
    assert execute(["run", str(manifest)]) == 2
    assert "workload 'poetry' is not installed here" in capsys.readouterr().err
    assert daemon.config is None


# What only the node itself finds out: no stand-in here, the real one refuses before it starts anything.


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda key: os.truncate(key, 20), "is damaged or is not a key file of Shoal's; restore it from a backup"),
        (lambda key: os.truncate(key, 0), "is damaged or is not a key file of Shoal's; restore it from a backup"),
        (lambda key: key.chmod(0o640), "can be read by others; run: chmod 600"),
    ],
    ids=["truncated", "empty", "readable by the group"],
)
def test_run_refuses_a_bad_identity_file_and_leaves_it_as_it_is(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], said: str
) -> None:
    key = tmp_path / "node" / "node.key"
    damage(key)
    before, mode = key.read_bytes(), key.stat().st_mode
    assert execute(["run", str(manifest), "--data-dir", str(key.parent), "--no-mdns"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shoal: ")
    assert said in err
    assert str(key) in err
    assert err.count("\n") == 1
    assert (key.read_bytes(), key.stat().st_mode) == (before, mode)


def test_run_refuses_the_data_folder_of_another_swarm(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    (folder / "swarm").write_text("ab" * 32)
    (folder / "chain.log").write_bytes(frame_batch(0, [b"a certificate"]))
    assert execute(["run", str(manifest), "--data-dir", str(folder), "--no-mdns"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"shoal: {folder} belongs to another swarm")
    assert err.endswith("or begin anew with another key: `shoal init --data-dir NEW -o NEW.toml`\n")
    assert err.count("\n") == 1
    assert (folder / "swarm").read_text() == "ab" * 32
    (folder / "node.key").unlink()  # of who founded the manifest's swarm
    assert execute(["run", str(manifest), "--data-dir", str(folder), "--no-mdns"]) == 2
    assert capsys.readouterr().err.endswith("in which it has rounds; choose another --data-dir\n")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(Outcome.DONE, 0), (Outcome.LEFT, 0), (Outcome.FAILED, 1), (Outcome.INTERRUPTED, 130)],
)
def test_run_ends_with_the_code_of_its_outcome(daemon: FakeDaemon, manifest: Path, outcome: Outcome, code: int) -> None:
    daemon.outcome = outcome
    assert execute(["run", str(manifest)]) == code


@pytest.mark.parametrize(("unit", "said"), [("bits per byte", ""), ("", " (own unit)")])
def test_run_tells_progress_on_stderr(
    daemon: FakeDaemon, manifest: Path, capsys: pytest.CaptureFixture[str], unit: str, said: str
) -> None:
    daemon.events = [
        RoundCertified(
            round=3,
            members=5,
            contributors=4,
            loss=1.25,
            seconds=8.125,
            held_out=HeldOut(round=2, value=1.30251, metric="bits per byte"),
            loss_metric=unit,
            missing=("m3",),
        ),
        RoundCertified(round=4, members=9, contributors=5, loss=None, seconds=1.0, missing=("a", "b", "c", "d")),
        TrainerTraceback(summary="ValueError: no data", traceback="Traceback:\n  line \x1b[31m\nValueError: no data"),
    ]
    execute(["run", str(manifest)])
    out, err = capsys.readouterr()
    assert out == ""
    certified, many, failed, *trace = (line.split(" ", 1)[1] for line in err.splitlines())
    losses = f"training loss 1.25{said}, held-out 1.303 (round 2)"
    assert certified == f"info round 3 certified: 4 of 5 contributed, without m3, {losses}, 8.1 s"
    assert many == "info round 4 certified: 5 of 9 contributed, 1.0 s"
    assert failed == "error the workload failed: ValueError: no data"
    assert trace[1] == "error     line \\x1b[31m"
