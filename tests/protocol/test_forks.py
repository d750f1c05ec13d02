"""Forks: what is one, who is named, and when it binds no more; and chains that contain a checkpoint, or do not."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.chain import Chain
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.forks import Checkpoint, Fork
from shoal.protocol.messages import Certificate, Term, Value
from shoal.protocol.terms import make_rebase
from shoal.protocol.wire import canonical, decode
from tests.node.ledger import AUTHORITY, Ledger, certificate_of, identity

ONE, TWO, THREE = (identity(n) for n in (1, 2, 3))


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger()
    ledger.certify(rounds)
    return ledger


def other_of(certificate: Certificate, *signers: int) -> Certificate:
    """Another decision of that round."""
    value: Value = msgspec.structs.replace(certificate.value, digest=bytes(32))
    return certificate_of(value, [identity(n) for n in signers])


def newest(chain: Chain) -> Certificate:
    entry = chain.entries[-1]
    assert isinstance(entry, Certificate)
    return entry


@pytest.mark.parametrize("height", [1, 3, 5])
def test_two_certificates_for_one_position_are_a_fork_and_name_who_signed_both(height: int) -> None:
    chain = ledger_of(5).chain
    mine = chain.entries[height - 1]
    assert isinstance(mine, Certificate)
    mine = certificate_of(mine.value, [ONE, TWO])
    known = chain.up_to(height - 1)
    known.extend(mine)
    fork = known.fork_with(other_of(mine, 2, 3))
    assert fork is not None
    assert (fork.term, fork.round, fork.signers) == (Term(), height, (TWO.peer_id,))
    assert fork.one.value.hash < fork.other.value.hash
    assert fork == Fork.of(other_of(mine, 2, 3), mine)
    assert decode(canonical(fork), Fork) == fork
    text = str(fork)
    assert "\n" not in text
    for part in (f"round {height} of term 0.0 was certified twice", f"{TWO.peer_id} signed both", "`shoal rebase`"):
        assert part in text


def test_who_left_in_one_and_signed_the_other_is_named() -> None:
    """Nobody need have signed both: one quorum counted its leave, the other its vote."""
    mine = newest(ledger_of(3).chain)
    staying = tuple(peer for peer in mine.value.members if peer != THREE.peer_id)
    without = msgspec.structs.replace(mine.value, members=staying, leaves=(THREE.peer_id,))
    one, other = certificate_of(without, [ONE]), certificate_of(mine.value, [TWO, THREE])
    assert Fork.of(one, other).signers == Fork.of(other, one).signers == (THREE.peer_id,)


def test_same_value_is_no_fork_whoever_signed_it_in_whatever_view() -> None:
    chain = ledger_of(3).chain
    again = certificate_of(newest(chain).value, [TWO, THREE], view=4)
    assert chain.fork_with(again) is None
    with pytest.raises(ValueError, match="of one value"):
        Fork.of(newest(chain), again)


@pytest.mark.parametrize("signers", [(2,), (7, 8, 9), (2, 2)])
def test_certificate_that_does_not_hold_is_no_fork(signers: tuple[int, ...]) -> None:
    chain = ledger_of(3).chain
    with pytest.raises(RemoteError):
        chain.fork_with(other_of(newest(chain), *signers))


def test_what_follows_a_value_that_is_not_here_is_compared_first() -> None:
    chain, other = ledger_of(3).chain, ledger_of(3).chain
    parted = other.up_to(1)
    parted.extend(other_of(other.entries[1], 2, 3))  # type: ignore[arg-type]
    value = msgspec.structs.replace(newest(other).value, base=parted.head.hash)
    assert chain.fork_with(certificate_of(value, [TWO, THREE])) is None


def test_entries_of_different_terms_are_no_fork() -> None:
    ledger = ledger_of(4)
    before = newest(ledger.chain)
    ledger.go_back(2)
    back = newest(ledger.chain)
    assert back.value.rollback
    ledger.certify()
    assert ledger.chain.fork_with(before) is None
    rebased = ledger.chain.up_to(3)
    rebased.extend(make_rebase(AUTHORITY, rebased.head, [ONE.peer_id]))
    assert rebased.fork_with(before) is None  # what a rebase abandoned


def test_rollback_and_result_of_one_round_are_a_fork() -> None:
    ledger = ledger_of(4)
    result = other_of(newest(ledger_of(5).chain), 1, 2, 3)
    ledger.go_back(2)
    back = newest(ledger.chain)
    value = msgspec.structs.replace(result.value, base=back.value.base)
    fork = ledger.chain.fork_with(certificate_of(value, [ONE, TWO, THREE]))
    assert fork is not None
    assert fork.signers == tuple(sorted(set(back.signers) & {one.peer_id for one in (ONE, TWO, THREE)}))


def test_fork_binds_until_the_authority_opens_another_term() -> None:
    chain = ledger_of(3).chain
    fork = chain.fork_with(other_of(newest(chain), 1, 2))
    assert fork is not None
    assert fork.binds(chain.head)
    chain.extend(make_rebase(AUTHORITY, chain.head, [ONE.peer_id]))
    assert not fork.binds(chain.head)


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_chain_contains_every_checkpoint_of_its_own_past_and_none_of_another() -> None:
    ledger = ledger_of(4)
    chain = ledger.chain
    for height in range(1, 5):
        checkpoint = chain.up_to(height).checkpoint
        assert checkpoint == Checkpoint.of(chain.entries[height - 1].value)
        assert chain.allows(checkpoint)
        assert not chain.up_to(height - 1).allows(checkpoint)
    assert chain.up_to(0).checkpoint is None
    invented = chain.up_to(2)
    invented.extend(other_of(chain.entries[2], 1, 2))  # type: ignore[arg-type]
    assert not invented.allows(Checkpoint.of(chain.entries[2].value))


def test_later_rebase_of_the_authority_stands_for_a_checkpoint_that_it_abandoned() -> None:
    chain = ledger_of(4).chain
    abandoned = Checkpoint.of(chain.head)
    rebased = chain.up_to(3)
    rebased.extend(make_rebase(AUTHORITY, rebased.head, [ONE.peer_id]))
    assert rebased.allows(abandoned)
    assert not chain.allows(Checkpoint.of(rebased.head))


def test_chain_is_replaced_only_by_one_that_a_later_rebase_opened() -> None:
    chain = ledger_of(4).chain
    other = chain.up_to(2)
    other.extend(other_of(chain.entries[2], 1, 2))  # type: ignore[arg-type]
    with pytest.raises(LocalError, match="later rebase"):
        chain.replace(other)
    other.extend(make_rebase(AUTHORITY, other.head, [ONE.peer_id]))
    chain.replace(other)
    assert chain.entries == other.entries
    assert chain.head.members == (ONE.peer_id,)
