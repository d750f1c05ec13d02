"""A few thousand mutated messages into every decoder and handler, and that none of them is left out.

`python -m tests.fuzz.campaign` feeds as many as one has patience for.
"""

from __future__ import annotations

import ast
import contextlib
import random
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.protocol
from shoal.protocol.errors import LocalError
from tests.fuzz.campaign import feed
from tests.fuzz.handlers import handler_targets
from tests.fuzz.judge import Tally, judge
from tests.fuzz.mutators import GIANT_HEADS, mutate
from tests.fuzz.targets import LAYERS, MANIFEST, Target, decoder_targets

DECODER_EXAMPLES = 5_000
HANDLER_EXAMPLES = 800
MEMORY_LIMIT_BYTES = 12 << 20
"""For messages of some kilobytes that claim to be large."""
ROOT = Path(shoal.protocol.__path__[0]).parent

COVERS = {
    "every message": ("protocol.wire:decode",),
    "envelope": ("protocol.wire:open_envelope",),
    "record book": ("protocol.records:_envelope_of",),
    "announcement": ("protocol.rollouts:open_announcement",),
    "engine reply": ("node.sapo.completions:decode_json",),
    "address book": ("swarm.address_book:AddressBook.parse",),
    "frame header": ("swarm.lanes.lane:Lane._receive_next",),
    "lane request": ("swarm.lanes.seal:_decode",),
    "hello": ("swarm.links:Links._answer_hello", "swarm.members:_own_record"),
    "link": ("swarm.links:Links._hear", "swarm.links:Links._read_messages"),
    "enlist": ("node.rounds.enlist_exchange:EnlistExchange._serve",),
    "site": ("node.rounds.site_exchange:SiteExchange._serve",),
    "clock": ("node.discovery.clocks:Clocks._serve",),
    "manifest request": ("swarm.manifest_exchange:ManifestServer._serve",),
    "layout request": ("node.node:Node.layouts.serve",),
    "fetch": ("node.node:Node._answer_fetch",),
    "wait for the chain": ("node.state.chain_waits:ChainWaits._serve",),
    "image request": ("node.state.image_exchange:ImageExchange._serve",),
    "audit request": ("node.audits.auditing:Auditing._server.serve",),
    "lane handshake": ("swarm.lanes.requests:LaneRequests._serve_lane",),
    "rollout fetch": ("swarm.rollouts:RolloutExchange._answer_stream",),
    "rollout catch up": ("swarm.rollouts:CatchUp._answer",),
    "rollout news handler": ("swarm.rollouts:RolloutExchange._answer_news",),
    "kademlia": ("swarm.rendezvous.kademlia:Kademlia._serve",),
    "passage": ("swarm.reaching.relayed_lanes:RelayedLaneServer._serve",),
    "key in use": ("swarm.key_probe:KeyProbe._serve",),
    "key in use answer": ("swarm.key_probe:KeyProbe._ask",),
    "look at chain": (
        "node.discovery.chain_places:ChainLooks._serve",
        "node.discovery.chain_places:ChainLooks._answer",
    ),
    "dial back": ("swarm.reaching.dial_back:DialBackServer._serve",),
    "sighting": ("swarm.reaching.observed_addresses:ObservedAddressServer._serve",),
    "let go": ("node.rounds.relay_room:RelayRoom._serve",),
    "shared memory": ("swarm.lanes.requests:LaneRequests._serve_memory",),
    "straightening": ("swarm.reaching.direct_upgrade:DirectUpgrade._serve",),
    "control request": ("node.control:ControlServer._handle",),
    "event": ("node.reporting.event_log:parse_event",),
    "card": ("node.card:parse_card",),
    "control reply": ("node.control_client:_parse_reply",),
    "trainer command": ("node.training.trainer_messages:unpack_command",),
    "trainer report": ("node.training.trainer_messages:unpack_report",),
    "loop attaching": ("node.loops.loop_messages:unpack_attaching",),
    "loop answer": ("node.loops.loop_messages:unpack_answer",),
    "rank order": ("node.training.rank_messages:unpack_order",),
    "agent order": ("node.sapo.agent_messages:unpack_order",),
    "agent report": ("node.sapo.agent_messages:unpack_agent_report",),
    "pipe framing": ("node.pipe:unpacker.unpack",),
    "sandbox reply": ("node.sapo.sandbox:unpack_reply",),
}
"""Which functions each target reaches that take bytes of others. What calls `wire.decode` alone needs no entry: every
message is fed to that, as its type."""

OF_ITS_OWN = {
    "node.state.checkpoint_check:_chain",
    "node.state.checkpoints:read_layout",
    "node.doctor:run_trial",
    "node.founded:_read",
    "node.doctor_trial:main",
    "node.training.inner_state:SavedInner.__init__",
    "node.training.random_state:RandomState.read",
    "node.sapo.learner_state:_read_values",
    "node.sapo.sandbox_process:Worker.score",
    "node.sapo.sandbox_process:main",
    "node.state.store:decode_entry",
    "node.state.tensor_files:TensorFile.__init__",
    "node.state.contributions:read_account",
    "node.audits.work_process:unpack_request",
    "node.audits.work_process:unpack_reply",
    "node.loops.rank_group:_unpack_answer",
    "node.loops.rank_group:_unpack_order",
    "node.sapo.unfinished:UnfinishedFile.restore",
}
"""What reads only what this node wrote itself, on its disk, into the pipe of its child or between its ranks."""
NO_BYTES = {
    "node.sapo.causal_lm_policy:CausalLMPolicy.decode",
    "node.sapo.completion_server:_Drawing.done",
    "node.sapo.completion_server:_Drawing.end",
    "node.sapo.turns:_said",
    "node.workloads.causal_lm:CausalLMWorkload.continuations",
}
"""What makes text of tokens."""


