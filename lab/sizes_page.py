"""The page of sizes: what a model takes of memory, disk and line, worked out when the site is built.

python -m shoal.lab.sizes_page

Memory and disk are by the formula of `shoal doctor`, traffic is by what the codecs write.
"""

from __future__ import annotations

import sys
from typing import Final

from shoal.cli.init import InitOptions, found
from shoal.collectives.codecs import codec, final_codec
from shoal.node.doctor import MEMORY_BASE_BYTES, bytes_in_memory
from shoal.node.options import CHECKPOINTS_KEPT
from shoal.node.state.disk_need import bytes_on_disk
from shoal.protocol.identity import Identity
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.strategies.strategy import Exchanges
from shoal.protocol.strategies.table import STRATEGIES

MODELS: Final = (853_120, 10_000_000, 124_000_000, 500_000_000, 1_240_000_000, 8_000_000_000)
"""Parameters: the model of `make demo`, and sizes that people train, from GPT-2's smallest up."""
NODES: Final = (2, 3, 8, 30)
SLOW_BITS_PER_S: Final = 20e6
EXAMPLE: Final = 124_000_000

_HEAD: Final = f"""\
# Sizes and costs

What a model takes of a machine and its line, worked out when this site was built. `shoal doctor swarm.toml` says it for
your model and machine, with what is free there; what was measured is among the [results](results.md#memory).

## Memory and disk of a node

By the formula of `shoal doctor`: trained in fp32 by AdamW, without activations, which depend on the batch
(`--accumulate`). The trainer's part is on the device where there is one; beside these two the programs themselves take
some {MEMORY_BASE_BYTES / 1e9:.0f} GB. Disk is with {CHECKPOINTS_KEPT} checkpoints and codec int8, at its most.

| parameters | trainer | daemon | disk | of which checkpoints |
| --- | --- | --- | --- | --- |
"""
_TRAFFIC: Final = f"""
## Traffic

Of n nodes each sends its part of n − 1 contributions' chunks to their owners, and the result of its own chunks to the
n − 1 others: (n − 1) / n of an encoded contribution and of an encoded result, and receives as much. Per parameter, in
each direction, with what `shoal init --strategy` writes:

| strategy | how often | {" | ".join(f"{nodes} nodes" for nodes in NODES)} | \
{EXAMPLE / 1e6:.0f} M parameters, 3 nodes, at {SLOW_BITS_PER_S / 1e6:.0f} Mbit/s |
| --- | --- | {" | ".join("---" for _ in NODES)} | --- |
"""
_FOOT: Final = """
The last column is the time that one such exchange takes of a line of that speed both ways. With `overlap_steps`
training goes on beside it; otherwise let `inner_steps` take many times as long. A newcomer fetches the state once, 8
bytes a parameter, from several members. Control takes some kB/s a node whatever the model is.
"""


def bytes_per_parameter(sync: SyncSection, nodes: int) -> float:
    """Return what a node sends, and receives, for each parameter in one exchange of a whole model."""
    name = sync.plan_codec
    if not STRATEGIES[sync.strategy].certifies:  # one vector, to one partner
        return codec(name).encoded_bytes(EXAMPLE) / EXAMPLE
    both = codec(name).encoded_bytes(EXAMPLE) + final_codec(name).encoded_bytes(EXAMPLE)
    return both * (nodes - 1) / nodes / EXAMPLE


def render() -> str:
    """The whole page."""
    founder = Identity.from_seed(bytes(32))
    lines = [_HEAD.rstrip("\n")]
    for numel in MODELS:
        memory, disk = bytes_in_memory(numel), bytes_on_disk(numel, "int8", CHECKPOINTS_KEPT)
        sizes = (memory["trainer"], memory["daemon"], sum(disk.values()), disk["checkpoints"])
        lines.append(f"| {numel:,} | {' | '.join(map(_size, sizes))} |")
    lines.append(_TRAFFIC.rstrip("\n"))
    for name, strategy in STRATEGIES.items():
        if strategy.exchanges is Exchanges.ROLLOUTS:
            continue
        sync = found(InitOptions(workload="regression", strategy=name), founder, founder).sync
        often = "each step" if sync.inner_steps == 1 else f"every {sync.inner_steps} steps"
        cells = [f"{bytes_per_parameter(sync, nodes):.2f} B" for nodes in NODES]
        seconds = bytes_per_parameter(sync, 3) * EXAMPLE * 8 / SLOW_BITS_PER_S
        lines.append(f"| `{name}`, {sync.plan_codec} | {often} | {' | '.join(cells)} | {seconds:,.0f} s |")
    lines.append(_FOOT.rstrip("\n"))
    return "\n".join(lines) + "\n"


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


if __name__ == "__main__":
    sys.stdout.write(render())
