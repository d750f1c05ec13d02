"""Who makes a node an observer: its user, or the want of a loop; neither ends the other's."""

from __future__ import annotations

from shoal.node.loops.attendance import Attendance
from shoal.node.loops.external_trainer import Detached
from shoal.node.outcome import Notice, Progress
from shoal.node.training.trainer import Restarted
from shoal.protocol.inputs import SetPaused

GONE = Detached(cause="the training loop (process 7) is gone", round=None)
BACK = Restarted(cause="a training loop attached", round=None)


class Node:
    """What the engine was told last, and the user."""

    def __init__(self) -> None:
        self.paused = False
        self.told: list[Progress] = []
        self.attendance = Attendance(put=self._put, on_progress=self.told.append)

    def _put(self, event: SetPaused) -> None:
        self.paused = event.paused


def test_a_node_observes_while_its_loop_is_away() -> None:
    node = Node()
    node.attendance.heard(GONE)
    assert node.paused
    assert "takes part as an observer until one attaches" in str(node.told)
    node.attendance.heard(BACK)
    assert not node.paused


def test_an_order_to_pause_and_its_end_are_told_once_each_with_what_still_keeps_it_from_training() -> None:
    node = Node()
    for paused in (True, True, False, False):
        node.attendance.pause(paused)
    assert node.told == [Notice(text="training pauses: its user said so"), Notice(text="training goes on")]
    node.told.clear()
    node.attendance.pause(True)
    node.attendance.wait("the machine is in use")
    node.attendance.pause(False)
    assert node.told[1:] == [Notice(text="resumed, and training waits: the machine is in use (--only-when)")]


def test_a_loop_that_attaches_does_not_end_its_users_pause() -> None:
    for orders in (["pause", "gone"], ["gone", "pause"]):
        node = Node()
        for order in orders:
            if order == "gone":
                node.attendance.heard(GONE)
            else:
                node.attendance.pause(True)
        node.attendance.heard(BACK)
        assert node.paused, orders
        node.attendance.pause(False)
        assert not node.paused


def test_a_node_that_is_resumed_without_a_loop_goes_on_observing() -> None:
    node = Node()
    node.attendance.pause(True)
    node.attendance.heard(GONE)
    node.attendance.pause(False)
    assert node.paused
    node.attendance.heard(BACK)
    assert not node.paused


def test_a_node_whose_user_wants_it_to_train_at_times_waits_whatever_else_ends_and_says_why() -> None:
    node = Node()
    node.attendance.wait("the machine is in use")
    assert (node.paused, node.attendance.why) == (True, "the machine is in use (--only-when)")
    node.attendance.pause(True)
    node.attendance.heard(GONE)
    why = "its user paused it; no training loop is attached; the machine is in use (--only-when)"
    assert node.attendance.why == why
    node.attendance.pause(False)
    node.attendance.heard(BACK)
    assert (node.paused, node.attendance.why) == (True, "the machine is in use (--only-when)")
    node.attendance.pause(False)
    assert node.paused, "an order to go on does not overrule it"
    node.attendance.wait("the machine is on its battery")
    assert node.paused
    node.attendance.wait("")
    assert (node.paused, node.attendance.why) == (False, "")
    told = [str(one) for one in node.told]
    assert len(told) == 5, "a reason in another's place is no news"
    assert "training waits: the machine is in use (--only-when)" in told[0]
    assert "training goes on" in told[4]


def test_a_trainer_of_the_daemons_own_that_is_started_again_changes_nothing() -> None:
    node = Node()
    node.attendance.pause(True)
    node.attendance.heard(BACK)
    assert node.paused
