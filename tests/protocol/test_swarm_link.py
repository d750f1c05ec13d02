"""The swarm link: what it holds comes out again, in one spelling, and no damaged one is taken for a link."""

from __future__ import annotations

import base64
import random
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import ConfigError
from shoal.protocol.forks import Checkpoint
from shoal.protocol.identity import Identity
from shoal.protocol.invites import EXPIRY_LIMIT_S, make_invite, reason_not_valid
from shoal.protocol.messages import Term, domain_hash
from shoal.protocol.swarm_link import (
    ADDRESSES_LIMIT,
    LINE_LIMIT_CHARS,
    LINK_LIMIT_CHARS,
    PEERS_LIMIT,
    LinkInvite,
    SwarmLink,
    format_link,
    is_link,
    join_line,
    link_in,
    parse_link,
)
from shoal.protocol.wire import SwarmId

SWARM = SwarmId(bytes(range(32)))
AUTHORITY, GUEST, BEARER, *PEERS = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 10))
A, B = (identity.peer_id for identity in PEERS[:2])
ADDRESSES = (
    f"/ip4/192.0.2.7/tcp/4001/p2p/{A}",
    f"/ip6/2001:db8::7/tcp/65535/p2p/{A}",
    f"/dns/node.example.org/tcp/1/p2p/{B}",
)
BOUND = LinkInvite(invite=make_invite(AUTHORITY, SWARM, holder=GUEST.peer_id, expires=EXPIRY_LIMIT_S))
BORNE = LinkInvite(
    invite=make_invite(AUTHORITY, SWARM, holder=BEARER.peer_id, bearer=True, expires=1_800_000_000), key=BEARER
)
TEXTS = [format_link(SwarmLink(swarm=SWARM, addresses=ADDRESSES, invite=invite)) for invite in (None, BOUND, BORNE)]

hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str).filter(lambda host: "%" not in host),
    st.from_regex(r"[a-z][a-z0-9-]{0,62}(\.[a-z][a-z0-9-]{0,20}){0,3}", fullmatch=True),
)


def kind_of(host: str) -> str:
    return "ip6" if ":" in host else "ip4" if host.replace(".", "").isdigit() else "dns"


@pytest.mark.parametrize(("invite", "text"), [(None, TEXTS[0]), (BOUND, TEXTS[1]), (BORNE, TEXTS[2])])
def test_link_comes_out_as_it_went_in(invite: LinkInvite | None, text: str) -> None:
    link = parse_link(text)
    assert (link.swarm, link.addresses) == (SWARM, ADDRESSES)
    if invite is None:
        assert link.invite is None
        return
    assert link.invite is not None
    assert link.invite.invite == invite.invite
    for bearer in (link.invite, invite):
        credential = bearer.credential(SWARM, GUEST.peer_id)
        reason = reason_not_valid(credential, peer=GUEST.peer_id, swarm=SWARM, authority=AUTHORITY.peer_id)
        assert reason is None


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(hosts, st.integers(1, 65535), st.sampled_from(PEERS[:PEERS_LIMIT])), max_size=10))
def test_any_addresses_survive(found: list[tuple[str, int, Identity]]) -> None:
    texts = [f"/{kind_of(host)}/{host}/tcp/{port}/p2p/{who.peer_id}" for host, port, who in found]
    link = parse_link(format_link(SwarmLink(swarm=SWARM, addresses=tuple(texts))))
    expected = []
    for peer in dict.fromkeys(who.peer_id for *_, who in found):
        expected += list(dict.fromkeys(text for text in texts if text.endswith(peer)))[:ADDRESSES_LIMIT]
    assert list(link.addresses) == expected


def test_link_is_short_and_needs_no_quotes_in_a_shell() -> None:
    assert [len(text) for text in TEXTS] == [208, 342, 342]
    for text in TEXTS:
        assert is_link(text)
        assert set(text.removeprefix("shoal:")) <= set(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
        )


