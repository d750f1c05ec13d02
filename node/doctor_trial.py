"""Trial of the trainer, in a process of its own: its device, the size of the model, and the speed of a few steps.

    python -P -m shoal.node.doctor_trial < request.json > report lines

The request names a workload as a manifest does, or none. Reports are JSON objects, one a line, the device first, so
that a trial that is stopped halfway has said what it knew. A process of its own, since importing torch changes a
process, since a workload may do anything, and since what takes too long can be ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from shoal.node.named_code import BrokenModule
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Scalar, Train, Trained
from shoal.protocol.errors import ShoalError

if TYPE_CHECKING:
    from shoal.node.training.inner_loop import Replica
    from shoal.node.training.shared_tensors import Vector

STEPS_LIMIT = 200
COMPLETION_TOKENS = 64
"""Of a policy whose size alone is looked at."""
REQUEST_LIMIT_BYTES = 1 << 20


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Order for a trial: a workload, None for the device alone. seconds: how long to make steps after the first.

    is_policy: the name is a policy's, of which the size is told and no more. is_made_only: the workload is imported and
    made, and does nothing.
    """

    device: str
    workload: str | None = None
    is_policy: bool = False
    is_made_only: bool = False
    options: Mapping[str, Scalar] = {}
    data: str | None = None
    seed: int = 0
    inner: InnerSettings = InnerSettings()
    accumulate: int = 1
    seconds: float = 2.0


class TrialReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a trial so far. numel: of what the swarm trains. cuda: torch's build of CUDA, None for none.

    others_share: of this machine's processors, taken by other programs meanwhile. is_broken: the error is one of the
    workload's module as it is imported, whatever the machine.
    """

    torch: str = ""
    device: str = ""
    device_name: str = ""
    device_memory_bytes: int = 0
    cuda: str | None = None
    numel: int | None = None
    tokens_per_s: float | None = None
    steps: int = 0
    others_share: float = 0.0
    error: str | None = None
    is_broken: bool = False


def main() -> int:
    """Make the trial, and report its findings; returns 0 whatever they are."""
    request = msgspec.json.decode(sys.stdin.buffer.read(REQUEST_LIMIT_BYTES), type=TrialRequest)
    import torch

    report = TrialReport(torch=str(torch.__version__), cuda=torch.version.cuda)
    try:
        for grown in _findings(request, report):
            report = grown
            _say(report)
    except ShoalError as error:
        _say(msgspec.structs.replace(report, error=str(error), is_broken=isinstance(error, BrokenModule)))
    except Exception as error:  # the user's workload may raise anything; the report is what becomes of it
        from shoal.node.pipe import one_line

        _say(msgspec.structs.replace(report, error=f"the workload raised {one_line(error)}"))
    return 0


def _findings(request: TrialRequest, report: TrialReport) -> Iterator[TrialReport]:
    """Yield the report as it grows."""
    import torch

    from shoal.collectives.codecs import check_denormals
    from shoal.node.training.devices import pick_device
    from shoal.node.training.inner_loop import Replica
    from shoal.node.workload import load_workload

    check_denormals()
    device = pick_device(request.device)
    report = msgspec.structs.replace(report, device=str(device))
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        report = msgspec.structs.replace(report, device_name=known.name, device_memory_bytes=known.total_memory)
    yield report
    if request.workload is None:
        return
    if request.is_policy:
        yield msgspec.structs.replace(report, numel=_size_of_policy(request, request.workload))
        return
    workload = load_workload(request.workload, request.options, request.data)
    if request.is_made_only:
        return
    replica = Replica(workload, seed=request.seed, inner=request.inner, device=device, accumulate=request.accumulate)
    report = msgspec.structs.replace(report, numel=replica.layout.numel)
    yield report
    anchor = replica.new_vector().numpy()
    replica.write_initial(anchor)
    replica.apply(anchor)
    out = replica.new_vector().numpy()
    share = Assignment(seed=request.seed, round=1, member=0, members=1)
    yield _measured(report, _train(replica, share, out, steps=1))  # it also compiles, allocates and reads
    replica.apply(anchor, fresh=True)
    began = time.perf_counter()
    yield _measured(report, _train(replica, share, out, steps=1))
    step_s = time.perf_counter() - began
    replica.apply(anchor, fresh=True)
    steps = max(1, min(STEPS_LIMIT, int(request.seconds / max(step_s, 1e-3))))
    yield _measured(report, _train(replica, share, out, steps=steps))


def _measured(report: TrialReport, trained: Trained) -> TrialReport:
    return msgspec.structs.replace(report, tokens_per_s=trained.tokens_per_s, steps=trained.steps)


def _size_of_policy(request: TrialRequest, name: str) -> int:
    """Values of a policy that the swarm trains. Raises ConfigError where it cannot be made."""
    from shoal.node.sapo.policies import PolicyLimits, load_policy

    limits = PolicyLimits(
        seed=request.seed, completion_tokens=COMPLETION_TOKENS, temperature=1.0, device="cpu", data=request.data
    )
    policy = load_policy(name, request.options).build(limits)
    return sum(parameter.numel() for parameter in policy.parameters())


def _train(replica: Replica, share: Assignment, out: Vector, *, steps: int) -> Trained:
    """Make so many steps, and return what is known of them."""
    replica.begin(Train(round=1, steps=steps, assignment=share, contribute=False))
    while True:
        told = replica.step(out)
        if isinstance(told, Trained):
            return told


def _say(report: TrialReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
