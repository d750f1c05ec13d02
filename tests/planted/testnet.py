"""Bugs of the testnet: its verdict, and the faults that it carries out."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

TESTNET: tuple[Bug, ...] = (
    bug(
        "a verdict that forgets whom no fault struck and who missed a round",
        "tests/testnet/reports/test_report.py"
        "::test_a_founder_that_no_fault_struck_and_that_missed_a_round_does_not_pass",
        "and not report.unaffected_absent",
        "",
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
        "tests/testnet/reports/test_report.py"
        "::test_a_node_that_ended_by_itself_does_not_pass_though_it_missed_nothing_and_may_where_its_disk_was_full",
        "and not crashes(report)",
        "",
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
        "the turns of a throttle wake a node that a fault stopped",
        "tests/testnet/test_throttle.py::test_turns_do_not_wake_who_is_stopped_for_another_reason",
        "if not stopped():",
        "if True:",
    ),
)
