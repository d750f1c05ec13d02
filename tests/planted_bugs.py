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
PACKAGES = ("protocol", "collectives", "swarm", "node", "cli", "testnet", "lab")
DEADLINE_S = 300.0
BOX = "tests/node/test_swarm_in_a_box.py"
ONE_SIGNATURE = "tests/protocol/test_one_signature.py"


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
    bug(
        "names in a certificate believed without their proofs",
        f"{ONE_SIGNATURE}::test_member_that_lists_all_others_as_gone_certifies_nothing",
        "protocol/certificate.py",
        "    if not first_edition and not has_proofs(value, previous, faults):\n",
        "    if False:\n",
    ),
    bug(
        "votes of 0.1.0 believed from anybody",
        f"{ONE_SIGNATURE}::test_entries_of_the_first_edition_are_believed_from_ones_own_disk_alone",
        "protocol/certificate.py",
        "    first_edition = trusted and _is_of_first_edition(certificate)\n",
        "    first_edition = _is_of_first_edition(certificate)\n",
    ),
    bug(
        "members that are no quorum of those before",
        f"{ONE_SIGNATURE}::test_members_after_a_round_are_a_quorum_of_those_before_it",
        "protocol/certificate.py",
        "        is_quorum(previous, {*value.members, *banned}, value.leaves, faults=faults)\n        and",
        "        True\n        and",
    ),
    bug(
        "a new member whose Report somebody else signed",
        f"{ONE_SIGNATURE}::test_stranger_becomes_no_member_without_its_own_report_of_this_result",
        "protocol/certificate.py",
        "all(verify(peer, REPORT_DOMAIN, report, one) for peer, one in zip(new, joined, strict=True))",
        "True",
    ),
    bug(
        "a rollback in the chain without consents",
        f"{ONE_SIGNATURE}::test_rollback_is_believed_from_nobody_without_the_consents_of_a_quorum",
        "protocol/chain.py",
        "        if not is_consented(entry.value, self.head):\n",
        "        if False:\n",
    ),
    bug(
        "a member left out although its Report is here",
        f"{ONE_SIGNATURE}::test_lying_lead_that_leaves_members_out_gains_nothing",
        "protocol/agreement.py",
        "        if left_out or strangers:\n",
        "        if strangers:\n",
    ),
    bug(
        "a stranger that is in no plan",
        f"{ONE_SIGNATURE}::test_lying_lead_that_brings_strangers_in_gains_nothing",
        "protocol/agreement.py",
        "        if left_out or strangers:\n",
        "        if left_out:\n",
    ),
    bug(
        "tokens that nobody computed",
        f"{ONE_SIGNATURE}::test_proposal_of_an_invented_result_is_not_accepted",
        "protocol/agreement.py",
        "    result = (report.plan, report.digest, report.bitmaps, report.tokens)\n"
        "    return result == (value.plan, value.digest, value.bitmaps, value.tokens)",
        "    result = (report.plan, report.digest, report.bitmaps)\n"
        "    return result == (value.plan, value.digest, value.bitmaps)",
    ),
    bug(
        "a result in another planner's name",
        f"{ONE_SIGNATURE}::test_free_proposal_in_anothers_name_is_refused",
        "protocol/agreement.py",
        "        if not is_compelled and value.planner != sender:\n",
        "        if False:\n",
    ),
    bug(
        "a prepare certificate that counts a signer twice",
        f"{ONE_SIGNATURE}::test_invented_certificate_in_a_view_change_is_refused",
        "protocol/view_change.py",
        "        len(prepared.signers) == len(prepared.signatures) == len(set(prepared.signers))\n        and not set",
        "        len(prepared.signers) == len(prepared.signatures)\n        and not set",
    ),
    bug(
        "a prepare certificate whose signatures nobody checks",
        f"{ONE_SIGNATURE}::test_invented_certificate_in_a_view_change_is_refused",
        "protocol/view_change.py",
        "all(verify_step(PREPARE_DOMAIN, peer, prepared.view, value.hash, one) for peer, one in signed)",
        "True",
    ),
    bug(
        "a view that no quorum entered",
        f"{ONE_SIGNATURE}::test_proposal_of_a_view_that_no_quorum_entered_is_refused",
        "protocol/view_change.py",
        "        and is_quorum(previous, peers, leaves, faults=faults)\n        and all(verify_leave",
        "        and all(verify_leave",
    ),
    bug(
        "leaves in view changes that nobody signed",
        f"{ONE_SIGNATURE}::test_proposal_of_a_view_that_no_quorum_entered_is_refused",
        "protocol/view_change.py",
        "        and all(verify_leave(peer, previous.hash, signature) for peer, signature in leaves.items())\n",
        "",
    ),
    bug(
        "another value than the highest certificate compels",
        f"{ONE_SIGNATURE}::test_lead_may_propose_only_what_its_quorum_compels",
        "protocol/view_change.py",
        "    if compelled(moves) != (prepared.view, value.hash):\n",
        "    if False:\n",
    ),
    bug(
        "a plan in a view where a value stands",
        f"{ONE_SIGNATURE}::test_plan_or_eviction_of_a_far_view_binds_nobody",
        "protocol/view_change.py",
        "    if compelled(moves) is not None:\n",
        "    if False:\n",
    ),
    bug(
        "an eviction of a far view",
        f"{ONE_SIGNATURE}::test_plan_or_eviction_of_a_far_view_binds_nobody",
        "protocol/round.py",
        "        check_entered(sender, message.view, message.moves, self.previous, self.agreement.faults)\n",
        "",
    ),
    bug(
        "a plan of a far view",
        f"{ONE_SIGNATURE}::test_plan_or_eviction_of_a_far_view_binds_nobody",
        "protocol/round.py",
        "        check_entered(sender, plan.view, plan.moves, self.previous, self.agreement.faults)\n",
        "",
    ),
    bug(
        "one of three takes the others along",
        f"{ONE_SIGNATURE}::test_one_of_three_does_not_lead_the_others_from_view_to_view",
        "protocol/agreement.py",
        "            if self.is_quorum(movers - {self._me}):\n",
        "            if self.is_quorum(movers | {self._me}):\n",
    ),
    bug(
        "a vote for what was not prepared here",
        f"{ONE_SIGNATURE}::test_quorum_of_others_prepares_is_no_vote_of_who_has_not_prepared",
        "protocol/agreement.py",
        "if value is None or mine is None or mine.value != value_hash or view != self.view or view in self._my_votes:",
        "if value is None or view != self.view or view in self._my_votes:",
    ),
    bug(
        "a vote for what was prepared below",
        f"{ONE_SIGNATURE}::test_member_that_moved_on_votes_no_more_for_what_it_prepared_below",
        "protocol/agreement.py",
        "mine.value != value_hash or view != self.view or view",
        "mine.value != value_hash or view",
    ),
    bug(
        "restored prepares are not counted",
        f"{ONE_SIGNATURE}::test_restored_prepares_and_votes_count_like_those_that_are_heard",
        "protocol/agreement.py",
        "        for view, value_hash in list(self._prepares):\n"
        "            effects += self._try_vote(view, value_hash)\n",
        "",
    ),
    bug(
        "two thirds rounded down",
        f"{ONE_SIGNATURE}::test_quorum_of_liars_is_more_than_two_thirds_of_all",
        "protocol/quorum.py",
        "        return 3 * len(electorate.intersection(supporters)) > 2 * len(electorate)\n",
        "        return 3 * len(electorate.intersection(supporters)) >= 2 * len(electorate)\n",
    ),
    bug(
        "a leave beside a vote is nobody's fault",
        "tests/protocol/test_witness.py::test_signature_of_somebody_that_promised_to_leave_is_evidence",
        "protocol/witness.py",
        "        about.leaves[peer] = signature\n        return self._broken_leave(about, peer)\n",
        "        about.leaves[peer] = signature\n        return []\n",
    ),
    bug(
        "a lead is believed in a dispute of its own",
        "tests/protocol/test_accusations.py::test_word_of_a_lead_in_its_own_dispute_counts_for_itself_alone",
        "protocol/accusations.py",
        "judged = other not in gone and (later.planner != other or other == me)",
        "judged = other not in gone",
    ),
    bug(
        "a lead leaves out whom it needs",
        "tests/protocol/test_probation.py::test_nobody_is_left_out_where_the_rest_are_no_quorum",
        "protocol/facts.py",
        "return out if train and self.is_quorum(rest) else frozenset()",
        "return out",
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
