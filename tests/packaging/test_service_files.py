"""What `deploy/` has, and its page: understood by what reads it, true to the command line, and to each other."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from shoal.cli.commands import app_of
from shoal.cli.main import INTERRUPTED, WRONG_USAGE
from shoal.node.doctor import FILES_ASKED
from shoal.protocol.key_file import PASSPHRASE_VARIABLE
from shoal.testnet.links.namespaces import network
from tests.node.lab import eventually, shoal
from tests.testnet.links_lab import needs_namespaces

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public-swarm.md").read_text(encoding="utf-8")
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}
ROUNDS = 2

UNIT, USER_UNIT, CONTAINER, SCRIPT = "shoal.service", "shoal-user.service", "Dockerfile", "shoal.slurm"


def deployed(name: str) -> str:
    """A file of `deploy/`, continued lines joined."""
    return (ROOT / "deploy" / name).read_text(encoding="utf-8").replace("\\\n", " ")


def service(unit: str = UNIT) -> dict[str, list[str]]:
    """The settings of a unit, each with all that it is set to."""
    found: dict[str, list[str]] = {}
    for line in deployed(unit).splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def typed() -> list[list[str]]:
    """The words of every command on the page, as a shell reads them."""
    text = "\n".join(line[4:] for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith("    "))
    return [shlex.split(line, comments=True) for line in text.splitlines() if not line.startswith("(")]


def run_options(name: str = "run") -> set[str]:
    command = get_command(app_of()).get_command(None, name)  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts}


def options_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def entry_point() -> list[str]:
    (line,) = (one for one in deployed(CONTAINER).splitlines() if one.startswith("ENTRYPOINT "))
    words: list[str] = json.loads(line.removeprefix("ENTRYPOINT "))
    return words


def test_units_and_container_start_a_node_with_options_that_there_are() -> None:
    starts = [service(unit)["ExecStart"] for unit in (UNIT, USER_UNIT)]
    for words in (*(shlex.split(start) for (start,) in starts), entry_point()):
        assert [Path(words[0]).name, words[1]] == ["shoal", "run"]
        assert options_in(words)
        assert options_in(words) <= run_options()


@pytest.mark.parametrize(("name", "of"), [(UNIT, "--system"), (USER_UNIT, "--user")])
def test_unit_is_understood_by_systemd(tmp_path: Path, name: str, of: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "shoal.service"
    here = re.sub(r"=\S+/.venv/bin/shoal", f"={sys.executable}", deployed(name)).replace("User=shoal", "User=root")
    unit.write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", of, str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", [UNIT, USER_UNIT])
def test_unit_does_not_repeat_what_only_its_user_can_cure(unit: str) -> None:
    settings = service(unit)
    assert settings["Restart"] == ["on-failure"]
    assert settings["RestartPreventExitStatus"] == [str(WRONG_USAGE)]
    assert settings["SuccessExitStatus"] == [str(INTERRUPTED)]
    assert int(settings["RestartSec"][0]) >= 5
    assert settings["LimitNOFILE"] == [str(FILES_ASKED)]
    assert f"\n#Environment={PASSPHRASE_VARIABLE}=" in deployed(unit)


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("unit", [UNIT, USER_UNIT])
def test_line_of_the_unit_runs_a_node_that_ends_as_the_unit_says(tmp_path: Path, unit: str) -> None:
    """In a network of its own, since its ports may be taken here, and in folders in place of the system's."""
    settings, home = service(unit), tmp_path / "home"
    here = {"%h": home, "/etc/shoal": tmp_path / "etc", "/var/lib/shoal": home}
    (line,), variables = settings["ExecStart"], "\n".join(settings.get("Environment", [f"HOME={home}"]))
    for place, path in here.items():
        line, variables = line.replace(place, str(path)), variables.replace(place, str(path))
    words = shlex.split(line)[1:]
    manifest = Path(words[1])
    data = Path(words[words.index("--data-dir") + 1]) if "--data-dir" in words else home / ".local/share/shoal"
    manifest.parent.mkdir(parents=True)
    founded = shoal("init", "--workload", "regression", "--data-dir", str(data), "-o", str(manifest))
    assert founded.returncode == 0, founded.stderr
    with network(1) as net, (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*net.place(0).enter, sys.executable, "-m", "shoal.cli.main", *words],
            env={"PATH": os.environ["PATH"], **dict(one.split("=", 1) for one in variables.splitlines())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            events = data / "events.jsonl"
            eventually(lambda: events.is_file() and events.read_text().count('"certified"') >= ROUNDS, "some rounds")
            process.send_signal(getattr(signal, settings["KillSignal"][0]))
            ended = process.wait(int(settings["TimeoutStopSec"][0]))
        finally:
            process.kill()
            process.wait()
    assert str(ended) in {"0", *settings["SuccessExitStatus"]}
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {record["level"] for record in told} <= {"info", "warning"}


def test_steps_make_what_the_unit_names() -> None:
    (user,), (start,) = service()["User"], service()["ExecStart"]
    words = shlex.split(start)
    environment, data = Path(words[0]).parents[1], words[words.index("--data-dir") + 1]
    steps = [" ".join(line) for line in typed() if line[:1] == ["sudo"]]
    assert any(step.startswith("sudo useradd --system") and step.endswith(f" {user}") for step in steps)
    assert f"sudo python3 -m venv {environment}" in steps
    assert any(step.startswith(f"sudo {environment}/bin/pip install --constraint") for step in steps)
    assert f"sudo install -d -o {user} -m 700 {data}" in steps
    assert f"sudo install -m 644 swarm.toml {Path(words[2]).parent}/" in steps
    assert any(f"{words[0]} run - --data-dir {data} --rounds 1 < link" in step for step in steps)
    assert f"/var/lib/{service()['StateDirectory'][0]}" == data


def test_commands_on_the_page_have_options_that_there_are() -> None:
    known = set(get_command(app_of()).commands)  # type: ignore[attr-defined]
    ours = [line for line in typed() if line[:1] == ["shoal"]]
    assert {line[1] for line in ours} >= {"init", "id", "doctor", "run"}
    for line in ours:
        assert line[1] in known
        assert options_in(line) <= run_options(line[1])
    founding = next(line for line in ours if line[1] == "run" and "--listen" in line)
    assert founding[-4:] == ["--listen", "/ip4/0.0.0.0/tcp/4001", "--lane-listen", "0.0.0.0:4002"]


def test_container_file_has_instructions_only_and_its_data_where_it_says() -> None:
    lines = [line for line in deployed(CONTAINER).splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    assert lines[0].startswith("FROM python:3.11")
    assert "VOLUME /swarm" in lines
    assert all(word.startswith("/swarm/") for word in entry_point() if word.startswith("/swarm"))
    assert "STOPSIGNAL SIGINT" in lines
    assert any("--constraint /src/constraints.txt" in line for line in lines if line.startswith("RUN pip"))
    assert any("install -d -o shoal" in line and line.index("install -d") < line.index("/swarm") for line in lines)
    assert lines.index("VOLUME /swarm") > next(at for at, line in enumerate(lines) if "install -d -o shoal" in line)


def test_container_is_run_with_the_ports_and_the_volume_of_its_file() -> None:
    (run,) = (line for line in typed() if line[:3] == ["docker", "run", "-d"])
    published = [run[at + 1].split(":") for at, word in enumerate(run) if word == "-p"]
    assert all(ends[-2:] == [ends[-1], ends[-1]] for ends in published)  # the same inside as outside
    (exposed,) = (line.split()[1:] for line in deployed(CONTAINER).splitlines() if line.startswith("EXPOSE"))
    assert [ends[-1] for ends in published] == exposed
    assert published[-1] == ["127.0.0.1", "8420", "8420"]  # the page is for this machine alone
    words = entry_point()
    where = [words[words.index(option) + 1] for option in ("--listen", "--lane-listen", "--dashboard")]
    assert [re.split(r"[:/]", place)[-1] for place in where] == exposed
    assert run[run.index("-v") + 1] == "/srv/swarm:/swarm"
    (timeout,) = service()["TimeoutStopSec"]
    assert run[run.index("--stop-timeout") + 1] == timeout
    (owner,) = re.findall(r"useradd --uid (\d+)", deployed(CONTAINER))
    made = [line for line in typed() if line[:2] == ["sudo", "install"] and "/srv/swarm" in line[-1]]
    assert [line[line.index("-o") + 1] for line in made] == [owner, owner]


def test_page_names_the_files_that_there_are() -> None:
    named = set(re.findall(r"deploy/([\w.-]+)", PAGE))
    assert named == {UNIT, USER_UNIT, CONTAINER, SCRIPT, "compose.yaml", "prometheus.yml"}
    assert all((ROOT / "deploy" / name).is_file() for name in named)


def test_job_runs_a_node_for_each_task_and_hands_it_the_line_and_the_signal(tmp_path: Path) -> None:
    """With programs in place of `srun` and `shoal` that say what they are given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {
        "srun": 'shift; for task in 0 1; do SLURM_PROCID=$task "$@"; done',
        "shoal": 'echo "$@"; cat; ls -d "$4"',
    }
    for name, body in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SHOAL_DATA_ROOT": str(tmp_path / "nodes of mine"),
        "SLURM_CPUS_PER_TASK": "8",
    }
    job = ["bash", str(ROOT / "deploy" / SCRIPT)]
    done = subprocess.run([*job, "shoal:abc"], env=environment, capture_output=True, text=True, check=True, timeout=60)
    told = done.stdout.splitlines()
    assert (len(told), done.stderr) == (6, "")
    for task in (0, 1):
        folder = tmp_path / "nodes of mine" / str(task)
        words, line, made = told[3 * task : 3 * task + 3]
        assert words == f"run - --data-dir {folder} --dashboard off --threads 8"
        assert options_in(words.split()) <= run_options()
        assert (line, made) == ("shoal:abc", str(folder))
    without = subprocess.run(job, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert without.returncode != 0
    assert "give the line that a member of the swarm prints" in without.stderr
    assert "#SBATCH --signal=INT@" in deployed(SCRIPT)


def is_left_out(path: str) -> bool:
    """Whether the image is built without it: it, or a folder that it lies in, is on the list."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        whole, name = "/".join(parts[:end]), parts[end - 1]
        if any(
            fnmatch.fnmatch(name, pattern.removeprefix("**/"))
            if pattern.startswith("**/")
            else whole.count("/") == pattern.count("/") and fnmatch.fnmatch(whole, pattern)
            for pattern in patterns
        ):
            return True
    return False


def test_image_has_the_source_and_nothing_else_of_this_machine() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = project["tool"]["setuptools"]["package-dir"].values()
    source = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    wanted = [path.relative_to(ROOT).as_posix() for path in source if path.is_file()]
    wanted += ["pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"]
    assert [path for path in wanted if is_left_out(path)] == []
    for path in (
        ".git/config",
        ".venv/bin/python",
        "node/__pycache__/x.pyc",
        "runs/demo/nodes/0/node.key",
        "my/authority.key",
    ):
        assert is_left_out(path), path
