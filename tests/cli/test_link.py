"""`shoal link`, `shoal invite`, `shoal revoke` and `shoal run 'shoal:…'`, with real nodes where one is needed."""

from __future__ import annotations

import io
import stat
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer

from shoal.cli.joining import follow_link, read_link
from shoal.cli.link import LIFETIME_LIMIT_DAYS, ONE_MEMBER, parse_lifetime
from shoal.cli.main import execute
from shoal.cli.text import note
from shoal.node import doctor
from shoal.node.discovery.credentials import admission_of, kept_revocations
from shoal.node.doctor import Examination, TrialReport
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.invites import make_invite
from shoal.protocol.manifest import load_manifest, render_manifest, validate_manifest
from shoal.protocol.swarm_link import LinkInvite, SwarmLink, format_link, join_line, link_in, parse_link
from shoal.swarm import manifest_exchange
from shoal.swarm.rendezvous import mdns
from tests.node.lab import Node, Swarm, assert_one_line, manifest_of
from tests.swarm.rendezvous.test_mdns import LOOPBACK

NOWHERE = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.from_seed(bytes(32)).peer_id}"


def closed_swarm(folder: Path, workload: str = "regression") -> Path:
    """The manifest of a swarm by invite, whose founder's data folder is folder/node0."""
    keys = [Identity.load_or_create(folder / "node0" / f"{name}.key").peer_id for name in ("node", "authority")]
    tables = {
        "swarm": {"name": "test", "founders": keys[:1], "authority": keys[1], "admission": "invite"},
        "workload": {"name": workload, "options": {"inputs": 32, "outputs": 16}},
        "sync": {"inner_steps": 20},
        "round": {"chunk_values": 4096},
    }
    path = folder / "swarm.toml"
    path.write_text(render_manifest(validate_manifest(tables, source="the test's")))
    return path


def newcomer(swarm: Swarm, name: str, link: str) -> Node:
    """A node with nothing but a link, whose start is measured; the swarm ends it."""
    swarm.nodes.append(Node(swarm.workplace / name, Path(link), swarm.workplace, forked=False))
    return swarm.nodes[-1]


