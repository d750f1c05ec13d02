"""`shoal limit`: other caps on the bandwidth of a node, while it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.status import ORDER_DEADLINE_S
from shoal.cli.text import quantity
from shoal.node.control_client import request
from shoal.node.option import Option, parse_rate
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError

NO_CAP = "none"
"""Word for no cap."""


def limit(
    max_upload: Annotated[
        str | None, Option("--max-upload", help="Such as 5MiB/s, or 80Mbit.", metavar="RATE|none")
    ] = None,
    max_download: Annotated[
        str | None, Option("--max-download", help="Such as 5MiB/s, or 80Mbit.", metavar="RATE|none")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Cap the bandwidth of the node that runs here, from now on; without options, show its caps.

    They count for what rounds and states move, until the node ends: `shoal run` has the same options, for its start.
    The others plan the next rounds with them.
    """
    caps = (_cap(max_upload, "--max-upload"), _cap(max_download, "--max-download"))
    now = request(data_dir, "limit", *caps, deadline_s=ORDER_DEADLINE_S)
    up, down = (_in_words(now[direction]) for direction in ("upload", "download"))
    typer.echo(f"the node on {data_dir} uploads {up}, and downloads {down}")


def _cap(text: str | None, option: str) -> str:
    """The word that the node takes: empty for what stays."""
    if text is None or text == NO_CAP:
        return text or ""
    try:
        return str(parse_rate(text, option))
    except ConfigError as error:
        raise ConfigError(f"{error}; write {NO_CAP} for no cap") from None


def _in_words(bytes_per_s: object) -> str:
    return f"{quantity(bytes_per_s, 'B/s')} at most" if isinstance(bytes_per_s, int) else "without a cap"
