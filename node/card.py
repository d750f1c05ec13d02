"""A card: what a node gave a swarm, signed by it, which anyone can hold against the swarm's chain.

    what the chain shows as well     in how many certified rounds the node was listed, from which on, up to which one
    what the node says by itself     in how many its work was counted, with how many tokens, and since when, as its
                                     event log has them (`Gave`, as on the page)

Who is listed after a round reported its state: its work counts in the next one, or it paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shoal.node.gave import Gave
from shoal.node.keys import NODE_KEY_NAME
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import scan_log
from shoal.node.state.checkpoint_check import read_chain
from shoal.node.state.store import disk_errors
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity, PeerId, verify
from shoal.protocol.manifest import load_manifest
from shoal.protocol.messages import Count, Peer, Value
from shoal.protocol.wire import canonical

DOMAIN: Final = b"shoal/card"
CARD_LIMIT_BYTES: Final = 4096
_LATEST_S: Final = 1 << 37
_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The card of one node. swarm, certificate, signature: in hex. since: in seconds since 1970, None if not known.

    rounds: certified ones after which it was listed. first: of them. last: that there was, with its certificate.
    gave_rounds: those that counted its work.
    """

    swarm: _Hash
    name: Annotated[str, msgspec.Meta(max_length=64)]
    peer: Peer
    rounds: Count
    first: Count
    last: Count
    certificate: _Hash
    gave_rounds: Count
    tokens: Count
    since: Annotated[float, msgspec.Meta(ge=0, le=_LATEST_S)] | None
    signature: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{128})?\Z")] = ""

    @property
    def preimage(self) -> bytes:
        """Signed part: all but the signature."""
        return canonical(msgspec.structs.replace(self, signature=""))


def make_card(data_dir: Path) -> Card:
    """The card of the node whose data folder this is, signed by its key.

    Raises ConfigError if there is no key, or no certified round in which it was listed; BadCheckpoint for a chain that
    is damaged, or not there; StorageError.
    """
    toml = data_dir / "swarm.toml"
    if not toml.exists():
        raise ConfigError(f"no node has joined a swarm with {data_dir}; give the --data-dir of one that has")
    manifest = load_manifest(toml)
    if not manifest.strategy.certifies:
        raise ConfigError(
            f"with strategy {manifest.strategy.name} nothing is certified; a card must have certified rounds"
        )
    identity, chain = Identity.load(data_dir / NODE_KEY_NAME), read_chain(data_dir)
    listed = _listed(chain, identity.peer_id)
    if not listed:
        raise ConfigError(f"no certified round in {data_dir} lists this node; wait for one to which it contributed")
    gave = _told(data_dir)
    last = chain.standing
    card = Card(
        swarm=manifest.swarm_id.hex(),
        name=manifest.swarm.name,
        peer=identity.peer_id,
        rounds=len(listed),
        first=listed[0].state_round,
        last=last.state_round,
        certificate=last.hash.hex(),
        gave_rounds=gave.rounds,
        tokens=gave.tokens,
        since=gave.since,
    )
    return msgspec.structs.replace(card, signature=identity.sign(DOMAIN, card.preimage).hex())


def read_card(path: Path) -> Card:
    """The card in a file. Raises ConfigError for what is none, StorageError."""
    with disk_errors(path), path.open("rb") as file:
        return parse_card(file.read(CARD_LIMIT_BYTES + 1), path)


def parse_card(data: bytes, path: Path) -> Card:
    """The card that a file at `path` holds. Raises ConfigError for what is none."""
    try:
        return msgspec.json.decode(data, type=Card)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no card ({error}); `shoal card -o FILE` writes one") from None


def problems_of(card: Card, folder: Path) -> list[str]:
    """Objections to a card, by the chain in a checkpoint or a data folder of its swarm; none if it holds.

    Raises ConfigError if the folder's chain ends before the card; BadCheckpoint for one that is damaged, or not there.
    """
    problems = []
    if not _is_signed(card):
        problems.append(f"the signature is not that of {card.peer}")
    chain = read_chain(folder)
    if load_manifest(folder / "swarm.toml").swarm_id.hex() != card.swarm:
        return [*problems, "it is of another swarm"]
    if chain.standing.state_round < card.last:
        raise ConfigError(
            f"the chain in {folder} ends before round {card.last}, of which the card is; take a newer one"
        )
    if card.last < 0 or chain.value(card.last).hash.hex() != card.certificate:
        return [*problems, f"round {card.last} has another certificate"]
    listed = [value for value in _listed(chain, card.peer) if value.state_round <= card.last]
    if (len(listed), listed[0].state_round if listed else None) != (card.rounds, card.first):
        problems.append(f"the certificates list it after {len(listed)} rounds, not {card.rounds} from {card.first} on")
    return problems


def _is_signed(card: Card) -> bool:
    try:
        return verify(card.peer, DOMAIN, card.preimage, bytes.fromhex(card.signature))
    except ValueError:
        return False


def _listed(chain: Chain, peer: PeerId) -> Sequence[Value]:
    rounds = range(1, chain.standing.state_round + 1)
    return [value for value in map(chain.value, rounds) if peer in value.members]


def _told(data_dir: Path) -> Gave:
    """Sum up the work that this node gave, by all of its event log."""
    gave = Gave()
    with suppress(FileNotFoundError):
        for event in scan_log(data_dir / LOG_NAME):
            if event is not None:
                gave.hear(event)
    return gave