def printed_link(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[str, str]:
    """What a command prints: one line, a link; and what it says beside that."""
    capsys.readouterr()
    assert execute([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    link = link_in(out)
    assert link is not None
    return link, err


def test_link_of_a_running_node_is_all_that_another_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Swarm(tmp_path, nodes=1) as swarm:
        (founder,) = swarm.nodes
        founder.start()
        founder.certified(1)
        capsys.readouterr()
        assert execute(["link", "--data-dir", str(founder.folder)]) == 0
        out, said = capsys.readouterr()
        text = link_in(out)
        assert text is not None
        assert out == f"shoal run '{text}'\n"  # in a pipe too
        link = parse_link(text)
        assert (link.swarm, link.addresses, link.invite) == (swarm.manifest.swarm_id, (founder.address,), None)
        assert said == f"note: '{ONE_MEMBER}'\n"

        second = newcomer(swarm, "second", f"shoal run '{text}'")  # quoted as one
        began = time.time()
        second.start("--name", "guest")
        linked = second.wait("linked")
        started = second.wait("started")
        with capsys.disabled():
            print(f" linked {linked['at'] - began:.2f} s after the process began, {linked['at'] - started['at']:.2f} s")
        assert linked["peer"] == founder.peer_id
        assert linked["at"] - started["at"] < 3
        certified = second.wait("certified")
        assert founder.wait("linked")["called"] == second.wait("started")["called"] == "guest"
        assert f"{second.peer_id} (guest) is here" in founder.log
        assert founder.ask("status")["names"][second.peer_id] == "guest"
        assert founder.certified(certified["round"])["digest"] == certified["digest"]
        assert load_manifest(second.folder / "swarm.toml").swarm_id == swarm.manifest.swarm_id
        second.kill()
        second.start()
        assert second.wait("started", boot=2)["called"] == "guest", "the name stays with the data folder"


@pytest.mark.long
def test_invited_node_comes_in_until_its_invite_is_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Swarm(tmp_path, nodes=1) as swarm:
        path = closed_swarm(tmp_path)  # in the place of the open one
        (founder,) = swarm.nodes
        founder.start()
        founder.certified(1)
        at_founder = ("--data-dir", founder.folder)
        text, said = printed_link(capsys, "link", *at_founder)
        assert parse_link(text).invite is None
        assert "admits by invite: see `shoal invite`" in said

        text, said = printed_link(capsys, "invite", path, "--expires", "2h", *at_founder)
        link = parse_link(text)
        assert link.addresses == (founder.address,)
        assert link.invite is not None
        holder = link.invite.invite.holder
        assert f"`shoal revoke {path} {holder}` takes it back" in said
        guest = newcomer(swarm, "guest", text)
        guest.start()
        assert guest.wait("linked")["peer"] == founder.peer_id
        guest.wait("certified")
        assert stat.S_IMODE((guest.folder / "invite").stat().st_mode) == 0o600
        assert parse_link(printed_link(capsys, "link", "--data-dir", guest.folder)[0]).invite is not None

        assert execute(["revoke", str(path), holder, *map(str, at_founder)]) == 0
        assert capsys.readouterr().out == "revoked 1 peer; all members that are reached hear of it at once\n"
        assert founder.wait("revoked")["peer"] == guest.peer_id
        founder.wait("died", peer=guest.peer_id)
        revocations = kept_revocations(founder.folder, load_manifest(path))
        assert revocations is not None
        assert revocations.version == 1
        assert {holder} <= {*revocations.peers} <= {holder, guest.peer_id}  # it, if it took part in a round already
        assert guest.wait_exit() == 2  # it has the list, signed
        said = "the swarm's authority has revoked the invite that you came with; ask who runs the swarm"
        assert_one_line(guest.log, said)
        assert "refused" not in guest.log
        guest.start()
        assert guest.wait_exit() == 2
        assert_one_line(guest.log, said)


# -- without a node ------------------------------------------------------------------------------------------


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    return closed_swarm(tmp_path)


def invite(closed: Path, *arguments: str) -> int:
    return execute(["invite", str(closed), "--data-dir", str(closed.parent / "node0"), *arguments])


def test_invite_is_made_without_a_running_node_and_names_the_bootstrap_addresses(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guest = Identity.generate().peer_id
    assert invite(closed, "--for", guest, "--expires", "90m") == 0
    out, err = capsys.readouterr()
    link = parse_link(out.strip())
    assert link.addresses == ()
    assert "join with `shoal run LINK --join ADDRESS`" in err
    assert link.invite is not None
    assert (link.invite.invite.holder, link.invite.key) == (guest, None)
    assert abs(link.invite.invite.expires - (time.time() + 90 * 60)) < 60
    closed.write_text(closed.read_text().replace("bootstrap = []", f'bootstrap = ["{NOWHERE}"]'))
    assert invite(closed) == 0
    out, err = capsys.readouterr()
    assert parse_link(out.strip()).addresses == (NOWHERE,)
    assert "whoever has this link may join until" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--for", "12D3Koo"], "'12D3Koo' is not a PeerId; `shoal id` prints a node's"),
        (["--expires", "7 weeks"], "--expires: '7 weeks' is no time; write 90m, 12h or 7d, up to 3650d"),
        (["--expires", "0d"], "--expires: '0d' is no time"),
        (["--data-dir", "/no/such/folder"], "/no/such/folder/authority.key is not it; give the founder's --data-dir"),
    ],
)
def test_invite_refuses_in_one_line(
    closed: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert invite(closed, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_invite_to_an_open_swarm_says_what_suffices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text(render_manifest(manifest_of([Identity.generate().peer_id])))
    assert execute(["invite", str(path), "--data-dir", str(tmp_path)]) == 2
    assert "admission is open; `shoal link` is all it takes" in capsys.readouterr().err


def test_link_without_a_node_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["link", "--data-dir", str(tmp_path)]) == 1
    assert "no node is running on" in capsys.readouterr().err


def test_revocations_without_a_node_are_kept_and_grow(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, manifest = closed.parent / "node0", load_manifest(closed)
    peers = sorted(Identity.generate().peer_id for _ in range(2))
    for peer in (*peers, peers[0]):
        assert execute(["revoke", str(closed), peer, "--data-dir", str(folder)]) == 0
    assert "hear of it when this node runs" in capsys.readouterr().out
    revocations = kept_revocations(folder, manifest)
    assert revocations is not None
    assert (revocations.version, revocations.peers) == (2, tuple(peers))
    (folder / "revocations").write_bytes(b"\x80")
    assert kept_revocations(folder, manifest) is None
    assert execute(["revoke", str(closed), manifest.swarm.authority, "--data-dir", str(folder)]) == 2
    assert "the authority cannot revoke itself" in capsys.readouterr().err


@pytest.mark.parametrize("counted", [[], ["12D3gone"]])
def test_revoked_voter_whom_a_majority_takes_is_said_to_be_counted_until_it_is_forgotten(
    closed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    manifest = load_manifest(closed)
    link = format_link(SwarmLink(swarm=manifest.swarm_id, addresses=(NOWHERE,)))
    reply = {"link": link, "admits": False, "admission": "invite", "version": 1, "revoked": 1, "counted": counted}
    monkeypatch.setattr("shoal.cli.link.request", lambda *arguments, **settings: reply)
    peer = Identity.generate().peer_id
    assert execute(["revoke", str(closed), peer, "--data-dir", str(closed.parent / "node0")]) == 0
    out, err = capsys.readouterr()
    assert out == "revoked 1 peer; all members that are reached hear of it at once\n"
    assert ("until forgotten; to go on without: `shoal rebase --forget 12D3gone`" in err) == bool(counted)
    assert bool(err) == bool(counted)


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_note_that_is_pasted_in_a_shell_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    note("`touch ran`; $(touch ran) until 'now' & touch ran > ran # (see \"it\")")
    note(ONE_MEMBER)
    said = capsys.readouterr().err
    assert said.count("\n") == said.count("note: ") == 2
    subprocess.run([shell], input=said, cwd=tmp_path, text=True, capture_output=True, timeout=30, check=False)
    assert not list(tmp_path.iterdir())


# -- links that lead nowhere: what `shoal run` says ------------------------------------------------------------


def run_link(tmp_path: Path, link: SwarmLink, *arguments: str) -> int:
    return execute(["run", format_link(link), "--data-dir", str(tmp_path / "guest"), "--no-mdns", *arguments])


def told(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    (line,) = (line for line in err.splitlines() if line.startswith("shoal: "))
    assert "Traceback" not in err
    return line


def test_damaged_link_is_refused_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = format_link(SwarmLink(swarm=manifest_of([Identity.generate().peer_id]).swarm_id, addresses=(NOWHERE,)))
    assert execute(["run", text[:-1], "--data-dir", str(tmp_path / "guest")]) == 2
    assert "not a whole swarm link; copy again all that `shoal link` prints" in told(capsys)
    assert not (tmp_path / "guest").exists()


def test_link_to_members_that_are_gone_is_waited_for_and_says_what_to_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_exchange, "fetch_manifest", partial(manifest_exchange.fetch_manifest, deadline_s=1.0))
    monkeypatch.setattr(manifest_exchange, "TELL_AFTER_S", 0.1)
    monkeypatch.setattr(manifest_exchange, "FIRST_PAUSE_S", 0.2)
    link = SwarmLink(swarm=manifest_of([Identity.generate().peer_id]).swarm_id, addresses=(NOWHERE,))
    assert run_link(tmp_path, link) == 1
    err = capsys.readouterr().err
    asking, waiting, said = err.splitlines()
    assert asking.endswith(" info asking for the manifest whom the link names")
    assert "info no member that the link names has given the manifest yet; asking again" in waiting
    assert "no member that the link names or this network has gives the manifest; ask for a fresh" in said
    assert not (tmp_path / "guest").exists()


def test_link_comes_from_standard_input_where_no_other_user_sees_it(
    tmp_path: Path, closed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = kept_folder(tmp_path, closed)
    authority = Identity.load(closed.parent / "node0" / "authority.key")
    signed = make_invite(authority, link.swarm, holder=Identity.generate().peer_id, expires=2**33)
    bound = SwarmLink(swarm=link.swarm, addresses=link.addresses, invite=LinkInvite(invite=signed))
    note = "note: this swarm trains loops: join(model, optimizer, 'shoal:…') takes the link\n"
    for line in (format_link(bound), join_line(format_link(bound), "regression"), f"{note}{format_link(bound)}"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line + "\nand more\n"))
        assert execute(["run", "-", "--data-dir", str(tmp_path / "guest")]) == 2
        assert f"this link is for the node {signed.holder}, and this one is 12D3Koo" in told(capsys)


def test_line_on_standard_input_allows_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = kept_folder(tmp_path, closed_swarm(tmp_path, "os:system"))
    monkeypatch.setattr("sys.stdin", io.StringIO(join_line(format_link(link), "os:system")))
    assert execute(["run", "-", "--data-dir", str(tmp_path / "guest")]) == 2
    assert "names the code 'os:system'" in told(capsys)


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        ("text", "", ""),
        (
            "own-loop",
            "",
            "note: 'nodes of this swarm train loops of their own: join(model, optimizer, LINK) takes the link'",
        ),
        ("sine:Sine", " --allow-workload sine:Sine", "note: 'this swarm trains sine:Sine; whoever joins has to have"),
    ],
)
def test_line_says_what_code_the_swarm_trains(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    workload: str,
    options: str,
    said: str,
) -> None:
    text = format_link(SwarmLink(swarm=manifest_of([Identity.generate().peer_id]).swarm_id, addresses=(NOWHERE,)))
    reply = {"link": text, "admits": True, "admission": "open", "workload": workload}
    monkeypatch.setattr("shoal.cli.link.request", lambda *arguments, **settings: reply)
    assert execute(["link", "--data-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"shoal run '{text}'{options}\n"
    *of_code, of_members = err.splitlines()
    assert "".join(of_code).startswith(said)
    assert bool(of_code) is bool(said)
    assert of_members == f"note: '{ONE_MEMBER}'"


def test_line_of_a_node_with_data_of_its_users_asks_for_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = format_link(SwarmLink(swarm=manifest_of([Identity.generate().peer_id]).swarm_id, addresses=(NOWHERE,)))
    reply = {"link": text, "admits": True, "admission": "open", "workload": "text", "data": True}
    monkeypatch.setattr("shoal.cli.link.request", lambda *arguments, **settings: reply)
    assert execute(["link", "--data-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"shoal run '{text}' --data YOUR_TEXT\n"
    assert err.startswith("note: 'this node trains on data that --data names; whoever joins needs a copy")


@pytest.mark.parametrize("given", [b"", b"\n", b"swarm.toml\n", b"\xff\n", b"x" * (1 << 20)])
def test_what_is_no_link_on_standard_input_is_refused(given: bytes) -> None:
    source = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
    with pytest.raises(
        ConfigError, match="no link on standard input; give it as `shoal invite` or `shoal link` prints"
    ):
        read_link(source)


def kept_folder(tmp_path: Path, closed: Path) -> SwarmLink:
    """A guest's folder that has the manifest of the closed swarm, and the link to that, without an invite."""
    manifest = load_manifest(closed)
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest" / "swarm").write_text(manifest.swarm_id.hex())
    (tmp_path / "guest" / "swarm.toml").write_text(render_manifest(manifest))
    return SwarmLink(swarm=manifest.swarm_id, addresses=(NOWHERE,))


def test_doctor_takes_a_link_and_looks_at_its_swarm(
    tmp_path: Path, closed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, key = kept_folder(tmp_path, closed), Identity.generate()
    signed = make_invite(key, plain.swarm, holder=key.peer_id, bearer=True, expires=2**33)
    link, examined = format_link(replace(plain, invite=LinkInvite(invite=signed, key=key))), list[Examination]()
    monkeypatch.setattr("shoal.node.doctor.examine", lambda wanted: examined.append(wanted) or iter(()))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{link}\n"))
    for given in (link, f"shoal run '{link}'", "-"):
        assert execute(["doctor", given, "--data-dir", str(tmp_path / "guest")]) == 0
    assert [wanted.fetch and wanted.fetch().swarm_id for wanted in examined] == [plain.swarm] * 3
    assert [wanted.invite and wanted.invite.invite for wanted in examined] == [signed] * 3
    assert execute(["doctor", link[:-1], "--data-dir", str(tmp_path / "guest")]) == 2
    assert "not a whole swarm link" in told(capsys)


def test_doctor_looks_at_the_machine_all_the_same_where_no_member_gives_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.doctor.FETCH_DEADLINE_S", 1.0)
    monkeypatch.setattr(manifest_exchange, "TELL_AFTER_S", 0.1)
    monkeypatch.setattr(manifest_exchange, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(mdns, "LocalDiscovery", partial(mdns.LocalDiscovery, interfaces=LOOPBACK))
    monkeypatch.setattr("shoal.cli.doctor._lane_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(doctor, "run_trial", lambda wanted, deadline_s: TrialReport(device="cpu", torch="2"))
    monkeypatch.setattr(doctor, "_nvidia", lambda: "")
    told, echo = list[str](), typer.echo
    monkeypatch.setattr("typer.echo", lambda text, err=False: told.append(text) or echo(text, err=err))
    link = SwarmLink(swarm=manifest_of([Identity.generate().peer_id]).swarm_id, addresses=(NOWHERE,))
    assert execute(["doctor", format_link(link), "--data-dir", str(tmp_path / "guest")]) == 1
    out, err = capsys.readouterr()
    asking, waiting = err.splitlines()
    assert asking == "asking for the manifest whom the link names, and the local network"
    assert "asking again, for 1 s in all. Tried: " in waiting
    names = [line[6:].partition(":")[0] for line in out.splitlines() if line[:4] in ("ok  ", "FAIL")]
    before, after = ["node", "ports", "dial-back", "key", "data folder"], ["disk speed", "lane", "device", "disk space"]
    assert names[5:] == [*before, "manifest", *after, "memory"]
    at = told.index(asking)
    assert [told[at - 1][:17], told[at + 1], told[at + 2][:14]] == ["ok    data folder", waiting, "FAIL  manifest"]
    assert "FAIL  manifest: no member that the link names or this network has gives the manifest\n" in out
    assert "      → ask for a fresh link (`shoal link` at a member), or check the network: " in out
    assert out.endswith(f"1 of {len(names)} checks failed\n")
    assert not (tmp_path / "guest").exists()


def test_link_for_another_node_or_another_swarm_is_refused(
    tmp_path: Path, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = kept_folder(tmp_path, closed)
    authority = Identity.load(closed.parent / "node0" / "authority.key")
    signed = make_invite(authority, link.swarm, holder=Identity.generate().peer_id, expires=2**33)
    bound = SwarmLink(swarm=link.swarm, addresses=link.addresses, invite=LinkInvite(invite=signed))
    assert run_link(tmp_path, bound) == 2
    assert f"this link is for the node {signed.holder}, and this one is 12D3Koo" in told(capsys)
    assert not (tmp_path / "guest" / "invite").exists()

    (tmp_path / "guest" / "chain.log").write_bytes(b"a certificate")
    elsewhere = SwarmLink(swarm=manifest_of([signed.holder]).swarm_id, addresses=link.addresses)
    assert run_link(tmp_path, elsewhere) == 2
    assert told(capsys).endswith("in which it has rounds; choose another --data-dir")


def test_node_without_an_invite_that_holds_does_not_start(tmp_path: Path, closed: Path) -> None:
    link, key, folder = kept_folder(tmp_path, closed), Identity.generate(), tmp_path / "guest"
    manifest, guest = load_manifest(closed), Identity.load_or_create(folder / "node.key").peer_id
    with pytest.raises(ConfigError, match=f"this swarm admits by invite and {guest} has none; ask who runs it"):
        admission_of(folder, manifest, guest)
    signed = make_invite(Identity.generate(), link.swarm, holder=key.peer_id, bearer=True, expires=2**33)
    forged = format_link(
        SwarmLink(swarm=link.swarm, addresses=link.addresses, invite=LinkInvite(invite=signed, key=key))
    )
    followed = follow_link(forged, data_dir=folder, join=(), entry_points=("regression",), allowed=())
    assert followed == (manifest, (NOWHERE,))
    with pytest.raises(ConfigError, match="your invite was not signed for this swarm by its authority"):
        admission_of(folder, manifest, guest)
    (folder / "invite").write_text("shoal:damaged")
    with pytest.raises(ConfigError, match="is damaged; start again from the link that you were given"):
        admission_of(folder, manifest, guest)
    assert admission_of(folder, manifest, manifest.swarm.founders[0]).credential is None


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("poetry", "install the Python package that has 'poetry' in its entry-point group shoal.workloads"),
        ("os:system", "names the code 'os:system'; if you have it and trust it, pass --allow-workload os:system"),
    ],
)
def test_workload_of_a_link_that_is_not_installed_is_named_and_never_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workload: str, said: str
) -> None:
    link = kept_folder(tmp_path, closed_swarm(tmp_path, workload))
    assert run_link(tmp_path, link) == 2
    assert said in told(capsys)


@pytest.mark.parametrize(("text", "seconds"), [("1m", 60), ("12h", 43_200), ("7d", 604_800), ("3650d", 315_360_000)])
def test_lifetime_in_seconds(text: str, seconds: int) -> None:
    assert parse_lifetime(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1.5h", f"{LIFETIME_LIMIT_DAYS + 1}d", "٧d", "7dd"])
def test_what_is_no_lifetime(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        parse_lifetime(text)
