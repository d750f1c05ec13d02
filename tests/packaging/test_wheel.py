"""The wheel as a user gets it: built, installed with its dependencies into an empty environment, and used there.

Slow by nature (two minutes), and the only test that sees what the editable installation of the others hides.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
STEP_DEADLINE_S = 600.0
PEER_ID = re.compile(r"12D3Koo\w{45}\n")


def run(*command: str, cwd: Path, deadline_s: float = STEP_DEADLINE_S) -> str:
    """Run one command to its end; its output, which must not be an error's."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SHOAL_"))}
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=deadline_s, check=False
    )
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


def source_modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of a distribution's source tree, by the name it is imported under."""
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    modules = {}
    for package, folder in packages.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            modules[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return modules


def layer_folders() -> set[str]:
    """The folders at the top of the tree that hold Python packages of the product."""
    return {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "lab"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what earlier builds left in the tree must not get in, nor this one leave anything there."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in layer_folders():
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "source")
    return built(folder)


def built(folder: Path) -> Path:
    """The wheel of the tree `source` in a folder."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", ".", "source", cwd=folder)
    (wheel,) = folder.glob("shoal*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--constraint", str(CONSTRAINTS)]
    run(*pip, "torch==2.13.0", cwd=folder)  # first and alone: the build for the CPU
    run(*pip, str(wheel), cwd=folder)
    return python


def test_the_wheel_holds_every_module_of_the_source_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "shoal = shoal.cli.main:main" in archive.read(entry_points).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    modules = source_modules()
    expected = {f"shoal/{path.relative_to(ROOT)}" for path in modules.values()}
    assert {name for name in inside if name.endswith(".py")} == expected
    packages = {name.split(".")[1] for name in modules}
    assert packages == layer_folders()
    assert {name for name in inside if not name.endswith(".py")} >= {f"shoal/{p}/py.typed" for p in packages}
    page = {f"shoal/{path.relative_to(ROOT)}" for path in (ROOT / "node/dashboard/static").iterdir()}
    assert {name for name in inside if "/static/" in name} == page
    assert not any(name.startswith(("tests", "shoal/tests")) for name in inside)


def test_the_wheel_of_the_laboratory_holds_its_modules_and_nothing_else(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lab", tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    with zipfile.ZipFile(built(tmp_path)) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"shoal/{path.relative_to(ROOT)}" for path in source_modules(ROOT / "lab").values()}
    assert inside == expected | {"shoal/lab/py.typed"}


@pytest.mark.long
def test_the_installed_wheel_imports_whole_and_runs(python: Path, tmp_path: Path) -> None:
    imports = "\n".join(f"import {name}" for name in source_modules())
    bare = sorted(layer_folders())
    script = f"""
import importlib.util, sys
{imports}
print([name for name in {bare!r} if importlib.util.find_spec(name) is not None])
print(sys.modules["shoal.cli.main"].__file__)
"""
    found, where = run(str(python), "-I", "-W", "error::SyntaxWarning", "-c", script, cwd=tmp_path).splitlines()
    assert ast.literal_eval(found) == []
    assert Path(where).is_relative_to(python.parents[1])

    shoal = str(python.with_name("shoal"))
    told = run(shoal, "--help", cwd=tmp_path)
    for command in ("init", "run", "status", "testnet", "id"):
        assert re.search(rf"^\W*{command}\b", told, re.MULTILINE), told
    peer_id = run(shoal, "id", "--data-dir", str(tmp_path / "node"), cwd=tmp_path)
    assert PEER_ID.fullmatch(peer_id)
    assert run(shoal, "id", "--data-dir", str(tmp_path / "node"), cwd=tmp_path) == peer_id
    script = (
        'from importlib.metadata import entry_points as e; print(sorted(p.name for p in e(group="shoal.workloads")))'
    )
    assert ast.literal_eval(run(str(python), "-I", "-c", script, cwd=tmp_path)) == ["causal-lm", "regression", "text"]
