"""Bugs of the trainer and of its accounts: what is taken, mixed, counted."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

RANKS = (
    "tests/node/test_own_loop_ranks.py"
    "::test_ranks_contribute_once_what_they_learnt_together_and_all_stand_on_the_anchor"
)

TRAINING: tuple[Bug, ...] = (
    bug(
        "who comes back to a later round makes only the rest of the steps of the one it was killed in",
        "tests/node/training/test_accounts.py::test_who_comes_back_to_a_later_round_has_all_of_its_steps_to_make",
        "round > came_back:",
        "round < came_back:",
    ),
    bug(
        "one step made before the newest round is known, and the rest of the old one is all that is made of it",
        "tests/node/training/test_accounts.py::test_who_comes_back_to_a_later_round_has_all_of_its_steps_to_make",
        "self._tokens = [counted + tokens for counted in self._tokens]",
        "self._tokens, self._restored_at = [counted + tokens for counted in self._tokens], _NOT_RESTORED",
    ),
    bug(
        "a node that came back, and is slow, begins its steps again with the next round",
        "tests/node/training/test_accounts.py::test_who_came_back_and_is_late_for_its_round_goes_on_where_it_is",
        "if self.steps <= 2 * had:",
        "if True:",
    ),
    bug(
        "who told its speed a while ago waits for equal nodes that told theirs later",
        "tests/node/training/test_fair_share.py"
        "::test_equal_nodes_make_equal_steps_whatever_a_hundredth_of_their_speeds_was_told_when",
        "if not _is_known(speed) or abs(speed - median) <= SAME_SHARE * median:",
        "if not _is_known(speed):",
    ),
    bug(
        "doctor does not look at the size of a policy",
        "tests/node/test_doctor.py::test_size_of_a_policy_is_known_without_a_node",
        "        is_policy=manifest.rollouts is not None,",
        "        is_policy=False,",
    ),
    bug(
        "a node that knows its model waits for a loop for ever",
        "tests/node/test_own_loop.py::test_a_node_that_knows_its_model_takes_part_without_a_loop_until_one_attaches",
        "elif not self._announced:",
        "elif not known:",
    ),
    bug(
        "ranks exchange the rows that they hand over",
        RANKS,
        "begin = start + (offset[0] * prod(parameter.shape[1:]) if shape else 0)",
        "begin = start + ((len(parameter) - offset[0] - shape[0]) * prod(parameter.shape[1:]) if shape else 0)",
    ),
    bug(
        "a rank keeps a stale anchor",
        RANKS,
        "self._parts.write(spans, group.broadcast(values) if order.whole else group.receive_values(0, values))",
        "group.broadcast(values) if order.whole else self._parts.write(spans, group.receive_values(0, values))",
    ),
    bug(
        "a model that was whole for an evaluation trains on with what it was",
        RANKS,
        """
        self._cut_again()
        self._write(_slices(spans), values)
        """,
        "self._write(_slices(spans), values)",
    ),
    bug(
        "tokens of rank 0 alone are the node's",
        RANKS,
        "tokens += _checked(entered, rank, name, made).tokens",
        "_checked(entered, rank, name, made)",
    ),
    bug(
        "rank 0 tells ranks of its error that wait until their answer is taken",
        "tests/node/test_own_loop_ranks.py::test_an_error_of_rank_0_reaches_ranks_whose_answers_it_has_not_taken",
        "self._asked.add(rank)",
        "self._asked.discard(rank)",
    ),
    bug(
        "two ranks hand over the same values",
        "tests/node/loops/test_rank_spans.py::test_every_value_is_handed_over_once_by_the_lowest_rank_that_has_it",
        "left = without(left, handed[-1])",
        "left = tuple(left)",
    ),
    bug(
        "a paused node's loop is told to call step",
        "tests/node/test_own_loop.py::test_step_that_is_not_called_is_told_of_beside_the_loop_until_it_is",
        "client is not None and not (client.paused or client.ended)",
        "client is not None and not client.ended",
    ),
    bug(
        "a node leaves the swarm where torchrun starts its loop again",
        "tests/node/test_own_loop_ranks.py::test_a_daemon_is_left_to_the_loop_that_torchrun_starts_again",
        "if failed and starts_again():",
        "if failed and restarted():",
    ),
    bug(
        "a workload that begins every round alike is not told of",
        "tests/node/training/test_inner_loop.py::test_rounds_that_begin_with_the_same_batch_are_told_of_once",
        "before[0] != round and before[1] == self._first[1]:",
        "before[0] == round and before[1] == self._first[1]:",
    ),
    bug(
        "buffers of an anchor are added to a node's own",
        "tests/node/training/test_inner_loop.py"
        "::test_buffers_are_contributed_as_they_are_and_every_anchor_replaces_them",
        "self._flat.update((own,), lambda _: self._flat.to_device(buffers, (own,)))",
        "self._flat.update((own,), lambda values: values.add_(self._flat.to_device(buffers, (own,))))",
    ),
    bug(
        "buffers are contributed as progress",
        "tests/node/training/test_inner_loop.py"
        "::test_buffers_are_contributed_as_they_are_and_every_anchor_replaces_them",
        "np.copyto(out[here], np.where(np.isfinite(local[here]), local[here], self._base[there]))",
        "np.subtract(self._base[there], local[here], out=out[here])",
    ),
    bug(
        "a buffer that was moved or assigned is not found",
        "tests/node/training/test_inner_loop.py::test_buffers_that_were_assigned_or_are_of_another_type_are_found",
        """
        return [*self._parameters, *(self._model.get_buffer(name) for name in self._buffer_names)]
        """,
        """
        self._found = getattr(self, "_found", None) or [self._model.get_buffer(name) for name in self._buffer_names]
        return [*self._parameters, *self._found]
        """,
    ),
    bug(
        "overlapped steps are contributed and kept as well",
        "tests/node/training/test_accounts.py::test_overlapped_steps_of_diloco_are_kept_by_a_snapshot",
        "self._flat.update(spans, lambda values: values.sub_(marked).add_(new))  # noqa: B023  called at once",
        (
            "self._flat.update(spans, lambda values: values.sub_(self._flat.to_device(base, "
            "spans)).add_(new))  # noqa: B023  called at once"
        ),
    ),
    bug(
        "mixing keeps the swarm's share and adds one's own",
        "tests/node/training/test_accounts.py::test_anchor_is_mixed_into_the_fragment_and_touches_nothing_else",
        "values.mul_(mixing).add_(new * (1 - mixing))",
        "values.mul_(1 - mixing).add_(new * mixing)",
    ),
    bug(
        "a contribution has the wrong sign",
        "tests/node/training/test_accounts.py::test_contribution_is_of_the_round_s_fragment_alone",
        "np.subtract(self._base[there], local[here], out=out[here])",
        "np.subtract(local[here], self._base[there], out=out[here])",
    ),
    bug(
        "tokens of a taken contribution count again",
        "tests/node/training/test_accounts.py::test_tokens_are_shared_among_the_fragments",
        """
        self._take(anchor, base, mark)
        self._tokens[mark.fragment.number] -= mark.tokens
        """,
        """
        self._take(anchor, base, mark)
        """,
    ),
    bug(
        "a contribution that was taken long ago is taken for the newest",
        "tests/node/training/test_accounts.py::test_contribution_that_was_not_taken_is_kept_whole",
        "if self._mark is not None and taken == self._mark.number:",
        "if self._mark is not None and taken <= self._mark.number:",
    ),
    bug(
        "what may have been counted is kept after a restart",
        "tests/node/training/test_accounts.py::test_work_that_a_later_contribution_held_is_not_kept",
        "self._tokens[self._spent.number] = 0",
        "self._tokens[self._spent.number] += 0",
    ),
    bug(
        "muon moves embeddings",
        "tests/node/training/test_muon.py::test_hidden_matrices_alone_are_muons",
        "parameter.dim() == 2 and tuple(parameter.shape) not in shapes",
        "parameter.dim() == 2",
    ),
    bug(
        "muon forgets its momentum",
        "tests/node/training/test_muon.py::test_matrix_moves_by_the_equations_and_all_else_as_adamw_moves_it",
        "own_rows(momentum).mul_(MOMENTUM).add_(own_rows(gradient))",
        "own_rows(momentum).copy_(own_rows(gradient))",
    ),
    bug(
        "muon orthogonalises each process' rows by themselves",
        "tests/node/training/test_sharded_replica.py"
        "::test_two_processes_learn_what_one_does_and_go_on_when_one_is_killed",
        """
    update = orthogonalised(whole(gradient.add(momentum, alpha=MOMENTUM)))
    rows = own_rows(matrix)
    """,
        """
    rows = own_rows(matrix)
    update = orthogonalised(own_rows(gradient.add(momentum, alpha=MOMENTUM)))
    if True:
        rows.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * RMS * math.sqrt(max(matrix.shape)))
        return
    """,
    ),
    bug(
        "moments in 8 bits are rounded to the nearest",
        "tests/node/training/test_adamw8bit.py::test_a_moment_that_forgets_slowly_forgets_nevertheless",
        "level = (magnitude + words) >> _DROPPED",
        "level = (magnitude + (1 << (_DROPPED - 1))) >> _DROPPED",
    ),
    bug(
        "a second moment that is too small for its block is zero",
        "tests/node/training/test_block_floats.py"
        "::test_what_is_too_small_for_its_block_is_zero_with_a_sign_and_the_least_without",
        """
        if self.signed:
            bits.masked_fill_(level == 0, 0).bitwise_or_((codes >> 7) << 31)
        """,
        """
        bits.masked_fill_(level == 0, 0)
        if self.signed:
            bits.bitwise_or_((codes >> 7) << 31)
        """,
    ),
    bug(
        "each process rounds its rows as if they were the first",
        "tests/node/training/test_adamw8bit.py::test_rows_held_apart_are_rounded_as_they_are_together",
        "key, first = hashed(hashed(place) + steps), first_row(parameter)",
        "key, first = hashed(hashed(place) + steps), 0",
    ),
    bug(
        "a script that was mended goes on from what was NaN",
        "tests/node/training/test_inner_state.py::test_nothing_is_taken_from_a_snapshot_that_is_not_finite",
        "        saved.check_finite()\n",
        "",
    ),
    bug(
        "a restart loses the exponents of moments in 8 bits",
        "tests/node/training/test_inner_state.py::test_rounds_after_a_restart_are_those_without_one",
        'return [*codes, *((f"{moment}_exponent.{name}", blocks.exponents) for moment, blocks in kept)]',
        "return codes",
    ),
    bug(
        "the link of a loop is an argument of its daemon, which others on the machine see",
        "tests/node/loops/test_loop_daemon.py::test_link_is_told_to_the_daemon_where_no_other_user_sees_it",
        'given = swarm if link is None else "-"',
        "given = swarm",
    ),
    bug(
        "a line on standard input allows the code that it names",
        "tests/cli/test_link.py::test_line_on_standard_input_allows_no_code",
        """
    if (link := given_link(str(options.manifest))) is not None:
        """,
        """
    line = sys.stdin.readline()
    if (link := link_in(line)) is not None:
        allowed = [*allowed, *line.split()[-1:]]
        """,
    ),
    bug(
        "the memory of an anchor is used again while the trainer stands on it",
        "tests/node/training/test_trainer.py"
        "::test_the_memory_of_an_anchor_is_nobody_elses_until_a_later_one_was_applied",
        """
            raise LocalError("the trainer applied an anchor that it was not given")
        self._stands_on = self._unanswered.popleft()
        """,
        """
            raise LocalError("the trainer applied an anchor that it was not given")
        self._unanswered.popleft()
        """,
    ),
    bug(
        "who is lent a state can cut it short",
        "tests/node/training/test_trainer.py::test_who_is_lent_a_file_cannot_cut_it_short",
        '{mapping.reader}", os.O_RDONLY | os.O_CLOEXEC)',
        '{mapping.reader}", os.O_RDWR | os.O_CLOEXEC)',
    ),
    bug(
        "a trainer that restarts is not lent the anchor",
        "tests/node/training/test_trainer.py"
        "::test_a_contribution_that_was_read_is_given_back_and_the_anchor_lent_again_to_a_restarted_trainer",
        "loaded, paused = None, False",
        "loaded, paused = self._anchored, False",
    ),
    bug(
        "a snapshot amid a round takes its place after its work was contributed",
        "tests/node/training/test_inner_state.py"
        "::test_snapshot_amid_a_round_takes_its_place_only_before_its_work_is_contributed",
        "if self._withdrawn:",
        "if False:",
    ),
    bug(
        "a snapshot amid a round is made of what was contributed",
        "tests/node/training/test_inner_state.py::test_only_work_that_no_contribution_holds_is_amid_a_round",
        "return self._base is not None and self._mark is None and any(self._tokens)",
        "return self._base is not None and any(self._tokens)",
    ),
    bug(
        "work amid a round is added to a later anchor's buffers",
        "tests/node/training/test_inner_state.py::test_work_amid_a_round_goes_along_to_a_later_anchor",
        "saved.kept[self._fragments.buffers_begin :] = 0",
        "pass",
    ),
    bug(
        "a restarted trainer takes up what it had contributed",
        "tests/node/training/test_trainer.py"
        "::test_restarted_trainer_goes_on_from_the_midst_of_its_round_unless_that_was_contributed",
        """
        self._contributions, self._contributed_round = report.number, report.round
        self._midway = None
        """,
        """
        self._contributions, self._contributed_round = report.number, report.round
        """,
    ),
    bug(
        "a trainer that was started early outlives its node",
        "tests/node/training/test_early_trainer.py::test_it_ends_with_a_node_that_does_not_come_to_have_a_trainer",
        "left = early.take()",
        "left = None",
    ),
    bug(
        "a trainer that was started early leaves a core",
        "tests/node/test_secrets.py::test_real_node_that_crashes_leaves_no_core_nor_does_its_trainer",
        "keep_keys_out()  # of what it dumps as well: no key has been read yet, whose reader would see to it",
        "pass",
    ),
    bug(
        "work of before a sleep is counted",
        "tests/node/rounds/test_participation.py"
        "::test_what_was_learnt_before_too_many_rounds_without_this_node_is_dropped",
        "is_too_old = before is not None and round - before > self._manifest.round.staleness_rounds",
        "is_too_old = False",
    ),
    bug(
        "work of before a pause is counted",
        "tests/node/rounds/test_participation.py"
        "::test_what_was_learnt_before_too_many_rounds_without_this_node_is_dropped",
        "if before is None or is_too_old or not is_paused:",
        "if True:",
    ),
    bug(
        "what is left of work that was done in time after a pause is dropped",
        "tests/node/rounds/test_participation.py"
        "::test_what_encoding_left_of_a_contribution_made_just_after_a_long_pause_is_kept",
        "self._worked_on = state.round",
        "",
    ),
    bug(
        "the speed of before a sleep is kept",
        "tests/node/training/test_fair_share.py"
        "::test_speed_of_before_a_sleep_is_forgotten_and_that_of_the_stretch_with_it_in_is_none",
        """
        self._steady, self._steady_steps = SteadySpeed(), SteadySpeed()
        self.tokens_per_s, self._is_odd = 0.0, True
        """,
        "self._is_odd = True",
    ),
    bug(
        "a node that starts as its loop is interrupted stays",
        "tests/node/loops/test_loop_daemon.py::test_a_daemon_that_starts_as_its_loop_is_interrupted_is_ended",
        "    if interrupted:\n        _stop(process)",
        "    if interrupted:",
    ),
    bug(
        "a node that is only starting is not told that its loop has ended",
        "tests/node/test_own_loop_nodes.py::test_a_loop_that_is_interrupted_while_its_node_starts_has_it_leave_at_once",
        "if not self._asked and process.poll() is None:",
        "if False:",
    ),
    bug(
        "tokens are compared where steps are shared out",
        "tests/node/training/test_fair_share.py"
        "::test_who_has_larger_batches_makes_as_many_steps_as_who_needs_as_long_for_one",
        "self._steady_steps.measured(steps_per_s)",
        "self._steady_steps.measured(event.tokens_per_s)",
    ),
    bug(
        "a stretch with a sleep in it says how fast a node is",
        "tests/node/training/test_fair_share.py"
        "::test_speed_of_before_a_sleep_is_forgotten_and_that_of_the_stretch_with_it_in_is_none",
        """
        if not self._is_odd:
            self._measured_speed(event)
        """,
        """
        self._measured_speed(event)
        """,
    ),
    bug(
        "a snapshot that fails in the midst of its writing holds up the next for ever",
        "tests/node/training/test_inner_state.py::test_snapshot_that_a_device_fails_amid_its_writing_holds_up_no_other",
        """
        finally:
            self.done()  # or who comes next would wait for ever
        """,
        """
        finally:
            pass
        """,
    ),
    bug(
        "a child that can read no orders any more waits for one for ever",
        "tests/node/test_parent_pipe.py::test_child_whose_orders_cannot_be_read_says_so_and_ends",
        "except Exception as error:  # whatever it is: nobody reads orders after it",
        "except LocalError as error:",
    ),
    bug(
        "one kind that holds is enough to train",
        "tests/node/test_when.py::test_all_kinds_have_to_hold_and_each_that_does_not_is_named",
        'return " and ".join(reasons)',
        'return "" if len(self._kinds) > len(reasons) else " and ".join(reasons)',
    ),
    bug(
        "a resumed node trains on its battery",
        "tests/node/loops/test_attendance.py"
        "::test_a_node_whose_user_wants_it_to_train_at_times_waits_whatever_else_ends_and_says_why",
        """
        if changed:
            goes_on = f"resumed, and training waits: {self.why}" if self.why else "training goes on"
            self._on_progress(Notice(text="training pauses: its user said so" if paused else goes_on))
        self._put(SetPaused(bool(self.why)))
        """,
        """
        if changed:
            goes_on = f"resumed, and training waits: {self.why}" if self.why else "training goes on"
            self._on_progress(Notice(text="training pauses: its user said so" if paused else goes_on))
        self._put(SetPaused(paused or self._away))
        """,
    ),
    bug(
        "a node that trains takes its own load for others'",
        "tests/node/test_when.py::test_own_processes_are_not_others",
        "return min(max((busy_s - before[1] - own_s) / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0",
        "return min(max((busy_s - before[1]) / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0",
    ),
    bug(
        "samples take as much time as they like",
        "tests/node/training/test_samples.py"
        "::test_slow_model_says_less_and_pays_for_it_by_a_share_of_later_evaluations",
        "if self._owed_s > 0:",
        "if False:",
    ),
    bug(
        "what a model says goes on to terminals as it is",
        "tests/node/training/test_samples.py::test_sample_of_a_hostile_vocabulary_is_printable",
        "text=printable(text)[:SAMPLE_LIMIT_CHARS]",
        "text=text[:SAMPLE_LIMIT_CHARS]",
    ),
    bug(
        "what is sampled changes what is trained next",
        "tests/node/workloads/test_text.py"
        "::test_continuations_are_equal_for_equal_parameters_and_leave_random_numbers_alone",
        "return torch.Generator().manual_seed(SEED)",
        "return torch.default_generator",
    ),
    bug(
        "a trainer that hangs amid a step holds up its node's rounds",
        "tests/node/test_swarm_in_a_box.py::test_a_trainer_that_hangs_keeps_its_node_from_no_round",
        "        self._to_apply = state.round\n",
        "        while self._to_apply is not None:\n            await trio.sleep(0.01)\n"
        "        self._to_apply = state.round\n",
    ),
    bug(
        "of anchors that wait for a step to end the trainer is given the newest alone, as if none was fresh or taken",
        "tests/node/training/test_trainer.py::"
        "test_no_anchor_waits_in_the_daemon_for_a_step_to_end_and_those_that_come_meanwhile_become_one",
        "taken, fresh = max(order.taken, one.order.taken), order.fresh or one.order.fresh",
        "taken, fresh = order.taken, order.fresh",
    ),
    bug(
        "a second anchor takes from a restarted trainer what it goes on from",
        "tests/node/training/test_trainer.py"
        "::test_an_anchor_that_comes_when_a_restarted_trainer_is_nearly_ready_leaves_it_what_it_goes_on_from",
        "abandoned = restored is not None and restored is not self._midway and restored is not self._newest",
        "abandoned = loaded is not None",
    ),
    bug(
        "a restarted trainer goes on from what is abandoned meanwhile",
        "tests/node/training/test_trainer.py"
        "::test_an_anchor_that_comes_when_a_restarted_trainer_is_nearly_ready_leaves_it_what_it_goes_on_from",
        "abandoned = restored is not None and restored is not self._midway and restored is not self._newest",
        "abandoned = False",
    ),
    bug(
        "a trainer that hangs over the initial parameters is given as long as a step",
        "tests/node/training/test_trainer.py"
        "::test_trainer_that_hangs_over_the_initial_parameters_is_replaced_soon_and_the_next_owes_them",
        "deadline_s = INITIAL_DEADLINE_S if self._owes_initial else STALL_DEADLINE_S",
        "deadline_s = STALL_DEADLINE_S",
    ),
    bug(
        "a trainer that writes no initial parameters in time ends its node",
        "tests/node/test_swarm_in_a_box.py"
        "::test_a_trainer_that_writes_no_initial_parameters_is_waited_for_and_ends_no_node",
        """
        except NetworkError as error:
            logger.warning("no state to begin on yet: %s", error)
            if certified != NO_HASH:
        """,
        """
        except NetworkError as error:
            logger.warning("no state to begin on yet: %s", error)
            raise
            if certified != NO_HASH:
        """,
    ),
    bug(
        "a restarted trainer skips what it had drawn in one go, and hears nothing meanwhile",
        "tests/node/training/test_inner_state.py"
        "::test_batches_that_were_drawn_are_skipped_in_pieces_and_a_snapshot_amid_them_is_that_of_before",
        "if time.monotonic() >= ends_at:",
        "if False:",
    ),
    bug(
        "a snapshot of a trainer that has not come to where it was has other random numbers",
        "tests/node/training/test_inner_state.py"
        "::test_batches_that_were_drawn_are_skipped_in_pieces_and_a_snapshot_amid_them_is_that_of_before",
        "random=None if restored is None else restored.random,",
        "random=None,",
    ),
    bug(
        "a part of a batch without tokens makes the gradient of all processes no number",
        "tests/node/training/test_sharded_replica.py::test_two_processes_contribute_the_gradient_that_one_does",
        "output.register_hook(torch.zeros_like)",
        "output.register_hook(torch.clone)",
    ),
    bug(
        "the loss of a rank whose part has no tokens makes the node's no number",
        "tests/node/loops/test_loop_steps.py::test_the_loss_of_a_step_on_no_tokens_counts_where_it_is_a_number",
        "if loss is not None and (tokens or not math.isnan(loss)):",
        "if loss is not None:",
    ),
    bug(
        "options of a workload have no upper limit",
        "tests/node/workloads/test_regression.py::test_an_option_out_of_its_range_is_refused_in_one_line_with_that",
        "isinstance(value, bool) or not least <= value <= most:",
        "isinstance(value, bool) or not least <= value:",
    ),
    bug(
        "a trainer that talks nonsense ends its node",
        "tests/node/training/test_trainer.py::test_trainer_that_talks_nonsense_ends_itself_alone",
        'return ChildDied(f"broke the protocol: {error}")',
        "raise",
    ),
    bug(
        "what is given up while a new trainer restores it is taken for what was never there",
        "tests/node/training/test_trainer.py"
        "::test_a_state_that_is_gone_back_to_while_a_new_trainer_restores_is_all_that_it_has",
        "            loaded, paused = None, False\n",
        "            loaded, paused, restored = None, False, self._midway or self._newest\n",
    ),
    bug(
        "a trainer that dies between what it took over and its first anchor loses that",
        "tests/node/training/test_trainer.py"
        "::test_work_amid_a_round_counts_once_where_the_trainer_dies_between_taking_it_over_and_its_first_anchor",
        "restored = await self._restore(child)",
        "restored = None if self._anchored is None else await self._restore(child)",
    ),
    bug(
        "what may have been counted is taken up again by the trainer after the next",
        "tests/node/training/test_trainer.py"
        "::test_what_a_trainer_took_over_before_its_first_anchor_the_next_takes_over",
        "spent = kept.spent or self._contributed_round > kept.round",
        "spent = self._contributed_round > kept.round",
    ),
    bug(
        "a trainer that hangs is started again for ever",
        "tests/node/training/test_trainer.py::test_trainer_that_hangs_again_and_again_is_given_up",
        "self._waited_s += died.waited_s",
        "self._waited_s += 0.0",
    ),
    bug(
        "a contribution to another round than was ordered counts",
        "tests/node/training/test_trainer.py"
        "::test_contribution_to_another_round_than_was_ordered_ends_the_trainer_alone",
        "made.order == self._training.order and made.round != self._training.round:",
        "made.order != self._training.order and made.round != self._training.round:",
    ),
    bug(
        "a trainer may say that it worked on fewer tokens than none",
        "tests/node/test_own_loop.py"
        "::test_loop_that_breaks_the_protocol_loses_its_own_part_alone_and_its_user_is_sent_to_the_log",
        """
    tokens: CounterField
    steps: CounterField
        """,
        """
    tokens: int
    steps: CounterField
        """,
    ),
    bug(
        "a step may be on fewer tokens than none, or on infinitely many",
        "tests/node/training/test_inner_loop.py::test_loss_that_returns_something_else_is_told_what_to_return",
        "number is not None and 0 <= number < STEP_TOKENS_LIMIT",
        "number is not None",
    ),
    bug(
        "a trainer whose first anchor is of another history adds to it what it restored",
        "tests/node/training/test_inner_state.py"
        "::test_nothing_that_was_restored_is_left_on_an_anchor_of_another_history",
        "        if fresh:\n            self._forget()\n",
        "        if fresh and self._base is not None:\n            self._forget()\n",
    ),
    bug(
        "a replica that anchors are mixed into is restored on any later anchor",
        "tests/node/training/test_inner_state.py"
        "::test_a_replica_that_anchors_are_mixed_into_is_not_set_on_a_later_one_than_it_stood_on",
        "saved.local is not None and round is not None and round > saved.round:",
        "saved.local is not None and round is None:",
    ),
    bug(
        "a snapshot of another history is taken up whole after a death",
        "tests/node/training/test_trainer.py"
        "::test_what_a_restart_gave_for_its_moments_alone_is_so_given_to_the_next_trainer",
        "exact = kept.exact and kept.round in (anchored, anchored + 1)",
        "exact = kept.round in (anchored, anchored + 1)",
    ),
    bug(
        "a snapshot that was under way when the swarm went back is given to the next trainer",
        "tests/node/training/test_trainer.py"
        "::test_a_snapshot_that_was_under_way_when_the_swarm_went_back_is_given_to_nobody",
        "self._snapshots_under_way.clear()",
        "pass",
    ),
    bug(
        "contributions of a history that was given up keep work amid a round from being kept",
        "tests/node/training/test_trainer.py"
        "::test_work_amid_a_round_is_kept_after_going_back_behind_what_was_contributed",
        "self._newest, self._midway, self._contributed_round = None, None, 0",
        "self._newest, self._midway = None, None",
    ),
    bug(
        "a full disk stops the trainer for a snapshot with every word of its progress",
        "tests/node/training/test_inner_state.py::test_unwritable_folder_is_told_and_not_raised",
        "send(Written(copy_s=time.perf_counter() - began, failure=str(error)).report(order))",
        "send(Written(failure=str(error)).report(order))",
    ),
    bug(
        "a model in parts that rests is asked for its initial parameters where it has none",
        "tests/node/training/test_shard.py::test_a_model_in_parts_that_rests_takes_an_anchor_and_goes_on_to_the_bit",
        """
        with self._awake():
            super().write_initial(out)
        """,
        "super().write_initial(out)",
    ),
    bug(
        "a trainer whose steps take minutes is stuck in every round",
        "tests/node/training/test_fair_share.py"
        "::test_trainer_that_makes_no_step_for_long_is_stuck_and_one_that_is_slow_rests_or_evaluates_is_not",
        "self._step_s = now - self._stepped_at",
        "self._step_s = self._step_s if self.stuck else now - self._stepped_at",
    ),
    bug(
        "one bad row in a running mean ends a node for good",
        "tests/node/training/test_accounts.py"
        "::test_running_mean_that_one_bad_row_spoilt_is_contributed_as_the_anchor_has_it_and_set_right_by_the_next",
        "np.copyto(out[here], np.where(np.isfinite(local[here]), local[here], self._base[there]))",
        "np.copyto(out[here], local[here])",
    ),
)
