"""Scenario of a simulation: peers, rounds, and the faults that befall them. Read from TOML, strictly.

    loss = 0.01                  # share of control messages that the network loses, all along
    [churn]
    share_per_round = 0.05       # beyond 64 peers, or where some wait outside: so many without a vote die in a round's
                                 # time, and as many newcomers join
    trace = "churn.csv"          # up to 64 peers, from a file beside this one: lines  seconds,peer,down|up
    [[fault]]
    kind = "kill"                # see `Fault`
    peer = 2
    at_s = 12.5
    duration_s = 10.0

Times are seconds of virtual time since the start. A duration that is left out lasts to the end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from shoal.protocol.errors import ConfigError
from shoal.protocol.toml_text import parse_toml
from shoal.protocol.voting import LYING_VOTERS_MIN

FILE_LIMIT_BYTES = 1 << 20
TRACE_LIMIT_LINES = 1_000_000
FAULT_LIMIT = 4096
PEER_LIMIT = 20_000
FLAT_LIMIT_PEERS = 64
"""Up to so many peers everyone takes part in every round itself; beyond, the others follow."""
ROUND_LIMIT = 10_000
TIME_LIMIT_S = 1e6
TRANSFER_SHARE = 0.5
"""Of the random scenarios, those with a newcomer whose donors are struck."""
SPARSE_SHARE = 0.3
FRAGMENTS = (1, 1, 1, 2, 3)
"""Of how many fragments the rounds of a random scenario are."""
TORN_SHARE = 0.35
"""Of the deaths, those in the middle of a write."""
CALM_ROUNDS = 3
OUTAGE_SHARE = 0.25
"""Of the random scenarios, those in which all crash at once."""
ROLLBACK_SHARE = 0.25
"""Of the random scenarios, those in which a user wants to go back."""
AMEND_SHARE = 0.2
"""Of the random scenarios, those in which the authority amends the settings."""
FINISH_SHARE = 0.2
"""Of the random scenarios, those in which some peer is to take part in a few rounds only."""
OUTSIDE_DEAD_SHARE = 0.4
"""Of the deaths of those who wait outside, those for good."""
LYING_SHARE = 0.5
"""Of the scenarios with enough named voters, those whose quorum is for voters that may lie."""
SITES_SHARE = 0.2
"""Of the random scenarios, those whose peers are in sites."""
PHASE_LIMIT_S = 8.0
"""A fault that is to strike in a phase strikes after so long wherever its peer may be."""

Kind = Literal[
    "kill", "crash", "stop", "slow", "lossy", "partition", "lie", "leave", "join", "pause", "trainer", "finish",
    "outage", "rollback", "amend", "voters",
]  # fmt: skip
Phase = Literal["joining", "train", "plan", "reduce", "repair", "certify", "paused", "leaving"]
BROUGHT_BY: Mapping[Phase, Kind] = {"paused": "pause", "leaving": "leave"}
"""The faults that bring a peer into a phase which it does not come to by itself."""
Lie = Literal["contribution", "report", "accuse", "vouch", "flood", "chunk", "header", "chain"]

Index = Annotated[int, Meta(ge=0, lt=PEER_LIMIT)]
Moment = Annotated[float, Meta(ge=0, le=TIME_LIMIT_S)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that happens to the swarm.

    kill: the process dies and its connections break; it is started again after `duration_s`. crash: the same without a
    word, as when the power fails. `forgets`: its contribution was not on disk. `torn`: it dies with its next write to a
    log, without a word, and this share of the bytes is there. stop: nothing runs, connections stay.
    slow: it trains and moves data `factor` times slower. lossy: its connection loses `share` of its messages.
    partition: nobody in the first of `groups` reaches anybody in the others, and, unless `one_way`, the other way
    round. lie: what it tells others is not so, as `lie` says; it serves other chunks, or another header of a state.
    leave: it goes in order. join: a newcomer starts. pause: its user wants the accelerator. trainer: its trainer begins
    anew. finish: from its next start on, at the beginning if `at_s` is 0, it takes part up to a round, and goes then.
    outage: all crash at once; `peer` is the one whose phase counts. rollback: its user wants to go back `back` rounds.
    amend: its user, who has the authority's key, wants `setting` in force. voters: the same user wants named voters
    changed, a vote for the one that it `adds` and none for the one that it `removes`.

    phase: it strikes `into_s` after its peer is there for the first time since `at_s`, or after PHASE_LIMIT_S.
    """

    kind: Kind
    at_s: Moment
    phase: Phase | None = None
    into_s: Annotated[float, Meta(ge=0, le=PHASE_LIMIT_S)] = 0.0
    peer: Index | None = None
    duration_s: Annotated[float, Meta(gt=0, le=TIME_LIMIT_S)] | None = None
    forgets: bool = False
    torn: Share | None = None
    factor: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    share: Share = 0.0
    groups: tuple[tuple[Index, ...], ...] = ()
    one_way: bool = False
    lie: Lie | None = None
    setting: str = ""
    adds: Index | None = None
    removes: Index | None = None
    back: Annotated[int, Meta(ge=1, le=8)] = 1
    round: Annotated[int, Meta(ge=1, le=ROUND_LIMIT)] | None = None

    def __post_init__(self) -> None:
        if self.peer is None and self.kind not in ("partition", "join"):
            raise ValueError(f"a {self.kind} needs the peer it strikes")
        if self.kind == "partition" and (len(self.groups) < 2 or not all(self.groups)):
            raise ValueError("a partition needs at least two groups, none of them empty")
        if self.phase is not None and self.peer is None:
            raise ValueError(f"a {self.kind} strikes in no phase of a peer")
        if (self.kind == "finish") != (self.round is not None):
            raise ValueError("a finish needs its round, and nothing else has one")
        if (self.kind == "amend") != bool(self.setting):
            raise ValueError("an amend needs its setting, SECTION.KEY=VALUE, and nothing else has one")
        if (self.kind == "voters") != (self.adds is not None or self.removes is not None):
            raise ValueError("a change of voters needs whom it adds or removes, and nothing else has one")
        if self.kind == "outage" and self.duration_s is None:
            raise ValueError("an outage ends; give its duration_s")
        if self.torn is not None and self.kind not in ("kill", "crash"):
            raise ValueError(f"a {self.kind} tears no log; a kill or a crash does")
        if self.kind == "lie" and self.lie is None:
            raise ValueError(f"a lie needs to say what it is about: lie = one of {', '.join(get_args(Lie))}")

    @property
    def ends_at_s(self) -> float:
        """The moment at which its effect is over, as far as it ever is."""
        waited_s = 0.0 if self.phase is None else PHASE_LIMIT_S + self.into_s
        return self.at_s + waited_s + (self.duration_s or 0.0)


