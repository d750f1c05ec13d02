"""A release: what would be published, built from a commit and tried as a stranger gets it (`make release`).

Both distributions are built from the commit alone and checked by twine. Then they are installed into an empty
environment of each interpreter, by the list of exact versions that is made here, without a compiler, and after that as
pip resolves it. Each time a node founds a swarm there, certifies rounds, and has them verified. Nothing is published.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal.protocol.errors import ConfigError

ROOT: Final = Path(__file__).resolve().parents[1]
INTERPRETERS: Final = ("python3.11", "python3.12", "python3.13")
"""Those that a release is for; `--python` names others."""
STEP_DEADLINE_S: Final = 1800.0
"""Of one command: the slowest fetches and unpacks several GB of PyTorch with CUDA."""
WITH_WHEELS: Final[dict[str, str]] = {"fastecdsa": "4.0.0"}
"""Versions in place of those that a dependency pins. Of fastecdsa 2.3.2, which libp2p 0.8.1 pins, there is no wheel for
Linux. libp2p uses it for P-256 keys and SecIO alone; a node has Ed25519 keys and Noise."""
UNTIED: Final = frozenset({"torch"})
"""Not on the list of exact versions, nor what it needs: its user chooses the build for the device."""
NO_COMPILER: Final[Mapping[str, str]] = {"CC": "/bin/false", "CXX": "/bin/false"}

LIST: Final = "requirements.txt"
LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
"""Of Markdown: a mark if it is a picture, its text, and where it leads."""

Closure = dict[str, str]
"""Versions of distributions by their normalised names."""


@dataclass(frozen=True, slots=True)
class Project:
    """Facts of the tree's pyproject.toml. source: where others read it, as https://host/owner/name, if known."""

    version: str
    source: str | None = None

    @classmethod
    def of(cls, root: Path) -> Project:
        """Read that of the tree `root`."""
        told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return cls(told["version"], told.get("urls", {}).get("Source"))

    def lab(self, pyproject: str) -> str:
        """Return the laboratory's pyproject.toml as it is released: of this version, for `shoal` of this version."""
        pyproject, versions = re.subn(r"^version = .*$", f'version = "{self.version}"', pyproject, flags=re.MULTILINE)
        pyproject, needs = re.subn('"shoal"]', f'"shoal=={self.version}"]', pyproject)
        if (versions, needs) != (1, 1):
            raise ConfigError('lab/pyproject.toml has not one `version = …` and one `dependencies = ["shoal"]`')
        return pyproject

    def readme(self, text: str) -> str:
        """Return README.md as an index shows it, which has none of the files beside it.

        Links lead to where the source lies, in the state of this version; where that is not known there are none, and
        no pictures.
        """

        def link(found: re.Match[str]) -> str:
            picture, name, target = found.groups()
            if "://" in target or target.startswith("#"):
                return found[0]
            if self.source is None:
                return "" if picture else name
            return f"{picture}[{name}]({self.source}/{'raw' if picture else 'blob'}/v{self.version}/{target})"

        return LINK.sub(link, text)


