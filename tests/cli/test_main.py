"""How command lines end: exit codes, and one line on stderr."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from shoal.cli import main, run
from shoal.cli.commands import app_of
from shoal.cli.main import execute
from shoal.lab.cli.commands import _COMMANDS
from shoal.protocol.errors import ConfigError, DiskFull, LocalError, NetworkError, RemoteError, StorageError
from shoal.protocol.identity import parse_peer_id


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "swarm.toml"
    assert execute(["init", "--data-dir", str(tmp_path / "node"), "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["xyzzy"], "shoal: No such command 'xyzzy'; see `shoal --help`"),
        (["run"], "shoal: Missing argument 'MANIFEST'; see `shoal run --help`"),
        (["status", "--jsno"], "shoal: No such option: --jsno (Possible options: --json); see `shoal status --help`"),
        (
            ["run", "none.toml"],
            "shoal: there is no none.toml; check the path, or give the link of a swarm, shoal:…; `shoal init` founds "
            "one of your own",
        ),
        (["run", ""], "shoal: . is a folder; give the file that `shoal init` wrote, like swarm.toml"),
        (["doctor", "--data", "none"], "shoal: --data: there is no none; check the path"),
        (
            ["run", "none.toml", "--join", "192.0.2.1:4000"],
            "shoal: '192.0.2.1:4000' is not the address of a node; it looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
        ),
        (
            ["testnet", "--scenario", "none.toml"],
            "shoal: there is no scenario none.toml; check the path, or leave --scenario out for the demo",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert execute(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == line + "\n"


@pytest.mark.parametrize("name", sorted({*_COMMANDS, "bench"}))
def test_command_of_the_laboratory_that_is_not_installed_says_where_it_is(name: str) -> None:
    hidden = (
        "import importlib.metadata as m, sys; m.entry_points = lambda **_: (); from shoal.cli.main import execute; "
    )
    command = [sys.executable, "-c", hidden + "sys.exit(execute(sys.argv[1:]))", name, "allreduce"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert {*_COMMANDS, "bench"} == main.OF_THE_LABORATORY
    assert ended.stderr == f"shoal: `shoal {name}` comes with the laboratory: pip install shoal-lab, in a clone ./lab\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["status", "extra"], "extra"),
        (["run", "none.toml", "--threads", "many"], "'--threads'"),
        (["run", "none.toml", "--join"], "--join' requires an argument; see `shoal run --help`"),
        (["run", "none.toml", "--log-format", "xml"], "'--log-format'"),
        (["init", "--admission", "nobody"], "for '--admission': 'nobody' is not one of"),
    ],
)
def test_usage_errors_in_the_parsers_words_are_one_line_too(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert execute(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err
    assert err.endswith(" --help`\n")


def test_unknown_manifest_key_is_one_line(capsys: pytest.CaptureFixture[str], manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace("inner_steps", "inner_step"))
    capsys.readouterr()
    assert execute(["run", str(manifest)]) == 2
    assert capsys.readouterr().err == (
        f"shoal: {manifest}: [sync] unknown key 'inner_step'; did you mean 'inner_steps'?\n"
    )


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([]) == 0
    out, err = capsys.readouterr()
    assert "testnet" in out
    assert "SHOAL_SOME_OPTION" in out
    assert err == ""


@pytest.mark.parametrize("columns", [80, main.PANELS_COLUMNS])
def test_help_cuts_no_name_of_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    seen = 0
    for path, command in _commands(get_command(app_of()), ()):
        assert execute([*path, "--help"]) == 0
        text = capsys.readouterr().out
        shown = [taken for taken in command.params if not getattr(taken, "hidden", False)]
        names = {name for taken in shown for name in (*taken.opts, *taken.secondary_opts) if name.startswith("--")}
        assert "\\[" not in text, path
        assert names <= set(re.findall(r"--[a-z0-9-]+", text)), path
        if path == ("run",):
            assert ("╭" in text) == (columns >= main.PANELS_COLUMNS)
        seen += len(names)
    assert seen > 100


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that holds no others, with its words."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from _commands(one, (*path, name))


CONFIG = ConfigError("bad port; use another")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CONFIG, 2, "shoal: bad port; use another\n"),
        (StorageError("not yours; give it"), 2, "shoal: not yours; give it\n"),
        (DiskFull("disk full; free some"), 1, "shoal: disk full; free some\n"),
        (NetworkError("link\nbroke"), 1, "shoal: link broke\n"),
        (RemoteError("\x1b[2Jevil"), 1, "shoal: \\x1b[2Jevil\n"),
        (ExceptionGroup("nursery", [ExceptionGroup("inner", [CONFIG])]), 2, "shoal: bad port; use another\n"),
        (BaseExceptionGroup("nursery", [KeyboardInterrupt(), CONFIG]), 2, "shoal: bad port; use another\n"),
        (BaseExceptionGroup("nursery", [KeyboardInterrupt()]), 130, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    manifest: Path,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run, "run_to_end", fail)
    capsys.readouterr()
    assert execute(["run", str(manifest)]) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("the bug"),
        LocalError("the bug"),
        ExceptionGroup("nursery", [CONFIG, ZeroDivisionError("the bug")]),
    ],
)
def test_bug_prints_its_traceback_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, manifest: Path, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run, "run_to_end", fail)
    assert execute(["run", str(manifest)]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("shoal: this is a bug in Shoal: ")
    assert err.splitlines()[-1].endswith("Error: the bug")


@pytest.mark.parametrize("command", ["verify", "evaluate", "report", "export --out OUT", "card --data-dir", "init -o"])
def test_path_that_cannot_be_looked_at_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert execute([*command.split(), "n" * 300]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"shoal: cannot use n{300}\S*: File name too long; check the path, its mode and the disk\n", err
    )


def test_output_that_finds_no_room_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "shoal.cli.main", "uninstall", "--data-dir", "none"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "shoal: cannot write the output: No space left on device; free some space\n"


def test_process_starts_without_heavy_imports(tmp_path: Path) -> None:
    heavy = ("trio", "torch", "numpy", "libp2p", "matplotlib", "rich", "shoal.cli.run", "shoal.lab")
    code = (
        "import sys; from shoal.cli.main import execute; "
        f"code = execute(['id', '--data-dir', {str(tmp_path)!r}]); "
        f"sys.exit(code or ' '.join(m for m in {heavy} if m in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert parse_peer_id(done.stdout.strip())


def test_module_is_a_program_with_the_same_exit_codes() -> None:
    command = [sys.executable, "-m", "shoal.cli.main", "status", "--data-dir", "/nonexistent/shoal"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "shoal: no node is running on /nonexistent/shoal; "
        "start one with `shoal run MANIFEST --data-dir /nonexistent/shoal`\n"
    )


def test_an_interrupt_while_the_commands_are_imported_ends_quietly() -> None:
    code = (
        "import builtins, sys; from shoal.cli.main import execute; real = builtins.__import__\n"
        "def struck(name, *rest):\n"
        "    if name == 'shoal.cli.commands': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = struck; sys.exit(execute(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_bench_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench"]) == 0
    shown = capsys.readouterr()
    assert "allreduce" in shown.out
    assert shown.err == ""


def test_main_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "dance"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
