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
        "if not (chain.knows(evidence.base.hash) and (by_name or (takes_part and self._fits(evidence)))):",
        "if not (by_name or (takes_part and self._fits(evidence))):",
    ),
    bug(
        "evidence about vectors of another codec or grid than the swarm's takes room",
        "tests/node/audits/test_auditing.py"
        "::test_evidence_about_vectors_that_no_round_has_is_kept_only_if_a_value_names_it",
        "(by_name or (takes_part and self._fits(evidence)))):",
        "(by_name or takes_part)):",
    ),
    bug(
        "evidence about vectors of another size than a round's takes room",
        "tests/node/audits/test_auditing.py"
        "::test_evidence_about_vectors_that_no_round_has_is_kept_only_if_a_value_names_it",
        "return fits(evidence, manifest, self._shapes.get(self._fragment(evidence.base)))",
        "return fits(evidence, manifest, None)",
    ),
    bug(
        "evidence that strangers made against themselves fills the store",
        "tests/node/audits/test_evidence_store.py"
        "::test_strangers_have_a_share_of_the_room_in_which_the_newest_evidence_stays",
        "while self._is_full(held, size, STRANGERS_PIECES_LIMIT, STRANGERS_BYTES_LIMIT):",
        "while self._is_full(held, size, PIECES_LIMIT, BYTES_LIMIT):",
    ),
    bug(
        "old evidence against strangers puts out newer, and comes again for ever",
        "tests/node/audits/test_evidence_store.py"
        "::test_strangers_have_a_share_of_the_room_in_which_the_newest_evidence_stays",
        "if least and not named and _age(verdict) < _age(least[-1]):",
        "if least and not named and _age(verdict) == _age(least[-1]):",
    ),
    bug(
        "a disk that takes no evidence ends the node",
        "tests/node/audits/test_auditing.py::test_disk_that_takes_no_evidence_is_told_once_and_ends_nothing",
        """
        except StorageError as error:
            logger.info("%s", error)
            if not self._disk_is_told:
""",
        """
        except RemoteError as error:
            logger.info("%s", error)
            if not self._disk_is_told:
""",
    ),
    bug(
        "a disk that takes no files to weigh by ends the node",
        "tests/node/audits/test_work_audit.py::test_disk_that_takes_no_files_to_weigh_is_a_storage_error",
        """
        with disk_errors(self._p.store.folder):
            folder = tempfile.TemporaryDirectory(prefix=WEIGHED_PREFIX, dir=self._p.store.folder)
        """,
        """
        folder = tempfile.TemporaryDirectory(prefix=WEIGHED_PREFIX, dir=self._p.store.folder)
        """,
    ),
    bug(
        "one slow stranger after the other is asked for the evidence of a ban",
        "tests/node/audits/test_auditing.py::test_evidence_of_a_ban_is_had_although_strangers_come_first_and_are_slow",
        """
        for _ in range(ASKED_AT_ONCE):
            nursery.start_soon(self._fetch_in_turn, peers, digest, nursery.cancel_scope)
        """,
        """
        nursery.start_soon(self._fetch_in_turn, peers, digest, nursery.cancel_scope)
        """,
    ),
    bug(
        "each peer may take two minutes over the evidence of a ban",
        "tests/node/audits/test_auditing.py::test_evidence_of_a_ban_is_had_although_strangers_come_first_and_are_slow",
        "deadline_s=ASKED_S if by_name else WHOLE_DEADLINE_S)",
        "deadline_s=WHOLE_DEADLINE_S)",
    ),
    bug(
        "strangers are asked for evidence before members",
        "tests/node/audits/test_auditing.py::test_evidence_of_a_ban_is_had_although_strangers_come_first_and_are_slow",
        "return not self._is_member(peer), self.suspicion.of(peer, trio.current_time())",
        "return False, self.suspicion.of(peer, trio.current_time())",
    ),
    bug(
        "whoever took too long is asked first again",
        "tests/node/audits/test_auditing.py::test_evidence_of_a_ban_is_had_although_strangers_come_first_and_are_slow",
        """
        except trio.TooSlowError:
            self._unanswered(peer)
            raise NetworkError(f"{peer} did not give it within {deadline_s:g} s") from None
        """,
        """
        except trio.TooSlowError:
            raise NetworkError(f"{peer} did not give it within {deadline_s:g} s") from None
        """,
    ),
    bug(
        "whoever is slow for long counts as a giver of false evidence",
        "tests/node/audits/test_auditing.py"
        "::test_whoever_is_slow_for_long_is_asked_last_and_is_not_taken_for_a_giver_of_false_evidence",
        "UNANSWERED_MOST = FALSE_EVIDENCE / 2",
        "UNANSWERED_MOST = FALSE_EVIDENCE",
    ),
    bug(
        "all that one peer claims is asked of it at once",
        "tests/node/audits/test_auditing.py::test_peer_that_claims_much_and_gives_nothing_holds_up_no_other",
        "free = [peer for peer in self._pending if peer not in self._asked]",
        "free = list(self._pending)",
    ),
    bug(
        "a lie that a node saw itself waits for a slow peer",
        "tests/node/audits/test_auditing.py"
        "::test_statements_that_drip_are_given_up_and_hold_up_nothing_that_was_found_here",
        "self._do(partial(self._make, evidence, attachment))",
        "self._questions.put(min(self._links.linked()), partial(self._make, evidence, attachment))",
    ),
    bug(
        "an owner's statements may come one by one",
        "tests/node/audits/test_auditing.py"
        "::test_statements_that_drip_are_given_up_and_hold_up_nothing_that_was_found_here",
        "if not isinstance(answer, StatementsPart) or len(answer.statements) != wanted:",
        "if not isinstance(answer, StatementsPart) or not 0 < len(answer.statements) <= wanted:",
    ),
    bug(
        "statements have no deadline over all their parts",
        "tests/node/audits/test_auditing.py::test_statements_have_a_deadline_over_all_their_parts",
        """
        with self._asking(peer, WHOLE_DEADLINE_S):
            while len(found) < plan.chunks:
        """,
        """
        with self._asking(peer, float("inf")):
            while len(found) < plan.chunks:
        """,
    ),
    bug(
        "one peer that takes no answers has all places of those that are answered",
        "tests/node/audits/test_auditing.py"
        "::test_peers_that_take_no_answers_have_one_place_each_and_strangers_none_of_members",
        "self._places.setdefault(stream.peer, trio.Semaphore(ANSWERS_PER_PEER_LIMIT))",
        "trio.Semaphore(ANSWERS_PER_PEER_LIMIT)",
    ),
    bug(
        "strangers that take no answers have the places of members",
        "tests/node/audits/test_auditing.py"
        "::test_peers_that_take_no_answers_have_one_place_each_and_strangers_none_of_members",
        "async with place, self._rooms[self._is_member(stream.peer)]:",
        "async with place, self._rooms[True]:",
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
    bug(
        "evidence for which there is no room is fetched every half second",
        "tests/node/audits/test_auditing.py"
        "::test_evidence_of_a_ban_for_which_there_is_no_room_is_fetched_seldom_until_there_is",
        "Backoff(NEED_RETRY_S, NEED_RETRY_LIMIT_S)",
        "Backoff(NEED_RETRY_S, NEED_RETRY_S)",
    ),
    bug(
        "evidence for which there is no room is fetched from everybody",
        "tests/node/audits/test_auditing.py"
        "::test_evidence_of_a_ban_for_which_there_is_no_room_is_fetched_seldom_until_there_is",
        "if not has_room or self.evidence_store.proves(digest) is not None:",
        "if self.evidence_store.proves(digest) is not None:",
    ),
)
