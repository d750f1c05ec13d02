"""Code that a manifest names is not run before its user says so: real commands, a file as a stranger sends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from shoal.protocol.identity import Identity
from shoal.protocol.manifest import load_manifest, render_manifest, validate_manifest
from tests.node.forks import run_copy
from tests.node.lab import assert_one_line, command
from tests.packaging.test_documents import blocks

MINE = """
import pathlib
pathlib.Path("imported").touch()

class Mine:
    metric = "error"
    def __init__(self, **options):
        pathlib.Path("called").touch()
    {method} = None
"""


def manifest(folder: Path, name: str, options: dict[str, str | bool], *, founders: Sequence[str] = ()) -> Path:
    """A file as somebody else would write it."""
    path = folder / "swarm.toml"
    tables = {
        "swarm": {"name": "free-gpus", "founders": list(founders) or [Identity.generate().peer_id]},
        "workload": {"name": name, "options": options},
        "sync": {"inner_steps": 5},
    }
    path.write_text(render_manifest(validate_manifest(tables, source="the test's")))
    return path


def shell(folder: Path) -> Path:
    """A manifest whose workload is a shell's command."""
    return manifest(folder, "subprocess:Popen", {"args": f"touch {folder / 'owned'}", "shell": True})


def shoal(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder, with a state of its user's own."""
    return run_copy(command(*arguments), folder, {"XDG_STATE_HOME": str(folder / "home")}, deadline_s=300)


QUIET = ("--no-mdns", "--dashboard", "off", "--listen", "/ip4/127.0.0.1/tcp/0", "--lane-listen", "127.0.0.1:0")


def test_run_does_not_execute_what_a_file_names(tmp_path: Path) -> None:
    done = shoal(tmp_path, "run", str(shell(tmp_path)), "--data-dir", "data", "--rounds", "1", *QUIET)
    assert done.returncode == 2
    assert_one_line(done.stderr, "names the code 'subprocess:Popen'", "pass --allow-workload subprocess:Popen")
    assert not (tmp_path / "owned").exists()


def test_doctor_does_not_execute_what_a_file_names(tmp_path: Path) -> None:
    done = shoal(tmp_path, "doctor", str(shell(tmp_path)), "--data-dir", "data", "--json", "--trial", "300")
    assert done.returncode == 1
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert not found["workload"]["ok"]
    assert "pass --allow-workload subprocess:Popen" in found["workload"]["remedy"]
    assert found["device"]["ok"], "the device is tried all the same"
    assert "speed" not in found
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--rounds", "1", *QUIET),
        pytest.param(("doctor", "--json", "--trial", "300"), marks=pytest.mark.long),
    ],
)
def test_class_that_is_no_workload_is_not_called_even_where_it_is_allowed(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    name, *options = arguments
    allowed = ("--allow-workload", "subprocess:Popen", "--data-dir", "data")
    done = shoal(tmp_path, name, str(shell(tmp_path)), *options, *allowed)
    assert done.returncode != 0
    for said in ("has no method build()", "a workload must have build, batches, loss, evaluate"):
        assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "owned").exists()


def test_module_is_imported_only_when_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(method="build"))
    path = manifest(tmp_path, "mine:Mine", {"width": "8"})
    run = ("run", str(path), "--data-dir", "data", "--rounds", "1", *QUIET)
    nothing, another, module = (), ("--allow-workload", "mine:Other"), ("--allow-workload", "mine")
    for allowed in (nothing, another, module):
        done = shoal(tmp_path, *run, *allowed)
        assert done.returncode == 2
        assert "--allow-workload mine:Mine" in done.stderr
        assert not (tmp_path / "imported").exists()
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "swarm").write_text("ab" * 32)
    (tmp_path / "data" / "chain.log").write_text("a round")
    done = shoal(tmp_path, *run)
    assert "belongs to another swarm" in done.stderr, "which no option helps"
    shutil.rmtree(tmp_path / "data")
    shoal(tmp_path, *run, "--allow-workload", "mine:Mine")
    assert (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()


def test_founder_runs_its_own_code_and_another_needs_to_allow_it(tmp_path: Path) -> None:
    """As docs/workloads.md has it, word for word."""
    page = "workloads.md"
    code = next(block for block in blocks(page) if "class Sine" in block)
    (tmp_path / "sine.py").write_text(code)
    made = shoal(tmp_path, *["init", "--workload", "sine:Sine", "--data-dir", "one"])
    assert made.returncode == 0, made.stderr
    assert "`shoal run swarm.toml --data-dir one`" in made.stdout
    path = tmp_path / "swarm.toml"
    path.write_text(path.read_text().replace("inner_steps = 100", "inner_steps = 5"))  # its user has a look at it
    done = shoal(tmp_path, *["run", "swarm.toml", "--data-dir", "one", "--rounds", "1"], *QUIET)
    assert done.returncode == 0, done.stderr
    again = shoal(tmp_path, *["run", "swarm.toml", "--data-dir", "one", "--rounds", "1"], *QUIET)
    assert again.returncode == 0, again.stderr
    other = shoal(tmp_path, *["run", "swarm.toml", "--data-dir", "two", "--rounds", "1"], *QUIET)
    assert other.returncode == 2
    assert_one_line(other.stderr, "if you have it and trust it, pass --allow-workload sine:Sine")
    allowed = shoal(
        tmp_path,
        *["doctor", "swarm.toml", "--data-dir", "two", "--allow-workload", "sine:Sine", "--json", "--trial", "300"],
    )
    checks = {check["name"]: check for check in json.loads(allowed.stdout)["checks"]}
    assert checks["workload"]["ok"]
    assert checks["speed"]["ok"], checks["speed"]
    assert "tokens/s" in checks["speed"]["detail"]


def test_folder_that_somebody_sent_with_its_keys_runs_nothing(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "mine.py").write_text(MINE.format(method="build"))
    theirs = {"XDG_STATE_HOME": str(tmp_path / "theirs")}
    init = command("init", "--workload", "mine:Mine", "--data-dir", "data")
    made = run_copy(init, sent, theirs, deadline_s=300)
    assert made.returncode == 0
    assert os.path.exists(sent / "data" / "authority.key")
    (sent / "imported").unlink()  # by who founded it
    swarm = load_manifest(sent / "swarm.toml")
    (sent / "data" / "swarm").write_text(swarm.swarm_id.hex())
    done = shoal(sent, "run", "swarm.toml", "--data-dir", "data", "--rounds", "1", *QUIET)
    assert done.returncode == 2
    assert "--allow-workload mine:Mine" in done.stderr
    assert not (sent / "imported").exists()


def test_testnet_does_not_execute_what_a_scenario_names(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(method="build"))
    (tmp_path / "scenario.toml").write_text('nodes = 1\nrounds = 1\nworkload = "mine:Mine"\n')
    done = shoal(tmp_path, "testnet", "--scenario", "scenario.toml", "--out", "out")
    assert done.returncode == 2
    assert_one_line(done.stderr, "scenario.toml names the code 'mine:Mine'", "pass --allow-workload mine:Mine")
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "out").exists()


def test_link_says_what_else_a_swarm_of_its_founder_s_code_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.link import LinkReply, _say_of_code

    older = msgspec.convert({"link": "shoal:x", "admits": True, "admission": "open"}, LinkReply)
    _say_of_code(older.workload)
    _say_of_code("text")
    assert capsys.readouterr() == ("", "")
    _say_of_code("sine:Sine")
    assert capsys.readouterr().err == (
        "note: 'this swarm trains sine:Sine; whoever joins has to have that code, "
        "and to trust it: --allow-workload sine:Sine behind the link'\n"
    )
