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
ONE_WORD = "tests/protocol/test_one_word.py"
ONE_WORD_NODES = "tests/node/test_one_word.py"
WITNESS = "tests/protocol/test_witness.py"


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
        "protocol/member.py",
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
        "protocol/member.py",
        "yield FindWork(countable)",
        "yield FindWork(True)",
    ),
    bug(
        "the ready mark not written before Ready",
        f"{BOX}::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        "protocol/member.py",
        "            yield from self._mark_announced()\n        yield from self._carry_out(machine.ready(ready",
        "            pass\n        yield from self._carry_out(machine.ready(ready",
    ),
    bug(
        "the ready mark not written before a contribution is announced again",
        f"{BOX}::test_a_contribution_that_is_announced_again_after_a_restart_is_marked_first",
        "protocol/member.py",
        "            yield from self._mark_announced()  #",
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
                "protocol/member.py",
                "if self._me in self._recent_members() else JOINER",
                "if True else JOINER",
            ),
        ),
    ),
    bug(
        "a joiner that trains before it is a member",
        f"{BOX}::test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next",
        "protocol/member.py",
        "if self._me in self._recent_members() else JOINER",
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
        "protocol/member.py",
        "or plan.base != machine.previous.hash:",
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
    bug(
        "a stranger that a closed swarm does not let in becomes a member",
        f"{ONE_SIGNATURE}::test_stranger_whom_the_swarm_does_not_let_in_becomes_no_member_although_the_plan_has_it",
        "protocol/agreement.py",
        " if p not in taking_part or not self._may_join(p)]",
        " if p not in taking_part]",
    ),
    bug(
        "whoever has no record yet may become a member by invite",
        "tests/protocol/test_invites.py::test_who_may_become_a_member_is_who_may_be_in",
        "protocol/admission.py",
        "is None and self._reason_unlisted(peer, credential) is None\n\n    def first",
        "is None and (record is None or self._reason_unlisted(peer, credential) is None)\n\n    def first",
    ),
    bug(
        "a certificate of a rollback to nowhere is decided",
        f"{ONE_WORD_NODES}::test_certificate_of_a_rollback_to_nowhere_ends_no_node",
        "protocol/member.py",
        "            leads_back=chain.leads_back,\n",
        "",
    ),
    bug(
        "a state to go back to is known by its certificate alone",
        f"{ONE_WORD}::test_consent_to_go_back_to_nowhere_ends_no_lead",
        "protocol/agreement.py",
        "        return self._states.get(target)\n",
        "        return next((d for t, d in self._states.items() if t.certificate == target.certificate), None)\n",
    ),
    bug(
        "finals that were fetched are signed whatever their plan says",
        f"{ONE_WORD_NODES}::test_finals_of_a_plan_that_the_settings_forbid_are_signed_by_nobody",
        "protocol/member.py",
        "            check_plan(plan, plan.planner, machine.previous, self._settings)\n",
        "            pass\n",
    ),
    bug(
        "a plan may count on a contribution that was not made",
        f"{ONE_WORD}::test_plan_that_counts_on_a_contribution_that_was_not_made_is_not_followed",
        "protocol/round.py",
        "None if mine is None or mine.role != CONTRIBUTOR else mine.root",
        "None if mine is None else mine.root",
    ),
    bug(
        "finals stand that were signed by nobody in the plan",
        f"{ONE_WORD}::test_finals_of_owners_that_there_are_not_do_not_stand",
        "protocol/repair.py",
        "            if results.place >= len(peers):\n",
        "            if results.place >= 64:\n",
    ),
    bug(
        "every disputed plan of a lead is a job of its own",
        "tests/node/audits/test_auditing.py::test_disputed_plans_of_one_lead_are_one_job_and_leave_room_for_evidence",
        "node/audits/auditing.py",
        "        if peer not in self._settling and self._witness.disputes(plan):\n",
        "        if self._witness.disputes(plan):\n",
    ),
    bug(
        "a lead that went on to another view is waited for in its own",
        "tests/protocol/test_following.py::test_lead_that_went_on_to_another_view_is_followed_out_of_its_own_and_no_further",
        "protocol/following.py",
        "        gone |= promised.get(leader, 0) > view and not facts.agreement.proposed\n",
        "",
    ),
    bug(
        "every plan renews the patience with its lead",
        f"{ONE_WORD}::test_lead_that_plans_again_and_again_keeps_its_view_no_longer_than_two_plans_do",
        "protocol/patience.py",
        "        elif 2 * took_s >= self._reduce_s():\n",
        "        elif took_s >= 0:\n",
    ),
    bug(
        "a lead begins as many reductions as it likes",
        f"{ONE_WORD}::test_lead_begins_only_so_many_reductions_in_a_view",
        "protocol/round.py",
        "        if len(begun) > LINEAGES_LIMIT:\n",
        "        if len(begun) > 1000 * LINEAGES_LIMIT:\n",
    ),
    bug(
        "who spoke of many plans may speak of no other",
        f"{ONE_WORD}::test_reports_and_accusations_of_many_plans_keep_nobody_from_speaking_of_the_next",
        "protocol/agreement.py",
        "        make_room(self.reports, report.plan, sender)\n",
        "        if sum(sender in row for row in self.reports.values()) >= 64:\n            return\n",
    ),
    bug(
        "a report that somebody else brings takes the place of a newer one",
        f"{ONE_WORD}::test_report_that_somebody_else_brings_takes_the_place_of_none",
        "protocol/facts.py",
        " and peer not in self.reports.get(change.report.plan, {}):\n",
        ":\n",
    ),
    bug(
        "words of who takes no part are kept",
        f"{ONE_WORD}::test_words_of_who_takes_no_part_are_not_kept",
        "protocol/round.py",
        "        if not known and not isinstance(message, Ready | Certificate):\n",
        "        if False:\n",
    ),
    bug(
        "one peer fills what the witness keeps of values",
        f"{WITNESS}::test_values_that_nobody_signed_take_the_room_of_none_that_others_bring",
        "protocol/witness.py",
        "        bringer = sender if sender in about.base.members else None\n",
        "        bringer = None\n",
    ),
    bug(
        "votes for what there is not hide two votes",
        f"{WITNESS}::test_votes_for_what_there_is_not_hide_no_two_votes",
        "protocol/witness.py",
        "        full = len(said) > 1 and not (unknown and value_hash in about.values)\n",
        "        full = len(said) > 1\n",
    ),
    bug(
        "the first view change of a member hides its next",
        f"{WITNESS}::test_view_change_with_an_invented_certificate_hides_no_other_one",
        "protocol/witness.py",
        "        if known is not None and known.prepared <= move.prepared:",
        "        if known is not None:",
    ),
    bug(
        "who left in one certificate and signed the other is not named",
        "tests/protocol/test_forks.py::test_who_left_in_one_and_signed_the_other_is_named",
        "protocol/forks.py",
        "        return tuple(sorted(one & other | left))\n",
        "        return tuple(sorted(one & other))\n",
    ),
    bug(
        "one peer's early words take the room of all others'",
        "tests/protocol/test_early.py::test_what_is_early_takes_no_more_memory_than_it_may_and_nobody_anothers",
        "protocol/early.py",
        "        while len(words.kept) > EARLY_PEER_LIMIT_MESSAGES or words.size > EARLY_PEER_LIMIT_BYTES:\n",
        "        while len(words.kept) > EARLY_LIMIT_MESSAGES:\n",
    ),
    bug(
        "every pair that a plan relays is a job of its own",
        "tests/node/rounds/test_reducing.py::test_plans_full_of_relays_that_come_one_after_the_other_are_followed",
        "node/rounds/reducing.py",
        "            self._jobs.send_nowait(partial(self._try_all_again, self._relayed))\n",
        "            for peer in self._relayed:\n"
        "                self._jobs.send_nowait(partial(self._try_again, peer))\n",
    ),
    bug(
        "contributions of strangers make a round half ready",
        f"{ONE_WORD}::test_contributions_of_strangers_make_no_round_half_ready",
        "protocol/gathering.py",
        " if r.role == CONTRIBUTOR and p in self.returners}\n",
        " if r.role == CONTRIBUTOR}\n",
    ),
    bug(
        "sums are signed by the hash of a plan that was never seen",
        f"{ONE_WORD}::test_revision_of_a_plan_that_was_not_seen_is_not_followed",
        "protocol/round.py",
        "        return known is not None\n",
        "        return True\n",
    ),
    bug(
        "a plan is remembered only if it is followed",
        f"{ONE_WORD}::test_plan_that_came_too_late_to_be_followed_is_one_that_was_seen",
        "protocol/round.py",
        "        self._note_origin(sender, plan)\n",
        "",
    ),
    bug(
        "every question of a lead that evicts is answered",
        f"{ONE_WORD}::test_lead_that_evicts_again_and_again_is_answered_once_for_each_of_its_questions",
        "protocol/round.py",
        "        return question not in asked\n",
        "        return True\n",
    ),
    bug(
        "a value bans everybody of whom something is proven",
        "tests/protocol/test_bans.py::test_keys_that_take_no_part_fill_no_value_whatever_is_proven_of_them",
        "protocol/bans.py",
        "        if peer not in banned and peer in among:\n",
        "        if peer not in banned:\n            among = (*among, peer)\n",
    ),
    bug(
        "evidence of rounds that there never were is kept",
        "tests/node/audits/test_auditing.py"
        "::test_evidence_is_kept_against_who_takes_part_or_did_in_rounds_that_there_were",
        "node/audits/auditing.py",
        "        if not (chain.knows(evidence.base.hash) and (takes_part or by_name)):\n",
        "        if not (takes_part or by_name):\n",
    ),
    bug(
        "evidence against keys that take no part takes the room of other evidence",
        "tests/node/audits/test_evidence_shelf.py"
        "::test_evidence_against_keys_that_were_never_members_takes_no_others_room",
        "node/audits/evidence_shelf.py",
        "key=lambda one: (self._first(one.accused), one.done))\n",
        "key=lambda one: one.done)\n",
    ),
    bug(
        "whatever anybody signs is verified",
        "tests/protocol/test_certificate.py::test_what_anybody_can_sign_is_hardly_looked_at",
        "protocol/certificate.py",
        "    if not trusted and not set(certificate.signers) <= set(previous.members):\n",
        "    if False:\n",
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
