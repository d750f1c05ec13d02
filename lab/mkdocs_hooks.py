"""Pages that are made when the site is built, since the source says it all (`hooks` in mkdocs.yml)."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shoal.lab.errors_page import collect, render


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of errors."""
    files.append(File.generated(config, "errors.md", content=render(collect())))
    return files
