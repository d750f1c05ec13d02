"""What is measured of a loop between two contributions."""

from __future__ import annotations

import math
import socket
import threading

import pytest
import torch

from shoal.node.loops.loop_steps import Tally, check_trainable
from shoal.node.own_loop import Swarm
from shoal.node.pipe import FrameSocket, Pause, limit_sends
from shoal.protocol.errors import ConfigError


def test_the_loss_of_a_step_on_no_tokens_counts_where_it_is_a_number() -> None:
    """A rank whose part of a batch is all masked has none, and one that scales sums of losses has 0."""
    tally = Tally()
    for tokens, loss in ((8, torch.tensor(2.0)), (0, torch.tensor(math.nan)), (0, math.nan), (0, 0.0)):
        tally.add(1, tokens, loss)
    assert (tally.losses(), tally.steps, tally.tokens) == ((2.0, 2), 4, 8)
    tally.add(1, 8, torch.tensor(math.nan))
    assert math.isnan(tally.mean_loss()), "of a loop that has gone astray"


def test_several_optimizers_are_refused_in_one_line() -> None:
    model = torch.nn.Linear(2, 2)
    both = [torch.optim.SGD([parameter]) for parameter in model.parameters()]
    with pytest.raises(
        ConfigError, match=r"join\(\) takes one optimizer, not a list; of several give the one that steps"
    ):
        check_trainable(model, both)  # type: ignore[arg-type]


def test_there_is_no_anchor_before_joining() -> None:
    swarm = object.__new__(Swarm)
    with pytest.raises(ConfigError, match=r"at_anchor\(\) comes after joining"), swarm.at_anchor():
        pass


def test_who_takes_nothing_is_sent_to_for_a_while_and_no_longer() -> None:
    """As a daemon that was stopped; a loop that waited for it would make no step again."""
    one, other = socket.socketpair()
    gone = threading.Timer(10, other.shutdown, [socket.SHUT_RDWR])  # else nobody would hear of a test that fails
    with one, other:
        gone.start()
        limit_sends(one, 1)
        channel = FrameSocket(one)
        took = [channel.send(Pause()) for _ in range(100)]
        assert len(took) == 100, "there is room for these"
        with pytest.raises(OSError, match="temporarily unavailable"):
            any(channel.send(Pause()) for _ in range(10**6))
    gone.cancel()
