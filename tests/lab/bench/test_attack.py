"""Attacks in a small swarm: who lies provably is proven, nobody else is, and defences hold where the mean fails."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from shoal.cli.main import execute
from shoal.lab.bench.attack import AttackedSwarm, to_lines
from shoal.lab.bench.attack_spec import ATTACKS, CLEAN, DEFENCES, AttackBench, AttackResult, chosen
from shoal.lab.bench.attack_spec import peer_identity as identity
from shoal.protocol.errors import ConfigError

BENCH = AttackBench(peers=5, attackers=2, rounds=1, inner_steps=1, audits=10)
SEED = 3
PROVABLE = frozenset({"nan", "false_norm", "wrong_sums"})
"""Attacks of which signed bytes are proof."""


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def swarm_of(attack: str, defence: str, *, bench: AttackBench = BENCH) -> AttackedSwarm:
    identities = [identity(SEED, index) for index in range(bench.peers)]
    swarm = AttackedSwarm(
        bench.manifest(SEED, [one.peer_id for one in identities], DEFENCES[defence]),
        identities,
        attack=attack,
        attackers=bench.attackers,
        audits=bench.audits,
        bans=DEFENCES[defence].bans,
        seed=SEED,
    )
    swarm.run_round()
    return swarm


def moved(swarm: AttackedSwarm) -> float:
    """How far the first round's momentum, which is its update, goes."""
    return float(np.linalg.norm(swarm.state.momentum.astype(np.float64)))


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_who_lies_provably_is_proven_and_out_and_nobody_else_ever(attack: str) -> None:
    swarm = swarm_of(attack, "clip")
    assert set(swarm.proven) == (swarm.attackers if attack in PROVABLE else set())
    assert len(swarm.attackers) == (0 if attack == CLEAN else 2)
    assert not swarm.attackers & set(swarm.nodes) or attack not in PROVABLE
    if attack in PROVABLE:
        swarm.run_round()
        assert set(swarm.head.members) == set(swarm.nodes)
        assert len(swarm.head.members) == 3


def test_defences_bound_what_the_mean_does_not() -> None:
    clean = moved(swarm_of(CLEAN, "mean"))
    for attack in ("sign_flip", "false_norm"):
        assert moved(swarm_of(attack, "mean")) > 3 * clean
        for defence in ("clip", "trimmed"):
            assert moved(swarm_of(attack, defence)) < 1.5 * clean, (attack, defence)


def test_wrong_requests_say_what_there_is() -> None:
    assert chosen("sign-flip,nan", ATTACKS, "--attack") == ["sign_flip", "nan"]
    assert chosen("all", DEFENCES, "--defence") == list(DEFENCES)
    with pytest.raises(ConfigError, match="--attack: there is no 'krum'; choose all, or some of none, sign_flip"):
        chosen("krum", ATTACKS, "--attack")
    with pytest.raises(ConfigError, match="fewer than half"):
        AttackBench(peers=4, attackers=2)


def test_command_prints_one_document_that_renders_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench attack --peers 5 --attackers 1 --rounds 1 --inner-steps 1 --attack copy --defence trimmed --json"
    assert execute(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    (cell,) = found["cells"]
    assert (cell["attack"], cell["defence"], cell["proven"]) == ("copy", "trimmed", [None])
    assert cell["ratio"] == pytest.approx(cell["val_loss"] / found["clean_val_loss"])
    page = "\n".join(to_lines(msgspec.convert(found, AttackResult)))
    assert f"| copy | {cell['ratio']:.3f} | cannot be |" in page
