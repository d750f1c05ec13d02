"""One rank's part of a model that several processes hold together, with the fully sharded data parallelism of torch.

Every method is called by all ranks of the group at the same time, in the same order (`rank_messages`), since each is or
contains a collective. What goes in and out as a whole does so in rank 0; the others pass None and get nothing.

Each rank draws every batch and trains on its part of the rows. The gradient is the mean over the batch's tokens,
whatever their number in each part: a sum in every rank, reduced by `fully_shard`, divided once by all tokens. So it is
that of one process to rounding.

Source: PyTorch FSDP, arXiv 2304.11277; sharding by parameter and by block as torchtitan does, arXiv 2410.06511.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shoal.node.training.cut_tensors import own_rows, put, whole
from shoal.node.training.flat_parameters import FlatParameters, own_buffers
from shoal.node.training.inner_optimizer import inner_optimizer
from shoal.node.training.micro_batches import deal_batch, to_device
from shoal.node.training.ranks import GROUP_TIMEOUT_S, LOOPBACK
from shoal.node.training.trainer_messages import Assignment, Start
from shoal.node.workload import Workload, batches_from, loss_of
from shoal.protocol.errors import ConfigError, LocalError

_READ = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WRITE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True, strict=False)


def rank_device(wanted: str, rank: int, processes: int) -> torch.device:
    """The device of a rank: the processor for all, or an accelerator for each. Raises ConfigError."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not there):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda"):
        raise ConfigError(f"--processes {processes}: give --device cpu, cuda or auto with it, not {wanted!r}")
    if there < processes:
        found = f"only {there} CUDA device{'s' * (there > 1)}" if there else "no CUDA device"
        raise ConfigError(f"--processes {processes}: there is {found} here; give fewer processes, or --device cpu")
    return torch.device("cuda", rank)


