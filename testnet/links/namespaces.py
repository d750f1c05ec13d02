"""Network namespaces: a machine of its own for every node, as far as its links go.

    hub:  bridge ─┬─ veth ─ node 0          198.18.0.1
                  ├─ veth ─ node 1          198.18.0.2
                  ├─ uplink ─ lan 0:  bridge ─┬─ veth ─ node 2
                  │                           └─ veth ─ node 3
                  └─ veth ─ router 4 ─ veth ─ node 4          10.0.5.2, seen by all others as 198.18.0.5

Real processes run in them over real TCP, and what happens to their links is done by the kernel: nftables drops what may
not pass, token buckets narrow links, sockets are destroyed under those who use them. Delays and losses of an uplink are
netem's or, where the kernel has none, those of a process (`wan_relay`). A router masquerades, and lets nothing in that
was not asked for. Hub, lans and routers are namespaces too, so nothing is added to the machine's own network, and
removing the namespaces removes everything.

Needs root, and `ip`, `tc` and `nft`; `why_not` says what is missing. The namespaces of a process that ended without
removing them are removed, with what still runs in them, by the next that makes any.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shoal.protocol.errors import ConfigError, NetworkError

CONTROL_PORT: Final = 4001
LANE_PORT: Final = 4002
"""The same for every node: each has an address of its own."""
PLACE_LIMIT: Final = 250
COMMAND_DEADLINE_S: Final = 10.0
QUEUE_S: Final = 0.2
"""Capacity of a narrow link's queue, in seconds of its rate."""
QUEUE_LEAST_PACKETS: Final = 64
PACKET_BYTES: Final = 1514
RELAY_QUEUE_FRAMES: Final = 10_000
"""Frames that may wait for the relay's process while it does not run; nothing is to be lost there."""
BURST_S: Final = 0.01
BURST_LEAST_BYTES: Final = 16 << 10

_PREFIX: Final = "shoal"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-\d+-[a-z]+\d*", re.ASCII)
_TOOLS: Final = ("ip", "tc", "nft")
_SEARCH_PATH: Final = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_SERIAL = itertools.count()

_MASQUERADE: Final = """
table inet router {
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    oifname "outside" accept
  }
  chain input { type filter hook input priority 0; policy drop; }
  chain leave {
    type nat hook postrouting priority 100;
    oifname "outside" masquerade
  }
}
"""

What = Literal["all", "lanes", "control"]
Pair = tuple[int, int]
"""Two nodes, the lower index first."""


RateMbit = Annotated[float, Meta(gt=0, le=100_000)]


class Uplink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link that these nodes share on their way to all others; among themselves they are near each other.

    rate_mbit: in each direction, or only towards them if there is an up_mbit. delay_s: one way. jitter_s: by how much
    that differs, either way. loss: the share of packets lost. nodes: indices.
    """

    nodes: Annotated[tuple[int, ...], Meta(min_length=1, max_length=PLACE_LIMIT)]
    rate_mbit: RateMbit
    up_mbit: RateMbit | None = None
    delay_s: Annotated[float, Meta(ge=0, le=10)] = 0.0
    jitter_s: Annotated[float, Meta(ge=0, le=10)] = 0.0
    loss: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.jitter_s > self.delay_s:
            raise ValueError("an uplink's jitter_s is at most its delay_s")

    @property
    def rates_mbit(self) -> tuple[float, float]:
        """(towards these nodes, away from them)."""
        return self.rate_mbit, self.rate_mbit if self.up_mbit is None else self.up_mbit


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Addresses and namespace of a node. enter: what its command line begins with. Port 0: whichever is free."""

    host: str = "127.0.0.1"
    control_port: int = 0
    lane_port: int = 0
    enter: tuple[str, ...] = ()


LOOPBACK: Final = Place()


