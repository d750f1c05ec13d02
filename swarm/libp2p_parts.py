"""Of libp2p, only the parts that a node runs are loaded: the rest was a third of a daemon's memory at its start.

`import libp2p` loads QUIC, WebSocket, TLS with ACME, its own discovery, a DNS resolver and a table of peers. A node
speaks Noise over TCP and has discovery of its own, so none of that is ever called here; what is not loaded cannot be
reached by a stranger either. While `only_what_runs` lasts, an import of such a module gives an empty stand-in. After it
the stand-ins are gone from `sys.modules`, so who imports one of these modules for itself gets it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final

NEVER_RUN: Final = (
    "anyio",
    "cryptography.x509",
    "libp2p.bitswap",
    "libp2p.discovery",
    "libp2p.kad_dht.common",
    "libp2p.kad_dht.diagnostics",
    "libp2p.kad_dht.kad_dht",
    "libp2p.kad_dht.peer_routing",
    "libp2p.kad_dht.routing_table",
    "libp2p.kad_dht.utils",
    "libp2p.kad_dht.value_store",
    "libp2p.peer.persistent",
    "libp2p.relay.circuit_v2.config",
    "libp2p.relay.circuit_v2.dcutr",
    "libp2p.relay.circuit_v2.discovery",
    "libp2p.relay.circuit_v2.performance_tracker",
    "libp2p.relay.circuit_v2.protocol",
    "libp2p.relay.circuit_v2.resources",
    "libp2p.relay.circuit_v2.transport",
    "libp2p.rendezvous",
    "libp2p.security.pnet",
    "libp2p.security.secio",
    "libp2p.security.tls",
    "libp2p.transport.cmux",
    "libp2p.transport.quic",
    "libp2p.transport.webrtc",
    "libp2p.transport.websocket",
    "multiaddr.resolvers",
    "prometheus_client",
)
"""Modules, each with those below it, of which the parts that run need no more than names."""

TRIED: Final = frozenset({"0.8.1"})
"""Releases of libp2p of which this was tried; any other is loaded whole."""


@contextmanager
def only_what_runs() -> Iterator[None]:
    """Import libp2p within this: without what is never run, and without its warnings of what it will drop some day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if version("libp2p") not in TRIED:
            yield
            return
        finder = _StandIns()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            finder.clear_away()


class _Kind(type):
    """Of a stand-in's class: who asks something of it is told what it is."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__module__}.{cls.__name__} is not loaded in a node: see {__name__}")


class _StandIns(MetaPathFinder, Loader):
    """Finds the modules of `NEVER_RUN`, and makes each of them as one that has a class of any name."""

    def __init__(self) -> None:
        self._made: list[ModuleType] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if any(fullname == name or fullname.startswith(f"{name}.") for name in NEVER_RUN):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`."""

        def make(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            made = _Kind(name, (Exception,), {"__module__": module.__name__})  # it may stand in an `except`
            setattr(module, name, made)
            return made

        module.__dict__["__getattr__"] = make
        self._made.append(module)

    def clear_away(self) -> None:
        """Leave no stand-in where an import would find it."""
        for module in self._made:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
            above, _, name = module.__name__.rpartition(".")
            if above in sys.modules and sys.modules[above].__dict__.get(name) is module:
                delattr(sys.modules[above], name)
