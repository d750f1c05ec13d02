"""Bugs of evidence and audits: who is convicted, by what, and what is kept."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

AUDITS: tuple[Bug, ...] = (
    bug(
        "audits of a model of few chunks take more than their share",
        "tests/protocol/test_auditing.py"
        "::test_audits_add_their_share_to_the_bytes_of_a_round_however_many_nodes_and_chunks",
        "return min(float(limit), 2 * share * chunks / max(1, contributors))",
        "return min(float(limit), float(chunks))",
    ),
    bug(
        "less than one chunk is none: a small model is never audited",
        "tests/protocol/test_auditing.py::test_a_fraction_of_a_chunk_is_drawn_as_often_as_it_says",
        "count = min(chunks, whole + (more < (wanted - whole) * 2 ** (8 * _NUMBER_BYTES)))",
        "count = min(chunks, whole)",
    ),
    bug(
        "every disputed plan of a lead is a job of its own",
        "tests/node/audits/test_auditing.py::test_disputed_plans_of_one_lead_are_one_job_and_leave_room_for_evidence",
        "if peer not in self._settling and self._witness.disputes(plan):",
        "if self._witness.disputes(plan):",
    ),
    bug(
        "evidence of rounds that there never were is kept",
        "tests/node/audits/test_auditing.py"
        "::test_evidence_is_kept_against_who_takes_part_or_did_in_rounds_that_there_were",
        "if not (chain.knows(evidence.base.hash) and (takes_part or by_name)):",
        "if not (takes_part or by_name):",
    ),
    bug(
        "evidence against keys that take no part takes the room of other evidence",
        "tests/node/audits/test_evidence_store.py"
        "::test_evidence_against_keys_that_were_never_members_takes_no_others_room",
        "key=lambda one: (self._first(one.accused), one.done))",
        "key=lambda one: one.done)",
    ),
    bug(
        "votes in two rounds convict",
        "tests/collectives/test_proofs.py::test_evidence_on_a_base_that_was_not_signed_is_refused",
        """
        if (value.base, value.swarm) != (self.base.hash, self.base.swarm):
            raise RemoteError("a vote in another round")
        if not verify_step(STEPS[self.step], self.peer, self.view, value.hash, signature):
        """,
        """
        if not verify_step(STEPS[self.step], self.peer, self.view, value.hash, signature):
        """,
    ),
    bug(
        "a vote that the accused did not sign convicts it",
        "tests/collectives/test_proofs.py::test_evidence_that_the_accused_did_not_sign_is_refused",
        """
        if not verify_step(STEPS[self.step], self.peer, self.view, value.hash, signature):
            raise RemoteError("a vote that the accused did not sign")
        """,
        """
        if not signature:
            raise RemoteError("a vote that the accused did not sign")
        """,
    ),
    bug(
        "a view change that carries the certificate convicts",
        "tests/protocol/test_witness.py"
        "::test_view_change_that_carries_the_certificate_or_comes_before_the_vote_is_none",
        "hiding = [(later, move) for later, move in moves if move.prepared < view < later]",
        "hiding = [(later, move) for later, move in moves if move.prepared <= view < later]",
    ),
    bug(
        "who was restarted is convicted of two contributions",
        "tests/collectives/test_proofs.py::test_node_that_was_restarted_may_commit_to_something_else",
        "if (first.peer, first.life) != (second.peer, second.life):",
        "if first.peer != second.peer:",
    ),
    bug(
        "a statement that the accused did not sign convicts it",
        "tests/collectives/test_proofs.py::test_evidence_that_the_accused_did_not_sign_is_refused",
        """
        if not statement.valid():
            raise RemoteError("a statement that the accused did not sign")
        """,
        """
        if not statement.signature:
            raise RemoteError("a statement that the accused did not sign")
        """,
    ),
    bug(
        "payloads that nobody committed to prove a wrong sum",
        "tests/collectives/test_proofs.py::test_wrong_sum_needs_the_payloads_that_were_committed_to",
        "return encoded_part(payload, grid=grid, codec=how, chunk=chunk, root=plan.participants[place].root)",
        "return payload[: how.encoded_bytes(grid.length(chunk))]",
    ),
    bug(
        "evidence about another swarm is believed",
        "tests/collectives/test_proofs.py::test_evidence_about_another_swarm_is_refused",
        "if evidence.base.swarm != swarm:",
        "if len(evidence.base.swarm) != len(swarm):",
    ),
    bug(
        "work is weighed only from states that the cache has still",
        "tests/node/audits/test_work_audit.py"
        "::test_state_that_the_cache_let_go_is_weighed_from_if_it_was_the_newest_one",
        "if state is None and before is not None and (before.term, before.round) == (base.term, base.state_round):",
        "if state is None and before is None:",
    ),
)
