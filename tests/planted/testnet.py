"""Bugs of the testnet: its verdict, and the faults that it carries out."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

TESTNET: tuple[Bug, ...] = (
    bug(
        "the verdict lets anyone forget what no round has counted",
        "tests/testnet/test_check_inputs.py::test_who_begins_anew_without_a_restart_has_lost_something",
        "return stale or fragment in self.anew or self._started_again(before[-1], made)",
        "return True",
    ),
    bug(
        "the verdict lets a node take work for counted that is not",
        "tests/testnet/test_check_inputs.py::test_what_is_counted_twice_or_never_is_seen",
        'if self.witness.flipped or not (round_folder(self.witness, before.term, before.round) / "applied").exists():',
        "if True:",
    ),
    bug(
        "the verdict calls it an error that a node came by a state without its finals",
        "tests/testnet/test_check_inputs.py::test_who_came_by_a_state_without_its_finals_takes_its_work_for_counted",
        'if self.witness.flipped or not (round_folder(self.witness, before.term, before.round) / "applied").exists():',
        "if False:",
    ),
    bug(
        "the verdict lets a node send something else than what it learnt",
        "tests/testnet/test_check_inputs.py::test_what_was_not_encoded_of_the_values_is_seen",
        "sent.codec, dither=dither).root != made.root",
        "sent.codec, dither=dither).root == b''",
    ),
    bug(
        "the verdict believes all of a node in whose files bits were flipped",
        "tests/testnet/test_check.py"
        "::test_check_believes_nothing_of_a_chunk_whose_file_was_struck_and_all_of_the_others",
        "return [n for n, (kept, right) in enumerate(zip(account.finals.chunks, there, strict=True)) if kept != right]",
        "return list(range(account.plan.chunks))",
    ),
    bug(
        "the steps of a gossip node whose folder was put back are recomputed from states of its later life",
        "tests/node/test_audit.py::test_states_of_a_gossip_round_that_is_made_once_more_are_all_kept",
        "self._link(self._write(state.term, state.round, _known_by(name, chunk_hash(data)), data), name)",
        "self._write(state.term, state.round, name, data)",
    ),
    bug(
        "a contribution that is made again takes the place of the one that was counted",
        "tests/node/test_audit.py"
        "::test_contribution_that_is_made_again_of_the_same_round_leaves_the_first_where_it_was",
        'kept = self._write(term, made.round, _known_by("contribution", encoded.root), msgspec.msgpack.encode(body))',
        'kept = self._write(term, made.round, "contribution-kept", msgspec.msgpack.encode(body))',
    ),
    bug(
        "who ends on an old folder is taken for one that refused to go on, whatever it said",
        "tests/testnet/test_coming_back.py::test_whatever_else_comes_of_an_old_folder_is_a_failure",
        'return life.exit_code == REFUSED and "Traceback" not in said and all(words in last for words in REFUSAL)',
        "return True",
    ),
    bug(
        "who follows the rounds counts as one that is of them again",
        "tests/testnet/test_coming_back.py::test_whatever_else_comes_of_an_old_folder_is_a_failure",
        "return any(not isinstance(event, Certified) or node.peer_id in event.members for event in ended)",
        "return any(True for event in ended)",
    ),
    bug(
        "the folder of a running node is copied while it writes",
        "tests/testnet/test_coming_back.py::test_a_running_node_is_copied_as_it_is_at_one_moment_and_goes_on",
        'runs = node.alive and not node.stopped and node.struck != "killed"',
        "runs = False",
    ),
    bug(
        "what a folder has newer than its copy stays when that is put back",
        "tests/testnet/test_coming_back.py"
        "::test_what_is_put_back_is_all_that_was_copied_and_nothing_newer_but_what_judges",
        "if path.name not in KEPT:",
        "if path.is_symlink():",
    ),
    bug(
        "nobody has to find who moved",
        "tests/testnet/test_coming_back.py::test_who_moved_is_to_take_part_and_to_be_found_again",
        'if fault.kind == "move":',
        'if fault.kind == "moved":',
    ),
    bug(
        "a verdict that forgets what should have come of a fault",
        "tests/testnet/reports/test_report.py::test_what_should_have_come_of_a_fault_and_did_not_fails_the_run",
        "return [*reasons, *_absences(report), *unmet, *_ends(report), *report.alarms]",
        "return [*reasons, *_absences(report), *_ends(report), *report.alarms]",
    ),
    bug(
        "whose clock was set may miss rounds",
        "tests/testnet/reports/test_report.py::test_who_had_its_clock_set_may_miss_no_round",
        'HARMLESS: Final = ("join", "clock")',
        'HARMLESS: Final = ("join",)',
    ),
    bug(
        "times of a clock that was set are told as they stand in the log",
        "tests/testnet/test_wall_clock.py"
        "::test_events_of_a_clock_that_was_set_are_put_back_to_the_times_at_which_they_were",
        "true = round(event.at - ahead_s, 6)",
        "true = round(event.at, 6)",
    ),
    bug(
        "a clock that is set moves the monotonic one",
        "tests/testnet/test_wall_clock.py::test_a_process_tells_what_its_clock_says_and_its_monotonic_clocks_go_on",
        "return self._told(which) + (self._ahead() if which == time.CLOCK_REALTIME else 0)",
        "return self._told(which) + self._ahead()",
    ),
    bug(
        "a verdict that forgets whom no fault struck and who missed a round",
        "tests/testnet/reports/test_report.py"
        "::test_a_founder_that_no_fault_struck_and_that_missed_a_round_does_not_pass",
        "for index in report.unaffected_absent),",
        "for index in report.unaffected_absent[:0]),",
    ),
    bug(
        "who was told of a round counts as one that took part in it",
        "tests/testnet/reports/test_report.py"
        "::test_a_founder_that_no_fault_struck_and_that_missed_a_round_does_not_pass",
        """
        for index, event in self.certified():
            own.get(index, set()).add((event.term, event.round))
        """,
        """
        for entry in self.entries:
            own.get(entry.node, set()).add(("0.0", getattr(entry.event, "round", 0)))
        """,
    ),
    bug(
        "a verdict that forgets who ended by itself",
        "tests/testnet/reports/test_report.py::test_how_a_node_ended_can_fail_a_run_in_which_it_missed_nothing",
        "for node in report.nodes if node.crashes]",
        "for node in report.nodes if False]",
    ),
    bug(
        "a verdict that forgets who hung when it was asked to leave",
        "tests/testnet/reports/test_report.py::test_how_a_node_ended_can_fail_a_run_in_which_it_missed_nothing",
        "for node in report.nodes if node.hung]",
        "for node in report.nodes if False]",
    ),
    bug(
        "a verdict that forgets who did not come back",
        "tests/testnet/reports/test_report.py::test_a_newcomer_that_never_got_in_does_not_pass",
        "if node.absent_at_end and node.index not in report.unaffected_absent",
        "if False",
    ),
    bug(
        "a verdict that forgets why a run was cut short",
        "tests/testnet/reports/test_report.py"
        "::test_a_run_that_was_cut_short_does_not_pass_though_all_rounds_are_certified",
        "reasons = [] if report.trouble is None else [report.trouble]",
        "reasons: list[str] = []",
    ),
    bug(
        "a verdict that forgets what nodes gave the alarm for",
        "tests/testnet/reports/test_report.py::test_what_sound_nodes_never_say_does_not_pass",
        "return [*reasons, *_absences(report), *unmet, *_ends(report), *report.alarms]",
        "return [*reasons, *_absences(report), *unmet, *_ends(report)]",
    ),
    bug(
        "a verdict that looks at no fork after the last round of a scenario",
        "tests/testnet/reports/test_report.py::test_rounds_beyond_the_scenario_count_for_nothing_but_forks",
        "if isinstance(entry.event, RolledBack) or self.counts(entry.event)",
        "if (isinstance(entry.event, RolledBack) or self.counts(entry.event)) and entry.event.round <= 5",
    ),
    bug(
        "who left by itself may miss rounds",
        "tests/testnet/reports/test_report.py::test_who_was_struck_may_miss_rounds_and_who_came_later_those_before",
        "return tuple(node for node in self.nodes if node.index not in struck)",
        'return tuple(node for node in self.nodes if node.index not in struck and node.outcome != "left")',
    ),
    bug(
        "a run for tokens is to certify all rounds",
        "tests/testnet/reports/test_report.py"
        "::test_a_run_for_tokens_ends_with_the_round_that_certifies_the_last_of_them",
        "if self.tokens is not None and total >= self.tokens:",
        "if False:",
    ),
    bug(
        "who is told of rounds counts as one that came back",
        "tests/testnet/test_swarm.py::test_who_joined_or_came_back_and_is_told_of_rounds_alone_is_found",
        "return any(event.round >= last for event in self._ended(node.index))",
        "return self._finished(node)",
    ),
    bug(
        "nodes that are done go before one that comes is in",
        "tests/testnet/test_swarm.py::test_who_is_started_when_the_last_round_is_over_has_time_to_get_in",
        'return not kinds <= {"kill", "leave"}',
        'return "partition" in kinds',
    ),
    bug(
        "who does not leave when it is asked is killed without a word",
        "tests/testnet/test_swarm.py::test_who_does_not_leave_when_it_is_asked_is_found",
        "if node.alive or node.lives[-1].exit_code != 0)",
        "if False)",
    ),
    bug(
        "a check of the testnet that passes a round which counts nobody",
        "tests/testnet/test_check.py::test_check_refuses_a_round_that_counts_nobody_while_one_who_contributed_is_there",
        "if not contributors and any(one.peer in planned for one in accounts):",
        "if False:",
    ),
    bug(
        "a report is written over an older one in its place",
        "tests/testnet/test_run_folder.py::test_a_report_that_cannot_be_written_whole_leaves_the_older_one",
        'write_atomically(out / name, data, option="--out")',
        """with disk_errors(out, option="--out"):
            (out / name).write_bytes(data)""",
    ),
    bug(
        "a log whose clock was set is a measure for the others",
        "tests/testnet/reports/test_report_merge.py::test_a_log_whose_clock_was_set_is_no_measure_for_another",
        "if not tellers or abs(at - ahead_s - total / tellers) < ASTRAY_S:",
        "if True:",
    ),
    bug(
        "a merged page is written over an older one in its place",
        "tests/testnet/reports/test_report_merge.py::test_a_page_that_cannot_be_written_whole_leaves_the_older_one",
        'write_atomically(path.resolve(), data, option="-o")',
        "path.resolve().write_bytes(data)",
    ),
    bug(
        "what is to go into a pipe takes its place",
        "tests/testnet/reports/test_report_merge.py::test_a_page_can_go_into_a_pipe_and_through_a_link",
        "is_stream = path.exists() and not path.is_file()",
        "is_stream = False",
    ),
    bug(
        "a check of the testnet that believes the plan's tokens",
        "tests/testnet/test_check.py::test_check_refuses_weights_that_are_not_as_the_tokens_that_were_contributed",
        "if stored.tokens < plan.participants[place].tokens:",
        "if False:",
    ),
    bug(
        "a check of the testnet that believes the plan's weights",
        "tests/testnet/test_check.py::test_check_refuses_weights_that_are_not_as_the_tokens_that_were_contributed",
        "if not _weighs_tokens(plan):",
        "if False:",
    ),
    bug(
        "a throttle does not end with its time",
        "tests/testnet/test_throttle.py::test_a_throttle_ends_with_its_time_and_its_node_goes_on",
        "swarm.node(fault.target).throttle(None)",
        "swarm.node(fault.target).throttle(fault.cpu_share)",
    ),
    bug(
        "a node that is to be resumed is paused",
        "tests/testnet/test_swarm.py::test_a_node_is_paused_and_resumed_as_its_user_would",
        'await swarm.node(fault.target).ask("resume")',
        'await swarm.node(fault.target).ask("pause")',
    ),
    bug(
        "a scenario's swarm bears crashes whatever it says that it bears",
        "tests/testnet/test_rollouts.py::test_how_a_swarm_of_a_scenario_votes_is_in_its_manifest",
        '**({"agreement": scenario.agreement} if scenario.agreement else {}),',
        '**({"agreement": scenario.agreement} if scenario.agreement == {} else {}),',
    ),
    bug(
        "the turns of a throttle wake a node that a fault stopped",
        "tests/testnet/test_throttle.py::test_turns_do_not_wake_who_is_stopped_for_another_reason",
        "if not stopped():",
        "if True:",
    ),
    bug(
        "who holds while another is put back holds on",
        "tests/lab/campaigns/test_chaos.py::test_who_holds_in_a_transfer_goes_on_once_another_was_struck",
        'begins_anew = record.fault.kind in ("kill", *_STARTING_AGAIN) and held == record.fault.target',
        'begins_anew = record.fault.kind in ("kill", *_STARTING_AGAIN)',
    ),
    bug(
        "an agent's own round passes for one of the swarm's that its node took part in",
        "tests/testnet/test_coming_back.py::test_whatever_else_comes_of_an_old_folder_is_a_failure",
        "kind = Certified if swarm.journal.of(Certified) else RoundEnded",
        "kind = RoundEnded",
    ),
    bug(
        "what an old folder makes once more passes for made after all that follows it",
        "tests/node/test_audit.py::test_of_what_is_made_once_more_it_stays_known_when_it_was_made_first",
        "if not self._enabled or learnt.size > INPUT_LIMIT_VALUES or is_there:",
        "if not self._enabled or learnt.size > INPUT_LIMIT_VALUES:",
    ),
)