def notes(changelog: str, version: str) -> str:
    """Return what the list of changes says of a version. Raises ConfigError where it says nothing."""
    found = re.search(rf"^## {re.escape(version)}$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ConfigError(f"CHANGELOG.md has no section `## {version}`: write what its user meets")
    return found[1].strip() + "\n"


def closure() -> Closure:
    """Return the versions, installed here, of all that `shoal` needs, however far down; of UNTIED nothing.

    Raises ConfigError where one is not installed.
    """
    found: Closure = {}
    waiting = [(canonicalize_name("shoal"), frozenset({""}))]
    seen = set()
    while waiting:
        one, extras = waiting.pop()
        if one in UNTIED or (one, extras) in seen:
            continue
        seen.add((one, extras))
        try:
            distribution = importlib.metadata.distribution(one)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{one} is not installed here: install what shoal needs") from None
        found[one] = distribution.version
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((canonicalize_name(needed.name), frozenset({"", *needed.extras})))
    return found


def pinned(version: str) -> str:
    """Return the list that is installed without a resolver: all of `shoal`'s closure in exact versions."""
    versions = closure() | WITH_WHEELS | {"shoal": version}
    head = (
        "# All that shoal needs but PyTorch, in the versions that it was tried with; no compiler is needed:",
        "#     pip install torch && pip install --no-deps --requirement requirements.txt",
    )
    return "\n".join((*head, *(f"{name}=={one}" for name, one in sorted(versions.items())))) + "\n"


def run(*command: str | Path, cwd: Path, more: Mapping[str, str] | None = None) -> str:
    """Run one command to its end; return what it printed. Raises ConfigError with its last lines where it failed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SHOAL_"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        why = done.stdout[-2000:].strip()
        raise ConfigError(f"{' '.join(map(str, command))} ended with {done.returncode}; see why: {why}")
    told: str = done.stdout
    return told


def build(root: Path, out: Path, commit: str = "HEAD") -> list[Path]:
    """Build sdist and wheel of both distributions from a commit, and nothing that is not in it; return the files.

    The same commit gives the same bytes, with the same setuptools: every date is the commit's.
    """
    seconds = run("git", "log", "-1", "--format=%ct", commit, cwd=root).strip()
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        shutil.copy(Path(folder) / "LICENSE", Path(folder) / "lab")  # each distribution has its licence
        project = Project.of(Path(folder))
        for path, released in (
            (Path(folder) / "README.md", project.readme),
            (Path(folder) / "lab" / "pyproject.toml", project.lab),
        ):
            path.write_text(released(path.read_text(encoding="utf-8")), encoding="utf-8")
        for tree in (Path(folder), Path(folder) / "lab"):
            run(sys.executable, "-m", "build", "--outdir", out, tree, cwd=out, more={"SOURCE_DATE_EPOCH": seconds})
    files = sorted(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files, cwd=out)
    return files


def interpreter(name: str) -> str | None:
    """Return the version of an interpreter as it says it, or nothing where there is none."""
    found = shutil.which(name)
    if found is None:
        return None
    asked = [found, "-c", "import platform; print(platform.python_version())"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def trained(shoal: Path, folder: Path, version: str) -> str:
    """Have a node found a swarm in an empty folder and certify two rounds; return the round that `verify` confirms."""
    folder.mkdir()
    said = run(shoal, "--version", cwd=folder).strip()
    if said != f"shoal {version}":
        raise ConfigError(f"{shoal} says that it is {said}; expected is {version}")
    run(shoal, "init", "--workload", "regression", "--data-dir", "node", "-o", "swarm.toml", cwd=folder)
    alone = ("--no-mdns", "--no-port-mapping", "--dashboard", "off")
    run(shoal, "run", "swarm.toml", "--data-dir", "node", "--rounds", "2", *alone, cwd=folder)
    return run(shoal, "verify", "node", "--manifest", "swarm.toml", cwd=folder).splitlines()[0]


def tried(name: str, out: Path, version: str, constraints: Path) -> list[str]:
    """Install in an empty environment of an interpreter and train there, by the list and by pip; return what was seen.

    Raises ConfigError at the first step that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        run(name, "-m", "venv", here / "environment", cwd=here)
        python = here / "environment" / "bin" / "python"
        pip = (python, "-m", "pip")
        install = (*pip, "install", "--quiet", "--find-links", out)
        (torch,) = re.findall(r"^torch==.*$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
        run(*install, "--constraint", constraints, torch, cwd=here)
        run(*install, "--no-deps", "--requirement", out / LIST, cwd=here, more=NO_COMPILER)
        shoal = python.with_name("shoal")
        without = trained(shoal, here / "without", version)
        run(*install, "--constraint", constraints, *out.glob("*.whl"), cwd=here)
        run(*pip, "check", cwd=here)
        run(shoal, "simulate", "--rounds", "2", cwd=here)
        with_pip = trained(shoal, here / "with", version)
    return [f"without a compiler: {without}", f"as pip resolves it: {with_pip}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exits 1 where a step fails, or where no interpreter is there to try."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="an empty folder, or none yet")
    parser.add_argument("--python", action="append", help=f"an interpreter; repeatable; else {', '.join(INTERPRETERS)}")
    asked = parser.parse_args(arguments)
    out = asked.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"{out} is not empty: remove it, or name another folder with --out")
        project = Project.of(ROOT)
        version = project.version
        (out / "notes.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))
        for path in build(ROOT, out):
            print(f"built    {path.name}, {path.stat().st_size:,} bytes", flush=True)
        if project.source is None:
            print("lacking  Source in [project.urls]: the README of these files has no links", flush=True)
        (out / LIST).write_text(pinned(version))
        found = {name: interpreter(name) for name in asked.python or INTERPRETERS}
        for name, told in found.items():
            if told is None:
                print(f"lacking  {name}: it was not tried", flush=True)
                continue
            for seen in tried(name, out, version, ROOT / "constraints.txt"):
                print(f"Python {told} {seen}", flush=True)
    except ConfigError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0 if any(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