class Network:
    """The namespaces of one swarm. Made by `network`. All methods block for some milliseconds."""

    def __init__(self, nodes: int, uplinks: Sequence[Uplink], behind: Collection[int] = ()) -> None:
        if nodes > PLACE_LIMIT:
            raise ConfigError(f"a network has at most {PLACE_LIMIT} nodes")
        self._nodes = nodes
        self._uplinks = tuple(uplinks)
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_SERIAL)}"
        self._behind = frozenset(behind)
        self._lan = {node: lan for lan, uplink in enumerate(self._uplinks) for node in uplink.nodes}
        self._blocked: Counter[tuple[Pair, What]] = Counter()
        self._moves = Counter[int]()
        self._relays: list[subprocess.Popen[bytes]] = []

    def place(self, index: int) -> Place:
        """Addresses and namespace of the node of this index."""
        return Place(
            host=_inner(index, 2) if index in self._behind else self._address(index),
            control_port=CONTROL_PORT,
            lane_port=LANE_PORT,
            enter=(_tool("ip"), "netns", "exec", self._node(index)),
        )

    def _address(self, index: int) -> str:
        """Address in 198.18.0.0/15, which is set aside for tests of networks (RFC 2544)."""
        return f"198.18.0.{index + 1 + self._nodes * (self._moves[index] % max(1, PLACE_LIMIT // self._nodes))}"

    def _node(self, index: int) -> str:
        return f"{self._name}-node{index}"

    def _near(self, index: int) -> str:
        """The namespace of the bridge, or the router, that a node hangs on."""
        if index in self._behind:
            return f"{self._name}-router{index}"
        return f"{self._name}-lan{self._lan[index]}" if index in self._lan else f"{self._name}-hub"

    # -- making and removing ---------------------------------------------------------------------------------

    def make(self) -> None:
        """Make all namespaces and links. Raises NetworkError."""
        bridges = [f"{self._name}-hub", *(f"{self._name}-lan{lan}" for lan in range(len(self._uplinks)))]
        _ip("".join(f"netns add {name}\n" for name in (*bridges, *map(self._node, range(self._nodes)))))
        for name in bridges:
            _ip("link add bridge type bridge forward_delay 0\nlink set bridge up\n", name)
        for index in sorted(self._behind):
            self._make_router(index)
        for index in sorted(set(range(self._nodes)) - self._behind):
            near, node = self._near(index), self._node(index)
            _ip(f"link add eth0 netns {node} type veth peer name node{index} netns {near}\n")
            _ip(f"link set node{index} master bridge up\n", near)
            _ip(f"addr add {self._address(index)}/24 dev eth0\nlink set eth0 up\nlink set lo up\n", node)
        for lan, uplink in enumerate(self._uplinks):
            self._join_lan(f"{self._name}-lan{lan}", f"lan{lan}", uplink)

    def _make_router(self, index: int) -> None:
        """A router of a node's own, which masquerades and lets nothing in that was not asked for."""
        hub, router, node = f"{self._name}-hub", self._near(index), self._node(index)
        _ip(f"netns add {router}\n")
        _ip(f"link add outside netns {router} type veth peer name router{index} netns {hub}\n")
        _ip(f"link set router{index} master bridge up\n", hub)
        _ip(f"link add eth0 netns {node} type veth peer name node{index} netns {router}\n")
        _ip(
            f"addr add {self._address(index)}/24 dev outside\nlink set outside up\nlink set lo up\n"
            f"addr add {_inner(index, 1)}/24 dev node{index}\nlink set node{index} up\n",
            router,
        )
        _ip(
            f"addr add {_inner(index, 2)}/24 dev eth0\nlink set eth0 up\nlink set lo up\n"
            f"route add default via {_inner(index, 1)}\n",
            node,
        )
        enter = [_tool("ip"), "netns", "exec", router]
        _run([*enter, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        _run([*enter, _tool("nft"), "-f", "-"], _MASQUERADE)

    def _join_lan(self, lan: str, name: str, uplink: Uplink) -> None:
        hub = f"{self._name}-hub"
        down_mbit, up_mbit = uplink.rates_mbit
        far = bool(uplink.delay_s or uplink.loss)
        if far and not has_netem():
            command = [sys.executable, "-m", "shoal.testnet.links.wan_relay", f"{hub}/{name}", f"{lan}/uplink"]
            command += map(str, (down_mbit, up_mbit, uplink.delay_s, uplink.jitter_s, uplink.loss))
            relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._relays.append(relay)
            assert relay.stdout is not None
            if not relay.stdout.readline():  # a line, when it is up
                raise NetworkError("the relay of a link does not come up; see above")
            _ip(f"link set {name} txqueuelen {RELAY_QUEUE_FRAMES}\n", hub)
            _ip(f"link set uplink txqueuelen {RELAY_QUEUE_FRAMES}\n", lan)
        else:
            _ip(f"link add {name} netns {hub} type veth peer name uplink netns {lan}\n")
            for namespace, device, rate_mbit in ((hub, name, down_mbit), (lan, "uplink", up_mbit)):
                if far:
                    _tc("-n", namespace, "qdisc", "replace", "dev", device, "root", *netem(uplink, rate_mbit))
                else:
                    _shape(namespace, device, rate_mbit)
        _ip(f"link set {name} master bridge up\n", hub)
        _ip("link set uplink master bridge up\n", lan)

    def remove(self) -> None:
        """Remove everything, whatever there is of it. What still runs in a namespace is killed."""
        for relay in self._relays:
            relay.kill()
            relay.communicate()
        _remove(name for name in _names() if name.startswith(f"{self._name}-"))

    # -- what is seen of them --------------------------------------------------------------------------------

    def lanes(self, index: int) -> int:
        """Count the lanes of the node of this index. Raises NetworkError."""
        return self._lane_sockets(index)

    def uplink_bytes(self) -> tuple[int, ...]:
        """Bytes that each uplink has carried so far, in both directions together. Raises NetworkError."""
        said = _run([_tool("ip"), "-n", f"{self._name}-hub", "-json", "-stats", "link", "show"])
        counts = {one["ifname"]: one["stats64"] for one in json.loads(said)}
        lans = [counts[f"lan{lan}"] for lan in range(len(self._uplinks))]
        return tuple(lan["rx"]["bytes"] + lan["tx"]["bytes"] for lan in lans)

    def emulator_cpu_s(self) -> float:
        """Processor seconds that the relays of uplinks have taken so far."""
        ticks = 0
        for relay in self._relays:
            words = Path(f"/proc/{relay.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    # -- what happens to links -------------------------------------------------------------------------------

    def block(self, pairs: Collection[Pair], what: What = "all") -> None:
        """Let nothing pass between these pairs, in both directions; or nothing of their lanes, or of control.

        What is blocked twice has to be unblocked twice. Raises NetworkError.
        """
        self._blocked.update((_ordered(pair), what) for pair in pairs)
        self._enforce({index for pair in pairs for index in pair})

    def unblock(self, pairs: Collection[Pair], what: What = "all") -> None:
        """Take a `block` back. Raises NetworkError."""
        self._blocked -= Counter((_ordered(pair), what) for pair in pairs)
        self._enforce({index for pair in pairs for index in pair})

    def is_apart(self, pair: Pair) -> bool:
        """True if no links can be made between these two: nothing passes, or nothing of control."""
        return any(self._blocked[_ordered(pair), what] > 0 for what in ("all", "control"))

    def narrow(self, index: int, rate_mbit: float) -> None:
        """Let a node's link carry this much in each direction from now on. Raises NetworkError."""
        _shape(self._node(index), "eth0", rate_mbit)
        _shape(self._near(index), f"node{index}", rate_mbit)

    def widen(self, index: int) -> None:
        """Take a `narrow` back. Raises NetworkError."""
        for name, device in ((self._node(index), "eth0"), (self._near(index), f"node{index}")):
            if "tbf" in _run([_tool("tc"), "-n", name, "qdisc", "show", "dev", device]):
                _run([_tool("tc"), "-n", name, "qdisc", "del", "dev", device, "root"])

    def move(self, index: int) -> None:
        """Give a node, or the router that it sits behind, another address from now on. Raises NetworkError."""
        where, device = (self._near(index), "outside") if index in self._behind else (self._node(index), "eth0")
        before = self._address(index)
        self._moves[index] += 1
        _ip(f"addr del {before}/24 dev {device}\naddr add {self._address(index)}/24 dev {device}\n", where)
        self._enforce({node for pair, _ in self._blocked for node in pair if index in pair})

    def restore(self) -> None:
        """Take back every `block` and `narrow`. Uplinks stay as they were made. Raises NetworkError."""
        self._blocked.clear()
        self._enforce(set(range(self._nodes)))
        for index in range(self._nodes):
            self.widen(index)

    def _enforce(self, nodes: set[int]) -> None:
        """Have the packet filters of these nodes drop what is blocked, as it comes in."""
        for index in nodes:
            drops = []
            for pair, what in sorted(self._blocked):
                if index in pair:
                    other = self._address(pair[0] if index == pair[1] else pair[1])
                    port = {"all": 0, "lanes": LANE_PORT, "control": CONTROL_PORT}[what]
                    kinds = (f" tcp {side}port {port}" for side in "ds") if port else ("",)
                    drops += [f"ip saddr {other}{kind} drop" for kind in kinds]
            chain = ["chain input {", "type filter hook input priority 0; policy accept;", *drops, "}"]
            lines = ["add table inet shoal", "delete table inet shoal", "table inet shoal {", *chain, "}", ""]
            _run([_tool("ip"), "netns", "exec", self._node(index), _tool("nft"), "-f", "-"], "\n".join(lines))

    def reset_lanes(self, index: int) -> int:
        """Destroy the sockets of all lanes of a node, so that both ends see them reset; returns how many there were.

        Raises NetworkError if the kernel does not let that be done.
        """
        there = self.lanes(index)
        if there:
            self._lane_sockets(index, "-K")
            if self.lanes(index) >= there:
                raise NetworkError("this kernel does not destroy sockets (CONFIG_INET_DIAG_DESTROY)")
        return there

    def _lane_sockets(self, index: int, *options: str) -> int:
        match = ["state", "established", f"( sport = :{LANE_PORT} or dport = :{LANE_PORT} )"]
        command = [_tool("ip"), "netns", "exec", self._node(index), _tool("ss"), "-H", "-t", "-n"]
        return len(_run([*command, *options, *match]).splitlines())


@contextlib.contextmanager
def network(nodes: int, uplinks: Sequence[Uplink] = (), behind: Collection[int] = ()) -> Iterator[Network]:
    """`nodes` namespaces that reach each other; removed, with what runs in them, when the block ends.

    Those of `behind` sit each behind a router: they reach all others, and nobody reaches them.

    Raises ConfigError where namespaces cannot be made, NetworkError if making them fails.
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError(reason)
    sweep()
    made = Network(nodes, uplinks, behind)
    try:
        made.make()
        yield made
    finally:
        made.remove()


@cache
def why_no_routers() -> str | None:
    """Return why nodes cannot be put behind routers here, and what would help; None if they can."""
    reason = why_not()
    if reason is not None:
        return reason
    made = Network(1, (), behind=(0,))
    try:
        made.make()
    except NetworkError as error:
        return f"routers between network namespaces need the kernel's masquerading and ip_forward: {error}"
    finally:
        made.remove()
    return None


@cache
def why_not() -> str | None:
    """Return why network namespaces cannot be made here, and what would help; None if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_SEARCH_PATH) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)}: install iproute2 and nftables"
    name = f"{_PREFIX}-{os.getpid()}-{next(_SERIAL)}-probe"
    try:
        _ip(f"netns add {name}\n")
        _ip("link add bridge type bridge\nlink add eth0 type veth peer name eth1\n", name)
        _shape(name, "eth0", 1.0)
        _run([_tool("ip"), "netns", "exec", name, _tool("nft"), "-f", "-"], "add table inet shoal\n")
    except NetworkError as error:
        return f"network namespaces need root and the kernel's veth, bridge, tbf and nftables: {error}"
    finally:
        _remove(found for found in _names() if found == name)
    return None