class Churn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Peers that come and go on their own: at random, by a file, or both."""

    share_per_round: Share = 0.0
    trace: str = ""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole run. Two runs of one scenario are the same, event by event."""

    peers: Annotated[int, Meta(ge=1, le=PEER_LIMIT)]
    rounds: Annotated[int, Meta(ge=1, le=ROUND_LIMIT)]
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 1
    loss: Share = 0.0
    churn: Churn = Churn()
    fault: Annotated[tuple[Fault, ...], Meta(max_length=FAULT_LIMIT)] = ()
    real_keys: bool = False
    sparse: bool = False
    """Of each chunk a peer sends the largest values alone."""
    fragments: Annotated[int, Meta(ge=1, le=5)] = 1
    """A round is of one of so many, one after the other, and peers train on beside it."""
    rebases: bool = False
    """Where too few are left to certify, the authority has those who run go on."""
    calm_rounds: Annotated[int, Meta(ge=0, le=10)] = 0
    """After the last fault, rounds that are waited for in which nothing is wrong (see `calm`)."""
    voters: Annotated[int, Meta(ge=0, le=FLAT_LIMIT_PEERS)] = 0
    """So many of the first peers are founders and named voters, the others join; with 0 all found it, and vote."""
    lying: bool = False
    """The quorum is that of named voters of whom a third less one may lie."""
    seats: Annotated[int, Meta(ge=1, le=FLAT_LIMIT_PEERS)] = FLAT_LIMIT_PEERS
    """So many contribute to a round at most; the others take turns. Beyond FLAT_LIMIT_PEERS so many are members."""

    outside: bool = False
    """True where peers without a seat follow, and are called by the chain: a swarm of named voters."""

    site: Annotated[int, Meta(ge=1, le=FLAT_LIMIT_PEERS)] = 1
    """So many peers, in the order of their numbers, are of one site and contribute together; with 1 each apart."""

    def __post_init__(self) -> None:
        if self.outside and (not self.voters or self.voters + self.seats > FLAT_LIMIT_PEERS):
            raise ValueError(f"waiting outside takes named voters, and with the seats up to {FLAT_LIMIT_PEERS} of them")
        if self.voters > self.peers or (self.voters and not self.is_flat):
            raise ValueError(f"named voters are some of up to {FLAT_LIMIT_PEERS} peers, or of those who wait outside")
        if self.lying and self.voters < LYING_VOTERS_MIN:
            raise ValueError(f"lying takes {LYING_VOTERS_MIN} named voters or more")
        if self.seats < FLAT_LIMIT_PEERS and (self.sparse or self.fragments > 1):
            raise ValueError("few seats are for peers that make whole rounds together")
        if self.site > 1 and (self.seats < FLAT_LIMIT_PEERS or not self.is_flat):
            raise ValueError(f"sites are for up to {FLAT_LIMIT_PEERS} peers, with seats for all")
        if not self.is_flat and self.fault:
            raise ValueError(f"single faults are for up to {FLAT_LIMIT_PEERS} peers; beyond, give churn and loss")
        if self.is_flat and not self.outside and self.churn.share_per_round:
            raise ValueError(f"churn at random is for more than {FLAT_LIMIT_PEERS} peers; give faults or a trace")
        for fault in self.fault:
            if fault.kind == "voters" and not self.voters:
                raise ValueError("a change of voters takes a swarm that names them; give voters")
            others = (i for group in fault.groups for i in group)
            named = {fault.peer, fault.adds, fault.removes, *others} - {None}
            newcomers = sum(1 for other in self.fault if other.kind == "join")
            if any(i >= self.peers + newcomers for i in named if i is not None):
                raise ValueError(f"a {fault.kind} at {fault.at_s} s names a peer that there is not")

    @property
    def is_flat(self) -> bool:
        """True if each peer takes part in rounds by a member of its own, as those outside do too."""
        return self.outside or self.peers <= FLAT_LIMIT_PEERS

    @property
    def quiet_at_s(self) -> float:
        """The moment at which the last fault of the list is over."""
        return max((fault.ends_at_s for fault in self.fault), default=0.0)


class FaultFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a file of faults."""

    loss: Share = 0.0
    churn: Churn = Churn()
    fault: Annotated[tuple[Fault, ...], Meta(max_length=FAULT_LIMIT)] = ()


def load_faults(path: Path) -> FaultFile:
    """Read a file of faults, with the lines of its trace of churn made into faults. Raises ConfigError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a file of faults") from None
    if len(text) > FILE_LIMIT_BYTES:
        raise ConfigError(f"{path} is longer than {FILE_LIMIT_BYTES} bytes; split it")
    try:
        found = msgspec.convert(parse_toml(text.decode(), source=str(path), limit_bytes=FILE_LIMIT_BYTES), FaultFile)
    except (UnicodeDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; see `shoal simulate --help`") from None
    if found.churn.trace:
        told = tuple(_traced(path.parent / found.churn.trace))
        if len(found.fault) + len(told) > FAULT_LIMIT:
            raise ConfigError(f"{path}: more than {FAULT_LIMIT} faults; shorten the trace")
        found = msgspec.structs.replace(found, fault=(*found.fault, *told))
    return found


def _traced(path: Path) -> list[Fault]:
    """The crashes of a trace: each lasts until the peer is up again."""
    try:
        lines = path.read_text().splitlines()[:TRACE_LIMIT_LINES]
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}; name it relative to its file") from None
    down: dict[int, float] = {}
    faults: list[Fault] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            when, who, what = (part.strip() for part in line.split(","))
            at_s, peer = float(when), int(who)
            if what not in ("up", "down") or not 0 <= at_s <= TIME_LIMIT_S or not 0 <= peer < PEER_LIMIT:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{path}, line {number}: write seconds,peer,down or seconds,peer,up") from None
        if what == "down":
            down.setdefault(peer, at_s)
        elif peer in down and at_s > down[peer]:
            begun = down.pop(peer)
            faults.append(Fault(kind="crash", peer=peer, at_s=begun, duration_s=at_s - begun))
    faults += [Fault(kind="crash", peer=peer, at_s=at_s) for peer, at_s in down.items()]
    return sorted(faults, key=lambda fault: (fault.at_s, fault.peer or 0))


