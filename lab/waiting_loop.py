"""A node whose trainer is a loop of its user's own, as docs/own-loop.md has them, with steps that wait.

    python -m shoal.lab.waiting_loop STEP_S RANKS DIES MODULE …      the rest as an ordinary node is started

MODULE is that of `shoal run`, or what sets its clock (`shoal.testnet.wall_clock`).

The process becomes the node's daemon. The loop is another of its process group, attaches to it as to any that ran
before, and dies with it: so whatever strikes a node strikes both. With RANKS above 1 it is as many processes under
torchrun; the last of them kills itself once, after round DIES if that is not 0, and torchrun starts all again.

The model is that of `shoal.node.workloads.regression`; a step takes STEP_S seconds and a negligible part of them
computing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shoal.node.control_client import request
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.testnet.parent_death import ended_with_parent, tie_to

MODULE: Final = "shoal.lab.waiting_loop"
LOOP: Final = "loop"
DIED: Final = "rank-died"
"""A file in the data folder of a node of which a rank has killed itself."""
INPUTS, OUTPUTS, BATCH = 320, 128, 16
RATE: Final = 3e-3
DAEMON_POLL_S: Final = 0.2
DAEMON_DEADLINE_S: Final = 120.0
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--monitor-interval", "0.1")
FRESH_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""As docs/own-loop.md says: ranks that are started again find no addresses of those before."""


def looping_command(command: Sequence[str], step_s: float, *, ranks: int = 1, dies: int = 0) -> list[str]:
    """The command line of a node with such a loop, made of that of an ordinary one."""
    at = command.index("-m", command.index(sys.executable)) + 1
    return [*command[:at], MODULE, str(step_s), str(ranks), str(dies), *command[at:]]


def main(arguments: Sequence[str]) -> None:
    """Be the loop, or start it and become its daemon."""
    if arguments[0] == LOOP:
        step_s, dies, manifest, folder = arguments[1:]
        train(float(step_s), int(dies), Path(manifest), Path(folder))
        return
    step_s, ranks, dies, *daemon = arguments
    manifest, folder = daemon[daemon.index("run") + 1], daemon[daemon.index("--data-dir") + 1]
    several = [*TORCHRUN, "--nproc-per-node", ranks] if int(ranks) > 1 else []
    loop = [sys.executable, *several, "-m", MODULE, LOOP, step_s, dies, manifest, folder]
    subprocess.Popen(ended_with_parent(loop), env=os.environ | FRESH_STORE)
    os.execv(sys.executable, [sys.executable, "-m", *daemon])


def train(step_s: float, dies: int, manifest: Path, folder: Path) -> None:
    """Train until the daemon has left, or is gone."""
    import torch

    from shoal.node.own_loop import join, node_seed

    torch.set_num_threads(1)
    rank, size = 0, 1
    linear = torch.nn.Linear(INPUTS, OUTPUTS)
    torch.nn.init.zeros_(linear.weight)
    model: torch.nn.Module = linear
    if "WORLD_SIZE" in os.environ:
        tie_to(os.getppid())  # torchrun gives each a session of its own
        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    teacher = torch.randn(INPUTS, OUTPUTS, generator=torch.Generator().manual_seed(1)) / INPUTS**0.5

    def held_out(model: torch.nn.Module) -> float:
        x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(2))
        return float(torch.nn.functional.mse_loss(model(x), x @ teacher))

    await_daemon(folder)
    own = torch.Generator().manual_seed(node_seed(folder) + rank)
    with join(model, optimizer, manifest, data_dir=folder, evaluate=held_out) as swarm:
        while swarm.active:
            x = torch.randn(BATCH // size, INPUTS, generator=own)
            loss = torch.nn.functional.mse_loss(model(x), x @ teacher)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(step_s)
            if dies and rank == size - 1 and swarm.round >= dies:
                die_once(folder)
            swarm.step(tokens=len(x), loss=loss)


def await_daemon(folder: Path) -> None:
    """Wait until a daemon answers for this folder. Raises NetworkError."""
    ends_at = time.monotonic() + DAEMON_DEADLINE_S
    while True:
        try:
            request(folder, "status")
            return
        except (ConfigError, NetworkError):
            if time.monotonic() > ends_at:
                raise
            time.sleep(DAEMON_POLL_S)


def die_once(folder: Path) -> None:
    """Die as by SIGKILL, unless a process of this node has before."""
    if not (folder / DIED).exists():
        (folder / DIED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
