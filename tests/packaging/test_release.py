"""What a release checks before it builds, what it lists, and, long, the whole of it by one command."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from shoal.lab import release
from shoal.protocol.errors import ConfigError

VERSION = release.Project.of(release.ROOT).version
SOURCE = "https://host.example/owner/shoal"


def test_laboratory_is_released_with_the_version_that_is_written_once() -> None:
    project = release.Project("1.2.0")
    text = (release.ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8")
    before, after = (tomllib.loads(one)["project"] for one in (text, project.lab(text)))
    assert (after["version"], after["dependencies"]) == ("1.2.0", ["shoal==1.2.0"])
    assert after | {"version": before["version"], "dependencies": ["shoal"]} == before
    with pytest.raises(ConfigError, match=r"lab/pyproject\.toml has not one"):
        project.lab(project.lab(text))


def test_project_says_where_its_source_lies_if_it_knows(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    assert release.Project.of(tmp_path) == release.Project("1.2.0")
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write(f'[project.urls]\nSource = "{SOURCE}"\n')
    assert release.Project.of(tmp_path) == release.Project("1.2.0", SOURCE)


def test_no_link_of_the_first_page_is_dead_on_an_index() -> None:
    text = (release.ROOT / "README.md").read_text(encoding="utf-8")
    before = [target for _, _, target in release.LINK.findall(text) if "://" not in target]
    full = release.Project("1.2.0", SOURCE).readme(text)
    links = [(picture, target) for picture, _, target in release.LINK.findall(full)]
    assert all("://" in target for _, target in links)
    led = [target.partition("/v1.2.0/")[2] for _, target in links if target.startswith(SOURCE)]
    assert led == before
    assert all((release.ROOT / path.partition("#")[0]).exists() for path in led)
    for picture, target in links:
        if target.startswith(SOURCE):
            assert target.startswith(f"{SOURCE}/{'raw' if picture else 'blob'}/v1.2.0/")
    bare = release.Project("1.2.0").readme(text)
    assert all("://" in target for _, _, target in release.LINK.findall(bare))
    assert "docs/limits.md" in bare
    assert "page-swarm.png" not in bare
    assert re.sub(r"\W", "", bare) == re.sub(r"\W", "", release.LINK.sub(lambda one: plain(*one.groups()), text))


def plain(picture: str, name: str, target: str) -> str:
    """What is left of a link where it leads nowhere."""
    return f"[{name}]({target})" if "://" in target else "" if picture else name


def test_version_of_the_tree_has_its_section_of_changes() -> None:
    said = release.notes((release.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), VERSION)
    assert said.count("\n* **") >= 3
    assert "## " not in said
    text = "# Changes\n\n## 1.2.0\n\nOne.\n\n## 1.1.0\n\n## 1.0.0, not yet\n\nThree.\n"
    assert release.notes(text, "1.2.0") == "One.\n"
    for missing in ("1.1.0", "1.0.0", "1.2", "1.3.0"):
        with pytest.raises(ConfigError, match=re.escape(f"`## {missing}`")):
            release.notes(text, missing)


def test_list_has_all_that_the_node_needs_in_versions_that_have_wheels() -> None:
    lines = [line for line in release.pinned(VERSION).splitlines() if not line.startswith("#")]
    versions = dict(line.split("==") for line in lines)
    assert versions["shoal"] == VERSION
    assert versions["fastecdsa"] == release.WITH_WHEELS["fastecdsa"] != importlib.metadata.version("fastecdsa")
    assert versions["trio"] == importlib.metadata.version("trio")
    assert versions["wsproto"] == importlib.metadata.version("wsproto")  # of Hypercorn, two steps down
    assert not versions.keys() & {"torch", "sympy", "pytest", "transformers"}
    constrained = dict(
        line.lower().replace("_", "-").split("==")
        for line in (release.ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    assert {name: one for name, one in versions.items() if constrained.get(name) != one} == {
        "shoal": VERSION,
        "fastecdsa": release.WITH_WHEELS["fastecdsa"],
    }


def test_release_into_a_folder_that_holds_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.whl").touch()
    assert release.main(["--out", str(tmp_path)]) == 1
    assert f"release: {tmp_path} is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old.whl"]


def test_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ended with 3; see why: no compiler"):
        release.run(sys.executable, "-c", "import sys; print('no compiler'); sys.exit(3)", cwd=tmp_path)
    assert release.interpreter("python-of-nobody") is None
    assert release.interpreter(sys.executable) == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.long
def test_release_is_built_checked_installed_and_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dist"
    code = release.main(["--out", str(out), "--python", sys.executable])
    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    here = release.interpreter(sys.executable)
    for way in ("without a compiler", "as pip resolves it"):
        assert re.search(rf"^Python {here} {way}: swarm [0-9a-f]{{16}}…, term 0\.0, round 2$", told.out, re.MULTILINE)
    names = {path.name for path in out.iterdir()}
    assert names == {
        *(f"{name}-{VERSION}{end}" for name in ("shoal", "shoal_lab") for end in (".tar.gz", "-py3-none-any.whl")),
        "notes.md",
        release.LIST,
    }
    for wheel in out.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            assert any(name.endswith("/LICENSE") for name in archive.namelist())
            head = HeaderParser().parsestr(archive.read(metadata).decode())
        assert head["Version"] == VERSION
        assert ("lab" in wheel.name) == (f"shoal=={VERSION}" in head.get_all("Requires-Dist", ()))
        assert all("://" in target for _, _, target in release.LINK.findall(head.get_payload()))
        assert head["License-Expression"] == "Apache-2.0"
    with tarfile.open(out / f"shoal_lab-{VERSION}.tar.gz") as archive:
        assert f"shoal_lab-{VERSION}/LICENSE" in archive.getnames()
