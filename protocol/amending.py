"""Amendments: settings that all agreed on, changed while the swarm runs.

    manifest ──► in force in rounds 1 … e          the SwarmId stays that of the manifest
    value of round e, with an amendment ──► in force from round e + 1 on, at every node

An amendment rides on a result: round e has its update as ever, made under the settings before, and the value that is
decided says besides what changes. So it is decided by the same votes as any value (agreement.py), at most one a round,
and no round is spent on it. What follows here decides only whether somebody proposes it. As for a rollback (terms.py),
members say by consents that they want it, each for one round, and the value carries those of a quorum: a member that
never consented sees that a quorum did, and votes for the result that it computed itself. A lead that proposes before it
knows of a quorum proposes without, and nothing waits.

An amendment names what it amends: `since` is the hash of the value that settled the settings in force, which is the
last one with an amendment or the last one that ended a term, or C(0). Whatever was ordered, or signed by the
authority, for other settings than those in force cannot be decided any more, nor can the same amendment twice.

The settings are those of the branch: a rollback or a rebase to C(k) brings back those of round k + 1 as they were.

Named voters change in the same way, each by a change `voters.PEER` to true or false, in force from round e + 1 on
(voting.py). The value carries consents of those who voted before; who gets a vote is a member after it, and so are a
quorum of those who vote next. These are of the whole chain: no rollback brings earlier voters back.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import SIGNATURE_BYTES, Identity, PeerId, parse_peer_id, verify
from shoal.protocol.manifest import MANIFEST_LIMIT_BYTES, Manifest, validate_manifest
from shoal.protocol.manifest_text import amendable_keys
from shoal.protocol.messages import (
    CHANGE_LIMIT,
    SETTING_LIMIT_CHARS,
    Amended,
    Amendment,
    Change,
    RoundMessage,
    Signature,
    Value,
)
from shoal.protocol.toml_text import parse_toml
from shoal.protocol.voting import CONTRIBUTORS, VOTERS, Voting, holds_state, is_quorum, voter_changes
from shoal.protocol.wire import canonical

CONSENT_DOMAIN = b"shoal/amend-consent"
AMENDMENT_DOMAIN = b"shoal/amendment"

AMENDABLE: Mapping[str, tuple[str, ...]] = amendable_keys(Manifest)
"""Settings that can be amended, by section. Everything else shapes the state, or says whose swarm this is."""

Setting = bool | int | float | str
SOURCE = "the amended settings"


class AmendConsent(RoundMessage, frozen=True, kw_only=True):
    """The sender wants round `round` to decide on `amendment`; binds it to nothing.

    `asked`: its own user ordered it; otherwise it follows the swarm's authority, whose signature on it is `authority`.
    """

    amendment: Amendment
    asked: bool
    signature: Signature
    authority: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


@dataclass(frozen=True, slots=True, eq=False)
class InForce:
    """The settings of a round, and the hash of the value that settled them. voting: who votes on it."""

    manifest: Manifest
    since: bytes
    voting: Voting = CONTRIBUTORS


class History:
    """The settings of every round of a branch, from the manifest on."""

    def __init__(self, manifest: Manifest, genesis: Value) -> None:
        self._from = [1]
        self._settings = [InForce(manifest, genesis.hash, manifest.voting)]

    def of(self, round: int) -> InForce:
        """Settings in force in `round`."""
        return self._settings[max(0, bisect_right(self._from, round) - 1)]

    def snapshot(self) -> History:
        """Copy of what is known now, which later entries do not change."""
        same = copy.copy(self)
        same._from, same._settings = list(self._from), list(self._settings)
        return same

    def follow(self, value: Value, *, ends_term: bool, voting: Voting) -> None:
        """`value`, which was checked, is appended to the chain. voting: that after it."""
        before = self._settings[-1].voting
        keep = bisect_right(self._from, value.next_round)
        del self._from[keep:], self._settings[keep:]
        if ends_term or value.amended or voting != before:
            manifest = self._settings[-1].manifest
            if value.amended:
                manifest = amend(manifest, value.amended.amendment)
            self._from.append(value.next_round)
            self._settings.append(InForce(manifest, value.hash, voting))


# -- what an amendment says ----------------------------------------------------------------------------------


def make_amendment(in_force: InForce, wanted: Mapping[str, object]) -> Amendment:
    """The amendment by which the settings `wanted`, by section.key, come in force. Raises ConfigError if none can."""
    tables = _changed(in_force.manifest, wanted)
    before, after = (
        _settled(msgspec.to_builtins(in_force.manifest), in_force.voting),
        _settled(msgspec.to_builtins(validate_manifest(tables, source=SOURCE)), _revoted(in_force.voting, wanted)),
    )
    changes = []
    for key in sorted(wanted):
        section, _, name = key.partition(".")
        if after[section].get(name, False) != before[section].get(name, False):
            changes.append(Change(key, after[section].get(name, False)))
    if not changes:
        raise ConfigError("nothing to amend: these settings are in force already; name others")
    if len(changes) > CHANGE_LIMIT:
        raise ConfigError(f"an amendment changes at most {CHANGE_LIMIT} settings; make two of it")
    return Amendment(in_force.since, tuple(changes))


def _settled(tables: dict[str, Any], voting: Voting) -> dict[str, Any]:
    return {**tables, VOTERS: dict.fromkeys(voting.named, True)}


def _revoted(voting: Voting, wanted: Mapping[str, object]) -> Voting:
    """Voting with the changes of voters among `wanted`. Raises ConfigError where there is none."""
    changes: dict[PeerId, bool] = {}
    for key, votes in wanted.items():
        section, _, peer = key.partition(".")
        if section != VOTERS:
            continue
        try:
            parse_peer_id(peer)
        except ValueError:
            raise ConfigError(
                f"{key[:SETTING_LIMIT_CHARS]!r} names no peer: write a PeerId, as `shoal id` prints it"
            ) from None
        if not isinstance(votes, bool):
            raise ConfigError(f"{key} must be true for who votes from then on, or false for who no longer does")
        changes[PeerId(peer)] = votes
    if changes and not voting.named:
        raise ConfigError(
            "whoever contributes votes in this swarm, which cannot be amended; `shoal init --voters named` founds one "
            "whose voters are named"
        )
    try:
        return voting.changed(changes) if changes else voting
    except ValueError as error:
        raise ConfigError(f"these voters cannot be: {error}; name others") from None


def amend(manifest: Manifest, amendment: Amendment) -> Manifest:
    """The settings that `amendment` makes of `manifest`. Raises ConfigError where it makes none."""
    settings = settings_of(amendment)
    only_voters = len(voter_changes(amendment)) == len(settings)
    return manifest if only_voters else validate_manifest(_changed(manifest, settings), source=SOURCE)


def _changed(manifest: Manifest, wanted: Mapping[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = msgspec.to_builtins(manifest)
    for key, value in wanted.items():
        section, _, name = key.partition(".")
        if section == VOTERS:
            continue
        if name not in AMENDABLE.get(section, ()):
            known = ", ".join(f"{section}.{name}" for section, names in AMENDABLE.items() for name in names)
            raise ConfigError(f"{key[:SETTING_LIMIT_CHARS]!r} cannot be amended; what can: {known}, {VOTERS}.PEER")
        tables[section][name] = value
    return tables


def settings_of(amendment: Amendment) -> dict[str, Setting]:
    """Settings that an amendment changes, with their new values, by section.key."""
    return {change.key: change.value for change in amendment.changes}


def settings_text(amendment: Amendment) -> str:
    """Settings that an amendment changes, as a line for a person."""
    return told_settings(settings_of(amendment))


def told_settings(settings: Mapping[str, Setting]) -> str:
    """Settings by section.key, as a line for a person."""
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def amended_settings(manifest: Manifest, amended: Manifest | None) -> dict[str, Setting]:
    """The settings in force that are not those of the manifest, by section.key."""
    if amended is None:
        return {}
    first, now = msgspec.to_builtins(manifest), msgspec.to_builtins(amended)
    keys = ((section, name) for section, names in AMENDABLE.items() for name in names)
    return {f"{s}.{name}": now[s][name] for s, name in keys if now[s][name] != first[s][name]}


def settings_back(before: InForce | None, after: InForce | None) -> str:
    """Return what a line about a step back adds if it undid amendments: `; settings go back with it: …`, or nothing."""
    if before is None or after is None:
        return ""
    again = amended_settings(before.manifest, after.manifest)
    return f"; settings go back with it: {told_settings(again)}" if again else ""


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """Parse settings of a user, each SECTION.KEY=VALUE with the value as in a manifest; quotes may lack.

    Raises ConfigError.
    """
    wanted: dict[str, object] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value and value.isprintable()):
            raise ConfigError(f"--set {text!r}: write SECTION.KEY=VALUE, such as sync.inner_steps=60")
        if key in wanted:
            raise ConfigError(f"--set {key}: it is there twice")
        try:
            wanted[key] = parse_toml(f"value = {value}", source="--set", limit_bytes=MANIFEST_LIMIT_BYTES)["value"]
        except ConfigError:
            wanted[key] = value
    return wanted


def stands_on(amendment: Amendment, in_force: InForce) -> bool:
    """True if it amends the settings in force, in its one form, to others that a manifest may have."""
    try:
        made = make_amendment(in_force, settings_of(amendment))
    except ConfigError:
        return False
    return canonical(made) == canonical(amendment)


def is_done(amendment: Amendment, in_force: InForce) -> bool:
    """True if the settings in force are those to which it changes them."""
    tables = _settled(msgspec.to_builtins(in_force.manifest), in_force.voting)
    keys = ((*change.key.partition("."), change.value) for change in amendment.changes)
    return all(tables[section].get(name, False) == value for section, _, name, value in keys)


# -- who wants it --------------------------------------------------------------------------------------------


def sign_amendment(authority: Identity, swarm: bytes, amendment: Amendment) -> bytes:
    """The authority's word that members may consent by themselves."""
    return authority.sign(AMENDMENT_DOMAIN, canonical([swarm, amendment.hash]))