def random_scenario(seed: int, *, rounds: int = 4) -> Scenario:
    """A small swarm under faults of all kinds, every one of which ends: 3 to 9 peers, 1 to 6 faults.

    Up to four faults more strike in a phase of a round, and in every second scenario up to five about a newcomer that
    fetches the state from the others.
    """
    rng = random.Random(f"scenario {seed}")
    peers = rng.randint(3, 9)
    faults = [_random_fault(rng, peers) for _ in range(rng.randint(1, 6))]
    joins = sum(1 for fault in faults if fault.kind == "join")
    if joins:
        peers = max(3, peers - joins)
        faults = [fault for fault in faults if _names_below(fault, peers)]
    more = random.Random(f"more {seed}")
    more.random()  # nothing depends on it any more, and a seed keeps its scenario
    if more.random() < TRANSFER_SHARE:
        faults += _around_a_transfer(more, peers)
    faults += _in_phases(random.Random(f"phases {seed}"), peers, faults)
    drawn = random.Random(f"torn {seed}")
    faults = [_torn(drawn, fault) for fault in faults]
    shape = random.Random(f"shape {seed}")
    liars = {fault.peer for fault in faults if fault.kind == "lie"}
    leavers = {fault.peer for fault in faults if fault.kind in ("leave", "finish")}
    if 2 * (len(liars) + len(leavers)) >= peers:
        faults = [fault for fault in faults if fault.kind not in ("lie", "leave", "finish")]
    return Scenario(
        peers=peers,
        rounds=rounds,
        seed=seed,
        loss=rng.choice((0.0, 0.0, 0.01, 0.05)),
        sparse=shape.random() < SPARSE_SHARE,
        fragments=shape.choice(FRAGMENTS),
        calm_rounds=CALM_ROUNDS,
        rebases=True,
        fault=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        site=_drawn_site(seed) if random.Random(f"sites there {seed}").random() < SITES_SHARE else 1,
    )


def _drawn_site(seed: int) -> int:
    """Number of peers in a site, where there are sites."""
    return random.Random(f"sites {seed}").randint(2, 3)


def with_sites(scenario: Scenario) -> Scenario:
    """The scenario with its peers in sites of two or three."""
    return msgspec.structs.replace(scenario, site=_drawn_site(scenario.seed))


def with_named_voters(scenario: Scenario) -> Scenario:
    """The scenario with some of its peers, at least two, as named voters, of whom in some a third less one may lie.

    In every second one users order changes of them.
    """
    rng = random.Random(f"voters {scenario.seed}")
    voters = rng.randint(2, scenario.peers)
    lying = voters >= LYING_VOTERS_MIN and rng.random() < LYING_SHARE
    faults = [*scenario.fault, *_changes_of_voters(random.Random(f"changes {scenario.seed}"), scenario, voters)]
    faults.sort(key=lambda fault: fault.at_s)
    return msgspec.structs.replace(scenario, voters=voters, lying=lying, fault=tuple(faults))


def with_few_seats(scenario: Scenario) -> Scenario:
    """The scenario with fewer seats than peers, in rounds of all values."""
    seats = random.Random(f"seats {scenario.seed}").randint(1, max(1, scenario.peers - 1))
    return msgspec.structs.replace(scenario, seats=seats, sparse=False, fragments=1, site=1)


