"""The image that `deploy/Dockerfile` says, really built, by buildah, and run to certified rounds.

The base that it is built from, `python:3.11-slim`, is on an index that a test does not ask: a Debian of its own, put
together by debootstrap, stands in for it under the same name. Slow by nature: it fetches and unpacks PyTorch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.test_service_files import deployed, entry_point

ROOT = Path(__file__).parents[2]
DEBIAN = "bookworm"
PACKAGES = "python3,python3-dev,python3-pip,ca-certificates"
BASE = "docker.io/library/python:3.11-slim"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
STEP_DEADLINE_S = 1800.0
ROUNDS = 2

needs_tools = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap", "ip"))),
    reason="building an image needs root, buildah, debootstrap and iproute2",
)


def run(*command: str | Path) -> str:
    """Run one command to its end; what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=STEP_DEADLINE_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[list[str]]:
    """The command, with a storage of its own that is emptied in the end."""
    command = ["buildah", "--root", str(tmp_path / "storage"), "--runroot", str(tmp_path / "run")]
    yield command
    run(*command, "rm", "--all")
    run(*command, "rmi", "--all", "--force")


def stand_in(folder: Path, buildah: list[str]) -> None:
    """Make the base: Debian's Python, which lets pip install beside it, as the image's own does."""
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, folder)
    for marker in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    if Path("/", CERTIFICATES).is_file():  # those of this machine's network
        shutil.copy(Path("/", CERTIFICATES), folder / CERTIFICATES)
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "copy", "--quiet", container, folder, "/")
    run(*buildah, "commit", "--quiet", container, BASE)
    run(*buildah, "rm", container)


def index_of_torch(folder: Path) -> None:
    """An index as pip reads it, with the build of PyTorch that pip chooses on this machine."""
    (version,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    place = folder / "torch"
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, version)
    links = "".join(f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>\n' for file in place.glob("*.whl"))
    (place / "index.html").write_text(links)


def check_image(buildah: list[str]) -> None:
    """Found a swarm in a container of the image, certify rounds by its entry point, and verify them."""
    image = json.loads(run(*buildah, "inspect", "--type", "image", "shoal"))["OCIv1"]["config"]
    assert (image["Entrypoint"], image["User"], image["StopSignal"]) == (entry_point(), "shoal", "SIGINT")
    assert set(image["ExposedPorts"]) == {"4001/tcp", "4002/tcp", "8420/tcp"}

    (owner,) = re.findall(r"useradd --uid (\d+)", deployed("Dockerfile"))
    container = run(*buildah, "from", "--pull-never", "shoal").strip()
    inside = (*buildah, "run", "--isolation", "chroot", container, "--")  # /swarm is the container's own volume
    assert run(*inside, "id", "-u").strip() == owner
    run(*inside, "shoal", "init", "--workload", "regression", "--data-dir", "/swarm/data", "-o", "/swarm/swarm.toml")
    # in a network of its own: the ports of its entry point may be taken on this machine
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    run(*alone, *inside, *entry_point(), "--rounds", str(ROUNDS))
    said = run(*inside, "shoal", "verify", "/swarm/data", "--manifest", "/swarm/swarm.toml")
    assert f", round {ROUNDS}\n" in said
    kept = run(*inside, "find", "/swarm", "-printf", "%p %U %m\\n").splitlines()
    assert f"/swarm {owner} 700" in kept
    assert f"/swarm/data/node.key {owner} 600" in kept
    assert {line.split()[1] for line in kept} == {owner}
    run(*inside, "sh", "-c", "test -e /src/pyproject.toml && ! test -e /src/.git && ! test -e /src/tests")


@pytest.mark.long
@needs_tools
def test_image_is_built_and_its_node_certifies_rounds_as_its_own_user(tmp_path: Path, buildah: list[str]) -> None:
    stand_in(tmp_path / "base", buildah)
    index_of_torch(tmp_path / "index")
    build = ("bud", "--pull-never", "--isolation", "chroot", "--network", "host", "--tag", "shoal")
    mounted = ("--volume", f"{tmp_path}/index:/index:ro", "--build-arg", "TORCH_INDEX=file:///index")
    run(*buildah, *build, *mounted, "--file", "deploy/Dockerfile", ".")
    check_image(buildah)
