"""Bugs of what is on disk, and of states that come from others: logs, files, transfers, checkpoints."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

STATE: tuple[Bug, ...] = (
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
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
        """,
        """
        path.mkdir(exist_ok=True)
        """,
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
        "if anything and peer not in value.members:",
        "if anything and not peer:",
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
        "if header.digest != value.digest:",
        "if header.round != value.round:",
    ),
    bug(
        "a liar is banned for the same time again and again",
        "tests/node/state/test_transfer.py::test_liar_is_banned_for_longer_each_time",
        "score.banned_until = now + min(BAN_S * 2 ** min(score.offences - 1, 30), BAN_LIMIT_S)",
        "score.banned_until = now + BAN_S",
    ),
    bug(
        "chunks that a dropped donor owed are asked of nobody",
        "tests/node/state/test_transfer.py::test_stalled_donor_is_dropped_and_its_chunks_come_from_others",
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
        "a chunk of two donors counts twice",
        "tests/node/state/test_transfer.py::test_random_donors_bring_everything_exactly_once",
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
        "tests/node/state/test_transfer.py::test_only_donor_that_stalls_ends_the_transfer_at_the_deadline",
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
        "older = list(self._states)[:-STATES_KEPT]",
        "older = list(self._states)[:1-STATES_KEPT]",
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
        scores.offended(peer, trio.current_time())
        """,
        """
        logger.warning("%s", error)
        scores.disappointed(peer, trio.current_time())
        """,
    ),
    bug(
        "going back forgets the state that is gone back to",
        "tests/node/state/test_states.py::test_going_back_leaves_the_state_that_is_gone_back_to_and_those_before_it",
        "self._states = {kept: held for kept, held in self._states.items() if kept <= round}",
        "self._states = {kept: held for kept, held in self._states.items() if kept < round}",
    ),
    bug(
        "going back leaves a later state on disk",
        "tests/node/state/test_states.py::test_going_back_leaves_the_state_that_is_gone_back_to_and_those_before_it",
        """
        if saved > round:
            self._state_path(saved).unlink(missing_ok=True)
        """,
        """
        if saved > round + 1:
            self._state_path(saved).unlink(missing_ok=True)
        """,
    ),
    bug(
        "two changes of names between two looks go unseen",
        "tests/node/reporting/test_event_files.py"
        "::test_files_are_those_of_one_moment_though_names_change_twice_between_two_looks",
        "if _is_still(log, files.get(log)):",
        "if len({_inode(file) for file in files.values()}) == len(files):",
    ),
)
