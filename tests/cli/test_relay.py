"""`shoal relay` and --hivemind: what is refused before anything is started, and the key that the daemon gets."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path

import pytest

from shoal.cli.relay import DAEMON_KEY_NAME, RELAY_KEY_NAME, RelayOptions, _daemon_key, relay
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.identity import Identity, public_key_of
from shoal.swarm.rendezvous.hivemind import check_peers

PEER = "12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "192.0.2.1:4001",
        "/ip4/192.0.2.1/tcp/4001",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER},/ip4/192.0.2.2/tcp/1/p2p/{PEER}",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}\n",
        f"/unix/tmp/x/p2p/{PEER}",
        f"-relay=0 /ip4/192.0.2.1/tcp/4001/p2p/{PEER}",
    ],
)
def test_address_that_is_none_never_reaches_the_daemon(address: str) -> None:
    with pytest.raises(ConfigError, match="is no peer's address, like /ip4/"):
        check_peers([address], "--hivemind")


@pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="hivemind is not installed")
def test_addresses_of_hivemind_peers_are_taken_with_either_kind_of_key() -> None:
    for peer in (PEER, "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"):
        for where in ("ip4/192.0.2.1/tcp/31337", "dns/boot.example.org/tcp/4001", "ip6/2001:db8::1/udp/4001/quic"):
            check_peers([f"/{where}/p2p/{peer}"], "--hivemind")


def test_port_that_the_system_chooses_cannot_be_announced(tmp_path: Path) -> None:
    options = RelayOptions(data_dir=tmp_path, announce=("/ip4/192.0.2.1/tcp/0",))
    with pytest.raises(ConfigError, match=r"^--announce: .*names port 0"):
        relay(options)


def test_daemon_gets_the_relays_own_key_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = _daemon_key(tmp_path)
    key = Identity.load(tmp_path / RELAY_KEY_NAME)
    assert path == tmp_path / DAEMON_KEY_NAME
    assert path.read_bytes() == b"\x08\x01\x12\x40" + key.private_bytes() + public_key_of(key.peer_id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _daemon_key(tmp_path).read_bytes() == path.read_bytes()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / DAEMON_KEY_NAME).mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*; check --data-dir"):
        _daemon_key(tmp_path)
