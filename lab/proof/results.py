"""Results of claims as the repository keeps them: `docs/data/results.json`, one for each claim, the newest."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from shoal.lab.bench.machine import Machine
from shoal.lab.proof.claims import Claim
from shoal.lab.targets import Row, missed
from shoal.node.state.store import disk_errors
from shoal.protocol.errors import ConfigError
from shoal.testnet.run_folder import write_reports

PLACE: Final = Path("docs/data/results.json")
SHORT_COMMIT: Final = 8


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a claim's command.

    commit: of the code that ran. load: of the machine in the minute before. trouble: why there are no rows, or fewer
    than there should be.
    """

    claim: str
    command: str
    commit: str
    machine: Machine
    seconds: float
    rows: tuple[Row, ...] = ()
    trouble: str = ""

    @property
    def missed(self) -> list[Row]:
        """The rows below their targets."""
        return missed(self.rows)

    @property
    def holds(self) -> bool:
        """True if the command came to its end, and to every target."""
        return not self.trouble and not self.missed


def read_results(root: Path) -> dict[str, Result]:
    """Every result by its claim's name; none where there is no file. Raises ConfigError, StorageError."""
    path = root / PLACE
    if not path.exists():
        return {}
    with disk_errors(path):
        content = path.read_bytes()
    try:
        return {result.claim: result for result in msgspec.json.decode(content, type=list[Result])}
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} holds no results: {error}; take the one of an earlier commit") from None


def write_result(root: Path, result: Result, order: Sequence[Claim]) -> None:
    """Put a result in the place of the one before, and all in the order of their claims. Raises StorageError."""
    known = read_results(root) | {result.claim: result}
    kept = [known[claim.name] for claim in order if claim.name in known]
    text = msgspec.json.format(msgspec.json.encode(kept), indent=1).decode() + "\n"
    (root / PLACE).parent.mkdir(parents=True, exist_ok=True)
    write_reports((root / PLACE).parent, {PLACE.name: text})


def commit_of(root: Path) -> str:
    """The commit that the tree is at. Raises ConfigError outside a repository."""
    done = _git(root, "rev-parse", "HEAD")
    if done.returncode:
        raise ConfigError(f"{root} is no checkout of the repository, and results name a commit; run it in one")
    return done.stdout.strip()[:SHORT_COMMIT]


def changed(root: Path, claim: Claim) -> list[str]:
    """Files that a claim is about and that are not as the last commit has them."""
    return _git(root, "status", "--porcelain", "--", *claim.code).stdout.splitlines()


def is_older(root: Path, claim: Claim, result: Result) -> bool:
    """True if code that the claim is about was changed since, or its command was."""
    return result.command != claim.command or bool(
        _git(root, "diff", "--quiet", result.commit, "HEAD", "--", *claim.code).returncode
    )


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