def outside_scenario(seed: int, *, rounds: int = 12) -> Scenario:
    """A small swarm where who has no seat waits outside: 2 to 4 voters and seats, up to 12 others, 0 to 5 faults.

    Voters that are struck come back, of the others some do; and some come while the rounds go on.
    """
    rng = random.Random(f"outside {seed}")
    voters, seats = rng.randint(2, 4), rng.randint(2, 4)
    peers = voters + rng.randint(3, 12)
    faults: list[Fault] = []
    for _ in range(rng.randint(0, 5)):
        kind: Kind = rng.choice(("kill", "kill", "crash", "stop", "join", "trainer", "pause", "slow"))
        peer, at_s, lasts_s = rng.randrange(1, peers), round(rng.uniform(3.0, 25.0), 2), round(rng.uniform(2.0, 8.0), 2)
        stays_dead = kind in ("kill", "crash") and peer >= voters and rng.random() < OUTSIDE_DEAD_SHARE
        if kind == "join":
            faults.append(Fault(kind=kind, at_s=at_s))
        else:
            duration_s = None if stays_dead or kind == "trainer" else lasts_s
            factor = 4.0 if kind == "slow" else 1.0
            faults.append(Fault(kind=kind, peer=peer, at_s=at_s, duration_s=duration_s, factor=factor))
    return Scenario(
        peers=peers,
        rounds=rounds,
        seed=seed,
        voters=voters,
        seats=seats,
        outside=True,
        loss=rng.choice((0.0, 0.0, 0.01, 0.03)),
        fault=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _changes_of_voters(rng: random.Random, scenario: Scenario, voters: int) -> list[Fault]:
    """In every second scenario up to three changes of voters, each ordered in some phase; not all of them can be."""
    everyone = scenario.peers + sum(fault.kind == "join" for fault in scenario.fault)
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):
        adds = rng.choice((None, *range(everyone), *range(voters, everyone)))
        # Never down to one voter: it certifies by itself, at a pace at which others may not catch up.
        removes = rng.choice((None, rng.randrange(voters))) if voters > 2 and not faults else None
        phase: Phase | None = rng.choice((None, "train", "plan", "reduce", "certify"))
        at_s, peer = round(rng.uniform(2.0, 18.0), 2), rng.randrange(voters)
        if adds is not None or removes is not None:
            faults.append(Fault(kind="voters", at_s=at_s, phase=phase, peer=peer, adds=adds, removes=removes))
    return faults


def _torn(rng: random.Random, fault: Fault) -> Fault:
    """Of every third death, one in the middle of a write: before it, after it, or anywhere in it."""
    share = rng.choice((0.0, 1.0, round(rng.random(), 3)))
    dies = fault.kind in ("kill", "crash") and rng.random() < TORN_SHARE
    return msgspec.structs.replace(fault, torn=share, forgets=False) if dies else fault


def _names_below(fault: Fault, peers: int) -> bool:
    return (fault.peer or 0) < peers and all(i < peers for group in fault.groups for i in group)


def _around_a_transfer(rng: random.Random, peers: int) -> list[Fault]:
    """A newcomer, and what befalls some of its donors just before it asks them or in the middle of it."""
    joins_at_s = round(rng.uniform(5.0, 14.0), 2)
    faults = [Fault(kind="join", at_s=joins_at_s)]
    for peer in rng.sample(range(peers), rng.randint(1, max(1, (peers - 1) // 2))):
        kind: Kind = rng.choice(("kill", "stop", "stop", "slow", "lie", "lie"))
        at_s, lasts = round(joins_at_s + rng.uniform(0.0, 4.0), 2), round(rng.uniform(2.0, 14.0), 2)
        if kind == "lie":
            lie: Lie = rng.choice(("chunk", "chain", "header"))
            faults.append(Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer, lie=lie))
        elif kind == "slow":
            faults.append(Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer, factor=round(rng.uniform(5, 60), 1)))
        else:
            faults.append(Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer))
    return faults


