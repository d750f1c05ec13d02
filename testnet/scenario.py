"""Scenario of a testnet: how many nodes train for how many rounds, and the faults that strike them meanwhile.

A scenario is a small TOML file, read strictly: an unknown key is an error that names the nearest known one, and what
cannot be carried out is refused before anything starts, never skipped.

    nodes = 4
    rounds = 8
    [[fault]]
    kind = "kill"
    node = 2
    round = 3
    phase = "reduce"
    progress = 0.4

What is done to links (`partition`, `slow`, an `[[uplink]]` that nodes share) needs network namespaces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeGuard

import msgspec
from msgspec import Meta

from shoal.node.reporting.events import Event, Rollouts, RoundEnded
from shoal.protocol.errors import ConfigError, LocalError, StorageError, did_you_mean
from shoal.protocol.manifest_rollouts import DEFAULT_POLICY
from shoal.protocol.manifest_workload import Option
from shoal.protocol.strategies.strategy import Strategy
from shoal.protocol.strategies.table import DEFAULT_STRATEGY, STRATEGIES
from shoal.protocol.toml_text import parse_toml
from shoal.testnet.links.namespaces import RateMbit, Uplink, What
from shoal.testnet.ranges import check_option
from shoal.testnet.wall_clock import AHEAD_LEAST_S, AHEAD_LIMIT_S

SCENARIO_LIMIT_BYTES = 65_536
NODE_LIMIT = 64
ROUND_LIMIT = 10_000
FAULT_LIMIT = 256
DURATION_LIMIT_S = 600.0
SLOW_RATE_MBIT: Final = 4.0
"""Rate of a slow node's link where its fault does not say."""

THROTTLED_SHARE: Final = 0.05
"""Share of one core that a throttled node has where its fault does not say."""

COPY_ROUNDS: Final = 2
"""Age of the copy that is put back, where its fault does not say from which round it is."""

Kind = Literal[
    "kill", "stop", "continue", "leave", "join", "restart", "pause", "resume", "throttle", "partition", "heal", "slow",
    "corrupt", "full", "cut", "clock", "restore", "move",
]  # fmt: skip
Phase = Literal["train", "plan", "reduce", "repair", "certify", "transfer"]

