"""Bugs that were planted once, and the test that sees each: a baseline, so that what is caught today stays caught.

Each is a few words of the product replaced by others, in exactly one place of a file. `python -m tests.planted_bugs`
plants one after the other in a copy of the tree and runs the test that is named, which must fail there; parts of names
after it choose some. Where the product has moved on, a bug that cannot be planted any more says so: plant it anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "collectives", "swarm", "node", "cli", "testnet")
DEADLINE_S = 300.0
BOX = "tests/node/test_swarm_in_a_box.py"


@dataclass(frozen=True, slots=True)
class Edit:
    """In one file, one piece of text that occurs once, and what stands there instead."""

    file: str
    was: str
    planted: str


@dataclass(frozen=True, slots=True)
class Bug:
    """name: in a few words. test: where it is seen."""

    name: str
    test: str
    edits: tuple[Edit, ...]


def bug(name: str, test: str, file: str, was: str, planted: str) -> Bug:
    """A bug of one edit."""
    return Bug(name, test, (Edit(file, was, planted),))


BUGS: tuple[Bug, ...] = (
    bug(
        "the engine sends before it persists",
        f"{BOX}::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        "node/rounds/engine.py",
        "        decided: Certificate | None = None\n",
        "        effects = sorted(effects, key=lambda effect: isinstance(effect, Persist))\n"
        "        decided: Certificate | None = None\n",
    ),
    bug(
        "the log's append without fsync",
        f"{BOX}::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        "node/state/store.py",
        "                os.fsync(self._file.fileno())\n            except OSError:",
        "                pass\n            except OSError:",
    ),
    bug(
        "an atomic write without syncing its folder",
        f"{BOX}::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        "node/state/store.py",
        "            raise\n        sync_folder(path.parent)\n",
        "            raise\n",
    ),
    Bug(
        "promises pruned before the certificate is on disk",
        f"{BOX}::test_promises_of_a_round_are_kept_until_its_certificate_is_on_disk",
        (
            Edit(
                "node/state/custody.py",
                "        await trio.to_thread.run_sync(self._p.store.append_certificate, entry)\n",
                "        await trio.to_thread.run_sync(self._p.store.decided, entry.value)\n"
                "        await trio.to_thread.run_sync(self._p.store.append_certificate, entry)\n",
            ),
        ),
    ),
    bug(
        "`restore` takes a record's view without `max`",
        "tests/protocol/test_restoring.py::test_a_record_that_says_nothing_of_views_takes_back_no_promise",
        "protocol/agreement.py",
        "self.view = max(self.view, record.view)",
        "self.view = record.view",
    ),
    bug(
        "a residual counted again after a restart although it may have been counted",
        f"{BOX}::test_what_may_have_been_counted_since_the_work_on_disk_is_not_contributed_again",
        "node/rounds/participation.py",
        "resumption.find(chain, countable=countable)",
        "resumption.find(chain, countable=True)",
    ),
    bug(
        "the ready mark not written before Ready",
        f"{BOX}::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        "node/rounds/participation.py",
        "        await self._mark_announced()\n        self._p.log",
        "        self._p.log",
    ),
    bug(
        "the ready mark not written before a contribution is announced again",
        f"{BOX}::test_a_contribution_that_is_announced_again_after_a_restart_is_marked_first",
        "node/rounds/participation.py",
        "            await self._mark_announced()  #",
        "            pass  #",
    ),
    bug(
        "ready records dropped when the log is rewritten",
        "tests/node/state/test_store.py::test_announced_contributions_are_still_known_when_the_log_was_cut",
        "node/state/store.py",
        "        if self._agreement.size > AGREEMENT_LOG_LIMIT_BYTES:\n",
        "        if self._agreement.size > AGREEMENT_LOG_LIMIT_BYTES:\n"
        '            self._bound = [record for record in self._bound if record.kind != "ready"]\n',
    ),
    Bug(
        "a joiner that weighs in its first round",
        f"{BOX}::test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next",
        (
            Edit("protocol/leading.py", "weightless=candidates.keys() - returners,", "weightless=(),"),
            Edit(
                "node/rounds/participation.py",
                "if self._me in self.recent_members() else JOINER",
                "if True else JOINER",
            ),
        ),
    ),
    bug(
        "a joiner that trains before it is a member",
        f"{BOX}::test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next",
        "node/rounds/participation.py",
        "if self._me in self.recent_members() else JOINER",
        "if True else JOINER",
    ),
    bug(
        "a rollback with consents of half, the planner not among them",
        "tests/protocol/test_terms.py::test_consents_of_half_are_a_quorum_only_with_the_planner_among_them",
        "protocol/terms.py",
        "and is_quorum(previous, rollback.consenting, value.leaves)",
        "and 2 * len(rollback.consenting) >= len(previous.members)",
    ),
    bug(
        "a vote although the bitmaps differ",
        f"{BOX}::test_member_signs_nothing_whose_bitmaps_are_not_those_that_it_has_and_counts_its_work_once",
        "protocol/agreement.py",
        "return result == (value.plan, value.digest, value.bitmaps, value.tokens)",
        "return result[:2] == (value.plan, value.digest)",
    ),
    bug(
        "work is settled by finals whose bitmaps are not the certified ones",
        f"{BOX}::test_member_signs_nothing_whose_bitmaps_are_not_those_that_it_has_and_counts_its_work_once",
        "node/state/custody.py",
        "if finals.bitmaps_root != value.bitmaps:",
        "if False:",
    ),
    bug(
        "finals of an earlier base worked out in the next round",
        f"{BOX}::test_finals_of_an_earlier_round_that_come_late_change_nothing",
        "node/rounds/engine.py",
        "or finals.plan.base != machine.previous.hash:",
        "or False:",
    ),
    bug(
        "a folder of its own work that a power cut takes along",
        f"{BOX}::test_what_a_node_alone_knows_of_a_round_is_safe_before_the_certificate_is",
        "node/state/store.py",
        "        path.mkdir(exist_ok=True)\n        sync_folder(path.parent)\n",
        "        path.mkdir(exist_ok=True)\n",
    ),
)


class NotPlanted(Exception):
    """The product has no such text, or has it more than once."""


def copy_tree(target: Path) -> None:
    """The product and its tests, laid out so that `shoal` is the copy."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "shoal").mkdir()
    for name in PACKAGES:
        (target / "shoal" / name).symlink_to(target / name)


