"""`swarm.toml`, the manifest: what the members of one swarm agree on, and the SwarmId that follows from it.

Everything outside `[network]` must be the same at every member, and

    SwarmId = BLAKE3( canonical msgpack of all sections but [network] )        32 bytes

so two nodes with the same SwarmId have the same settings, and a manifest fetched from a stranger is as good as
one's own once its SwarmId is the expected one. A peer's manifest cannot make this machine run code of its choice:
a workload is an entry point that is installed here, or one that the user allowed (`manifest_workload`).

A key is declared below and nowhere else: its type, range and default, whether it can be amended, and a description,
which is also the comment that `shoal init` writes above it and its row in the page of the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from shoal.protocol.errors import ConfigError, RemoteError, StorageError, nearest
from shoal.protocol.folders import open_file
from shoal.protocol.identity import PeerId, parse_peer_id
from shoal.protocol.manifest_rollouts import RolloutsSection, check_rollouts
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.manifest_text import AMENDABLE, explain_validation, refuse_non_finite, refuse_unknown_keys, render
from shoal.protocol.manifest_withdrawn import refuse_withdrawn
from shoal.protocol.manifest_workload import WorkloadSection
from shoal.protocol.messages import MEMBER_LIMIT
from shoal.protocol.seats import are_few, longest_wait
from shoal.protocol.strategies.strategy import Strategy
from shoal.protocol.strategies.table import strategy_named, with_strategy_defaults
from shoal.protocol.toml_text import parse_toml
from shoal.protocol.voting import LYING_VOTERS_MIN, FaultModel, Voting
from shoal.protocol.wire import Message, SwarmId, canonical, decode


class AuditSection(Message, frozen=True, kw_only=True):
    """Audits of owners' sums, and bans. A manifest without the section has these values."""

    chunks: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Chunks of every round that each node recomputes at most, drawn anew; 0 for none.",
        ),
    ] = 2
    share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Of a node's time, and of a round's bytes, at most so much is spent on that on average.",
        ),
    ] = 0.05
    ban_rounds: Annotated[
        int,
        Meta(ge=0, le=2**53, description="For how many rounds who is proven to have lied is out; 0 is for ever."),
    ] = 0
    work: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Of the rounds, in so many a node weighs what one member's work does to the loss on the data "
            "assigned to that member; 0 for none. It fetches that whole contribution, and takes some forward passes.",
        ),
    ] = 0.0


SEATS_MAX = 256
STALENESS_MAX = 1000
"""More than there can be members: for swarms to come."""
MANIFEST_LIMIT_BYTES = 16_384
"""Of the file, and of what a peer sends; a node also keeps the manifest as a file, without comments if need be."""
FOUNDER_LIMIT = 64
ALLOW_LIMIT = 512
BOOTSTRAP_LIMIT = 64
ADDRESS_LIMIT_CHARS = 256
CHUNK_VALUES_STEP = 4096


