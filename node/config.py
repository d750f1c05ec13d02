"""What one run of a node needs to know beside the manifest: where it keeps things, where it listens, whom it joins."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest

HOLD_PHASES = ("train", "plan", "reduce", "repair", "certify", "transfer")


RollbackPolicy = Literal["never", "spike", "always"]
"""Whether a node consents to a rollback that another member's user ordered; see going_back.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Test mode: stop at this point of this round until released. `progress` is in 0..1 of the phase."""

    round: int
    phase: str
    progress: float = 0.0

    @staticmethod
    def parse(text: str) -> Hold:
        """A hold written ROUND:PHASE[:PROGRESS]. Raises ConfigError."""
        try:
            round_text, phase, *rest = text.split(":")
            hold = Hold(round=int(round_text), phase=phase, progress=float(rest[0]) if rest else 0.0)
        except (ValueError, IndexError):
            raise ConfigError(f"a hold is written ROUND:PHASE[:PROGRESS], like 3:reduce:0.4, not {text!r}") from None
        if phase not in HOLD_PHASES or not 0 <= hold.progress <= 1:
            raise ConfigError(f"a hold's phase is one of {', '.join(HOLD_PHASES)} and its progress in 0..1: {text!r}")
        return hold


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """Where the node's page is served. or_free: at any free port if that one is taken."""

    host: str = "127.0.0.1"
    port: int = 8420
    or_free: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node's local settings.

    data: a file or folder for workloads that read one; never taken from the manifest. rounds: stop once the
    swarm has certified that round, None for no end. max_upload and max_download: bytes/s, None for no cap.
    shared_memory: whether lanes to nodes on this machine may use memory that both see.
    checkpoint_every: rounds from one checkpoint to the next, 0 for none; checkpoint_keep: how many stay.
    accumulate: into how many parts the trainer cuts each batch, so that less memory is enough.
    processes: how many hold the trainer's model together, each its part of it and of every batch.
    authority_amendments: whether this node consents by itself to what the swarm's authority amends.
    forget_promises: whether it signs again though what it signed before may be lost from a damaged log.
    relay: whether this node passes others' connections and lanes on once others reach it from outside.
    port_mapping: whether a node that nobody reaches asks its router for ports (UPnP).
    take_over: go on although this node's key was seen in use elsewhere: the other copy of the data folder is gone.
    loop_patience_s: how long the node stays without a training loop of its user's own, None for ever.
    rendezvous: whether to meet by SwarmId in a Kademlia table; auto: where an address beyond this machine is named.
    hivemind: addresses of peers of a hivemind DHT in which to meet as well.
    dashboard: where the node's page is, None for none.
    tensorboard: a folder for event files of TensorBoard; wandb: a project of Weights & Biases; None for neither.
    rollouts, local_groups, external_groups, group_size: with strategy rollouts, what this node does, and its own I, J
    and G; None for the manifest's.
    """

    manifest: Manifest
    data_dir: Path
    join: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    lane_listen: tuple[str, int] = ("0.0.0.0", 0)
    device: str = "auto"
    threads: int = 0
    accumulate: int = 1
    processes: int = 1
    data: str | None = None
    rounds: int | None = None
    rollback: RollbackPolicy = "spike"
    authority_amendments: bool = True
    forget_promises: bool = False
    max_upload: int | None = None
    max_download: int | None = None
    shared_memory: bool = True
    mdns: bool = True
    relay: bool = True
    port_mapping: bool = True
    dashboard: PageAddress | None = field(default_factory=PageAddress)
    tensorboard: Path | None = None
    wandb: str | None = None
    rendezvous: Literal["auto", "on", "off"] = "auto"
    hivemind: tuple[str, ...] = ()
    checkpoint_every: int = 10
    checkpoint_keep: int = 3
    loop_patience_s: float | None = None
    take_over: bool = False
    rollouts: Literal["train", "sample", "judge"] = "train"
    local_groups: int | None = None
    external_groups: int | None = None
    group_size: int | None = None
    test_mode: bool = False
    holds: tuple[Hold, ...] = field(default=())