def plant(tree: Path, edit: Edit) -> None:
    """Plant one edit. Raises NotPlanted."""
    path = tree / edit.file
    text = path.read_text()
    if text.count(edit.was) != 1:
        raise NotPlanted(f"{edit.file} has {text.count(edit.was)} times: {edit.was!r}")
    path.write_text(text.replace(edit.was, edit.planted))


def run_test(tree: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run one test in a tree of `copy_tree`'s."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", test],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def see(tree: Path, planted: Bug) -> str:
    """Plant a bug in a tree, run its test, and take the bug out again. Returns what the test said; it has failed.

    Raises NotPlanted; AssertionError if the test does not see the bug.
    """
    kept = {edit.file: (tree / edit.file).read_text() for edit in planted.edits}
    try:
        for edit in planted.edits:
            plant(tree, edit)
        done = run_test(tree, planted.test)
    finally:
        for file, text in kept.items():
            (tree / file).write_text(text)
    said = done.stdout[-2000:] + done.stderr[-500:]
    assert done.returncode == 1, f"{planted.name}: not seen by {planted.test}\n{said}"
    return done.stdout


def main(wanted: list[str]) -> int:
    """Plant what is named by a part of its name, or everything; the number of those that were not seen."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for planted in BUGS:
            if wanted and not any(part in planted.name for part in wanted):
                continue
            try:
                said = see(tree, planted)
                print(f"seen     {planted.name}: {said.strip().splitlines()[-3 if wanted else -1]}", flush=True)
            except (AssertionError, NotPlanted) as error:
                missed += 1
                print(f"NOT SEEN {planted.name}: {error}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