def join_group(store: int, *, rank: int, processes: int, device: torch.device) -> None:
    """Meet the other ranks through the file `store`. Blocks until all are there, `GROUP_TIMEOUT_S` at most."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=distributed.FileStore(f"/proc/self/fd/{store}", processes),  # type: ignore[attr-defined]
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


class Shard:
    """A rank's rows of every parameter, of its gradient and of its moments."""

    def __init__(self, workload: Workload, start: Start, *, rank: int, processes: int, device: torch.device) -> None:
        """Build the workload's model, the same in all ranks, and keep a part of it.

        Raises ConfigError for a model that cannot be cut.
        """
        self.rank = rank
        self._processes = processes
        self._device = device
        self._workload = workload
        self._accumulate = start.accumulate
        torch.manual_seed(start.seed)
        self.model = workload.build()
        flat = FlatParameters(self.model, frozen=not start.sync.gradients, chunk_values=start.sync.chunk_values)
        self.layout = flat.layout
        _shard(self.model, device, processes)
        self._outputs: list[torch.Tensor] = []
        """Of the forward passes since a part of a batch was begun."""
        self.model.register_forward_hook(self._saw_output)
        self._trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.moved_names = () if start.sync.gradients else tuple(self._trained)
        moved = [self._trained[name] for name in self.moved_names]
        self._optimizer = inner_optimizer(self.model, moved, start.inner)
        self._batches: Iterator[Any] = iter(())
        self._random = torch.get_rng_state()  # of the batches, which are the same in all ranks
        self._resting: HostCopies | None = None

    def open(self, assignment: Assignment, drawn: int) -> int:
        """Begin with this share of the data after its first `drawn` batches; returns how many are to be skipped."""
        torch.manual_seed(assignment.stream_seed)
        self._batches, to_skip = batches_from(self._workload, assignment, drawn)
        self._random = torch.get_rng_state()
        torch.manual_seed(assignment.stream_seed + self.rank)  # dropout differs from rank to rank
        return to_skip

    def draw(self) -> Any:
        """The next batch, whole, or None at the end. No collective: all ranks draw the same."""
        own = torch.get_rng_state()
        torch.set_rng_state(self._random)
        batch = next(self._batches, None)
        self._random = torch.get_rng_state()
        torch.set_rng_state(own)
        return batch

    def backward(self, batch: Any) -> tuple[float, int]:
        """Leave the gradient of the batch's mean loss in the parameters; returns that loss and its tokens.

        Both are of the whole batch. Raises ConfigError for a batch that cannot be cut.
        """
        parts, counted_parts = deal_batch(batch, self._processes * self._accumulate)
        self.model.zero_grad(set_to_none=True)
        sums = torch.zeros(2, dtype=torch.float64)
        for number in range(self.rank * self._accumulate, (self.rank + 1) * self._accumulate):
            loss, tokens = loss_of(self._workload, self.model, to_device(parts[number], self._device))
            outputs, self._outputs = self._outputs, []
            if tokens and number < counted_parts:
                (loss * tokens).backward()  # type: ignore[no-untyped-call]
                sums += torch.tensor((float(loss.detach()) * tokens, tokens), dtype=torch.float64)
            else:  # the mean over nothing is no number, and a copy not to be counted; yet the others wait for this
                for output in outputs:  # 0 / 0 has no gradient, whatever it is multiplied by
                    output.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                (loss.nan_to_num() * 0).backward()  # type: ignore[no-untyped-call]
        distributed.all_reduce(sums)
        total, counted = sums.tolist()
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(self._processes / max(1, counted))  # fully_shard takes the mean over ranks
        return total / max(1, counted), int(counted)

    def _saw_output(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._outputs += [each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.grad_fn]

    def clip(self, norm: float) -> float:
        """Scale all gradients so that their norm is at most this; returns what it was."""
        found = torch.nn.utils.clip_grad_norm_(self._trained.values(), norm)
        return float(found.full_tensor() if isinstance(found, DTensor) else found)

    def move(self, lr: float) -> None:
        """Take a step of the optimizer on this rank's rows."""
        self._optimizer.step(lr)

    def decay(self, weight_decay: float) -> None:
        """Decay by this from the next step on. No collective."""
        self._optimizer.decay(weight_decay)

    def gather(self, out: torch.Tensor | None) -> None:
        """Copy the parameters, and the buffers of rank 0, into `out`, ``(numel,) float32`` in host memory."""
        whole = get_model_state_dict(self.model, options=_READ)
        if out is not None:
            out.zero_()
            for name, place in self.layout.places().items():
                out[place].copy_(cast(torch.Tensor, whole[name]).reshape(-1))

    def gather_gradients(self, out: torch.Tensor | None) -> None:
        """Copy the gradients into `out`, ``(numel,) float32`` in host memory, and the buffers of rank 0.

        Zeros for parameters that have no gradient.
        """
        if out is not None:
            out.zero_()
        for name, place in self.layout.places().items():
            gradient = self._trained[name].grad if name in self._trained else None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if name in self.layout.buffers:
                whole = self.model.get_buffer(name)
            if out is not None and whole is not None:
                out[place].copy_(whole.reshape(-1))

    def scatter(self, vector: torch.Tensor | None) -> None:
        """Copy `vector`, ``(numel,) float32`` in host memory, into the parameters and buffers."""
        whole: dict[str, Any] = {}
        if vector is not None:
            named = zip(self.layout.places().items(), self.layout.shapes, strict=True)
            whole = {name: vector[place].view(shape) for (name, place), shape in named}
        set_model_state_dict(self.model, whole, options=_WRITE)

    def gather_moments(self) -> list[tuple[str, torch.Tensor]]:
        """A host copy of what the optimizer knows, by name; empty but in rank 0."""
        gathered = [(name, whole(tensor).to("cpu", copy=True)) for name, tensor in self._moments()]
        return [] if self.rank else gathered

    def scatter_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Take over moments by those names, all of them; empty but in rank 0."""
        for name, tensor in self._moments():
            put(None if self.rank else moments[name], tensor)

    def _moments(self) -> list[tuple[str, torch.Tensor]]:
        return self._optimizer.state(self.moved_names)

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """State of the model that does not travel, live, by name: this rank's own. No collective."""
        return own_buffers(self.model, self.layout)

    def share_buffers(self) -> None:
        """Give all ranks those buffers of rank 0 that do not travel."""
        for _, value in self.buffers():
            distributed.broadcast(value, src=0)

    @torch.no_grad()
    def measure(self) -> float:
        """The workload's metric of the model as it is."""
        self.model.eval()
        try:
            return float(self._workload.evaluate(self.model))
        finally:
            self.model.train()

    def rest(self) -> None:
        """Give what this rank has on an accelerator back to it, until `wake`, but for buffers. No collective."""
        if self._device.type == "cuda":
            self.give_back()
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Copy this rank's rows, and their moments, to the host, and free the memory that they had; once is enough."""
        if self._resting is not None:  # the copies are all there is
            return
        self.model.zero_grad(set_to_none=True)
        held = [tensor for _, tensor in self._moments()]
        self._resting = HostCopies(own_rows(tensor) for tensor in [*self.model.parameters(), *held])

    def wake(self) -> None:
        """Come back from `rest`, with nothing changed. No collective."""
        if self._resting is not None:
            self._resting.put_back()
            self._resting = None


class HostCopies:
    """The storages of some tensors, on the host. While it exists the tensors must not be used.

    What others hold of them stays valid: views, and the parameters of a model that is cut into parts, of which each
    library keeps references of its own. So no tensor is replaced; its storage is copied to the host, and made empty.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy them, each storage once, and give the memory that they had back to their devices."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._copies = [(storage, _copied(storage)) for storage in storages.values() if storage.nbytes()]
        for storage, _ in self._copies:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that were given back."""
        return sum(copy.nbytes() for _, copy in self._copies)

    def put_back(self) -> None:
        """Have them on their devices again, to the bit."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies = []


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes(), device="cpu")  # type: ignore[no-untyped-call]
    copy.copy_(storage)
    return copy


def _shard(model: torch.nn.Module, device: torch.device, processes: int) -> None:
    """Cut the model's parameters by rows: those of each block together, then all the rest.

    A block is an entry of an outermost `ModuleList`, as the layers of a transformer are; one that shares a parameter
    with the rest of the model stays with it.
    """
    for name, parameter in model.named_parameters():
        if not (parameter.dim() and parameter.is_floating_point()):
            what = f"of {parameter.dtype}" if parameter.dim() else "a single number; give it the shape (1,)"
            raise ConfigError(f"--processes {processes}: parameter {name!r} cannot be cut, it is {what}")
    mesh = init_device_mesh(device.type, (processes,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found: list[torch.nn.Module] = []
    waiting = list(model.children())
    while waiting:
        module = waiting.pop(0)
        if not isinstance(module, torch.nn.ModuleList):
            waiting += module.children()
            continue
        for block in module:
            own = [id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False)]
            callable_ = type(block).forward is not torch.nn.Module.forward
            if own and callable_ and all(uses[each] == own.count(each) for each in own):
                found.append(block)
    return found


def check_drawn(batch: Any) -> Any:
    """Return what a rank drew after rank 0 had drawn a batch. Raises LocalError if it has none."""
    if batch is None:
        raise LocalError("batches() ended in one process and not in another; equal assignments must give equal batches")
    return batch
