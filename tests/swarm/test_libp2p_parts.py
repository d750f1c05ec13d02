"""What of libp2p a node loads: only what it runs, with the rest still there for whoever imports it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from shoal.swarm.libp2p_parts import NEVER_RUN, TRIED

FOREIGN = ("aioquic", "dns", "httpx", "requests", "wsproto", "zeroconf")
"""What libp2p brings along for what a node never runs."""
OF_OTHERS = ("torch", "rich", "starlette", "hypercorn", "shoal.node.sapo", "shoal.node.dashboard.site")
"""Loaded by a node's other processes, by those who have an agent, or later and beside the rest."""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_release_is_one_that_was_tried() -> None:
    assert version("libp2p") in TRIED


def test_a_node_loads_nothing_that_it_never_runs() -> None:
    loaded = run("import sys, shoal.node.node; print(*sys.modules)").split()
    assert "libp2p.network.swarm" in loaded
    assert "libp2p.pubsub.gossipsub" in loaded
    unwanted = (*NEVER_RUN, *FOREIGN, *OF_OTHERS)
    assert not [one for one in loaded if any(one == name or one.startswith(f"{name}.") for name in unwanted)]


def test_who_imports_such_a_part_for_himself_gets_it() -> None:
    code = """
import shoal.swarm.transport
from libp2p.transport.quic.config import QUICTransportConfig
from multiaddr.resolvers import DNSResolver
import anyio, prometheus_client
from cryptography import x509
print(QUICTransportConfig().connection_timeout > 0, callable(DNSResolver.resolve))
print(*(bool(one.__file__) for one in (anyio, prometheus_client, x509)))
"""
    assert run(code).split() == ["True"] * 5


@pytest.mark.parametrize("first", ["libp2p", "libp2p.transport.quic.transport"])
def test_a_whole_libp2p_that_was_there_before_stays_as_it_is(first: str) -> None:
    code = f"""
import sys, {first}
before = sys.modules["libp2p.transport.quic.transport"]
import shoal.node.node
print(sys.modules["libp2p.transport.quic.transport"] is before, before.QUICTransport is not None)
"""
    assert run(code).split() == ["True", "True"]


def test_a_release_that_nobody_tried_is_loaded_whole() -> None:
    code = """
import sys
from shoal.swarm import libp2p_parts
libp2p_parts.TRIED = frozenset()
import shoal.swarm.transport
print("libp2p.transport.quic.transport" in sys.modules)
"""
    assert run(code).split() == ["True"]


def test_a_stand_in_says_what_it_is() -> None:
    code = """
import shoal.swarm.transport
from libp2p.network import swarm
try:
    swarm.DNSResolver.resolve
except AttributeError as error:
    print(error)
"""
    said = run(code)
    assert "multiaddr.resolvers.DNSResolver is not loaded in a node" in said
    assert "shoal.swarm.libp2p_parts" in said
