"""The page of commands: all that users type, read off the commands themselves when the site is built.

python -m shoal.lab.commands_page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from typer.main import get_command

from shoal.cli.commands import app_of
from shoal.lab.errors_page import escaped

_HEAD: Final = """\
# Commands

What `--help` says after each command, made when this site was built. `shoal --install-completion` sets up the shell.

Every option is also an environment variable, whatever command it belongs to: `--data-dir` is `SHOAL_DATA_DIR`. Results
go to stdout, logs to stderr. Exit codes: **0** done, **1** the job failed, **2** wrong usage or configuration (one line
on stderr says what to do), **130** interrupted after a clean leave.

`simulate`, `campaign`, `chaos`, `soak`, `explore` and `bench` come with the laboratory, a distribution of its own in
`lab/`: `make` installs it beside Shoal, `pip install ./lab` elsewhere. No node needs it.

Every `shoal bench` takes `--check`: where a number misses its target the exit code is 1, and each target that is missed
gets a line on stderr. `--check` after `train-table` and `sapo-table` checks what the results come to together, `sapo`
the runs of one command beside each other.
"""


def render() -> str:
    """The whole page."""
    lines = [_HEAD.rstrip("\n")]
    panel = ""
    for path, command, group in _commands():
        if group != panel:
            panel = group
            lines += ["", f"## {panel}"]
        lines += ["", f"### {path}", "", _prose(command.help), *_table(command.params)]
    return "\n".join(lines) + "\n"


def _commands() -> Iterator[tuple[str, Any, str]]:
    """Commands with their names and the panel of `shoal --help` in which each stands, panel by panel."""
    found = list(_below("shoal", get_command(app_of()), ""))
    panels = list(dict.fromkeys(panel for _, _, panel in found))
    return iter(sorted(found, key=lambda one: panels.index(one[2])))


def _below(path: str, command: Any, panel: str) -> Iterator[tuple[str, Any, str]]:
    for name, one in command.commands.items():
        of = panel or one.rich_help_panel
        if getattr(one, "commands", {}):
            yield from _below(f"{path} {name}", one, of)
        else:
            yield f"{path} {name}", one, of


def _table(params: list[Any]) -> list[str]:
    """Table of a command's parameters, a row each; arguments first."""
    shown = [one for one in params if not getattr(one, "hidden", False)]
    if not shown:
        return []
    shown.sort(key=lambda one: one.param_type_name != "argument")
    rows = [f"| {_names(one)} | {_default(one)} | {_cell(_prose(one.help))} |" for one in shown]
    return ["", "| | without it | |", "| --- | --- | --- |", *rows]


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{_cell(param.metavar or param.name.upper())}`"
    names = [*param.opts, *param.secondary_opts]
    value = "" if param.is_flag else f" {_value(param)}"
    repeated = "…" if param.multiple else ""
    return ", ".join(f"`{_cell(name + value)}`{repeated}" for name in names)


def _value(param: Any) -> str:
    """Placeholder for the value: the declared one, else its choices, or its kind."""
    kind = param.type_descriptor.annotation
    if param.metavar:
        return str(param.metavar)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _default(param: Any) -> str:
    if param.required:
        return "is needed"
    if param.default is None or param.default is False or param.default == []:
        return ""
    if param.default is True:
        return f"`{param.opts[0]}`"
    default = " ".join(param.default) if isinstance(param.default, list) else str(param.default)
    return f"`{_cell(default.replace(str(Path.home()), '~'))}`"


def _prose(text: str | None) -> str:
    """A text of `--help` as Markdown."""
    return "\n\n".join(escaped(part) for part in (text or "").replace("\\[", "[").split("\n\n"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