def source() -> Iterator[tuple[str, ast.Module]]:
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())


def calls(module: str, node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Call]]:
    """Every call, and in which function it stands, or what a module calls the outcome."""
    for child in ast.iter_child_nodes(node):
        names = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*inside, child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and not inside:
            names = (child.target.id,)
        if isinstance(child, ast.Call):
            yield f"{module}:{'.'.join(names)}", child
        yield from calls(module, child, names)


def decodes(call: ast.Call) -> bool:
    """Whether bytes become a structure in this call, other than by `wire.decode`, which takes its type."""
    if not call.args or isinstance(call.args[0], ast.Constant):
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id in ("open_envelope", "unproven_envelope", "open_record", "unpacker")
    return isinstance(call.func, ast.Attribute) and call.func.attr == "decode"


def handler(where: str, call: ast.Call) -> str | None:
    """The handler that this call has serve a protocol."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "serve" and len(call.args) > 1:
        found = ast.unparse(call.args[1])
        if found.startswith("self."):
            module, _, names = where.partition(":")
            return f"{module}:{names.split('.')[0]}.{found.removeprefix('self.')}"
    return None


@cache
def targets() -> tuple[Target, ...]:
    return tuple(decoder_targets())


def test_every_decoder_and_every_handler_is_fed() -> None:
    found = set[str]()
    for module, tree in source():
        for where, call in calls(module, tree):
            served = handler(where, call)
            found |= {where} if decodes(call) else set()
            found |= {served} if served is not None else set()
    known = {name for names in COVERS.values() for name in names}
    assert found - known - OF_ITS_OWN - NO_BYTES == set(), (
        "give these a target in tests/fuzz, or say why they need none"
    )
    assert (known | OF_ITS_OWN | NO_BYTES) - found == set(), "these are gone"


async def test_every_name_of_a_target_is_one() -> None:
    async with handler_targets() as handlers:
        names = [target.name for target in (*targets(), *handlers)]
        assert len(names) == len(set(names))
        assert set(COVERS) - {"every message"} <= set(names)


async def test_samples_are_taken_as_they_are() -> None:
    """A sample that is refused would leave what comes after the refusal untried."""
    taken = 0
    for target in targets():
        if target.name not in ("sealed frame", "control reply"):
            for sample in target.samples:
                tally = Tally()
                assert await judge(target, sample, tally) is None
                assert tally.taken == 1, (target.name, tally.refused)
                taken += 1
    assert taken > 200


async def test_mutated_messages_are_taken_or_refused_and_nothing_else() -> None:
    tallies: dict[str, Tally] = {}
    assert await feed(targets(), DECODER_EXAMPLES, 3, tallies) == []
    async with handler_targets() as handlers:
        assert await feed(handlers, HANDLER_EXAMPLES, 4, tallies) == []
    assert sum(tally.examples for tally in tallies.values()) >= DECODER_EXAMPLES + HANDLER_EXAMPLES
    refused = sum(sum(tally.refused.values()) for tally in tallies.values())
    assert refused > DECODER_EXAMPLES / 2  # they are spoiled indeed


@settings(max_examples=500)
@given(data=st.data())
def test_any_bytes_are_taken_or_refused(data: st.DataObject) -> None:
    """As hypothesis draws them, so that what fails is shrunk to little."""
    target = data.draw(st.sampled_from(targets()))
    sample = data.draw(st.sampled_from(target.samples))
    cut = data.draw(st.integers(0, len(sample)))
    spoiled = sample[:cut] + data.draw(st.binary(max_size=40)) + sample[cut + data.draw(st.integers(0, 8)) :]
    with contextlib.suppress(*target.allowed):
        target.take(spoiled)


async def test_heads_that_claim_gigabytes_take_no_memory() -> None:
    rng = random.Random(5)
    async with handler_targets() as handlers:
        tracemalloc.start()
        try:
            for target in (*targets(), *handlers):
                heads = [
                    *GIANT_HEADS,
                    *(target.samples[0][:at] + head for at in (1, 5, 9) for head in GIANT_HEADS[:9]),
                ]
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                for data in rng.sample(heads, 4):
                    assert await judge(target, data, Tally()) is None, target.name
                assert tracemalloc.get_traced_memory()[1] - before < MEMORY_LIMIT_BYTES, target.name
        finally:
            tracemalloc.stop()


def test_mutations_are_the_same_for_a_seed_and_differ_from_what_they_are_made_of() -> None:
    sample = MANIFEST.to_canonical()

    def made(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [mutate(sample, [sample], rng) for _ in range(200)]

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert sum(data != sample for data in made(1)) > 180


@pytest.mark.parametrize("raised", [ValueError("of ours"), LocalError("a bug"), RecursionError()])
async def test_what_is_not_foreseen_is_found(raised: Exception) -> None:
    def fail(data: bytes) -> None:
        raise raised

    target = Target("broken", (b"\x80",), fail)
    (found,) = await feed([target], 8, 1, {})
    assert found.target == "broken"
    assert type(raised).__name__ in found.what