_LASTING: Final = ("stop", "restart", "throttle", "partition", "slow", "full", "clock", "restore", "move")
_ENDING: Final = ("kill", "stop", "continue", "leave", "restart", "restore", "move")
_ABSENT: Final = (*_ENDING, "pause")
"""Kinds after which a node may come to no round."""
_NODELESS: Final = ("join", "partition", "heal")
_LINKS: Final = ("partition", "heal", "slow")
_HELD_ELSEWHERE: Final = ("join", "continue", "resume", "partition", "heal", "corrupt")
"""Kinds for which another node than the one struck holds: that one may not run, or there is none."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing done to the swarm from outside, when `round` begins or exactly at a point of one of its phases.

    node: whom it strikes; for a join, the index that the newcomer gets. duration_s: how long a stop, a throttle, a
    partition, a slow, a full disk or a wrong clock lasts (left out: until a `continue` or a `heal`, or the end), or how
    long a restart, a restore or a move waits before the start; the other kinds are over at once, and have none whatever
    is said.

    pause: the node stops training, as its user may have it, and follows the rounds without contributing, until a
    resume.
    throttle: the node and its trainer have no more than `cpu_share` of one core, or `THROTTLED_SHARE` where none is
    said.
    partition: nodes of different `groups` do not reach each other (who is in none reaches all); `traffic` says what
    does not pass. heal: ends every partition and slow. slow: the node's link carries `rate_mbit`, or
    `SLOW_RATE_MBIT` where none is said. corrupt: a bit in every state and every final on its disk is flipped. full: no
    file of the node and its trainer can grow, as on a full disk; who ends of it is started again after that. cut: all
    its lanes break, and nobody dies of it.
    clock: the node's wall clock is set `ahead_s` ahead of the others', or behind, while it runs; nobody is to notice.
    restore: the node is killed, and started again on a copy of its folder that was made when round `from_round` began,
    or `COPY_ROUNDS` before its own; where it ends since its key is in use elsewhere, it is started once more, and told
    that this copy goes on. move: the node is killed, and started again at another address, or another port of the same
    where there are no namespaces.
    """

    kind: Kind
    round: Annotated[int, Meta(ge=1, le=ROUND_LIMIT)]
    node: Annotated[int, Meta(ge=0, lt=NODE_LIMIT)] | None = None
    phase: Phase | None = None
    progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    duration_s: Annotated[float, Meta(gt=0, le=DURATION_LIMIT_S)] | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    traffic: What = "all"
    rate_mbit: RateMbit | None = None
    cpu_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    ahead_s: Annotated[float, Meta(ge=-AHEAD_LIMIT_S, le=AHEAD_LIMIT_S)] | None = None
    from_round: Annotated[int, Meta(ge=1, le=ROUND_LIMIT)] | None = None

    def __post_init__(self) -> None:
        if self.progress is not None and self.phase is None:
            raise ValueError("progress needs a phase that it is the progress of")
        if self.kind not in _LASTING:
            msgspec.structs.force_setattr(self, "duration_s", None)
        if self.node is None and self.kind not in _NODELESS:
            raise ValueError(f"a {self.kind} needs the node it strikes")
        if self.kind == "partition":
            everyone = [index for group in self.groups for index in group]
            if len(self.groups) < 2 or not all(self.groups) or len(set(everyone)) != len(everyone):
                raise ValueError("a partition needs groups such as [[0, 1], [2, 3]], and no node in two of them")
        elif self.groups or self.traffic != "all":
            raise ValueError(f"a {self.kind} has no groups and no traffic; a partition has")
        if self.kind in ("partition", "heal") and self.node is not None:
            raise ValueError(f"a {self.kind} has no node; a partition has groups, and a heal is of everything")
        if self.kind == "slow":
            rate_mbit = SLOW_RATE_MBIT if self.rate_mbit is None else self.rate_mbit
            msgspec.structs.force_setattr(self, "rate_mbit", rate_mbit)
        elif self.rate_mbit is not None:
            raise ValueError(f"a {self.kind} has no rate_mbit; a slow has")
        if self.kind == "throttle":
            cpu_share = THROTTLED_SHARE if self.cpu_share is None else self.cpu_share
            msgspec.structs.force_setattr(self, "cpu_share", cpu_share)
        elif self.cpu_share is not None:
            raise ValueError(f"a {self.kind} has no cpu_share; a throttle has")
        if (self.kind == "clock") != (self.ahead_s is not None):
            raise ValueError("a clock has ahead_s, in seconds, and no other kind has")
        if self.ahead_s is not None and 0 < abs(self.ahead_s) < AHEAD_LEAST_S:
            raise ValueError(f"ahead_s is 0, or {AHEAD_LEAST_S:.0f} s and more either way")
        if self.kind == "restore":
            copied = max(1, self.round - COPY_ROUNDS) if self.from_round is None else self.from_round
            if copied > self.round:
                raise ValueError("from_round is the round of the restore, or one before it")
            msgspec.structs.force_setattr(self, "from_round", copied)
        elif self.from_round is not None:
            raise ValueError(f"a {self.kind} has no from_round; a restore has")

    @property
    def target(self) -> int:
        """The node struck; a validated scenario has one for every fault but a partition and a heal."""
        if self.node is None:
            raise LocalError("a fault that strikes no single node, or was never numbered")
        return self.node

    @property
    def struck(self) -> tuple[int, ...]:
        """The nodes that have to be there for it."""
        return tuple(i for group in self.groups for i in group) if self.node is None else (self.node,)


def whom(node: int | None, groups: tuple[tuple[int, ...], ...]) -> str:
    """Nodes that a fault strikes, in few letters: `2`, `0 1 | 2 3`, or nothing if it strikes everything."""
    return " | ".join(" ".join(map(str, group)) for group in groups) if node is None else str(node)


