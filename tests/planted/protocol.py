"""Bugs of what is said and what decides: agreement, views, quorums, certificates, chain, plans, repair, membership."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

PROTOCOL: tuple[Bug, ...] = (
    bug(
        "who takes no part in the plan that is followed is kept accusing under it",
        "tests/protocol/test_accusations.py::test_of_the_plan_that_is_followed_who_takes_no_part_in_it_accuses_nobody",
        "followed is not None and followed.hash == message.plan and sender not in followed.remaining",
        "False",
    ),
    bug(
        "who does not know any more what it announced takes the work on disk for uncounted",
        "tests/protocol/test_member.py"
        "::test_what_is_on_disk_cannot_have_been_counted_since_by_who_announced_nothing_after_it",
        "announced = self._is_announced() or ABSTAIN in self._kinds()",
        "announced = self._is_announced()",
    ),
    bug(
        "what a relay says of pairs that are not its own is kept",
        "tests/protocol/test_accusations.py"
        "::test_relay_of_the_plan_that_is_followed_speaks_of_its_own_pairs_once_and_who_is_none_of_nothing",
        "ways = tuple(_of_relay(sender, message.ways, followed))",
        "ways = message.ways",
    ),
    bug(
        "all is kept that is said of the ways of a plan that there is not",
        "tests/protocol/test_accusations.py"
        "::test_of_what_a_relay_says_before_its_plan_is_here_little_is_kept_and_counts_once_the_plan_is",
        "ways = message.ways[:EARLY_WAYS_LIMIT]",
        "ways = message.ways",
    ),
    bug(
        "claims about any number of plans are kept of one peer",
        "tests/protocol/test_accusations.py"
        "::test_of_what_a_relay_says_before_its_plan_is_here_little_is_kept_and_counts_once_the_plan_is",
        "make_room(self._relayed, message.plan, sender, WORDS_LIMIT)",
        "make_room(self._relayed, message.plan, sender)",
    ),
    bug(
        "that the finals of an owner are late speaks for who accuses it of owing a contribution",
        "tests/protocol/test_accusations.py"
        "::test_that_finals_are_late_supports_nobody_who_says_that_a_contribution_does_not_come",
        "if len(_voices(plan, accused, _accusers(self._heard(plan, alive)).get(accused, set()))) > 1:",
        "said = self._heard(plan, alive)\n"
        "        if len(_voices(plan, accused, {a for a, m in said.items() if accused in (*m.peers, *m.late)})) > 1:",
    ),
    bug(
        "a word is nothing once the plan is left that it is about, though it was on its way",
        "tests/protocol/test_disputes.py"
        "::test_lead_that_lies_is_left_by_all_though_its_plan_comes_before_the_words_on_which_it_was_made",
        "if left is not None and now - at <= ON_ITS_WAY_S:",
        "if left is not None and now < at:",
    ),
    bug(
        "what is said of a plan counts however long ago it was left",
        "tests/protocol/test_accusations.py::test_word_of_a_plan_that_was_left_counts_if_it_was_on_its_way",
        "if left is not None and now - at <= ON_ITS_WAY_S:",
        "if left is not None:",
    ),
    bug(
        "late words alone cost somebody its place",
        "tests/protocol/test_accusations.py::test_late_words_alone_cost_nobody_its_place_but_a_lead_its_view",
        "            if relays:\n                relays |= late.get(peer, frozenset()) - gone",
        "            relays |= late.get(peer, frozenset()) - gone",
    ),
    bug(
        "whom late words speak against loses its disputes",
        "tests/protocol/test_accusations.py::test_late_words_alone_cost_nobody_its_place_but_a_lead_its_view",
        "found = dict(self._against)",
        "found = {**self._late, **self._against}",
    ),
    bug(
        "who leaves a view is no voice against its lead",
        "tests/protocol/test_accusations.py::test_who_left_the_view_of_a_lead_is_the_second_voice_beside_a_relay",
        "return joined or len(relays)",
        "return len(relays)",
    ),
    bug(
        "one relay that leaves a view and speaks against its lead takes all others along",
        "tests/protocol/test_accusations.py::test_who_left_the_view_of_a_lead_is_the_second_voice_beside_a_relay",
        "relay != other for relay in relays for other",
        "True for relay in relays for other",
    ),
    bug(
        "a lead ends what is said against it by planning again",
        "tests/protocol/test_round_stalls.py::test_lead_that_plans_again_when_two_accuse_it_is_left_if_they_do_again",
        "self._accused &= {*plan.remaining, plan.planner}",
        "self._accused &= {*plan.remaining} - {plan.planner}",
    ),
    bug(
        "relays that another lead tried are not tried again",
        "tests/protocol/test_relay_choice.py::test_what_another_lead_tried_is_tried_no_less",
        "for pair, via in plan.relayed.items() if plan.planner == self._me else ():",
        "for pair, via in plan.relayed.items():",
    ),
    bug(
        "the line outside grows for ever",
        "tests/protocol/test_enlisting.py::test_line_has_so_many_places_and_who_stood_in_it_keeps_its_own",
        "has_place = peer in self._stood or len(self._since) + len(self._stood) < LINE_LIMIT",
        "has_place = True",
    ),
    bug(
        "who came back to its place finds the line full",
        "tests/protocol/test_enlisting.py::test_line_has_so_many_places_and_who_stood_in_it_keeps_its_own",
        "has_place = peer in self._stood or len(self._since)",
        "has_place = len(self._since)",
    ),
    bug(
        "the line is put in order whenever somebody asks for it",
        "tests/protocol/test_enlisting.py::test_line_is_put_in_order_once_for_each_value",
        "if self._ordered is None or self._ordered[0] != head.hash:",
        "if True:",
    ),
    bug(
        "an answer about the chain has more enlistments than a message holds",
        "tests/protocol/test_enlisting.py"
        "::test_answer_about_the_chain_ends_before_its_enlistments_are_more_than_a_message_holds",
        "if entries and enlisted > ENLISTED_IN_ANSWER_LIMIT:",
        "if False:",
    ),
    bug(
        "norms of chunks that there are not are kept",
        "tests/protocol/test_witness.py::test_norms_of_more_chunks_than_there_are_take_no_room",
        "squares is not None and len(squares) <= about.settings.chunks",
        "squares is not None",
    ),
    bug(
        "keys that a stranger makes up push a member out of the guard against replays",
        "tests/protocol/test_wire.py::test_a_full_replay_guard_forgets_who_was_silent_for_longest_and_never_who_is_kept",
        "return next((origin for origin in origins if not kept(origin)), None)",
        "return next(iter(origins), None)",
    ),
    bug(
        "a guard against replays that is full hears nobody new",
        "tests/protocol/test_wire.py::test_a_full_replay_guard_forgets_who_was_silent_for_longest_and_never_who_is_kept",
        "            if forgotten is None:\n                return False\n            del self._newest[forgotten]",
        "            return False",
    ),
    bug(
        "one peer's word leads a node's gossip as far as it says",
        "tests/protocol/test_pairing.py"
        "::test_one_peers_word_leads_a_round_a_step_and_that_of_two_to_where_both_have_come",
        "return max(second, min(first, self.round + LED_ALONE_ROUNDS))",
        "return first",
    ),
    bug(
        "an offer of a round far from a node's own is declined",
        "tests/protocol/test_pairing.py::test_one_who_lies_of_its_round_keeps_nobody_apart_and_leads_nobody_far",
        "if offer.shape != self._shape:\n    return self._refuse(peer, offer)\n",
        "if offer.shape != self._shape or abs(offer.round - self.round) > 1:\n    return self._refuse(peer, offer)\n",
    ),
    bug(
        "a link is looked for in the first line alone, where a note may stand",
        "tests/protocol/test_swarm_link.py::test_link_is_found_in_what_was_copied_with_it",
        "found: list[str] = _LINK.findall(text)",
        "found: list[str] = _LINK.findall(text.partition('\\n')[0])",
    ),
    bug(
        "a newcomer waits for members that are all paused",
        "tests/protocol/test_joining.py::test_joiner_contributes_where_all_members_are_paused_and_they_all_vote",
        "return self.returners if trains else candidates.keys()",
        "return self.returners",
    ),
    bug(
        "a newcomer's contribution counts beside a member's",
        "tests/protocol/test_joining.py::test_newcomers_contribution_counts_only_where_no_member_trains",
        "return self.returners if trains else candidates.keys()",
        "return candidates.keys()",
    ),
    bug(
        "an entry is taken whose predecessor is not here",
        "tests/protocol/test_catching_up.py"
        "::test_parent_that_lies_costs_a_follower_a_wait_elsewhere_and_nothing_of_it_stays",
        "        and value.base == previous.hash",
        "",
        "        and value.round == previous.next_round\n",
        "",
    ),
    bug(
        "a follower has no second wait beside that at its parent",
        "tests/protocol/test_followers.py::test_follower_waits_at_two_of_those_linked_from_itself_around_the_ring",
        "AWAITED_LIMIT: Final = 2",
        "AWAITED_LIMIT: Final = 1",
    ),
    bug(
        "a parent that failed is waited at again before others",
        "tests/protocol/test_followers.py::test_parent_that_fails_is_replaced_at_once_and_left_alone_for_a_while",
        "            and now - self._began_at.get(peer, -math.inf) >= AGAIN_S\n"
        "            and not self._scores.resting(peer, now)\n",
        "            and now - self._began_at.get(peer, -math.inf) >= AGAIN_S\n",
    ),
    bug(
        "any number of followers wait at one node",
        "tests/protocol/test_followers.py"
        "::test_no_more_than_so_many_wait_at_one_node_and_who_comes_again_takes_its_own_place",
        "if not has_room(self._asked, peer):",
        "if False:",
    ),
    bug(
        "who waits is told of a round whose state is not here",
        "tests/protocol/test_followers.py::test_who_waits_is_answered_once_there_is_more_and_its_state_is_here",
        "if now >= asked.until or (current and chain.after(asked.after, 1, asked.rebases))",
        "if now >= asked.until or chain.after(asked.after, 1, asked.rebases)",
    ),
    bug(
        "a follower takes part in the round after its head",
        "tests/protocol/test_member.py"
        "::test_follower_takes_part_in_no_round_says_nothing_and_has_its_agent_stand_on_each_state",
        "if self.follows:\n    yield from self._follow()\n",
        "if False:\n    yield from self._follow()\n",
    ),
    bug(
        "a follower that was overtaken tells leads to wait for it",
        "tests/protocol/test_catching_up.py::test_follower_that_was_overtaken_tells_nobody_that_it_comes",
        "if self.follows or self._took_s is None:  # it comes to no round, or was not overtaken",
        "if self._took_s is None:",
    ),
    bug(
        "a node that only samples takes part as one that trains",
        "tests/protocol/test_member.py::test_member_that_only_follows_observes_every_round_and_never_has_its_trainer_train",
        "if lost or self._trains_nothing or self.finished or self.leaving:",
        "if lost or self._here.paused or self.finished or self.leaving:",
    ),
    bug(
        "an agent that only samples and begins anew is told to train",
        "tests/protocol/test_member.py::test_member_that_only_follows_observes_every_round_and_never_has_its_trainer_train",
        "if (self.machine is not None or self.follows_head) and not (self._has_given or self._trains_nothing):",
        "if (self.machine is not None or self.follows_head) and not (self._has_given or self._here.paused):",
    ),
    bug(
        "a node that only samples trains on alone",
        "tests/protocol/test_member.py::test_member_that_only_follows_observes_every_round_and_never_has_its_trainer_train",
        "may_train = not (self._trains_nothing or here.stuck) and self._departure.may_train(machine)",
        "may_train = not (self._here.paused or here.stuck) and self._departure.may_train(machine)",
    ),
    bug(
        "`restore` takes a record's view without `max`",
        "tests/protocol/test_restoring.py::test_a_record_that_says_nothing_of_views_takes_back_no_promise",
        "self.view = max(self.view, record.view)",
        "self.view = record.view",
    ),
    bug(
        "a round of which a value is proposed waits for contributions that all have lost",
        "tests/lab/simulate/test_phases.py::test_round_whose_contributions_are_all_lost_is_made_again_and_counts_once",
        "or agreement.is_prepared or not machine.nobody_trains()",
        "or agreement._values or agreement._prepares or not machine.nobody_trains()",
    ),
    bug(
        "a round waits for contributions that all have lost, since one that is gone voted in it",
        "tests/lab/simulate/test_phases.py::test_round_whose_contributions_are_all_lost_is_made_again_and_counts_once",
        "return self._highest is not None or any(prepared is not None for prepared in told)",
        "return bool(self._highest or self._votes) or any(prepared is not None for prepared in told)",
    ),
    bug(
        "a joiner that weighs in its first round",
        "tests/node/test_swarm_in_a_box.py"
        "::test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next",
        "weightless=candidates.keys() - weighty,",
        "weightless=(),",
        "if self._me in self._recent_members() else JOINER",
        "if True else JOINER",
    ),
    bug(
        "who leaves does not hear of those who leave with it",
        "tests/lab/simulate/test_leaving.py"
        "::test_two_of_three_that_leave_in_the_same_moment_leave_one_that_certifies_alone",
        "going = {me, *leaving}.intersection(living)",
        "going = {me}.intersection(living)",
    ),
    bug(
        "all may promise to leave",
        "tests/protocol/test_certificate.py::test_leave_is_never_promised_by_all_whatever_each_knows_of_the_others",
        "promising = going - {spared}",
        "promising = going",
    ),
    bug(
        "a rollback with consents of half, the planner not among them",
        "tests/protocol/test_terms.py::test_consents_of_half_are_a_quorum_only_with_the_planner_among_them",
        "and is_quorum(previous, rollback.consenting, value.leaves, voting=voting)",
        "and 2 * len(rollback.consenting) >= len(previous.members)",
    ),
    bug(
        "a vote although the bitmaps differ",
        "tests/node/test_swarm_in_a_box.py"
        "::test_member_signs_nothing_whose_bitmaps_are_not_those_that_it_has_and_counts_its_work_once",
        "return result == (value.plan, value.digest, value.bitmaps, value.tokens)",
        "return result[:2] == (value.plan, value.digest)",
    ),
    bug(
        "names in a certificate believed without their proofs",
        "tests/protocol/test_one_signature.py::test_member_that_lists_all_others_as_gone_certifies_nothing",
        "if not first_edition and not has_proofs(value, previous, voting=voting):",
        "if False:",
    ),
    bug(
        "votes of 0.1.0 believed from anybody",
        "tests/protocol/test_one_signature.py::test_entries_of_the_first_edition_are_believed_from_ones_own_disk_alone",
        "first_edition = trusted and _is_of_first_edition(certificate)",
        "first_edition = _is_of_first_edition(certificate)",
    ),
    bug(
        "members that are no quorum of those before",
        "tests/protocol/test_one_signature.py::test_members_after_a_round_are_a_quorum_of_those_before_it",
        """
        is_quorum(previous, {*value.members, *banned}, value.leaves, voting=voting)
        and all(verify_leave(peer, value.base, one) for peer, one in zip(value.leaves, leaves, strict=True))
        """,
        """
        True
        and all(verify_leave(peer, value.base, one) for peer, one in zip(value.leaves, leaves, strict=True))
        """,
    ),
    bug(
        "a new member whose Report somebody else signed",
        "tests/protocol/test_one_signature.py::test_stranger_becomes_no_member_without_its_own_report_of_this_result",
        "all(verify(peer, REPORT_DOMAIN, report, one) for peer, one in zip(new, joined, strict=True))",
        "True",
    ),
    bug(
        "a rollback in the chain without consents",
        "tests/protocol/test_one_signature.py::test_rollback_is_believed_from_nobody_without_the_consents_of_a_quorum",
        "if not is_consented(entry.value, self.head, voting=self.voting):",
        "if False:",
    ),
    bug(
        "a member left out although its Report is here",
        "tests/protocol/test_one_signature.py::test_lying_lead_that_leaves_members_out_gains_nothing",
        "if left_out or strangers or doubted:",
        "if strangers or doubted:",
    ),
    bug(
        "a stranger that is in no plan",
        "tests/protocol/test_one_signature.py::test_lying_lead_that_brings_strangers_in_gains_nothing",
        "if left_out or strangers or doubted:",
        "if left_out or doubted:",
    ),
    bug(
        "what came of a plan of its lead alone is signed",
        "tests/protocol/test_one_word.py::test_what_came_of_a_plan_that_counts_less_than_half_of_those_who_train_is_not_signed",
        "if left_out or strangers or doubted:",
        "if left_out or strangers:",
    ),
    bug(
        "a plan that counts too few is refused in all views",
        "tests/protocol/test_one_word.py::test_what_came_of_a_plan_that_counts_less_than_half_of_those_who_train_is_not_signed",
        "return plan in self._doubted and self._is_early(view)",
        "return plan in self._doubted",
    ),
    bug(
        "a lead plans itself alone before the others have announced",
        "tests/protocol/test_one_word.py::test_what_came_of_a_plan_that_counts_less_than_half_of_those_who_train_is_not_signed",
        "trainers = len(self._countable(plan.chunks)) + len(self.awaited() - plan.delegates.keys())",
        "trainers = len(self._countable(plan.chunks))",
    ),
    bug(
        "a refusal in a view that is not its own yet is forgotten",
        "tests/protocol/test_one_word.py::test_what_came_of_a_plan_that_counts_less_than_half_of_those_who_train_is_not_signed",
        "return max(self._refused, default=-1) >= self.view",
        "return self.view in self._refused",
    ),
    bug(
        "tokens that nobody computed",
        "tests/protocol/test_one_signature.py::test_proposal_of_an_invented_result_is_not_accepted",
        """
        result = (report.plan, report.digest, report.bitmaps, report.tokens)
        return result == (value.plan, value.digest, value.bitmaps, value.tokens)
        """,
        """
        result = (report.plan, report.digest, report.bitmaps)
        return result == (value.plan, value.digest, value.bitmaps)
        """,
    ),
    bug(
        "a result in another planner's name",
        "tests/protocol/test_one_signature.py::test_free_proposal_in_anothers_name_is_refused",
        "if not is_compelled and value.planner != sender:",
        "if False:",
    ),
    bug(
        "a prepare certificate that counts a signer twice",
        "tests/protocol/test_one_signature.py::test_invented_certificate_in_a_view_change_is_refused",
        """
        len(prepared.signers) == len(prepared.signatures) == len(set(prepared.signers))
        and not set(prepared.signers).intersection(value.leaves)
        """,
        """
        len(prepared.signers) == len(prepared.signatures)
        and not set(prepared.signers).intersection(value.leaves)
        """,
    ),
    bug(
        "a prepare certificate whose signatures nobody checks",
        "tests/protocol/test_one_signature.py::test_invented_certificate_in_a_view_change_is_refused",
        "all(verify_step(PREPARE_DOMAIN, peer, prepared.view, value.hash, one) for peer, one in signed)",
        "True",
    ),
    bug(
        "a view that no quorum entered",
        "tests/protocol/test_one_signature.py::test_proposal_of_a_view_that_no_quorum_entered_is_refused",
        """
        and is_quorum(previous, peers, leaves, voting=voting)
        and all(verify_leave(peer, previous.hash, signature) for peer, signature in leaves.items())
        """,
        """
        and all(verify_leave(peer, previous.hash, signature) for peer, signature in leaves.items())
        """,
    ),
    bug(
        "leaves in view changes that nobody signed",
        "tests/protocol/test_one_signature.py::test_proposal_of_a_view_that_no_quorum_entered_is_refused",
        "and all(verify_leave(peer, previous.hash, signature) for peer, signature in leaves.items())",
        "",
    ),
    bug(
        "another value than the highest certificate compels",
        "tests/protocol/test_one_signature.py::test_lead_may_propose_only_what_its_quorum_compels",
        "if compelled(moves) != (prepared.view, value.hash):",
        "if False:",
    ),
    bug(
        "a plan in a view where a value stands",
        "tests/protocol/test_one_signature.py::test_plan_or_eviction_of_a_far_view_binds_nobody",
        "if compelled(moves) is not None:",
        "if False:",
    ),
    bug(
        "an eviction of a far view",
        "tests/protocol/test_one_signature.py::test_plan_or_eviction_of_a_far_view_binds_nobody",
        "check_entered(sender, message.view, message.moves, self.previous, voting=self.agreement.voting)",
        "",
    ),
    bug(
        "a plan of a far view",
        "tests/protocol/test_one_signature.py::test_plan_or_eviction_of_a_far_view_binds_nobody",
        "check_entered(sender, plan.view, plan.moves, self.previous, voting=self.agreement.voting)",
        "",
    ),
    bug(
        "one of three takes the others along",
        "tests/protocol/test_one_signature.py::test_one_of_three_does_not_lead_the_others_from_view_to_view",
        "if self.is_quorum(movers - {self._me}):",
        "if self.is_quorum(movers | {self._me}):",
    ),
    bug(
        "a vote for what was not prepared here",
        "tests/protocol/test_one_signature.py::test_quorum_of_others_prepares_is_no_vote_of_who_has_not_prepared",
        (
            "if value is None or mine is None or mine.value != value_hash or view != self.view or view "
            "in self._my_votes:"
        ),
        "if value is None or view != self.view or view in self._my_votes:",
    ),
    bug(
        "a vote for what was prepared below",
        "tests/protocol/test_one_signature.py::test_member_that_moved_on_votes_no_more_for_what_it_prepared_below",
        "mine.value != value_hash or view != self.view or view",
        "mine.value != value_hash or view",
    ),
    bug(
        "restored prepares are not counted",
        "tests/protocol/test_one_signature.py::test_restored_prepares_and_votes_count_like_those_that_are_heard",
        """
        for view, value_hash in list(self._prepares):
            effects += self._try_vote(view, value_hash)
        """,
        """

        """,
    ),
    bug(
        "two thirds rounded down",
        "tests/protocol/test_one_signature.py::test_quorum_of_liars_is_more_than_two_thirds_of_all",
        "return 3 * count > 2 * voters",
        "return 3 * count >= 2 * voters",
    ),
    bug(
        "a leave beside a vote is nobody's fault",
        "tests/protocol/test_witness.py::test_signature_of_somebody_that_promised_to_leave_is_evidence",
        """
        about.leaves[peer] = signature
        return self._broken_leave(about, peer)
        """,
        """
        about.leaves[peer] = signature
        return []
        """,
    ),
    bug(
        "a lead is believed in a dispute of its own",
        "tests/protocol/test_accusations.py::test_word_of_a_lead_in_its_own_dispute_counts_for_itself_alone",
        "judged = other not in gone and (later.planner != other or other == me)",
        "judged = other not in gone",
    ),
    bug(
        "a lead leaves out whom it needs",
        "tests/protocol/test_probation.py::test_nobody_is_left_out_where_the_rest_are_no_quorum",
        "return out if train and self.is_quorum(rest) else frozenset()",
        "return out",
    ),
    bug(
        "a stranger that a closed swarm does not let in becomes a member",
        "tests/protocol/test_one_signature.py"
        "::test_stranger_whom_the_swarm_does_not_let_in_becomes_no_member_although_the_plan_has_it",
        " if p not in possible or not self._may_join(p)]",
        " if p not in possible]",
    ),
    bug(
        "whoever has no record yet may become a member by invite",
        "tests/protocol/test_invites.py::test_who_may_become_a_member_is_who_may_be_in",
        """
        return self._reason_revoked(peer, credential) is None and self._reason_unlisted(peer, credential) is None
        """,
        """
        return self._reason_revoked(peer, credential) is None and (
            record is None or self._reason_unlisted(peer, credential) is None
        )
        """,
    ),
    bug(
        "a state to go back to is known by its certificate alone",
        "tests/protocol/test_one_word.py::test_consent_to_go_back_to_nowhere_ends_no_lead",
        "return self._states.get(target)",
        "return next((d for t, d in self._states.items() if t.certificate == target.certificate), None)",
    ),
    bug(
        "a plan may count on a contribution that was not made",
        "tests/protocol/test_one_word.py::test_plan_that_counts_on_a_contribution_that_was_not_made_is_not_followed",
        "None if mine is None or mine.role != CONTRIBUTOR else mine.root",
        "None if mine is None else mine.root",
    ),
    bug(
        "finals stand that were signed by nobody in the plan",
        "tests/protocol/test_one_word.py::test_finals_of_owners_that_there_are_not_do_not_stand",
        "if results.place >= len(peers):",
        "if results.place >= 64:",
    ),
    bug(
        "a lead that went on to another view is waited for in its own",
        "tests/protocol/test_following.py"
        "::test_lead_that_went_on_to_another_view_is_followed_out_of_its_own_and_no_further",
        "gone |= promised.get(leader, 0) > view and not facts.agreement.proposed",
        "",
    ),
    bug(
        "an owner that says that it waits is excused to the end",
        "tests/protocol/test_disputes.py"
        "::test_owner_that_says_it_waits_and_gives_nobody_its_finals_has_its_time_and_no_more",
        "over = {peer for peer in self._excused(plan, alive) if self._excuses.over(peer)}",
        "over = set[PeerId]()",
    ),
    bug(
        "with every plan an owner is excused anew",
        "tests/protocol/test_disputes.py"
        "::test_owner_that_says_it_waits_and_gives_nobody_its_finals_has_its_time_and_no_more",
        "if self._in.get(peer) != plan.lineage:",
        "if self._in.get(peer) != plan.hash:",
    ),
    bug(
        "who waits itself takes another's excuse",
        "tests/protocol/test_accusations.py"
        "::test_excuse_holds_while_no_two_miss_its_finals_that_wait_for_nobody_and_accuse_nobody_else",
        "missing = {peer: some - waiting for peer, some in _accusers(late).items() if peer in living}",
        "missing = {peer: some for peer, some in _accusers(late).items() if peer in living}",
    ),
    bug(
        "who accuses itself keeps all others from being heard",
        "tests/protocol/test_disputes.py::test_word_about_nobody_else_in_the_plan_keeps_no_other_from_being_heard",
        "peers = tuple(peer for peer in message.peers if peer in remaining and peer != accuser)",
        "peers = tuple(peer for peer in message.peers if peer in remaining)",
    ),
    bug(
        "who accuses a stranger keeps all others from being heard",
        "tests/protocol/test_disputes.py::test_word_about_nobody_else_in_the_plan_keeps_no_other_from_being_heard",
        "peers = tuple(peer for peer in message.peers if peer in remaining and peer != accuser)",
        "peers = tuple(peer for peer in message.peers if peer != accuser)",
    ),
    bug(
        "a lead that accuses one after the other keeps its view",
        "tests/protocol/test_disputes.py"
        "::test_who_accuses_one_after_the_other_keeps_no_other_word_from_being_heard_for_long",
        "if self._excuses.unsettled(lead) and self._is_any_direct(plan, alive) and lead in self._missed(plan, alive):",
        "if lead in ():",
    ),
    bug(
        "the time of an accusation begins anew with a pause",
        "tests/protocol/test_disputes.py"
        "::test_who_accuses_one_after_the_other_keeps_no_other_word_from_being_heard_for_long",
        "self._stood.look({accuser for accuser, _ in disputes}, now)",
        "self._stood = self._stood if disputes else Accrued(pause_s=PAUSE_S)\n"
        "        self._stood.look({one for one, _ in disputes}, now)",
    ),
    bug(
        "a lead of a later view that orders nothing has the time of a reduction",
        "tests/protocol/test_meeting_views.py"
        "::test_lead_of_a_later_view_that_orders_nothing_has_no_time_for_a_whole_reduction",
        "return timeouts.REDUCE if has_planned else timeouts.REPLAN",
        "return timeouts.REDUCE",
    ),
    bug(
        "who cannot follow a lead's plan takes it for silent",
        "tests/protocol/test_one_word.py"
        "::test_lead_of_a_later_view_that_planned_has_the_time_of_a_reduction_also_from_who_cannot_follow_the_plan",
        "self._planned_in = max(self._planned_in, view)",
        "",
    ),
    bug(
        "all ask as often while nobody waits for anybody",
        "tests/protocol/test_membership.py"
        "::test_where_nobody_waits_for_anybody_all_ask_half_as_often_and_find_the_silent_within_the_bound",
        "seldom = CALM_TIMES if self.calm() else 1.0",
        "seldom = 1.0",
    ),
    bug(
        "a lead does not watch whose contributions it waits for",
        "tests/protocol/test_round_messages.py"
        "::test_members_wait_for_the_lead_and_a_lead_for_those_who_are_yet_to_announce_or_report",
        "return frozenset(facts.awaited() if plan is None else facts.remaining(plan) - facts.reported(plan))",
        "return frozenset(() if plan is None else facts.remaining(plan) - facts.reported(plan))",
    ),
    bug(
        "who sends a byte at a time holds a round up for ever",
        "tests/protocol/test_disputes.py::test_who_sends_a_byte_at_a_time_is_accused_at_the_deadline",
        "yield WatchReduction(machine.complete_at(), overdue=machine.is_overdue(self._now))",
        "yield WatchReduction(machine.complete_at())",
    ),
    bug(
        "a member leaves a lead that hears what holds a reduction up",
        "tests/protocol/test_one_word.py::test_plan_that_had_its_time_is_followed_by_one_that_has_twice_as_much",
        "return self._reduce_s() * (2 if self._repaired else 1) + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S",
        "return self._reduce_s() * (2 if self._repaired else 1) + PLAN_TIMEOUT_S",
    ),
    bug(
        "a death in the second half of a reduction leaves the others too little time",
        "tests/protocol/test_one_word.py"
        "::test_plan_without_one_who_died_has_its_whole_time_if_the_one_before_had_half_of_it",
        "self._note_plan(view, plan, now, WHOLE_SHARE / 2 if without_dead else WHOLE_SHARE)",
        "self._note_plan(view, plan, now, WHOLE_SHARE)",
    ),
    bug(
        "a lead has twice the time by going on without one who lives",
        "tests/protocol/test_one_word.py"
        "::test_plan_without_one_who_died_has_its_whole_time_if_the_one_before_had_half_of_it",
        "without_dead = plan is not None and not facts.dead_since.keys().isdisjoint(plan.evicted)",
        "without_dead = plan is not None and bool(plan.evicted)",
    ),
    bug(
        "three that do not reach one of many cost it its place",
        "tests/protocol/test_disputes.py::test_member_that_does_not_reach_some_of_many_keeps_its_place",
        "needed = 2 if cut >= others else max(CUT_LEAST, ceil(cut_share * len(others)))",
        "needed = 2 if cut >= others else CUT_LEAST",
    ),
    bug(
        "who may yet answer goes along with one who died",
        "tests/protocol/test_round_stalls.py::test_who_may_yet_answer_does_not_go_along_with_one_who_died",
        "lost -= {peer for peer in lost if self._may_answer(plan, peer, now)}",
        "",
    ),
    bug(
        "who is cut off from some and evicted in the end has lost a dispute",
        "tests/protocol/test_accusations.py::test_who_is_cut_off_from_three_lost_no_dispute",
        "accusers.get(p, set()), said, living, cut_share=0.0)",
        "accusers.get(p, set()), said, living)",
    ),
    bug(
        "a lead names whom it would refuse",
        "tests/protocol/test_enlisting.py::test_wish_of_one_who_is_admitted_no_more_is_neither_named_nor_missed",
        "return self.may_join(peer) and self.may_enlist(peer, since)",
        "return self.may_enlist(peer, since)",
    ),
    bug(
        "who hears of a plan last is accused by the others before it is heard",
        "tests/protocol/test_disputes.py::test_member_that_does_not_reach_some_of_many_keeps_its_place",
        "return in_crowd(RELAY_SETTLE_S, len(plan.participants))",
        "return REPLAN_SETTLE_S",
    ),
    bug(
        "a lead gives a reduction more time before it hears what holds it up",
        "tests/protocol/test_disputes.py::test_who_sends_a_byte_at_a_time_is_accused_at_the_deadline",
        "return self._facts.is_overdue(plan, now - OVERDUE_SETTLE_S)",
        "return self._facts.is_overdue(plan, now)",
    ),
    bug(
        "who takes all relays leaves the relay without one",
        "tests/protocol/test_disputes.py::test_relay_that_is_sent_nothing_by_whom_it_relays_keeps_its_place",
        "pairs |= {pair for pair in plan.relayed if losers.isdisjoint(pair)}",
        "pass",
    ),
    bug(
        "who accuses now and then has done so all the while",
        "tests/protocol/test_disputes.py::test_who_accuses_now_and_then_while_all_is_slow_keeps_its_place",
        "self._stood = Accrued(pause_s=PAUSE_S)",
        "self._stood = Accrued()",
    ),
    bug(
        "two that are cut off from one are believed",
        "tests/protocol/test_disputes.py::test_member_cut_from_one_which_another_accuses_keeps_its_place",
        "len(_voices(plan, accused, cut)) >= needed",
        "len(_voices(plan, accused, cut)) >= 2",
    ),
    bug(
        "a lead that plans again in place of proposing has the time for that anew",
        "tests/protocol/test_disputes.py::test_lead_that_plans_again_after_all_have_reported_has_no_more_time_for_it",
        "self._reported_s += now - self.since",
        "self._reported_s += 0.0",
    ),
    bug(
        "a plan that had half its time gives its lead twice as much",
        "tests/protocol/test_disputes.py::test_lead_that_plans_again_after_all_have_reported_has_no_more_time_for_it",
        "elif self._had_its_time(took_s, share) and self._doublings < DOUBLINGS_LIMIT:",
        "elif 2 * took_s >= self._reduce_s() and self._doublings < DOUBLINGS_LIMIT:",
    ),
    bug(
        "who took an accusation back has no excuse for a while",
        "tests/node/rounds/test_pace.py"
        "::test_node_that_waits_for_nothing_that_comes_accuses_and_when_it_does_come_is_excused_all_the_while",
        "if self._waits_since.note(bool(waiting.contributions), now) >= self._waiting_s:",
        "if self._waits_since.note(bool(waiting.contributions - direct), now) >= self._waiting_s:",
    ),
    bug(
        "what is overdue is accused also where all are slow",
        "tests/node/rounds/test_pace.py"
        "::test_of_a_reduction_that_had_its_time_who_lacks_little_says_what_however_steadily_it_comes",
        "owing = waiting.contributions if 2 * len(waiting.contributions) <= len(self._contributors) else frozenset()",
        "owing = waiting.contributions",
    ),
    bug(
        "a lead that dies while all train is given up at once",
        "tests/protocol/test_following.py"
        "::test_lead_that_is_dead_while_all_train_is_given_up_only_when_half_of_them_are_done",
        "return bool(self._stage() != timeouts.TRAIN or asked or not facts.awaited())",
        "return True",
    ),
    bug(
        "who would go back waits for a dead lead",
        "tests/protocol/test_following.py::test_dead_lead_is_given_up_while_all_train_where_somebody_would_go_back",
        "return bool(self._stage() != timeouts.TRAIN or asked or not facts.awaited())",
        "return bool(self._stage() != timeouts.TRAIN or not facts.awaited())",
    ),
    bug(
        "where no member trains a dead lead is waited for",
        "tests/protocol/test_following.py"
        "::test_dead_lead_is_given_up_where_no_member_trains_and_a_newcomer_has_contributed",
        "return bool(self._stage() != timeouts.TRAIN or asked or not facts.awaited())",
        "return bool(self._stage() != timeouts.TRAIN or asked)",
    ),
    bug(
        "who sees a lead back last of all goes on without the others",
        "tests/protocol/test_following.py"
        "::test_lead_that_is_back_a_moment_after_half_are_done_keeps_its_view_and_who_knows_better_is_followed",
        "awaited = not moved_on and (may_come or self._may_be_back(leader, now))",
        "awaited = not moved_on and may_come",
    ),
    bug(
        "half of all are out of excuses at once",
        "tests/protocol/test_accusations.py::test_half_of_all_are_excused_to_the_end",
        "return over if 2 * len(over) < len(_living(plan, alive)) else set()",
        "return over",
    ),
    bug(
        "in a reduction begun anew nobody is excused any more",
        "tests/protocol/test_accusations.py::test_in_a_reduction_begun_anew_an_owner_is_excused_for_twice_as_long",
        "least_s = max(2 * self._limit_s.get(peer, 0.0), in_crowd(EXCUSED_S, self._nodes))",
        "least_s = max(self._limit_s.get(peer, 0.0), in_crowd(EXCUSED_S, self._nodes))",
    ),
    bug(
        "every plan renews the patience with its lead",
        "tests/protocol/test_one_word.py"
        "::test_lead_that_plans_again_and_again_keeps_its_view_no_longer_than_two_plans_do",
        "elif self._had_its_time(took_s, share) and self._doublings < DOUBLINGS_LIMIT:",
        "elif took_s >= 0:",
    ),
    bug(
        "a lead that plans again at each deadline keeps its view for ever",
        "tests/protocol/test_one_word.py::test_lead_that_plans_again_at_each_deadline_comes_to_an_end",
        "elif self._had_its_time(took_s, share) and self._doublings < DOUBLINGS_LIMIT:",
        "elif self._had_its_time(took_s, share):",
    ),
    bug(
        "the relays of a lead that was replaced stay",
        "tests/protocol/test_disputes.py::test_whom_a_lead_that_fell_silent_led_through_itself_stays",
        "return revised if plan.view == facts.agreement.view else self._relayed(revised)",
        "return revised",
    ),
    bug(
        "a relay that runs late is taken to have nothing to say",
        "tests/protocol/test_disputes.py::test_silence_of_relays_that_run_late_is_held_against_nobody",
        "late_s = RELAY_LATE_S if pair_of(*dispute) in plan.relayed else 0.0",
        "late_s = 0.0",
    ),
    bug(
        "a lead begins as many reductions as it likes",
        "tests/protocol/test_one_word.py::test_lead_begins_only_so_many_reductions_in_a_view",
        "if len(begun) > LINEAGES_LIMIT:",
        "if len(begun) > 1000 * LINEAGES_LIMIT:",
    ),
    bug(
        "a lead that waits for a last report says nothing of it",
        "tests/protocol/test_meeting_views.py"
        "::test_report_that_came_to_one_alone_makes_nobody_leave_a_lead_that_waits_for_it",
        "return facts.is_quorum(facts.reported(plan))",
        "return False",
    ),
    bug(
        "a round waits for ever for the few whose turn it is",
        "tests/protocol/test_one_word.py"
        "::test_those_whose_turn_it_is_and_that_train_for_ever_keep_no_round_from_being_half_ready",
        "or (ready and of_all)",
        "or (not ready and of_all)",
    ),
    bug(
        "a lead keeps whom enough accuse until the time of its view is over",
        "tests/protocol/test_meeting_views.py::test_lead_that_goes_on_with_whom_enough_accuse_is_left",
        "if gone or silent or idle or self._is_accused",
        "if gone or silent or self._is_accused",
    ),
    bug(
        "a lead that plans again has its time anew to go on without whom enough accuse",
        "tests/protocol/test_meeting_views.py::test_lead_that_goes_on_with_whom_enough_accuse_is_left",
        "self._accused &= {*plan.remaining, plan.planner}",
        "self._accused &= {plan.planner}",
    ),
    bug(
        "the time of a view begins with whoever comes to it first",
        "tests/protocol/test_meeting_views.py"
        "::test_who_was_alone_with_one_that_may_not_sign_goes_on_with_the_first_that_is_back",
        "if view and not facts.is_quorum({facts.me, *(peer for peer, later in promised.items() if later >= view)}):",
        "if not view and not promised and not facts.has_quorum():",
    ),
    bug(
        "a lead tries who is lost again, though others would do that are in a later view",
        "tests/protocol/test_one_word.py"
        "::test_lead_gives_up_its_view_where_only_those_in_a_later_one_make_up_for_who_is_lost",
        "if again and facts.is_quorum(kept.keys() | (facts.ahead() & facts.alive)):",
        "if facts.is_quorum(kept.keys()):",
    ),
    bug(
        "a lead begins another reduction that nobody follows, and stays",
        "tests/protocol/test_one_word.py::test_lead_that_has_begun_all_that_it_may_gives_up_its_view",
        "if not self._may_begin(order):",
        "if self._may_begin(order) is None:",
    ),
    bug(
        "a lead that has too few begins all the reductions of its view within seconds",
        "tests/protocol/test_one_word.py"
        "::test_lead_that_lost_too_many_to_go_on_tries_the_same_again_more_and_more_rarely",
        "if facts.gave_up == view or self._tried.rests(view, candidates, now):",
        "if facts.gave_up == view:",
    ),
    bug(
        "who spoke of many plans may speak of no other",
        "tests/protocol/test_one_word.py"
        "::test_reports_and_accusations_of_many_plans_keep_nobody_from_speaking_of_the_next",
        """
        make_room(self.reports, report.plan, sender)
        """,
        """
        if sum(sender in row for row in self.reports.values()) >= 64:
            return
        """,
    ),
    bug(
        "a report that somebody else brings takes the place of a newer one",
        "tests/protocol/test_one_word.py::test_report_that_somebody_else_brings_takes_the_place_of_none",
        "known = peer == self.me or peer in self.reports.get(change.report.plan, {})",
        "known = peer == self.me",
    ),
    bug(
        "words of who takes no part are kept",
        "tests/protocol/test_one_word.py::test_words_of_who_takes_no_part_are_not_kept",
        "if not self._is_heard(sender, rule.senders):",
        "if False:",
    ),
    bug(
        "one peer fills what the witness keeps of values",
        "tests/protocol/test_witness.py::test_values_that_nobody_signed_take_the_room_of_none_that_others_bring",
        "bringer = sender if sender in about.voting.electorate(about.base) else None",
        "bringer = None",
    ),
    bug(
        "votes for what there is not hide two votes",
        "tests/protocol/test_witness.py::test_votes_for_what_there_is_not_hide_no_two_votes",
        "full = len(said) > 1 and not (unknown and value_hash in about.values)",
        "full = len(said) > 1",
    ),
    bug(
        "the first view change of a member hides its next",
        "tests/protocol/test_witness.py::test_view_change_with_an_invented_certificate_hides_no_other_one",
        "if known is not None and known.prepared <= move.prepared:",
        "if known is not None:",
    ),
    bug(
        "who left in one certificate and signed the other is not named",
        "tests/protocol/test_forks.py::test_who_left_in_one_and_signed_the_other_is_named",
        "return tuple(sorted(one & other | left))",
        "return tuple(sorted(one & other))",
    ),
    bug(
        "contributions of strangers make a round half ready",
        "tests/protocol/test_one_word.py::test_contributions_of_strangers_make_no_round_half_ready",
        " if r.role == CONTRIBUTOR and p in self.returners}",
        " if r.role == CONTRIBUTOR}",
    ),
    bug(
        "sums are signed by the hash of a plan that was never seen",
        "tests/protocol/test_one_word.py::test_revision_of_a_plan_that_was_not_seen_is_not_followed",
        """
        return known is not None
        """,
        """
        return True
        """,
    ),
    bug(
        "a plan is remembered only if it is followed",
        "tests/protocol/test_one_word.py::test_plan_that_came_too_late_to_be_followed_is_one_that_was_seen",
        "self._note_origin(sender, plan)",
        "",
    ),
    bug(
        "every question of a lead that evicts is answered",
        "tests/protocol/test_one_word.py"
        "::test_lead_that_evicts_again_and_again_is_answered_once_for_each_of_its_questions",
        "return question not in asked",
        "return True",
    ),
    bug(
        "a value bans everybody of whom something is proven",
        "tests/protocol/test_bans.py::test_keys_that_take_no_part_fill_no_value_whatever_is_proven_of_them",
        """
        if peer not in banned and peer in among:
        """,
        """
        if peer not in banned:
            among = (*among, peer)
        """,
    ),
    bug(
        "whatever anybody signs is verified",
        "tests/protocol/test_certificate.py::test_what_anybody_can_sign_is_hardly_looked_at",
        "if not trusted and not set(certificate.signers) <= set(voting.electorate(previous)):",
        "if False:",
    ),
    bug(
        "half of an electorate without the last planner is a quorum",
        "tests/protocol/test_certificate.py::test_quorum_agrees_with_its_other_wording_for_all_sets_and_leaves",
        "return 2 * weight(remaining.intersection(supporters)) > weight(remaining)",
        "return 2 * weight(remaining.intersection(supporters)) >= weight(remaining)",
    ),
    bug(
        "who left counts among those who support",
        "tests/protocol/test_certificate.py::test_quorum_agrees_with_its_other_wording_for_all_sets_and_leaves",
        "return 2 * weight(remaining.intersection(supporters)) > weight(remaining)",
        "return 2 * weight(electorate.intersection(supporters)) > weight(remaining)",
    ),
    bug(
        "the last planner's vote breaks no tie",
        "tests/protocol/test_certificate.py::test_quorum_is_a_majority_or_half_with_the_planner",
        "PLANNER_VOTE_WEIGHT = 3",
        "PLANNER_VOTE_WEIGHT = 2",
    ),
    bug(
        "a vote is sent before it is written",
        "tests/protocol/test_agreement.py::test_agreement_persists_before_it_sends",
        """
        Persist(self._record("vote", view, value, prepared=prepared)),
        Broadcast(vote),
        """,
        """
        Broadcast(vote),
        Persist(self._record("vote", view, value, prepared=prepared)),
        """,
    ),
    bug(
        "a prepare is sent before it is written",
        "tests/protocol/test_agreement.py::test_agreement_persists_before_it_sends",
        """
        Persist(self._record("prepare", view, proposal.value)),
        Broadcast(prepare),
        """,
        """
        Broadcast(prepare),
        Persist(self._record("prepare", view, proposal.value)),
        """,
    ),
    bug(
        "a promise is sent before it is written",
        "tests/protocol/test_agreement.py::test_agreement_persists_before_it_sends",
        """
        Persist(self._record("promise", view)),
        Broadcast(change),
        """,
        """
        Broadcast(change),
        Persist(self._record("promise", view)),
        """,
    ),
    bug(
        "a proposal is sent before it is written",
        "tests/protocol/test_agreement.py::test_agreement_persists_before_it_sends",
        """
        Persist(self._record("propose", self.view, value, moves=moves, prepared=prepared)),
        Broadcast(proposal),
        """,
        """
        Broadcast(proposal),
        Persist(self._record("propose", self.view, value, moves=moves, prepared=prepared)),
        """,
    ),
    bug(
        "a leave is sent before it is written",
        "tests/lab/explore/test_agreement.py::test_every_schedule_keeps_every_promise_and_certifies_one_value",
        'return [Persist(self._record("leave", 0)), Broadcast(message)]',
        'return [Broadcast(message), Persist(self._record("leave", 0))]',
    ),
    bug(
        "a vote is written without its prepare certificate",
        "tests/protocol/test_agreement.py::test_agreement_persists_before_it_sends",
        'Persist(self._record("vote", view, value, prepared=prepared)),',
        'Persist(self._record("vote", view, value)),',
    ),
    bug(
        "a member leaves a round in which it signed",
        "tests/protocol/test_agreement.py::test_member_that_voted_may_not_leave_this_round",
        "if self.standing is not Standing.OPEN or self._signed or not may_leave:",
        "if self.standing is not Standing.OPEN:",
    ),
    bug(
        "the first prepare certificate stays the highest",
        "tests/lab/explore/test_agreement.py::test_every_schedule_keeps_every_promise_and_certifies_one_value",
        "if self._highest is None or view >= self._highest.prepared.view:",
        "if self._highest is None:",
    ),
    bug(
        "the lead carries the lowest certificate forward",
        "tests/protocol/test_agreement.py::test_votes_of_different_views_are_not_counted_together",
        "return max(carried, key=lambda one: one.prepared.view, default=None)",
        "return min(carried, key=lambda one: one.prepared.view, default=None)",
    ),
    bug(
        "the lowest certificate of a quorum compels",
        "tests/protocol/test_agreement.py::test_lead_that_alone_saw_the_certificate_and_slept_agrees_with_the_others",
        "highest = max(moves.changes, key=lambda one: one.prepared)",
        "highest = min(moves.changes, key=lambda one: one.prepared)",
    ),
    bug(
        "a view change with a certificate of the view that it opens",
        "tests/protocol/test_agreement.py::test_contradictions_are_blamed_on_their_sender",
        "if prepared.view >= change.view or not follows(value, previous, voting=voting):",
        "if prepared.view > change.view or not follows(value, previous, voting=voting):",
    ),
    bug(
        "a certificate counts a signer twice",
        "tests/protocol/test_certificate.py::test_certificate_that_counts_a_signer_twice_is_refused",
        "if len(set(certificate.signers)) != len(certificate.signers):",
        "if len(certificate.signers) != len(certificate.signatures):",
    ),
    bug(
        "a value follows one of the same round on another base",
        "tests/protocol/test_certificate.py::test_value_that_does_not_follow_is_refused",
        """
        and value.base == previous.hash
        """,
        """

        """,
    ),
    bug(
        "a value of another term follows",
        "tests/protocol/test_certificate.py::test_value_that_does_not_follow_is_refused",
        """
        and value.term == previous.next_term
        """,
        """

        """,
    ),
    bug(
        "leaves in a value that nobody signed",
        "tests/protocol/test_one_signature.py::test_member_that_lists_all_others_as_gone_certifies_nothing",
        """
        and all(verify_leave(peer, value.base, one) for peer, one in zip(value.leaves, leaves, strict=True))
        """,
        """

        """,
    ),
    bug(
        "signatures of a certificate are looked at for the view alone",
        "tests/protocol/test_certificate.py::test_certificate_of_exactly_a_quorum_holds_and_of_one_less_does_not",
        "if not verify_step(domain, signer, certificate.view, value.hash, signature):",
        "if not verify_step(domain, signer, certificate.view, value.hash, certificate.signatures[0]):",
    ),
    bug(
        "a rollback that drops members without their leave",
        "tests/protocol/test_terms.py::test_rollback_with_anything_else_does_not_follow",
        """
        and set(value.members) == set(previous.members) - set(value.leaves)
        """,
        """
        and set(value.members) <= set(previous.members) - set(value.leaves)
        """,
    ),
    bug(
        "the leads of every round stand in one order",
        "tests/protocol/test_certificate.py::test_lead_order_depends_on_swarm_term_and_round_only",
        'key=lambda peer: domain_hash("lead", previous.swarm, position, peer.encode())',
        'key=lambda peer: domain_hash("lead", previous.swarm, peer.encode())',
    ),
    bug(
        "two votes of one member in one view are taken",
        "tests/protocol/test_agreement.py::test_contradictions_are_blamed_on_their_sender",
        """
        for (view, value_hash), row in steps.items():
            if view == message.view and value_hash != message.value and sender in row:
                raise RemoteError(f"two {type(message).__name__.lower()}s in view {view}", peer=sender)
        """,
        """

        """,
    ),
    bug(
        "who signed in a round is believed to leave it",
        "tests/protocol/test_agreement.py::test_contradictions_are_blamed_on_their_sender",
        "if sender in self.promised() or sender not in self.voting.may_leave(self.previous):",
        "if sender in self._votes:",
    ),
    bug(
        "a member prepares below the view that it promised",
        "tests/lab/explore/test_agreement.py::test_every_schedule_keeps_every_promise_and_certifies_one_value",
        "open_views = [v for v in self._proposals if v >= self.view and v not in self._my_prepares]",
        "open_views = [v for v in self._proposals if v not in self._my_prepares]",
    ),
    bug(
        "a proposal by who does not lead its view",
        "tests/protocol/test_agreement.py::test_propose_by_another_than_the_lead_is_refused",
        "if sender != self.lead(view):",
        "if sender not in self._order:",
    ),
    bug(
        "a proposal that its lead did not sign",
        "tests/protocol/test_one_signature.py::test_proposal_whose_signature_is_anothers_is_refused",
        "if not verify_step(PROPOSE_DOMAIN, sender, view, value.hash, message.signature):",
        "if not message.signature:",
    ),
    bug(
        "a Prepare counts as a vote",
        "tests/protocol/test_agreement.py::test_agreement_with_real_keys_certifies_what_the_lead_proposed",
        "if self._take_step(VOTE_DOMAIN, self._votes, sender, message):",
        "if self._take_step(PREPARE_DOMAIN, self._votes, sender, message):",
    ),
    bug(
        "a Report that its sender did not sign is taken",
        "tests/protocol/test_one_signature.py"
        "::test_proposal_that_leaves_out_a_member_that_reported_is_refused_with_its_report",
        "if not verify_report(sender, report):",
        "if not report.signature:",
    ),
    bug(
        "a vote for a rollback to a state with another digest",
        "tests/protocol/test_terms.py::test_member_votes_to_go_back_once_it_holds_that_state_and_a_quorum_consented",
        "same = digest == value.digest",
        "same = bool(digest)",
    ),
    bug(
        "a rollback to a certified round with another digest",
        "tests/protocol/test_terms.py::test_rollback_goes_back_to_a_certified_round_of_the_branch_only",
        "return self._branch[round].hash == certificate and (first_to_initial or digest == value.digest)",
        "return self._branch[round].hash == certificate",
    ),
    bug(
        "an unsigned certificate makes a fork",
        "tests/protocol/test_forks.py::test_certificate_that_does_not_hold_is_no_fork",
        """
        check_certificate(certificate, previous, voting=self._voting_after(previous))
        """,
        """

        """,
    ),
    bug(
        "a chain without the checkpoint of a link is taken in the same term",
        "tests/protocol/test_forks.py::test_chain_contains_every_checkpoint_of_its_own_past_and_none_of_another",
        "or self.head.term.rebases > checkpoint.term.rebases",
        "or self.head.term.rebases >= checkpoint.term.rebases",
    ),
    bug(
        "a rebase that the authority did not sign",
        "tests/protocol/test_terms.py::test_rebase_is_the_authoritys_alone_and_stands_on_what_it_names",
        "if not is_signed(rebase, authority):",
        "if not rebase.signature:",
    ),
    bug(
        "who never saw what began a reduction answers to its evictions",
        "tests/protocol/test_round_messages.py"
        "::test_member_that_never_saw_the_plan_that_is_repaired_is_silent_and_planned_anew",
        "follows = self.me not in message.evicted and message.lineage in self._origins",
        "follows = self.me not in message.evicted",
    ),
    bug(
        "who never saw the plan of a lead that died goes with it",
        "tests/protocol/test_round.py::test_member_that_the_plan_of_a_dead_lead_did_not_reach_stays_and_is_counted",
        "unaware = self._unaware(plan, eviction, gone)",
        "unaware: set[PeerId] = set()",
    ),
    bug(
        "finals that are held are thrown away for who hears nothing of the plan",
        "tests/protocol/test_round_messages.py"
        "::test_member_that_never_saw_the_plan_is_evicted_only_where_a_final_is_held_or_it_hears_nothing",
        "if plan.view == view or any(facts.held[peer].chunks for peer in answers):",
        "if plan.view == view:",
    ),
    bug(
        "who is in another view is taken to have missed the plan",
        "tests/protocol/test_round_messages.py"
        "::test_member_that_never_saw_the_plan_is_evicted_only_where_a_final_is_held_or_it_hears_nothing",
        "return {p for p in facts.candidates().keys() & set(gone) - answers if promised.get(p) == view}",
        "return facts.candidates().keys() & set(gone) - answers",
    ),
    bug(
        "a lead that was free once is not compelled any more",
        "tests/protocol/test_agreement.py"
        "::test_free_lead_that_hears_of_a_prepared_value_before_it_proposes_carries_it_forward_by_its_proof",
        """
        if not self.leading or self.view == 0 or self.view in self._proposed or not self.is_quorum(changes):
            return []
        """,
        """
        if not self.leading or self.view == 0 or self.view in self._proposed or not self.is_quorum(changes):
            return []
        if self.view in self._freed:
            return []
        """,
    ),
    bug(
        "whom a rebase left out counts at once",
        "tests/protocol/test_terms.py::test_rebase_takes_the_place_of_what_came_after_and_goes_on_with_its_electorate",
        """
        if height and isinstance(self._entries[height - 1], Rebase):
            break
        """,
        """

        """,
    ),
    bug(
        "a rebase that names another state than its round's",
        "tests/protocol/test_terms.py::test_rebase_is_the_authoritys_alone_and_stands_on_what_it_names",
        "and (value.round, value.digest) == (parent.state_round, parent.digest)",
        "and value.round == parent.state_round",
    ),
    bug(
        "consents in a rollback that nobody signed",
        "tests/protocol/test_terms.py::test_consents_of_a_quorum_are_verified",
        """
        and is_quorum(previous, rollback.consenting, value.leaves, voting=voting)
        and all(verify_consent(peer, value.base, rollback.target, signature) for peer, signature in signed)
        """,
        """
        and is_quorum(previous, rollback.consenting, value.leaves, voting=voting)
        """,
    ),
    bug(
        "the banned come back as returners",
        "tests/protocol/test_bans.py::test_certificate_with_bans_needs_no_evidence_and_changes_the_electorate",
        "return frozenset(peer for value in values for peer in value.members).difference(self.banned)",
        "return frozenset(peer for value in values for peer in value.members)",
    ),
    bug(
        "a chain that does not hold keeps a newcomer from all others",
        "tests/protocol/test_chain_choice.py::test_chain_that_does_not_hold_is_left_out_and_hinders_nobody",
        """
                self._add_places(peer, (yield LookElsewhere(peer, self._copy())), found)
        except (NetworkError, RemoteError) as error:
        """,
        """
                self._add_places(peer, (yield LookElsewhere(peer, self._copy())), found)
        except NetworkError as error:
        """,
    ),
    bug(
        "who serves what does not hold ends the whole errand",
        "tests/protocol/test_catching_up.py::test_another_chain_is_gone_over_to_beneath_a_later_rebase_alone",
        """
            yield from self._extend_from(peer)
        except (NetworkError, RemoteError) as error:
        """,
        """
            yield from self._extend_from(peer)
        except NetworkError as error:
        """,
    ),
    bug(
        "of two chains that part the longer one is taken",
        "tests/protocol/test_chain_choice.py::test_two_chains_are_both_refused_and_the_error_names_who_serves_which",
        """
        if common == second.height:
            return one
        """,
        """
        if common <= second.height:
            return one
        """,
    ),
    bug(
        "a newcomer takes a chain without its link's checkpoint",
        "tests/protocol/test_chain_choice.py"
        "::test_chain_that_lacks_the_checkpoint_is_not_taken_though_nobody_has_another",
        "if checkpoint is None or chain.allows(checkpoint):",
        "if checkpoint is None or chain.height:",
    ),
    bug(
        "what the authority abandoned is as good as what it went on with",
        "tests/protocol/test_chain_choice.py::test_later_rebase_of_the_authority_goes_before_what_it_abandoned",
        "if first.head.term.rebases != second.head.term.rebases:",
        "if first.head.term.rebases != first.head.term.rebases:",
    ),
    bug(
        "one place of a peer speaks for all its places",
        "tests/protocol/test_chain_choice.py::test_one_peer_in_two_places_is_named_by_them",
        "found.update(served)",
        "found.update(list(served.items())[:1])",
    ),
    bug(
        "a newcomer takes the entries of whoever answers first",
        "tests/protocol/test_catching_up.py::test_newcomer_takes_no_entry_before_it_has_chosen_among_the_chains",
        """
        if self._choice.pending:
            try:
        """,
        """
        if not peers:
            try:
        """,
    ),
    bug(
        "who has nothing yet takes what a claim shows it",
        "tests/protocol/test_catching_up.py::test_claim_of_who_lacks_an_entry_is_looked_into_by_choosing_too",
        "yield from (self._choose() if self._choice.pending else self._extend_from(peer))",
        "yield from self._extend_from(peer)",
    ),
    bug(
        "the chain gives way to another without a later rebase",
        "tests/protocol/test_catching_up.py::test_another_chain_is_gone_over_to_beneath_a_later_rebase_alone",
        """
        if not later.certificates:
            return  # there is no rebase of which this node does not know
        """,
        """
        """,
        "if theirs.head.term.rebases > chain.head.term.rebases:",
        "if theirs.head.term.rebases >= chain.head.term.rebases:",
    ),
    bug(
        "who has another chain is not looked at",
        "tests/protocol/test_catching_up.py::test_another_chain_is_gone_over_to_beneath_a_later_rebase_alone",
        "self._fork_watch.suspect(peer, self._search.clock.now)",
        "self._scores.showed(peer)",
    ),
    bug(
        "who claims the longest chain is waited for alone",
        "tests/protocol/test_chain_choice.py"
        "::test_who_serves_an_entry_every_ten_seconds_keeps_a_newcomer_waiting_no_longer_than_a_comparison_takes",
        "if hurries and self._clock.now - began >",
        "if False and self._clock.now - began >",
    ),
    bug(
        "each chain is fetched from its beginning, however slowly it comes",
        "tests/protocol/test_chain_choice.py::test_what_came_of_who_became_slow_is_asked_of_nobody_again",
        "longest = begun\n",
        "longest = self._copy()\n",
    ),
    bug(
        "what a peer serves where its chain is said to part need not hold",
        "tests/protocol/test_chain_choice.py"
        "::test_who_serves_an_entry_every_ten_seconds_keeps_a_newcomer_waiting_no_longer_than_a_comparison_takes",
        "first = ChainPart(certificates=(parts.theirs,), head=parts.head)",
        "first = None",
    ),
    bug(
        "who was put off is not asked again",
        "tests/protocol/test_chain_choice.py::test_chain_that_parts_is_found_however_slowly_it_is_served",
        "yield self._of_each((*slow, *order), partial(self._fetch, longest, found))",
        "yield self._of_each(order, partial(self._fetch, longest, found))",
    ),
    bug(
        "two chains part one entry too early",
        "tests/protocol/test_chain_comparison.py::test_difference_is_found_wherever_it_is",
        "return middle + same\n",
        "return middle\n",
    ),
    bug(
        "a peer is compared with as often as it speaks",
        "tests/protocol/test_fork_watch.py"
        "::test_words_that_go_with_the_chain_cost_nothing_and_one_peer_is_compared_now_and_then",
        "recently = since is not None and now - since < PERIOD_S",
        "recently = since is not None and now - since < 0.0",
    ),
    bug(
        "all who are suspected are compared with at once",
        "tests/protocol/test_fork_watch.py::test_one_peer_after_the_other_is_compared",
        "if self._comparing or peer is None:",
        "if peer is None:",
    ),
    bug(
        "a fork that comparing showed stops nobody",
        "tests/protocol/test_member.py::test_member_compares_its_chain_with_who_speaks_of_another_beside_the_round",
        "if event.theirs is not None:",
        "if event.theirs is not None and event.peer == event.theirs.signers[0]:",
    ),
    bug(
        "a member that saw a fork signs on",
        "tests/protocol/test_member.py"
        "::test_member_that_hears_of_a_fork_keeps_it_passes_it_on_and_signs_nothing_before_a_rebase",
        "self._still = FORKED",
        "self._still = None",
    ),
    bug(
        "a fork binds no more in its own term",
        "tests/protocol/test_forks.py::test_fork_binds_until_the_authority_opens_another_term",
        "return head.term.rebases <= self.term.rebases",
        "return head.term.rebases < self.term.rebases",
    ),
    bug(
        "what was done in the round of a ban begins another",
        "tests/protocol/test_bans.py::test_ban_ends_with_its_rounds_and_its_evidence_serves_once",
        "return sentence is not None and done <= sentence.decided",
        "return sentence is not None and done < sentence.decided",
    ),
    bug(
        "a ban ends a round early",
        "tests/protocol/test_bans.py::test_ban_ends_with_its_rounds_and_its_evidence_serves_once",
        "return self.until == FOR_EVER or round <= self.until",
        "return self.until == FOR_EVER or round < self.until",
    ),
    bug(
        "a rebase pardons nobody",
        "tests/protocol/test_bans.py::test_rebase_pardons_whom_it_names",
        """
        self._sentences.pop(peer, None)
        """,
        """
        self._sentences.get(peer)
        """,
    ),
    bug(
        "a settled ban is voted for without its evidence",
        "tests/protocol/test_bans.py::test_member_votes_for_a_ban_only_once_it_holds_the_evidence",
        "if unproven(value, self._proven):",
        "if unproven(value, self._proven) and not self._proven:",
    ),
    bug(
        "an old word of a suspect clears it",
        "tests/protocol/test_membership.py::test_refutation_clears_a_suspect_only_if_it_is_newer",
        "if watched is None or incarnation <= watched.incarnation:",
        "if watched is None or incarnation < watched.incarnation:",
    ),
    bug(
        "a suspicion of an older incarnation counts",
        "tests/protocol/test_membership.py::test_accusation_of_another_makes_us_look_but_not_believe",
        "if watched is None or incarnation < watched.incarnation:",
        "if watched is None:",
    ),
    bug(
        "who is accused answers in the incarnation that was accused",
        "tests/protocol/test_membership.py::test_accused_refutes_with_a_newer_incarnation_but_does_not_flood",
        "self.incarnation = incarnation + 1",
        "self.incarnation = incarnation",
    ),
    bug(
        "anybody vouches for a peer of whom it was not asked",
        "tests/protocol/test_membership.py::test_indirect_ack_counts_only_from_those_asked_about_this_probe",
        "return watched if inquiry is not None and inquiry.nonce == nonce and via in inquiry.vias else None",
        "return watched if inquiry is not None and inquiry.nonce == nonce else None",
    ),
    bug(
        "one who cannot reach a peer confirms its death",
        "tests/protocol/test_membership.py::test_broken_connection_is_confirmed_when_nobody_asked_has_one",
        "nobody_has = inquiry is not None and bool(inquiry.vias) and inquiry.without == set(inquiry.vias)",
        "nobody_has = inquiry is not None and bool(inquiry.vias) and bool(inquiry.without)",
    ),
    bug(
        "a node that was stopped itself excuses everybody for ever",
        "tests/protocol/test_membership.py::test_always_late_machine_still_finds_its_dead",
        """
        watched.excuses += 1
        """,
        """
        watched.excuses += 0
        """,
    ),
    bug(
        "a head that went back to a state that is here is left alone until what is sought has come",
        "tests/protocol/test_member.py::test_a_head_that_went_back_to_a_state_that_is_here_is_gone_on_from_at_once",
        """
            yield from self._abandon_round()
            yield from self._take_part()
        """,
        """
            yield from self._abandon_round()
        """,
    ),
    bug(
        "a detector that runs late itself blames the others",
        "tests/protocol/test_membership.py::test_process_that_runs_late_itself_waits_longer_for_others",
        "self.lag.note(late_s - self.tick_s, now)",
        "self.lag.note(0.0, now)",
    ),
    bug(
        "how long a peer took to answer is not learnt",
        "tests/protocol/test_membership.py::test_process_that_gets_its_turn_every_few_seconds_is_suspected_once_at_most",
        "watched.round_trip.note(now - at, now)",
        "watched.round_trip.note(0.0, now)",
    ),
    bug(
        "what was late once is never forgotten",
        "tests/protocol/test_membership.py::test_lag_is_forgotten_once_it_is_over",
        "late_s = self._slowest_s * 0.5 ** ((now - self._at) / HALF_LIFE_S)",
        "late_s = self._slowest_s",
    ),
    bug(
        "a peer may say by late answers that it is never to be given up",
        "tests/protocol/test_lateness.py"
        "::test_nobody_has_itself_waited_for_longer_than_the_bound_however_late_it_answers",
        "self._slowest_s = max(before_s, min(late_s, self.limit_s) if late_s > NOTED_S else 0.0)",
        "self._slowest_s = max(before_s, late_s if late_s > NOTED_S else 0.0)",
    ),
    bug(
        "who left signs a prepare certificate",
        "tests/protocol/test_one_signature.py"
        "::test_who_left_counts_in_no_prepare_certificate_and_in_no_votes_where_leaves_are_not_taken_off",
        """
        and not set(prepared.signers).intersection(value.leaves)
        """,
        """

        """,
    ),
    bug(
        "votes of who left certify a value",
        "tests/protocol/test_one_signature.py"
        "::test_who_left_counts_in_no_prepare_certificate_and_in_no_votes_where_leaves_are_not_taken_off",
        "signers = sorted(peer for peer in row if peer not in value.leaves)",
        "signers = sorted(row)",
    ),
    bug(
        "a member that left stays a member",
        "tests/protocol/test_certificate.py::test_who_leaves_is_no_member_after_the_value_that_counts_its_leave",
        """
        and not set(value.leaves).intersection(value.members)
        """,
        """

        """,
    ),
    bug(
        "who was a member a round too long ago counts as a returner",
        "tests/protocol/test_certificate.py::test_chain_follows_the_electorate_it_certified",
        "for height in range(self.height, max(-1, self.height - rounds - 1), -1):",
        "for height in range(self.height, max(-1, self.height - rounds - 2), -1):",
    ),
    bug(
        "contributors vote where voters are named",
        "tests/protocol/test_voting.py::test_quorum_is_of_the_named_voters_whoever_else_contributes_and_whoever_leaves",
        "return self.named or previous.members",
        "return previous.members",
    ),
    bug(
        "a contributor without a vote leads",
        "tests/protocol/test_voting.py::test_named_voters_lead_in_turn_and_nobody_else_does",
        "voters = voting.electorate(previous)",
        "voters = previous.members",
    ),
    bug(
        "two thirds of those who contribute decide",
        "tests/protocol/test_voting.py::test_quorum_is_of_the_named_voters_whoever_else_contributes_and_whoever_leaves",
        "return are_enough(len(electorate.intersection(supporters)), len(electorate), voting.faults)",
        "return are_enough(len(set(supporters)), len(previous.members), voting.faults)",
    ),
    bug(
        "the leave of a named voter counts",
        "tests/protocol/test_voting.py::test_named_voters_promise_to_leave_no_round",
        "return () if self.named else previous.members",
        "return self.electorate(previous)",
    ),
    bug(
        "a contributor without a vote is left out",
        "tests/protocol/test_voting.py::test_proposal_that_leaves_out_a_contributor_is_refused_by_who_holds_its_report",
        "left_out = sorted(peer for peer in reported if peer in self.everyone and peer not in excused and not full)",
        "left_out = sorted(peer for peer in reported if peer in self.electorate and peer not in excused and not full)",
    ),
    bug(
        "the words of who has no vote are taken",
        "tests/protocol/test_voting.py::test_words_of_strangers_count_for_nothing",
        "sender not in self.electorate and type(message) is not Certificate",
        "sender not in self.everyone and type(message) is not Certificate",
    ),
    bug(
        "the founders vote on after a rebase that names others",
        "tests/protocol/test_voting.py::test_chain_is_checked_by_its_manifest_and_after_a_rebase_by_whom_that_names",
        "return replace(self, named=rebase.members) if self.named else self",
        "return self",
    ),
    bug(
        "an earlier certificate is judged by who votes now",
        "tests/protocol/test_voting.py"
        "::test_other_certificate_of_an_earlier_round_is_a_fork_by_the_voters_of_that_round_alone",
        "return self._votings[self._heights[value.hash]]",
        "return self.voting",
    ),
    bug(
        "a voter that was away can be a member only by a plan",
        "tests/protocol/test_voting.py"
        "::test_voter_that_was_away_is_a_member_again_by_its_own_report_without_being_planned",
        "possible = self._taking_part.get(value.plan, frozenset()) | self.electorate",
        "possible = self._taking_part.get(value.plan, frozenset())",
    ),
    bug(
        "three voters may lie",
        "tests/protocol/test_voting.py::test_lying_without_four_named_voters_is_refused_in_a_line_that_says_what_to_do",
        "if voting.faults is FaultModel.LYING and len(voting.named) < LYING_VOTERS_MIN:",
        "if voting.faults is FaultModel.LYING and not voting.named:",
    ),
    bug(
        "who is told of a suspicion does not look for itself",
        "tests/protocol/test_membership.py::test_stopped_process_is_dead_to_all_within_the_bound",
        "return self._ping(peer, watched, now) if idle else []",
        "return []",
    ),
    bug(
        "nobody is watched closely",
        "tests/protocol/test_membership.py::test_each_is_watched_closely_by_those_before_it_around_the_ring",
        "ring = set(next_around(answering, self.me, CLOSE_PEERS))",
        "ring = set[PeerId]()",
    ),
    bug(
        "whom a node waits for is watched no closer than others",
        "tests/protocol/test_membership.py::test_whom_this_node_waits_for_is_watched_closely",
        "(PROBE_INTERVAL_S if peer in awaited else silent_s)",
        "silent_s",
    ),
    bug(
        "who does not answer keeps its place on the ring",
        "tests/protocol/test_membership.py::test_one_that_falls_silent_with_all_that_watch_it_closely_costs_another_answer",
        "answering = sorted(peer for peer, probe in alive if probe is None or not probe.indirect)",
        "answering = sorted(peer for peer, _ in alive)",
    ),
    bug(
        "strangers come between members on the ring",
        "tests/protocol/test_membership.py::test_strangers_do_not_come_between_members_on_their_ring",
        "if self.me in first:",
        "if self.me in ():",
    ),
    bug(
        "all others are pinged every second",
        "tests/protocol/test_membership.py::test_quiet_net_stays_whole_at_ten_signs_of_life_a_second_for_each",
        "return max(PROBE_INTERVAL_S, peers / PROBES_PER_S)",
        "return PROBE_INTERVAL_S",
    ),
    bug(
        "nobody is pinged but who is watched closely",
        "tests/protocol/test_membership.py::test_one_of_which_nobody_tells_is_found_by_each_for_itself",
        "return max(PROBE_INTERVAL_S, peers / PROBES_PER_S)",
        "return 1000 * peers / PROBES_PER_S",
    ),
    bug(
        "a peer that answers late has others asked to pass messages on",
        "tests/protocol/test_membership.py::test_peer_that_answers_late_is_not_silent_until_it_has_had_its_time",
        "return watched.asked_at + max(silence_s, watched.round_trip.waited_s(now)) + self.lag.waited_s(now)",
        "return watched.asked_at + silence_s + self.lag.waited_s(now)",
    ),
    bug(
        "of a crowd who is silent for a moment is told of to all",
        "tests/protocol/test_membership.py::test_among_many_members_who_is_silent_has_longer_however_many_strangers_there_are",
        "return in_crowd(SILENCE_S, len(self.first()))",
        "return SILENCE_S",
    ),
    bug(
        "strangers give a silent member longer",
        "tests/protocol/test_membership.py::test_among_many_members_who_is_silent_has_longer_however_many_strangers_there_are",
        "return in_crowd(SILENCE_S, len(self.first()))",
        "return in_crowd(SILENCE_S, len(self._peers))",
    ),
    bug(
        "those on the ring are pinged no more seldom in a large swarm",
        "tests/protocol/test_membership.py::test_sixteen_at_rest_ask_twice_a_second_each_and_look_once_a_second",
        "return min(max(PROBE_INTERVAL_S, peers / CLOSE_PROBES_PER_S), CLOSE_INTERVAL_LIMIT_S)",
        "return PROBE_INTERVAL_S",
    ),
    bug(
        "those on the ring are pinged as seldom as all others in a large swarm",
        "tests/protocol/test_membership.py::test_stopped_process_is_dead_to_all_within_the_bound",
        "return min(max(PROBE_INTERVAL_S, peers / CLOSE_PROBES_PER_S), CLOSE_INTERVAL_LIMIT_S)",
        "return max(PROBE_INTERVAL_S, peers / CLOSE_PROBES_PER_S)",
    ),
    bug(
        "a detector rests for so long that who hangs is found too late",
        "tests/protocol/test_membership.py::test_detector_that_rests_finds_the_silent_within_its_bound",
        "rest_s = WAITING_TICK_S if self.awaited() else RESTING_TICK_S",
        "rest_s = 3 * (WAITING_TICK_S if self.awaited() else RESTING_TICK_S)",
    ),
    bug(
        "a detector that waits for somebody rests as long as one that waits for nobody",
        "tests/protocol/test_membership.py::test_detector_that_rests_finds_the_silent_within_its_bound",
        "rest_s = WAITING_TICK_S if self.awaited() else RESTING_TICK_S",
        "rest_s = RESTING_TICK_S",
    ),
    bug(
        "a detector sleeps through its deadlines",
        "tests/protocol/test_membership.py::test_detector_that_rests_wakes_up_for_each_deadline_and_for_a_silence",
        "rest_s = min(rest_s, watched.probe.deadline - now)",
        "pass",
    ),
    bug(
        "a detector that rests holds itself for late",
        "tests/protocol/test_membership.py::test_detector_at_rest_is_late_from_when_it_was_to_be_called",
        "late_s -= self._rested_s",
        "late_s -= 0.0",
    ),
    bug(
        "a detector that looks at each beat does not see that it is late each time",
        "tests/protocol/test_membership.py::test_detector_that_looks_at_each_beat_is_late_from_that_on",
        "self._rested_s = rest_s - self.tick_s",
        "self._rested_s = RESTING_TICK_S - self.tick_s",
    ),
    bug(
        "the answer of a connection is not known for that to a ping",
        "tests/protocol/test_membership.py::test_answer_of_a_connection_is_that_of_the_ping_whose_number_it_has",
        "if number_of(one) == number), number)",
        "if one == number), number)",
    ),
    bug(
        "a member's silence is counted from its last ping, not from the first that it left unanswered",
        "tests/protocol/test_membership.py::test_silence_over_a_link_is_noticed_though_others_vouch",
        "watched.asked_at = min(watched.asked_at, now)",
        "watched.asked_at = now",
    ),
    bug(
        "members do not know that they wait for the lead",
        "tests/protocol/test_round_messages.py"
        "::test_members_wait_for_the_lead_and_a_lead_for_those_who_are_yet_to_announce_or_report",
        "return frozenset((leader,))",
        "return frozenset()",
    ),
    bug(
        "what everybody has heard is sent again every three seconds",
        "tests/protocol/test_round_messages.py::test_what_is_not_news_is_sent_again_less_and_less_often",
        "self._resend_s = WAITING_RESEND_S if waits else min(2 * self._resend_s, RESEND_LIMIT_S)",
        "self._resend_s = RESEND_S",
    ),
    bug(
        "each of a crowd says all again as often as each of a few",
        "tests/protocol/test_round_messages.py::test_what_is_not_news_is_sent_again_less_and_less_often",
        "return in_crowd(self._resend_s, len(self._facts.alive))",
        "return self._resend_s",
    ),
    bug(
        "news is sent again as late as what is old",
        "tests/protocol/test_round_messages.py::test_what_is_not_news_is_sent_again_less_and_less_often",
        "self._resend_s = WAITING_RESEND_S if self.phase is Phase.TRAIN else RESEND_S",
        "pass",
    ),
    bug(
        "a certificate is passed on by nobody but the leads",
        "tests/protocol/test_member.py"
        "::test_certificate_is_told_to_all_by_two_and_by_who_is_done_and_passed_on_to_a_few_by_others",
        "for peer in next_around(sorted(self._here.linked()), self._me, CERTIFICATES_PASSED_ON):",
        "for peer in ():",
    ),
    bug(
        "who is done with its rounds says so to a few alone",
        "tests/protocol/test_member.py"
        "::test_certificate_is_told_to_all_by_two_and_by_who_is_done_and_passed_on_to_a_few_by_others",
        "if self._me in leads or self._departure.rounds_done(certificate.value.state_round):",
        "if self._me in leads:",
    ),
    bug(
        "a member that goes on is not known to have the last certificate",
        "tests/protocol/test_member.py"
        "::test_member_whose_rounds_are_done_lingers_until_the_others_know_and_no_longer_than_it_has_to",
        "if position > decided or (position == decided and isinstance(message, Certificate)):",
        "if position >= decided and isinstance(message, Certificate):",
    ),
    bug(
        "who decides first answers each vote that comes after with the certificate",
        "tests/protocol/test_member.py"
        "::test_what_comes_late_is_answered_with_the_certificate_but_not_while_all_count_the_same_votes",
        'told_at = max(self._decided_at, self._answered.get(peer, float("-inf")))',
        'told_at = self._answered.get(peer, float("-inf"))',
    ),
    bug(
        "a record that says something new says the same",
        "tests/protocol/test_records.py::test_record_says_the_same_whatever_its_rates_and_progress",
        """
        return self == msgspec.structs.replace(
            other,
        """,
        """
        return self.peer == other.peer or self == msgspec.structs.replace(
            other,
        """,
    ),
    bug(
        "a record that is new is believed unsigned",
        "tests/protocol/test_records.py::test_forged_record_is_refused_unless_it_is_old_all_the_same",
        """
    prove(envelope, peer=peer)
    if envelope.kind != NODE_RECORD_KIND:
        """,
        """
    if envelope.kind != NODE_RECORD_KIND:
        """,
    ),
    bug(
        "a record expires before it is renewed",
        "tests/protocol/test_records.py"
        "::test_record_is_renewed_so_that_gossip_passes_one_a_second_and_long_before_it_is_forgotten",
        "return min(max(RENEWAL_S, records), RECORD_TTL_S / 3)",
        "return max(RENEWAL_S, records)",
    ),
    bug(
        "where most answer late each is waited for no longer",
        "tests/protocol/test_membership.py"
        "::test_where_most_answer_late_all_are_waited_for_longer_and_where_one_does_only_that_one",
        "return lately[(len(lately) - 1) // 2] if lately else 0.0",
        "return 0.0",
    ),
    bug(
        "who came midway has all others wait for all its steps",
        "tests/protocol/test_member.py"
        "::test_who_came_while_the_others_trained_contributes_what_it_has_when_most_are_ready",
        "if late and machine.most_ready() and self._role() == TRAINING:",
        "if False:",
    ),
    bug(
        "the few steps of as many as the others cap the weight of all",
        "tests/protocol/test_member.py::test_of_two_who_came_later_makes_all_its_steps",
        "return 2 * done > trainers",
        "return 2 * done >= trainers",
    ),
    bug(
        "who came midway once is cut short in every round",
        "tests/protocol/test_member.py::test_who_began_the_round_with_the_others_makes_all_its_steps",
        """
        yield Apply(certificate)
        self._came_midway = False
        """,
        "yield Apply(certificate)",
    ),
    bug(
        "one that answers late has all others waited for",
        "tests/protocol/test_membership.py"
        "::test_where_most_answer_late_all_are_waited_for_longer_and_where_one_does_only_that_one",
        "return lately[(len(lately) - 1) // 2] if lately else 0.0",
        "return lately[-1] if lately else 0.0",
    ),
    bug(
        "a change of voters is in force a round too late",
        "tests/protocol/test_changing_voters.py::test_round_is_decided_by_those_who_voted_before_it_and_the_next_by_the_others",
        "return self._votings[-1]",
        "return self._votings[-2:][0]",
    ),
    bug(
        "a change of voters counts in the round that decides it",
        "tests/protocol/test_changing_voters.py::test_round_is_decided_by_those_who_voted_before_it_and_the_next_by_the_others",
        "check_certificate(entry, self.head, trusted=trusted, voting=self.voting)",
        "check_certificate(entry, self.head, trusted=trusted, voting=self.voting.after(entry.value))",
    ),
    bug(
        "a change of voters counts among the votes for it",
        "tests/lab/explore/test_agreement.py::test_every_schedule_between_two_changes_of_voters_certifies_one_value_by_those_of_its_round",
        """
        if not is_quorum(self.previous, signers, value.leaves, voting=self.voting):
            return None
        """,
        """
        if not is_quorum(self.previous, signers, value.leaves, voting=self.voting.after(value)):
            return None
        """,
    ),
    bug(
        "a change of voters takes the consents of those after it",
        "tests/protocol/test_changing_voters.py::test_change_takes_consents_of_a_quorum_of_those_who_vote_before_it",
        "and is_quorum(previous, amended.consenting, value.leaves, voting=voting)",
        "and is_quorum(previous, amended.consenting, value.leaves, voting=voting.after(value))",
    ),
    bug(
        "a change of voters gives a vote to no member",
        "tests/protocol/test_changing_voters.py::test_who_gets_a_vote_is_a_member_after_the_value_and_so_is_a_quorum_of_those_who_vote_next",
        "return added.issubset(value.members) and is_quorum(value, value.members, voting=after)",
        "return is_quorum(value, value.members, voting=after)",
    ),
    bug(
        "a change of voters leaves those who have no state",
        "tests/protocol/test_changing_voters.py::test_who_gets_a_vote_is_a_member_after_the_value_and_so_is_a_quorum_of_those_who_vote_next",
        "return added.issubset(value.members) and is_quorum(value, value.members, voting=after)",
        "return added.issubset(value.members)",
    ),
    bug(
        "a change of voters leaves three of whom one may lie",
        "tests/protocol/test_changing_voters.py::test_change_that_cannot_be_is_refused_in_a_line",
        "if not self.least <= len(named) <= MEMBER_LIMIT:",
        "if not 1 <= len(named) <= MEMBER_LIMIT:",
    ),
    bug(
        "a rollback undoes a change of voters",
        "tests/protocol/test_changing_voters.py::test_rollback_brings_back_the_settings_and_not_the_voters_and_a_rebase_names_its_own",
        "self._votings.append(before.rebased(value) if isinstance(entry, Rebase) else before.after(value))",
        """
        before = self._voting_after(self._branch[-1]) if value.rollback else before
        self._votings.append(before.rebased(value) if isinstance(entry, Rebase) else before.after(value))
        """,
    ),
    bug(
        "a lead proposes a change of voters that is refused",
        "tests/lab/simulate/test_named_voters.py::test_change_waits_for_a_voter_that_died_meanwhile_and_no_round_does",
        "return amended if holds_state(amended, voting=facts.agreement.voting) else value",
        "return amended",
    ),
    bug(
        "an order for other voters outlives a change of voters by a ban",
        "tests/protocol/test_changing_voters.py::test_ban_takes_the_vote_from_the_next_round_on",
        "if ends_term or value.amended or voting != before:",
        "if ends_term or value.amended:",
    ),
    bug(
        "a ban is no change of voters",
        "tests/protocol/test_changing_voters.py::test_ban_takes_the_vote_from_the_next_round_on",
        "return voting.changed(dict.fromkeys(taken, False)) if taken else voting",
        "return voting",
    ),
    bug(
        "a ban is a change of voters that leaves too few",
        "tests/protocol/test_changing_voters.py::test_ban_leaves_as_many_voters_as_there_must_be",
        "taken = banned[: max(0, len(voting.named) - voting.least)]",
        "taken = banned",
    ),
    bug(
        "a change of voters is ordered for no member",
        "tests/protocol/test_changing_voters.py::test_order_that_gives_a_vote_to_no_member_is_refused_and_any_other_is_kept",
        "if votes and peer not in self._here.chain.head.members:",
        "if False:",
    ),
    bug(
        "a lead proposes what came of a plan that counts nobody",
        "tests/lab/simulate/test_seats.py::test_round_of_one_seat_whose_holder_is_lost_counts_the_next_in_the_line",
        "return are_few(self._seats) and self._counted.get(plan) == ()",
        "return False",
    ),
    bug(
        "a lead gives the seats without regard to the line",
        "tests/protocol/test_seats.py::test_five_members_take_turns_at_two_seats_and_all_hold_the_state_of_every_round",
        "seated = Seating(settings.seats, line).first(contributors.keys())",
        "seated = Seating(settings.seats).first(contributors.keys())",
    ),
    bug(
        "who was counted stays at the head of the line",
        "tests/protocol/test_seats.py::test_five_members_take_turns_at_two_seats_and_all_hold_the_state_of_every_round",
        "self._since = {p: height if p in now else self._since.get(p, height) for p in value.members}",
        "self._since = {p: self._since.get(p, height) for p in value.members}",
    ),
    bug(
        "a voter that does not notice who is passed over",
        "tests/protocol/test_seats.py"
        "::test_member_is_passed_over_by_leads_that_lie_in_no_two_rounds_one_after_the_other",
        "if self.passed_over.note(self.previous, passed_over):",
        "if False:",
    ),
    bug(
        "a voter that does not notice a lead which waits for nobody",
        "tests/protocol/test_seats.py"
        "::test_member_is_passed_over_by_leads_that_lie_in_no_two_rounds_one_after_the_other",
        "due = {*self._countable(plan.chunks), *(self.awaited() if hasty else ())}",
        "due = set(self._countable(plan.chunks))",
    ),
    bug(
        "a lead proposes what came of a plan that nobody signs for",
        "tests/protocol/test_seats.py"
        "::test_member_is_passed_over_by_leads_that_lie_in_no_two_rounds_one_after_the_other",
        "if plan is None or facts.agreement.doubts(plan.hash):",
        "if plan is None:",
    ),
    bug(
        "a value that says it counted another is signed",
        "tests/protocol/test_seats.py::test_voter_signs_for_no_value_that_counts_others_than_it_computed",
        "same = _matches(report, value) and value.counted == self.counted_by(value.plan)",
        "same = _matches(report, value)",
    ),
    bug(
        "a plan of more than the seats",
        "tests/protocol/test_seats.py::test_plan_of_more_than_the_seats_is_refused",
        "if len(plan.contributors()) > settings.seats:",
        "if False:",
    ),
    bug(
        "who was counted stays in the line",
        "tests/protocol/test_enlisting.py"
        "::test_who_enlists_stands_in_the_line_behind_all_and_is_called_and_out_of_it_once_counted",
        "gone = {p for p in self._since if p in now | late | silent and p not in self.voters}",
        "gone = {p for p in self._since if p in late | silent and p not in self.voters}",
    ),
    bug(
        "who is called and gone keeps its place for ever",
        "tests/protocol/test_enlisting.py"
        "::test_who_is_called_and_does_not_come_is_out_of_the_line_and_keeps_nobody_out_meanwhile",
        "gone = {p for p in self._since if p in now | late | silent and p not in self.voters}",
        "gone = {p for p in self._since if p in now | silent and p not in self.voters}",
    ),
    bug(
        "who is called and gone keeps others out",
        "tests/protocol/test_enlisting.py"
        "::test_who_is_called_and_does_not_come_is_out_of_the_line_and_keeps_nobody_out_meanwhile",
        "here = len(called & members)",
        "here = len(called)",
    ),
    bug(
        "a round waits for ever for members whose trainers are stuck",
        "tests/protocol/test_following.py"
        "::test_no_round_waits_for_ever_for_members_whose_trainers_are_stuck_and_they_count_again_when_they_are_not",
        "absent = absent_ready(OBSERVER if self._announced_stuck else role, self._head, self._here.digest)",
        "absent = absent_ready(role, self._head, self._here.digest)",
    ),
    bug(
        "who was stuck is waited for no more",
        "tests/protocol/test_following.py"
        "::test_no_round_waits_for_ever_for_members_whose_trainers_are_stuck_and_they_count_again_when_they_are_not",
        "self._announced_stuck = role == TRAINING and self._here.stuck",
        "self._announced_stuck = self._announced_stuck or (role == TRAINING and self._here.stuck)",
    ),
    bug(
        "who is gone is called in its turn",
        "tests/protocol/test_enlisting.py::test_the_dead_in_the_line_leave_few_seats_empty",
        "elif self._is_fresh(peer, height):",
        "else:",
    ),
    bug(
        "who is gone stands in the line until it is called",
        "tests/protocol/test_enlisting.py"
        "::test_who_is_near_signs_again_keeps_its_place_and_is_called_and_who_does_not_is_out_of_the_line",
        "gone = {p for p in self._since if p in now | late | silent and p not in self.voters}",
        "gone = {p for p in self._since if p in now | late and p not in self.voters}",
    ),
    bug(
        "who was taken for dead, and lives, goes to the end of the line",
        "tests/protocol/test_enlisting.py"
        "::test_who_is_near_signs_again_keeps_its_place_and_is_called_and_who_does_not_is_out_of_the_line",
        "since |= {p: self._stood.get(p, height) for p in signed if p not in self.voters and p not in since}",
        "since |= {p: height for p in signed if p not in self.voters and p not in since}",
    ),
    bug(
        "an old enlistment, told again, says that its peer lives",
        "tests/protocol/test_enlisting.py"
        "::test_who_is_near_signs_again_keeps_its_place_and_is_called_and_who_does_not_is_out_of_the_line",
        "return peer in self._near and stands_on - self._signed.get(peer, 0) >= RENEWED_VALUES",
        "return peer in self._near",
    ),
    bug(
        "an enlistment is good again after its peer was counted",
        "tests/protocol/test_enlisting.py::test_enlistment_is_good_once_and_for_some_values_only",
        "return stands_on >= self._out.get(peer, 0) and has_place",
        "return True",
    ),
    bug(
        "a value takes whom it likes into the line",
        "tests/protocol/test_enlisting.py::test_value_takes_nobody_into_the_line_who_may_not_be_there",
        "if not may_enlist(one.peer, one.since) or not is_signed(one):",
        "if not may_enlist(one.peer, one.since):",
    ),
    bug(
        "a voter that does not notice whom a value forgets",
        "tests/protocol/test_enlisting.py::test_voter_refuses_a_value_that_forgets_whom_it_has_held_for_two_rounds",
        "forgets = self._outside is not None and bool(self._outside.forgotten(value))",
        "forgets = False",
    ),
    bug(
        "a newcomer asks its first link for a state as long as rounds go on",
        "tests/protocol/test_catching_up.py::test_each_attempt_asks_who_is_linked_by_then",
        "peers = self._peers()",
        "peers = self._peers() if before == NO_HASH else peers",
    ),
    bug(
        "friends of the lead get in front of who waits, where a value is full",
        "tests/protocol/test_enlisting.py::test_full_value_is_refused_if_it_has_newer_wishes_in_place_of_an_older_one",
        "newest = max(self._held[peer][1] if peer in self._held else height for peer in there)",
        "newest = max(self._held[peer][1] if peer in self._held else 0 for peer in there)",
    ),
    bug(
        "an enlistment that nobody signed is passed on",
        "tests/protocol/test_enlisting.py"
        "::test_enlistment_of_another_is_passed_on_once_and_not_back_and_a_forged_one_is_blamed_on_who_tells_it",
        "if not is_signed(wish):",
        "if False:",
    ),
    bug(
        "an enlistment goes round for ever",
        "tests/protocol/test_enlisting.py"
        "::test_enlistment_of_another_is_passed_on_once_and_not_back_and_a_forged_one_is_blamed_on_who_tells_it",
        "if known is not None and may_enlist(one.peer, known[0].since):",
        "if False:",
    ),
    bug(
        "who waits outside is heard in a round",
        "tests/protocol/test_enlisting.py::test_who_waits_outside_is_not_heard_in_a_round",
        "if sender in self._banned or (self._admitted is not None and sender not in self._admitted):",
        "if sender in self._banned:",
    ),
    bug(
        "a plan with somebody who waits outside is followed",
        "tests/protocol/test_enlisting.py::test_plan_with_somebody_who_waits_outside_is_blamed_on_its_lead",
        "if outside is not None and not outside.admitted.issuperset(p.peer for p in plan.participants):",
        "if False:",
    ),
    bug(
        "somebody whom the swarm does not admit enlists",
        "tests/protocol/test_enlisting.py"
        "::test_voter_passes_enlistments_on_to_voters_alone_and_hears_of_nobody_whom_the_swarm_does_not_admit",
        "if not (chain.may_enlist(wish.peer, wish.since) and self._here.may_join(wish.peer)):",
        "if not chain.may_enlist(wish.peer, wish.since):",
    ),
    bug(
        "one peer fills the book of those who want a seat",
        "tests/protocol/test_enlisting.py"
        "::test_who_brings_enlistments_of_many_keys_fills_a_small_part_of_the_book_and_none_of_a_voters",
        "self._brought[one.peer] = by",
        "pass",
    ),
    bug(
        "who was counted goes on taking part",
        "tests/protocol/test_enlisting.py"
        "::test_who_is_called_takes_part_with_what_it_learnt_and_follows_again_once_it_was_counted",
        "return isinstance(self._line, OutsideLine) and not self._line.admits(peer)",
        "return isinstance(self._line, OutsideLine) and not self.was_member(peer)",
    ),
    bug(
        "a server of groups that was started again is left alone all the same",
        "tests/protocol/test_group_pull.py"
        "::test_server_that_was_started_again_is_asked_at_once_and_one_that_only_speaks_is_not",
        "if peer in self._until and boot > self._until[peer][1]:",
        "if peer in self._until and boot < self._until[peer][1]:",
    ),
    bug(
        "a leaver goes as soon as it has promised",
        "tests/lab/simulate/test_simulation_meeting.py"
        "::test_leave_reaches_the_last_voter_though_it_was_dead_when_the_leaver_promised",
        "return LeaveStep.GO if overdue else LeaveStep.STAY",
        "return LeaveStep.GO",
    ),
    bug(
        "a leaver waits for ever to be counted out",
        "tests/protocol/test_departure.py"
        "::test_departure_that_promised_goes_when_it_is_counted_out_or_its_patience_is_over",
        "return LeaveStep.GO if overdue else LeaveStep.STAY",
        "return LeaveStep.STAY",
    ),
    bug(
        "one that decides alone waits for newcomers no longer than others do",
        "tests/lab/simulate/test_simulation_meeting.py"
        "::test_others_come_back_to_one_whose_rounds_are_shorter_than_their_way_to_its_state",
        "return max(grace_s, ALONE_S) if voters == 1 else grace_s",
        "return grace_s",
    ),
    bug(
        "waiting for newcomers alone costs nothing",
        "tests/protocol/test_newcomers.py"
        "::test_one_that_decides_alone_waits_for_longer_and_no_more_of_its_time_altogether",
        "return (self.asked - self.since + min(now - self.asked, LAPSE_LIMIT_S)) * self.leads",
        "return min(now - self.asked, LAPSE_LIMIT_S) * self.leads",
    ),
    bug(
        "a lead plans without the half that promised a later view",
        "tests/lab/simulate/test_simulation_meeting.py"
        "::test_half_that_was_stopped_makes_no_round_without_the_half_that_waited_for_it",
        "if most_are_elsewhere or (facts.awaited() and not overdue) or facts.waits_for_newcomers(now):",
        "if (facts.awaited() and not overdue) or facts.waits_for_newcomers(now):",
    ),
    bug(
        "half of the living are enough for a view in which nothing is planned",
        "tests/protocol/test_view_sync.py"
        "::test_as_long_as_nothing_is_planned_members_meet_where_more_than_half_of_the_living_are",
        "(planned or 2 * len(voters) > len(here))",
        "(planned or 2 * len(voters) >= len(here))",
    ),
    bug(
        "in a crowd a lone accusation stands no longer than among few",
        "tests/protocol/test_round_stalls.py"
        "::test_in_a_crowd_a_lone_accusation_stands_for_longer_before_the_two_are_led_through_a_third",
        "return spoken or stood_s >= in_crowd(RELAY_SETTLE_S, len(plan.participants))",
        "return spoken or stood_s >= RELAY_SETTLE_S",
    ),
    bug(
        "in a crowd all have to say what they hold as soon as among few",
        "tests/protocol/test_round_stalls.py::test_in_a_crowd_a_participant_has_longer_to_say_what_it_holds",
        """
        held_s = in_crowd(HELD_TIMEOUT_S, len(plan.participants))
        late = silent - {facts.me} if now - eviction.since >= held_s else set()
        """,
        """
        held_s = HELD_TIMEOUT_S
        late = silent - {facts.me} if now - eviction.since >= held_s else set()
        """,
    ),
    bug(
        "where most answer late nobody is waited for longer",
        "tests/protocol/test_membership.py"
        "::test_anybody_is_waited_for_longer_where_most_answer_late_or_this_node_does_and_not_where_one_does",
        "return max(self.lag.waited_s(now), WAITED_TIMES * _usual_s(trips, now))",
        "return self.lag.waited_s(now)",
    ),
    bug(
        "a node's own lag has others waited for twice as much longer",
        "tests/protocol/test_membership.py"
        "::test_anybody_is_waited_for_longer_where_most_answer_late_or_this_node_does_and_not_where_one_does",
        "return max(self.lag.waited_s(now), WAITED_TIMES * _usual_s(trips, now))",
        "return self.lag.waited_s(now) + WAITED_TIMES * _usual_s(trips, now)",
    ),
    bug(
        "strangers that answer late have all members waited for longer",
        "tests/protocol/test_membership.py"
        "::test_where_some_come_first_strangers_that_answer_late_have_nobody_waited_for_longer",
        "trips = [watched.round_trip for peer, watched in self._peers.items() if not first or peer in first]",
        "trips = [watched.round_trip for watched in self._peers.values()]",
    ),
    bug(
        "a lying lead fills the line outside with keys that it made up",
        "tests/protocol/test_enlisting.py"
        "::test_voter_refuses_a_value_with_the_wish_of_one_whom_the_swarm_does_not_admit",
        "makes_up = any(not self._may_join(one.peer) for one in enlisted_in(value))",
        "makes_up = False",
    ),
    bug(
        "what was said against a lead counts on while nobody is there to answer",
        "tests/protocol/test_following.py"
        "::test_lead_that_was_gone_together_with_the_quorum_has_its_time_to_answer_when_it_is_back",
        "for accused in (self._lead_accused, self._others_accused):  # who was not here could answer nothing",
        "for accused in list[AccusedFor]():",
    ),
)
