"""A Hugging Face `Trainer` as a node of a swarm, by one callback.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[SwarmCallback("swarm.toml", data_dir="node")])
    trainer.train()

The callback joins when training begins, says every optimizer step, and leaves when training ends. What the Trainer logs
has `swarm_round`, `swarm_members` and, with `evaluate`, `swarm_held_out_loss` as well. Batches are weighed
by their `input_ids`, or by their samples where a model has none. Of several processes (`torchrun`, `accelerate launch`)
each has the callback, and they are one node. Needs the extra `shoal[hf]`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from shoal.node.own_loop import Swarm, join
from shoal.protocol.errors import ConfigError

try:
    from transformers import TrainerCallback
except ImportError:  # the extra is not installed: said when a callback is made
    TrainerCallback = object

if TYPE_CHECKING:
    from shoal.node.loops.other_rank import OtherRank


def _processes(args: Any) -> int:
    """The number of processes over whose items together the Trainer has each loss divided."""
    return int(args.world_size) if args.average_tokens_across_devices else 1


class _Batches:
    """The hook by which a callback sees its model's batches. That of a copied or saved model sees nothing."""

    def __init__(self, callback: SwarmCallback | None) -> None:
        self._callback = None if callback is None else weakref.ref(callback)

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        callback = None if self._callback is None else self._callback()
        if callback is not None:
            callback.saw_batch(model, args, kwargs, output)

    def __reduce__(self) -> tuple[type[_Batches], tuple[None]]:
        return _Batches, (None,)


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Takes what `join` takes, beside the model and the optimizer, which are the Trainer's.

    When the node's rounds are done, or it is told to leave, training stops; if its daemon is gone, training goes on.
    """

    def __init__(self, manifest: str, **settings: Any) -> None:
        """Raises ConfigError where transformers is not installed."""
        if TrainerCallback is object:
            raise ConfigError("SwarmCallback needs transformers; install it with `pip install 'shoal[hf]'`")
        self._manifest = manifest
        self._settings = settings
        self._hook: Any = None
        self._weights: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._summed = False
        self.swarm: Swarm | OtherRank | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Join the swarm. Raises ConfigError, NetworkError."""
        self._leave()  # what failed before, or is tried again with smaller batches, did not come to its end
        model = parts["model"]
        self._hook = model.register_forward_hook(_Batches(self), with_kwargs=True)
        self.swarm = join(model, parts["optimizer"], self._manifest, **self._settings)
        self.swarm.__enter__()
        self._forget_batches()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Say what the step was made of."""
        assert self.swarm is not None
        loss: torch.Tensor | None = None
        if self._losses:
            losses = torch.stack([one.to(self._losses[0].device) for one in self._losses])  # of replicas on several
            loss = losses.sum() * _processes(args) if self._summed else losses.mean()
        weight = sum(self._weights)
        self._forget_batches()
        self.swarm.step(tokens=weight, loss=loss)
        if self.swarm.over:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **parts: Any) -> None:
        """Add the round, its members and the held-out loss to what the Trainer logs, and to its history."""
        if self.swarm is None or logs is None:
            return
        known: dict[str, float] = {"swarm_round": self.swarm.round, "swarm_members": self.swarm.members}
        if self.swarm.held_out is not None:
            known["swarm_held_out_loss"] = self.swarm.held_out
        logs.update(known)
        if state.log_history:
            state.log_history[-1].update(known)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Leave the swarm."""
        self._leave()

    def _leave(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.swarm is not None:
            self.swarm.close()

    def saw_batch(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the size and the loss of a batch; several may make one step."""
        if not model.training or not torch.is_grad_enabled():
            return
        tokens = kwargs.get("input_ids")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
        self._weights.append(tokens.numel() if tokens is not None else len(tensors[0]) if tensors else 1)
        loss = getattr(output, "loss", None)
        if loss is not None:
            self._losses.append(loss.detach().float().clone())  # the Trainer scales it in place
            # Batches of one step share the number that their losses are divided by, if the Trainer gives one.
            self._summed = kwargs.get("num_items_in_batch") is not None

    def _forget_batches(self) -> None:
        self._weights, self._losses, self._summed = [], [], False
