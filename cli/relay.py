"""`shoal relay`: a bootstrap node and relay of hivemind's Go daemon, for nodes that nobody reaches directly.

It trains nothing and is in no swarm. Others name it as a bootstrap address, hold reservations at it, and are reached
through it; a hivemind DHT that it serves is one more place to meet by SwarmId (`shoal run --hivemind ADDRESS`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import ProgressOptions
from shoal.cli.text import in_one_line
from shoal.node.option import Option, check_options
from shoal.node.options import DEFAULT_DATA_DIR, DataDir, Listen
from shoal.protocol.address import parse_listen_address
from shoal.protocol.errors import ConfigError, StorageError

INTERRUPTED = 130
RELAY_KEY_NAME = "relay.key"
DAEMON_KEY_NAME = "relay.libp2p-key"
"""The same key as hivemind's daemon reads it."""

_LIBP2P_ED25519 = bytes([0x08, 0x01, 0x12, 0x40])
"""protobuf PrivateKey{Type: Ed25519, Data: 64 bytes}, up to the data: the seed and the public key."""


def check_announced(addresses: Sequence[str], option: str) -> None:
    """Raise ConfigError for the first at which nobody can reach this machine."""
    for address in addresses:
        if parse_listen_address(address).port == 0:
            raise ConfigError(f"{option}: {address} names port 0; write the port at which others reach this machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions(ProgressOptions):
    """Options of `shoal relay`."""

    data_dir: DataDir = DEFAULT_DATA_DIR
    listen: Listen = ("/ip4/0.0.0.0/tcp/4001",)
    announce: Annotated[
        tuple[str, ...],
        Option(
            "--announce",
            help="Where others reach it, where that is not what it listens on. Repeatable.",
            check=check_announced,
        ),
    ] = ()
    hivemind: Annotated[
        tuple[str, ...],
        Option("--hivemind", help="A peer of the hivemind DHT to serve; without: one of its own.", metavar="ADDR"),
    ] = ()


def relay(options: RelayOptions) -> None:
    """Be a bootstrap node and circuit relay, with hivemind's Go daemon, until interrupted. Needs shoal[hivemind]."""
    from shoal.cli.render import progress_display
    from shoal.swarm.rendezvous.hivemind import check_peers

    check_peers(options.hivemind, "shoal relay")
    check_options(options)
    with progress_display(log_format=options.log_format, log_level=options.log_level):
        _serve(options)
    raise typer.Exit(INTERRUPTED)


def _serve(options: RelayOptions) -> None:
    import trio

    from shoal.swarm.rendezvous.hivemind import Hivemind
    from shoal.swarm.rendezvous.hivemind_messages import Ready, Start

    def tell(ready: Ready) -> None:
        for address in ready.addresses:
            typer.echo(in_one_line(address))
        typer.echo("note: members name one of these under bootstrap in [network] of swarm.toml", err=True)

    start = Start(
        initial=options.hivemind,
        serves=True,
        listen=options.listen,
        announce=options.announce,
        identity=str(_daemon_key(options.data_dir)),
    )
    hivemind = Hivemind(None, start, on_ready=tell)

    async def until_told() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hivemind.run)
                async for _ in signals:
                    nursery.cancel_scope.cancel()

    trio.run(until_told)


def _daemon_key(folder: Path) -> Path:
    """The relay's own key, in the form that hivemind's daemon reads."""
    from shoal.protocol.identity import Identity, public_key_of

    identity = Identity.load_or_create(folder / RELAY_KEY_NAME)
    path = folder / DAEMON_KEY_NAME
    try:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_LIBP2P_ED25519 + identity.private_bytes() + public_key_of(identity.peer_id))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; check --data-dir") from None
    return path
