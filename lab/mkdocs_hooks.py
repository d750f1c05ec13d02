"""Pages that are made when the site is built, since the source says it all (`hooks` in mkdocs.yml)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shoal.lab import (
    bounds_page,
    commands_page,
    errors_page,
    events_page,
    manifest_page,
    messages_page,
    modules_page,
    sizes_page,
)
from shoal.lab.proof import page as proof_page

PAGES: Final[dict[str, Callable[[Path], str]]] = {
    "bounds.md": lambda _root: bounds_page.render(bounds_page.collect()),
    "commands.md": lambda _root: commands_page.render(),
    "errors.md": lambda _root: errors_page.render(errors_page.collect()),
    "events.md": lambda _root: events_page.render(),
    "manifest.md": lambda _root: manifest_page.render(),
    "messages.md": lambda root: messages_page.render(messages_page.entries(root / messages_page.LIST)),
    "proof.md": proof_page.render,
    "modules.md": lambda _root: modules_page.render(modules_page.collect()),
    "sizes.md": lambda _root: sizes_page.render(),
}
"""Maker of each page, given the root of the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add these pages."""
    root = Path(config.config_file_path).parent
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make(root)))
    return files