def test_link_takes_as_many_addresses_as_it_has_room_for() -> None:
    addresses = tuple(f"/ip4/192.0.2.{n}/tcp/4001/p2p/{who.peer_id}" for who in PEERS for n in range(1, 7))
    kept = parse_link(format_link(SwarmLink(swarm=SWARM, addresses=addresses))).addresses
    assert len(kept) == PEERS_LIMIT * ADDRESSES_LIMIT
    assert kept == tuple(a for a in addresses if a in kept)


@pytest.mark.parametrize("invite", [None, BOUND, BORNE])
def test_link_stays_whole_whatever_long_names_others_give_themselves(invite: LinkInvite | None) -> None:
    longest = ".".join(["n" * 63] * 3 + ["n" * 59])
    others = [f"/dns/{longest}{n}/tcp/1/p2p/{peer.peer_id}" for peer in PEERS[1:] for n in range(10, 14)]
    checkpoint = Checkpoint(term=Term(0, 0), round=7, value=bytes(32))
    link = SwarmLink(swarm=SWARM, addresses=(ADDRESSES[0], *others), invite=invite, checkpoint=checkpoint)
    text = format_link(link)
    assert LINK_LIMIT_CHARS - 400 < len(text) <= LINK_LIMIT_CHARS
    found = parse_link(text)
    assert found.checkpoint == checkpoint
    assert (found.invite and found.invite.invite) == (invite and invite.invite)
    assert found.addresses == link.addresses[: len(found.addresses)]


def test_invite_for_one_node_is_of_no_use_to_another() -> None:
    with pytest.raises(ConfigError, match=f"this link is for the node {GUEST.peer_id}, and this one is {A}"):
        BOUND.credential(SWARM, A)


def damaged(original: str, rng: random.Random) -> str:
    text = list(original)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        how = rng.choice(["change", "cut", "insert", "swap"])
        if how == "change":
            text[at] = rng.choice("ABCxyz019-_=/+ \n\x00é")
        elif how == "cut":
            del text[at : at + rng.randint(1, 12)]
        elif how == "insert":
            text[at:at] = rng.choice(["A", "=", "==", " ", "\n", "shoal:", "AAAA"])
        else:
            text[at], text[at - 1] = text[at - 1], text[at]
    return "".join(text)


def test_none_of_a_thousand_damaged_links_is_accepted() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        original = rng.choice(TEXTS)
        text = damaged(original, rng)
        if text == original:
            continue  # it was damaged into itself
        with pytest.raises(ConfigError) as caught:
            parse_link(text)
        assert str(caught.value) == "this is not a whole swarm link; copy again all that `shoal link` prints"


def checked(body: bytes) -> str:
    """A link whose check holds, whatever is in it."""
    return "shoal:" + base64.urlsafe_b64encode(body + domain_hash("link", body)[:4]).decode().rstrip("=")


def body_of(text: str) -> bytes:
    encoded = text.removeprefix("shoal:")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))[:-4]


def test_only_the_one_spelling_counts_even_where_the_check_holds() -> None:
    body = body_of(TEXTS[0])
    assert parse_link(checked(body)).addresses == ADDRESSES
    key = body[34:66]
    again = bytes([2]) + (key + bytes([1, 4, 192, 0, 2, 7, 15, 161])) * 2  # one peer named twice
    as_name = bytes([1]) + key + bytes([1, 0, 9]) + b"192.0.2.7" + bytes([15, 161])
    for peers in (again, as_name):
        with pytest.raises(ConfigError, match="not a whole swarm link"):
            parse_link(checked(body[:33] + peers + b"\x00"))
    with pytest.raises(ConfigError, match="not a whole swarm link"):
        parse_link(checked(body + b"\x00"))


@pytest.mark.parametrize("host", [b"a b", b"..", b"a/../b", b"\x1b[31m", b""])
def test_name_that_is_none_is_refused(host: bytes) -> None:
    body = body_of(TEXTS[0])
    made = body[:33] + bytes([1]) + body[34:66] + bytes([1, 0, len(host)]) + host + bytes([15, 161, 0])
    with pytest.raises(ConfigError):
        parse_link(checked(made))


def test_link_of_a_later_version_says_so() -> None:
    with pytest.raises(ConfigError, match="a link of version 3; this Shoal reads version 2, install a newer one"):
        parse_link(checked(b"\x03" + body_of(TEXTS[0])[1:]))