class SwarmSection(Message, frozen=True, kw_only=True):
    """Identity of the swarm."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*\Z",
            max_length=64,
            description="A name for people; it tells nodes nothing.",
        ),
    ]
    founders: Annotated[
        list[PeerId],
        Meta(
            min_length=1,
            max_length=FOUNDER_LIMIT,
            description="PeerIds of the first electorate (`shoal id` prints a node's).",
        ),
    ]
    authority: Annotated[
        PeerId,
        Meta(
            description="Whose key may rebase the swarm when a majority is gone for good, and sign invites. "
            "Left out: the first founder's."
        ),
    ] = PeerId("")
    admission: Annotated[
        Literal["open", "allowlist", "invite"],
        Meta(
            description="Who may join: open (anyone with the manifest), allowlist (the founders and `allow`) or "
            "invite (the founders, and who has a link from the authority's `shoal invite`)."
        ),
    ] = "open"
    allow: Annotated[
        list[PeerId], Meta(max_length=ALLOW_LIMIT, description="With admission = allowlist: who may join.")
    ] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        for key, peers in (("founders", self.founders), ("allow", self.allow)):
            for peer in peers:
                _check_peer(key, peer)
            if len(set(peers)) != len(peers):
                raise ValueError(f"{key} names a peer twice")
        if not self.authority and self.founders:
            msgspec.structs.force_setattr(self, "authority", self.founders[0])
        _check_peer("authority", self.authority)
        if self.allow and self.admission != "allowlist":
            raise ValueError('allow has a meaning with admission = "allowlist" only')


def _check_peer(key: str, text: str) -> None:
    try:
        parse_peer_id(text)
    except ValueError:
        raise ValueError(f"{key}: {text!r} is not a PeerId (`shoal id` prints this node's)") from None


OptimizerName = Literal["adamw", "adamw8bit", "muon"]


class InnerSection(Message, frozen=True, kw_only=True):
    """The optimizer of each node's own steps."""

    optimizer: Annotated[
        OptimizerName,
        Meta(
            description="adamw; adamw8bit, which keeps its moments in 8 bits; or muon, which moves matrices by their "
            "orthogonalised momentum, all else by AdamW."
        ),
    ] = "adamw"
    lr: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="Peak learning rate.",
            extra=AMENDABLE,
        ),
    ] = 1e-3
    weight_decay: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="Decoupled weight decay.",
            extra=AMENDABLE,
        ),
    ] = 0.1
    betas: Annotated[
        tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]],
        Meta(description="Decay of the two moments."),
    ] = (0.9, 0.95)
    warmup_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**53,
            description="Certified tokens over which the learning rate rises from 0.",
            extra=AMENDABLE,
        ),
    ] = 0
    schedule: Annotated[
        Literal["constant", "cosine", "linear"],
        Meta(
            description="How the learning rate goes on after the warm-up: constant, or down to min_lr.",
            extra=AMENDABLE,
        ),
    ] = "constant"
    decay_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**53,
            description="Certified tokens, after the warm-up, over which it goes down to min_lr.",
            extra=AMENDABLE,
        ),
    ] = 0
    min_lr: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="Learning rate at the end of the schedule.",
            extra=AMENDABLE,
        ),
    ] = 0.0
    clip_norm: Annotated[
        float,
        Meta(
            gt=0,
            le=1e9,
            description="Gradients are clipped to this norm.",
            extra=AMENDABLE,
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        if self.schedule == "constant":
            if self.decay_tokens or self.min_lr:
                raise ValueError('decay_tokens and min_lr have a meaning with schedule = "cosine" or "linear" only')
        elif not self.decay_tokens:
            raise ValueError(f'schedule = "{self.schedule}" needs decay_tokens, the tokens over which it goes down')
        elif self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr}, above lr, {self.lr}; the learning rate goes down to it")


class RoundSection(Message, frozen=True, kw_only=True):
    """How a round is run."""

    chunk_values: Annotated[
        int,
        Meta(
            ge=CHUNK_VALUES_STEP,
            le=4_194_304,
            multiple_of=CHUNK_VALUES_STEP,
            description="Values per chunk, the unit that is dealt out and repaired; a multiple of 4096.",
        ),
    ] = 262_144
    grace_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds that a round waits for stragglers once most are ready.",
            extra=AMENDABLE,
        ),
    ] = 10.0
    weight_cap: Annotated[
        float,
        Meta(
            ge=1,
            le=1e6,
            description="A contribution weighs at most this multiple of the median one.",
            extra=AMENDABLE,
        ),
    ] = 4.0
    staleness_rounds: Annotated[
        int,
        Meta(
            ge=0,
            le=STALENESS_MAX,
            description="A missed contribution may still count this many rounds later.",
            extra=AMENDABLE,
        ),
    ] = 3
    durability: Literal["disk"] = "disk"
    reduce_deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds after which a reduce is repaired, whatever the rates.",
            extra=AMENDABLE,
        ),
    ] = 120.0


