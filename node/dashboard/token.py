"""The token of a node's page: a file in the data folder that its user alone can read, and links that hold it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from shoal.node.state.store import disk_errors

TOKEN_NAME = "dashboard.token"
TOKEN_BYTES = 24
TOKEN_LEAST_CHARS, TOKEN_LIMIT_CHARS = 16, 256


def load_token(folder: Path) -> str:
    """The token of a data folder, made at its first use; readable by its user alone. Raises StorageError."""
    path = folder / TOKEN_NAME
    with disk_errors(folder):
        if path.exists():
            path.chmod(0o600)
            known = path.read_text(encoding="ascii", errors="replace").strip()
            if TOKEN_LEAST_CHARS <= len(known) <= TOKEN_LIMIT_CHARS:
                return known
        token = secrets.token_urlsafe(TOKEN_BYTES)
        partial = path.with_name(f"{TOKEN_NAME}.partial")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        return token


def link_of(url: str, token: str, *, open_to_view: bool) -> str:
    """The page with the right to give orders.

    Where anybody may look, the token stands behind `#`: the browser sends it to nobody, the page keeps it for its tab.
    Elsewhere the first request has to bring it, and it becomes a cookie.
    """
    return f"{url}#token={token}" if open_to_view else f"{url}?token={token}"
