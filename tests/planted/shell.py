"""Bugs of what a member does around the machines of its rounds: effects, restarts, settling, catching up."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

SHELL: tuple[Bug, ...] = (
    bug(
        "an order that the disk does not take ends the node",
        "tests/node/rounds/test_inbox.py::test_order_that_the_disk_does_not_take_is_refused_and_the_node_goes_on",
        """
        except StorageError as error:
            raise ConfigError(str(error)) from None

    return perform
        """,
        """
        except ValueError as error:
            raise ConfigError(str(error)) from None

    return perform
        """,
    ),
    bug(
        "who gave an order that could not be written is told, and the node goes on as if it had been",
        "tests/node/rounds/test_inbox.py"
        "::test_who_waits_for_a_turn_that_ended_the_engine_never_goes_on_and_others_hear_its_error",
        """
        except StorageError:
            raise
        except (ConfigError, RemoteError) as error:
        """,
        """
        except (ConfigError, RemoteError) as error:
        """,
    ),
    bug(
        "the engine sends before it persists",
        "tests/node/test_swarm_in_a_box.py"
        "::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        """
        decided: Certificate | None = None
        """,
        """
        effects = sorted(effects, key=lambda effect: isinstance(effect, Persist))
        decided: Certificate | None = None
        """,
    ),
    bug(
        "promises pruned before the certificate is on disk",
        "tests/node/test_swarm_in_a_box.py::test_promises_of_a_round_are_kept_until_its_certificate_is_on_disk",
        """
        await trio.to_thread.run_sync(self._p.store.append_certificate, entry)
        """,
        """
        await trio.to_thread.run_sync(self._p.store.decided, entry.value)
        await trio.to_thread.run_sync(self._p.store.append_certificate, entry)
        """,
    ),
    bug(
        "a residual counted again after a restart although it may have been counted",
        "tests/node/test_swarm_in_a_box.py"
        "::test_what_may_have_been_counted_since_the_work_on_disk_is_not_contributed_again",
        "resumption.find(chain, countable=countable, staleness_rounds=staleness)",
        "resumption.find(chain, countable=True, staleness_rounds=staleness)",
    ),
    bug(
        "what encoding lost of work that was passed on comes again although a contribution announced since has it",
        "tests/node/state/test_resumption.py::test_what_was_passed_on_and_made_anew_since_counts_as_earlier",
        "still_ours = under_way and account.passed_on is not True",
        "still_ours = under_way",
    ),
    bug(
        "who waits for a turn that ended the engine goes on with nothing",
        "tests/node/rounds/test_inbox.py"
        "::test_who_waits_for_a_turn_that_ended_the_engine_never_goes_on_and_others_hear_its_error",
        """
            errors.append(error)
        over.set()
        """,
        """
            errors.append(error)
        finally:
            over.set()
        """,
    ),
    bug(
        "what one peer says pushes out what others said to the engine",
        "tests/node/rounds/test_inbox.py::test_members_of_a_large_swarm_are_heard_whole_however_much_one_peer_says",
        "peer_messages=HEARD_PEER_LIMIT_MESSAGES,",
        "peer_messages=HEARD_LIMIT_MESSAGES,",
        "self._remove_oldest(max(self._by_peer, key=lambda peer: len(self._by_peer[peer].places)))",
        "self._remove_oldest(next(iter(self._kept.values()))[0].peer)",
    ),
    bug(
        "large messages to the engine take as much memory as they like",
        "tests/node/rounds/test_inbox.py::test_large_messages_of_one_peer_and_of_all_take_no_more_memory_than_they_may",
        "all_bytes=HEARD_LIMIT_BYTES,",
        "all_bytes=1 << 60,",
    ),
    bug(
        "the ready mark not written before Ready",
        "tests/node/test_swarm_in_a_box.py"
        "::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        """
            yield from self._mark_announced()
        if ready.role == CONTRIBUTOR and delegate is not None:
        """,
        """
            pass
        if ready.role == CONTRIBUTOR and delegate is not None:
        """,
    ),
    bug(
        "the ready mark not written before a contribution is announced again",
        "tests/node/test_swarm_in_a_box.py"
        "::test_a_contribution_that_is_announced_again_after_a_restart_is_marked_first",
        "yield from self._mark_announced()  #",
        "pass  #",
    ),
    bug(
        "a joiner that trains before it is a member",
        "tests/node/test_swarm_in_a_box.py"
        "::test_joiner_has_no_weight_in_the_round_in_which_it_comes_and_counts_in_the_next",
        "if self._me in self._recent_members() else JOINER",
        "if True else JOINER",
    ),
    bug(
        "work is settled by finals whose bitmaps are not the certified ones",
        "tests/node/test_swarm_in_a_box.py"
        "::test_member_signs_nothing_whose_bitmaps_are_not_those_that_it_has_and_counts_its_work_once",
        "if finals.bitmaps_root != value.bitmaps:",
        "if False:",
    ),
    bug(
        "finals of an earlier base worked out in the next round",
        "tests/node/test_swarm_in_a_box.py::test_finals_of_an_earlier_round_that_come_late_change_nothing",
        "or plan.base != machine.previous.hash:",
        "or False:",
    ),
    bug(
        "a certificate of a rollback to nowhere is decided",
        "tests/node/test_one_word.py::test_certificate_of_a_rollback_to_nowhere_ends_no_node",
        "leads_back=chain.leads_back,",
        "",
    ),
    bug(
        "finals that were fetched are signed whatever their plan says",
        "tests/node/test_one_word.py::test_finals_of_a_plan_that_the_settings_forbid_are_signed_by_nobody",
        "check_plan(plan, plan.planner, machine.previous, self._settings, voting=machine.agreement.voting)",
        "pass",
    ),
    bug(
        "one peer's early words take the room of all others'",
        "tests/protocol/test_early.py::test_what_is_early_takes_no_more_memory_than_it_may_and_nobody_anothers",
        "while len(words.places) > self._peer_messages or words.size > self._peer_bytes:",
        "while len(words.places) > self._all_messages:",
    ),
    bug(
        "every pair that a plan relays is a job of its own",
        "tests/node/rounds/test_reducing.py::test_plans_full_of_relays_that_come_one_after_the_other_are_followed",
        """
        self._jobs.send_nowait(partial(self._try_all_again, self._relayed))
        """,
        """
        for peer in self._relayed:
            self._jobs.send_nowait(partial(self._try_again, peer))
        """,
    ),
    bug(
        "the contribution is not settled before the state is applied",
        "tests/node/test_swarm_in_a_box.py"
        "::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        """
        yield SettleWork()
        yield Apply(certificate)
        """,
        """
        yield Apply(certificate)
        """,
    ),
    bug(
        "a pause takes back a contribution that is made",
        "tests/protocol/test_member.py::test_pause_and_resume_in_one_round_lead_back_to_the_role_of_before",
        "if machine is None or self._here.made:",
        "if machine is None:",
    ),
    bug(
        "a member that voted contributes anew after a restart",
        "tests/protocol/test_member.py::test_node_that_is_bound_to_a_value_makes_no_other_contribution_to_its_round",
        "lost = not here.made and (self._is_bound() or (self._is_announced() and not self._is_alone()))",
        "lost = not here.made and self._is_announced() and not self._is_alone()",
    ),
    bug(
        "a member that announced contributes anew after a restart",
        "tests/protocol/test_member.py::test_node_that_lost_what_it_announced_stays_an_observer_through_a_pause",
        "lost = not here.made and (self._is_bound() or (self._is_announced() and not self._is_alone()))",
        "lost = not here.made and self._is_bound()",
    ),
    bug(
        "who has no finite values for a round says nothing of it",
        "tests/node/rounds/test_participation.py"
        "::test_values_that_are_not_finite_are_announced_by_nobody_and_spoil_no_later_ones",
        "return absent_ready(OBSERVER, self._state_store.head, self._state_store.digest)",
        "return None",
    ),
    bug(
        "the doctor tries code that a file names because its founder may run it",
        "tests/node/test_doctor.py::test_code_that_a_file_names_is_tried_only_where_this_command_allows_it",
        "installed = found.ok and _may_be_imported(manifest, wanted.allowed)",
        "installed = found.ok",
    ),
    bug(
        "work is settled while its round is under way",
        "tests/node/rounds/test_participation.py::test_work_of_the_round_under_way_is_settled_by_its_certificate_only",
        "return self.made is not None and self.made.base != chain.head.hash",
        "return self.made is not None",
    ),
    bug(
        "work of a round that a rebase ended is dropped",
        "tests/node/rounds/test_participation.py::test_work_is_kept_whole_where_a_rebase_ended_its_round_undecided",
        "self.settle(made.round, None)",
        "self.drop()",
    ),
    bug(
        "work of which nobody can say whether it was counted comes again",
        "tests/node/test_swarm_in_a_box.py"
        "::test_member_signs_nothing_whose_bitmaps_are_not_those_that_it_has_and_counts_its_work_once",
        "return (True,) * made.encoded.grid.chunks",
        "return None",
    ),
    bug(
        "work made after a restart is settled by what was announced before it",
        "tests/node/rounds/test_participation.py::test_work_of_the_round_under_way_is_settled_by_its_certificate_only",
        "same = place is not None and finals.plan.participants[place].root == made.encoded.root",
        "same = place is not None",
    ),
    bug(
        "residuals on an abandoned state are carried on",
        "tests/node/rounds/test_participation.py::test_residual_of_before_goes_with_the_state_too",
        """
        if abandoned:
            self.drop()
        """,
        """
        if abandoned:
            self.made = None
        """,
    ),
    bug(
        "what a trainer took up after a restart outlives the state that it was learnt on",
        "tests/node/rounds/test_participation.py"
        "::test_what_was_taken_up_goes_with_the_state_where_a_vote_of_before_goes_back",
        "self._contributions.stand_on(self._state_store.chain)",
        "pass",
    ),
    bug(
        "a residual ages one round however many passed",
        "tests/node/rounds/test_participation.py"
        "::test_work_is_kept_for_as_many_rounds_as_the_limit_says_though_nothing_else_was_made",
        "rounds = max(1, chain.standing.round - made.round + 1)",
        "rounds = 1",
    ),
    bug(
        "amended settings do not reach what is contributed",
        "tests/node/rounds/test_amendments.py::test_part_in_a_round_is_by_its_settings_from_the_anchor_on",
        """
        self._contributions.retune(sync.plan_codec, manifest.round.staleness_rounds, mixing=sync.applied_mixing)
        """,
        """

        """,
    ),
    bug(
        "a state that was fetched is not on disk before anything follows from it",
        "tests/node/state/test_state_store.py::test_newcomer_fetches_adopts_serves_and_keeps_the_state",
        """
        self._hold(state, await trio.to_thread.run_sync(self._p.cache.header, state))
        await self._saver.save_now(state)
        """,
        """
        self._hold(state, await trio.to_thread.run_sync(self._p.cache.header, state))
        await self._saver.save_soon(state)
        """,
    ),
    bug(
        "states that were abandoned stay on disk",
        "tests/node/state/test_earlier_states.py"
        "::test_rollback_lets_go_of_what_it_abandoned_and_stands_on_what_was_kept",
        "await self._saver.go_back(entry.value.state_round)",
        "await trio.lowlevel.checkpoint()",
    ),
    bug(
        "a state on disk counts without its certificate",
        "tests/node/state/test_state_store.py::test_state_on_disk_counts_only_with_its_certificate",
        "if header.digest != self.chain.value(round).digest:",
        "if header.round != self.chain.value(round).round:",
    ),
    bug(
        "the certificate does not wait for the work of its round",
        "tests/node/test_swarm_in_a_box.py::test_what_a_node_alone_knows_of_a_round_is_safe_before_the_certificate_is",
        """
        yield FinishWork(value)
        """,
        """

        """,
    ),
    bug(
        "one of two takes itself for alone",
        "tests/protocol/test_member.py"
        "::test_who_announced_makes_another_contribution_only_where_nobody_else_can_have_heard",
        "return self._here.chain.voting.everyone(self._head) == {self._me}",
        "return len(self._head.members) <= 2",
    ),
    bug(
        "a consent to go back before the state is on disk",
        "tests/node/rounds/test_going_back.py::test_order_is_said_in_every_round_once_the_state_is_on_disk",
        "        return StateHeld(target, (yield KeepEarlier(state)))\n",
        "        return StateHeld(target, chain.digest(target.round))\n",
    ),
    bug(
        "a policy that follows another policy to go back",
        "tests/node/rounds/test_going_back.py::test_policy_follows_what_a_user_ordered_and_no_other_policy",
        "for peer, consent in consents if consent.asked and peer != machine.me}",
        "for peer, consent in consents if peer != machine.me}",
    ),
    bug(
        "any state is shown for the one that is gone back to",
        "tests/node/rounds/test_going_back.py::test_state_that_is_another_than_was_certified_is_not_shown",
        "return digest == certified or (target.round == 0 and certified == NO_HASH)",
        "return True",
    ),
    bug(
        "a state that nobody gave is sought without a pause",
        "tests/node/rounds/test_going_back.py::test_state_for_a_vote_comes_from_peers_and_is_tried_again",
        "self._not_before = now + RETRY_S",
        "pass",
    ),
    bug(
        "the state of an order is kept by members alone",
        "tests/node/rounds/test_going_back.py::test_state_of_an_order_is_kept_while_this_node_is_no_member",
        """
        if self._asked is not None or not machine.agreement.votes:
            return self._asked
        """,
        """
        if self._asked is not None or not machine.agreement.votes:
            return self._asked if machine.agreement.votes else None
        """,
    ),
    bug(
        "the state of an order is forgotten before it is read again",
        "tests/node/rounds/test_going_back.py::test_state_of_an_order_outlives_rounds_in_which_it_is_not_read_yet",
        "asked = () if self._asked is None else (self._asked,)",
        "asked: tuple[Target, ...] = ()",
    ),
    bug(
        "the state of an order is sought with the next tick",
        "tests/protocol/test_member.py::test_order_to_go_back_is_kept_and_the_state_that_it_takes_is_sought_at_once",
        "if self.machine is not None:  # as the check has it",
        "if False:",
    ),
    bug(
        "an order that was carried out stays on disk",
        "tests/node/rounds/test_going_back.py::test_order_outlives_a_restart_until_it_is_carried_out",
        "if self._asked is not None and not self._chain.can_go_back_to(self._asked):",
        "if False:",
    ),
    bug(
        "an order to amend other settings than those in force stands",
        "tests/node/rounds/test_amendments.py::test_order_of_other_settings_than_those_in_force_is_over_and_told",
        "return in_force is not None and stands_on(wanted.amendment, in_force)",
        "return in_force is not None",
    ),
    bug(
        "an order that is carried out is told as overtaken",
        "tests/node/rounds/test_amendments.py::test_order_that_is_carried_out_is_over",
        "return all(tables[section].get(name, False) == value for section, _, name, value in keys)",
        "return False",
    ),
    bug(
        "an order of the user's is taken outside of a round",
        "tests/protocol/test_member.py::test_order_that_takes_a_round_is_refused_outside_of_one_and_a_withdrawal_is_not",
        "        if self.standing is not Standing.IN_ROUND:\n",
        "        if False:\n",
    ),
    bug(
        "a daemon looks after reductions also while there is none",
        "tests/node/rounds/test_reducing.py::test_a_driver_looks_around_while_a_reduction_is_under_way_and_at_no_other_time",
        "if self._under_way.is_set():",
        "if False:",
    ),
    bug(
        "an engine at rest ticks as often as one in a round",
        "tests/node/test_quiet_time.py::test_engines_tick_once_a_second_while_trainers_train_and_end_the_round_at_once",
        "if shown and self.member.rests:",
        "if False:",
    ),
    bug(
        "an engine rests whatever its member waits for",
        "tests/node/rounds/test_inbox.py::test_engine_ticks_seldom_when_its_member_rests_and_its_phase_is_shown",
        "if shown and self.member.rests:",
        "if True:",
    ),
    bug(
        "a daemon of a crowd ticks as often as one of few",
        "tests/node/rounds/test_inbox.py::test_engine_ticks_seldom_when_its_member_rests_and_its_phase_is_shown",
        "return min(RESTING_TICK_S, in_crowd(TICK_S, len(self._p.links.linked())))",
        "return TICK_S",
    ),
    bug(
        "a daemon asks twenty times a second whether a relay has room though nothing is relayed",
        "tests/node/rounds/test_reducing.py::test_a_driver_asks_for_room_at_relays_only_while_something_is_relayed",
        "if self._relayed:\n    self._passes_on.set()",
        "self._passes_on.set()",
    ),
    bug(
        "a daemon that waited through a plan without relays never asks one for room again",
        "tests/node/rounds/test_reducing.py"
        "::test_who_waits_through_a_plan_without_relays_asks_for_room_under_the_next_with_some",
        "if self._passes_on.is_set():",
        "if True:",
    ),
    bug(
        "a member rests while it waits for its lead",
        "tests/protocol/test_member.py"
        "::test_member_that_waits_for_a_lead_does_not_rest_and_while_it_trains_it_waits_for_none",
        "trains = facts.plan is None and facts.gathering.half_ready_at is None and self.agreement.certificate is None",
        "trains = facts.plan is None and self.agreement.certificate is None",
    ),
    bug(
        "a member that is to leave rests",
        "tests/protocol/test_member.py::test_member_that_something_waits_for_does_not_rest",
        "if machine is None or not machine.rests or self.leaving:",
        "if machine is None or not machine.rests:",
    ),
    bug(
        "uninstall takes a folder for a node's by names that anybody gives",
        "tests/node/test_remains.py::test_folder_that_is_no_node_s_keeps_files_and_folders_of_the_same_names",
        "if not any(fnmatchcase(path.name, name) for path in paths for name in TELLING):",
        "if not paths:",
    ),
    bug(
        "a socket's folder is believed whoever made it",
        "tests/node/test_control.py::test_socket_in_a_folder_that_another_may_have_made_meanwhile_is_not_the_nodes",
        "return path if is_its_own else own",
        "return path",
    ),
    bug(
        "lanes are brought up only once there is a plan",
        "tests/node/rounds/test_participation.py"
        "::test_lanes_to_those_who_contribute_too_are_brought_up_while_all_train",
        """
        if order.beside:
            chunks = self._contributions.fragment(self._state_store.chain.head.next_round).grid.chunks
            self._p.reduce.bring_up_lanes(order.beside, chunks)
        """,
        """

        """,
    ),
    bug(
        "in a plan lanes are made to everybody",
        "tests/node/rounds/test_reducing.py::test_who_owns_no_chunk_makes_lanes_only_to_owners",
        "others = partners(plan.remaining, self._owners, self._identity.peer_id, plan.delegates)",
        "others = frozenset(plan.remaining) - {self._identity.peer_id}",
    ),
    bug(
        "lanes are brought up to everybody",
        "tests/node/rounds/test_reducing.py::test_lanes_are_brought_up_only_where_one_of_the_two_will_own_chunks",
        "self._owners = expected_owners(others, self._rates_by_peer, chunks)",
        "self._owners = frozenset({*peers, me})",
    ),
    bug(
        "who will own chunks is guessed as if nobody's rates were known",
        "tests/node/rounds/test_reducing.py::test_who_will_own_chunks_goes_by_the_rates_of_the_last_plan",
        "self._owners = expected_owners(others, self._rates_by_peer, chunks)",
        "self._owners = expected_owners(others, {}, chunks)",
    ),
    bug(
        "all lanes of a node are made at once",
        "tests/node/rounds/test_reducing.py::test_few_lanes_are_made_at_once_and_in_a_crowd_each_is_given_longer",
        "self._making = trio.CapacityLimiter(LANES_AT_ONCE)",
        "self._making = trio.CapacityLimiter(1 << 20)",
    ),
    bug(
        "in a crowd a lane is given up as soon as among few",
        "tests/node/rounds/test_reducing.py::test_few_lanes_are_made_at_once_and_in_a_crowd_each_is_given_longer",
        "await self._lanes.ensure(peer, deadline_s=share * in_crowd(LANE_DEADLINE_S, self._nodes))",
        "await self._lanes.ensure(peer, deadline_s=share * LANE_DEADLINE_S)",
    ),
    bug(
        "training is ordered beside nobody",
        "tests/protocol/test_member.py::test_training_is_ordered_beside_those_alive_who_are_expected_to_contribute_too",
        "yield Train(beside=machine.trainers())",
        "yield Train()",
    ),
    bug(
        "of two that come together both dial",
        "tests/node/rounds/test_reducing.py"
        "::test_lanes_are_brought_up_ahead_by_one_of_two_each_beginning_with_who_comes_after_it",
        "around = dialling_order(wanted, {*peers, me}, me)",
        "around = sorted(wanted)",
    ),
    bug(
        "a pair that is relayed is dialled with every round that begins",
        "tests/node/rounds/test_reducing_repair.py"
        "::test_pair_that_is_relayed_is_not_dialled_with_every_round_that_begins",
        "wanted = partners(peers, self._owners, me, delegates) - self._relayed_paths.keys()",
        "wanted = partners(peers, self._owners, me, delegates)",
    ),
    bug(
        "a driver that runs late accuses as soon as one that does not",
        "tests/node/rounds/test_reducing_stalls.py"
        "::test_who_owes_a_contribution_and_is_silent_is_accused_by_who_runs_late_itself_only_later",
        "self._pace = Pace(reduction, self._lanes, me, now, late_s=self._late_s)",
        "self._pace = Pace(reduction, self._lanes, me, now)",
    ),
    bug(
        "a lane is begun anew where it takes longer than it is waited for",
        "tests/node/rounds/test_reducing.py::test_lane_that_takes_longer_than_it_is_waited_for_is_not_begun_anew",
        """
        self._jobs.send_nowait(partial(self._have_lanes, hops, are_up, left))
        with trio.move_on_after(LANE_HEAD_START_S):  # who has none then is owed what is posted, and nobody waits for it
            await are_up.wait()
        """,
        """
        with trio.move_on_after(LANE_HEAD_START_S):  # who has none then is owed what is posted, and nobody waits for it
            await self._have_lanes(hops, are_up, left)
        """,
    ),
    bug(
        "a relay that runs late names who sends nothing as soon as one that does not",
        "tests/collectives/test_relay_account.py"
        "::test_relay_that_runs_late_itself_names_who_sends_or_takes_nothing_only_later",
        "self._coming = StallWatch[Way](stall_s=stall_s, planned=planned, late_s=late_s)",
        "self._coming = StallWatch[Way](stall_s=stall_s, planned=planned)",
    ),
    bug(
        "a node that waits says so no sooner than it loses patience, which others do first",
        "tests/node/rounds/test_pace.py::test_it_names_itself_before_others_would_also_where_it_runs_late",
        "self._waiting_s, self._waits_since = in_crowd(STALL_S, len(plan.participants)), Since()",
        "self._waiting_s, self._waits_since = stall_s + late_s(), Since()",
    ),
    bug(
        "a crowd is given no more time for its lanes than a few",
        "tests/node/rounds/test_pace.py::test_in_a_crowd_all_are_waited_for_longer",
        "return in_crowd(min(doubled(STALL_S, plan.attempt + plan.view), STALL_LIMIT_S), len(plan.participants))",
        "return min(doubled(STALL_S, plan.attempt + plan.view), STALL_LIMIT_S)",
    ),
    bug(
        "the stall deadline is short again under another lead",
        "tests/node/rounds/test_pace.py::test_stall_deadline_doubles_with_every_attempt_and_every_view",
        "doubled(STALL_S, plan.attempt + plan.view)",
        "doubled(STALL_S, plan.attempt)",
    ),
    bug(
        "a crowd hears of every change of every stall",
        "tests/node/rounds/test_pace.py"
        "::test_stall_is_told_at_once_and_again_while_it_lasts_and_to_a_crowd_more_seldom",
        "(again_s - STALL_S if is_news else again_s)",
        "(0.0 if is_news else again_s)",
    ),
    bug(
        "who runs late holds late finals against their owner as soon as ever",
        "tests/node/rounds/test_pace.py::test_who_runs_late_itself_accuses_nobody_before_its_lag_is_over_too",
        "self._late = StallWatch[PeerId](stall_s=stall_s + LATE_S, planned={}, late_s=late_s)",
        "self._late = StallWatch[PeerId](stall_s=stall_s + LATE_S, planned={})",
    ),
    bug(
        "who runs late accuses who takes nothing as soon as ever",
        "tests/node/rounds/test_pace.py::test_who_runs_late_itself_accuses_nobody_before_its_lag_is_over_too",
        "self._sending = StallWatch[PeerId](stall_s=stall_s, planned=outgoing, late_s=late_s)",
        "self._sending = StallWatch[PeerId](stall_s=stall_s, planned=outgoing)",
    ),
    bug(
        "a lane brought up ahead leaves its peer out of reach",
        "tests/node/rounds/test_reducing.py::test_peer_to_which_a_lane_came_up_ahead_is_within_reach_again",
        """
        self.unreachable.discard(peer)
        return True
        """,
        """
        return True
        """,
    ),
    bug(
        "who is to leave waits for the end of the snapshot that comes",
        "tests/node/gossip/test_engine.py::test_who_is_to_leave_while_a_snapshot_comes_leaves_at_once_and_has_no_state",
        "self._obtaining.cancel()  # a snapshot may take hours to come",
        "pass",
    ),
    bug(
        "in a crowd both of two dial",
        "tests/node/rounds/test_reducing.py::test_in_a_crowd_one_of_two_in_a_plan_leaves_the_lane_to_the_other",
        "left = {peer for peer in hops & others if not self._dials(peer)}  # who only relays leaves it to this node",
        "left = set[PeerId]()",
    ),
    bug(
        "in a crowd who leaves it to the other to dial never dials",
        "tests/node/rounds/test_reducing.py::test_in_a_crowd_one_of_two_dials_and_the_other_only_where_no_lane_comes",
        "if not await self._comes(peer):",
        "if not await self._comes(peer) and False:",
    ),
    bug(
        "an owner of chunks is to dial all who own none",
        "tests/node/rounds/test_reducing.py"
        "::test_of_two_one_is_first_to_dial_and_who_owns_nothing_where_the_other_owns",
        "return peer in owners",
        "return me in owners",
    ),
    bug(
        "where a few own all chunks everybody dials the same owner first",
        "tests/collectives/test_partition.py::test_where_a_few_own_all_chunks_no_owner_is_everyones_first_to_dial",
        "start = -(-place * len(ring) // len(everybody))",
        "start = 0",
    ),
    bug(
        "a node's reductions do not know that most answer late",
        "tests/node/rounds/test_reducing_stalls.py::test_a_node_accuses_later_where_most_of_its_members_answer_late",
        "late_s=members.late_s,",
        "late_s=members.own_lag_s,",
    ),
    bug(
        "a node's detector asks as often while all train as in a round",
        "tests/node/test_detector_wiring.py::test_detector_of_a_node_asks_less_often_while_its_member_rests",
        "member.awaited, lambda: member.rests",
        "member.awaited, lambda: False",
    ),
    bug(
        "what a round changes of one parameter is changed again where another lies in the same memory",
        "tests/node/training/test_flat_parameters.py::test_what_would_be_changed_twice_or_not_at_all_is_refused",
        "if begin[0] and begin[0] == end[0] and begin[1] < end[1]:",
        "if False:",
    ),
    bug(
        "complex parameters stay out of the exchange in silence",
        "tests/node/training/test_flat_parameters.py::test_what_would_be_changed_twice_or_not_at_all_is_refused",
        "if (value.is_floating_point() or value.is_complex()) and (frozen or value.requires_grad)",
        "if value.is_floating_point() and (frozen or value.requires_grad)",
    ),
    bug(
        "a loop waits for ever for a daemon that was stopped",
        "tests/node/loops/test_loop_steps.py::test_who_takes_nothing_is_sent_to_for_a_while_and_no_longer",
        'connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))',
        "connection.settimeout(None)",
    ),
    bug(
        "a loop's connection with its daemon has no limit on what is sent",
        "tests/node/test_own_loop.py::test_what_a_loop_tells_its_daemon_is_given_up_where_that_takes_nothing",
        "limit_sends(channel.connection, SEND_DEADLINE_S)",
        "pass",
    ),
    bug(
        "training that failed is still in the swarm when it begins again",
        "tests/node/test_own_loop_hf.py"
        "::test_training_that_failed_and_begins_again_leaves_first_and_counts_each_batch_once",
        "self._leave()  # what failed before, or is tried again with smaller batches, did not come to its end",
        "pass",
    ),
    bug(
        "uninstalling removes folders of its user's that have the names of a node's",
        "tests/node/test_remains.py"
        "::test_folders_of_plain_names_that_hold_more_than_a_nodes_stay_and_no_node_begins_around_them",
        "if key is not None or (use is not None and is_a_nodes(path)):",
        "if key is not None or use is not None:",
    ),
    bug(
        "a node begins around folders of its user's, and tidies them",
        "tests/node/test_remains.py"
        "::test_folders_of_plain_names_that_hold_more_than_a_nodes_stay_and_no_node_begins_around_them",
        'if not (folder / "agreement.log").exists():',
        "if False:",
    ),
    bug(
        "a key that takes the place of a protected one is written in clear",
        "tests/node/test_keys.py::test_rotation_of_a_key_whose_passphrase_was_typed_gives_another_that_it_opens",
        "given_passphrase() or _opened_by.get(path.parent)",
        "given_passphrase()",
    ),
    bug(
        "a card may say anything to a terminal",
        "tests/node/test_card.py::test_what_is_no_card_is_refused_in_a_line_and_none_of_it_reaches_the_terminal",
        """
            peer: Peer
            rounds: Count
        """,
        """
            peer: PeerId
            rounds: Count
        """,
    ),
)
