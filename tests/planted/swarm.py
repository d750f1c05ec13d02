"""Bugs of who is there and how it is reached: links, limits, admission, identity, manifests."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

SWARM: tuple[Bug, ...] = (
    bug(
        "links that take long are given up, also where all do",
        "tests/swarm/test_link_deadlines.py::test_links_that_take_long_are_finished_and_a_hang_is_not_waited_for",
        "self._making = Lateness(MAKING_LIMIT_S)",
        "self._making = Lateness()",
    ),
    bug(
        "a peer that hangs may be waited for as long as it likes while a link is made",
        "tests/swarm/test_link_deadlines.py::test_links_that_take_long_are_finished_and_a_hang_is_not_waited_for",
        "self._making = Lateness(MAKING_LIMIT_S)",
        "self._making = Lateness(1e9)",
    ),
    bug(
        "a stream's sender is told of room after each message",
        "tests/swarm/test_muxer.py::test_who_sends_is_told_of_room_only_where_much_was_read_and_sends_on",
        "if self._read_bytes >= CREDIT_BYTES:",
        "if self._read_bytes:",
    ),
    bug(
        "a stream's sender is never told of room",
        "tests/swarm/test_muxer.py::test_who_sends_is_told_of_room_only_where_much_was_read_and_sends_on",
        "if self._read_bytes >= CREDIT_BYTES:",
        "if self._read_bytes >= 1 << 40:",
    ),
    bug(
        "a direct connection is not made where there is one through a relay",
        "tests/swarm/reaching/test_circuits.py"
        "::test_direct_connection_takes_the_place_of_a_relayed_one_and_never_the_other_way",
        "if self.is_direct(PeerId(str(peer_id))):  # the peer dialled at the same time, and was first",
        "if self.link(peer_id) is not None:",
    ),
    bug(
        "whether this machine has a network is looked at whenever it is asked",
        "tests/swarm/reaching/test_own_addresses.py"
        "::test_whether_there_is_a_network_is_looked_at_seldom_and_at_once_where_addresses_changed",
        "if self._listens_beyond and now - self._network_looked_at >= NETWORK_LOOK_S:",
        "if self._listens_beyond:",
    ),
    bug(
        "that the network is gone is noticed half a second after the addresses are",
        "tests/swarm/reaching/test_own_addresses.py"
        "::test_whether_there_is_a_network_is_looked_at_seldom_and_at_once_where_addresses_changed",
        "        self._network_looked_at = -math.inf\n",
        "",
    ),
    bug(
        "a dial goes on whose peer's own was first",
        "tests/swarm/test_host.py::test_who_is_dialled_while_its_own_dial_is_under_way_leaves_what_there_is",
        "if self.is_direct(PeerId(str(peer_id))):  # the peer dialled at the same time, and was first",
        "if False:",
    ),
    bug(
        "members that have no time to knock are asked as often as ever",
        "tests/node/discovery/test_reaching.py"
        "::test_members_that_have_no_time_to_knock_are_asked_ever_less_often_whoever_is_linked_meanwhile",
        "self._settle.note(failed=bool(asked) and not answered)",
        "self._settle.note(failed=False)",
    ),
    bug(
        "peers that have no time to tell theirs are asked for the time as often as ever",
        "tests/node/discovery/test_clocks.py"
        "::test_peers_that_have_no_time_for_it_are_asked_ever_less_often_whoever_is_linked_meanwhile",
        "settle.note(failed=bool(asked) and self._ahead_s.keys().isdisjoint(asked))",
        "settle.note(failed=False)",
    ),
    bug(
        "models are compared with all where a difference is only told",
        "tests/node/training/test_layouts.py"
        "::test_where_a_difference_is_only_told_a_few_are_compared_and_others_where_these_do_not_answer",
        "len(self._checked) >= self._enough or ",
        "",
    ),
    bug(
        "who lost a connection unnoticed passes for one that dials at the same time, for as long as that is young",
        "tests/swarm/test_host.py::"
        "test_peer_that_lost_its_connection_unnoticed_makes_another_also_against_who_dialled_the_first",
        "SIMULTANEOUS_DIAL_WINDOW_S = 2.0",
        "SIMULTANEOUS_DIAL_WINDOW_S = 10.0",
    ),
    bug(
        "a link is paced by messages and bytes alone, whatever they cost",
        "tests/swarm/test_links.py::test_link_whose_messages_cost_much_is_read_later_and_others_are_not",
        "await link.pace.read(len(sealed), thread_time() - began)",
        "await link.pace.read(len(sealed))",
    ),
    bug(
        "the time that handling took is owed to nobody",
        "tests/swarm/test_limits.py::test_pace_waits_for_what_took_long_to_handle_and_others_have_a_turn_after_it",
        "self._handling.owe(handled_s, now)",
        "0.0",
    ),
    bug(
        "one costly message is handled after the other, and nobody else has a turn",
        "tests/swarm/test_limits.py::test_pace_waits_for_what_took_long_to_handle_and_others_have_a_turn_after_it",
        "elif handled_s >= TURN_S:",
        "elif False:",
    ),
    bug(
        "a partner that tells no news stays one",
        "tests/protocol/test_offer_news.py::test_partners_are_few_and_one_after_the_other_makes_room",
        "if self._turns % TURNS_OF_PARTNERS == 0 and self._waiting and self._places:",
        "if False:",
    ),
    bug(
        "all neighbours are asked for news by turns, and each tells all",
        "tests/protocol/test_offer_news.py::test_partners_are_few_and_one_after_the_other_makes_room",
        "begin = [*self._waiting][: PARTNERS - len(self._places)]",
        "begin = [*self._waiting]",
    ),
    bug(
        "a packet that was gathered for one peer goes to the others too",
        "tests/swarm/test_gossip.py::test_what_comes_soon_after_a_packet_is_gathered_in_the_next",
        "packet.CopyFrom(first)  # which may wait for other peers, too",
        "packet = first",
    ),
    bug(
        "a full packet waits for a second all the same",
        "tests/swarm/test_gossip.py::test_a_packet_is_gathered_up_to_its_limit_and_the_rest_goes_in_the_next",
        "while self._queued_bytes < GATHER_LIMIT_BYTES and not self._closed:",
        "while not self._closed:",
    ),
    bug(
        "control beyond what a receiver takes is gathered in a packet",
        "tests/swarm/test_gossip.py::test_a_packet_is_gathered_up_to_its_limit_and_the_rest_goes_in_the_next",
        "(following := self._following_bytes()) and size_bytes + following <= GATHER_LIMIT_BYTES",
        "following := self._following_bytes()",
    ),
    bug(
        "what stands in for unused parts of libp2p stays where others import it from",
        "tests/swarm/test_libp2p_parts.py::test_who_imports_such_a_part_for_himself_gets_it",
        "            if sys.modules.get(module.__name__) is module:\n",
        "            if sys.modules.get(module.__name__) is None:\n",
    ),
    bug(
        "who waits for a manifest is not told whom it was asked of",
        "tests/swarm/test_manifest_exchange.py::test_user_who_waits_is_told_what_came_of_whom_and_what_helps",
        "                reasons[peer] = str(error)\n",
        "",
    ),
    bug(
        "a list of revocations that the authority did not sign is believed",
        "tests/swarm/test_admission.py::test_list_behind_a_refusal_is_believed_of_the_authority_alone",
        "        revocations.check(self._swarm_id, self.manifest.swarm.authority, peer=peer)\n",
        "",
    ),
    bug(
        "who came with a revoked invite is known as revoked to who was linked with it alone",
        "tests/node/discovery/test_link_ops.py::test_who_takes_part_and_came_with_a_revoked_invite_is_named_beside_it",
        "& {*parts.chain.voters, *parts.chain.taking_part}",
        "& set()",
    ),
    bug(
        "who was revoked while it was away is not told",
        "tests/swarm/test_admission.py"
        "::test_founder_that_was_revoked_while_it_was_away_is_told_by_the_first_member_that_it_dials",
        "self._revocations_of(peer, hello)",
        "None",
    ),
    bug(
        "who is revoked is heard while it is sent the list",
        "tests/swarm/test_admission.py::test_nothing_is_heard_from_who_is_revoked_while_it_is_sent_the_list",
        "            link.unheard = True",
        "            link.unheard = False",
    ),
    bug(
        "a member without a network says that the others are to be started again",
        "tests/node/test_swarm_in_a_box.py::test_who_has_no_quorum_blames_nobody_where_its_own_machine_has_no_network",
        "trains=self.trains_alone, cut_off=cut_off)",
        "trains=self.trains_alone, cut_off=False)",
    ),
    bug(
        "of a machine without a network a join blames the members",
        "tests/swarm/test_manifest_exchange.py::test_who_has_no_network_is_told_so_and_blames_no_member",
        "if not found and is_cut_off():",
        "if False:",
    ),
    bug(
        "a founder whose members all left in good order is told to start them",
        "tests/node/discovery/test_finding.py::test_founder_whose_members_all_took_their_leave_is_told_of_no_fault",
        "wanted -= self._left",
        "wanted -= set()",
    ),
    bug(
        "who was revoked is to be started again",
        "tests/protocol/test_no_quorum.py::test_who_was_revoked_is_not_to_be_started_again_but_forgotten",
        "missing = [peer for peer in missing if peer not in revoked]",
        "missing = list(missing)",
    ),
    bug(
        "a newcomer without a quorum says that it trains",
        "tests/protocol/test_member.py"
        "::test_newcomer_without_a_quorum_trains_nothing_and_who_has_made_something_trains_on",
        "and (self._has_given or not here.resting)",
        "and True",
    ),
    bug(
        "one peer whose clock is wrong has a user set a right one",
        "tests/node/discovery/test_clocks.py::test_clock_that_is_far_from_most_others_is_told_of",
        "ahead_s = apart[(len(apart) - 1) // 2] if apart else 0.0",
        "ahead_s = apart[-1] if apart else 0.0",
    ),
    bug(
        "a node forgets the name that it was given",
        "tests/node/test_kept_name.py::test_name_that_was_given_once_stays_until_another_is_given",
        "return kept if is_name(kept) else None",
        "return None",
    ),
    bug(
        "who is revoked is parted from before it was sent the list",
        "tests/swarm/test_admission.py::test_nothing_is_heard_from_who_is_revoked_while_it_is_sent_the_list",
        'its admission back", last_word=True)',
        'its admission back")',
    ),
    bug(
        "a machine without a network offers to forget the others",
        "tests/swarm/test_places.py::test_member_that_is_heard_through_others_alone_is_not_silent",
        "return [] if self._host.is_cut_off else self",
        "return self",
    ),
    bug(
        "a member gives to any number of followers",
        "tests/swarm/test_follower_links.py"
        "::test_member_has_a_few_places_for_followers_who_link_each_other_and_whom_it_never_dials",
        "if self.follows(peer) and not self._let_follower_in(peer):",
        "if False:",
    ),
    bug(
        "of followers that come at once all are let in",
        "tests/protocol/test_followers.py"
        "::test_of_many_that_come_at_once_so_many_are_let_in_and_a_place_waits_for_its_link_for_a_while",
        "self._let_in[newcomer] = now",
        "self._let_in.pop(newcomer, None)",
    ),
    bug(
        "members dial followers",
        "tests/swarm/test_follower_links.py"
        "::test_member_has_a_few_places_for_followers_who_link_each_other_and_whom_it_never_dials",
        "if not (self._is_leaving(peer) or self._follows(peer)):",
        "if not self._is_leaving(peer):",
    ),
    bug(
        "who tells of many who want a seat is heard of them all",
        "tests/node/rounds/test_enlist_exchange.py"
        "::test_no_more_of_one_peer_is_heard_than_its_rate_and_others_are_all_the_same",
        "if not rate.take(1.0, trio.current_time()):",
        "if False:",
    ),
    bug(
        "a stranger tells who wants a seat",
        "tests/node/rounds/test_enlist_exchange.py::test_who_is_not_linked_is_not_heard_nor_what_is_no_enlistment",
        """
        raise RemoteError("tells who wants a seat without having been admitted", peer=peer)
        """,
        """
        pass
        """,
    ),
    bug(
        "a node that has no seat any more keeps all of its links",
        "tests/swarm/test_follower_links.py::test_links_follow_the_chain_as_it_calls_some_and_has_no_seat_for_them_then",
        "self._to_end = frozenset() if links_all else self._choice.settle(linked)",
        "self._to_end = frozenset()",
    ),
    bug(
        "a node that is called to a seat goes on with a few links",
        "tests/swarm/test_follower_links.py::test_links_follow_the_chain_as_it_calls_some_and_has_no_seat_for_them_then",
        "return self._may_link_all and not (self._outside is not None and self._outside(self._me))",
        "return self._may_link_all and self._outside is None",
    ),
    bug(
        "a member keeps all followers that had a seat beside it",
        "tests/swarm/test_follower_links.py"
        "::test_member_ends_links_of_those_that_had_a_seat_where_more_of_them_stay_than_it_has_places",
        "if now - self._too_many_at >= 2 * OUTSIDE_SETTLE_S:",
        "if False:",
    ),
    bug(
        "strangers that follow keep out who has contributed",
        "tests/swarm/test_follower_links.py::test_who_has_contributed_has_the_place_of_a_stranger_that_follows",
        "if not comes_first(newcomer) or not has_room(set(filter(comes_first, taken)), newcomer):",
        "if True:",
    ),
    bug(
        "who has contributed is let in beside all strangers that follow",
        "tests/swarm/test_follower_links.py::test_who_has_contributed_has_the_place_of_a_stranger_that_follows",
        "self.links.make_way(peer, followers)",
        "pass",
    ),
    bug(
        "who follows is told what is said in the course of rounds",
        "tests/swarm/test_links.py"
        "::test_who_comes_first_says_nothing_of_the_course_of_a_round_to_strangers_until_they_do",
        "links = [one for one in links if not self._gate.follows(one.peer)]",
        "pass",
    ),
    bug(
        "bytes that were read are not given back",
        "tests/swarm/test_limits.py::test_memory_holds_little_for_strangers_and_frees_what_was_read",
        """
        self.unread_bytes -= size
        """,
        """
        self.unread_bytes -= 0
        """,
    ),
    bug(
        "a stranger may hold as much as a member",
        "tests/swarm/test_limits.py::test_memory_holds_little_for_strangers_and_frees_what_was_read",
        "return unread <= STRANGER_UNREAD_LIMIT_BYTES and beyond <= STRANGERS_UNREAD_LIMIT_BYTES",
        "return unread <= PEER_UNREAD_LIMIT_BYTES and beyond <= STRANGERS_UNREAD_LIMIT_BYTES",
    ),
    bug(
        "all strangers together hold what they like",
        "tests/swarm/test_limits.py::test_strangers_leave_room_for_who_comes_next",
        "return unread <= STRANGER_UNREAD_LIMIT_BYTES and beyond <= STRANGERS_UNREAD_LIMIT_BYTES",
        "return unread <= STRANGER_UNREAD_LIMIT_BYTES",
    ),
    bug(
        "a stream that ended counts on",
        "tests/swarm/test_limits.py::test_guests_give_members_more_than_strangers_and_part_with_floods",
        """
        self._open[peer] -= 1
        """,
        """
        self._open[peer] -= 0
        """,
    ),
    bug(
        "a peer may have a stream more than its limit",
        "tests/swarm/test_limits.py::test_guests_give_members_more_than_strangers_and_part_with_floods",
        "if self._open[peer] >= (STREAM_LIMIT if admitted else STRANGER_STREAM_LIMIT):",
        "if self._open[peer] > (STREAM_LIMIT if admitted else STRANGER_STREAM_LIMIT):",
    ),
    bug(
        "half-open connections of members give way first",
        "tests/swarm/test_limits.py::test_half_open_connections_of_members_addresses_give_way_last",
        "crowded = max(self._places, key=lambda one: (not self._is_known(one), len(self._places[one])))",
        "crowded = max(self._places, key=lambda one: len(self._places[one]))",
    ),
    bug(
        "the addresses of one IPv6 network count as many",
        "tests/swarm/test_limits.py::test_door_counts_the_addresses_of_one_network_as_one",
        'return socket.inet_pton(socket.AF_INET6, address.split("%")[0])[:8].hex()',
        'return socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()',
    ),
    bug(
        "strangers are told the course of every round",
        "tests/swarm/test_links.py"
        "::test_who_comes_first_says_nothing_of_the_course_of_a_round_to_strangers_until_they_do",
        "in_course = isinstance(message, SwarmMessage) and not isinstance(message, FOR_EVERYBODY)",
        "in_course = False",
    ),
    bug(
        "strangers are not told what was decided",
        "tests/swarm/test_links.py"
        "::test_who_comes_first_says_nothing_of_the_course_of_a_round_to_strangers_until_they_do",
        "FOR_EVERYBODY = (Certificate, Rebase)",
        "FOR_EVERYBODY = (Rebase,)",
    ),
    bug(
        "who knows no member speaks to nobody",
        "tests/swarm/test_links.py::test_who_does_not_come_first_says_all_of_a_round_to_everybody",
        "if in_course and self._gate.rank(self._sealer.peer_id) is Rank.FIRST:",
        "if in_course:",
    ),
    bug(
        "who takes part is a stranger all the same",
        "tests/swarm/test_links.py"
        "::test_who_comes_first_says_nothing_of_the_course_of_a_round_to_strangers_until_they_do",
        "links = [one for one in links if one.takes_part or self._gate.rank(one.peer) > Rank.STRANGER]",
        "links = [one for one in links if self._gate.rank(one.peer) > Rank.STRANGER]",
    ),
    bug(
        "who is silent is told to all as often for strangers",
        "tests/swarm/test_places.py"
        "::test_who_is_silent_is_told_to_all_seldom_where_it_is_a_stranger_and_at_once_where_it_comes_first",
        "period_s = self._reach_pause.pause_s if is_urgent else STRANGERS_REACH_PERIOD_S",
        "period_s = self._reach_pause.pause_s",
    ),
    bug(
        "a link that rests takes all that is said",
        "tests/swarm/test_links.py::test_link_that_rests_is_none_until_its_peer_says_something",
        "if (resting := self._resting.get(peer)) is not None and isinstance(message, SignOfLife):",
        "if (resting := self._resting.get(peer)) is not None:",
    ),
    bug(
        "a link that rests is not woken by a word",
        "tests/swarm/test_links.py::test_link_that_rests_is_none_until_its_peer_says_something",
        """
                if self._resting.get(link.peer) is link:
                    self._wake(link)
        """,
        """
                if self._resting.get(link.peer) is link and self._links:
                    self._wake(link)
        """,
    ),
    bug(
        "a link that rests is not woken by a ping of its connection or the answer to one",
        "tests/swarm/test_links.py::test_ping_of_the_connection_or_its_answer_wakes_a_link_that_rests",
        """
            self._wake(resting)
        return peer in self._links
        """,
        """
            pass
        return peer in self._links
        """,
    ),
    bug(
        "a ping over a link is signed and sent as a message",
        "tests/swarm/test_links.py::test_ping_over_a_link_is_one_of_the_connection_and_nothing_is_signed",
        "if isinstance(message, Ping) and self.holds(peer):",
        "if False:",
    ),
    bug(
        "whoever is connected is heard, admitted or not",
        "tests/swarm/test_members.py::test_ping_of_a_connection_is_a_sign_of_life_of_who_is_linked_and_of_nobody_else",
        "if not self.links.is_heard(peer):",
        "if not self.links.is_heard(peer) and False:",
    ),
    bug(
        "the answer over a connection is a sign of life and ends no wait",
        "tests/swarm/test_members.py::test_answer_over_a_connection_ends_the_wait_of_the_detector_for_it",
        "self._carry_out(self.machine.on_answer(peer, number, incarnation, now))",
        "self._carry_out(self.machine.peer_seen(peer, incarnation, now))",
    ),
    bug(
        "a node looks who is there ten times a second at rest as well",
        "tests/swarm/test_members.py::test_node_at_rest_looks_who_is_there_as_seldom_as_its_detector_says",
        "await trio.sleep_until(now + self.machine.rest_s(now, at_most_s))",
        "await trio.sleep_until(now + TICK_S)",
    ),
    bug(
        "whom to dial is looked for at every tick",
        "tests/swarm/test_link_deadlines.py::test_whom_to_dial_is_looked_for_no_more_often_than_every_period",
        "if now - self._looked_at >= DIAL_PERIOD_S:",
        "if now >= self._looked_at:",
    ),
    bug(
        "what a connection brought with what was asked for is lost",
        "tests/swarm/test_muxer.py"
        "::test_what_came_together_is_taken_from_the_socket_together_and_counted_as_it_is_read",
        "data, self._ahead = self._ahead[:limit_bytes], self._ahead[limit_bytes:]",
        'data, self._ahead = self._ahead[:limit_bytes], b""',
    ),
    bug(
        "whoever reads a connection writes the answers to its pings",
        "tests/swarm/test_muxer.py::test_end_whose_answers_are_not_taken_reads_on",
        "if kind == TYPE_PING and flags & FLAG_ACK:",
        "if False:",
    ),
    bug(
        "strangers that come are not looked at where there were none",
        "tests/swarm/test_limits_of_hosts.py::test_stranger_that_says_no_hello_is_parted_from_and_members_stay",
        "await changes.receive()",
        "await trio.sleep_forever()",
    ),
    bug(
        "a link rests for ever",
        "tests/swarm/test_links.py::test_link_that_rested_long_enough_is_ended_and_can_be_made_again",
        "if now - link.rests_since >= REST_LIMIT_S",
        "if now - link.rests_since >= 1000 * REST_LIMIT_S",
    ),
    bug(
        "who loses all of its links makes all of them again at once",
        "tests/swarm/test_members.py"
        "::test_links_beyond_the_budget_are_not_made_again_at_once_and_who_runs_late_dials_for_longer",
        "if not self._redials.take(1.0, trio.current_time()):",
        "if not self._redials.take(0.0, trio.current_time()):",
    ),
    bug(
        "who runs late gives a dial no longer than usual",
        "tests/swarm/test_members.py"
        "::test_links_beyond_the_budget_are_not_made_again_at_once_and_who_runs_late_dials_for_longer",
        "deadline_s = REDIAL_DEADLINE_S + self.own_lag_s()",
        "deadline_s = REDIAL_DEADLINE_S",
    ),
    bug(
        "links that rest are not bounded",
        "tests/swarm/test_links.py::test_links_that_rest_are_bounded",
        "if len(self._resting) > RESTING_LIMIT:",
        "if len(self._resting) > 1000 * RESTING_LIMIT:",
    ),
    bug(
        "a node that finds nobody says it once and never again",
        "tests/node/discovery/test_finding.py"
        "::test_node_that_finds_nobody_says_so_and_says_so_again_until_somebody_is_there",
        "if now - told_at >= ALONE_PERIOD_S and (alerts := self.alerts):",
        "if told_at < 0 and (alerts := self.alerts):",
    ),
    bug(
        "both ends of a connection ask whether the other is there",
        "tests/swarm/test_muxer.py::test_connection_at_rest_carries_one_heartbeat_of_one_end_in_a_long_while",
        "HEARTBEAT_INTERVAL_S if is_initiator else 1.5 * HEARTBEAT_INTERVAL_S",
        "HEARTBEAT_INTERVAL_S",
    ),
    bug(
        "a peer that hangs is never asked whether it is there",
        "tests/swarm/test_muxer.py::test_peer_that_hangs_is_given_up_within_a_minute",
        "silent_at = self.secured_conn.heard_at + self._silence_s",
        "silent_at = trio.current_time() + self._silence_s",
    ),
    bug(
        "neighbours are chosen without the circle",
        "tests/protocol/test_neighbours.py::test_halves_that_were_apart_until_both_had_enough_links_come_together",
        "following = self._next_in_circle(known, taken, may_dial)",
        "following = None",
    ),
    bug(
        "a neighbour that was lost is not replaced",
        "tests/protocol/test_neighbours.py"
        "::test_a_fifth_that_is_gone_at_once_leaves_the_others_connected_and_is_replaced",
        """
        self._chosen &= taken
        """,
        """
        """,
    ),
    bug(
        "whoever comes first has the places that a node keeps for its own choice",
        "tests/protocol/test_neighbours.py::test_whoever_comes_never_has_the_places_of_those_that_a_node_chooses",
        "return max(0, CHOSEN_LINKS - len(self._chosen.intersection(linked)))",
        "return 0",
    ),
    bug(
        "whoever is next in the circle makes room for one more that comes",
        "tests/protocol/test_neighbours.py::test_next_in_the_circle_beyond_the_choices_makes_no_place_for_others",
        "return max(0, CHOSEN_LINKS - len(self._chosen.intersection(linked)))",
        "return CHOSEN_LINKS - len(self._chosen.intersection(linked))",
    ),
    bug(
        "all neighbours are drawn from whom anybody can invent",
        "tests/protocol/test_neighbours.py::test_half_of_the_choices_are_among_those_that_have_proven_something",
        "lacking, proven if len(proven) >= PROVEN_LEAST else set())",
        "lacking, set())",
    ),
    bug(
        "a lone founder is dialled by everybody",
        "tests/protocol/test_neighbours.py::test_few_that_have_proven_something_are_not_dialled_by_everybody",
        "lacking, proven if len(proven) >= PROVEN_LEAST else set())",
        "lacking, proven)",
    ),
    bug(
        "nodes that share rollouts have as many links as there are places",
        "tests/swarm/test_neighbours.py"
        "::test_eight_nodes_with_four_links_each_at_most_hear_every_group_and_pull_it_from_whoever_has_it",
        "return NEIGHBOUR_LIMIT - (0 if dialled else self._choice.kept_places(self.links.linked()))",
        "return LINK_LIMIT",
    ),
    bug(
        "who died is taken for present by its old record",
        "tests/protocol/test_neighbours.py::test_who_died_is_gone_until_it_signs_a_newer_record_or_is_linked",
        "return peer in self._died and order <= self._died[peer]",
        "return peer in self._died and order < self._died[peer]",
    ),
    bug(
        "idle connections to holders of groups stay",
        "tests/swarm/test_brief_connections.py"
        "::test_connection_is_made_once_for_requests_that_follow_each_other_and_ended_when_idle",
        "if now - self._made[peer].idle_since >= IDLE_LIMIT_S]",
        "if now - self._made[peer].idle_since >= 100 * IDLE_LIMIT_S]",
    ),
    bug(
        "a connection ends while a group comes over it",
        "tests/swarm/test_brief_connections.py"
        "::test_connection_is_made_once_for_requests_that_follow_each_other_and_ended_when_idle",
        "if not connection.users]",
        "if True]",
    ),
    bug(
        "a connection that a link uses is ended as an idle one",
        "tests/swarm/test_brief_connections.py::test_what_others_made_is_used_and_left_alone",
        """
        if not self.is_linked(peer):
        """,
        """
        if True:
        """,
    ),
    bug(
        "strangers crowd others out of the book of offers",
        "tests/protocol/test_offer_book.py::test_strangers_together_have_half_of_a_full_book_however_many_they_are",
        "crowd = strangers if of_strangers > STRANGERS_SHARE * OFFER_LIMIT else self._origins.values()",
        "crowd = self._origins.values()",
    ),
    bug(
        "whoever sends an old announcement again makes its signer pay",
        "tests/protocol/test_offer_book.py::test_what_was_replayed_is_not_taken_and_its_signer_not_to_blame",
        'that came before", reason=Reason.REPLAYED)',
        'that came before", reason=Reason.REPLAYED, peer=peer)',
    ),
    bug(
        "gossip that is sent again makes its signer pay for too much of it",
        "tests/swarm/test_rollouts.py::test_gossip_that_is_sent_again_costs_its_signer_nothing",
        "self.rejected[Reason.QUOTA] += 1  # anybody",
        "self._reject(RolloutError('', reason=Reason.QUOTA, peer=peer))  # anybody",
    ),
    bug(
        "a neighbour's forged news is the fault of whom it names",
        "tests/swarm/test_rollouts.py::test_neighbour_that_makes_news_up_is_to_blame_and_nobody_it_names",
        "origin = open_announcement(sealed, self._swarm_id, peer=peer).origin",
        "origin = PeerId(peek_announcement(sealed, peer=peer).sender)",
    ),
    bug(
        "who announces another's digest first is its only origin",
        "tests/protocol/test_offer_book.py::test_digest_that_two_offer_is_offered_by_each_whoever_comes_first",
        "if (peer, announcement.digest) in self._offers or",
        "if announcement.digest in self._offered_by or",
    ),
    bug(
        "who only holds a group pays for a size that its origin made up",
        "tests/protocol/test_group_pull.py::test_wrong_bytes_are_told_and_the_next_server_is_asked_from_the_start",
        "self._peer if self._peer == self._offer.origin else None",
        "self._peer",
    ),
    bug(
        "who announces another's group in a false size is not to blame for it",
        "tests/protocol/test_group_pull.py::test_who_announced_another_size_is_to_blame_once_another_has_the_group",
        'raise RolloutError("a group of another size than announced", reason=Reason.MISLABELLED, peer=origin)',
        'raise RolloutError("a group of another size than announced", reason=Reason.MISLABELLED)',
    ),
    bug(
        "who holds a group of which another announced a false size is asked for nothing for a while",
        "tests/swarm/test_rollouts.py"
        "::test_who_announces_anothers_group_in_a_false_size_is_to_blame_and_nobody_that_has_it",
        "if error.peer in (None, ask.peer):",
        "if True:",
    ),
    bug(
        "a connection that is used again while others are ended is ended amid a request",
        "tests/swarm/test_brief_connections.py"
        "::test_who_is_asked_again_while_others_are_parted_from_stays_and_who_is_parted_from_is_dialled_anew",
        "if peer not in self._made or self._made[peer].users:",
        "if peer not in self._made:",
    ),
    bug(
        "who reads no answer keeps all others from being served",
        "tests/swarm/test_rollouts.py::test_who_reads_no_answer_keeps_nobody_else_from_being_served",
        "if under_way and (under_way >= FETCH_LIMIT or self._answering.total() >= ANSWER_LIMIT):",
        "if under_way >= FETCH_LIMIT or self._answering.total() >= ANSWER_LIMIT:",
    ),
    bug(
        "a peer is sent as many chunks at once as all together",
        "tests/swarm/test_rollouts.py::test_who_reads_no_answer_keeps_nobody_else_from_being_served",
        "if under_way and (under_way >= FETCH_LIMIT or self._answering.total() >= ANSWER_LIMIT):",
        "if under_way and self._answering.total() >= ANSWER_LIMIT:",
    ),
    bug(
        "a group that a thief announced is held, and its maker's offer of it not taken",
        "tests/swarm/test_rollouts.py::test_group_that_its_announcer_did_not_make_is_not_held",
        "if maker_of(data) in {offer.origin for offer in offers} and",
        "if",
    ),
    bug(
        "a thief's offer uses up that of who made the group",
        "tests/node/sapo/test_intake.py"
        "::test_thief_of_a_digest_pays_for_what_it_announced_and_its_maker_is_judged_by_its_own",
        """
        return self.origin, self.digest
        """,
        """
        return PeerId(""), self.digest
        """,
    ),
    bug(
        "origins that strangers invented keep others out",
        "tests/protocol/test_offer_book.py::test_origin_of_a_higher_rank_is_followed_in_the_place_of_a_stranger",
        "if gone is None and self._rank(newcomer) > Rank.STRANGER:",
        "if gone is None and self._rank(newcomer) > Rank.FIRST:",
    ),
    bug(
        "what gossip did not bring is asked for anew each time",
        "tests/protocol/test_offer_news.py::test_who_asks_again_and_again_has_everything_once_though_it_begins_late",
        "self._places[peer] = NewsRequest(boot=news.boot, after=news.last)",
        "self._places[peer] = NewsRequest()",
    ),
    bug(
        "what came from others is not passed on as news",
        "tests/swarm/test_rollouts.py::test_what_gossip_did_not_bring_comes_from_a_neighbour_though_its_origin_is_gone",
        """
        self.announcements_received += 1
        self._news.note(sealed)
        """,
        """
        self.announcements_received += 1
        """,
    ),
    bug(
        "strangers are told the news",
        "tests/swarm/test_rollouts.py::test_news_are_for_those_that_take_part",
        """
        if not self._takes_part(stream.peer):
        """,
        """
        if False:
        """,
    ),
    bug(
        "a record is told to all whenever a rate in it changes",
        "tests/swarm/test_members.py"
        "::test_record_is_told_over_links_when_it_says_something_new_and_else_repeated_by_gossip_alone",
        "is_news = told is None or not record.says_the_same(told)",
        "is_news = told is None or record != told",
    ),
    bug(
        "a record that says nothing new is never repeated",
        "tests/swarm/test_members.py"
        "::test_record_is_told_over_links_when_it_says_something_new_and_else_repeated_by_gossip_alone",
        "needs_renewal = now >= gossiped_at + renewal_s(len(self.book))",
        "needs_renewal = now >= gossiped_at + 1e9",
    ),
    bug(
        "a swarm that is starting gossips every change of every record",
        "tests/swarm/test_members.py::test_gossip_has_what_is_new_seldom_where_many_are_known_and_a_leave_at_once",
        "gossiped_at + len(self.book) / GOSSIPED_PER_S if self.links_all",
        "gossiped_at if self.links_all",
    ),
    bug(
        "gossip has each record under another number than links",
        "tests/swarm/test_members.py::test_gossip_has_what_is_new_seldom_where_many_are_known_and_a_leave_at_once",
        "await self._gossip(sealed)",
        "await self._gossip(self._sealed_record())",
    ),
    bug(
        "of a crowd everybody hears all that anybody suspects",
        "tests/swarm/test_places.py::test_words_of_others_do_not_grow_with_a_crowd_and_who_is_suspected_is_always_told",
        "if self._words.take(len(self.links.linked()), trio.current_time()):",
        "if self._words.take(1.0, trio.current_time()):",
    ),
    bug(
        "of a crowd everybody hears all the while whom others lack",
        "tests/swarm/test_places.py::test_words_of_others_do_not_grow_with_a_crowd_and_who_is_suspected_is_always_told",
        "if is_due and self._words.take(len(linked), now):",
        "if is_due and self._words.take(1.0, now):",
    ),
    bug(
        "who is suspected where all have heard enough does not hear of it",
        "tests/swarm/test_places.py::test_words_of_others_do_not_grow_with_a_crowd_and_who_is_suspected_is_always_told",
        "self.links.send(peer, suspicion)",
        "pass",
    ),
    bug(
        "gossip has that a node leaves when it is gone",
        "tests/swarm/test_members.py::test_gossip_has_what_is_new_seldom_where_many_are_known_and_a_leave_at_once",
        '(now >= next_at or record.phase == "leaving")',
        "now >= next_at",
    ),
    bug(
        "a new subscriber is sent the recent messages that it has",
        "tests/swarm/test_gossip.py"
        "::test_new_subscriber_is_sent_what_it_lacks_of_the_recent_messages_and_none_that_it_has",
        "await self.emit_ihave(topic, recent, peer_id)",
        "await super().send_recent_messages(peer_id, topic)",
    ),
    bug(
        "who waits for its turn to be dialled is told of as out of reach",
        "tests/swarm/test_link_deadlines.py"
        "::test_who_waits_for_its_turn_to_be_dialled_is_not_held_for_one_that_is_out_of_reach",
        "if self._was_tried(peer) and self._book.get(peer)",
        "if self._book.get(peer)",
    ),
    bug(
        "who is heard of by gossip alone counts as silent",
        "tests/swarm/test_members.py"
        "::test_record_is_told_over_links_when_it_says_something_new_and_else_repeated_by_gossip_alone",
        "self.links.note_said(record.peer)",
        "pass",
    ),
    bug(
        "who is reached again is told of at once, over and over",
        "tests/swarm/test_members.py::test_others_are_told_at_once_whom_a_node_lacks_and_later_whom_it_reaches_again",
        "is_urgent = not first.isdisjoint(lacking - before)",
        "is_urgent = not first.isdisjoint(lacking ^ before)",
    ),
    bug(
        "all are told as often whom a node lacks, however long that changes",
        "tests/swarm/test_places.py::test_who_lacks_members_all_the_while_says_so_ever_less_often_until_it_is_calm",
        """
        self._reach_pause.next_s()
        """,
        "",
    ),
    bug(
        "who has too much to do for a handshake is held for out of reach",
        "tests/swarm/test_members.py::test_peer_that_is_busy_is_dialled_once_and_not_held_for_out_of_reach",
        """
        if not busy:
        """,
        """
        if True:
        """,
    ),
    bug(
        "a handshake that is under way is given up when the time for dialling is over",
        "tests/swarm/test_host.py::test_who_takes_a_connection_and_says_nothing_is_busy_and_has_its_time_for_the_handshake",
        "scope.deadline = trio.current_time() + handshake_s",
        "pass",
    ),
    bug(
        "a link whose stream opens late is lost",
        "tests/swarm/test_link_deadlines.py::test_link_whose_stream_opens_late_is_up_and_loses_nothing",
        "stream = await self._host.open(link.peer, MESSAGES_PROTOCOL, deadline_s=REST_LIMIT_S)",
        "stream = await self._host.open(link.peer, MESSAGES_PROTOCOL, deadline_s=5.0)",
    ),
    bug(
        "as many are dialled at once, however late they are",
        "tests/swarm/test_link_deadlines.py::test_only_who_was_there_and_late_makes_a_node_dial_fewer_at_once",
        "self._resize(self._size / 2)",
        "pass",
    ),
    bug(
        "strangers make all handshakes wait",
        "tests/swarm/test_link_deadlines.py::test_strangers_make_nobody_wait_longer_by_not_answering",
        "if made or self._gate.rank(peer) > Rank.STRANGER:",
        "if True:",
    ),
    bug(
        "what came before a broken message is lost with it",
        "tests/swarm/test_streams.py"
        "::test_messages_that_came_together_are_received_together_and_what_breaks_after_them_the_next_time",
        "with contextlib.suppress(NetworkError, RemoteError):  # what breaks after these is for the next call to say",
        "with contextlib.suppress(NetworkError):",
    ),
    bug(
        "who was shut out asks as often for ever",
        "tests/swarm/test_key_probe.py::test_who_learns_nothing_asks_ever_less_often_and_anew_after_a_quiet_minute",
        "await trio.sleep(pauses.next_s())",
        "await trio.sleep(PERIOD_S)",
    ),
    bug(
        "a look on the local network that never comes up keeps the node from ending",
        "tests/swarm/rendezvous/test_mdns.py::test_discovery_that_is_never_there_holds_nobody_up",
        "zeroconf = await trio.to_thread.run_sync(self._open, abandon_on_cancel=True)",
        "zeroconf = await trio.to_thread.run_sync(self._open)",
    ),
    bug(
        "proofs of an address that is gone stay",
        "tests/swarm/reaching/test_dial_back.py"
        "::test_proofs_of_an_address_that_is_gone_are_dropped_and_those_of_another_stay",
        "if finding.own_host not in hosts and finding.host not in hosts",
        "if finding.host not in hosts",
    ),
    bug(
        "the old address is still announced",
        "tests/node/discovery/test_reaching.py::test_node_that_moved_announces_no_old_address_and_is_knocked_at_anew",
        "self._evidence.forget_from(change.gone)",
        "self._evidence.forget_from(())",
    ),
    bug(
        "links that rest are kept though the address that they led from is gone",
        "tests/swarm/test_links.py::test_links_from_an_address_that_is_gone_end_also_where_they_rest_and_others_stay",
        "for peer in [*self._links, *self._resting]:",
        "for peer in list(self._links):",
    ),
    bug(
        "an address that went and came back was there all the time",
        "tests/swarm/reaching/test_own_addresses.py"
        "::test_address_that_went_and_came_back_is_both_and_what_changes_nothing_is_no_change",
        "gone = (before - self.now) | (heard.removed & before)",
        "gone = before - self.now",
    ),
    bug(
        "gossip is passed on again once libp2p has forgotten it",
        "tests/swarm/test_gossip.py::test_a_message_is_taken_and_passed_on_once_however_long_ago_it_came",
        "return super()._is_msg_seen(msg) or not (self._is_own(msg) or self._numbers.is_new(*_numbered(msg)))",
        "return bool(super()._is_msg_seen(msg))",
    ),
    bug(
        "gossip older than what is remembered of its origin is new",
        "tests/swarm/test_gossip.py::test_a_message_is_taken_and_passed_on_once_however_long_ago_it_came",
        "return age < 0 or (age < self._size and not self.came(number))",
        "return age < 0 or age >= self._size or not self.came(number)",
    ),
    bug(
        "a message whose origin did not sign it makes later ones of that origin old",
        "tests/swarm/test_gossip.py::test_a_message_is_taken_and_passed_on_once_however_long_ago_it_came",
        """
        if self._peer_limits.may_gossip(PeerId(str(msg_forwarder))):  # before its signature costs anything
        """,
        """
        self._mark_msg_seen(msg)
        self.seen_messages.cache.clear()
        if self._peer_limits.may_gossip(PeerId(str(msg_forwarder))):  # before its signature costs anything
        """,
    ),
    bug(
        "a replay of a node's own gossip silences it",
        "tests/swarm/test_gossip.py::test_own_messages_go_out_whatever_is_replayed_of_this_node",
        "return bool(msg.from_id == self.my_id.to_bytes())",
        "return False",
    ),
    bug(
        "gossip of a node's next start is older than that before",
        "tests/swarm/test_gossip.py::test_messages_of_a_later_start_are_newer_however_many_there_were_before",
        "self.counter = boot << BOOT_SHIFT",
        "self.counter = boot",
    ),
    bug(
        "what was dialled in vain without a network counts where there is one",
        "tests/swarm/test_dial_targets.py::test_target_is_dialled_a_few_times_then_seldom_until_somebody_is_there",
        "        self._targets: Rates[tuple[str, int]] = Rates(TARGET_PER_S, TARGET_BURST)\n",
        '        self._targets = getattr(self, "_targets", Rates[tuple[str, int]](TARGET_PER_S, TARGET_BURST))\n',
    ),
    bug(
        "a machine whose addresses changed dials no sooner",
        "tests/node/discovery/test_moving.py::test_proofs_are_dropped_before_links_are_made_anew_and_the_user_is_told",
        "        parts.host.dial_anew()\n",
        "",
    ),
    bug(
        "each way to write an address is a target of its own",
        "tests/swarm/test_dial_targets.py::test_target_that_is_written_otherwise_is_the_same",
        "return machine_at(direct.host), direct.port",
        "return direct.host, direct.port",
    ),
    bug(
        "a public member names this node's loopback for its lanes",
        "tests/node/discovery/test_reaching.py::test_lanes_go_where_their_peer_is_seen_and_nowhere_else",
        "return host in mine and (seen in mine or not ipaddress.ip_address(host).is_loopback)",
        "return host in mine",
    ),
    bug(
        "a link has addresses beyond what its reader takes",
        "tests/protocol/test_swarm_link.py::test_link_stays_whole_whatever_long_names_others_give_themselves",
        "if where in packed or is_full or takes > left:",
        "if where in packed or is_full:",
    ),
    bug(
        "announcements on the local network are looked up one by one",
        "tests/swarm/rendezvous/test_mdns.py::test_names_behind_which_there_is_nothing_keep_no_neighbour_from_being_found",
        "nursery.start_soon(self._look_up_one, zeroconf, name, places)",
        "await self._look_up_one(zeroconf, name, places)",
    ),
    bug(
        "a place that cannot be named to others gets into a rendezvous table",
        "tests/swarm/rendezvous/test_kademlia.py::test_answerer_goes_on_whatever_place_a_stranger_says_it_has",
        "                peer = parse_address(text).peer\n                _packed(text)\n",
        "                peer = parse_address(text).peer\n",
    ),
    bug(
        "the end of a link closes also the connection that took the place of its own",
        "tests/swarm/test_links.py::test_connection_that_took_the_place_of_one_that_ends_stays",
        "await self._host.close(link.connection)",
        "await self._host.close(self._host.connection(peer))",
    ),
    bug(
        "the end of a brief connection closes also the one that took its place",
        "tests/swarm/test_brief_connections.py::test_connection_that_took_the_place_of_a_brief_one_stays",
        "await self._host.close(connection.made)",
        "await self._host.close(self._host.connection(peer))",
    ),
    bug(
        "the end of a walk closes also the connection that took the place of its own",
        "tests/swarm/rendezvous/test_kademlia.py::test_connection_that_took_the_place_of_a_walks_own_stays",
        "nursery.start_soon(self._host.close, connection)",
        "nursery.start_soon(self._host.close, self._host.connection(peer))",
    ),
    bug(
        "a connection that is reset as it says what it is ends the node that it came to",
        "tests/swarm/reaching/test_punching.py::test_connection_that_is_reset_as_it_says_what_it_is_ends_nothing_else",
        "except (OSError, trio.BrokenResourceError, NetworkError, RemoteError) as error:  # it may be reset",
        "except (trio.BrokenResourceError, NetworkError, RemoteError) as error:",
    ),
    bug(
        "a hello over a new connection leaves the link over the old one",
        "tests/swarm/test_links.py::test_hello_over_a_new_connection_ends_the_link_over_the_old_one_and_makes_another",
        "if self._link_now(peer) is None:",
        "if False:",
    ),
    bug(
        "every visit to a rendezvous table dials who was not reached by the last",
        "tests/swarm/rendezvous/test_kademlia.py::test_contact_that_is_not_reached_is_dialled_as_seldom_as_any_peer",
        "self._silent = {id for id, rest in self._rests.items() if now < rest.until}",
        "self._silent = set()",
    ),
    bug(
        "a name that another gave is dialled wherever it leads",
        "tests/swarm/test_dial_targets.py"
        "::test_name_that_another_gave_leads_nobody_to_this_machine_and_is_counted_where_it_leads",
        "if not self._targets.is_name_of_others(address):",
        "if True:",
    ),
    bug(
        "a way through a relay leads to this machine although its peer is elsewhere",
        "tests/swarm/test_dial_targets.py::test_way_through_a_relay_leads_nobody_to_this_machine_by_number_or_name",
        "if isinstance(parsed, CircuitAddress) and is_connected(parsed.relay.peer):",
        "if isinstance(parsed, CircuitAddress):",
    ),
    bug(
        "a relay's name that another gave is dialled wherever it leads",
        "tests/swarm/test_dial_targets.py::test_way_through_a_relay_leads_nobody_to_this_machine_by_number_or_name",
        "if not self._targets.is_name_of_others(address):",
        "if isinstance(address, CircuitAddress) or not self._targets.is_name_of_others(address):",
    ),
    bug(
        "a relay that has gone meanwhile is dialled wherever it was said to be",
        "tests/swarm/test_dial_targets.py::test_relay_that_goes_before_its_turn_sends_nobody_where_it_was_said_to_be",
        "return self.is_direct(first) or (is_worth and self._targets.may_dial(address))",
        "return self.is_direct(first) or self._targets.may_dial(address)",
    ),
    bug(
        "a name that another gave leads to this machine although its peer is elsewhere",
        "tests/swarm/test_dial_targets.py"
        "::test_name_that_another_gave_leads_nobody_to_this_machine_and_is_counted_where_it_leads",
        "if text in kept][:ADDRESSES_LIMIT]",
        "][:ADDRESSES_LIMIT]",
    ),
    bug(
        "a machine that is named is another target than the same machine by its address",
        "tests/swarm/test_dial_targets.py"
        "::test_name_that_another_gave_leads_nobody_to_this_machine_and_is_counted_where_it_leads",
        "if self._targets.may_dial(place):",
        "if True:",
    ),
    bug(
        "what a message costs after it was delivered is not charged to its link",
        "tests/swarm/test_links.py::test_link_whose_messages_cost_much_after_they_were_delivered_is_read_later_too",
        "link.pace.charge(handled_s)",
        "pass",
    ),
    bug(
        "time that the engine takes for a message is charged to nobody",
        "tests/node/rounds/test_engine_plan.py::test_time_that_a_message_takes_in_the_engine_is_charged_to_who_said_it",
        "self._p.links.charge(event.peer, thread_time() - began)",
        "pass",
    ),
    bug(
        "a snapshot that never ends is waited for for ever",
        "tests/node/gossip/test_start.py::test_a_peer_whose_snapshot_never_ends_is_given_up_for_another",
        "SNAPSHOT_DEADLINE_S + bytes_expected / SNAPSHOT_LEAST_BYTES_PER_S",
        "math.inf",
    ),
    bug(
        "who asks for ways to a peer through a relay and never comes uses up that peer's share",
        "tests/swarm/reaching/test_relayed_lanes.py"
        "::test_who_asks_for_passages_and_never_comes_keeps_nobody_from_their_other_end",
        "return self.ends if self.joined.is_set() else self.ends[:1]",
        "return self.ends",
    ),
    bug(
        "an end that takes nothing of what it is sent through a third is waited for without end",
        "tests/swarm/reaching/test_relayed_lanes.py"
        "::test_passage_ends_where_an_end_takes_nothing_of_what_the_other_sends",
        "with trio.fail_after(TAKE_LIMIT_S):",
        "with trio.fail_after(IDLE_LIMIT_S):",
    ),
    bug(
        "who was dialled and then refused stays connected",
        "tests/swarm/test_limits_of_hosts.py::test_who_was_dialled_and_says_a_hello_that_is_refused_is_parted_from",
        "if self._stands(peer, one)}",
        "if self._stands(peer, one) and peer in {came for _, came in strangers}}",
    ),
    bug(
        "what members found long ago, who are gone, outweighs for ever what others find now",
        "tests/swarm/reaching/test_dial_back.py"
        "::test_findings_of_long_ago_count_no_more_once_there_are_others_and_the_last_ones_stay",
        "self._findings = {checker: one for checker, one in self._findings.items() if one.found_at > since}",
        "self._findings = {checker: one for checker, one in self._findings.items() if since}",
    ),
    bug(
        "what came over a connection that is gone ends the one that has taken its place",
        "tests/swarm/test_host.py"
        "::test_connection_that_has_taken_anothers_place_stays_when_the_other_is_ended_for_what_came_over_it",
        "if conn.muxed_conn is stream.muxed_conn:",
        "if conn.muxed_conn.peer_id == stream.muxed_conn.peer_id:",
    ),
    bug(
        "a third says by itself how near it is, and so sends others to their own loopback",
        "tests/swarm/reaching/test_punching.py::test_third_that_lies_for_a_peer_sends_nobody_where_neither_can_be",
        "if reach_of(target[0]) < max(map(reach_of, (connected_at, _parsed(port.address)[0]))):",
        "if reach_of(target[0]) < reach_of(_parsed(port.address)[0]):",
    ),
    bug(
        "holes are punched towards the ports of services",
        "tests/swarm/reaching/test_punching.py::test_third_that_lies_for_a_peer_sends_nobody_where_neither_can_be",
        "if target[1] < PORT_LEAST:",
        "if target[1] < 1:",
    ),
    bug(
        "any record sends a node to what listens on its own loopback",
        "tests/swarm/test_dial_targets.py"
        "::test_loopback_is_dialled_by_who_is_there_alone_or_was_sent_there_by_its_user",
        "here = on_loopback and all(is_loopback(host) or host in mine for host in hosts)",
        "here = all(is_loopback(host) or host in mine for host in hosts)",
    ),
    bug(
        "made-up peers of least rank crowd a swarm's own members out of where it is looked up",
        "tests/swarm/rendezvous/test_meeting_points.py"
        "::test_made_up_peers_of_least_rank_leave_the_points_of_those_who_come_first_where_they_are",
        "(not self._comes_first(PeerId(peer)), _rank(slot[peer].point))",
        "_rank(slot[peer].point)",
    ),
    bug(
        "a node's table knows nobody who comes first",
        "tests/swarm/rendezvous/test_kademlia.py"
        "::test_who_comes_first_for_a_node_keeps_its_place_in_the_table_of_that_node",
        "self.store = PointStore(swarm_id, lambda peer: host.comes_first(peer))",
        "self.store = PointStore(swarm_id, host.comes_first)",
    ),
    bug(
        "a stream that is opened waits for its answer for ever",
        "tests/swarm/reaching/test_circuits.py::test_relay_that_answers_no_stream_is_left_in_time",
        """
            with trio.move_on_after(deadline_s) as scope:
                agreed = await agree(stream, protocol)
        """,
        """
            with trio.move_on_after(1e9 + deadline_s) as scope:
                agreed = await agree(stream, protocol)
        """,
    ),
    bug(
        "one relay takes the places of calls through the others",
        "tests/swarm/reaching/test_circuits.py::test_relay_that_names_callers_without_end_takes_no_place_of_another",
        "if self._pending[relay] >= PENDING_LIMIT:",
        "if self._pending.total() >= PENDING_LIMIT:",
    ),
    bug(
        "whoever wants to be met somewhere is met, however many ways are being taken",
        "tests/swarm/reaching/test_relayed_lanes.py::test_who_wants_to_meet_everywhere_at_once_is_met_at_a_few_places",
        "            self._check_meetings(peer)",
        "            pass",
    ),
    bug(
        "a way that came to nothing counts as being taken for ever",
        "tests/swarm/reaching/test_relayed_lanes.py::test_who_wants_to_meet_everywhere_at_once_is_met_at_a_few_places",
        "self._meetings -= Counter({peer: 1})",
        "pass",
    ),
    bug(
        "a stranger that was called and says nothing keeps its connection",
        "tests/swarm/test_links.py::test_stranger_that_was_called_and_answers_no_hello_keeps_no_connection",
        "await self._host.hang_up(peer)",
        "pass",
    ),
    bug(
        "a stream of a connection that is gone speaks for the next one's link",
        "tests/swarm/test_links.py::test_stream_of_a_connection_that_is_gone_takes_no_part_in_the_next_ones_link",
        "if not self._host.came_over(stream, link.connection):",
        "if False:",
    ),
    bug(
        "the head of a frame that comes in pieces is nobody's to pace",
        "tests/swarm/test_muxer.py::test_small_frames_are_paced_and_large_ones_are_not",
        "while len(head) < n:  # it may come in pieces",
        "while not head:",
    ),
    bug(
        "frames of streams that there are not cost their sender nothing",
        "tests/swarm/test_muxer.py::test_small_frames_are_paced_and_large_ones_are_not",
        "carries_much = kind == TYPE_DATA and length >= SMALL_FRAME_BYTES and self.is_open(stream)",
        "carries_much = kind == TYPE_DATA and length >= SMALL_FRAME_BYTES",
    ),
    bug(
        "an authority whose folder was restored forgets whom it revoked since",
        "tests/protocol/test_invites.py"
        "::test_authority_whose_folder_was_restored_joins_its_list_with_the_one_that_the_others_have",
        "joined = None if known is None or mine <= set(revocations.peers) else self.join(known, revocations)",
        "joined = None",
    ),
    bug(
        "whoever says hello over and over is answered each time",
        "tests/swarm/test_links.py::test_who_says_hello_over_and_over_is_answered_for_a_while_and_keeps_its_link",
        "if not self._hellos.take(stream.peer, trio.current_time()):",
        "if self._hellos.is_spent(stream.peer, -1.0):",
    ),
    bug(
        "the user is asked for a passphrase amid the rounds",
        "tests/node/discovery/test_link_ops.py::test_nobody_is_asked_for_a_passphrase_where_lists_are_joined",
        "if path.exists() and key_file.is_encrypted(path) and key_file.given_passphrase() is None:",
        "if False:",
    ),
)
