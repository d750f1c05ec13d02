"""The passphrase of the keys: from a file that the user names, or asked for at the terminal."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated

from shoal.node.option import Option
from shoal.protocol import key_file

KeyPassphraseFile = Annotated[
    Path | None,
    Option("--key-passphrase-file", help="A file with the passphrase of this node's keys.", metavar="FILE"),
]


def use_passphrase(file: Path | None) -> None:
    """Read and make keys with the passphrase in `file` from here on; without one, ask a user at a terminal.

    It is named in the environment, so that processes of this node that read the key find it, too.
    """
    if file is not None:
        os.environ[key_file.PASSPHRASE_VARIABLE] = str(file.absolute())
    key_file.ask = getpass.getpass if sys.stdin is not None and sys.stdin.isatty() else None