@cache
def has_netem() -> bool:
    """True if the kernel emulates delays and losses itself."""
    name = f"{_PREFIX}-{os.getpid()}-{next(_SERIAL)}-probe"
    try:
        _ip(f"netns add {name}\n")
        _ip("link add eth0 type veth peer name eth1\n", name)
        _tc("-n", name, "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", "1ms")
    except NetworkError:
        return False
    finally:
        _remove(found for found in _names() if found == name)
    return True


def netem(uplink: Uplink, rate_mbit: float) -> list[str]:
    """Arguments of `tc` for one direction of an uplink; its queue holds what is on its way too (tc-netem(8))."""
    limit = math.ceil((QUEUE_S + uplink.delay_s + uplink.jitter_s) * rate_mbit * 1e6 / 8 / PACKET_BYTES)
    words = ["netem", "limit", str(max(limit, QUEUE_LEAST_PACKETS)), "delay", f"{uplink.delay_s * 1e6:.0f}us"]
    if uplink.jitter_s:
        words.append(f"{uplink.jitter_s * 1e6:.0f}us")
    if uplink.loss:
        words += ["loss", f"{uplink.loss * 100:.6g}%"]
    return [*words, "rate", f"{rate_mbit * 1000:.0f}kbit"]


def sweep() -> None:
    """Remove the namespaces of processes that have ended, and kill what still runs in them."""
    _remove(name for name in _names() if _owner_ended(name))