# -- checkpoints ---------------------------------------------------------------------------------------------

CHECKPOINT = Checkpoint(term=Term(3, 2**63 - 1), round=77, value=bytes(range(32)))


@pytest.mark.parametrize("invite", [None, BOUND, BORNE])
def test_checkpoint_comes_out_as_it_went_in_and_one_without_is_as_links_were_before(invite: LinkInvite | None) -> None:
    link = SwarmLink(swarm=SWARM, addresses=ADDRESSES, invite=invite, checkpoint=CHECKPOINT)
    text = format_link(link)
    assert parse_link(text).checkpoint == CHECKPOINT
    assert body_of(text)[0] == 2
    without = format_link(SwarmLink(swarm=SWARM, addresses=ADDRESSES, invite=invite))
    assert parse_link(without).checkpoint is None
    assert body_of(without)[0] == 1
    assert body_of(text)[1 : len(body_of(without))] == body_of(without)[1:]
    assert len(text) - len(without) <= 76
    assert len(text.split()) == 1


def test_link_whose_checkpoint_is_cut_short_or_beyond_all_rounds_is_refused() -> None:
    body = body_of(format_link(SwarmLink(swarm=SWARM, checkpoint=CHECKPOINT)))
    for damaged in (body[:-1], body + b"\0", body[: -32 - 8] + b"\xff" * 8 + body[-32:]):
        with pytest.raises(ConfigError, match="not a whole swarm link"):
            parse_link(checked(damaged))


@pytest.mark.parametrize("text", ["", "shoal:", "shoal:AAAA", "swarm.toml", "shoal:" + "A" * LINK_LIMIT_CHARS])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a whole swarm link"):
        parse_link(text)


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=300))
def test_noise_whose_check_holds_is_a_link_or_a_config_error(noise: bytes) -> None:
    text = checked(b"\x01" + SWARM + noise)
    try:
        assert format_link(parse_link(text)) == text
    except ConfigError:
        return


LINK = format_link(SwarmLink(swarm=SwarmId(bytes(32))))


@pytest.mark.parametrize("workload", ["text", "sine:Sine", "zwölf.Übung:Größe", "it's; rm -rf:~ $(x)"])
@pytest.mark.parametrize("data", [False, True])
def test_line_is_one_command_for_a_shell_and_gives_its_link_back(workload: str, data: bool) -> None:
    line = join_line(LINK, workload, data=data)
    allowed = ["--allow-workload", workload] if ":" in workload else []
    assert shlex.split(line) == ["shoal", "run", LINK, *allowed, *(["--data", "YOUR_TEXT"] if data else [])]
    assert line.startswith(f"shoal run '{LINK}'")
    assert link_in(line) == link_in(f"  {line}\n") == LINK


@pytest.mark.parametrize(
    ("text", "link"),
    [
        (LINK, LINK),
        (f"{LINK}\n", LINK),
        ("shoal:damaged", "shoal:damaged"),  # a link was meant
        (f"shoal run --data-dir two {LINK}", LINK),
        (LINK.removeprefix("shoal:"), LINK),  # copied without what stands before it; its check tells
        (LINK.removeprefix("shoal:")[:-1], None),
        ("swarm.toml", None),
        (f"cat {LINK}", LINK),
        (
            f"note: this swarm trains loops: join(model, optimizer, 'shoal:…') takes the link\nshoal run '{LINK}'\n",
            LINK,
        ),
        (f"shoal:cut {LINK}", LINK),  # whole comes before damaged
        (f"{LINK} shoal:cut", LINK),
        (f"shoal run '{LINK[:-1]}'", LINK[:-1]),
        ("folder/shoal:thing.toml", None),
        (f"folder/{LINK}", None),
        ("shoal run swarm.toml", None),
        ("shoal run 'shoal:", None),
        ("", None),
        ("shoal run " + "x" * LINE_LIMIT_CHARS + f" {LINK}", LINK),
    ],
)
def test_link_is_found_in_what_was_copied_with_it(text: str, link: str | None) -> None:
    assert link_in(text) == link