class MembershipSection(Message, frozen=True, kw_only=True):
    """Voting on rounds. A manifest without the section has these values."""

    voters: Annotated[
        Literal["contributors", "named"],
        Meta(
            description="Who votes: contributors (whoever contributed to the last round, so that one machine with many "
            "keys can be a majority) or named (the founders, whoever else contributes; a majority of them has to be "
            "up; `shoal amend --add-voter` and `--remove-voter` change them)."
        ),
    ] = "contributors"
    seats: Annotated[
        int,
        Meta(
            ge=1,
            le=SEATS_MAX,
            description="How many members contribute to a round at most. The others wait for their seat; more than "
            f"the {MEMBER_LIMIT} members that there can be leave nobody out.",
        ),
    ] = MEMBER_LIMIT
    waiting: Annotated[
        Literal["inside", "outside"],
        Meta(
            description="Where those are who train and have no seat: inside (members of weight zero, linked with all, "
            f"{MEMBER_LIMIT} in all) or outside (followers, as many as there may be, whom the chain calls when their "
            "turn comes; takes named voters and few seats)."
        ),
    ] = "inside"
    sites: Annotated[
        Literal["apart", "together"],
        Meta(
            description="Whether nodes that say with --site that they are of one place contribute together (one of "
            "them for all, so that their uplink carries one contribution and one state) or each apart."
        ),
    ] = "apart"


class AgreementSection(Message, frozen=True, kw_only=True):
    """Faults of voters that are borne. A manifest without the section has these values."""

    faults: Annotated[
        Literal["crash", "lying"],
        Meta(
            description="What the agreement withstands: crash (half of the voters less one may stop) or lying (a third "
            "of them less one may do anything; takes four named voters, and two thirds of them to be up)."
        ),
    ] = "crash"


class NetworkSection(Message, frozen=True, kw_only=True):
    """Where to begin looking for peers. No part of the SwarmId: members may differ."""

    bootstrap: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=ADDRESS_LIMIT_CHARS)]],
        Meta(max_length=BOOTSTRAP_LIMIT, description="Addresses such as /ip4/192.0.2.1/tcp/4001/p2p/12D3Koo…"),
    ] = msgspec.field(default_factory=list)