def _owner_ended(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and not Path(f"/proc/{match[1]}").exists()


def _names() -> list[str]:
    """The namespaces that this module has made, of any process."""
    with contextlib.suppress(NetworkError):
        names = [line.split()[0] for line in _run([_tool("ip"), "netns", "list"]).splitlines() if line]
        return [name for name in names if _NAME.fullmatch(name)]
    return []


def _remove(names: Iterator[str]) -> None:
    for name in names:
        with contextlib.suppress(NetworkError):  # it may be gone
            for pid in _run([_tool("ip"), "netns", "pids", name]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run([_tool("ip"), "netns", "del", name])


def pairs_between(groups: Sequence[Collection[int]]) -> frozenset[Pair]:
    """All pairs of nodes of different groups; who is in no group reaches everyone."""
    return frozenset(
        (min(one, other), max(one, other))
        for group, another in itertools.combinations(groups, 2)
        for one in group
        for other in another
    )


def _ordered(pair: Pair) -> Pair:
    return (min(pair), max(pair))


def _inner(index: int, host: int) -> str:
    """Address on the network between a node and its router."""
    return f"10.0.{index + 1}.{host}"


def _shape(namespace: str, device: str, rate_mbit: float) -> None:
    """Let a device send this much, over a queue of QUEUE_S."""
    burst = max(BURST_LEAST_BYTES, int(rate_mbit * 1e6 / 8 * BURST_S))
    bucket = ["tbf", "rate", f"{rate_mbit * 1000:.0f}kbit", "burst", str(burst), "latency", f"{QUEUE_S * 1000:.0f}ms"]
    _tc("-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def _tc(*words: str) -> None:
    _run([_tool("tc"), *words])


def _ip(lines: str, namespace: str | None = None) -> None:
    _run([_tool("ip"), *(() if namespace is None else ("-n", namespace)), "-batch", "-"], lines)


def _tool(name: str) -> str:
    found = shutil.which(name, path=_SEARCH_PATH)
    if found is None:
        raise NetworkError(f"there is no {name}; install iproute2 and nftables")
    return found


def _run(command: Sequence[str], script: str = "") -> str:
    """Run a command and return its output. Raises NetworkError with its complaint."""
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{Path(command[0]).name}: {error}") from error
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise NetworkError(f"{Path(command[0]).name}: {complaint}")
    return done.stdout
