"""Pages that are made when the site is built, since the source says it all (`hooks` in mkdocs.yml)."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shoal.lab import commands_page, errors_page, manifest_page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of commands, of the manifest and of errors."""
    files.append(File.generated(config, "commands.md", content=commands_page.render()))
    files.append(File.generated(config, "manifest.md", content=manifest_page.render()))
    files.append(File.generated(config, "errors.md", content=errors_page.render(errors_page.collect())))
    return files