@lru_cache(maxsize=64)
def is_the_authoritys(amendment: Amendment, signature: bytes, authority: PeerId, swarm: bytes) -> bool:
    """Check that `signature` is the authority's word that members may consent to `amendment` by themselves."""
    return len(signature) == SIGNATURE_BYTES and verify(
        authority, AMENDMENT_DOMAIN, canonical([swarm, amendment.hash]), signature
    )


def make_amend_consent(
    identity: Identity, previous: Value, amendment: Amendment, *, asked: bool, authority: bytes = b""
) -> AmendConsent:
    """The consent of `identity` that the round after `previous` decides on `amendment`."""
    return AmendConsent(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        amendment=amendment,
        asked=asked,
        signature=identity.sign(CONSENT_DOMAIN, _consent_preimage(previous.hash, amendment)),
        authority=authority,
    )


def verify_amend_consent(peer: PeerId, base: bytes, amendment: Amendment, signature: bytes) -> bool:
    """Check that `signature` is `peer`'s consent to `amendment` in the round after the value of hash `base`."""
    return verify(peer, CONSENT_DOMAIN, _consent_preimage(base, amendment), signature)


def _consent_preimage(base: bytes, amendment: Amendment) -> bytes:
    return canonical([base, amendment.hash])  # the base names term and round


