"""`shoal relay`: a bootstrap node and relay of hivemind's Go daemon, for nodes that nobody reaches directly.

It trains nothing and is in no swarm. Others name it as a bootstrap address, hold reservations at it, and are reached
through it; a hivemind DHT that it serves is one more place to meet by SwarmId (`shoal run --hivemind ADDRESS`).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import DEFAULT_DATA_DIR, DataDir, Listen, ProgressOptions, option
from shoal.cli.text import in_one_line
from shoal.protocol.errors import ConfigError, StorageError

INTERRUPTED = 130
LISTEN_ANYWHERE = "/ip4/0.0.0.0/tcp/4001"
RELAY_KEY_NAME = "relay.key"
DAEMON_KEY_NAME = "relay.libp2p-key"
"""The same key as hivemind's daemon reads it."""

_PEER = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:_-]{1,253}/(tcp|udp)/\d{1,5}(/quic|/quic-v1)?/p2p/[1-9A-HJ-NP-Za-km-z]{20,100}",
    re.ASCII,
)
_LIBP2P_ED25519 = bytes([0x08, 0x01, 0x12, 0x40])
"""protobuf PrivateKey{Type: Ed25519, Data: 64 bytes}, up to the data: the seed and the public key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions(ProgressOptions):
    """What the user asked `shoal relay` for."""

    data_dir: DataDir = DEFAULT_DATA_DIR
    listen: Listen = field(default_factory=lambda: [LISTEN_ANYWHERE])
    announce: Annotated[
        list[str],
        option("--announce", help="Where others reach it, where that is not what it listens on. Repeatable."),
    ] = field(default_factory=list)
    hivemind: Annotated[
        list[str],
        option("--hivemind", help="A peer of the hivemind DHT to serve; without: one of its own.", metavar="ADDR"),
    ] = field(default_factory=list)


def check_hivemind_peers(addresses: Sequence[str], what: str) -> None:
    """Raises ConfigError for an address that is none, or where hivemind is not installed."""
    from shoal.swarm.rendezvous.hivemind import check_installed

    for text in addresses:
        if not _PEER.fullmatch(text):
            raise ConfigError(f"{what}: {text!r} is no peer's address, like /ip4/192.0.2.7/tcp/31337/p2p/12D3KooW…")
    check_installed(what)


def relay(options: RelayOptions) -> None:
    """Be a bootstrap node and circuit relay, with hivemind's Go daemon, until interrupted. Needs shoal[hivemind]."""
    from shoal.cli.render import progress_display
    from shoal.swarm.address import parse_listen_address

    check_hivemind_peers(options.hivemind, "shoal relay")
    for address in (*options.listen, *options.announce):
        if parse_listen_address(address).port == 0 and address in options.announce:
            raise ConfigError(f"--announce: {address} names port 0; write the port at which others reach this machine")
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
        initial=tuple(options.hivemind),
        serves=True,
        listen=tuple(options.listen),
        announce=tuple(options.announce),
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
