"""Nobody trains on another's batches: shares of members, rounds and terms are different streams under any churn."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.lab.bench.synthetic import drawn_values
from shoal.node.training.trainer_messages import Assignment
from shoal.node.training.training_client import TrainingClient
from shoal.node.workloads.regression import RegressionWorkload
from shoal.node.workloads.text_data import deal_windows
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Term, Value
from shoal.protocol.wire import SwarmId

PEERS = [Identity.from_seed(bytes([n, 7]) * 16).peer_id for n in range(12)]
TRAINING_CLIENT = TrainingClient(SimpleNamespace(), seed=11, inner_steps=1)  # type: ignore[arg-type]
GENESIS = genesis(SwarmId(bytes(32)), PEERS)


def head(round: int, term: Term, members: list[PeerId]) -> Value:
    return msgspec.structs.replace(GENESIS, round=round, term=term, members=tuple(sorted(members)))


electorates = st.lists(st.sampled_from(PEERS), min_size=1, max_size=8, unique=True)
terms = st.builds(Term, st.integers(0, 2), st.integers(0, 2))


@given(st.lists(electorates, min_size=2, max_size=5), st.lists(terms, min_size=1, max_size=3, unique=True))
def test_streams_differ_by_member_round_and_term_under_any_churn(
    electorates: list[list[PeerId]], terms: list[Term]
) -> None:
    """Members and peers that were left out alike: every (peer, round, term) draws under a seed of its own."""
    seeds: dict[int, tuple[Term, int, PeerId]] = {}
    for term in terms:
        for round, members in enumerate(electorates):
            for peer in PEERS:
                share = TRAINING_CLIENT.assignment(head(round, term, members), peer)
                assert (share.member < share.members) == (peer in members)
                other = seeds.setdefault(share.stream_seed, (term, round, peer))
                assert other == (term, round, peer)


@given(electorates, st.integers(0, 1000))
def test_windows_of_text_are_dealt_to_one_member_each(members: list[PeerId], round: int) -> None:
    count = 50
    value = head(round, Term(), members)
    dealt: list[int] = []
    for peer in members:
        share = TRAINING_CLIENT.assignment(value, peer)
        places = len(range(share.member, count, share.members))
        dealt += itertools.islice(deal_windows(count, share), places)
    assert sorted(dealt) == list(range(count))


@pytest.mark.parametrize("term", [Term(), Term(0, 1), Term(1, 0)])
def test_samples_that_are_drawn_are_drawn_once(term: Term) -> None:
    values = [head(round, term, PEERS[:4]) for round in range(3)]
    shares = [TRAINING_CLIENT.assignment(value, peer) for value in values for peer in PEERS[:6]]
    first = {next(RegressionWorkload().batches(share))[0].numpy().tobytes() for share in shares}
    assert len(first) == len(shares)
    assert len({drawn_values(share.stream_seed, 16).tobytes() for share in shares}) == len(shares)


def test_another_term_deals_the_text_in_another_order() -> None:
    def order(term: Term) -> list[int]:
        share: Assignment = TRAINING_CLIENT.assignment(head(3, term, PEERS[:4]), sorted(PEERS[:4])[0])
        return list(itertools.islice(deal_windows(400, share), 100))

    assert order(Term()) != order(Term(0, 1)) != order(Term(1, 0))
