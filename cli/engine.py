"""`shoal engine`: a server of completions from one causal language model, for samplers to draw from."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import ProgressOptions
from shoal.cli.text import in_one_line
from shoal.node.option import PORT_LIMIT, Option, Within, check_exists, check_options
from shoal.node.options import Device
from shoal.protocol.errors import ConfigError

INTERRUPTED = 130
VERSION_LIMIT = 10**18 - 1
BACKLOG = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(ProgressOptions):
    """Options of `shoal engine`."""

    model: Annotated[
        Path,
        Option(
            "--model",
            help="A folder with a causal language model in the layout of Hugging Face.",
            metavar="FOLDER",
            check=check_exists,
        ),
    ]
    host: Annotated[
        str, Option("--host", help="Where to listen; beyond 127.0.0.1 whoever reaches the port may ask.")
    ] = "127.0.0.1"
    port: Annotated[int, Option("--port", help="0 for any.", check=Within(0, PORT_LIMIT))] = 8000
    version: Annotated[
        int,
        Option(
            "--version",
            help="What the first model is called in replies, before its digest.",
            check=Within(0, VERSION_LIMIT),
        ),
    ] = 0
    device: Device = "auto"


def engine(options: EngineOptions) -> None:
    """Serve completions of one model, with log-probabilities, until interrupted. Needs shoal[hf]."""
    from shoal.cli.render import progress_display

    check_options(options)
    with progress_display(log_format=options.log_format, log_level=options.log_level):
        _serve(options)
    raise typer.Exit(INTERRUPTED)


def _serve(options: EngineOptions) -> None:
    import trio

    try:
        from shoal.node.sapo.completion_server import Served, serve_model
    except ImportError:
        raise ConfigError("shoal engine needs its extra: pip install 'shoal[hf]'") from None

    async def until_told() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serving)
                async for _ in signals:
                    nursery.cancel_scope.cancel()

    async def serving() -> None:
        def tell(served: Served) -> None:
            host, port = listening.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            typer.echo(f"{url} serves {in_one_line(served.name)}, policy {served.policy}")

        with _listening(options.host, options.port) as listening:
            await serve_model(options.model, listening, version=options.version, device=options.device, ready=tell)

    trio.run(until_told)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError."""
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--port: cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for any"
        ) from None
    return listening
