"""The bench of hostile peers: what it takes for a take-over, what it refuses, and real nodes that are struck."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab import signed
from shoal.lab.bench import hostile
from shoal.lab.bench.hostile_faults import FAULTS
from shoal.lab.bench.hostile_spec import KINDS, HostileBench, HostileResult, Window
from shoal.lab.bench.hostile_stranger import pruning
from shoal.lab.bench.hostile_verdict import problems_of
from shoal.lab.forgeries import forged_certificate, invented_value, with_stranger, without
from shoal.lab.targets import missed
from shoal.node.state.store import RecordLog
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.messages import (
    LEAVE_DOMAIN,
    REPORT_DOMAIN,
    Ban,
    Certificate,
    Value,
    report_preimage,
)
from shoal.protocol.voting import FaultModel
from shoal.protocol.wire import canonical
from shoal.swarm.links import LINK_LIMIT
from shoal.swarm.net_stream import encode_varint
from shoal.testnet.nodes import Runtime
from tests.node.forks import start_forked

IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 7)]
HONEST, LIAR, STRANGER = IDENTITIES[:4], IDENTITIES[4], IDENTITIES[5]
VICTIM = HONEST[1].peer_id


class Chains:
    """The folders of four honest nodes, of a swarm that a fifth founded with them."""

    def __init__(self, folder: Path, name: str = "node") -> None:
        tables: dict[str, object] = {
            "swarm": {"name": "x", "founders": [one.peer_id for one in IDENTITIES[:5]], "admission": "open"},
            "workload": {"name": "regression"},
            "sync": {"inner_steps": 1},
        }
        self.manifest: Manifest = validate_manifest(tables, source="the test")
        self.genesis = genesis(self.manifest.swarm_id, self.manifest.swarm.founders)
        self.folders: dict[PeerId, Path] = {one.peer_id: folder / f"{name}{n}" for n, one in enumerate(HONEST)}
        for path in self.folders.values():
            path.mkdir()

    def write(self, number: int, *certificates: Certificate) -> None:
        log = RecordLog(list(self.folders.values())[number] / "chain.log")
        for certificate in certificates:
            log.append(canonical(certificate))
        log.close()

    def problems(self) -> tuple[str, ...]:
        return problems_of(self.manifest, self.folders, LIAR.peer_id)


def value_after(previous: Value) -> Value:
    return invented_value(HONEST[0], previous)


def certified(value: Value, *signing: Identity) -> Certificate:
    return signed.certified(value, *signing or HONEST)


def left(value: Value, who: Identity) -> Value:
    leave = who.sign(LEAVE_DOMAIN, value.base)
    return msgspec.structs.replace(without(value, who.peer_id), leaves=(who.peer_id,), leave_signatures=(leave,))


def test_chains_that_honest_nodes_agree_on_are_no_take_over(tmp_path: Path) -> None:
    chains = Chains(tmp_path)
    first = value_after(chains.genesis)
    rounds = [certified(first), certified(value_after(first), *HONEST[:3])]
    for number in range(4):
        chains.write(number, *rounds[: 1 + number % 2])
    assert chains.problems() == ()


def test_liar_that_is_left_out_is_no_take_over(tmp_path: Path) -> None:
    chains = Chains(tmp_path)
    decided = certified(without(value_after(chains.genesis), LIAR.peer_id))
    for number in range(4):
        chains.write(number, decided)
    assert chains.problems() == ()


TAKE_OVERS: dict[str, tuple[Callable[[Value], Certificate], str]] = {
    "all others are said to have left": (lambda previous: forged_certificate(LIAR, previous), "does not hold"),
    "votes of a minority": (lambda previous: certified(value_after(previous), LIAR, HONEST[0]), "no quorum"),
    "a vote that is another's": (
        lambda previous: msgspec.structs.replace(
            certified(value_after(previous), *HONEST[:3]),
            signers=tuple(sorted(one.peer_id for one in HONEST[1:])),
        ),
        "forged signature",
    ),
    "a stranger that signed": (
        lambda previous: certified(with_stranger(value_after(previous), STRANGER, signs=True)),
        "strangers are members",
    ),
    "an honest member is out": (lambda previous: certified(without(value_after(previous), VICTIM)), "are no members"),
    "an honest member left": (lambda previous: certified(left(value_after(previous), HONEST[1])), "left who did not"),
    "an honest member is banned": (
        lambda previous: certified(
            msgspec.structs.replace(without(value_after(previous), VICTIM), bans=(Ban(VICTIM, bytes(32)),))
        ),
        "banned who did nothing",
    ),
}


@pytest.mark.parametrize("kind", TAKE_OVERS)
def test_chain_that_was_taken_over_is_seen(tmp_path: Path, kind: str) -> None:
    """In one honest node of four."""
    chains = Chains(tmp_path)
    forge, said = TAKE_OVERS[kind]
    chains.write(0, forge(chains.genesis))
    decided = certified(value_after(chains.genesis))
    for number in range(1, 4):
        chains.write(number, decided)
    assert any(problem.startswith("node0") and said in problem for problem in chains.problems()), chains.problems()


def test_two_values_for_one_round_are_seen(tmp_path: Path) -> None:
    chains = Chains(tmp_path)
    one, other = (certified(value_after(chains.genesis)) for _ in range(2))
    for number in range(4):
        chains.write(number, other if number == 2 else one)
    assert chains.problems() == ("node2: two values for round 1 of term 0.0",)


def test_node_that_certified_nothing_is_seen(tmp_path: Path) -> None:
    chains = Chains(tmp_path)
    decided = certified(value_after(chains.genesis))
    for number in range(3):
        chains.write(number, decided)
    assert any("certified nothing" in problem for problem in chains.problems())


def test_report_of_a_stranger_is_signed_as_it_would_sign_it() -> None:
    """Else the strike would be refused for its form."""
    previous = genesis(bytes(32), [one.peer_id for one in IDENTITIES[:5]])
    value = with_stranger(invented_value(LIAR, previous), STRANGER, signs=True)
    said = report_preimage(value.base, value.plan, value.digest, value.bitmaps, value.tokens)
    assert value.report_signatures == (STRANGER.sign(REPORT_DOMAIN, said),)


# -- targets -------------------------------------------------------------------------------------------------


def found(kind: str = "push", **changes: object) -> HostileResult:
    window = Window(rounds=6, round_s=20.0, memory_bytes={0: 1 << 27}, files={0: 30}, cpu={0: 0.25})
    result = HostileResult(
        bench=HostileBench(kind=kind),
        kind=kind,
        rounds_ratio=0.95,
        memory_growth_bytes=1 << 20,
        files_growth=2,
        recovered_s=21.0,
        taken_over=False,
        problems=(),
        wrong_values=0,
        ended=(),
        undisturbed=window,
        disturbed=window,
        attacks={"pushes": 7},
    )
    return msgspec.structs.replace(result, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("push", {"rounds_ratio": 0.89}, "0.9"),
        ("viewjump", {"rounds_ratio": 0.69}, "0.7"),
        ("push", {"memory_growth_bytes": (64 << 20) + 1}, "64 MiB"),
        ("push", {"recovered_s": 60.5}, "at most 60"),
        ("push", {"recovered_s": None}, "at most 60"),
        ("push", {"taken_over": True, "problems": ("node0: two values",)}, "taken over"),
        ("push", {"wrong_values": 1}, "taken over"),
        ("push", {"ended": (2,)}, "ended"),
        ("push", {"attacks": {"pushes": 0}}, "the attacker did: 0"),
        ("links", {"attacks": {"welcomes": 20}}, "get all places"),
        ("links", {"attacks": {"nodes full": 4, "nodes kept full": 2}}, "keep all places"),
    ],
)
def test_each_target_that_is_missed_is_named(kind: str, changes: dict[str, object], said: str) -> None:
    result = found(kind, **changes)
    (row,) = missed(result.rows)
    assert said in str(row)


def test_what_keeps_all_targets_misses_none() -> None:
    assert missed(found(rounds_ratio=0.9, memory_growth_bytes=64 << 20, recovered_s=60.0).rows) == []
    assert missed(found("viewjump", rounds_ratio=0.7).rows) == []


def test_where_agreement_withstands_a_liar_it_is_one_of_four_and_costs_a_fifth_of_the_pace_at_most() -> None:
    bench = HostileBench(kind="viewjump", faults="lying")
    assert (bench.honest, bench.has_liar) == (3, True)
    (row,) = missed(found("viewjump", bench=bench, rounds_ratio=0.79).rows)
    assert "0.8" in str(row)
    assert missed(found("viewjump", bench=bench, rounds_ratio=0.8).rows) == []
    assert HostileBench(kind="push", round_s=60).back_limit_s == 120
    voting = hostile.manifest_of(bench, [one.peer_id for one in IDENTITIES[:4]]).voting
    assert (voting.faults, len(voting.named)) == (FaultModel.LYING, 4)
    assert HostileBench(kind="push", faults="lying").honest == HostileBench(kind="viewjump").honest == 4


def test_kind_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "hostile", "--kind", "plague"]) == 2
    assert "--kind must be one of ahead, push" in capsys.readouterr().err


def test_every_kind_has_its_strike() -> None:
    assert FAULTS.keys() == KINDS.keys()
    assert HostileBench(kind="links").places == LINK_LIMIT


def test_lengths_are_encoded_as_protobuf_does() -> None:
    assert [encode_varint(number) for number in (0, 127, 128, 300)] == [b"\0", b"\x7f", b"\x80\x01", b"\xac\x02"]
    from shoal.swarm.gossip_packets import control, parse, subscriptions

    packet = pruning()
    size = len(encode_varint(len(packet) - 3))
    said = parse(packet[size:])
    assert len(list(subscriptions(said))) > 0
    assert len(said.control.prune) == len(said.subscriptions) == 500
    assert control(said, frozenset()) is None


# -- real nodes ----------------------------------------------------------------------------------------------


def run_bench(kind: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    execute(["bench", "hostile", "--kind", kind, *options, "--json"])
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def assert_nothing_was_taken(result: dict[str, object]) -> None:
    """How fast rounds are is for the bench to say; here the machine has other things to do."""
    assert (result["taken_over"], result["wrong_values"], result["ended"]) == (False, 0, []), result
    assert any(result["attacks"].values()), result  # type: ignore[attr-defined]
    assert result["recovered_s"] is not None, result


def test_real_nodes_go_on_beside_one_that_claims_to_be_ahead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "Runtime", partial(Runtime, start=start_forked))
    result = run_bench("ahead", capsys, "--round-s", "1", "--rounds", "2")
    assert_nothing_was_taken(result)
    # A lead that waited for it would take ten times as long.
    assert result["rounds_ratio"] > 0.4, result  # type: ignore[operator]
    assert result["memory_growth_bytes"] < 64 << 20, result  # type: ignore[operator]
