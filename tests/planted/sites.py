"""Bugs of sites: who is delegate, what is handed over and taken back, and from whom the finals come."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

MEMBERS = "tests/protocol/test_sites.py"
EXCHANGE = "tests/node/rounds/test_site_exchange.py"
REDUCING = "tests/node/rounds/test_reducing_delegates.py"
BOX = "tests/node/test_sites_in_a_box.py"

SITES: tuple[Bug, ...] = (
    bug(
        "a site's capability can be copied by another peer",
        f"{MEMBERS}::test_capability_follows_from_name_swarm_and_peer_so_that_nobody_can_copy_it",
        'digest = domain_hash("site", swarm, peer.encode(), name.encode())',
        'digest = domain_hash("site", swarm, name.encode())',
    ),
    bug(
        "a delegate waits for the others of its site for ever",
        f"{MEMBERS}::test_delegate_waits_no_longer_than_its_share_of_the_grace",
        "return not self._is_late(now, wait_s, half_ready_at) and bool(self.awaited(training))",
        "return bool(self.awaited(training))",
    ),
    bug(
        "a delegate waits for others of its site as if the grace began when it is ready",
        f"{MEMBERS}::test_delegate_waits_less_where_the_grace_runs_already",
        "since = self.since if half_ready_at is None else min(self.since, half_ready_at)",
        "since = self.since",
    ),
    bug(
        "what is offered a delegate is never taken back",
        f"{MEMBERS}::test_what_the_delegate_has_not_answered_in_time_is_taken_back_once",
        "due = self.handed_to is not None and not self.takes_back and self._is_late(now, wait_s, half_ready_at)",
        "due = False",
    ),
    bug(
        "who passed on its work may contribute it again in the round",
        f"{MEMBERS}::test_who_passed_on_its_work_trains_and_contributes_nothing_more_in_the_round",
        "return self._here.made or self._site.passed_to is not None",
        "return self._here.made",
    ),
    bug(
        "who hands over is not bound to it by its disk",
        f"{MEMBERS}::test_who_handed_over_observes_and_names_its_delegate",
        """
        if ready.role == CONTRIBUTOR:
            yield from self._mark_announced()
        if ready.role == CONTRIBUTOR and delegate is not None:
        """,
        """
        if ready.role == CONTRIBUTOR and delegate is None:
            yield from self._mark_announced()
        if ready.role == CONTRIBUTOR and delegate is not None:
        """,
    ),
    bug(
        "a lead may name a delegate for whom it likes",
        f"{MEMBERS}::test_a_node_follows_no_plan_that_names_a_delegate_for_it_which_it_did_not",
        "if delegate is not None and (mine is None or mine.delegate != delegate):",
        "if False:",
    ),
    bug(
        "who has a delegate owns chunks",
        f"{MEMBERS}::test_who_has_a_delegate_owns_nothing_and_is_named_in_the_plan",
        "owners = sorted(set(range(len(order))) - {one.place for one in delegated})",
        "owners = list(range(len(order)))",
    ),
    bug(
        "a delegate that is evicted still is one",
        f"{MEMBERS}::test_a_delegate_that_is_evicted_is_none_any_more_and_chunks_go_to_who_is_left",
        "return {peer: delegate for peer, delegate in named if delegate not in self.evicted}",
        "return dict(named)",
    ),
    bug(
        "what is handed over by another site is taken",
        f"{EXCHANGE}::test_who_is_of_another_site_is_not_heard",
        "if peer not in self.mates():",
        "if peer not in self._linked():",
    ),
    bug(
        "what came after the mean was made is said to be in it",
        f"{EXCHANGE}::test_what_came_between_the_mean_and_the_disk_is_refused",
        "round.over, round.handed = frozenset(handed), {}",
        "round.over, round.handed = frozenset(round.handed), {}",
    ),
    bug(
        "what is taken back stays in the mean",
        f"{EXCHANGE}::test_what_is_taken_back_in_time_is_in_no_mean_and_after_that_it_is_said_to_be_in_it",
        "round.handed.pop(peer, None)",
        "pass",
    ),
    bug(
        "what is in the mean that is being made is given back",
        f"{EXCHANGE}::test_what_is_taken_back_while_the_mean_is_made_is_said_to_be_in_it_once_it_is",
        "if round.taken is not None and peer in round.taken:",
        "if False:",
    ),
    bug(
        "a delegate is chosen whose contribution is left out after disputes",
        f"{MEMBERS}::test_nobody_hands_over_to_who_is_done_or_gone_or_left_out_after_disputes",
        "there = facts.alive - facts.left_out() - self._gathering.shunned",
        "there = facts.alive - self._gathering.shunned",
    ),
    bug(
        "who handed over trains again when its trainer begins anew",
        f"{MEMBERS}::test_who_passed_on_its_work_trains_and_contributes_nothing_more_in_the_round",
        "if (self.machine is not None or self.follows_head) and not (self._has_given or self._trains_nothing):",
        "if (self.machine is not None or self.follows_head) and not (self._here.made or self._trains_nothing):",
    ),
    bug(
        "what a delegate that is gone had all of is contributed again",
        f"{EXCHANGE}::test_of_a_delegate_that_is_gone_what_it_had_all_of_counts_as_taken",
        "offer.taken = all_asked if taken is None else taken",
        "offer.taken = bool(taken)",
    ),
    bug(
        "one of a site counts for as many tokens as it says",
        f"{EXCHANGE}::test_nobody_of_a_site_counts_for_more_tokens_than_the_cap_has_it",
        "return [replace(work, tokens=capped[peer]) for peer, work in works]",
        "return [work for peer, work in works]",
    ),
    bug(
        "chunks that are handed over are not held against their root",
        f"{EXCHANGE}::test_chunks_that_are_not_the_ones_offered_are_refused",
        "encoded = encoded_part(payload, grid=grid, codec=codec, chunk=chunk, root=offer.root)",
        "encoded = payload[: codec.encoded_bytes(grid.length(chunk))]",
    ),
    bug(
        "owners send finals to who has a delegate",
        f"{REDUCING}::test_who_has_a_delegate_is_sent_nothing_and_has_all_from_it_once_it_reported",
        "if to not in self._closed_to and to not in final_format.plan.delegates:",
        "if to not in self._closed_to:",
    ),
    bug(
        "who has a delegate asks nobody else for finals",
        f"{REDUCING}::test_others_are_asked_where_the_delegate_has_not_all_in_time",
        "return complete if self._delegate_failed or waited_s >= max(DELEGATE_S, DELEGATE_SHARE * took_s) else []",
        "return []",
    ),
    bug(
        "who had a delegate that was evicted is sent no finals",
        f"{REDUCING}::test_owners_send_finals_to_who_had_a_delegate_that_was_evicted",
        "if owned and to not in self._delegated:",
        "if owned:",
    ),
    bug(
        "who passed on its work adds it to the next",
        f"{BOX}::test_one_of_each_site_contributes_what_all_of_it_learnt",
        "self.settle(self.made.round, (True,) * self.made.encoded.grid.chunks)",
        "self.settle(self.made.round, None)",
    ),
    bug(
        "a delegate contributes what it made alone, and says that it has the others'",
        f"{BOX}::test_one_of_each_site_contributes_what_all_of_it_learnt",
        "pseudo_gradient, tokens = _together(pseudo_gradient, tokens, handed)",
        "pass",
    ),
)