def _in_phases(rng: random.Random, peers: int, others: Sequence[Fault]) -> list[Fault]:
    """Faults of founders and newcomers in a phase of their round; a peer that joins, pauses or leaves among them."""
    joins = dict(enumerate(sorted(fault.at_s for fault in others if fault.kind == "join"), peers))
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 4)):
        kind: Kind = rng.choice(("kill", "kill", "crash", "stop", "pause", "pause", "trainer", "leave"))
        phase: Phase = rng.choice(get_args(Phase))
        peer = rng.choice([*range(peers), *joins, *joins])
        at_s, lasts = round(joins.get(peer, rng.uniform(0.0, 14.0)), 2), round(rng.uniform(0.5, 8.0), 2)
        into_s = rng.choice((0.0, 0.0, round(rng.uniform(0.0, 1.0), 3)))
        before = BROUGHT_BY.get(phase)
        if before is not None:
            faults.append(Fault(kind=before, at_s=at_s, peer=peer, duration_s=None if before == "leave" else 10.0))
        ends = None if kind in ("leave", "trainer") else lasts
        faults.append(Fault(kind=kind, at_s=at_s, phase=phase, into_s=into_s, peer=peer, duration_s=ends))
    if rng.random() < OUTAGE_SHARE:
        phase = rng.choice(("train", "plan", "reduce", "certify", "certify"))
        at_s, into_s = round(rng.uniform(0.0, 14.0), 2), rng.choice((0.0, 0.02, 0.05, 0.1, 0.2))
        peer, forgets = rng.randrange(peers), rng.random() < 0.5
        faults.append(
            Fault(kind="outage", at_s=at_s, phase=phase, into_s=into_s, peer=peer, duration_s=2.0, forgets=forgets)
        )
    if rng.random() < ROLLBACK_SHARE:
        at_s, phase = round(rng.uniform(6.0, 16.0), 2), rng.choice(("train", "plan", "reduce", "certify"))
        faults.append(Fault(kind="rollback", at_s=at_s, phase=phase, peer=rng.randrange(peers), back=rng.randint(1, 3)))
    if rng.random() < FINISH_SHARE:
        faults.append(Fault(kind="finish", at_s=0.0, peer=rng.randrange(peers), round=rng.randint(1, 4)))
    if rng.random() < AMEND_SHARE:
        setting = rng.choice(("round.grace_s=2.5", "round.grace_s=3.5", "round.weight_cap=2", "round.weight_cap=1"))
        at_s = round(rng.uniform(2.0, 14.0), 2)
        faults.append(Fault(kind="amend", at_s=at_s, peer=rng.randrange(peers), setting=setting))
    return faults


def _random_fault(rng: random.Random, peers: int) -> Fault:
    kinds: tuple[Kind, ...] = ("kill", "kill", "crash", "stop", "slow", "lossy", "partition", "lie", "leave", "join")
    kind = rng.choice(kinds)
    at_s, lasts = round(rng.uniform(0.0, 16.0), 2), round(rng.uniform(0.5, 14.0), 2)
    peer = rng.randrange(peers)
    if kind == "partition":
        order = rng.sample(range(peers), peers)
        cut = rng.randint(1, peers - 1)
        groups = (tuple(sorted(order[:cut])), tuple(sorted(order[cut:])))
        return Fault(kind=kind, at_s=at_s, duration_s=lasts, groups=groups, one_way=rng.random() < 0.4)
    if kind == "lie":
        lies: tuple[Lie, ...] = ("contribution", "report", "accuse", "vouch", "flood")
        return Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer, lie=rng.choice(lies))
    if kind == "join":
        return Fault(kind=kind, at_s=at_s)
    if kind == "leave":
        return Fault(kind=kind, at_s=at_s, peer=peer)
    if kind == "slow":
        return Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer, factor=round(rng.uniform(2, 30), 1))
    if kind == "lossy":
        return Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer, share=round(rng.uniform(0.05, 0.5), 2))
    forgets = kind in ("kill", "crash") and rng.random() < 0.3
    return Fault(kind=kind, at_s=at_s, duration_s=lasts, peer=peer, forgets=forgets)
