"""A rolling upgrade: over two real versions, and a next one that is made up; another wire version is told why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.node.control_client import request
from shoal.protocol.wire import WIRE_VERSION
from tests.node import lab
from tests.node.lab import Node, Swarm, assert_exact, eventually
from tests.node.upgraded_node import VERSION, WIRE

UPGRADED_NODE = Path(__file__).with_name("upgraded_node.py")
NEXT_MINOR, NEXT_MAJOR = "0.3.0", "1.0.0"
ROOT = Path(__file__).resolve().parents[2]
FIRST_OF_THIS_WIRE = "444fd48aca00b7cbc09ebb83c61915be05712241"
"""The oldest commit that speaks `WIRE_VERSION` 2: nodes of 0.1.0, before it, are refused at hello."""


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)


def wheel_of(commit: str, folder: Path) -> Path:
    """Build the wheel of a commit and unpack it beside its metadata, without what it depends on; where that lies."""
    packed = git("archive", commit)
    assert packed.returncode == 0, packed.stderr
    (folder / "source").mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=packed.stdout, check=True)
    python = [sys.executable, "-m"]
    build = [*python, "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    install = [*python, "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "installed"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=600)
    installed = folder / "installed"
    which = ["env", f"PYTHONPATH={installed}", sys.executable, "-c", "import shoal.cli.main as m; print(m.__file__)"]
    used = subprocess.run(which, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout
    assert Path(used.strip()).is_relative_to(installed)
    return installed


def of_wheel(installed: Path, *arguments: str) -> list[str]:
    """The command of a wheel, whose modules come before those of the tree."""
    return ["env", f"PYTHONPATH={installed}", sys.executable, "-m", "shoal.cli.main", *arguments]


def manifest_by(installed: Path, workplace: Path, founders: list[str]) -> str:
    """What `shoal init` of a wheel writes, with these founders."""
    folder, written = workplace / "founder", workplace / "written.toml"
    init = of_wheel(installed, "init", "--workload", "regression", "--data-dir", str(folder), "-o", str(written))
    subprocess.run(init, check=True, capture_output=True, timeout=120)
    text, found = re.subn(r"^founders = .*$", f"founders = {json.dumps(founders)}", written.read_text(), flags=re.M)
    assert found == 1
    return text


def of_all_three(node: Node, after: int) -> bool:
    """Whether it certified a round beyond that one which all three contributed to."""
    return any(event["round"] > after and len(event["members"]) == 3 for event in node.events("certified"))


def upgrade(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on whoever is started on that folder is of another version."""
    same = lab.command

    def command(*arguments: str) -> list[str]:
        if str(folder) in arguments:
            return [sys.executable, str(UPGRADED_NODE), *arguments]
        return same(*arguments)

    monkeypatch.setattr(lab, "command", command)


@pytest.mark.long
def test_members_are_upgraded_to_the_next_minor_version_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, NEXT_MINOR)
    with Swarm(tmp_path, nodes=3) as swarm:
        swarm.start_together()
        swarm.nodes[0].certified(2)
        for node in swarm.nodes[:2]:
            others = [one for one in swarm.nodes if one is not node]
            request(node.folder, "leave")
            node.wait_exit()
            upgrade(monkeypatch, node.folder)
            node.start(join=others)
            back = node.wait("certified")
            others[0].certified(back["round"] + 1)
        old = swarm.nodes[2]
        last = old.events("certified")[-1]["round"]
        after = old.certified(last + 2)
        assert sorted(after["members"]) == sorted(node.peer_id for node in swarm.nodes)
        assert_exact(swarm.report(last))


@pytest.mark.long
@pytest.mark.skipif(
    git("cat-file", "-e", FIRST_OF_THIS_WIRE).returncode != 0, reason="the history of the repository is not here"
)
def test_members_of_the_oldest_version_of_this_wire_are_replaced_by_todays_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both from their wheels, on the manifest that the old one wrote; no round is lost, and each has one state."""
    old, new = (wheel_of(commit, tmp_path / name) for commit, name in ((FIRST_OF_THIS_WIRE, "old"), ("HEAD", "new")))
    wheels = {tmp_path / f"node{index}": old for index in range(3)}

    def command(*arguments: str) -> list[str]:
        (wheel,) = (wheel for folder, wheel in wheels.items() if str(folder) in arguments)
        return of_wheel(wheel, *arguments)

    monkeypatch.setattr(lab, "command", command)
    with Swarm(tmp_path, nodes=3, forked=False) as swarm:
        swarm.manifest_path.write_text(manifest_by(old, tmp_path, [node.peer_id for node in swarm.nodes]))
        swarm.start_together()
        swarm.nodes[0].certified(2)
        for node in swarm.nodes:
            others = [one for one in swarm.nodes if one is not node]
            request(node.folder, "leave")
            node.wait_exit()
            wheels[node.folder] = new
            node.start(join=others)
            back = node.wait("certified")["round"]
            eventually(lambda back=back: all(of_all_three(one, back) for one in swarm.nodes), "a round of all three")  # type: ignore[misc]
        last = swarm.nodes[0].events("certified")[-1]["round"]
        digests: dict[int, set[str]] = {}
        for node in swarm.nodes:
            node.certified(last)
            for event in node.all_events():
                if event["event"] == "certified":
                    digests.setdefault(event["round"], set()).add(event["digest"])
        assert list(range(1, last + 1)) == sorted(round for round in digests if round <= last)
        assert all(len(found) == 1 for found in digests.values())
        assert_exact(swarm.report(last))


@pytest.mark.long
def test_node_of_another_wire_version_is_told_so_and_the_swarm_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, NEXT_MAJOR)
    monkeypatch.setenv(WIRE, str(WIRE_VERSION + 1))
    with Swarm(tmp_path, nodes=3, forked=False) as swarm:  # its modules are not imported yet
        first, second, newer = swarm.nodes
        first.start()
        second.start(join=[first])
        first.certified(2)
        upgrade(monkeypatch, newer.folder)
        newer.start(join=[first])
        said = f"this node speaks wire version {WIRE_VERSION}, yours {WIRE_VERSION + 1}; install the same version"
        eventually(lambda: said in newer.log, "the reason of the refusal")
        round = first.events("certified")[-1]["round"]
        after = first.certified(round + 2)
        assert newer.peer_id not in after["members"]
        assert not newer.events("certified")
        assert newer.running