INNER_STEPS: Final = 20
"""Steps between two rounds where neither a scenario nor its strategy says anything."""
DEFAULT_WORKLOAD: Final = "text"


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole scenario. Beyond the documented keys: what is trained, in steps of which length.

    tokens: the run is over when so many are certified, if that is before the last round. codec: None is the strategy's
    own. sync, inner, round, rollouts, membership, agreement: further keys of those sections of the manifest, in place
    of the testnet's own; with rollouts beside a strategy that can average policies it does. sites: together, the nodes
    of an uplink are a site (`shoal.protocol.sites`), whose delegate is the first of them by index.
    """

    nodes: Annotated[int, Meta(ge=1, le=NODE_LIMIT)] = 4
    rounds: Annotated[int, Meta(ge=1, le=ROUND_LIMIT)] = 8
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1
    strategy: str = DEFAULT_STRATEGY
    codec: str | None = None
    workload: str = DEFAULT_WORKLOAD
    options: dict[str, Option] = msgspec.field(default_factory=dict)
    inner_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = INNER_STEPS
    tokens: Annotated[int, Meta(ge=1)] | None = None
    sync: dict[str, Option] = msgspec.field(default_factory=dict)
    inner: dict[str, Option] = msgspec.field(default_factory=dict)
    round: dict[str, Option] = msgspec.field(default_factory=dict)
    rollouts: dict[str, Option] = msgspec.field(default_factory=dict)
    membership: dict[str, Option] = msgspec.field(default_factory=dict)
    agreement: dict[str, Option] = msgspec.field(default_factory=dict)
    faults: Annotated[tuple[Fault, ...], Meta(max_length=FAULT_LIMIT)] = msgspec.field(default=(), name="fault")
    uplinks: Annotated[tuple[Uplink, ...], Meta(max_length=NODE_LIMIT)] = msgspec.field(default=(), name="uplink")
    sites: Literal["apart", "together"] = "apart"
    behind_routers: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=NODE_LIMIT)] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "faults", _numbered(self.nodes, self.faults))
        implied = self.synchronisation.defaults({})
        if "inner_steps" in implied and self.inner_steps == INNER_STEPS:
            msgspec.structs.force_setattr(self, "inner_steps", implied["inner_steps"])
        if self.synchronisation.shares_rollouts:
            self._check_rollouts()
        elif self.rollouts and not self.synchronisation.averages_policies:
            raise ValueError('rollouts has a meaning with strategy = "rollouts", or "diloco" to average the policies')
        if self.has_agents and self.workload == DEFAULT_WORKLOAD:
            msgspec.structs.force_setattr(self, "workload", DEFAULT_POLICY)
        joined = {fault.target: fault.round for fault in self.faults if fault.kind == "join"}
        for number, fault in enumerate(self.faults, 1):
            if fault.round > self.rounds:
                raise ValueError(f"fault {number} is in round {fault.round} of {self.rounds}")
            if fault.kind == "join":
                continue
            first = fault.from_round or fault.round
            for index in fault.struck:
                if index >= self.nodes and joined.get(index, ROUND_LIMIT + 1) > first:
                    raise ValueError(f"fault {number}: there is no node {index} in round {first}")
            if fault.kind == "heal" and not any(self._leaves_to_heal(other, fault) for other in self.faults):
                raise ValueError(f"fault {number}: there is no partition and no slow to heal before it")
        behind = [index for uplink in self.uplinks for index in uplink.nodes]
        if len(set(behind)) != len(behind) or not set(behind) <= set(range(self.places)):
            raise ValueError("uplinks are of nodes that there are, and each of its own")
        if self.sites == "together" and not self.uplinks:
            raise ValueError('sites = "together" needs an [[uplink]] for each site, with its nodes')
        if not set(self.behind_routers) <= set(range(1, self.places)) - set(behind):
            raise ValueError("behind_routers are nodes that there are, without uplink, and not node 0, which all join")

    def _check_rollouts(self) -> None:
        """Check that no fault of agents names a phase."""
        for number, fault in enumerate(self.faults, 1):
            if fault.phase is not None:
                raise ValueError(
                    f'fault {number}: with strategy = "rollouts" a round has no phases; leave its phase out'
                )

    @staticmethod
    def _leaves_to_heal(fault: Fault, heal: Fault) -> bool:
        return fault.kind in ("partition", "slow") and fault.round <= heal.round

    @property
    def synchronisation(self) -> Strategy:
        """The strategy; the default one in the place of one that there is not, which the manifest refuses."""
        return _synchronisation(self.strategy)

    @property
    def has_agents(self) -> bool:
        """True if nodes train policies, which they share the rollouts of, or average too."""
        return self.synchronisation.shares_rollouts or bool(self.rollouts)

    def counts(self, event: Event) -> TypeGuard[RoundEnded]:
        """True if the event ends a round of the swarm; an agent's round is one only where there are no others."""
        shares = self.synchronisation.shares_rollouts
        return isinstance(event, RoundEnded) and (shares or not isinstance(event, Rollouts))

    def last_round(self, tokens: Mapping[int, int]) -> int:
        """The last round, or the one by which all tokens are certified that are wanted. tokens: of each round."""
        total = 0
        for number in sorted(tokens):
            total += tokens[number]
            if self.tokens is not None and total >= self.tokens:
                return min(number, self.rounds)
        return self.rounds

    @property
    def places(self) -> int:
        """Number of nodes in the end, those that join among them."""
        return 1 + max((f.target for f in self.faults if f.kind == "join"), default=self.nodes - 1)

    @property
    def needs_namespaces(self) -> bool:
        """True if links are to be changed in ways that loopback cannot be."""
        return bool(self.uplinks or self.behind_routers) or any(fault.kind in _LINKS for fault in self.faults)

    @property
    def site_names(self) -> dict[int, str]:
        """The site that each node says it is of; those of no uplink say none."""
        if self.sites == "apart":
            return {}
        return {index: f"site{number}" for number, uplink in enumerate(self.uplinks) for index in uplink.nodes}

    @property
    def sets_clocks(self) -> bool:
        """True if a node's wall clock is to be set."""
        return any(fault.kind == "clock" for fault in self.faults)

    def may_come_later(self, fault: Fault) -> bool:
        """True if the fault's point may be in a later round than it says: a transfer's, or where nodes skip rounds."""
        return fault.phase == "transfer" or not self.synchronisation.certifies

    def held_node(self, fault: Fault) -> int | None:
        """Node that holds at the fault's point: its target, or the first that goes on if it strikes no running node.

        In a transfer it is then the one that fetches the state: the last that joined or started again by that round.
        """
        if fault.phase is None:
            return None
        if fault.kind not in _HELD_ELSEWHERE and (fault.kind, fault.phase) != ("restore", "transfer"):
            return fault.target
        if fault.phase == "transfer":
            fetching = [f for f in self.faults if f.kind in ("join", "restart") and f is not fault]
            fetching = [f for f in fetching if f.round <= fault.round and f.phase != "transfer"]
            if fetching:
                return max(fetching, key=lambda f: f.round).target
        gone = {f.node for f in self.faults if f.kind in _ABSENT and f.round <= fault.round}
        return min((i for i in range(self.nodes) if i not in gone), default=0)


