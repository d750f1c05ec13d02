"""What the documents promise a reader: links that lead somewhere, and code that runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.training.trainer_messages import Assignment
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import SwarmId

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("protocol", "swarm", "collectives", "node", "cli", "testnet", "lab")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page of docs/."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def module_of(code: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(code, name, "exec"), module.__dict__)
    return module


def test_links_of_the_first_page_lead_to_files() -> None:
    links = [link for link in LINK.findall((ROOT / "README.md").read_text()) if "://" not in link]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_documents_build_with_every_link_checked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")} | {"commands", "manifest", "errors"}
    assert "is not the address of a node" in (tmp_path / "site" / "errors.html").read_text()


def test_workload_of_the_documents_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("workloads.md") if "class Sine" in block)
    workload = module_of(code, "sine", monkeypatch).Sine()
    torch.manual_seed(1)
    model = workload.build()
    with torch.no_grad():
        before = workload.evaluate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = workload.batches(Assignment(seed=1, round=1, member=0, members=1))
    for _, batch in zip(range(200), batches, strict=False):
        loss, samples = workload.loss(model, batch)
        assert samples == 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert workload.evaluate(model) < before / 5


def test_task_of_the_documents_is_made_again_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("tasks.md") if "class Reversal" in block)
    family = module_of(code, "my_tasks", monkeypatch).Reversal.from_name("reversal")
    source = TaskSource([TaskChoice(family=family, config={"letters": 6}, weight=2)])
    origin = Identity.from_seed(bytes(32)).peer_id
    task = source.draw(SwarmId(bytes(32)), origin, 3, 0)
    assert source.task(task.ref) == task
    word = task.question.removeprefix("Write backwards: ")
    assert len(word) == 6
    assert [family.score(task, text) for text in (word[::-1], word + "x")] == [1.0, 0.0]
    with pytest.raises(ConfigError):
        family.check({"letters": 65})
    assert msgspec.toml.decode(blocks("tasks.md", "toml")[1])["rollouts"]["tasks"][0]["family"] == "reversal"


def test_page_of_the_code_names_every_module() -> None:
    """By its name, by `_rest` after a module that it shares its beginning with, or by `beginning_*`."""
    told: dict[str, list[str]] = {}
    words: list[str] = []
    for line in (ROOT / "docs" / "code.md").read_text().splitlines():
        if folder := re.match(r"    (\w[\w/]*)/\s", line):
            words = told.setdefault(folder[1], [])
            line = line[folder.end() :]
        words += re.findall(r"\w+\*?", line)
    packages = [path.parent for layer in LAYERS for path in (ROOT / layer).rglob("__init__.py")]
    assert {str(package.relative_to(ROOT)) for package in packages} <= told.keys()
    for package in packages:
        words = told[str(package.relative_to(ROOT))]
        starts = tuple(word[:-1] for word in words if word.endswith("_*"))
        ends = tuple(word for word in words if word.startswith("_"))
        modules = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
        left = [
            name for name in modules if name not in words and not name.startswith(starts) and not name.endswith(ends)
        ]
        assert left == [] or "per benchmark" in " ".join(words), package


UNITS = {"": 1, "B": 1, "s": 1, "/s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1e-3}
CONSTANTS = re.compile(r"^\| ((?:`[A-Z][A-Z0-9_]*`(?:, )?)+) \| (.*?) \| .*? \| `([a-z_/]+)\.py` \|$", re.MULTILINE)
VALUE = re.compile(r"([\d,.]+(?:e-\d+)?)(?:\^(\d+))?( − 1)?(?: ?([A-Za-zµ/]+))?")


def number(text: str) -> float:
    """What a cell says, in bytes or seconds: `30 s`, `128 KiB/s`, `2^63 − 1`."""
    found = VALUE.fullmatch(text)
    assert found is not None, text
    base, exponent, less, unit = found.groups(default="")
    value = float(base.replace(",", "")) ** int(exponent or 1) - bool(less)
    return value * UNITS[unit if unit in UNITS else unit.removesuffix("/s")]


def test_constants_of_the_protocol_are_those_of_the_code() -> None:
    rows = CONSTANTS.findall((ROOT / "docs/protocol.md").read_text(encoding="utf-8"))
    assert len(rows) > 150
    wrong = []
    for names, values, path in rows:
        module = importlib.import_module("shoal." + path.replace("/", "."))
        for name, value in zip(re.findall("`(.*?)`", names), values.split(", "), strict=True):
            real = getattr(module, name, None)
            if real is None or real != pytest.approx(number(value), rel=1e-9):
                wrong.append(f"{path}.py: {name} is {real}, not {value}")
    assert not wrong
