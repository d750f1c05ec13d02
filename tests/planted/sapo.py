"""Bugs of rollouts: scores, trust, selection, groups, the learner."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

DIALOGUE, TURNS = "tests/node/sapo/test_dialogue.py", "tests/node/sapo/test_turns.py"

SAPO: tuple[Bug, ...] = (
    bug(
        "one sandbox that fails leaves others in use",
        "tests/node/sapo/test_sandbox.py::test_family_that_does_not_begin_is_told_of_from_beside_others",
        "wait(scoring)  # before what one of them raises: no sandbox is left in use",
        "pass",
    ),
    bug(
        "sandboxes end between two calls, with the threads that started them",
        "tests/node/sapo/test_sandbox.py::test_tasks_are_scored_side_by_side_each_as_it_would_be_alone",
        "scoring = [self._threads.submit(score, sandbox) for sandbox in sandboxes]",
        """
        with ThreadPoolExecutor(self._side_by_side) as own:
            scoring = [own.submit(score, sandbox) for sandbox in sandboxes]
        """,
    ),
    bug(
        "a stranger's word is taken for what the environment answered",
        f"{DIALOGUE}::test_who_puts_words_into_the_environments_mouth_is_a_liar",
        "if any(self.reply(task, said[: at + 1]) != reply for at, reply in enumerate(replies)):",
        "if False:",
    ),
    bug(
        "a transcript may go on without end",
        f"{DIALOGUE}::test_dialogue_has_a_last_turn_whatever_its_environment_says",
        "return len(replies) < len(said) <= TURN_LIMIT",
        "return len(replies) < len(said)",
    ),
    bug(
        "what an environment raises ends the agent",
        f"{DIALOGUE}::test_dialogue_ends_where_its_environment_gives_no_answer_and_the_log_has_it",
        """
            what = f"took more than {TEXT_LIMIT_S:g} s"
        except Exception as error:  # a user's family may raise anything; what it says may have the text in it
        """,
        """
            what = f"took more than {TEXT_LIMIT_S:g} s"
        except OSError as error:
        """,
    ),
    bug(
        "an environment that never answers stops its agent",
        f"{DIALOGUE}::test_dialogue_ends_where_its_environment_gives_no_answer_and_the_log_has_it",
        "with limited(TEXT_LIMIT_S):",
        "with limited(600 * TEXT_LIMIT_S):",
    ),
    bug(
        "what an environment imports when it answers is missing in the sandbox",
        "tests/node/sapo/test_sandbox.py"
        "::test_environment_that_imports_when_it_answers_has_done_so_before_it_is_locked",
        "for warm in (self.reply, self.outcome):",
        "for warm in (self.outcome,):",
    ),
    bug(
        "a stranger's label makes a mean of no tokens",
        f"{TURNS}::test_label_that_leaves_out_what_the_environment_said_last_is_no_label",
        "if missing and any(stop == len(completion) for _, stop in sample.given):",
        "if False:",
    ),
    bug(
        "many short turns make honest peers' dialogues copies",
        f"{DIALOGUE}::test_short_guesses_are_nobodys_though_there_are_many",
        "for turns in encoded if max(map(len, turns)) >= COPY_LEAST_BYTES]",
        "for turns in encoded if sum(map(len, turns)) >= COPY_LEAST_BYTES]",
    ),
    bug(
        "an engine's dialogue has more tokens than a completion may have",
        "tests/node/sapo/test_sampler_process.py::test_engines_dialogue_is_no_longer_than_a_completion_may_be",
        "one.spent += completion.least_tokens",
        "one.spent += 1",
    ),
    bug(
        "a scorer that was closed is of no more use",
        "tests/node/sapo/test_sandbox.py::test_scorer_that_was_closed_begins_anew",
        """
            self._threads.shutdown()
            self._threads = None
        """,
        "self._threads.shutdown()",
    ),
    bug(
        "who copies what was said in dialogues is not found, since it was answered otherwise",
        f"{DIALOGUE}::test_copies_are_known_by_what_was_said_whatever_was_answered",
        "own = ((text,) if task.answering is None else turns_in(text)[0] for text in texts)",
        "own = ((text,) for text in texts)",
    ),
    bug(
        "a policy learns what its environment says",
        f"{TURNS}::test_update_is_that_of_the_drawn_tokens_alone",
        """
        for row, sample in enumerate(samples):
            for start, stop in sample.given:
                mask[row, start:stop] = False
        return mask
        """,
        "return mask",
    ),
    bug(
        "the loss is a mean over what nobody drew too",
        f"{TURNS}::test_update_is_that_of_the_drawn_tokens_alone",
        "tokens = sum(row.sample.drawn for row in rows)",
        "tokens = sum(len(row.sample.completion) for row in rows)",
    ),
    bug(
        "honest dialogues are struck for tokens that their environment gave",
        f"{TURNS}::test_dialogues_that_the_policy_drew_are_found_to_be_its_own",
        "missed += int((outside & drawn_mask([claim.sample])[0]).sum())",
        "missed += int(outside.sum())",
    ),
    bug(
        "whatever a sampler gives for its environment's answer goes for it",
        f"{TURNS}::test_tokens_that_say_another_answer_than_the_transcript_are_mislabelled",
        "if drawn[-1] != end or tuple(tokens[stop:at]) != reply:",
        "if drawn[-1] != end:",
    ),
    bug(
        "what would end a turn makes a policy's own transcript a forgery",
        f"{TURNS}::test_what_would_end_a_turn_is_no_part_of_what_is_said",
        "return text if task.answering is None else as_said(text)",
        "return text",
    ),
    bug(
        "a dialogue is longer than a completion may be",
        f"{TURNS}::test_environment_is_asked_after_each_turn_and_its_words_come_into_the_completion",
        "if reply is None or start + len(tokens) >= policy.completion_limit:",
        "if reply is None:",
    ),
    bug(
        "a dialogue is over once it goes on after a restart",
        f"{TURNS}::test_groups_of_dialogues_go_on_after_a_restart",
        "open=not one.done and task.answering is not None,",
        "open=False,",
    ),
    bug(
        "dialogues forget after a restart which tokens were given",
        f"{TURNS}::test_groups_of_dialogues_go_on_after_a_restart",
        "given=[*one.given],",
        "given=[],",
    ),
    bug(
        "an engine's dialogue goes on by another policy than it began by",
        "tests/node/sapo/test_sampler_process.py::test_group_whose_policy_changed_between_two_turns_is_given_up",
        "if drawn is None or drawn.policy != first.policy:",
        "if drawn is None:",
    ),
    bug(
        "who lies about the size of a large group is never proven a liar",
        "tests/protocol/test_group_pull.py::test_who_lies_about_the_size_of_a_large_group_is_to_blame_too",
        "elif len(data) < CHUNK_LIMIT_BYTES or len(whole) >= GROUP_LIMIT_BYTES:",
        "else:",
    ),
    bug(
        "a group that is a lie is asked for without end",
        "tests/protocol/test_group_pull.py::test_wrong_bytes_without_end_are_taken_up_to_the_largest_group",
        "elif len(data) < CHUNK_LIMIT_BYTES or len(whole) >= GROUP_LIMIT_BYTES:",
        "elif len(data) < CHUNK_LIMIT_BYTES:",
    ),
    bug(
        "who has other code for a task family is taken for a cheat",
        "tests/node/sapo/test_selection.py"
        "::test_who_has_a_family_in_another_version_is_at_no_fault_and_its_other_groups_are_taken",
        "msgspec.structs.replace(task, version=own.version) != own:",
        "task != own:",
    ),
    bug(
        "a group is read and hashed for each chunk of it",
        "tests/node/sapo/test_group_store.py::test_what_was_read_is_neither_read_nor_hashed_again_while_there_is_room",
        "if digest in self._read_last:",
        "if False:",
    ),
    bug(
        "groups that were read stay in memory without limit",
        "tests/node/sapo/test_group_store.py::test_what_was_read_is_neither_read_nor_hashed_again_while_there_is_room",
        "while self._memory_bytes > MEMORY_LIMIT_BYTES:",
        "while self._memory_bytes < 0:",
    ),
    bug(
        "another's groups are as many rows in memory as it likes",
        "tests/node/sapo/test_updates.py::test_no_more_rows_are_in_memory_than_a_node_wants_and_the_update_is_the_same",
        "together = self._settings.together or len(useful)",
        "together = len(useful)",
    ),
    bug(
        "another's completions are gone through at once, however many they are",
        "tests/node/sapo/test_replay.py"
        "::test_no_more_completions_are_in_memory_than_a_node_wants_and_as_many_tokens_are_missed",
        "for begin in range(0, len(samples), together)",
        "for begin in range(0, len(samples), COMPLETION_LIMIT)",
    ),
    bug(
        "an engine is asked for a reply of any size",
        "tests/node/sapo/test_engine_client.py::test_no_reply_is_asked_for_that_takes_more_memory_than_one_may",
        "wanted = min(count - len(came), together(most))",
        "wanted = count - len(came)",
    ),
    bug(
        "a log-probability of an engine that is none once it is packed ends the node",
        "tests/node/sapo/test_completions.py::test_reply_that_is_none_is_refused",
        "except ValueError as error:  # checked there alone",
        "except ZeroDivisionError as error:  # checked there alone",
    ),
    bug(
        "a family whose warm-up was interrupted is taken for warm",
        "tests/node/sapo/test_sandbox.py"
        "::test_sandbox_family_whose_warm_up_is_interrupted_scores_nothing_and_is_warmed_up_in_another_process",
        "if time.monotonic() - began >= limit_s:",
        "if False:",
    ),
    bug(
        "a family that has been interrupted is warmed up again where its imports are half there",
        "tests/node/sapo/test_sandbox.py"
        "::test_sandbox_family_whose_warm_up_is_interrupted_scores_nothing_and_is_warmed_up_in_another_process",
        """
        self.close()
        raise NotBegun(why)
        """,
        "raise NotBegun(why)",
    ),
    bug(
        "a text is worth 0 whose child died before it read it",
        "tests/node/sapo/test_sandbox.py::test_sandbox_child_that_died_before_it_was_locked_was_killed_by_no_text",
        "return scores, locked  # before",
        "return scores, True  # before",
    ),
    bug(
        "a disk that can only be read ends a node that shares rollouts",
        "tests/node/sapo/test_group_store.py::test_disk_that_can_only_be_read_raises_nothing",
        "_remove(self._path(digest, held.round))",
        "self._path(digest, held.round).unlink(missing_ok=True)",
    ),
    bug(
        "all agents are taught the same lessons",
        "tests/node/sapo/test_agent_process.py"
        "::test_each_agent_is_taught_lessons_of_its_own_unless_all_are_to_begin_with_one_policy",
        "    return begin.seed if begin.averages else assigned_seed(",
        "    return begin.seed if begin.me else assigned_seed(",
    ),
    bug(
        "an agent that is started again forgets the moments of Muon",
        "tests/node/sapo/test_policy_optimizer.py::test_an_agent_that_is_started_again_goes_on_to_the_bit",
        '    MUON: frozenset({"momentum", "first", "second", "steps"}),\n',
        '    MUON: frozenset({"momentum"}),\n',
    ),
    bug(
        "a score beyond 1 is a reward of 1",
        "tests/node/sapo/test_scorer_faults.py::test_scorer_fault_is_one_line_and_worth_nothing",
        "if not line and -ROUNDING <= value <= 1 + ROUNDING:",
        "if not line and -ROUNDING <= value:",
    ),
    bug(
        "a family catches that it takes too long",
        "tests/node/sapo/test_scorer_faults.py::test_what_takes_too_long_is_interrupted_and_a_limit_around_it_stands",
        "class Overdue(BaseException):",
        "class Overdue(Exception):",
    ),
    bug(
        "a family catches that it takes too long, and goes on",
        "tests/node/sapo/test_scorer_faults.py"
        "::test_direct_scorer_that_never_answers_is_interrupted_and_told_of_with_its_place",
        "signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)",
        "signal.setitimer(signal.ITIMER_REAL, limit_s)",
    ),
    bug(
        "a direct scorer may take for ever",
        "tests/node/sapo/test_scorer_faults.py"
        "::test_direct_scorer_that_never_answers_is_interrupted_and_told_of_with_its_place",
        """
        with limited(min(self._text_limit_s, left_s)):
            rewards.append(score_directly(self._faults, family, task, texts[len(rewards)]))
        """,
        "rewards.append(score_directly(self._faults, family, task, texts[len(rewards)]))",
    ),
    bug(
        "each text of a direct scorer has time of its own",
        "tests/node/sapo/test_scorer_faults.py"
        "::test_texts_that_a_direct_scorer_takes_long_for_share_the_time_of_their_task",
        "deadline = time.monotonic() + self._task_limit_s",
        "deadline = math.inf",
    ),
    bug(
        "a term of many names is as little work as one of none",
        "tests/node/sapo/test_scorers.py::test_polynomial_with_long_terms_takes_more_work_than_one_with_short_ones",
        "return len(value) + sum(map(len, value))",
        "return len(value)",
    ),
    bug(
        "a task that cannot be made ends its agent",
        "tests/node/sapo/test_learner.py::test_tasks_that_cannot_be_made_are_skipped",
        "if failed == FAILED_LIMIT:",
        "if failed:",
    ),
    bug(
        "an origin chooses among all indices",
        "tests/node/sapo/test_judge.py::test_task_beyond_what_a_round_comes_to_is_foreign",
        "return ref.index < INDEX_LIMIT and ref == ",
        "return ref == ",
    ),
    bug(
        "a peer's task may take for ever to make",
        "tests/node/sapo/test_judge.py"
        "::test_task_that_takes_too_long_to_make_is_refused_as_one_that_is_not_scored_in_time",
        """
        with limited(TASK_LIMIT_S):
            return self._source.task(group.task)
        """,
        "return self._source.task(group.task)",
    ),
    bug(
        "one long text that another wrote too makes a group a copy",
        "tests/node/sapo/test_judge.py::test_group_is_a_copy_if_most_of_its_texts_are_different_ones_of_somebody_else",
        "is_copy = 2 * len(copied) > len(one.group.completions) and ",
        "is_copy = 2 * len(copied) > len(texts) and ",
    ),
    bug(
        "one sentence over and over makes a group a copy",
        "tests/node/sapo/test_judge.py::test_group_is_a_copy_if_most_of_its_texts_are_different_ones_of_somebody_else",
        "COPIES_LEAST = 2",
        "COPIES_LEAST = 1",
    ),
    bug(
        "a process that scores outlives its node",
        "tests/node/sapo/test_sandbox.py"
        "::test_sandbox_ends_with_the_process_that_started_it_while_a_family_never_answers",
        "_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
    ),
    bug(
        "a group that is pulled again and again lets its sampler make more each time",
        "tests/protocol/test_offer_pace.py::test_one_group_is_taken_once_whoever_pulls_it",
        """
        del self._awaited[digest]
        self._advance(now)
        """,
        """
        self._advance(now)
        """,
    ),
    bug(
        "a trainer waits for groups of others however little its own take",
        "tests/node/sapo/test_daemon_line.py::test_others_groups_are_worth_as_long_as_it_takes_to_draw_as_many",
        "return min(WAIT_LIMIT_S, max(WORTH_LEAST_S, count * drawn_s / drawn)) if drawn else None",
        "return WAIT_LIMIT_S if drawn else None",
    ),
    bug(
        "a completion that cannot travel ends its agent",
        "tests/node/sapo/test_daemon_line.py"
        "::test_group_with_a_completion_that_cannot_travel_stays_here_and_the_next_one_goes_out",
        'raise LocalError(f"our own group is out of range: {error}") from error',
        "raise",
    ),
    bug(
        "a policy of another history is taken for one that goes on",
        "tests/node/sapo/test_following.py::test_policy_is_each_certified_state_to_the_bit_and_groups_name_its_round",
        "if anchor.fresh:",
        "if False:",
    ),
    bug(
        "a sampler's groups name another policy than the one they were drawn from",
        "tests/node/sapo/test_following.py::test_policy_is_each_certified_state_to_the_bit_and_groups_name_its_round",
        "version = self.round if self.version is None else self.version",
        "version = self.round",
    ),
    bug(
        "a sampler goes on with the policy it began with",
        "tests/node/sapo/test_following.py::test_policy_is_each_certified_state_to_the_bit_and_groups_name_its_round",
        "self._flat.scatter(torch.from_numpy(anchor.values))",
        "self._flat.scatter(torch.from_numpy(anchor.values)) if self._learner.version is None else None",
    ),
    bug(
        "who is judged first is the author",
        "tests/node/sapo/test_judge.py::test_original_that_was_heard_first_is_no_copy_though_its_copy_was_judged_first",
        "return known is not None and known[0] <= order and known[1] != owner",
        "return known is not None and known[1] != owner",
    ),
    bug(
        "a copy that was judged first stays the original",
        "tests/node/sapo/test_judge.py::test_original_that_was_heard_first_is_no_copy_though_its_copy_was_judged_first",
        "if known is None or order < known[0]:",
        "if known is None:",
    ),
    bug(
        "all offers are heard at once",
        "tests/protocol/test_offer_book.py::test_offers_come_in_any_order_and_each_once",
        """
        self._heard += 1
        """,
        """

        """,
    ),
    bug(
        "who lies about log-probabilities counts as often as it likes",
        "tests/node/sapo/test_grpo.py::test_token_weighs_as_often_as_it_is_more_probable_here_and_twice_at_most",
        "torch.exp((current - drawn).clamp(max=math.log(TRUNCATION)))",
        "torch.exp(current - drawn)",
    ),
    bug(
        "a bad completion of unknown probability is learnt from like one that is known",
        "tests/node/sapo/test_grpo.py::test_rule_says_which_completions_of_others_count",
        'or (terms == "tis" and drawn)',
        'or terms == "tis"',
    ),
    bug(
        "tokens of another's are taken that are not those of the text",
        "tests/node/sapo/test_updates.py::test_what_anothers_tokens_were_drawn_with_is_known_if_they_are_this_policys",
        " or completion[: len(ids)] != ids:",
        ":",
    ),
    bug(
        "tokens are labelled with the policy that drew the last of them",
        "tests/node/sapo/test_generation.py::test_collect_ends_with_enough_groups_and_goes_on_with_the_others",
        "drawn = len(self.tokens) - sum(count for _, count in self.versions)",
        "drawn = len(self.tokens); self.versions.clear()",
    ),
    bug(
        "a group is begun and never done",
        "tests/node/sapo/test_generation.py::test_group_that_was_begun_long_ago_is_waited_for",
        " and (oldest is None or round - oldest.round < AGE_LIMIT_ROUNDS)",
        "",
    ),
    bug(
        "a group that was announced is unfinished on disk until the next",
        "tests/node/sapo/test_learner.py::test_what_is_unfinished_is_known_before_anybody_hears_of_what_is_done",
        """
        self._handed_out()
        current.tokens += generated.tokens
        current.generated += generated.groups
        judged = self._judge(generated.groups)
        for made, group in judged:
            current.own.append(group)
            self._add(current, own_rows(made, group.rewards))
        if judged:
            self._sharing.offer([group for _, group in judged])
        """,
        """
        current.tokens += generated.tokens
        current.generated += generated.groups
        judged = self._judge(generated.groups)
        for made, group in judged:
            current.own.append(group)
            self._add(current, own_rows(made, group.rewards))
        if judged:
            self._sharing.offer([group for _, group in judged])
        self._handed_out()
        """,
    ),
    bug(
        "a disk that is full keeps groups that were handed out",
        "tests/node/sapo/test_unfinished.py::test_what_cannot_be_written_leaves_no_file_of_before",
        """
        except StorageError:
            with disk_errors(self.folder):
                path.unlink(missing_ok=True)
            raise
        """,
        """
        except StorageError:
            raise
        """,
    ),
    bug(
        "a restarted agent draws the tasks of groups that it goes on with",
        "tests/node/sapo/test_agent_process.py::test_groups_that_were_begun_go_on_after_a_kill_and_none_is_made_twice",
        "max(self.learner.round, begin.announced, begun)",
        "max(self.learner.round, begin.announced)",
    ),
    bug(
        "a liar stays trusted a lie longer",
        "tests/node/sapo/test_trust.py::test_liar_is_ignored_after_four_lies_and_nobody_else",
        "if is_ignored or self.demerits(peer) >= IGNORED_AT:",
        "if is_ignored or self.demerits(peer) > IGNORED_AT:",
    ),
    bug(
        "demerits do not decay",
        "tests/node/sapo/test_trust.py::test_demerits_decay_by_half_lives_and_the_second_chance_is_shorter",
        "points * 0.5 ** (max(0.0, now - at) / self._half_life)",
        "points * 0.5 ** (max(0.0, at - now) / self._half_life)",
    ),
    bug(
        "a flood puts a peer out for ever",
        "tests/node/sapo/test_trust.py::test_flood_does_not_put_a_peer_out_for_ever",
        "self._demerits.add(peer, weight, self._round, most=4 * IGNORED_AT)",
        "self._demerits.add(peer, weight, self._round)",
    ),
    bug(
        "a peer that is let in again keeps all its demerits against it",
        "tests/node/sapo/test_trust.py::test_demerits_decay_by_half_lives_and_the_second_chance_is_shorter",
        "if peer in self._ignored and self.demerits(peer) <= IGNORED_AT / 2:",
        "if peer in self._ignored and self.demerits(peer) < IGNORED_AT:",
    ),
    bug(
        "advantages are not centred",
        "tests/node/sapo/test_grpo.py::test_advantages_are_what_is_above_the_mean_of_the_group",
        "centred = values - values.mean()",
        "centred = values - values.min()",
    ),
    bug(
        "a share of the reward counts as much as all of it",
        "tests/node/sapo/test_grpo.py::test_a_share_of_the_reward_counts_as_much_as_it_is_worth",
        "return centred.float()",
        "return (centred / (values.std(correction=0) + 1e-4)).float()",
    ),
    bug(
        "an own answer that was not scored is wrong",
        "tests/node/sapo/test_learner.py::test_an_own_answer_that_was_not_scored_in_time_is_not_taken_for_a_wrong_one",
        "known = tuple(reward for reward in rewards if reward is not None)",
        "known = tuple(reward or 0.0 for reward in rewards)",
    ),
    bug(
        "an evaluation takes all the time that it likes",
        "tests/node/sapo/test_held_out.py::test_an_evaluation_waits_for_rounds_and_for_its_share_of_the_time",
        "self._due_at = self._clock() + seconds * (1 / TIME_SHARE - 1)",
        "self._due_at = self._clock()",
    ),
    bug(
        "the wider clip is the lower",
        "tests/node/sapo/test_grpo.py::test_ratio_is_clipped_low_for_bad_and_high_for_good",
        "bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)",
        "bounded = ratio.clamp(1 - CLIP_HIGH, 1 + CLIP_LOW)",
    ),
    bug(
        "what is behind a completion counts",
        "tests/node/sapo/test_grpo.py::test_loss_and_gradient_equal_a_reference",
        "return -torch.where(batch.mask, terms, 0.0).sum() / tokens",
        "return -terms.sum() / tokens",
    ),
    bug(
        "a verdict that blames nobody costs trust",
        "tests/node/sapo/test_intake.py::test_verdicts_cost_trust_where_somebody_is_to_blame",
        "if verdict.blamed:\n",
        "if verdict.blamed or verdict.refused:\n",
    ),
    bug(
        "what replaces an absent replacement costs no budget",
        "tests/node/sapo/test_intake.py::test_replacements_that_do_not_come_are_replaced_and_cost_no_more_than_one_budget",
        "self._replacements(absent)",
        "self._replacements(self._missing - len(self.pulled))",
    ),
    bug(
        "refused groups are paid for as if they had been trained on",
        "tests/node/sapo/test_intake.py::test_verdicts_cost_trust_where_somebody_is_to_blame",
        "trained=verdict.refused is None",
        "trained=True",
    ),
    bug(
        "offers of who is ignored are drawn",
        "tests/node/sapo/test_selection.py::test_offers_that_may_not_be_drawn_are_counted_by_reason",
        "if self._trust.ignored(offer.origin):\n    return Reason.IGNORED",
        "if self._trust.ignored(self._tasks.table.kinds[0].family):\n    return Reason.IGNORED",
    ),
    bug(
        "offers of tasks that nobody was assigned are drawn",
        "tests/node/sapo/test_selection.py::test_offers_that_may_not_be_drawn_are_counted_by_reason",
        "return Reason.FOREIGN_TASK\n",
        "return None\n",
    ),
    bug(
        "the judge believes announced rewards",
        "tests/node/sapo/test_judge.py::test_wrong_answers_announced_as_right_are_refused_and_blamed",
        "HINT_TOLERANCE = 0.02",
        "HINT_TOLERANCE = 1.02",
    ),
    bug(
        "the judge takes a second group of one task",
        "tests/node/sapo/test_judge.py::test_second_group_of_a_task_is_a_duplicate",
        "if offer.digest in self._seen or place in self._seen:",
        "if offer.digest in self._seen:",
    ),
    bug(
        "the judge opens a group that was not announced",
        "tests/node/sapo/test_judge.py::test_group_other_than_announced_is_refused",
        "if digest_of(data) != offer.digest:\n",
        "if len(data) > offer.announcement.size_bytes:\n",
    ),
    bug(
        "a scorer that fails is the origin's fault",
        "tests/node/sapo/test_judge.py::test_scorer_that_fails_is_nobodys_fault",
        "refused=Reason.UNSCORED, blamed=False",
        "refused=Reason.UNSCORED, blamed=True",
    ),
    bug(
        "trust forgets nothing",
        "tests/node/sapo/test_trust.py::test_demerits_decay_by_half_lives_and_the_second_chance_is_shorter",
        "points * 0.5 **",
        "points * 1.0 **",
    ),
    bug(
        "a group is announced as another",
        "tests/swarm/test_rollouts.py::test_announcement_of_another_group_than_the_one_beside_it_is_refused",
        "announcement.digest != digest_of(group) or ",
        "",
    ),
    bug(
        "a row's padding is attended to",
        "tests/node/workloads/test_gpt.py::test_reading_on_with_a_cache_is_reading_all_at_once",
        "seen = causal[None] & cache.visible[:, None, :longest]",
        "seen = causal[None].repeat(len(contexts), 1, 1)",
    ),
    bug(
        "a row that is longer than the first of its span is not read from its beginning",
        "tests/node/workloads/test_gpt.py::test_reading_on_with_a_cache_is_reading_all_at_once",
        "row + 1, min(begin, column)",
        "row + 1, column",
    ),
    bug(
        "contexts of another length are read to the wrong end",
        "tests/node/workloads/test_gpt.py::test_reading_on_with_a_cache_is_reading_all_at_once",
        "columns = slice(self.used - part.used, self.used)",
        "columns = slice(0, part.used)",
    ),
    bug(
        "rows that go on are written over the ones of the layer before",
        "tests/node/workloads/test_gpt.py::test_reading_on_with_a_cache_is_reading_all_at_once",
        "spare = columns",
        "spare = layers[layer]",
    ),
    bug(
        "a cache whose longest row is gone keeps its count of columns",
        "tests/node/workloads/test_gpt.py::test_reading_on_with_a_cache_is_reading_all_at_once",
        "begins - unseen, self.used - unseen",
        "begins - unseen, self.used",
    ),
    bug(
        "cached tokens stand where the longest row stands",
        "tests/node/workloads/test_gpt.py::test_reading_on_with_a_cache_is_reading_all_at_once",
        "positions=cache.lengths[:, None], seen=seen",
        "positions=cache.lengths[:, None] * 0 + cache.used, seen=seen",
    ),
    bug(
        "files of the char policy have another order",
        "tests/node/workloads/test_gpt.py::test_files_of_the_char_policy_mean_what_they_meant",
        '"norm_perceptron": "norm_2", "query_key_value": "qkv", "project": "out"',
        '"query_key_value": "qkv", "project": "out", "norm_perceptron": "norm_2"',
    ),
    bug(
        "an engine that draws one at a time is not asked for log-probabilities",
        "tests/node/sapo/test_engine_client.py"
        "::test_engine_that_draws_one_at_a_time_gives_log_probabilities_all_the_same",
        "forms = (request, request.single(), request.plain())",
        "forms = (request, request.plain(), request.plain())",
    ),
    bug(
        "log-probabilities at another temperature are taken for those at the swarm's",
        "tests/node/sapo/test_completions.py::test_log_probabilities_of_llama_cpp_are_left_where_they_are_not_sure",
        "if not is_whole or is_drafted or request.temperature != 1:",
        "if not is_whole or is_drafted:",
    ),
    bug(
        "a token that a draft model drew is taken for a certain one",
        "tests/node/sapo/test_completions.py::test_log_probabilities_of_llama_cpp_are_left_where_they_are_not_sure",
        "if not is_whole or is_drafted or request",
        "if not is_whole or request",
    ),
    bug(
        "requests that were under way keep an engine to a form that it is over with",
        "tests/node/sapo/test_engine_client.py::test_requests_under_way_do_not_keep_to_a_form_that_is_over",
        "if form > first:",
        "if form != self._form:",
    ),
    bug(
        "tokens that an engine left out are taken for none",
        "tests/node/sapo/test_completions.py::test_log_probabilities_of_llama_cpp_are_left_where_they_are_not_sure",
        "is_whole = choice.text.isascii() and (",
        "is_whole = True or (",
    ),
    bug(
        "one prompt that is refused ends all log-probabilities",
        "tests/node/sapo/test_engine_client.py::test_form_that_was_refused_for_one_prompt_is_tried_again",
        "if self._asked >= FORM_KEPT:",
        "if False:",
    ),
    bug(
        "tokens in the form of chats are left out",
        "tests/node/sapo/test_completions.py::test_log_probabilities_in_the_form_of_chats_are_read_with_their_tokens",
        "[token.id for token in content if token.id is not None]",
        "[]",
    ),
    bug(
        "a group has completions of two policies",
        "tests/node/sapo/test_engine_client.py::test_completions_of_two_policies_are_never_in_one_group",
        "if came and reply.policy != policy:",
        "if came and not reply.policy:",
    ),
    bug(
        "a sampler's group is labelled with its own round",
        "tests/node/sapo/test_sampler_process.py::test_groups_have_the_label_of_who_drew_them_and_seeds_that_are_assigned",
        "policy_version=version_of(drawn.policy)",
        "policy_version=self._round",
    ),
    bug(
        "a completion that did not come to an end is taken",
        "tests/node/sapo/test_completions.py::test_reply_that_is_none_is_refused",
        "if choice.finish_reason not in ENDS:",
        'if choice.finish_reason == "error":',
    ),
    bug(
        "an engine's token is not looked up in its vocabulary",
        "tests/node/sapo/test_completions.py::test_reply_that_is_none_is_refused",
        "0 <= token < vocabulary",
        "0 <= token < TOKEN_IDS",
    ),
    bug(
        "an engine's bytes that are no text end the sampler",
        "tests/node/sapo/test_completions.py::test_reply_that_is_none_is_refused",
        'raise ValueError("it is not UTF-8") from None',
        "raise",
    ),
    bug(
        "a reply may break off",
        "tests/node/sapo/test_engine_client.py::test_engine_that_breaks_off_or_is_busy_is_waited_for_however_often",
        'raise NetworkError("it broke off in the middle of an answer") from None',
        "return status, bytes(body)",
    ),
    bug(
        "a stranger's log-probabilities need not be finite",
        "tests/protocol/test_rollouts.py::test_label_out_of_range_is_malformed",
        "return math.isfinite(value) and value <= LOG_PROB_TOLERANCE",
        "return not value > LOG_PROB_TOLERANCE",
    ),
    bug(
        "what others earned counts as own, by task",
        "tests/node/sapo/test_intake.py::test_rewards_of_a_task_are_means_over_completions_of_own_groups_and_of_others",
        "reward=mean(chain.from_iterable(own.get(family, ()))),",
        "reward=mean(chain.from_iterable((*own.get(family, ()), *external.get(family, ())))),",
    ),
    bug(
        "a number is compared with that of another completion",
        "tests/node/sapo/test_replay.py::test_who_draws_from_the_policy_that_it_names_misses_nothing",
        "group.task.ref.index, claim.number)",
        "group.task.ref.index, 0)",
    ),
    bug(
        "whatever a token is drawn by it is the policy's",
        "tests/node/sapo/test_replay.py::test_another_temperature_is_found",
        "TOLERANCE: Final = 5e-3",
        "TOLERANCE: Final = 1.0",
    ),
    bug(
        "a completion may be cut short where its beginning is right",
        "tests/node/sapo/test_replay.py::test_tokens_that_no_drawing_ends_with_are_refused",
        "return tuple(given) if stop == len(tokens) and whole else None",
        "return tuple(given)",
    ),
    bug(
        "who leaves its tokens out is believed",
        "tests/node/sapo/test_replay.py::test_a_group_without_its_tokens_is_refused",
        "tokens = said[number].ids() if said else ()",
        "tokens = said[number].ids() if said else self._policy.encode_completion(text) or ()",
    ),
    bug(
        "a sampler offers a group without the tokens that it is held to",
        "tests/node/sapo/test_intake.py::test_rollout_goes_out_without_tokens_that_leave_the_text_no_room",
        "        if labelled:\n",
        "        if False:\n",
    ),
    bug(
        "a trainer goes on with the policy that it went through others' groups by",
        "tests/node/sapo/test_replay.py::test_who_draws_from_the_policy_that_it_names_misses_nothing",
        """
            flat.scatter(own)
        """,
        """
            pass
        """,
    ),
    bug(
        "a sampler draws from another rounding of the policy than can be gone through",
        "tests/node/sapo/test_following.py"
        "::test_where_groups_are_replayed_its_policy_is_the_image_of_the_certified_one",
        "put_values(image_of(anchor.values), anchor.values)",
        "pass",
    ),
    bug(
        "doubt in a peer does not add up",
        "tests/node/sapo/test_replay.py::test_doubt_adds_up_to_a_fault_and_honesty_saves_nothing_up",
        "doubt = max(0.0, self._doubts.pop(peer, 0.0) + found.doubt)",
        "doubt = max(0.0, found.doubt)",
    ),
    bug(
        "a group that is proven to be of another policy is learnt from",
        "tests/node/sapo/test_judge.py"
        "::test_groups_that_are_to_be_replayed_are_refused_on_proof_and_else_weighed_with_what_was_found",
        "    if found.is_proof:\n",
        "    if False:\n",
    ),
    bug(
        "groups of policies that are long gone are taken, as nobody can go through them",
        "tests/node/sapo/test_selection.py::test_groups_are_of_policies_that_can_be_gone_through_and_later_ones_wait",
        "if reason is None and policies is not None and offer.announcement.policy_version not in policies:",
        "if False:",
    ),
    bug(
        "a token is drawn by the number of the place before",
        "tests/node/sapo/test_char_policy.py::test_generation_and_log_probs_equal_a_forward_of_each_alone",
        "one.draws(len(one.tokens))",
        "one.draws(max(0, len(one.tokens) - 1))",
    ),
    bug(
        "who trains is gone through like a sampler once it is no member any more",
        "tests/node/sapo/test_origins.py::test_who_is_no_member_has_to_say_that_it_samples",
        "return self.was_member(peer) or (self.waits_outside and not is_follower(self.record_of(peer)))",
        "return self.waits_outside and not is_follower(self.record_of(peer))",
    ),
    bug(
        "a sampler that does not say so is taken for a trainer",
        "tests/node/sapo/test_origins.py::test_who_is_no_member_has_to_say_that_it_samples",
        "return self.trains(peer) or is_follower(self.record_of(peer))",
        "return True",
    ),
    bug(
        "groups of an engine that was started again are announced as the swarm's policy's",
        "tests/node/sapo/test_engine_follower.py"
        "::test_engine_is_handed_what_is_new_and_what_another_policy_drew_is_thrown_away",
        "if drawn.policy != self._policy:",
        "if False:",
    ),
    bug(
        "an engine is handed the first policy and no other",
        "tests/node/sapo/test_engine_follower.py"
        "::test_engine_is_handed_what_is_new_and_what_another_policy_drew_is_thrown_away",
        "if version is None or version == self._loaded:",
        "if version is None or self._loaded is not None:",
    ),
    bug(
        "an engine that does not take a policy is taken to have it",
        "tests/node/sapo/test_engine_client.py::test_engine_that_was_asked_to_load_says_what_it_has_or_why_it_has_not",
        'raise RemoteError("it does not say which policy it has loaded")',
        'return ""',
    ),
    bug(
        "who made a group pays for scoring that did not begin here",
        "tests/node/sapo/test_sandbox.py::test_sandbox_that_does_not_begin_leaves_own_texts_out_and_says_so_of_others",
        """
                        if not own:
                            raise
                        scored.append((job, [None] * len(job.texts)))
        """,
        "scored.append((job, [None] * len(job.texts)))",
    ),
    bug(
        "a family that did not begin to score ends a judge",
        "tests/node/sapo/test_judge.py"
        "::test_group_whose_scoring_does_not_begin_costs_its_maker_nothing_and_others_are_judged",
        "class NotBegun(ShoalError):",
        "class NotBegun(Exception):",
    ),
    bug(
        "a manifest names a file of whoever makes its tasks",
        "tests/node/sapo/test_gym.py::test_no_setting_names_a_file",
        'NO_SETTINGS = frozenset({"seed", "size", "data_file"})',
        'NO_SETTINGS = frozenset({"seed", "size"})',
    ),
    bug(
        "a page in a browser of the machine loads another model",
        "tests/node/sapo/test_completion_server.py::test_engine_that_others_reach_takes_models_from_its_own_machine_alone",
        "if not (came_from_here and _names_this_machine(request)):",
        "if not came_from_here:",
    ),
    bug(
        "what a peer is told of offers counts as nothing",
        "tests/swarm/test_rollouts.py::test_quota_of_bytes_bounds_what_one_peer_is_told_of_offers_and_nobody_else",
        "if not self._served.take(stream.peer, trio.current_time(), REQUEST_COST_BYTES + len(answer)):",
        "if False:",
    ),
    bug(
        "asking for what gossip lost costs nothing",
        "tests/swarm/test_rollouts.py::test_quota_of_bytes_bounds_what_one_peer_is_told_of_offers_and_nobody_else",
        "await self._send(stream, encode_batch(batch))",
        "await stream.send(encode_batch(batch), deadline_s=CATCH_UP_DEADLINE_S)",
    ),
    bug(
        "who is foretold by a liar is a copier",
        "tests/node/sapo/test_judge.py::test_who_drew_what_another_announced_first_has_copied_nobody",
        "if self.replay is not None and (replays or is_copy):",
        "if self.replay is not None and replays:",
    ),
    bug(
        "who announces first what others are going to draw is not gone through",
        "tests/node/sapo/test_judge.py::test_who_drew_what_another_announced_first_has_copied_nobody",
        "if is_copy and judgement.group is not None and (found is None or found.doubt > 0):",
        "if is_copy and judgement.group is not None and found is None:",
    ),
    bug(
        "texts of a refused group are its origin's",
        "tests/node/sapo/test_judge.py::test_texts_of_a_refused_group_are_nobodys",
        """
        if judgement.group is not None:
            for text in texts:
        """,
        """
        if True:
            for text in texts:
        """,
    ),
    bug(
        "a group for which there is no memory ends the judge",
        "tests/node/sapo/test_judge.py"
        "::test_group_that_there_is_no_memory_to_go_through_is_nobodys_fault_and_ends_no_judge",
        "except Exception as error:  # the boundary: a group may be longer than this node has memory for",
        "except NotImplementedError as error:",
    ),
    bug(
        "as much is gone through at once as a peer has in a group",
        "tests/node/sapo/test_replay.py"
        "::test_no_more_completions_are_in_memory_than_a_node_wants_and_as_many_tokens_are_missed",
        "together = max(1, min(self._together, VALUES_AT_ONCE // (longest * self._policy.vocabulary)))",
        "together = self._together",
    ),
    bug(
        "an engine that refuses a policy is given no newer one",
        "tests/node/sapo/test_engine_follower.py::test_engine_that_refuses_a_policy_is_given_the_next_one",
        "except RemoteError:  # perhaps for what became of the files",
        "except NotImplementedError:",
    ),
    bug(
        "a machine without room for a process ends the agent",
        "tests/node/sapo/test_sandbox.py::test_machine_without_room_for_a_process_is_told_of_in_one_line",
        "except (LocalError, OSError) as error:",
        "except LocalError as error:",
    ),
    bug(
        "of an engine that is too slow nobody hears",
        "tests/node/sapo/test_engine_client.py::test_slow_engine_costs_the_group_and_one_that_trickles_does_too",
        'self._tell(f"a group took it more than {self._deadline_s:g} s; let it be faster, or draw fewer tokens")',
        "pass",
    ),
    bug(
        "an honest sampler of a policy that a rollback abandoned is struck as a liar",
        "tests/node/sapo/test_replay.py"
        "::test_after_a_rollback_who_drew_from_the_abandoned_policy_is_no_liar_for_as_long_as_its_number_lasts",
        "if missed and group.policy_version <= self._past.made_again_to:",
        "if False:",
    ),
    bug(
        "after one rollback no sampler is struck any more",
        "tests/node/sapo/test_replay.py"
        "::test_after_a_rollback_who_drew_from_the_abandoned_policy_is_no_liar_for_as_long_as_its_number_lasts",
        "if missed and group.policy_version <= self._past.made_again_to:",
        "if missed and self._past.made_again_to:",
    ),
    bug(
        "an engine keeps the abandoned policy under the number of the new one",
        "tests/node/sapo/test_engine_follower.py"
        "::test_engine_is_handed_what_is_new_and_what_another_policy_drew_is_thrown_away",
        "self._loaded = self._written = None",
        "pass",
    ),
)