# -- what a round decides ------------------------------------------------------------------------------------


def with_amendment(value: Value, consents: Collection[tuple[PeerId, AmendConsent]]) -> Value:
    """`value`, a result, with the amendment to which these consent, all to the same."""
    counted = sorted((peer, consent) for peer, consent in consents if peer not in value.leaves)
    (amendment,) = {consent.amendment for _, consent in consents}
    amended = Amended(amendment, tuple(peer for peer, _ in counted), tuple(consent.signature for _, consent in counted))
    return msgspec.structs.replace(value, amended=amended)


def may_amend(value: Value, previous: Value, in_force: InForce | None, *, voting: Voting = CONTRIBUTORS) -> bool:
    """Check that an amendment in `value` is a quorum's, to what is in force in its round. Other values need none."""
    return not value.amended or _is_wanted(value, value.hash, previous, in_force, voting)


@lru_cache(maxsize=64)
def _is_wanted(value: Value, hash: bytes, previous: Value, in_force: InForce | None, voting: Voting) -> bool:
    """See `may_amend`. The hash tells apart what Python calls equal: 1, 1.0 and true."""
    amended = value.amended
    assert amended
    signed = list(zip(amended.consenting, amended.signatures, strict=False))
    return (
        in_force is not None
        and not value.rollback
        and len(amended.consenting) == len(amended.signatures) == len(set(amended.consenting))
        and is_quorum(previous, amended.consenting, value.leaves, voting=voting)
        and all(verify_amend_consent(peer, value.base, amended.amendment, signature) for peer, signature in signed)
        and stands_on(amended.amendment, in_force)
        and holds_state(value, voting=voting)
    )


def check_amended(value: Value, previous: Value, in_force: InForce | None, *, voting: Voting = CONTRIBUTORS) -> None:
    """Raises RemoteError if `value` has an amendment that its round cannot have decided."""
    if not may_amend(value, previous, in_force, voting=voting):
        raise RemoteError(f"the amendment of round {value.round} is none that a quorum can have wanted")