def _synchronisation(name: str) -> Strategy:
    return STRATEGIES.get(name, STRATEGIES[DEFAULT_STRATEGY])


def _numbered(nodes: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """`faults` with an index for every join, in the order in which the joins happen."""
    taken = {fault.node for fault in faults if fault.kind == "join" and fault.node is not None}
    if len(taken) != sum(fault.kind == "join" and fault.node is not None for fault in faults):
        raise ValueError("two joins have the same node")
    if any(index < nodes for index in taken):
        raise ValueError(f"a join's node is a new one, from {nodes}")
    numbered = list(faults)
    for at in sorted(range(len(faults)), key=lambda i: faults[i].round):
        if faults[at].kind == "join" and faults[at].node is None:
            free = next(i for i in range(nodes, NODE_LIMIT + FAULT_LIMIT) if i not in taken)
            if free >= NODE_LIMIT:
                raise ValueError(f"more than {NODE_LIMIT} nodes")
            numbered[at] = msgspec.structs.replace(faults[at], node=free)
            taken.add(free)
    return tuple(numbered)


DEMO: Final = Scenario(
    faults=(
        Fault(kind="kill", node=2, round=3, phase="reduce", progress=0.4),
        Fault(kind="join", round=5),
    )
)
"""Scenario of `shoal testnet` without options."""


def choose_scenario(
    path: Path | None = None,
    *,
    nodes: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    strategy: str | None = None,
    codec: str | None = None,
) -> Scenario:
    """The scenario of the file at `path`, or the demo, with what the command line says in place of its own.

    The demo's faults belong to its size: other `nodes` or `rounds` without a file mean a run without faults.
    Raises ConfigError.
    """
    numbers = {"nodes": nodes, "rounds": rounds, "seed": seed}
    for key, number in numbers.items():
        if number is not None:
            check_option(f"--{key}", number, Scenario, key)
    base = DEMO if path is None else load_scenario(path)
    given: dict[str, Any] = {**numbers, "strategy": strategy, "codec": codec}
    tables: dict[str, Any] = msgspec.to_builtins(base)
    tables |= {key: value for key, value in given.items() if value is not None}
    if path is None and (tables["nodes"], tables["rounds"]) != (DEMO.nodes, DEMO.rounds):
        tables["fault"] = []
    elif path is None and _synchronisation(tables["strategy"]).shares_rollouts:  # whose rounds have no phases
        tables["fault"] = [{**fault, "phase": None, "progress": None} for fault in tables["fault"]]
    return _validated(tables, "the options" if path is None else f"{path} with the options")


def load_scenario(path: Path) -> Scenario:
    """The scenario in the file at `path`. Raises ConfigError: one line that names file and key."""
    try:
        with path.open("rb") as file:
            data = file.read(SCENARIO_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no scenario {path}; check the path, or leave --scenario out for the demo"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check the path and its mode") from None
    if len(data) > SCENARIO_LIMIT_BYTES:
        raise ConfigError(f"{path} is larger than {SCENARIO_LIMIT_BYTES} bytes; give a scenario in TOML")
    try:
        return parse_scenario(data.decode(), source=str(path))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; give a scenario in TOML") from None


def check_scenario_workload(scenario: Scenario, allowed: Collection[str], *, source: str) -> None:
    """Make sure that it is the user's own wish to run the code that a file names. Raises ConfigError."""
    name = scenario.workload
    if ":" in name and name not in allowed:
        raise ConfigError(
            f"{source} names the code {name!r}; if you have it and trust it, pass --allow-workload {name}"
        )


def parse_scenario(text: str, *, source: str = "scenario") -> Scenario:
    """The scenario that the TOML `text` describes. Raises ConfigError."""
    return _validated(parse_toml(text, source=source, limit_bytes=SCENARIO_LIMIT_BYTES), source)


def _validated(tables: dict[str, Any], source: str) -> Scenario:
    _refuse_unknown(tables, _keys(Scenario), source)
    faults = tables.get("fault", [])
    for number, fault in enumerate(faults if isinstance(faults, list | tuple) else (), 1):
        if isinstance(fault, dict):
            _refuse_unknown(fault, _keys(Fault), f"{source}: fault {number}")
    uplinks = tables.get("uplink", [])
    for number, uplink in enumerate(uplinks if isinstance(uplinks, list | tuple) else (), 1):
        if isinstance(uplink, dict):
            _refuse_unknown(uplink, _keys(Uplink), f"{source}: uplink {number}")
    try:
        return msgspec.convert(tables, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None


def _refuse_unknown(table: dict[str, Any], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known, f"; it knows {', '.join(known)}")
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _keys(of: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(of))