class Manifest(Message, frozen=True, kw_only=True):
    """A whole `swarm.toml`."""

    swarm: SwarmSection
    workload: WorkloadSection
    sync: SyncSection
    inner: InnerSection = InnerSection()
    round: RoundSection = RoundSection()
    rollouts: RolloutsSection | None = None
    audit: AuditSection | None = None
    membership: MembershipSection | None = None
    agreement: AgreementSection | None = None
    network: NetworkSection = NetworkSection()

    def __post_init__(self) -> None:
        check_rollouts(self.rollouts, self.sync)
        self._check_voting()
        self._check_seats()
        self._check_sites()
        if self.sync.exchanges_gradients and self.inner.optimizer != "adamw":
            raise ValueError(
                f'[inner] optimizer = "{self.inner.optimizer}" goes with a strategy of inner steps; with strategy = '
                f'"{self.sync.strategy}" the step is all nodes\' and AdamW: leave it out, or choose diloco'
            )

    @property
    def strategy(self) -> Strategy:
        """Strategy by which the swarm synchronises."""
        return strategy_named(self.sync.strategy)

    @property
    def audits(self) -> AuditSection:
        """Settings of audits; the defaults where the manifest has none."""
        return self.audit or AuditSection()

    @property
    def voting(self) -> Voting:
        """Voters on rounds, and how many votes decide."""
        named = self.membership is not None and self.membership.voters == "named"
        faults = FaultModel.CRASH if self.agreement is None else FaultModel(self.agreement.faults)
        return Voting(faults, tuple(sorted(self.swarm.founders)) if named else ())

    @property
    def seats(self) -> int:
        """Number of contributions that a round may count."""
        return MEMBER_LIMIT if self.membership is None else min(self.membership.seats, MEMBER_LIMIT)

    @property
    def waits_outside(self) -> bool:
        """True if who trains and has no seat follows (enlisting.py)."""
        return self.membership is not None and self.membership.waiting == "outside"

    @property
    def sites_together(self) -> bool:
        """True if members of one site contribute together (sites.py)."""
        return self.membership is not None and self.membership.sites == "together"

    @property
    def longest_wait_rounds(self) -> int:
        """Number of rounds that a member may have to wait for a seat, with as many members as there can be; else 0."""
        known = len({*self.swarm.founders, *self.swarm.allow})
        most = known if self.waits_outside else min(known, MEMBER_LIMIT)
        members = most if self.swarm.admission == "allowlist" else MEMBER_LIMIT
        return longest_wait(members, self.seats) if members > self.seats else 0

    def _check_seats(self) -> None:
        if self.waits_outside and not (are_few(self.seats) and self.voting.named):
            raise ValueError(
                'waiting = "outside" in [membership] goes with voters = "named" and few seats, since who has a seat '
                "changes by the round: name voters and seats, or leave waiting out"
            )
        if not are_few(self.seats):
            return
        if self.waits_outside and len(self.swarm.founders) + self.seats > MEMBER_LIMIT:
            raise ValueError(
                f"[membership] seats = {self.seats} and {len(self.swarm.founders)} voters are more than the "
                f"{MEMBER_LIMIT} that take part in a round; write fewer seats"
            )
        sync = self.sync
        if sync.exchanges_gradients or sync.applied_mixing is not None or sync.codec == "topk":
            raise ValueError(
                f'[membership] seats = {self.seats} goes with strategy = "diloco": under {sync.strategy} what a '
                "member learns while it waits does not add up to one contribution; leave seats out, or take diloco"
            )
        wait = self.longest_wait_rounds
        if self.round.staleness_rounds < wait:
            raise ValueError(
                f"[round] staleness_rounds = {self.round.staleness_rounds} would lose work: with [membership] seats = "
                f"{self.seats} a member may wait {wait} rounds for its turn; write staleness_rounds = {wait} or more, "
                "or more seats"
            )

    def _check_sites(self) -> None:
        if not self.sites_together:
            return
        if self.sync.exchanges_gradients or self.rollouts is not None or are_few(self.seats):
            raise ValueError(
                'sites = "together" in [membership] goes with strategies that average progress (diloco, streaming, '
                'sparse), with seats for all and without [rollouts]; write sites = "apart"'
            )

    def _check_voting(self) -> None:
        given = self.membership or self.agreement
        if given is not None and not self.strategy.certifies:
            raise ValueError(
                f"[membership] and [agreement] are about certified rounds, which the strategy {self.sync.strategy} "
                "does not have; leave them out"
            )
        voting = self.voting
        if voting.faults is FaultModel.LYING and len(voting.named) < LYING_VOTERS_MIN:
            raise ValueError(
                f'faults = "lying" in [agreement] needs voters = "named" in [membership] and {LYING_VOTERS_MIN} '
                f"founders or more; this has {len(self.swarm.founders)}: name more, as `shoal id` prints them on their "
                'machines, or take faults = "crash"'
            )

    @property
    def swarm_id(self) -> SwarmId:
        """32 bytes that name the swarm and vouch for all agreed fields."""
        return SwarmId(blake3(self.to_canonical()).digest())

    def to_canonical(self) -> bytes:
        """The agreed fields in their one encoding: what is hashed, and what is sent to a newcomer."""
        # Code may have put an int where a float belongs, and the two encode differently.
        same = msgspec.convert(msgspec.to_builtins(self), Manifest)
        tables: dict[str, Any] = {
            name: msgspec.to_builtins(section)
            for name in _AGREED_SECTIONS
            if (section := getattr(same, name)) is not None
        }
        if same.membership is not None and same.membership.seats == MEMBER_LIMIT:
            del tables["membership"]["seats"]  # earlier releases have no such key, and need none then
        if same.membership is not None and same.membership.waiting == "inside":
            del tables["membership"]["waiting"]  # as above
        if same.membership is not None and same.membership.sites == "apart":
            del tables["membership"]["sites"]  # as above
        if same.rollouts is not None and not same.rollouts.labels:
            del tables["rollouts"]["labels"]  # as above
        if same.rollouts is not None and same.rollouts.over_provision == 1:
            del tables["rollouts"]["over_provision"]  # as above
        if same.rollouts is not None and not same.rollouts.images:
            del tables["rollouts"]["images"]  # as above
        if same.rollouts is not None and not same.rollouts.replays:
            del tables["rollouts"]["replays"]  # as above
        return canonical(tables)

    @staticmethod
    def from_canonical(data: bytes, expected: SwarmId, *, peer: PeerId | None = None) -> Manifest:
        """The manifest in `data`, received from `peer`, if it is the one of the swarm that was asked for.

        Its `[network]` is empty: a stranger's addresses are not covered by the SwarmId.
        Raises RemoteError.
        """
        _refuse_withdrawn_of(data, peer)
        manifest = decode(data, Manifest, peer=peer, limit_bytes=MANIFEST_LIMIT_BYTES)
        if manifest.network.bootstrap:
            raise RemoteError("a manifest with addresses that nobody vouches for", peer=peer)
        if manifest.swarm_id != expected:
            raise RemoteError(f"a manifest of another swarm, {manifest.swarm_id.hex()[:16]}…", peer=peer)
        if not _fits(render(manifest, commented=False)):
            raise RemoteError(f"a manifest of more than {MANIFEST_LIMIT_BYTES} bytes as a file", peer=peer)
        return manifest


