"""`shoal uninstall`: what lies where, and its removal."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from shoal.cli.text import escaped, quantity
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError


def uninstall(
    remove: Annotated[bool, Option("--remove", help="Remove it: all but the keys.")] = False,
    keys: Annotated[bool, Option("--keys", help="With --remove: the keys too. They cannot be made again.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show what Shoal left on this machine, and how to take it away; with --remove, remove it.

    What Shoal did not write stays. Let a node that runs here leave first: `shoal leave`. A founder's authority key
    alone can rebase its swarm, shut nodes out and invite some; take care of it before it is removed.
    """
    from shoal.node.remains import find_remains, others_in, removal_of_program, remove_remains, set_up_beside

    if keys and not remove:
        raise ConfigError("--keys is of use with --remove only: `shoal uninstall --remove --keys`")
    if remove:
        removed = remove_remains(data_dir, keys=keys)
        typer.echo(f"removed {quantity(sum(one.size for one in removed), 'B')}")
    found = find_remains(data_dir)
    for one in found:
        typer.echo(f"{'stays' if remove else 'here'}: {escaped(str(one.path))}, {quantity(one.size, 'B')}: {one.use}")
    for path in others_in(data_dir):
        typer.echo(f"not Shoal's, and stays: {escaped(str(path))}")
    if found and not remove:
        where = f" --data-dir {escaped(shlex.quote(str(data_dir)))}" if data_dir != DEFAULT_DATA_DIR else ""
        typer.echo(f"remove it: `shoal uninstall --remove{where}`, with --keys the keys too")
    if not found and not remove:
        typer.echo(f"nothing of Shoal's lies in {escaped(str(data_dir))}")
    alone = f"looked at {escaped(str(data_dir))} alone"
    typer.echo(f"{alone}; of a node that ran elsewhere: `shoal uninstall --data-dir FOLDER`")
    for path, removal in set_up_beside():
        typer.echo(f"set up beside it, and stays: {escaped(str(path))}; remove it: `{removal}`")
    typer.echo(f"the program goes with {removal_of_program()}")
