"""What the documents promise a reader: links that lead somewhere, and code that runs."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from typer.main import get_command

from shoal.cli.commands import app_of
from shoal.lab import bounds_page
from shoal.lab.source import texts
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import SwarmId

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protocol", "swarm", "collectives", "node", "cli", "testnet", "lab", "tests")
OF_A_USER = {
    "sine.py",
    "my_tasks.py",
    "plain.py",
    "hf.py",
    "kept.py",
    "lora.py",
    "prepared.py",
    "sft.py",
    "grpo.py",
    "quantized.py",
    "lightning_node.py",
    "logged.py",
}
"""Files that the documents have their reader write."""
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
    made = {"bounds", "commands", "errors", "events", "manifest", "messages", "modules", "proof", "sizes"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")} | made
    assert "is not the address of a node" in (tmp_path / "site" / "errors.html").read_text()


@pytest.mark.parametrize("page", ["own-loop.md", "recipes.md"])
def test_scripts_of_the_documents_end_by_themselves(page: str) -> None:
    loops = [node for code in blocks(page) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.While)]
    assert [ast.unparse(loop.test) for loop in loops] == []


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


def test_finite_dataset_of_the_documents_is_read_whole_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block for block in blocks("workloads.md") if "batches_of" in block]
    drawn = module_of(code, "finite", monkeypatch).batches_of

    def read(round: int, member: int) -> list[int]:
        share = drawn(torch.arange(100), Assignment(seed=1, round=round, member=member, members=2))
        return [int(row) for batch in islice(share, 7) for row in batch]  # 50 rows in batches of 8

    assert (sorted(read(1, 0)), sorted(read(1, 1))) == ([*range(0, 100, 2)], [*range(1, 100, 2)])
    assert read(1, 0) != read(2, 0)
    assert read(1, 0) == read(1, 0)


def test_exported_text_model_of_the_documents_says_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [block for block in blocks("workloads.md") if "TextWorkload" in block]
    torch.manual_seed(1)
    trained = TextWorkload(width=64, layers=2, context=64).build()
    with torch.no_grad():
        trained.get_parameter("head.weight").normal_()
        expected = trained(torch.tensor([list(b"The ")]))[0, -1].softmax(-1)
    (tmp_path / "model").mkdir()
    save_file(dict(trained.state_dict()), tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    ran = module_of(code, "load_text", monkeypatch)
    assert torch.equal(ran.next_byte, expected)
    assert capsys.readouterr().out == f"{ran.said}\n"
    assert len(ran.said.encode(errors="replace")) >= 60, "what the context has room for"


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


CODE = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
OUTSIDE = {"PR_SET_DUMPABLE", "TCP_INFO", "SHOAL_DATA_DIR", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
"""Names of other programs, and of the environment."""


def pages() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}


def test_modules_that_the_documents_name_are_there() -> None:
    files = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {path.rpartition("/")[2] for path in files}
    wrong = [
        (page, code)
        for page, text in pages().items()
        for code in CODE.findall(text)
        if re.fullmatch(r"[\w/]+\.py", code) and code not in (files if "/" in code else names | OF_A_USER)
    ]
    assert wrong == []


def test_constants_that_the_documents_name_are_there_with_their_values() -> None:
    bounds: dict[str, set[str]] = {}
    for bound in bounds_page.collect():
        bounds.setdefault(bound.name, set()).add(bounds_page.told(bound.name, bound.value))
    made = "\n".join(texts().values())
    for page, text in pages().items():
        for name in filter(NAME.fullmatch, CODE.findall(text)):
            assert name in OUTSIDE or re.search(rf"^{name}\b.*=|^ +{name} = ", made, re.MULTILINE), (page, name)
        for name, value in re.findall(rf"`({NAME.pattern})` = ([\d.,]+(?: [A-Za-z]+)?)", text):
            assert name not in bounds or value in bounds[name], (page, name, value)


def commands(text: str) -> list[list[str]]:
    """The words of every `shoal` command on a page, in its lines and within its sentences."""
    found = re.findall(r"`(shoal [a-z][^`]*)`", " ".join(text.split("\n"))) + re.findall(
        r"^    (shoal .*)$", text, re.MULTILINE
    )
    return [shlex.split(line.replace("\\|", "|"), comments=True) for line in found]


def test_commands_that_the_documents_name_are_there_with_their_options() -> None:
    read = pages() | {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
    for page, words in ((page, words) for page, text in read.items() for words in commands(text)):
        command, rest = get_command(app_of()), words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]  # type: ignore[attr-defined]
        assert len(rest) < len(words) - 1, (page, words)
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.strip("[]").split("=")[0] for word in rest if word.strip("[").startswith("--")}
        assert options <= known | {"--help"}, (page, words)
