"""Claims and their proofs: what a command says is judged, kept, and told apart from what was measured of other code."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab.bench.machine import this_machine
from shoal.lab.cli.bench import COMMANDS, load
from shoal.lab.proof import page, prove
from shoal.lab.proof.__main__ import main
from shoal.lab.proof.claims import CLAIMS, MINUTES_LIMIT, Claim
from shoal.lab.proof.prove import arguments_of, documents_in
from shoal.lab.proof.results import Result, is_older, read_results, write_result
from shoal.lab.targets import Target

ROOT = Path(__file__).resolve().parents[2]
FAST = Target(name="time", unit="s", most=2.0)


def saying(name: str, document: object, *, code: int = 0, wanted: dict[str, Target] | None = None) -> Claim:
    """A claim whose command prints this as JSON."""
    program = f"import sys; print({json.dumps(document)!r}); print('and broke', file=sys.stderr); sys.exit({code})"
    return Claim(name, shlex.join(["python", "-c", program]), ("code",), wanted=wanted or {})


def rows(*measured: float) -> list[object]:
    return [msgspec.to_builtins(FAST.row(one)) for one in measured]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit, in which the command runs."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "module.py").write_text("one\n")
    (tmp_path / "other.py").write_text("one\n")
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=shoal", "-c", "user.email=shoal@example.org")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def _commit(root: Path) -> None:
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--message", "change")


# -- what a command says -------------------------------------------------------------------------------------


def test_rows_of_a_benchmark_are_its_proof_and_a_missed_one_fails(root: Path) -> None:
    good, bad = saying("good", {"rows": rows(1.0)}), saying("bad", {"rows": rows(1.0, 3.0)})
    assert main([], claims=(good,)) == 0
    assert main([], claims=(good, bad)) == 1
    found = read_results(root)
    assert [(name, result.holds, len(result.rows)) for name, result in found.items()] == [
        ("good", True, 1),
        ("bad", False, 2),
    ]
    assert [str(row) for row in found["bad"].missed] == ["time: 3 s, wanted at most 2"]


def test_fields_of_a_document_are_judged_and_a_list_by_its_length(root: Path) -> None:
    wanted = {"forks": Target(name="forks", most=0), "violations": Target(name="violations", most=0)}
    assert prove.prove(saying("none", {"forks": 0, "violations": []}, wanted=wanted), root).holds
    result = prove.prove(saying("one", {"forks": 0, "violations": [{"kind": "fork"}]}, wanted=wanted), root)
    assert [row.name for row in result.missed] == ["violations"]


def test_a_command_without_a_document_is_judged_by_its_exit_code(root: Path) -> None:
    silent = Claim("silent", "python -c pass", ("code",))
    failing = Claim("failing", "python -c 'raise SystemExit(3)'", ("code",))
    assert prove.prove(silent, root).holds
    assert [str(row) for row in prove.prove(failing, root).missed] == ["exit code: 3, wanted at most 0"]


def test_one_that_breaks_or_takes_too_long_proves_nothing(root: Path) -> None:
    broken = prove.prove(saying("broken", {"rows": rows(1.0)}, code=2), root)
    assert (broken.holds, broken.trouble) == (False, "ended with 2: and broke")
    nothing = prove.prove(saying("nothing", {}, code=2), root)
    assert nothing.trouble == "ended with 2 and without a result: and broke"
    slow = Claim("slow", "python -c 'import time; time.sleep(600)'", ("code",), minutes=0.01)
    assert (prove.prove(slow, root).trouble, prove.prove(slow, root).rows) == ("not done within 0 minutes", ())


def test_documents_are_one_text_or_one_a_line() -> None:
    assert list(documents_in('{\n "a": 1\n}\n')) == [{"a": 1}]
    assert list(documents_in('{"a": 1}\nnot JSON\n{"b": 2}\n')) == [{"a": 1}, {"b": 2}]
    assert list(documents_in("")) == []


# -- what is kept --------------------------------------------------------------------------------------------


def test_what_is_proven_of_the_code_as_it_is_is_not_proven_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = saying("good", {"rows": rows(1.0)})
    main([], claims=(claim,))
    capsys.readouterr()
    main([], claims=(claim,))
    assert capsys.readouterr().err == ""
    (root / "other.py").write_text("two\n")
    _commit(root)
    main([], claims=(claim,))
    assert capsys.readouterr().err == ""
    assert main(["--again"], claims=(claim,)) == 0
    assert "1 of 1, good" in capsys.readouterr().err
    (root / "code" / "module.py").write_text("two\n")
    _commit(root)
    assert is_older(root, claim, read_results(root)["good"])
    main(["--list"], claims=(claim,))
    assert capsys.readouterr().out.split()[:2] == ["holds", "older"]
    main([], claims=(claim,))
    assert "1 of 1, good" in capsys.readouterr().err
    assert not is_older(root, claim, read_results(root)["good"])
    assert is_older(root, saying("good", {"rows": rows(2.0)}), read_results(root)["good"]), "another command"


def test_code_that_is_not_committed_is_not_proven(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "code" / "module.py").write_text("two\n")
    assert main([], claims=(saying("good", {"rows": rows(1.0)}),)) == 2
    assert "code/module.py is not committed" in capsys.readouterr().err
    assert read_results(root) == {}


def test_names_and_lengths_choose_what_is_done(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = saying("short", {"rows": rows(1.0)}), saying("long", {"rows": rows(1.0)})
    long = Claim(long.name, long.command, long.code, full=True)
    main([], claims=(short, long))
    assert list(read_results(root)) == ["short"]
    main(["--only", "long"], claims=(short, long))
    assert list(read_results(root)) == ["short", "long"]
    assert main(["--only", "shirt"], claims=(short, long)) == 2
    assert "there is no claim 'shirt'; did you mean 'short'?" in capsys.readouterr().err


def test_the_page_tells_what_is_missed_and_why_and_what_is_older(root: Path) -> None:
    bad = Claim("bad", "shoal bench lane", ("code",), why="it is slow")
    new = Claim("new", "shoal bench join", ("code",))
    kept = Result(
        claim="bad", command=bad.command, commit="HEAD", machine=this_machine(), seconds=9.0, rows=(FAST.row(3.0),)
    )
    write_result(root, kept, (bad, new))
    text = page.render(root, (bad, new))
    assert "| bad | time: 3 s, wanted at most 2 | it is slow |" in text
    assert "### New\n\n`shoal bench join`\n\nNot proven yet.\n" in text
    assert "**older**" not in text
    (root / "code" / "module.py").write_text("two\n")
    _commit(root)
    kept = msgspec.structs.replace(kept, commit="HEAD~1", rows=(FAST.row(1.0),))
    write_result(root, kept, (bad, new))
    text = page.render(root, (bad, new))
    assert "**older**" in text
    assert "## What is missed\n\nNothing.\n" in text


# -- the table -----------------------------------------------------------------------------------------------


def test_every_claim_has_a_name_of_its_own_a_command_that_there_is_and_code_that_there_is() -> None:
    assert len({claim.name for claim in CLAIMS}) == len({claim.command for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        program, *rest = claim.arguments
        assert (program, rest[0]) == ("python", "-m") or (program, rest[0]) in {
            ("shoal", "bench"),
            ("shoal", "campaign"),
            ("shoal", "chaos"),
            ("shoal", "soak"),
            ("shoal", "explore"),
            ("shoal", "simulate"),
        }
        assert claim.full or claim.minutes <= MINUTES_LIMIT
        for path in claim.code:
            assert (ROOT / path).exists(), f"{claim.name}: {path}"
    measured = {claim.arguments[2] for claim in CLAIMS if claim.arguments[1] == "bench"}
    # Others are needed beside gloo and hivemind, or only read what was measured.
    assert set(COMMANDS) - measured == {"compare", "train-table", "sapo-table"}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_command_of_a_claim_is_understood(claim: Claim) -> None:
    program, *rest = claim.arguments
    if program != "shoal":
        return
    *place, options = arguments_of(claim)[1:]
    assert options == "--json"
    assert execute([*arguments_of(claim)[1:], "--help"]) == 0, "no option is unknown"
    assert load(rest[1]) if rest[0] == "bench" else place


def test_the_results_of_the_repository_can_be_read() -> None:
    found = read_results(ROOT)
    assert set(found) <= {claim.name for claim in CLAIMS}
    assert all(result.rows or result.trouble for result in found.values())
