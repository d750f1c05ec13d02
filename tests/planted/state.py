"""Bugs of what is on disk, and of states that come from others: logs, files, transfers, checkpoints."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

STATE: tuple[Bug, ...] = (
    bug(
        "a key in which a bit flipped is another node's",
        "tests/protocol/test_key_file.py::test_key_in_which_a_bit_flipped_is_no_other_nodes",
        "if says and _public_line(key) not in says:",
        "if not says and _public_line(key) in says:",
    ),
    bug(
        "a rotation that is cut short leaves a key without its promises",
        "tests/node/test_keys.py::test_rotation_cut_short_leaves_no_key_beside_promises_that_are_gone",
        """
        path.replace(kept)
        sync_folder(folder)
        for name in LEFT_BEHIND:
            if (folder / name).exists():
                (folder / name).replace(folder / f"{name}.{mark}")
        """,
        """
        for name in LEFT_BEHIND:
            if (folder / name).exists():
                (folder / name).replace(folder / f"{name}.{mark}")
        path.replace(kept)
        """,
    ),
    bug(
        "a damaged id of the swarm is taken for another's",
        "tests/node/state/test_binding.py::test_damaged_id_of_the_swarm_is_told_and_not_taken_for_that_of_another",
        'if not re.fullmatch("[0-9a-f]{64}", known):',
        "if False:",
    ),
    bug(
        "a power cut takes the first checkpoint away",
        "tests/node/state/test_checkpoints.py::test_the_first_checkpoint_is_there_after_a_power_cut",
        """
        make_folder(folder)
        _remove(partial)
        """,
        """
        folder.mkdir(exist_ok=True)
        _remove(partial)
        """,
    ),
    bug(
        "a power cut takes a new node's folder away, with its key",
        "tests/node/test_simulated_disk.py::test_a_data_folder_is_there_after_a_power_cut_with_those_in_it",
        "make_folder(folder, mode=PRIVATE_MODE)",
        "folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_MODE)",
    ),
    bug(
        "a bit that is flipped in a file of finals ends a node that contributes the largest values alone",
        "tests/node/test_sparse_contributions.py"
        "::test_final_in_whose_file_a_bit_was_flipped_costs_its_chunk_what_had_no_place_and_the_node_nothing_else",
        "if finals is not None and finals.chunks[chunk].values_intact else None",
        "if finals is not None else None",
    ),
    bug(
        "a power cut takes the first evidence away",
        "tests/node/audits/test_evidence_store.py::test_the_first_evidence_is_there_after_a_power_cut",
        """
        make_folder(self._folder)
        write_atomically(self._path(verdict.digest), data)
        """,
        """
        self._folder.mkdir(exist_ok=True)
        write_atomically(self._path(verdict.digest), data)
        """,
    ),
    bug(
        "a power cut takes an agent's first file away",
        "tests/node/sapo/test_learner_state.py::test_the_first_file_is_there_after_a_power_cut",
        """
            make_folder(folder)
        metadata = {METADATA: msgspec.json.encode(progress).decode()}
        """,
        """
            folder.mkdir(parents=True, exist_ok=True)
        metadata = {METADATA: msgspec.json.encode(progress).decode()}
        """,
    ),
    bug(
        "a power cut takes the first moments away",
        "tests/node/gossip/test_moments.py::test_the_first_moments_are_there_after_a_power_cut",
        """
        def _make_folder(self) -> None:
            with disk_errors(self._folder.parent):
                make_folder(self._folder)
        """,
        """
        def _make_folder(self) -> None:
            with disk_errors(self._folder.parent):
                self._folder.mkdir(exist_ok=True)
        """,
    ),
    bug(
        "a power cut takes the folders away that were made above one",
        "tests/node/test_simulated_disk.py"
        "::test_a_folder_that_is_made_to_stay_is_there_after_a_power_cut_with_those_above_it",
        """
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        """,
        """
        path.mkdir(parents=True, exist_ok=True)
        """,
    ),
    bug(
        "after a rewrite that failed a log takes records into the file that was replaced",
        "tests/node/test_simulated_disk.py"
        "::test_what_a_log_takes_after_a_rewrite_that_failed_is_in_the_file_that_is_there",
        "if self._may_be_replaced:",
        "if False:",
    ),
    bug(
        "a damaged count of starts begins anew",
        "tests/node/state/test_store.py::test_damaged_boot_counter_goes_on_beyond_all_that_there_were",
        'counted = b"%d" % time.time()',
        'counted = b"0"',
    ),
    bug(
        "what chain.log lost is not looked for in the node's own checkpoint",
        "tests/node/test_bad_folder.py::test_entries_that_the_chain_lost_are_taken_from_the_newest_checkpoint",
        "if position > (head.term, head.round):",
        "if position > (head.term, head.round + (1 << 20)):",
    ),
    bug(
        "a rebase that is taken from the checkpoint is not on disk where it leaves fewer entries",
        "tests/node/test_bad_folder.py"
        "::test_rebase_that_the_chain_lost_is_taken_from_the_newest_checkpoint_though_fewer_entries_are_left",
        "if chain.head.hash != known:",
        "if chain.height > 3:",
    ),
    bug(
        "entries that hold behind the damage of chain.log are dropped",
        "tests/node/test_bad_folder.py::test_entries_that_the_chain_lost_are_taken_from_the_newest_checkpoint",
        "(*entries_beyond(store.folder, chain.head), *store.certificates_behind_damage())",
        "(*entries_beyond(store.folder, chain.head),)",
    ),
    bug(
        "what a node takes back from its checkpoint is not on disk",
        "tests/node/test_bad_folder.py::test_entries_that_the_chain_lost_are_taken_from_the_newest_checkpoint",
        "store.replace_chain(chain.entries)",
        "pass",
    ),
    bug(
        "a damaged file of forks is read as one without any",
        "tests/protocol/test_fork_watch.py::test_certificate_for_a_decided_round_stops_the_node_and_is_kept_and_passed_on",
        'raise RemoteError("its bytes are not those that were written")',
        "pass",
    ),
    bug(
        "what an earlier start noted of a damaged log is forgotten by the next",
        "tests/node/state/test_store.py::test_both_logs_damaged_may_have_bound_the_node_a_round_further",
        "self._bound = marks + [record for record in self._bound if record.kind != PASSED]",
        "self._bound = marks + [record for record in self._bound if record.kind not in (PASSED, ABSTAIN)]",
    ),
    bug(
        "finals are taken that do not lead to the certified digest",
        "tests/node/test_followers_in_a_box.py::test_finals_that_do_not_lead_to_the_certified_digest_are_none",
        "if header.digest == value.digest:",
        "if True:",
    ),
    bug(
        "a chunk of an image is not checked",
        "tests/node/state/test_image_exchange.py::test_what_leads_to_another_image_is_not_taken",
        "if chunk_hash(image.data) != self.header.chunk_hash(chunk):",
        "if False:",
    ),
    bug(
        "an image's header has any digest",
        "tests/node/state/test_image_exchange.py::test_answer_that_does_not_hold_is_left_and_so_is_who_gave_it",
        "if header.digest != request.certified:",
        "if False:",
    ),
    bug(
        "changes are asked for since another state than is here",
        "tests/node/state/test_image_exchange.py::test_changes_are_asked_for_since_the_state_that_is_here_and_no_other",
        "return held if self._cache.digest(held) == request.before else None",
        "return held",
    ),
    bug(
        "changes may be of any length",
        "tests/node/state/test_image_exchange.py::test_answer_that_does_not_hold_is_left_and_so_is_who_gave_it",
        "0 < size <= changes_limit_bytes(grid.length(chunk))",
        "0 < size",
    ),
    bug(
        "the dearest way to a policy is taken",
        "tests/node/state/test_image_exchange.py::test_the_cheapest_of_changes_finals_and_the_whole_is_taken",
        "min(last, whole)",
        "max(last, whole)",
    ),
    bug(
        "an image on disk is believed whose state nobody certified",
        "tests/node/state/test_policy_images.py::test_a_file_that_is_not_the_certified_image_is_none",
        "if image.header.digest == certified(image.round):",
        "if True:",
    ),
    bug(
        "a damaged image on disk is believed",
        "tests/node/state/test_policy_images.py::test_a_file_that_is_not_the_certified_image_is_none",
        'raise ValueError("a chunk of it has changed")',
        "pass",
    ),
    bug(
        "an image is given to who is not linked",
        "tests/node/state/test_image_exchange.py::test_who_is_not_linked_is_told_nothing",
        """
        if stream.peer not in self._linked():
            raise RemoteError("wants an image without having been admitted", peer=stream.peer)
        """,
        """
        if False:
            raise RemoteError("wants an image without having been admitted", peer=stream.peer)
        """,
    ),
    bug(
        "an excluded contribution's buffers come again",
        "tests/node/state/test_contributions.py::test_nothing_of_buffers_comes_again",
        """
        if contribution.chunk_codec(chunk).plain:
            out.fill(0)
            return
        """,
        "",
    ),
    bug(
        "the log's append without fsync",
        "tests/node/test_swarm_in_a_box.py"
        "::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        """
            os.fsync(self._file.fileno())
        except OSError:
        """,
        """
            pass
        except OSError:
        """,
    ),
    bug(
        "an atomic write without syncing its folder",
        "tests/node/test_swarm_in_a_box.py"
        "::test_three_nodes_certify_rounds_to_the_bit_and_every_stretch_of_work_is_counted_once",
        """
            raise
        sync_folder(path.parent)
        """,
        """
        raise
        """,
    ),
    bug(
        "ready records dropped when the log is rewritten",
        "tests/node/state/test_store.py::test_announced_contributions_are_still_known_when_the_log_was_cut",
        """
        if self._agreement.size > AGREEMENT_LOG_LIMIT_BYTES:
        """,
        """
        if self._agreement.size > AGREEMENT_LOG_LIMIT_BYTES:
            self._bound = [record for record in self._bound if record.kind != "ready"]
        """,
    ),
    bug(
        "a folder of its own work that a power cut takes along",
        "tests/node/test_swarm_in_a_box.py::test_what_a_node_alone_knows_of_a_round_is_safe_before_the_certificate_is",
        """
        path.mkdir(mode, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder in which one may make others, and read nothing
            sync_folder(path.parent)
        """,
        """
        path.mkdir(mode, exist_ok=True)
        """,
    ),
    bug(
        "a state to go back to is served for the next rounds only",
        "tests/node/state/test_earlier_states.py"
        "::test_a_state_that_is_kept_is_served_when_the_cache_has_long_let_go_of_it",
        "await self._earlier.hold(request.round)",
        "await trio.lowlevel.checkpoint()",
    ),
    bug(
        "a header with another digest than the certified one is followed",
        "tests/node/state/test_catchup.py::test_header_that_is_not_the_certified_one_is_not_followed",
        "if header.round != value.round or not (anything or header.digest == certified):",
        "if header.round != value.round:",
    ),
    bug(
        "the initial state comes from anybody",
        "tests/node/state/test_catchup.py::test_initial_state_comes_from_a_founder_only",
        "able = peers if certified != NO_HASH else [peer for peer in peers if peer in value.members]",
        "able = peers",
    ),
    bug(
        "finals of another plan than was asked for are taken",
        "tests/node/state/test_catchup.py::test_answer_without_the_finals_asked_for_is_not_taken",
        "if not isinstance(answer, FinalsAnswer) or answer.plan.hash != plan_hash:",
        "if not isinstance(answer, FinalsAnswer):",
    ),
    bug(
        "a replay that leads to another digest is gone on with",
        "tests/node/state/test_catchup.py::test_replay_that_leads_elsewhere_is_not_taken",
        "if header.digest == value.digest:",
        "if header.round == value.round:",
    ),
    bug(
        "a liar is banned for the same time again and again",
        "tests/node/state/test_chunk_requests.py::test_liar_is_banned_for_longer_each_time",
        "score.banned_until = now + score.bans.next_s()",
        "score.banned_until = now + BAN_S",
    ),
    bug(
        "chunks that a dropped donor owed are asked of nobody",
        "tests/node/state/test_chunk_requests.py::test_stalled_donor_is_dropped_and_its_chunks_come_from_others",
        """
        if not self._askers[chunk]:
            self._free.appendleft(chunk)
        """,
        """
        if self._askers[chunk]:
            self._free.appendleft(chunk)
        """,
    ),
    bug(
        "finals that the disk has changed since end who replays them",
        "tests/node/state/test_catchup.py::test_finals_that_their_disk_changes_after_they_were_read_are_fetched_anew",
        """
        except (LocalError, RemoteError) as error:
            logger.warning("round %d does not follow from the state here: %s", round, error)
        """,
        """
        except LocalError as error:
            logger.warning("round %d does not follow from the state here: %s", round, error)
        """,
    ),
    bug(
        "finals that decode no more end the node without a word of its disk",
        "tests/node/rounds/test_candidates.py"
        "::test_finals_that_the_disk_changed_before_they_were_certified_are_told_of_in_a_line",
        "except RemoteError:  # they were checked when they came, and decode no more",
        "except StorageError:",
    ),
    bug(
        "two donors that trickle keep a chunk back",
        "tests/node/state/test_chunk_requests.py::test_two_that_trickle_cannot_keep_a_chunk_back_from_a_third",
        "return len(self._askers[chunk]) < 2 or now - self._asked_at[chunk] >= FURTHER_S",
        "return len(self._askers[chunk]) < 2",
    ),
    bug(
        "a chunk of two donors counts twice",
        "tests/node/state/test_chunk_requests.py::test_random_donors_bring_everything_exactly_once",
        """
        for donor in askers:
            self._let_go(donor, chunk)
        """,
        """
        for donor in askers[:1]:
            self._let_go(donor, chunk)
        """,
    ),
    bug(
        "a donor that sends nothing is waited for as long as one that is busy",
        "tests/node/state/test_chunk_requests.py::test_only_donor_that_stalls_ends_the_transfer_at_the_deadline",
        "return min(donor.anything_at + STALL_S, donor.moved_at + IDLE_LIMIT_S)",
        "return donor.moved_at + IDLE_LIMIT_S",
    ),
    bug(
        "the chunks of all vectors lie at one place of a transfer's file",
        "tests/node/state/test_catchup_interrupted.py::test_restarted_joiner_asks_only_for_what_is_missing_or_bad",
        "begin = self.header.kinds.index(kind) * self.header.numel",
        "begin = 0",
    ),
    bug(
        "one state less is served than is kept",
        "tests/node/state/test_states.py::test_lookup_serves_the_last_states_and_forgets_older_ones",
        "second = self._saved_round if on_disk else older[-1] if older else None",
        "second = self._saved_round if on_disk else None",
    ),
    bug(
        "a state under the name of another round is taken",
        "tests/node/state/test_states.py::test_files_that_are_no_states_are_ignored",
        """
        if state.round != round:
            raise ValueError(f"it is of round {state.round}")
        """,
        """
        if state.round < 0:
            raise ValueError(f"it is of round {state.round}")
        """,
    ),
    bug(
        "finals under the name of another plan are taken from disk",
        "tests/node/state/test_states.py::test_finals_under_the_name_of_another_plan_are_not_taken",
        "return finals if finals.plan.hash == plan_hash else None",
        "return finals",
    ),
    bug(
        "chunks of one state go on into another of the same round",
        "tests/node/state/test_catchup_interrupted.py"
        "::test_attempt_that_failed_is_not_gone_on_with_for_the_same_round_of_another_term",
        "if before is not None and before.assembly.digest == header.digest:",
        "if before is not None and before.assembly.header.round == header.round:",
    ),
    bug(
        "who offers a header that is none is asked again",
        "tests/node/state/test_catchup.py::test_who_offers_another_header_is_not_asked_again",
        """
        logger.warning("%s", error)
        self.scores.offended(peer, trio.current_time())
        """,
        """
        logger.warning("%s", error)
        self.scores.disappointed(peer, trio.current_time())
        """,
    ),
    bug(
        "going back forgets the state that is gone back to",
        "tests/node/state/test_states.py::test_going_back_leaves_the_state_that_is_gone_back_to_and_those_before_it",
        "self._states = {kept: held for kept, held in self._states.items() if kept <= round}",
        "self._states = {kept: held for kept, held in self._states.items() if kept < round}",
    ),
    bug(
        "a node starts where its next state does not fit",
        "tests/node/state/test_store.py::test_node_does_not_start_where_its_next_state_does_not_fit",
        "if free < state:",
        "if not free:",
    ),
    bug(
        "going back leaves a later state on disk",
        "tests/node/state/test_states.py::test_going_back_leaves_the_state_that_is_gone_back_to_and_those_before_it",
        """
        if saved > round:
            self.state_file(saved).unlink(missing_ok=True)
        """,
        """
        if saved > round + 1:
            self.state_file(saved).unlink(missing_ok=True)
        """,
    ),
    bug(
        "two changes of names between two looks go unseen",
        "tests/node/reporting/test_event_files.py"
        "::test_files_are_those_of_one_moment_though_names_change_twice_between_two_looks",
        "if _is_still(log, files.get(log)):",
        "if len({_inode(file) for file in files.values()}) == len(files):",
    ),
    bug(
        "a donor that went back is taken for a liar",
        "tests/node/state/test_catchup.py::test_donor_that_went_back_has_another_state_of_that_round_and_is_asked_again",
        "if header.round == value.round and header.term != value.term:",
        "if False:",
    ),
    bug(
        "rounds are replayed although their finals are more bytes than a state",
        "tests/protocol/test_catching_up.py::test_rounds_are_replayed_while_the_finals_that_lack_are_fewer_bytes_than_a_state",
        "return len(plans) <= limit or (yield CountLacking(plans)) <= limit",
        "return len(plans) <= limit or (yield CountLacking(plans)) <= 2 * limit",
    ),
    bug(
        "the newest state is fetched however few hold it",
        "tests/protocol/test_catching_up.py::test_of_the_newest_two_states_the_one_that_more_hold_is_fetched",
        "if len(newest) >= len(older):",
        "if newest or not older:",
    ),
    bug(
        "a state that came in part is fetched on although no replay leads from it to the head",
        "tests/protocol/test_catching_up.py::test_state_that_came_in_part_is_fetched_on_while_it_leads_to_the_head_and_somebody_holds_it",
        "if 0 < round < goal <= round + limit)",
        "if 0 < round < goal)",
    ),
    bug(
        "an attempt that brought nothing is made again at once",
        "tests/protocol/test_catching_up.py::test_an_attempt_that_brought_nothing_is_made_again_after_a_while_and_one_that_did_at_once",
        "self._coming, self._retry_at = True, now + RETRY_S",
        "self._coming, self._retry_at = True, now",
    ),
    bug(
        "everybody is asked although the head is of just now",
        "tests/protocol/test_catching_up.py::test_nobody_is_asked_for_certificates_when_the_head_is_of_just_now_unless_somebody_claims_more",
        "if first or not fresh:",
        "if first or not self._fresh:",
    ),
    bug(
        "a state that was overtaken is taken for that of the head",
        "tests/protocol/test_catching_up.py::test_rounds_that_go_on_meanwhile_are_followed_if_it_took_long",
        "if here.chain.head.hash == goal if nearer is None else is_state_of(here.chain.standing, nearer):",
        "if nearer is not None or here.chain.head.hash == goal:",
    ),
    bug(
        "who was slow says that it comes",
        "tests/protocol/test_catching_up.py::test_who_came_quickly_once_says_that_it_comes_and_looks_whether_more_was_certified",
        "self._took_s <= wait_s / 2",
        "self._took_s <= 2 * wait_s",
    ),
    bug(
        "who is overtaken on its way says only once that it comes",
        "tests/protocol/test_catching_up.py::test_who_is_overtaken_on_its_way_says_anew_that_it_comes_if_the_last_step_was_quick",
        "if awaited and goal != before:",
        "if awaited and before == NO_HASH:",
    ),
    bug(
        "who gets an older state says once more that it comes",
        "tests/protocol/test_catching_up.py::test_who_gets_an_older_state_of_its_peers_does_not_say_anew_that_it_comes",
        "if awaited and goal != before:",
        "if awaited:",
    ),
    bug(
        "any founder gives the initial state",
        "tests/protocol/test_catching_up.py::test_initial_state_is_the_first_founders_if_founders_differ",
        "key=lambda peer: (peer != value.planner, ranked.index(peer))",
        "key=lambda peer: (False, ranked.index(peer))",
    ),
    bug(
        "what was found is held although as good is here",
        "tests/protocol/test_member.py::test_what_was_found_is_held_before_a_round_begins_on_it_and_only_while_it_is_wanted",
        "return held is None or state.round > held.round or not on_branch(chain, held)",
        "return True",
    ),
    bug(
        "a second attempt begins while one is under way",
        "tests/protocol/test_member.py::test_nothing_more_is_sought_while_an_attempt_is_under_way",
        "if self._coming or now < self._retry_at:",
        "if now < self._retry_at:",
    ),
    bug(
        "a replay goes on along a chain that went back meanwhile",
        "tests/node/state/test_catchup.py::test_replay_ends_where_the_chain_went_back_while_finals_were_awaited",
        "while state.round < chain.standing.round and on_branch(chain, state):",
        "while state.round < chain.standing.round:",
    ),
    bug(
        "what a sparse final has no place for is lost",
        "tests/node/test_sparse_contributions.py"
        "::test_nothing_is_lost_of_many_contributions_for_which_a_final_has_no_place",
        "out[applied == 0] = 0",
        "pass",
    ),
    bug(
        "what a sparse final has no place for is lost where the chain settles it",
        "tests/lab/simulate/test_residuals.py::test_what_sparse_finals_have_no_place_for_comes_again",
        "self.settle(made.round, included, finals, rounds=rounds)",
        "self.settle(made.round, included, None, rounds=rounds)",
    ),
    bug(
        "no room on disk is taken for memory that lies in a file",
        "tests/node/state/test_file_memory.py::test_room_is_taken_before_anything_is_written",
        "os.posix_fallocate(file.fileno(), 0, size)",
        "file.truncate(size)",
    ),
    bug(
        "a chunk of the state here is taken over though the disk has changed it",
        "tests/collectives/test_state.py::test_chunk_whose_memory_has_changed_is_not_taken_over",
        'if header.chunk_hash(kind, chunk) == wanted and chunk_hash(values.data.cast("B")) == wanted:',
        "if header.chunk_hash(kind, chunk) == wanted:",
    ),
    bug(
        "finals are served though the disk has changed them",
        "tests/node/state/test_states.py::test_finals_in_a_file_that_the_disk_has_changed_are_not_served",
        "return final.payload.data if final is not None and final.intact else None",
        "return final.payload.data if final is not None else None",
    ),
    bug(
        "finals lie elsewhere than in their file",
        "tests/node/state/test_finals_file.py::test_finals_lie_in_their_file_once_it_is_there_and_their_memory_is_free",
        "final.move_to(np.frombuffer(data[place], np.uint8))",
        "final.move_to(np.zeros_like(final.payload))",
    ),
    bug(
        "what was learnt amid a round is taken up whatever state it is of",
        "tests/node/state/test_resumption.py::test_what_was_learnt_on_another_history_is_not_taken_up",
        "if chain.value(round).hash.hex() == file.metadata.get(SNAPSHOT_BASE):",
        "if chain.value(round).hash:",
    ),
    bug(
        "a torn snapshot amid a round is believed",
        "tests/node/state/test_resumption.py::test_torn_snapshot_amid_a_round_is_not_believed",
        """
            file.check_whole()
        except FileNotFoundError:
        """,
        """
            pass
        except FileNotFoundError:
        """,
    ),
    bug(
        "what was learnt amid a round stays on disk when it is contributed",
        "tests/node/state/test_resumption.py"
        "::test_what_was_learnt_amid_a_round_is_gone_from_disk_before_the_contribution_is_said",
        "await trio.to_thread.run_sync(self._forget_midway)",
        "pass",
    ),
    bug(
        "what a contribution on disk holds is taken up again",
        "tests/node/state/test_resumption.py::test_what_a_later_contribution_holds_is_not_taken_up_again",
        "return found if contributed else replace(found, exact=True, midway=midway)",
        "return replace(found, exact=True, midway=midway)",
    ),
    bug(
        "what a follower learnt is dropped",
        "tests/node/state/test_contributions.py"
        "::test_who_followed_gives_the_mean_of_what_it_learnt_and_weighs_by_all_of_its_tokens",
        "elif left.rounds_excluded > self._staleness_rounds:",
        "elif left.rounds_excluded > 0:",
    ),
    bug(
        "what a follower learnt is added up",
        "tests/node/state/test_contributions.py"
        "::test_who_followed_gives_the_mean_of_what_it_learnt_and_weighs_by_all_of_its_tokens",
        "averaged = grid.chunks - self._fragments.buffers if averages else 0",
        "averaged = 0",
    ),
    bug(
        "the anchors of what waits for a seat take no disk",
        "tests/node/test_doctor.py::test_memory_and_disk_are_measured_against_the_model",
        "few_seats * ANCHOR_BYTES",
        "0",
    ),
    bug(
        "what waited is given whole, whatever others have done of it",
        "tests/node/state/test_contributions.py::test_what_waited_weighs_by_what_others_have_left_of_it",
        "weight = weight * _share_left(part, left.anchor[at] - anchor[at])",
        "pass",
    ),
    bug(
        "the anchor of what waits does not outlive a restart",
        "tests/node/state/test_contributions.py::test_what_waited_weighs_by_what_others_have_left_of_it",
        "if work.anchor is not None:",
        "if False:",
    ),
    bug(
        "a node does not say on which anchor it has learnt",
        "tests/node/rounds/test_participation.py::test_what_waited_for_a_seat_weighs_by_what_the_round_has_left_of_it",
        "anchor = state.anchor if isinstance(state, CertifiedState) else None",
        "anchor = None",
    ),
    bug(
        "a follower's tokens are counted twice",
        "tests/node/state/test_contributions.py"
        "::test_who_followed_gives_the_mean_of_what_it_learnt_and_weighs_by_all_of_its_tokens",
        """
        if any(bits):
            left.tokens, left.rounds_excluded = 0, 0
        """,
        """
        if any(bits):
            left.rounds_excluded = 0
        """,
    ),
    bug(
        "a card is believed whoever signed it",
        "tests/node/test_card.py::test_what_the_node_did_not_sign_is_not_its_card",
        "if not _is_signed(card):",
        "if False:",
    ),
    bug(
        "a card may say any number of rounds",
        "tests/node/test_card.py::test_a_lie_that_is_signed_is_shown_by_the_chain",
        "(card.rounds, card.first):",
        "(len(listed), listed[0].state_round if listed else None):",
    ),
    bug(
        "keys go with all else though they were not meant",
        "tests/node/test_remains.py::test_all_of_it_goes_but_what_is_not_shoals_and_keys_that_are_not_meant",
        "if keys or not one.is_key]",
        "]",
    ),
    bug(
        "a data folder is removed under a node that runs",
        "tests/node/test_remains.py::test_nothing_goes_while_a_node_runs_there",
        "locked(data_dir) if is_there else nullcontext():",
        "nullcontext():",
    ),
    bug(
        "work that a value does not count is lost where its finals are not here",
        "tests/node/state/test_contributions.py"
        "::test_whom_a_value_did_not_count_needs_no_finals_to_carry_all_of_its_work_on",
        "return bool(named) and self._sender not in named",
        "return False",
    ),
    bug(
        "finals are kept on disk for as many rounds, whatever they take",
        "tests/node/state/test_states.py::test_finals_on_disk_are_bounded_in_bytes",
        "if count >= FINALS_KEPT or (count >= FINALS_MIN and size > limit):",
        "if count >= FINALS_KEPT:",
    ),
    bug(
        "finals that are gone from disk stay mapped, and so keep their room",
        "tests/node/state/test_states.py::test_finals_on_disk_are_bounded_in_bytes",
        "self._finals.pop(plan_hash, None)",
        "pass",
    ),
    bug(
        "the last good state makes room for the next before that is whole",
        "tests/node/state/test_states.py"
        "::test_others_make_room_for_a_state_that_is_saved_but_never_the_one_that_is_good",
        "[round for round in there if round != good]",
        "there",
    ),
    bug(
        "states make room for the next though none of them is known to be good",
        "tests/node/state/test_states.py"
        "::test_others_make_room_for_a_state_that_is_saved_but_never_the_one_that_is_good",
        "if good and good in there else",
        "if good else",
    ),
    bug(
        "a round of whose files one is there counts as written",
        "tests/node/state/test_resumption.py::test_files_of_a_round_stay_until_those_of_a_later_one_are_whole",
        "return [pair for pair in files if pair.trainer.exists()]",
        "return files",
    ),
    bug(
        "memory whose file has a name is given out again",
        "tests/node/state/test_states.py::test_a_file_whose_state_is_gone_from_the_disk_is_read_on_as_it_was",
        "if not (isinstance(memory.obj, FileMapping) and memory.obj.is_named):",
        "if memory.obj:",
    ),
    bug(
        "a nameless file has its name before it is synced",
        "tests/node/state/test_file_memory.py::test_a_file_has_its_name_only_when_all_of_it_is_on_disk",
        """
        os.fsync(mapping.reader)
        partial.replace(path)
        """,
        """
        partial.replace(path)
        """,
    ),
    bug(
        "a nameless file is named without syncing its folder",
        "tests/node/state/test_file_memory.py::test_a_file_has_its_name_only_when_all_of_it_is_on_disk",
        """
            sync_folder(path.parent)
        return True
        """,
        """
            pass
        return True
        """,
    ),
    bug(
        "a second name of the same file leaves a third",
        "tests/node/state/test_states.py"
        "::test_a_state_that_is_saved_is_one_file_on_disk_and_in_memory_and_nothing_is_written_to_it",
        "partial.unlink(missing_ok=True)  # also where it had that name, of which rename(2) makes nothing",
        "pass",
    ),
    bug(
        "a file that has a name is given another head",
        "tests/node/state/test_tensor_files.py"
        "::test_vectors_that_lie_in_a_file_are_that_file_and_what_has_a_name_is_not_written_to",
        "if not mapping.is_named:",
        "if mapping:",
    ),
    bug(
        "a head is written over the vectors for which there is no room",
        "tests/node/state/test_tensor_files.py::test_vectors_that_lie_otherwise_are_copied_and_stay_as_they_are",
        "if len(data) > places[0]:  # there is no room for it",
        "if len(data) < 0:",
    ),
    bug(
        "a part of a file's vectors is saved as the whole file",
        "tests/node/state/test_tensor_files.py::test_vectors_that_lie_otherwise_are_copied_and_stay_as_they_are",
        "if places != wanted or end != len(mapping):",
        "if places != wanted:",
    ),
    bug(
        "memory is made ready beyond what is kept",
        "tests/node/state/test_file_memory.py::test_memory_is_made_ready_only_up_to_what_is_kept",
        "if self._spare or len(self._files) >= self._kept:",
        "if self._spare:",
    ),
    bug(
        "a state takes a file of its own while one is made ready for it",
        "tests/node/state/test_file_memory.py::test_memory_that_is_made_ready_is_what_is_taken_meanwhile",
        "        with self._lock:\n            self._is_awaited = False",
        "        with threading.Lock():\n            self._is_awaited = False",
    ),
    bug(
        "memory that was made ready for a state keeps its room when it is let go",
        "tests/node/state/test_file_memory.py::test_memory_that_was_made_ready_and_is_let_go_takes_no_room",
        "self._readied = None if self._readied is memory else self._readied",
        "pass",
    ),
    bug(
        "pages are touched of memory that another took",
        "tests/node/state/test_file_memory.py::test_memory_that_is_made_ready_is_what_is_taken_meanwhile",
        "if self._is_awaited or self._readied is not memory:",
        "if memory is None:",
    ),
    bug(
        "the state before the newest is held beside the one on disk",
        "tests/node/rounds/test_candidates.py::test_rounds_take_the_room_of_three_states_with_those_on_disk",
        "self._forget_states([round for round in older if round != second])",
        "self._forget_states([round for round in older if round not in (second, older[-1])])",
    ),
    bug(
        "two states stay on disk although a later one is held",
        "tests/node/state/test_state_saver.py::test_of_two_states_on_disk_the_older_goes_as_soon_as_a_later_one_is_held",
        "if not self._writing.locked():  # else room was made",
        "if self._writing.locked():",
    ),
    bug(
        "finals stay up to a whole state",
        "tests/node/state/test_states.py::test_finals_on_disk_are_bounded_in_bytes",
        "size, limit = 0, max(FINALS_DISK_BYTES, state.nbytes // 2)",
        "size, limit = 0, max(FINALS_DISK_BYTES, state.nbytes)",
    ),
    bug(
        "a file for the next snapshot is made while the one before is still there",
        "tests/node/training/test_inner_state.py::test_a_file_for_the_next_is_made_amid_a_round_alone",
        "if order.midway:  # training stands still for the next; after a round's it has nothing else to do",
        "if order:",
    ),
    bug(
        "a file that is made in place has its name before it is synced",
        "tests/node/state/test_tensor_files.py::test_nothing_has_the_files_name_before_all_of_it_is_synced",
        """
        self._memory.sync(SYNC_BYTES)
        self._partial.replace(self._path)
        """,
        """
        self._partial.replace(self._path)
        self._memory.sync(SYNC_BYTES)
        """,
    ),
    bug(
        "a file that is made in place is named without syncing its folder",
        "tests/node/state/test_tensor_files.py::test_nothing_has_the_files_name_before_all_of_it_is_synced",
        """
        self._memory.sync(SYNC_BYTES)
        self._partial.replace(self._path)
        sync_folder(self._path.parent)
        """,
        """
        self._memory.sync(SYNC_BYTES)
        self._partial.replace(self._path)
        """,
    ),
    bug(
        "of a file that is mapped only the first piece is synced",
        "tests/node/state/test_tensor_files.py::test_every_piece_is_synced_and_each_once",
        "for begin in range(0, len(self.data), piece_bytes):",
        "for begin in range(0, 1, piece_bytes):",
    ),
    bug(
        "a piece that begins with zeros is left out",
        "tests/node/state/test_store.py::test_whole_pieces_of_zeros_take_no_room_and_read_as_they_were",
        """bytes(piece[:PAGE_BYTES]).strip(b"\\0") or bytes(piece).strip(b"\\0"):""",
        """bytes(piece[:PAGE_BYTES]).strip(b"\\0"):""",
    ),
    bug(
        "a state that is saved is held on to for as long as the saver rests",
        "tests/node/state/test_state_saver.py::test_a_state_that_is_saved_is_not_held_on_to",
        """
        await self.save_now(state)
        return trio.current_time() - began
        """,
        """
        await self.save_now(state)
        self._last = state
        return trio.current_time() - began
        """,
    ),
    bug(
        "a state is held on to until the next checkpoint",
        "tests/node/state/test_checkpoints.py::test_a_state_whose_checkpoint_is_made_is_not_held_on_to",
        """
        self._due = None
        if self._p.chain.standing.round < due.state.round:
        """,
        """
        self._due, self._last = None, due
        if self._p.chain.standing.round < due.state.round:
        """,
    ),
    bug(
        "the file for the next snapshot is not used",
        "tests/node/training/test_inner_state.py::test_next_copy_goes_to_a_file_that_was_made_while_training_went_on",
        "made = TensorsInPlace(path, places, metadata, spare=spare)",
        "made = TensorsInPlace(path, places, metadata)",
    ),
    bug(
        "a folder with promises taken over by another swarm, which lets them be given anew in the first",
        "tests/node/state/test_binding.py::test_promise_binds_a_folder_to_its_swarm",
        'known = any(fnmatchcase(name, free) for free in (*STAYS, *GOES, "transfer/*"))',
        'known = any(fnmatchcase(name, free) for free in (*STAYS, *GOES, "transfer/*", "*.log"))',
    ),
    bug(
        "a gossiping node that is paused before it has a state trains once it has one",
        "tests/node/gossip/test_engine.py"
        "::test_who_is_paused_before_it_has_a_state_trains_nothing_until_it_is_to_go_on",
        """
        if isinstance(event, SetPaused):
            await self._set_paused(event.paused)
        self._show_phase()
        """,
        "self._show_phase()",
    ),
    bug(
        "a partner that withdrew is fetched from while the next one is sought",
        "tests/node/gossip/test_engine.py"
        "::test_what_is_fetched_ends_when_it_is_wanted_no_more_and_nothing_begins_that_is_not",
        """
        self._exchanging = wanted
        self._fetching.cancel()
        """,
        "self._exchanging = wanted",
    ),
    bug(
        "what a node no longer wants to fetch is begun once another fetch is over",
        "tests/node/gossip/test_engine.py"
        "::test_what_is_fetched_ends_when_it_is_wanted_no_more_and_nothing_begins_that_is_not",
        "self._exchanging = wanted\n",
        "self._exchanging = wanted or self._exchanging\n",
    ),
    bug(
        "a newcomer to a gossip begins on whoever names the highest round",
        "tests/node/gossip/test_start.py::test_who_names_a_round_far_from_the_others_is_passed_over",
        "median = statistics.median_low(counted.values())",
        "median = max(counted.values())",
    ),
    bug(
        "strangers outvote founders where a newcomer to a gossip begins",
        "tests/node/gossip/test_start.py"
        "::test_founders_count_and_strangers_only_where_none_has_trained_and_not_all_answer",
        "counted = founders if founders or heard_all else trained",
        "counted = trained",
    ),
    bug(
        "the first to answer is believed where a newcomer to a gossip begins",
        "tests/node/gossip/test_start.py::test_the_only_one_that_is_there_is_begun_on_once_others_had_their_time",
        "if heard_all or now >= self._decides_at:",
        "if True:",
    ),
    bug(
        "a stranger that answers first is begun on though founders may answer",
        "tests/node/gossip/test_start.py::test_a_founder_that_answers_after_a_stranger_is_begun_on",
        "HEAR_S if peer in self._others else FOUNDERS_S",
        "HEAR_S",
    ),
    bug(
        "a newcomer to a gossip begins on weights that are not finite",
        "tests/node/gossip/test_start.py::test_weights_that_are_not_finite_are_nobodys_start",
        "if not await trio.to_thread.run_sync(_is_finite, state):",
        "if False:",
    ),
    bug(
        "a snapshot may be of another round than its peer named",
        "tests/node/gossip/test_exchange.py::test_a_snapshot_of_another_round_than_its_peer_named_is_refused",
        "if header.round != standing.round:",
        "if False:",
    ),
    bug(
        "a damaged log of rebases lets another be signed",
        "tests/node/rounds/test_authority.py::test_damaged_log_says_what_to_do_and_no_second_rebase_is_signed",
        'raise RemoteError("there is a record that does not hold")',
        "log.rewrite([])",
    ),
    bug(
        "with gossip a snapshot of any size is given memory",
        "tests/node/gossip/test_start.py::test_state_of_another_size_under_the_layout_of_this_model_is_nobodys_start",
        "if header.numel != self._numel:",
        "if False:",
    ),
    bug(
        "memory is taken for a snapshot before its size is looked at",
        "tests/node/gossip/test_exchange.py::test_no_memory_is_taken_for_a_snapshot_of_a_size_that_is_not_accepted",
        "        accepts(header)\n        assembly = StateAssembly(header, digest=standing.digest)\n",
        "        assembly = StateAssembly(header, digest=standing.digest)\n        accepts(header)\n",
    ),
    bug(
        "a state that covers its image and was cut short is a traceback",
        "tests/cli/test_verify.py"
        "::test_verify_of_a_state_that_covers_its_image_and_was_cut_short_is_one_document_and_one_line",
        "return chunk_hash(image_of(np.frombuffer(part[: len(part) // 4 * 4], np.float32)).data)",
        "return chunk_hash(image_of(np.frombuffer(part, np.float32)).data)",
    ),
    bug(
        "a copy of a key that was half put in its place stays with whoever removes the keys",
        "tests/node/test_remains.py::test_all_of_it_goes_but_what_is_not_shoals_and_keys_that_are_not_meant",
        '".*.key.*": "a copy of a key that nobody lived to put in its place",',
        "",
    ),
    bug(
        "who did not bring what it was asked for comes first again",
        "tests/node/state/test_catchup_donors.py::test_strangers_without_a_state_keep_nobody_from_it",
        "return score is not None and now < score.lacks_until",
        "return False",
    ),
    bug(
        "a founder that did not draw the initial state says what the model is",
        "tests/node/state/test_catchup.py"
        "::test_initial_state_of_another_model_is_not_taken_of_a_founder_that_did_not_draw_it",
        "if peer != founder:",
        "if False:",
    ),
    bug(
        "an initial state may be of any size",
        "tests/node/state/test_catchup.py"
        "::test_initial_state_of_another_model_is_not_taken_of_a_founder_that_did_not_draw_it",
        "if self.shape is not None and (header.numel, header.chunk_values) != self.shape[1:]:",
        "if False:",
    ),
    bug(
        "a state of other tensors than were certified is verified",
        "tests/node/state/test_checkpoint_check.py::test_what_does_not_hold_is_named",
        'any((state.dtype(k), state.shape(k)) != ("F32", (numel,)) for k in kinds)',
        "False",
    ),
    bug(
        "a layout of another length belongs to a checkpoint",
        "tests/node/state/test_checkpoint_check.py::test_damage_beside_the_state_is_told_apart",
        "if (layout.digest, layout.numel) != (header.layout, header.numel):",
        "if layout.digest != header.layout:",
    ),
    bug(
        "a pipe or a device passes for a file",
        "tests/node/state/test_checkpoint_check.py::test_what_does_not_hold_is_named",
        """
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        """,
        """
        if False:
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        """,
    ),
)