_AGREED_SECTIONS = ("swarm", "workload", "sync", "inner", "round", "rollouts", "audit", "membership", "agreement")


def load_manifest(path: Path | str) -> Manifest:
    """The manifest in the file at `path`. Raises ConfigError (one line, naming file, section and key)."""
    path = Path(path)
    try:
        with open_file(path) as file:
            data = file.read(MANIFEST_LIMIT_BYTES + 1)
    except FileNotFoundError:
        hint = _instead_of(path)
        raise ConfigError(f"there is no {path}{hint}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder; give the file that `shoal init` wrote, like {path / 'swarm.toml'}"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check the path and its mode") from None
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise ConfigError(
            f"{path} is larger than {MANIFEST_LIMIT_BYTES} bytes; give the swarm.toml that `shoal init` wrote"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; give the swarm.toml that `shoal init` wrote") from None
    return parse_manifest(text, source=str(path))


def _instead_of(path: Path) -> str:
    """Return what a user may have meant by a path where nothing is; a swarm of one's own is the last of it."""
    beside = {other.stem: other for other in sorted(path.parent.glob("*.toml"))}
    near = nearest(path.stem, beside, cutoff=0.7)
    if near is not None:
        return f"; did you mean {beside[near]}?"
    return "; check the path, or give the link of a swarm, shoal:…; `shoal init` founds one of your own"


def parse_manifest(text: str, *, source: str = "swarm.toml") -> Manifest:
    """The manifest that the TOML `text` describes; `source` names it in errors. Raises ConfigError."""
    return validate_manifest(parse_toml(text, source=source, limit_bytes=MANIFEST_LIMIT_BYTES), source=source)


def validate_manifest(raw: object, *, source: str) -> Manifest:
    """`raw` (plain tables, or a Manifest built in code), every type and range checked. Raises ConfigError."""
    if isinstance(raw, dict):
        refuse_unknown_keys(raw, Manifest, source)
    try:
        plain = with_strategy_defaults(raw) if isinstance(raw, dict) else msgspec.to_builtins(raw)
        refuse_non_finite(plain)
        refuse_withdrawn(plain)
        manifest = msgspec.convert(plain, Manifest)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(explain_validation(str(error), Manifest, source)) from None
    if not _fits(render(manifest, commented=False)):
        raise ConfigError(
            f"{source} would be larger than {MANIFEST_LIMIT_BYTES} bytes with every key written out; "
            "shorten its lists and options"
        )
    return manifest


def render_manifest(manifest: Manifest, *, option_lines: Sequence[str] = ()) -> str:
    """`manifest` as a `swarm.toml` that parses back to an equal one, commented where there is room for that.

    option_lines: comments that say what the workload's options are. Raises ConfigError if invalid.
    """
    valid = validate_manifest(manifest, source="the new manifest")
    text = render(valid, below={"options": option_lines})
    return text if _fits(text) else render(valid, commented=False)


def _fits(text: str) -> bool:
    return len(text.encode()) <= MANIFEST_LIMIT_BYTES


def _refuse_withdrawn_of(data: bytes, peer: PeerId | None) -> None:
    """Raise RemoteError for a setting that is no longer there; what does not decode is for others to refuse."""
    try:
        refuse_withdrawn(decode(data, dict[str, Any], limit_bytes=MANIFEST_LIMIT_BYTES))
    except ValueError as error:
        raise RemoteError(f"a manifest that this release cannot follow: {error}", peer=peer) from None
    except RemoteError:
        return
