"""Bugs of what a node tells of a crowd: the page, the metrics, the status, the report."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

_APP = "tests/node/dashboard/test_app.py"
_ORIGIN = 'try:\n    return origin is None or urlsplit(origin).netloc == request.headers.get("host")\n'
_MODEL = "tests/node/dashboard/test_model.py"

PAGE: tuple[Bug, ...] = (
    bug(
        "one delta tells of every peer that changed",
        f"{_MODEL}::test_deltas_of_a_crowd_are_small_and_lead_to_what_is_true_in_the_end",
        "for peer in heapq.nsmallest(CHANGE_LIMIT, changes, key=self._turn(changes)) if in_turn else changes:",
        "for peer in changes:",
    ),
    bug(
        "a peer that was told of a while ago does not come before one that was told just now",
        f"{_MODEL}::test_every_peer_has_its_turn_and_a_change_of_state_comes_first",
        "URGENT.isdisjoint(changed), self._changed_at.get(peer, 0), peer",
        "URGENT.isdisjoint(changed), peer, peer",
    ),
    bug(
        "numbers are told before states",
        f"{_MODEL}::test_every_peer_has_its_turn_and_a_change_of_state_comes_first",
        "return changed is not None and URGENT.isdisjoint(changed)",
        "return changed is not None and not URGENT.isdisjoint(changed)",
    ),
    bug(
        "what viewers were told already is counted on, so that theirs differs from a later snapshot",
        f"{_MODEL}::test_a_thousand_nodes_that_are_linked_or_die_at_once_are_a_few_lines",
        "last = next((known for known in reversed(self._new_happenings) if known.kind == happening.kind), None)",
        "last = next((known for known in reversed(self.happenings) if known.kind == happening.kind), None)",
    ),
    bug(
        "who claims a round far ahead makes all others late",
        "tests/node/test_peer_facts.py::test_who_claims_a_round_far_ahead_makes_nobody_late",
        "middle = rounds[len(rounds) // 2]",
        "middle = rounds[-1]",
    ),
    bug(
        "all versions that peers name are told",
        "tests/node/test_peer_facts.py::test_versions_beyond_a_few_are_counted_together",
        "named, others = ordered[:SOFTWARE_LIMIT], sum(number for _, number in ordered[SOFTWARE_LIMIT:])",
        "named, others = ordered, 0",
    ),
    bug(
        "a label for each peer",
        "tests/node/dashboard/test_metrics.py"
        "::test_a_thousand_peers_are_no_more_series_than_a_hundred_and_all_of_them_are_counted",
        "if peer.peer not in self._labelled and len(self._labelled) < PEER_LABEL_LIMIT:",
        "if peer.peer not in self._labelled:",
    ),
    bug(
        "one answer holds all peers",
        "tests/node/dashboard/test_app.py::test_peers_are_found_sorted_and_given_a_part_at_a_time",
        "part = found[wanted.first : wanted.first + PAGE_LIMIT]",
        "part = found[wanted.first :]",
    ),
    bug(
        "peers are read although nobody looks",
        "tests/node/dashboard/test_app.py::test_no_peer_is_read_while_nobody_looks",
        """
        if len(self.feed):
            self._look()
        """,
        """
        self._look()
        if len(self.feed):
            pass
        """,
    ),
    bug(
        "a status lists all members",
        "tests/cli/test_status.py::test_status_of_a_thousand_nodes_is_a_screen_with_those_in_trouble_first",
        "return [_member_row(member, status) for member in shown[:SHOWN_LIMIT]], max(more, 0)",
        "return [_member_row(member, status) for member in shown], max(more, 0)",
    ),
    bug(
        "the report of many nodes draws the first, whatever happened to the others",
        "tests/testnet/reports/test_report_merge.py"
        "::test_of_many_nodes_those_with_trouble_are_shown_and_all_are_summed_up",
        "return -troubles[log.peer_id], log.certified, place",
        "return 0, 0, place",
    ),
    bug(
        "two peers are shown by the name that both claim",
        "tests/protocol/test_names.py::test_no_two_peers_are_shown_by_the_same_name",
        'return f"{claim}{short(peer)}" if claim and self._holders[claim] > 1 else claim',
        "return claim",
    ),
    bug(
        "a peer is shown by whatever its record says after `name.`",
        "tests/protocol/test_names.py::test_what_could_trick_a_reader_is_no_name",
        'return next(filter(_NAME.fullmatch, said), "")',
        'return next(said, "")',
    ),
    bug(
        "a PeerId that is to be typed is shown by its name",
        "tests/protocol/test_names.py::test_texts_have_names_where_a_peer_id_stands_alone",
        'rf"`[^`]*`|',
        'rf"`\\|',
    ),
    bug(
        "a status passes on what a model says to the terminal",
        "tests/cli/test_status.py::test_samples_are_lines_that_no_terminal_takes_for_a_command",
        """ return f'"{escaped(prompt)}" → "{escaped(text)}"' """.strip(),
        """ return f'"{prompt}" → "{text}"' """.strip(),
    ),
    bug(
        "samples of an abandoned state stay on the page",
        "tests/node/dashboard/test_model.py"
        "::test_the_first_sample_is_kept_beside_the_newest_and_goes_with_the_state_it_is_of",
        "self.samples = tuple(known for known in self.samples if known.round <= event.to)",
        "pass",
    ),
    bug(
        "a member that was heard of just now is said to be forgettable",
        "tests/node/test_checks.py::test_only_members_silent_for_an_hour_are_said_to_be_forgettable",
        "silent = [peer for peer in status.long_missing if peer in lost]",
        "silent = lost",
    ),
    bug(
        "a newcomer that trains is told that rounds stand",
        "tests/node/test_checks.py::test_rounds_that_stand_since_all_are_paused_do_not_ask_for_who_has_left",
        'if member.phase == "paused" and status.paused]',
        'if member.phase == "paused"]',
    ),
    bug(
        "a node that waits without a majority says that it trains",
        "tests/node/test_checks.py::test_a_node_that_waits_without_a_majority_does_not_say_that_it_trains",
        'if status.trains_alone else "trains nothing until then"',
        'if True else "trains nothing until then"',
    ),
    bug(
        "what is pasted of a note is run by a shell",
        "tests/cli/test_link.py::test_note_that_is_pasted_in_a_shell_runs_nothing",
        'typer.echo(f"note: {shlex.quote(text)}", err=True)',
        'typer.echo(f"note: {text}", err=True)',
    ),
    bug(
        "who has no vote is asked to agree to a proposal",
        "tests/node/test_checks.py::test_a_proposal_of_other_users_comes_with_the_command_to_agree",
        "if status.peer_id not in peers and status.peer_id in status.voters",
        "if status.peer_id not in peers",
    ),
    bug(
        "memory that a trainer takes is not counted",
        "tests/node/test_status.py::test_usage_counts_what_a_trainer_takes",
        "for process in (self._me, *self._children()):",
        "for process in (self._me,):",
    ),
    bug(
        "a line with a secret in it is shown to whoever looks at the page",
        "tests/node/dashboard/test_settings.py::test_a_secret_is_shown_to_who_asks_for_it_alone",
        "shown = secret or link.invite is None",
        "shown = True",
    ),
    bug(
        "a line with a secret in it is told without the token",
        "tests/node/dashboard/test_settings.py::test_a_line_with_a_secret_takes_the_token_even_on_loopback",
        'found = parts.source.joining(secret=request.method == "POST")',
        "found = parts.source.joining(secret=True)",
    ),
    bug(
        "a setting that was amended is shown as it was when the swarm began",
        "tests/node/dashboard/test_settings.py::test_settings_are_those_in_force_by_the_names_that_users_give_them",
        'for key, value in _flat("", msgspec.to_builtins(in_force))',
        'for key, value in _flat("", msgspec.to_builtins(config.manifest))',
    ),
    bug(
        "a report passes on what turns a line around",
        "tests/testnet/reports/test_report_merge.py::test_hostile_texts_are_escaped",
        "return escape(printable(text))",
        "return escape(text)",
    ),
    bug(
        "a node that left in good order is marked in red",
        "tests/testnet/reports/test_report_merge.py::test_a_node_that_left_in_good_order_is_marked_calmly",
        'calm=incident.kind == "left"',
        "calm=False",
    ),
    bug(
        "the page goes over to HTTP/2 at a client's wish",
        "tests/node/dashboard/test_service.py::test_nobody_takes_a_connection_to_http_2_and_keeps_it_without_reading",
        "        made.protocol = _Http11(\n",
        "        made.protocol = H11Protocol(\n",
    ),
    bug(
        "a Host header that is none breaks off its request",
        f"{_APP}::test_a_name_that_somebody_else_points_here_is_refused",
        'try:\n    name = urlsplit(f"//{host}").hostname\nexcept ValueError:\n',
        'try:\n    name = urlsplit(f"//{host}").hostname\nexcept KeyError:\n',
    ),
    bug(
        "a Host header that is none is taken for this node's name",
        f"{_APP}::test_a_name_that_somebody_else_points_here_is_refused",
        "if name is None:\n    return False\ntry:\n    ipaddress.ip_address(name)\n",
        "if name is None:\n    return True\ntry:\n    ipaddress.ip_address(name)\n",
    ),
    bug(
        "any name is this node's",
        f"{_APP}::test_a_name_that_somebody_else_points_here_is_refused",
        "return name in self._names",
        "return True",
    ),
    bug(
        "an Origin header that is none breaks off its request",
        f"{_APP}::test_the_page_orders_and_no_foreign_page_does",
        f"{_ORIGIN}except ValueError:\n",
        f"{_ORIGIN}except KeyError:\n",
    ),
    bug(
        "an Origin header that is none is that of the page",
        f"{_APP}::test_the_page_orders_and_no_foreign_page_does",
        f"{_ORIGIN}except ValueError:\n    return False",
        f"{_ORIGIN}except ValueError:\n    return True",
    ),
    bug(
        "any name but an address is this machine's alone, and takes no token to look",
        f"{_APP}::test_only_this_machine_can_connect_to_loopback",
        'except ValueError:\n    return host == "localhost"',
        "except ValueError:\n    return True",
    ),
    bug(
        "a host that is no name but a path is this node's",
        "tests/node/dashboard/test_app.py::test_a_name_that_somebody_else_points_here_is_refused",
        'if not set(host).isdisjoint("/?#@\\\\"):',
        "if False:",
    ),
)
