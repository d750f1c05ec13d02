"""Pages that are made when the site is built, since the source says it all (`hooks` in mkdocs.yml)."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shoal.lab import errors_page, events_page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of errors and of events."""
    files.append(File.generated(config, "errors.md", content=errors_page.render(errors_page.collect())))
    files.append(File.generated(config, "events.md", content=events_page.render()))
    return files
